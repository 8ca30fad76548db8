"""The thread that owns an agent: all jobs that wait come before the crank."""

from __future__ import annotations

import threading

from tests_support import WAIT_S

from kvflow.transport.thread import OwnerThread


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
