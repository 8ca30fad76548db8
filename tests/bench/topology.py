"""`dev.py bench topology`: one consumer rank loads the same tokens from producers that hold them in different cuts.

First each case has a load of which every byte is compared. In the rounds the order of the cases rotates, and one layer
of each load is compared. A load is offered right before it is made, so what a staged producer has not copied yet
counts; a small load before it wakes all processes that take part. Nothing but the load itself is timed.

The model has the cache of the common 7B models without grouped queries: 32 KV heads of 128 fp16 elements. Rank 1 of 4
holds 8 heads, so K or V of one block of 16 tokens is 32 KiB, and what it reads of a larger rank begins in the middle.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal

import kvflow
from kvflow.bench.cache import CacheShape
from kvflow.bench.child import BenchError, RankProcess
from kvflow.bench.engine import EngineProducer, config_of, open_producer
from kvflow.bench.loads import MIB, Fabric, PlannedLoad, SettingsError, scattered_ids
from kvflow.checks import counted
from tests.bench.consumers import Consumers, LoadResult, open_consumers
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn, interleaved
from tests.bench.targets import Spread, TargetRow, at_least

MODEL_KV_HEADS = 32
SLICE_RATIO_MIN = 0.8
SLICE_PIECE_BYTES = 32 << 10
_LEGEND = (
    "One rank loads the same tokens into the same memory; only the producer's cut differs, unless the row says "
    "otherwise. What is read may be more than is wanted, which speeds are of. Ratios are of speed to the first row, "
    "within each round. The time from a staged producer runs from the offer on, copying included. All bytes of one "
    "load were compared, then a layer of each."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One rank's cache and how its runtime is configured."""

    tp_rank: int = 1
    tp_size: int = 4
    order: Literal["HND", "NHD"] = "HND"
    block_size: int = 16
    staged: bool = False
    scratch: bool = True

    @property
    def kv_heads(self) -> int:
        return MODEL_KV_HEADS // self.tp_size

    def shape(self, *, layers: int, tokens: int) -> CacheShape:
        """Return the shape of the rank's cache with room for `tokens` tokens."""
        return CacheShape(
            layers=layers,
            blocks=tokens // self.block_size,
            kv_heads=self.kv_heads,
            block_size=self.block_size,
            order=self.order,
            first_head=self.tp_rank * self.kv_heads,
        )

    @property
    def engine_id(self) -> str:
        """Name of the engine, equal for all of its ranks."""
        extras = f"{'-staged' if self.staged else ''}{'' if self.scratch else '-direct'}"
        return f"tp{self.tp_size}-{self.order.lower()}{self.block_size}{extras}"

    @property
    def name(self) -> str:
        return f"{self.engine_id} rank {self.tp_rank}"


@dataclass(frozen=True, slots=True)
class Case:
    """A row to measure: `consumer` loads from `producers`, ranks of one engine, all that it needs."""

    label: str
    consumer: Cut
    producers: tuple[Cut, ...]

    @property
    def is_head_slice(self) -> bool:
        """True if some heads of each HND block are read, and nothing else differs."""
        ours, theirs = self.consumer, self.producers[0]
        alike = (ours.order, ours.block_size) == (theirs.order, theirs.block_size)
        return alike and ours.order == "HND" and ours.kv_heads < theirs.kv_heads

    @property
    def is_all(self) -> bool:
        """True if this consumer is all that its producers wait for, so that its load ends their leases."""
        return self.consumer.tp_size <= self.producers[0].tp_size


_RANK, _NHD, _LARGE_BLOCKS = Cut(), Cut(order="NHD"), Cut(block_size=64)
_STAGED, _DIRECT = Cut(staged=True), Cut(scratch=False)
_TP2, _TP1 = Cut(tp_rank=0, tp_size=2), Cut(tp_rank=0, tp_size=1)

CASES = (
    Case("HND, cut alike", _RANK, (_RANK,)),
    Case("decode TP 2x, head slice", _RANK, (_TP2,)),
    Case("decode TP 4x, head slice", _RANK, (_TP1,)),
    Case("prefill TP 2x, two ranks", _RANK, (Cut(tp_rank=2, tp_size=8), Cut(tp_rank=3, tp_size=8))),
    Case("NHD, cut alike", _NHD, (_NHD,)),
    Case("NHD, decode TP 2x", _NHD, (replace(_TP2, order="NHD"),)),
    Case("NHD to HND", _RANK, (_NHD,)),
    Case("NHD to HND, no scratch", _DIRECT, (_NHD,)),
    Case("blocks of 16 to 64", _LARGE_BLOCKS, (_RANK,)),
    Case("blocks of 64 to 16", _RANK, (_LARGE_BLOCKS,)),
    Case("staged producer", _RANK, (_STAGED,)),
    Case("staged consumer", _STAGED, (_RANK,)),
)
"""All cases; the others are compared with the first."""
UNIT_TOKENS = max(cut.block_size for case in CASES for cut in (case.consumer, *case.producers))
CONSUMERS = tuple(dict.fromkeys(case.consumer for case in CASES))
PRODUCERS = tuple(dict.fromkeys(cut for case in CASES for cut in case.producers))


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case over all rounds, one load a round.

    `size_bytes`: size of the request, for speeds. `read_bytes`: size of the reads for it. `ratio`: of speed, to the
    first case, in each round.
    """

    label: str
    is_head_slice: bool = field(repr=False)
    size_bytes: int = field(repr=False)
    read_bytes: int = field(repr=False)
    descriptors: int
    piece_bytes: int
    load_s: Spread
    gb_per_s: float
    ratio: Spread
    checked_bytes: int = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Compare what loads cost between engines that cut the cache differently: TP, NHD and HND, block sizes, staging."""

    transport: Annotated[Fabric, "Fabric that moves the bytes: shm or tcp (UCX_TLS=tcp)."] = Fabric.SHM
    size: Annotated[int, "MB (2**20 bytes) that a load brings a rank with 8 heads."] = 64
    rounds: Annotated[int, "Loads of each case; the cases take turns."] = 15
    layers: Annotated[int, "Layers of the imaginary model."] = 32

    @property
    def tokens(self) -> int:
        """Tokens of one load."""
        unit_bytes = _RANK.shape(layers=self.layers, tokens=UNIT_TOKENS).size_bytes
        units, rest = divmod(self.size * MIB, unit_bytes)
        if rest or not units:
            raise SettingsError(
                f"--size: {self.size} MB is no multiple of {UNIT_TOKENS} tokens, which have {unit_bytes} bytes"
            )
        return units * UNIT_TOKENS

    @property
    def pool_tokens(self) -> int:
        """Tokens of the pool: an eighth more than a load takes, so that it is scattered, and a unit to wake up by."""
        units = self.tokens // UNIT_TOKENS
        return UNIT_TOKENS * (units + -(-units // 8) + 1)

    def shape(self, cut: Cut) -> CacheShape:
        return cut.shape(layers=self.layers, tokens=self.pool_tokens)

    def useful_bytes(self, cut: Cut) -> int:
        """Bytes that a load moves into this rank."""
        return cut.shape(layers=self.layers, tokens=self.tokens).size_bytes

    def sets(self) -> Sequence[RankSet]:
        self.shape(_TP1).checked("--size")
        consumers = [(config_of_rank("consumer", cut, self.shape(cut)), self.shape(cut)) for cut in CONSUMERS]
        producers = [(cut.name, config_of_rank("producer", cut, self.shape(cut)), self.shape(cut)) for cut in PRODUCERS]
        ranks = [RankProcess(name, partial(open_producer, config, shape)) for name, config, shape in producers]
        ranks.append(RankProcess("consumer", partial(open_consumers, consumers)))
        note, environment = f"{self.transport}: starting {counted(len(ranks), 'rank')}", self.transport.environment
        return [RankSet(note=note, ranks=ranks, turns=self._turns, environment=environment)]

    def judge(self, samples: Samples) -> Outcome:
        return judge(samples, self.useful_bytes)

    def loads_of_turn(self, case: Case, turn: str) -> tuple[PlannedLoad, PlannedLoad]:
        """Return a small load that wakes all processes, untimed, and the measured load. The two share no block.

        All cases of a round move the same tokens, from and to the same blocks as far as they have blocks of one size.
        """
        local, remote = case.consumer.block_size, case.producers[0].block_size
        local_ids, remote_ids = self._pick_ids(f"{turn} local", local), self._pick_ids(f"{turn} remote", remote)
        wake, wake_remote, name = UNIT_TOKENS // local, UNIT_TOKENS // remote, f"{turn} {case.label}"
        return (
            PlannedLoad(request_id=f"{name} wake", local_ids=local_ids[:wake], remote_ids=remote_ids[:wake_remote]),
            PlannedLoad(request_id=name, local_ids=local_ids[wake:], remote_ids=remote_ids[wake_remote:]),
        )

    def _pick_ids(self, seed: str, block_size: int) -> tuple[int, ...]:
        count = (self.tokens + UNIT_TOKENS) // block_size
        return scattered_ids(f"{seed} {block_size}", self.pool_tokens // block_size, count)

    def _turns(self, children: Children) -> Iterator[Turn]:
        every_layer, note = tuple(range(self.layers)), f"{len(CASES)} cases, every byte of a load compared"
        for case in CASES:
            yield Turn(key=("check", case), run=partial(_run, self, children, case, "check", every_layer), note=note)
        for index, case in interleaved(CASES, range(self.rounds)):
            run = partial(_run, self, children, case, f"round {index}", (index % self.layers,))
            yield Turn(key=("rounds", case), run=run, note=f"{self.rounds} rounds")


def _run(scenario: Topology, children: Children, case: Case, turn: str, layers: Sequence[int]) -> LoadResult:
    """Do a turn: the load that wakes all processes, then the load that is measured and compared."""
    wake, load = scenario.loads_of_turn(case, turn)
    consumer, rank = children["consumer"], CONSUMERS.index(case.consumer)
    consumer.run(Consumers.poison, rank, load, layers)
    for planned in (wake, load):
        offers = [children[cut.name].run(EngineProducer.offer, [planned]) for cut in case.producers]
        result = consumer.run(Consumers.load, rank, planned, [ticket for (ticket,) in offers])
    checked_bytes = consumer.run(Consumers.check, rank, load, case.producers[0].block_size, layers)
    for cut in case.producers:
        children[cut.name].run(EngineProducer.end_leases, read=case.is_all)
    return result._replace(checked_bytes=checked_bytes)


def config_of_rank(side: str, cut: Cut, shape: CacheShape) -> kvflow.Config:
    return replace(
        config_of(f"{side}-{cut.engine_id}"),
        tp_rank=cut.tp_rank,
        tp_size=cut.tp_size,
        num_kv_heads=MODEL_KV_HEADS,
        scratch="auto" if cut.scratch else "never",
        staging="always" if cut.staged else "never",
        host_buffer_bytes_max=shape.size_bytes,
    )


# --- from loads to rows and verdicts


def judge(samples: Samples, useful_bytes: Callable[[Cut], int]) -> Outcome:
    loads = samples.of(LoadResult)
    for case in CASES:
        (first,), wanted = loads["check", case], useful_bytes(case.consumer)
        if first.checked_bytes != wanted:
            raise BenchError(f"{case.label}: {first.checked_bytes} bytes compared of {wanted}")
    cases = summarize({case.label: loads["check", case] + loads["rounds", case] for case in CASES}, useful_bytes)
    return Outcome(results={"cases": cases}, legend=_LEGEND, targets=[slice_target(cases)])


def summarize(loads: Mapping[str, Sequence[LoadResult]], useful_bytes: Callable[[Cut], int]) -> list[CaseResult]:
    """Return the rows of all cases. `loads`: each case's loads by label, first a load with all bytes compared."""
    return [_summarize_case(case, loads, useful_bytes(case.consumer)) for case in CASES]


def _summarize_case(case: Case, loads: Mapping[str, Sequence[LoadResult]], size_bytes: int) -> CaseResult:
    timed, baseline = loads[case.label][1:], loads[CASES[0].label][1:]
    # Blocks that happen to be neighbours on both sides are read as one, so rounds differ a little.
    descriptors, read_bytes = statistics.median_high(load.descriptors for load in timed), timed[-1].size_bytes
    load_s = Spread.of([load.seconds for load in timed])
    return CaseResult(
        label=case.label,
        is_head_slice=case.is_head_slice,
        size_bytes=size_bytes,
        read_bytes=read_bytes,
        descriptors=descriptors,
        piece_bytes=read_bytes // descriptors,
        load_s=load_s,
        gb_per_s=size_bytes / load_s.p50 / 1e9,
        ratio=Spread.of([other.seconds / load.seconds for other, load in zip(baseline, timed, strict=True)]),
        checked_bytes=sum(load.checked_bytes for load in loads[case.label]),
    )


def slice_target(cases: Sequence[CaseResult]) -> TargetRow:
    large = [
        (case.ratio.p50, case.label) for case in cases if case.is_head_slice and case.piece_bytes >= SLICE_PIECE_BYTES
    ]
    return at_least("HND slices >= 32 KiB, ratio", SLICE_RATIO_MIN, large)
