"""Processes of the bench: a child that fails or dies is reported, and none outlives its parent."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from operator import methodcaller
from pathlib import Path

import pytest

from kvflow.cli.bench.children import BenchError, Body, Child, Pair
from kvflow.cli.bench.messages import Done, Offered, Quit

SEND_DONE = methodcaller("send", Done())
WAIT_FOR_A_MESSAGE = methodcaller("recv")


@contextlib.contextmanager
def started(body: Body) -> Iterator[Child]:
    with contextlib.closing(Child("child", body, {})) as child:
        yield child


def process_state(pid: int) -> str:
    """R, S, T (stopped), Z (dead, not collected), or nothing for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def wait_for_state(pid: int, states: str) -> str:
    end = time.monotonic() + 10
    while (state := process_state(pid)) and state not in states and time.monotonic() < end:
        time.sleep(0.01)
    return state


def test_a_message_arrives() -> None:
    with started(SEND_DONE) as child:
        assert child.receive(Done) == Done()


def test_a_failure_arrives_with_its_traceback() -> None:
    with started(math.sqrt) as child, pytest.raises(BenchError, match=r"(?s)child: Traceback.*TypeError"):  # type: ignore[arg-type]
        child.receive(Done)


def test_an_unexpected_message_is_an_error() -> None:
    with started(SEND_DONE) as child, pytest.raises(BenchError, match="expected Offered, got Done"):
        child.receive(Offered)


def test_a_dead_child_is_an_error() -> None:
    with started(SEND_DONE) as child:
        child.receive(Done)
        with pytest.raises(BenchError, match="died, exit code 0"):
            child.receive(Done)


def test_closing_ends_the_process_even_if_it_is_stopped() -> None:
    with started(WAIT_FOR_A_MESSAGE) as child:
        pid = child.pid
        child.signal(signal.SIGSTOP)
        assert wait_for_state(pid, "T") == "T"
    assert process_state(pid) == ""


def test_a_pair_that_spins_sleeps_between_its_turns() -> None:
    with started(WAIT_FOR_A_MESSAGE) as producer, started(WAIT_FOR_A_MESSAGE) as reader:
        pair = Pair(producer, reader, spins=True)
        with pair.awake():
            assert wait_for_state(reader.pid, "S") == "S"
        assert [wait_for_state(child.pid, "T") for child in (producer, reader)] == ["T", "T"]
        pair.wake()
        assert [wait_for_state(child.pid, "S") for child in (producer, reader)] == ["S", "S"]


PARENT_THAT_DIES = """
import os, signal
from kvflow.cli.bench.children import Child
from kvflow.cli.bench.messages import Done

def body(pipe):
    pipe.send(Done())
    pipe.recv()

if __name__ == "__main__":
    child = Child("child", body, {})
    child.receive(Done)
    child.signal(signal.SIGSTOP)
    print(child.pid, flush=True)
    os._exit(0)
"""


def test_a_stopped_child_dies_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT_THAT_DIES, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    assert wait_for_state(int(done.stdout), "Z") in ("", "Z")


def test_quit_is_a_message_like_any_other() -> None:
    with started(WAIT_FOR_A_MESSAGE) as child, pytest.raises(BenchError, match="died, exit code 0"):
        child.ask(Quit(), Done)
