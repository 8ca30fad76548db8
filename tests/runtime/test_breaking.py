"""Loads that begin in the very moment in which a runtime breaks."""

from __future__ import annotations

import asyncio

import pytest

from kvflow import Config
from kvflow.errors import KVFlowError, RuntimeBroken, RuntimeClosed
from kvflow.testing import InprocCluster, Pair

BRIEF = Config(engine_id="any", drain_timeout_s=0.05, handshake_timeout_s=0.2)


@pytest.mark.parametrize("steps", range(8))
async def test_a_load_gets_a_typed_error_at_every_step(steps: int) -> None:
    """The services end over several turns of the loop; a handshake that is begun in between has nowhere to run."""
    cluster = InprocCluster()
    async with (
        cluster.engine("producer", config=BRIEF) as producer,
        cluster.engine("consumer", config=BRIEF) as consumer,
    ):
        pair = Pair(producer=producer, consumer=consumer)
        lease = pair.offer([3])
        consumer.transport.die(OSError("scripted"))
        for _ in range(steps):
            await asyncio.sleep(0)
        with pytest.raises(KVFlowError):
            await consumer.runtime.load_blocks(pair.wanted(lease, [0], deadline_s=1.0))
        await lease.revoke()


@pytest.mark.parametrize("steps", range(8))
async def test_who_waits_for_a_handshake_that_never_ran_is_told(steps: int) -> None:
    """A task that is cancelled before its first step cannot settle anything itself."""
    cluster = InprocCluster()
    async with (
        cluster.engine("producer", config=BRIEF) as producer,
        cluster.engine("consumer", config=BRIEF) as consumer,
    ):
        ticket = Pair(producer=producer, consumer=consumer).offer([3]).ticket
        consumer.transport.die(OSError("scripted"))
        for _ in range(steps):
            await asyncio.sleep(0)
        try:
            async with asyncio.timeout(5):
                (result,) = await consumer.runtime.prewarm([ticket])
        except RuntimeBroken:
            return
        assert isinstance(result.error, RuntimeClosed | None)
