"""Who takes part: for each contender a producer and a reader process, and what the parent asks of them in a turn.

Of contender (c), kvflow as an engine would use it, the reader's half is here. Its pipe is read in a worker thread, so
the loop has nothing to do but kvflow's work and the ticker.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import AsyncIterator, Sequence
from functools import partial

import kvflow
from kvflow.bench.cache import CacheShape, PatternCache
from kvflow.bench.child import BenchError, Child, RankProcess
from kvflow.bench.engine import config_of, open_producer, open_runtime
from kvflow.bench.loads import PeerAddress, PlannedLoad, Ticket
from kvflow.bench.scenario import Children
from kvflow.bench.transfer.ranks import (
    Job,
    Producer,
    Reader,
    TurnResult,
    open_hop_reader,
    open_raw_producer,
    open_raw_reader,
)


class Contender(enum.StrEnum):
    EXAMPLE = "raw_example"
    TUNED = "raw_tuned"
    KVFLOW = "kvflow"
    HOP = "bare_hop"

    def ranks(self, shape: CacheShape) -> tuple[RankProcess, RankProcess]:
        """Producer and reader. The agents of (a) spin; (a) and (b) have no loop, nor has the producer of (d)."""
        raw, tuned = self in (Contender.EXAMPLE, Contender.TUNED), self is not Contender.EXAMPLE
        make = partial(RankProcess, memory_bytes=shape.process_bytes, spins=not tuned)
        producer, reader = self._names
        if self is Contender.KVFLOW:
            return (
                make(producer, partial(open_producer, config_of("bench-producer"), shape)),
                make(reader, partial(open_reader, shape)),
            )
        setup = partial(open_raw_reader, shape, tuned=tuned) if raw else partial(open_hop_reader, shape)
        return (
            make(producer, partial(open_raw_producer, shape, tuned=tuned), on_loop=False),
            make(reader, setup, on_loop=not raw),
        )

    def of(self, children: Children) -> tuple[Child, Child]:
        """Its producer and its reader."""
        producer, reader = self._names
        return children[producer], children[reader]

    @property
    def _names(self) -> tuple[str, str]:
        return f"{self} producer", f"{self} reader"


def connect(producer: Child, reader: Child) -> None:
    reader.run(Reader.connect, producer.run(Producer.address), producer.pid)


def run_turn(producer: Child, reader: Child, loads: Sequence[PlannedLoad], *, check_all: bool) -> TurnResult:
    tickets = producer.run(Producer.offer, loads)
    result = reader.run(Reader.turn, loads, tickets, check_all=check_all)
    producer.run(Producer.settle)
    if not result.checked_bytes:
        raise BenchError("a turn ended without any byte compared")
    return result


@contextlib.asynccontextmanager
async def open_reader(shape: CacheShape) -> AsyncIterator[Reader]:
    cache = PatternCache(shape)
    async with open_runtime(config_of("bench-reader"), cache) as runtime:
        yield Reader(cache, KVFlow(runtime))


class KVFlow:
    """Contender (c)."""

    def __init__(self, runtime: kvflow.Runtime) -> None:
        self._runtime = runtime

    async def connect(self, address: PeerAddress) -> None:
        """Tickets say where to go."""

    def prepare(self, load: PlannedLoad, ticket: Ticket | None) -> Job:
        request = kvflow.LoadRequest(load.request_id, ticket=ticket or {}, block_ids=load.local_ids)
        return partial(self._runtime.load_blocks, request)
