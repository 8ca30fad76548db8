"""What one more peer costs a rank: bytes that Python and numpy have allocated, counted by `tracemalloc`.

Counted on the reader's side with the producer's note of its reader, once connected and once every length of a prompt's
tail was loaded, of offers that were there before. What the transport keeps of a peer is not in it: the in-process one
keeps a name, NIXL and UCX more.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc

from kvflow.config import Config
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.limits import Limits
from kvflow.runtime.load.requests import LoadRequest
from kvflow.runtime.producer.lease import Lease, ServeRequest
from kvflow.testing.cluster import InprocCluster
from kvflow.testing.pair import CacheSize, TestEngine
from kvflow.testing.virtual_loop import run_virtual
from tests.bench.fleet.results import MemoryResult

_BLOCK_SIZE = 16
_WARM = 1
_SETTLED_S = 100.0  # virtual: until no timer is left of what has ended


def measure_memory(peers: int, layers: int) -> MemoryResult:
    """Let one rank connect to `peers` others, one after the other, and load from each."""
    return run_virtual(_measure(peers, layers))


async def _measure(peers: int, layers: int) -> MemoryResult:
    cluster, size = InprocCluster(), CacheSize(layers, _BLOCK_SIZE, _BLOCK_SIZE, "HND", 1, 4)
    limits = Limits(leases_max=64, peers_max=peers + _WARM, peer_idle_s=1e6)
    config = Config(engine_id="any", lease_ttl_s=3000.0, limits=limits)
    async with contextlib.AsyncExitStack() as stack:

        async def opened(name: str) -> TestEngine:
            return await stack.enter_async_context(cluster.engine(name, config=config, size=size))

        reader = await opened("reader")
        engines = [await opened(f"prefill-{number}") for number in range(peers + _WARM)]
        offers = [[_offer(engine, tokens) for tokens in range(1, _BLOCK_SIZE + 1)] for engine in engines]
        await _connect(reader, engines[:_WARM])
        await _load_all(reader, offers[:_WARM])
        tracemalloc.start()
        try:
            await _connect(reader, engines[_WARM:])
            connected = await _allocated()
            await _load_all(reader, offers[_WARM:])
            loaded = await _allocated()
        finally:
            tracemalloc.stop()
    each = [round(size_bytes / peers) for size_bytes in (connected, loaded)]
    return MemoryResult(peers=peers, layers=layers, connected_bytes=each[0], loaded_bytes=each[1])


async def _connect(reader: TestEngine, engines: list[TestEngine]) -> None:
    addresses = [
        PeerAddress(engine_id=one.runtime.config.engine_id, address=one.runtime.address or "") for one in engines
    ]
    for error in await reader.runtime.prewarm(addresses):
        if error is not None:
            raise error


def _offer(engine: TestEngine, tokens: int) -> Lease:
    request = ServeRequest(f"tail of {tokens}", block_ids=[tokens - 1], num_tokens=tokens)
    return engine.runtime.serve_blocks(request)


async def _load_all(reader: TestEngine, offers: list[list[Lease]]) -> None:
    for leases in offers:
        for lease in leases:
            await reader.runtime.load_blocks(LoadRequest(lease.request_id, lease.ticket.to_params(), [0]))
            await lease


async def _allocated() -> int:
    await asyncio.sleep(_SETTLED_S)
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
