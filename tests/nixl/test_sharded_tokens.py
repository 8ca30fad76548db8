"""Decode context parallelism over real NIXL, between processes: the tokens of a latent cache on several ranks.

The producer's ranks are in a process of their own, which stands for an engine: no engine computes with sharded tokens
on a CPU.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from kvflow import LoadRequest
from tests.support.engine_process import forking
from tests.support.hand_overs import HandOver, one_part, open_engine, open_producer, serve, ticket_of
from tests.support.reference_model import PRODUCER_FILL, Engine, Model, RankCache

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

TOKENS = 150
LATENT = Model(layers=2, kv_heads=1, head_size=72, dtype=torch.bfloat16, latent=True)


def engine(shards: int, tp_size: int) -> Engine:
    """An engine with its tokens on `shards` ranks: all its ranks, or each its own."""
    stages = (tuple(range(LATENT.layers)),)
    return Engine(model=LATENT, tp_size=tp_size, stages=stages, block_size=16, num_blocks=14, sharded=shards > 1)


def produce(case: HandOver, pipe: Connection) -> None:
    """The prefill engine: offer the prompt, send its ticket, and how its leases have ended."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            ((*ranks,),) = await open_producer(stack, case, None)
            for rank in ranks:
                rank.caches[0].pattern.fill(case.ids(0)[0])
            leases = serve(case, ranks)
            pipe.send(ticket_of(case, leases))
            pipe.send([str(await lease) for lease in leases])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        (engine(1, 2), engine(2, 2)),
        (engine(2, 2), engine(1, 2)),
        (engine(2, 2), engine(2, 2)),
        (engine(2, 2), engine(4, 4)),
    ],
    ids=["1 to 2", "2 to 1", "2 to 2", "2 to 4"],
)
def test_each_rank_gets_the_tokens_that_it_holds(producer: Engine, consumer: Engine) -> None:
    """Every byte of the decode engine, with its first block cached."""
    offered, wanted = (-(-TOKENS // one.block_tokens) for one in (producer, consumer))
    case = one_part(
        producer, consumer, num_tokens=TOKENS, offered=tuple(range(2, 2 + offered)), wanted=tuple(range(wanted, 1, -1))
    )
    context = forking()
    ours, theirs = context.Pipe()
    process = context.Process(target=produce, args=(case, theirs), daemon=True)
    process.start()
    theirs.close()

    async def load() -> list[Any]:
        async with AsyncExitStack() as stack:
            ranks = await open_engine(stack, case, 1, None)
            ticket = await asyncio.to_thread(ours.recv)
            request = LoadRequest("request", ticket, case.ids(1)[0], cached_tokens=case.cached_tokens)
            await asyncio.gather(*(rank.runtime.load_blocks(request) for rank in ranks))
            assert set(await asyncio.to_thread(ours.recv)) == {"read"}
            return ranks

    source = [RankCache(producer, place, PRODUCER_FILL) for place in producer.places]
    for cache in source:
        cache.pattern.fill(case.ids(0)[0])
    for rank in asyncio.run(load()):
        assert not rank.caches[0].difference(source, case.ids(0)[0], case.ids(1)[0], TOKENS)
    process.join(60)
    assert process.exitcode == 0
