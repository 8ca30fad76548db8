"""The thread of agents, copies and files: all jobs that wait run before the next step, and wake it once."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest
from tests_support import WAIT_S, until

from kvflow.errors import TransportBroken
from kvflow.transport.owner_thread import OwnerThread


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(WAIT_S)


async def test_jobs_that_wait_are_all_done_before_the_next_step() -> None:
    """A step may start work of milliseconds, so it has to know the jobs that go first."""
    log: list[str] = []
    gate, ending = threading.Event(), threading.Event()

    def step() -> float | None:
        log.append("step")
        return None if ending.is_set() else WAIT_S

    thread = OwnerThread("kvflow-test", step, lambda cause: None)
    thread.submit(lambda: log.append("gate") if gate.wait(WAIT_S) else None)
    for name in ("first", "second"):
        thread.submit(lambda name=name: log.append(name))  # type: ignore[misc]
    thread.submit(ending.set)
    gate.set()
    await thread.ended()
    assert log == ["step", "gate", "first", "second", "step"]


async def test_it_is_woken_once_for_all_jobs_that_wait() -> None:
    """Waking it costs the loop a system call, and the thread a wait for Python's lock."""
    running, gate, ending = (threading.Event() for _ in range(3))
    steps: list[int] = []
    done: list[int] = []

    def step() -> float | None:
        steps.append(len(done))
        return None if ending.is_set() else WAIT_S

    def hold() -> None:
        running.set()
        assert_set(gate)

    thread = OwnerThread("kvflow-test", step, lambda cause: None)
    thread.submit(hold)
    assert running.wait(WAIT_S)
    assert not thread.has_jobs()
    for index in range(100):
        thread.submit(lambda index=index: done.append(index))  # type: ignore[misc]
    assert thread.has_jobs()
    gate.set()
    await thread.call(lambda: None)
    ending.set()
    thread.submit(lambda: None)
    await thread.ended()
    assert done == list(range(100))
    assert set(steps) == {0, 100}, "no step between them"


async def test_a_job_that_may_wait_wakes_a_thread_only_if_it_would_sleep_longer() -> None:
    """And a thread that is about to sleep does the job first."""
    ending = threading.Event()
    done: list[str] = []
    thread = OwnerThread("kvflow-test", lambda: None if ending.is_set() else WAIT_S, lambda cause: None)
    await thread.call(lambda: None)
    await until(lambda: thread._wakes_at_s > 0)
    thread.submit(lambda: done.append("may wait"), within_s=2 * WAIT_S)
    assert thread._wakes.empty()
    await thread.call(lambda: done.append("woken"))
    assert done == ["may wait", "woken"]
    await until(lambda: thread._wakes_at_s > 0)
    thread.submit(lambda: done.append("sooner"), within_s=1e-3)
    await until(lambda: len(done) == 3)
    running, gate = threading.Event(), threading.Event()
    thread.submit(running.set)
    thread.submit(lambda: assert_set(gate))
    assert running.wait(WAIT_S)
    thread.submit(lambda: done.append("before it sleeps"), within_s=1e-3)
    assert thread._wakes.empty()
    gate.set()
    await until(lambda: len(done) == 4)
    thread.submit(ending.set)
    await thread.ended()


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
