"""What is observed in these tests: two requests between a pair, one loaded, one whose lease was withdrawn."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest
from tests_support import leases_ended

from kvflow import ServeRequest
from kvflow.errors import LeaseExpired
from kvflow.runtime.records import Observer
from kvflow.testing import InprocPair, inproc_pair

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
