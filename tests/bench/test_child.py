"""Processes of the bench: steps have results, a child that fails or dies is reported, and none outlives its parent."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_ranks import Rank, open_never, open_rank
from tests_support import until

from kvflow.bench.child import BenchError, Child, RankProcess, open_children
from tests.bench.busy import busy_ranks, open_busy
from tests.bench.scenario import SpinningRank, open_ranks, resumed


@pytest.fixture(scope="module")
def children() -> None:
    """Here they are spawned, as outside of tests."""


@contextlib.contextmanager
def started() -> Iterator[Child]:
    with open_children([RankProcess("child", open_rank)], {"GIVEN": "value", "HOME": None}) as children:
        yield children["child"]


def process_state(pid: int) -> str:
    """R, S, T (stopped), Z (dead, not collected), or nothing for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def wait_for_state(pid: int, states: str) -> str:
    end = time.monotonic() + 60
    while (state := process_state(pid)) and state not in states and time.monotonic() < end:
        time.sleep(0.01)
    return state


def test_steps_have_results() -> None:
    with started() as child:
        assert child.run(Rank.add, 1, other=2) == 3
        answer = child.start(Rank.add, 3, other=4)
        assert child.answers_within(60)
        assert answer() == 7
        assert not child.answers_within(0)
        assert child.run(Rank.variable, "GIVEN") == "value"
        assert child.run(Rank.variable, "HOME") is None
        with pytest.raises(BenchError, match=r"(?s)child: Traceback.*ZeroDivisionError: as it was told to"):
            child.run(Rank.fail)
        with pytest.raises(BenchError, match=r"child: died .*add"):
            child.run(Rank.add, 1, other=2)
        assert "HOME" in os.environ


def test_a_rank_that_cannot_be_set_up_is_an_error() -> None:
    never = RankProcess("never", open_never)
    with pytest.raises(BenchError, match=r"(?s)never: .*ZeroDivisionError"), open_children([never], {}):
        pass


def test_a_child_that_dies_is_an_error() -> None:
    with started() as child, pytest.raises(BenchError, match="child: died in die, exit code 3"):
        child.run(Rank.die)


def test_a_rank_that_spins_is_stopped_between_its_turns_and_ends_all_the_same() -> None:
    with open_ranks([SpinningRank("child", open_rank)], {}) as children:
        child = children["child"]
        assert wait_for_state(child.pid, "T") == "T"
        with resumed([child]):
            assert child.run(Rank.add, 1, other=2) == 3
        assert wait_for_state(child.pid, "T") == "T"
    assert process_state(child.pid) == ""


def test_ranks_that_spin_rest_until_the_others_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[tuple[str, str]] = []
    close = Child.close

    def watched(child: Child) -> None:
        closed.append((child.rank.name, wait_for_state(spinning, "T" if child.pid == calm else "S")))
        close(child)

    monkeypatch.setattr(Child, "close", watched)
    ranks = [RankProcess("calm", open_rank), SpinningRank("spinning", open_rank)]
    with open_ranks(ranks, {}) as children:
        calm, spinning = (children[rank.name].pid for rank in ranks)
    assert closed == [("calm", "T"), ("spinning", "S")]


PARENT_THAT_DIES = """
import os
import signal
from bench_ranks import open_rank
from kvflow.bench.child import Child, RankProcess

if __name__ == "__main__":
    child = Child(RankProcess("child", open_rank), {})
    child.wait_ready()
    os.kill(child.pid, signal.SIGSTOP)
    print(child.pid, flush=True)
    os._exit(0)
"""


def test_a_stopped_child_dies_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT_THAT_DIES, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=240, env=environment
    )
    assert wait_for_state(int(done.stdout), "Z") in ("", "Z")


async def test_a_busy_process_computes_until_it_is_told_to_end() -> None:
    async with open_busy() as thread:
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        await until(lambda: time.clock_gettime(clock) > 0.02)
    assert not thread.is_alive()
    assert [rank.name for rank in busy_ranks(2)] == ["busy 0", "busy 1"]
