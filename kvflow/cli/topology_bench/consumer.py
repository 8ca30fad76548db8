"""The process of the consumer: one memory, and an open runtime for every way in which a rank can see it.

The rank that most cases have is one runtime, which talks to all of their producers. Those that need another layout,
block size or configuration have runtimes of their own on the same memory; only one of them loads at a time.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import kvflow
from kvflow.cli.bench.loops import receive, run_on_uvloop
from kvflow.cli.bench.messages import Done, LoadResult, PeerAddress, PrepareLoad, Quit, RunLoad
from kvflow.cli.topology_bench.pattern import RankCache, allocate_layers
from kvflow.cli.topology_bench.ranks import open_rank
from kvflow.cli.topology_bench.settings import TopologySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerRanks:
    """Body of the process."""

    settings: TopologySettings

    def __call__(self, pipe: Connection) -> None:
        run_on_uvloop(_consume(pipe, self.settings))


async def _consume(pipe: Connection, settings: TopologySettings) -> None:
    memory = allocate_layers(settings, settings.consumers)
    caches = [RankCache(settings, cut, memory) for cut in settings.consumers]
    async with contextlib.AsyncExitStack() as stack:
        runtimes = [await stack.enter_async_context(open_rank(settings, "consumer", cache)) for cache in caches]
        pipe.send(PeerAddress())
        while not isinstance(message := await receive(pipe), Quit):
            match message:
                case PrepareLoad():
                    caches[message.rank].poison(message.load.local_ids, message.layers)
                    pipe.send(Done())
                case RunLoad():
                    pipe.send(await _run(runtimes[message.rank], caches[message.rank], message))
                case _:
                    raise TypeError(f"consumer ranks: unexpected {type(message).__name__}")


async def _run(runtime: kvflow.Runtime, cache: RankCache, message: RunLoad) -> LoadResult:
    load = message.load
    tickets = [kvflow.Ticket.from_params(ticket) for ticket in message.tickets]
    merged = kvflow.merge_tickets(tickets).to_params()
    request = kvflow.LoadRequest(load.request_id, ticket=merged, block_ids=load.local_ids)
    start = time.perf_counter()
    report = await runtime.load_blocks(request)
    seconds = time.perf_counter() - start
    return LoadResult(
        seconds=seconds,
        size_bytes=report.bytes,
        descriptors=report.descriptors,
        phases_s=dict(report.seconds),
        checked_bytes=cache.check(load.local_ids, load.remote_ids, message.remote_block_size, message.layers),
    )
