"""Loads and handshakes that begin in the very moment in which a runtime breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests_support import PATIENT, WAIT_S, turns

from kvflow.errors import KVFlowError
from kvflow.testing import InprocCluster, Pair

BRIEF = replace(PATIENT, drain_timeout_s=0.05, handshake_timeout_s=0.2)


@asynccontextmanager
async def breaking(steps: int) -> AsyncIterator[Pair]:
    """A pair whose consumer has begun to break so many turns of the loop ago."""
    cluster = InprocCluster()
    async with (
        cluster.engine("producer", config=BRIEF) as producer,
        cluster.engine("consumer", config=BRIEF) as consumer,
    ):
        consumer.transport.die(OSError("scripted"))
        await turns(steps)
        yield Pair(producer=producer, consumer=consumer)


@pytest.mark.parametrize("steps", range(8))
async def test_a_load_gets_a_typed_error_at_every_step(steps: int) -> None:
    """The services end over several turns of the loop; a handshake that is begun in between has nowhere to run."""
    async with breaking(steps) as pair:
        lease = pair.offer([3])
        with pytest.raises(KVFlowError):
            await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0]))
        await lease.revoke()


@pytest.mark.parametrize("steps", range(8))
async def test_who_waits_for_a_handshake_that_never_ran_is_told(steps: int) -> None:
    """A task that is cancelled before its first step cannot settle anything itself."""
    async with breaking(steps) as pair:
        ticket = pair.offer([3]).ticket
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(KVFlowError):
                (result,) = await pair.consumer.runtime.prewarm([ticket])
                assert result.error is not None, "connected, to a transport that is dead"
                raise result.error
