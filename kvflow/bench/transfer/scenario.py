"""`kvflow bench transfer`: the same loads through raw NIXL twice, through kvflow, and through raw NIXL behind a thread.

Equal processes differ in speed for as long as they live, so every contender is opened `pairs` times, one set of
contenders after the other. In each set and for each size, one turn per contender with nothing timed (the first set
compares every block in it), then the set's share of the rounds, in which each contender has one turn with the same
loads. Blocks are scattered on both sides, as in a pool after a day, so that nothing can be merged.

The model has the descriptor size of the common 8B models: 8 KV heads of 128 fp16 elements and 16 tokens a block make
32 KiB for K or V of one layer. With 8 layers (one of four pipeline stages) a block is 512 KiB.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import kvflow
from kvflow.bench.cache import CacheShape, PatternCache
from kvflow.bench.child import BenchError, Child, RankProcess
from kvflow.bench.clocks import process_cpu_s
from kvflow.bench.engine import config_of, open_producer, open_runtime
from kvflow.bench.loads import MIB, PeerAddress, PlannedLoad, SettingsError, Ticket, Transport, scattered, share_out
from kvflow.bench.scenario import Children, Outcome, RankSet, Samples, Turn, interleaved
from kvflow.bench.transfer import results
from kvflow.bench.transfer.ranks import (
    Contender,
    Job,
    Producer,
    Reader,
    TurnResult,
    open_hop_reader,
    open_raw_producer,
    open_raw_reader,
)
from kvflow.bench.transfer.results import ONE_BLOCK, Idle, LoadSize

_TURN_BYTES = 128 * MIB
_TURN_LOADS_MAX = 20
_SETTLE_S = 0.5

Pair = tuple[Child, Child]
"""A contender's producer and its reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Compare (a) raw NIXL as in its examples, (b) raw NIXL tuned, (c) kvflow, (d) b behind one thread, on equal loads.

    (d) is the floor for any program that keeps NIXL off its event loop.
    """

    transport: Annotated[Transport | None, "Which way the bytes go: shm, tcp (UCX_TLS=tcp); both if left out."] = None
    sizes: Annotated[str, "What one load moves: 'block' or MB (2**20 bytes), separated by commas."] = (
        "block,1,16,256,1024"
    )
    pairs: Annotated[int, "How often every contender is started anew; equal processes differ in speed."] = 3
    rounds: Annotated[int, "Rounds per size, divided among the pairs; each gives every contender a turn."] = 12
    layers: Annotated[int, "Layers of the imaginary model."] = 8
    idle_s: Annotated[float, "How long idle CPU is measured."] = 5.0
    backend: Annotated[str, "NIXL's backend for every contender; several are separated by commas."] = "UCX"

    @property
    def transports(self) -> tuple[Transport, ...]:
        return tuple(Transport) if self.transport is None else (self.transport,)

    @property
    def load_sizes(self) -> tuple[LoadSize, ...]:
        """Smallest first; small ones are loaded several times a turn."""
        block_bytes = CacheShape(layers=self.layers, blocks=1).block_size_bytes
        words = [word.strip() for word in self.sizes.split(",")]
        labels = {_parse_size(word, block_bytes): ONE_BLOCK if word == "block" else f"{word} MB" for word in words}
        return tuple(
            LoadSize(label, blocks, min(_TURN_LOADS_MAX, max(1, _TURN_BYTES // (blocks * block_bytes))))
            for blocks, label in sorted(labels.items())
        )

    @property
    def shape(self) -> CacheShape:
        """One more block than any turn needs: the wake-up load has a block of its own."""
        blocks = 1 + max(size.blocks * size.loads_per_turn for size in self.load_sizes)
        return CacheShape(layers=self.layers, blocks=blocks).checked("--sizes")

    def sets(self) -> Sequence[RankSet]:
        if self.rounds < self.pairs:
            raise SettingsError(f"--rounds: {self.rounds} rounds are too few for --pairs {self.pairs}")
        ranks = [rank for contender in Contender for rank in ranks_of(contender, self.shape, self.backend)]
        return [
            RankSet(
                note=f"{transport}: pairs {pair + 1} of {self.pairs}: starting {len(ranks)} processes",
                ranks=ranks,
                turns=partial(self._turns, transport, pair),
                environment=transport.environment,
            )
            for transport in self.transports
            for pair in range(self.pairs)
        ]

    def judge(self, samples: Samples) -> Outcome:
        sizes = {size: size.blocks * self.shape.block_size_bytes for size in self.load_sizes}
        return results.judge(samples, sizes, self.pairs)

    def loads_of_turn(self, size: LoadSize, turn: str) -> tuple[PlannedLoad, ...]:
        """The loads of one turn, which share no block; the first is one block that wakes everybody up, untimed.

        Equal arguments give equal loads, so the contenders of a round move the same blocks.
        """
        counts = [1] + [size.blocks] * size.loads_per_turn
        name, blocks = f"{size.label} {turn}", self.shape.blocks
        local_ids, remote_ids = (scattered(f"{name} {side}", blocks, sum(counts)) for side in ("local", "remote"))
        return share_out(name, counts, local_ids, remote_ids)

    def rounds_of_pair(self, pair: int) -> range:
        """Which of the rounds are for the pairs opened at turn `pair`."""
        return range(pair * self.rounds // self.pairs, (pair + 1) * self.rounds // self.pairs)

    def _turns(self, transport: Transport, pair: int, children: Children) -> Iterator[Turn]:
        every = {contender: pair_of(contender, children) for contender in Contender}
        for both in every.values():
            yield Turn(key="connect", run=partial(connect, *both), children=both)
        for size in self.load_sizes:
            yield from self._turns_of_size(transport, pair, size, every)
        if pair == self.pairs - 1:
            run = partial(self._measure_idle, transport, every[Contender.KVFLOW][0])
            yield Turn(key="idle", run=run, note=f"idle for {self.idle_s:g} s")

    def _turns_of_size(
        self, transport: Transport, pair: int, size: LoadSize, every: Mapping[Contender, Pair]
    ) -> Iterator[Turn]:
        rounds = self.rounds_of_pair(pair)
        check_all = 0 in rounds  # the first set: the others run the same code, and 1 GB takes seconds to compare
        first = "all blocks compared" if check_all else "a turn untimed"
        note = f"{size.label}: {first}, then {len(rounds)} x {size.loads_per_turn} loads"
        loads = self.loads_of_turn(size, "check")
        for both in every.values():
            yield Turn(key="check", run=partial(run_turn, *both, loads, check_all=check_all), children=both, note=note)
        for index, contender in interleaved(tuple(Contender), rounds):
            loads = self.loads_of_turn(size, f"round {index}")
            run = partial(run_turn, *every[contender], loads, check_all=False)
            yield Turn(key=(transport, size, contender, pair), run=run, children=every[contender], note=note)

    def _measure_idle(self, transport: Transport, producer: Child) -> Idle:
        producer.run(Producer.offer, self.loads_of_turn(self.load_sizes[0], "idle")[:1])
        time.sleep(_SETTLE_S)
        cpu_s, start = process_cpu_s(producer.pid), time.perf_counter()
        time.sleep(self.idle_s)
        cpu_s = process_cpu_s(producer.pid) - cpu_s
        return Idle(transport=transport, cpu_percent=100 * cpu_s / (time.perf_counter() - start))


def _parse_size(word: str, block_bytes: int) -> int:
    """How many blocks a load of this size has."""
    if word == "block":
        return 1
    try:
        size_bytes = int(word) * MIB
    except ValueError as error:
        raise SettingsError(f"--sizes: expected 'block' or a number of MB, got {word!r}") from error
    if size_bytes < block_bytes or size_bytes % block_bytes:
        raise SettingsError(f"--sizes: {word} MB is no multiple of a block, which has {block_bytes} bytes")
    return size_bytes // block_bytes


# --- a contender's processes, and what the parent asks of them in a turn


def ranks_of(contender: Contender, shape: CacheShape, backend: str = "UCX") -> tuple[RankProcess, RankProcess]:
    """Producer and reader. The agents of (a) spin; (a) and (b) have no loop, nor has the producer of (d)."""
    raw, tuned = contender in (Contender.EXAMPLE, Contender.TUNED), contender is not Contender.EXAMPLE
    make = partial(RankProcess, spins=not tuned)
    if contender is Contender.KVFLOW:
        return (
            make(f"{contender} producer", partial(open_producer, config_of("bench-producer", backend), shape)),
            make(f"{contender} reader", partial(open_reader, shape, backend)),
        )
    setup = partial(open_raw_reader, shape, backend, tuned=tuned) if raw else partial(open_hop_reader, shape, backend)
    return (
        make(f"{contender} producer", partial(open_raw_producer, shape, backend, tuned=tuned), on_loop=False),
        make(f"{contender} reader", setup, on_loop=not raw),
    )


def pair_of(contender: Contender, children: Children) -> Pair:
    return children[f"{contender} producer"], children[f"{contender} reader"]


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
async def open_reader(shape: CacheShape, backend: str) -> AsyncIterator[Reader]:
    cache = PatternCache(shape)
    async with open_runtime(config_of("bench-reader", backend), cache) as runtime:
        yield Reader(cache, KVFlow(runtime))


class KVFlow:
    """Contender (c), kvflow as an engine would use it.

    The reader's pipe is read in a worker thread, so the loop has nothing to do but kvflow's work and the ticker.
    """

    def __init__(self, runtime: kvflow.Runtime) -> None:
        self._runtime = runtime

    async def connect(self, address: PeerAddress) -> None:
        """Tickets say where to go."""

    def prepare(self, load: PlannedLoad, ticket: Ticket | None) -> Job:
        request = kvflow.LoadRequest(load.request_id, ticket=ticket or {}, block_ids=load.local_ids)
        return partial(self._runtime.load_blocks, request)
