"""`kvflow bench transfer`: the same loads through raw NIXL twice, through kvflow, and through raw NIXL behind a thread.

Equal processes differ in speed for as long as they live, so every contender is opened `pairs` times, one set of
contenders after the other. In each set and for each size, one turn per contender with nothing timed (the first set
compares every block in it), then the set's share of the rounds, in which each contender has one turn with the same
loads.

The model has the descriptor size of the common 8B models: 8 KV heads of 128 fp16 elements and 16 tokens a block make
32 KiB for K or V of one layer. With 8 layers (one of four pipeline stages) a block is 512 KiB.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np

from kvflow.bench.cache import CacheShape, huge_page_share
from kvflow.bench.child import Child
from kvflow.bench.clocks import process_cpu_s
from kvflow.bench.loads import MIB, PlannedLoad, SettingsError, Transport, scattered, share_out
from kvflow.bench.scenario import Children, Outcome, RankSet, Samples, Turn, interleaved
from kvflow.bench.transfer import results
from kvflow.bench.transfer.contenders import Contender, connect, run_turn
from kvflow.bench.transfer.ranks import Producer, Reader
from kvflow.bench.transfer.results import HugePages, Idle, LoadSize

_TURN_BYTES = 128 * MIB
_TURN_LOADS_MAX = 20
_LAG_FLOOR_S = 0.5
_SETTLE_S = 0.5


class TransportChoice(enum.StrEnum):
    SHM = "shm"
    TCP = "tcp"
    BOTH = "both"


class Pattern(enum.StrEnum):
    """Which blocks a load touches. SCATTERED is what a pool looks like after a day, and nothing can be merged."""

    SCATTERED = "scattered"
    CONTIGUOUS = "contiguous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Compare (a) raw NIXL as in its examples, (b) raw NIXL tuned, (c) kvflow, (d) b behind one thread, on equal loads.

    (d) is the floor for any program that keeps NIXL off its event loop.
    """

    transport: Annotated[TransportChoice, "Which way the bytes go: shm, tcp (UCX_TLS=tcp) or both."] = (
        TransportChoice.BOTH
    )
    sizes: Annotated[str, "What one load moves: 'block' or MB (2**20 bytes), separated by commas."] = (
        "block,1,16,256,1024"
    )
    pairs: Annotated[int, "How often every contender is started anew; equal processes differ in speed."] = 3
    rounds: Annotated[int, "Rounds per size, divided among the pairs; each gives every contender a turn."] = 12
    pattern: Annotated[Pattern, "Block ids: random on both sides, or consecutive ones."] = Pattern.SCATTERED
    layers: Annotated[int, "Layers of the imaginary model."] = 8
    kv_heads: Annotated[int, "KV heads per layer; 128 fp16 elements, 16 tokens a block."] = 8
    idle_s: Annotated[float, "How long idle CPU is measured."] = 5.0
    quick: bool = False

    SCHEMA_VERSION: ClassVar = 4
    QUICK: ClassVar[Mapping[str, Any]] = {"sizes": "block,1", "pairs": 1, "rounds": 1, "layers": 2, "idle_s": 0.5}

    @property
    def transports(self) -> tuple[Transport, ...]:
        return tuple(Transport) if self.transport is TransportChoice.BOTH else (Transport(self.transport),)

    @property
    def load_sizes(self) -> tuple[LoadSize, ...]:
        """Smallest first; small ones are loaded several times a turn."""
        block_bytes = CacheShape(layers=self.layers, kv_heads=self.kv_heads, blocks=1).block_size_bytes
        words = [word.strip() for word in self.sizes.split(",")]
        labels = {_parse_size(word, block_bytes): "one block" if word == "block" else f"{word} MB" for word in words}
        return tuple(
            LoadSize(label, blocks, min(_TURN_LOADS_MAX, max(1, _TURN_BYTES // (blocks * block_bytes))))
            for blocks, label in sorted(labels.items())
        )

    @property
    def shape(self) -> CacheShape:
        """One more block than any turn needs: the wake-up load has a block of its own."""
        blocks = 1 + max(size.blocks * size.loads_per_turn for size in self.load_sizes)
        return CacheShape(layers=self.layers, kv_heads=self.kv_heads, blocks=blocks).checked("--sizes")

    def sets(self) -> Sequence[RankSet]:
        if self.rounds < self.pairs:
            raise SettingsError(f"--rounds: {self.rounds} rounds are too few for --pairs {self.pairs}")
        ranks = [rank for contender in Contender for rank in contender.ranks(self.shape)]
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
        return results.judge(samples, self.shape, self.load_sizes, self.pairs, self.pattern)

    def loads_of_turn(self, size: LoadSize, turn: str) -> tuple[PlannedLoad, ...]:
        """The loads of one turn, which share no block; the first is one block that wakes everybody up, untimed.

        Equal arguments give equal loads, so the contenders of a round move the same blocks.
        """
        counts = [1] + [size.blocks] * size.loads_per_turn
        name = f"{size.label} {turn}"
        local_ids, remote_ids = (self._pick_ids(f"{name} {side}", sum(counts)) for side in ("local", "remote"))
        return share_out(name, counts, local_ids, remote_ids)

    def _pick_ids(self, seed: str, count: int) -> Sequence[int]:
        blocks = self.shape.blocks
        if self.pattern is Pattern.SCATTERED:
            return scattered(seed, blocks, count)
        start = int(np.random.default_rng(list(seed.encode())).integers(blocks - count + 1))
        return range(start, start + count)

    def rounds_of_pair(self, pair: int) -> range:
        """Which of the rounds are for the pairs opened at turn `pair`."""
        return range(pair * self.rounds // self.pairs, (pair + 1) * self.rounds // self.pairs)

    def _turns(self, transport: Transport, pair: int, children: Children) -> Iterator[Turn]:
        every = {contender: contender.of(children) for contender in Contender}
        for both in every.values():
            yield Turn(key="connect", run=partial(connect, *both), children=both)
        for size in self.load_sizes:
            yield from self._turns_of_size(transport, pair, size, every)
        for child in children.values():
            yield Turn(key=transport, run=partial(_huge_pages, child, self.shape))
        if pair == self.pairs - 1:
            run = partial(self._measure_idle, *every[Contender.KVFLOW])
            yield Turn(key=transport, run=run, note=f"idle for {self.idle_s:g} s")

    def _turns_of_size(
        self, transport: Transport, pair: int, size: LoadSize, every: Mapping[Contender, tuple[Child, Child]]
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

    def _measure_idle(self, producer: Child, reader: Child) -> Idle:
        """CPU of the producer with one open lease in percent of a core, and the ticker's floor on the idle reader."""
        producer.run(Producer.offer, self.loads_of_turn(self.load_sizes[0], "idle")[:1])
        time.sleep(_SETTLE_S)
        cpu_s, start = process_cpu_s(producer.pid), time.perf_counter()
        time.sleep(self.idle_s)
        cpu_s = process_cpu_s(producer.pid) - cpu_s
        cpu_percent = 100 * cpu_s / (time.perf_counter() - start)
        return Idle(cpu_percent, reader.run(Reader.tick, _LAG_FLOOR_S))


def _huge_pages(child: Child, shape: CacheShape) -> HugePages:
    return HugePages(huge_page_share(child.pid, shape))


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
