"""kvflow as an engine uses it, also with loads that are cancelled."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial

import kvflow
from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.engine import config_of, open_runtime
from kvflow.bench.loads import PlannedLoad, Ticket
from kvflow.bench.raw import AgentAddress
from tests.bench.peers.ranks import BreakableReader
from tests.bench.transfer.ranks import Job, together


class KVFlowReader:
    """The error of a load holds what has to be waited for."""

    def __init__(self, runtime: kvflow.Runtime) -> None:
        self._runtime = runtime
        self._quarantine: kvflow.Load | None = None

    async def connect(self, address: AgentAddress) -> None:
        """Connect to no peer: the tickets have the addresses."""

    def prepare(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> Job:
        requests = [
            kvflow.LoadRequest(load.request_id, ticket=ticket, block_ids=load.local_ids)
            for load, ticket in zip(loads, tickets, strict=True)
        ]
        return together([partial(self._load, request) for request in requests])

    async def wait_safe(self) -> bool:
        if self._quarantine is not None:
            await self._quarantine.settled()
        return True

    async def _load(self, request: kvflow.LoadRequest) -> None:
        try:
            await self._runtime.load_blocks(request)
        except BaseException as error:
            self._quarantine = getattr(error, "quarantine", None)
            raise


@contextlib.asynccontextmanager
async def open_kvflow_reader(shape: CacheShape) -> AsyncIterator[BreakableReader]:
    cache = BenchCache(shape)
    async with open_runtime(config_of("bench-reader"), cache) as runtime:
        yield BreakableReader(cache, KVFlowReader(runtime))
