"""Parameters that are used late, over real NIXL: reported bytes are right; a stock reader accepts any bytes."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from stock_engines import LAYERS, TOKENS, StockConsumer, StockProducer, stock_producer, value_of
from tests_support import until

from kvflow.errors import LeaseExpired
from kvflow.stock import Arrival, Terms, arrival
from kvflow.stock.params import read_stock_params
from tests.stock.test_reading import PEERS, Reader, reader

TRIES = 200
LEASE_S = 2.0
OTHERS = -1.0


class Forgetful:
    """A producer that gives a prompt's blocks to another one as soon as their lease is over, as one under load does."""

    def __init__(self, producer: StockProducer) -> None:
        self._producer = producer
        self._ends: dict[str, tuple[float, int]] = {}

    def offer(self, name: str, block: int) -> dict[str, Any]:
        self._ends[name] = now_s() + LEASE_S, block
        return self._producer.offer(name, [block], TOKENS)

    async def run(self) -> None:
        """Do the engine's steps. A report that has come counts before the lease's end."""
        while True:
            self._producer.step()
            for name, (end_s, block) in list(self._ends.items()):
                told = name not in self._producer.held[0]
                if told or now_s() >= end_s:
                    self._producer.held[0].pop(name, None)
                    del self._ends[name]
                    for tensor in self._producer.caches[0].values():
                        tensor[block] = OTHERS
            await asyncio.sleep(0)


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def ours_reads(ours: Reader, params: dict[str, Any], came: Arrival, block: int) -> str:
    ticket = read_stock_params(params, arrived=came, lease_s=LEASE_S, block_ids_max=100)
    try:
        await ours.load(ticket, [1])
    except LeaseExpired:
        return "refused"
    return judged(ours.cache, block)


async def stock_reads(theirs: StockConsumer, params: dict[str, Any], block: int) -> str:
    await theirs.read(params, [1])
    return judged(theirs.cache, block)


def judged(cache: dict[str, torch.Tensor], block: int) -> str:
    found = [tensor[1, 2, 0, 0].item() for tensor in cache.values()]
    return "right" if found == [value_of(layer, block, 2) for layer in range(LAYERS)] else "wrong"


@pytest.mark.thorough
async def test_of_many_that_are_late_none_is_wrong() -> None:
    """Blocks go to others as time passes.

    Thorough: see `test_params_that_came_too_long_ago_are_refused` of `stock/test_reading.py`.
    """
    peers = replace(PEERS, terms=Terms(lease_s=LEASE_S, router_s=0.5, settle_s=0.5, allowance_s=0.2))
    rng, theirs = Random(3), StockConsumer()
    found: dict[str, Counter[str]] = {"ours": Counter(), "stock": Counter()}
    async with stock_producer(num_blocks=2 * TRIES) as producer, reader(peers) as ours, asyncio.TaskGroup() as group:
        forgetful = Forgetful(producer)
        work = group.create_task(forgetful.run())
        await theirs.handshake(producer.offer("first", [0], TOKENS))
        begun_s, came = now_s(), arrival()
        for_us = [forgetful.offer(f"ours {number}", number) for number in range(TRIES)]
        for_them = [forgetful.offer(f"stock {number}", TRIES + number) for number in range(TRIES)]
        for number, late_s in enumerate(sorted(rng.random() * 2 * LEASE_S for _ in range(TRIES))):
            await until(lambda late_s=late_s: now_s() >= begun_s + late_s)  # type: ignore[misc]
            found["ours"][await ours_reads(ours, for_us[number], came, number)] += 1
            found["stock"][await stock_reads(theirs, for_them[number], TRIES + number)] += 1
        work.cancel()
    theirs.close()
    assert found["ours"]["wrong"] == 0
    assert found["ours"]["refused"] > 0
    assert found["stock"]["wrong"] > 0
