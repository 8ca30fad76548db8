"""The bench `flow`: prompts whose blocks flow while they are computed, beside whole prompts, taking turns.

The cache is that of SmolLM2-135M: 30 layers, 3 KV heads of 64 16-bit elements, blocks of 16 tokens. The producer is
synthetic: it computes chunks of a prompt at a pace, and its lease grows by each; or it offers the whole prompt after
the last one. By default the pace is such that a prompt's wire time on this link is a third of its prefill time, as
measured at the start. The last chunk is loaded alone in every round, too: that is its wire time.

For each prompt every byte of a load whose chunks are written while it waits is compared first, then a layer of each.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from kvflow.bench.cache import CacheShape
from kvflow.bench.child import BenchError, RankProcess
from kvflow.bench.loads import PlannedLoad, SettingsError, scattered_loads
from tests.bench.flow import results
from tests.bench.flow.link import Link, lay_cable, require_cables
from tests.bench.flow.ranks import (
    BLOCK_SIZE,
    FlowProducer,
    FlowReader,
    Prefill,
    Schedule,
    open_rank,
)
from tests.bench.flow.results import UNTIMED, Case, Growth, HandOver, Many, Way
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn, interleaved

MODEL = CacheShape(layers=30, blocks=1, kv_heads=3, head_size=64)
SMALL = CacheShape(layers=1, blocks=1, kv_heads=1, head_size=64)
"""What many loads move: 4 KiB a block, so that bytes are not the cost."""
_PACE_LOADS = 3
_FAST_ROUNDS = 4
_WAKE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Measure blocks that flow while their prompt is computed, beside whole prompts, and many such loads at once."""

    link: Annotated[
        Link | None,
        "Fabric that moves the bytes: shm, tcp, or 1gbit between two networks (needs root); by default all that work.",
    ] = None
    prompts: Annotated[str, "Tokens of the prompts, separated by commas; 'none' for many loads only."] = "2048,8192"
    chunk: Annotated[int, "Tokens that are computed at once."] = 512
    chunk_ms: Annotated[float | None, "How long that takes; if left out it follows from --wire-share."] = None
    wire_share: Annotated[float, "A prompt's wire time, in times of its prefill."] = round(1 / 3, 4)
    rounds: Annotated[
        int, "Rounds; each hands every prompt over in every way. Four times as many where the link is not shaped."
    ] = 5
    layers: Annotated[int, "Layers of the model."] = MODEL.layers
    many: Annotated[int, "How many loads grow at once."] = 64
    advance_ms: Annotated[float, "How often each of them does, by one block."] = 20.0
    many_s: Annotated[float, "How long they do in a round; 0 for prompts only.", 0] = 6.0

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of each prompt, shortest first."""
        words = [] if self.prompts == "none" else [word.strip() for word in self.prompts.split(",")]
        found = [int(word) if word.isdecimal() else 0 for word in words]
        for word, tokens in zip(words, found, strict=True):
            if not tokens or tokens % self.chunk:
                raise SettingsError(f"--prompts: {word!r} is no multiple of --chunk, which is {self.chunk}")
        if self.chunk % BLOCK_SIZE:
            raise SettingsError(f"--chunk: {self.chunk} is no multiple of a block, which has {BLOCK_SIZE} tokens")
        return tuple(sorted(set(found)))

    @property
    def model(self) -> CacheShape:
        """An eighth more than the longest prompt takes, so that it is scattered, and what wakes everybody up."""
        blocks = max(self.tokens) // BLOCK_SIZE
        return replace(MODEL, layers=self.layers, blocks=blocks + -(-blocks // 8) + _WAKE).checked("--prompts")

    @property
    def advances(self) -> int:
        """Of each of many leases."""
        return round(self.many_s * 1e3 / self.advance_ms)

    @property
    def small(self) -> CacheShape:
        return replace(SMALL, blocks=self.many * self.advances).checked("--many, --many-s")

    @property
    def links(self) -> tuple[Link, ...]:
        """SettingsError if the one that is asked for does not work here."""
        if self.link is Link.GBIT:
            require_cables()
        if self.link is not None:
            return (self.link,)
        try:
            require_cables()
        except SettingsError:
            return (Link.SHM, Link.TCP)
        return tuple(Link)

    def sets(self) -> Sequence[RankSet]:
        if self.chunk_ms is not None and self.chunk_ms < 0:
            raise SettingsError(f"--chunk-ms: {self.chunk_ms:g} is less than 0")
        parts = []
        if self.tokens:
            parts.append(("prompts", self.model, self._turns_of_prompts))
        if self.advances > 1:
            parts.append(("many loads", self.small, self._turns_of_many))
        if not parts:
            raise SettingsError(f"--prompts none, --many-s {self.many_s:g}: there is nothing to measure")
        return [
            RankSet(
                note=f"{link}: {name}: starting 2 ranks",
                ranks=(
                    RankProcess("producer", partial(open_rank, FlowProducer, link, shape)),
                    RankProcess("reader", partial(open_rank, FlowReader, link, shape)),
                ),
                turns=partial(turns, link),
                environment=link.environment,
            )
            for link in self.links
            for name, shape, turns in parts
        ]

    def judge(self, samples: Samples) -> Outcome:
        return results.judge(samples, lambda tokens: tokens // BLOCK_SIZE * self.model.block_size_bytes)

    def planned(self, turn: str, tokens: int) -> tuple[PlannedLoad, PlannedLoad]:
        """What wakes everybody up, and the prompt. Equal rounds move the same blocks, whatever the way."""
        seed, counts = f"{turn.partition(',')[0]} {tokens}", (_WAKE, tokens // BLOCK_SIZE)
        wake, prompt = scattered_loads(f"{turn} {tokens}", self.model.blocks, counts, seed=seed)
        return wake, prompt

    def _turns_of_prompts(self, link: Link, children: Children) -> Iterator[Turn]:
        yield Turn(key=UNTIMED, run=partial(_open, link, children))
        for tokens in self.tokens:
            yield from self._turns_of_case(Case(link, tokens), children)

    def _turns_of_case(self, case: Case, children: Children) -> Iterator[Turn]:
        """Every byte, the pace, and the rounds."""
        every = tuple(range(self.layers))
        hand_over = partial(_hand_over, self, children, case)
        rounds = self.rounds if case.link is Link.GBIT else self.rounds * _FAST_ROUNDS
        note = f"{case.tokens} tokens: every byte compared, then {rounds} rounds"
        run = partial(hand_over, Way.FLOWING, "check", chunk_s=0.0, layers=every, writes=True)
        yield Turn(key=UNTIMED, run=run, note=note)
        wires: list[HandOver] = []
        for index in range(_PACE_LOADS):
            run = partial(hand_over, Way.WHOLE_AT_ONCE, f"pace {index}", chunk_s=0.0, layers=every[:1])
            yield Turn(key=UNTIMED, run=partial(_kept, wires, run))
        chunk_s = self.chunk_s(case.tokens, statistics.median(one.load_s for one in wires))
        for index, way in interleaved(tuple(Way), range(rounds)):
            layers = (index % self.layers,)
            run = partial(hand_over, way, f"round {index}, {way}", chunk_s=chunk_s, layers=layers)
            yield Turn(key=(case, way), run=run, note=f"a chunk in {chunk_s * 1e3:.1f} ms")

    def chunk_s(self, tokens: int, wire_s: float) -> float:
        """How long a chunk is computed, for a prompt that takes `wire_s` on this link."""
        if self.chunk_ms is not None:
            return self.chunk_ms / 1e3
        return wire_s / self.wire_share / (tokens // self.chunk)

    def _turns_of_many(self, link: Link, children: Children) -> Iterator[Turn]:
        yield Turn(key=UNTIMED, run=partial(_open, link, children))
        note = f"{self.rounds} rounds of {self.many} loads that grow every {self.advance_ms:g} ms for {self.many_s:g} s"
        loads = self.many_loads("check", 2)
        yield Turn(key=UNTIMED, run=partial(_grow, children, loads, self.schedule(2, Growth.IN_STEP)), note=note)
        for index, growth in interleaved(tuple(Growth), range(self.rounds)):
            loads = () if growth is Growth.NONE else self.many_loads(f"round {index} {growth}", self.advances)
            schedule = self.schedule(self.advances, growth)
            yield Turn(key=(link, growth), run=partial(_grow, children, loads, schedule), note=note)

    def schedule(self, advances: int, growth: Growth) -> Schedule:
        in_step = growth is Growth.IN_STEP
        return Schedule(leases=self.many, advances=advances, every_s=self.advance_ms / 1e3, in_step=in_step)

    def many_loads(self, turn: str, blocks: int) -> tuple[PlannedLoad, ...]:
        """Loads of so many blocks each, which share none."""
        return scattered_loads(turn, self.small.blocks, [blocks] * self.many)


# --- what the parent asks of the ranks in a turn


def _open(link: Link, children: Children) -> None:
    producer, reader = children["producer"], children["reader"]
    if link is Link.GBIT:
        lay_cable(producer.pid, reader.pid)
    for done in (producer.start(FlowProducer.open), reader.start(FlowReader.open)):
        done()


def _kept(found: list[HandOver], run: Callable[[], HandOver]) -> HandOver:
    found.append(run())
    return found[-1]


def _hand_over(
    scenario: Flow,
    children: Children,
    case: Case,
    way: Way,
    turn: str,
    *,
    chunk_s: float,
    layers: Sequence[int],
    writes: bool = False,
) -> HandOver:
    """A turn: a block that wakes everybody up, then the prompt; compared afterwards."""
    producer, reader = children["producer"], children["reader"]
    wake, load = scenario.planned(turn, case.tokens)
    prefill = Prefill(
        load=load,
        chunks=case.tokens // scenario.chunk,
        chunk_s=chunk_s if way in (Way.WHOLE, Way.FLOWING) else 0.0,
        grows=way in (Way.FLOWING, Way.FLOWING_AT_ONCE, Way.COMPUTED),
        writes=writes,
    )
    if way is Way.LAST_CHUNK:
        prefill = prefill.last_chunk()
        load = prefill.load
    reader.run(FlowReader.poison, [load], layers)
    reader.run(FlowReader.load, wake, *producer.run(FlowProducer.offer, [wake]))
    ticket = producer.run(FlowProducer.prepare, prefill)
    if way in (Way.FLOWING, Way.FLOWING_AT_ONCE):
        reader.run(FlowReader.begin, [load], [ticket])
        computed = producer.run(FlowProducer.compute, prefill)
        (loaded,) = reader.run(FlowReader.finish)
    else:
        computed = producer.run(FlowProducer.compute, prefill)
        loaded = reader.run(FlowReader.load, load, ticket or computed.ticket)
    checked_bytes = reader.run(FlowReader.check, [load], layers, check_all=True)
    producer.run(FlowProducer.end_leases)
    expected = len(load.local_ids) * scenario.model.block_size_bytes // scenario.layers * len(layers)
    if checked_bytes != expected:
        raise BenchError(f"{case}, {way}: {checked_bytes} bytes compared of {expected}")
    return HandOver(computed.begun_s, computed.ended_s, loaded.begun_s, loaded.ended_s)


def _grow(children: Children, loads: Sequence[PlannedLoad], schedule: Schedule) -> Many:
    """A turn of many loads; without any the same waiting."""
    producer, reader = children["producer"], children["reader"]
    reader.run(FlowReader.poison, loads, None)
    reader.run(FlowReader.begin, loads, producer.run(FlowProducer.offer, loads, grows=True))
    growing = producer.start(FlowProducer.advance, schedule)
    watched = reader.run(FlowReader.watch, schedule)
    advanced = growing()
    if loads:
        reader.run(FlowReader.check, loads, None, check_all=False)
    producer.run(FlowProducer.end_leases)
    behind_s = [loaded - complete for loaded, complete in zip(watched.ended_s, advanced.ended_s, strict=True)]
    return Many(watched.lags_s, watched.cpu, advanced.cpu, behind_s)
