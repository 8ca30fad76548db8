"""The pool of numbered buffers: first come, first served, and what cancelling leaves behind."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvflow.runtime.memory.pool import Pool


async def test_who_is_cancelled_in_the_turn_in_which_numbers_come_back_gives_its_place_up() -> None:
    """The future of a cancelled waiter is done at once, its task runs a turn later; numbers may come back between."""
    pool = Pool(1)
    taken = await pool.take(1)
    first, second = asyncio.create_task(pool.take(1)), asyncio.create_task(pool.take(1))
    await asyncio.sleep(0)
    first.cancel()
    pool.give_back(taken)
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await second).tolist() == taken.tolist()
    assert pool.used == 1


async def test_numbers_granted_to_who_is_cancelled_meanwhile_come_back() -> None:
    pool = Pool(1)
    taken = await pool.take(1)
    waiting = asyncio.create_task(pool.take(1))
    await asyncio.sleep(0)
    pool.give_back(taken)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool.used == 0


async def test_who_waits_is_served_in_order() -> None:
    pool = Pool(3)
    first, rest = await pool.take(1), await pool.take(2)
    large, small = asyncio.create_task(pool.take(2)), asyncio.create_task(pool.take(1))
    await asyncio.sleep(0)
    pool.give_back(first)
    await asyncio.sleep(0)
    assert not small.done(), "passed one who came before"
    assert pool.take_nowait(1) is None
    pool.give_back(rest)
    got = np.concatenate(await asyncio.gather(large, small))
    assert sorted(got.tolist()) == [0, 1, 2]
