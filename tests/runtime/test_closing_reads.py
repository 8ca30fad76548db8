"""A runtime that closes while bytes of an ended load are still on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests_support import WAIT_S, limited, until

from kvflow import Config, Limits, Runtime, ServeRequest
from kvflow.errors import RuntimeBroken
from kvflow.testing import InprocCluster, Pair, assert_closed
from kvflow.transport.inproc import InprocRead, InprocTransport

IMPATIENT = Config(engine_id="any", cancel_grace_s=0.01, drain_timeout_s=0.01, limits=Limits(seal_hold_s=0.01))


class LateBytes:
    """See `transport.inproc.Carrier`: reads end when the test says so, and closing waits for that."""

    def __init__(self) -> None:
        self.reads: list[tuple[InprocTransport, InprocRead]] = []
        self.all_landed = asyncio.Event()

    def carry(self, reader: InprocTransport, read: InprocRead) -> None:
        self.reads.append((reader, read))

    def send(self, target: InprocTransport, payload: bytes) -> None:
        target.deliver(payload)

    def wake(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)

    async def landed(self, reader: InprocTransport) -> None:
        await self.all_landed.wait()


@pytest.mark.parametrize("in_time", [True, False])
async def test_what_was_quarantined_is_safe_once_the_transport_has_closed_in_good_order(in_time: bool) -> None:
    """The poller ends before the transport: nobody hears of the last read, but the transport has waited for it."""
    cluster, late = InprocCluster(), LateBytes()
    network = cluster.network

    async with cluster.engine("producer") as producer:
        world = replace(cluster.world(), transport=lambda _, name: InprocTransport(name, network, carrier=late))
        lease = producer.runtime.serve_blocks(ServeRequest("req", block_ids=[3], num_tokens=4))
        config = limited(
            replace(IMPATIENT, engine_id="consumer"), transport_close_timeout_s=WAIT_S if in_time else 0.01
        )
        runtime = Runtime(config, world=world)
        await runtime.__aenter__()
        await runtime.register_kv_caches(producer.kv_caches, producer.layout)
        loading = asyncio.create_task(runtime.load_blocks(Pair.wanted(lease, [0])))
        await until(lambda: late.reads)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        (quarantine,) = runtime.quarantines
        closing = asyncio.create_task(runtime.aclose())
        if in_time:
            with pytest.raises(RuntimeBroken, match="the transfer poller ended"):
                await quarantine.settled()
            late.all_landed.set()
            await closing
            assert quarantine.safe
            await quarantine.settled()
            assert_closed(runtime.statistics())
        else:
            with pytest.raises(RuntimeBroken, match="have not stopped"):
                await closing
            assert not quarantine.safe
        await lease.revoke()
