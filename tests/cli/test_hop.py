"""The thread of contender (d): it runs jobs in order, off the loop, and hands their errors back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvflow.cli.bench.hop import HopThread


@pytest.fixture
async def thread() -> HopThread:
    return HopThread()


async def test_jobs_run_in_order_on_one_other_thread(thread: HopThread) -> None:
    ran: list[tuple[int, int]] = []
    await asyncio.gather(*(thread.call(lambda i=i: ran.append((i, threading.get_ident()))) for i in range(3)))
    thread.close()
    assert [index for index, _ in ran] == [0, 1, 2]
    assert len({ident for _, ident in ran} | {threading.get_ident()}) == 2


async def test_an_error_is_raised_where_the_job_was_handed_over_and_ends_nothing(thread: HopThread) -> None:
    ran: list[str] = []
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 // 0)
    await thread.call(lambda: ran.append("after"))
    thread.close()
    assert ran == ["after"]
