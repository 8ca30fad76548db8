"""The thread of agents, copies and files: all jobs that wait come before the crank, and it is woken once for them."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest
from tests_support import WAIT_S

from kvflow.errors import TransportBroken
from kvflow.transport.owner_thread import OwnerThread


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(WAIT_S)


async def test_jobs_that_wait_are_all_done_before_the_crank_turns() -> None:
    """The crank may start something that takes milliseconds; what is to go first must be known by then."""
    log: list[str] = []
    gate, ending = threading.Event(), threading.Event()

    def crank() -> float | None:
        log.append("crank")
        return None if ending.is_set() else WAIT_S

    thread = OwnerThread("kvflow-test", crank, lambda cause: None)
    thread.submit(lambda: log.append("gate") if gate.wait(WAIT_S) else None)
    for name in ("first", "second"):
        thread.submit(lambda name=name: log.append(name))  # type: ignore[misc]
    thread.submit(ending.set)
    gate.set()
    await thread.ended()
    assert log == ["crank", "gate", "first", "second", "crank"]


async def test_it_is_woken_once_for_all_jobs_that_wait() -> None:
    """Waking it costs the loop a system call, and the thread a wait for Python's lock."""
    running, gate, ending = (threading.Event() for _ in range(3))
    cranks: list[int] = []
    done: list[int] = []

    def crank() -> float | None:
        cranks.append(len(done))
        return None if ending.is_set() else WAIT_S

    def hold() -> None:
        running.set()
        assert_set(gate)

    thread = OwnerThread("kvflow-test", crank, lambda cause: None)
    thread.submit(hold)
    assert running.wait(WAIT_S)
    assert not thread.called()
    for index in range(100):
        thread.submit(lambda index=index: done.append(index))  # type: ignore[misc]
    assert thread.called()
    gate.set()
    await thread.call(lambda: None)
    ending.set()
    thread.submit(lambda: None)
    await thread.ended()
    assert done == list(range(100))
    assert set(cranks) == {0, 100}, "no crank between them"


async def test_who_waits_for_a_thread_that_dies_is_told_why() -> None:
    causes: list[BaseException] = []
    gate = threading.Event()
    thread = OwnerThread("kvflow-test", lambda: WAIT_S, causes.append)
    thread.submit(lambda: assert_set(gate))
    thread.submit(lambda: sys.exit("no more"))
    waiting = asyncio.ensure_future(thread.call(lambda: None))
    await asyncio.sleep(0)
    gate.set()
    await thread.ended()
    for late in (waiting, thread.call(lambda: None)):
        with pytest.raises(TransportBroken, match="ended") as caught:
            await late
        assert caught.value.__cause__ is causes[0]
    assert [str(cause) for cause in causes] == ["no more"]
    assert not thread.alive
