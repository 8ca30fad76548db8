"""The observed traffic of these tests: two requests between a pair, one loaded and one with a withdrawn lease; and a
prompt that is read while it is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
from tests_support import PATIENT, leases_ended, limited

from kvflow import ServeRequest
from kvflow.errors import LeaseExpired
from kvflow.runtime.records import Observer
from kvflow.testing import InprocCluster, InprocPair, inproc_pair

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@contextlib.asynccontextmanager
async def observed(observers: Sequence[Observer]) -> AsyncIterator[InprocPair]:
    """A pair after both requests; all leases have ended."""
    async with inproc_pair(observers=observers) as pair:
        producer, consumer = pair.producer.runtime, pair.consumer.runtime
        good = producer.serve_blocks(ServeRequest("good", [3, 4], num_tokens=8, traceparent=TRACEPARENT))
        await consumer.load_blocks(pair.wanted(good, [0, 1]))
        bad = producer.serve_blocks(ServeRequest("bad", [5], num_tokens=4))
        bad.revoke()
        with pytest.raises(LeaseExpired):
            await consumer.load_blocks(pair.wanted(bad, [2]))
        await leases_ended(producer)
        yield pair


async def grown(observers: Sequence[Observer], *, staging: str = "never") -> None:
    """In virtual time: a prompt of 4 blocks is computed in 4 s, and loaded from the second one on."""
    config = limited(replace(PATIENT, listen="tcp://127.0.0.1:0", staging=staging), slice_bytes_max=64)
    world = InprocCluster().world()
    async with inproc_pair(observers=observers, config=config, producer_world=world, consumer_world=world) as pair:
        producer, blocks = pair.producer.runtime, [1, 2, 3, 5]
        request = ServeRequest("flows", blocks, num_tokens=15, computed_tokens=4, traceparent=TRACEPARENT)
        lease = producer.serve_blocks(request)
        await asyncio.sleep(1.0)
        load = pair.consumer.runtime.start_load(pair.wanted(lease, [4, 0, 7, 6]))
        for tokens in (8, 14, 15):
            await asyncio.sleep(1.0)
            lease.advance(tokens)
        await load
        await leases_ended(producer)
