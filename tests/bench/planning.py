"""What does not need a peer: how long planning a load takes.

What is timed is what a load pays on the reader: checking both lists of block ids, matching the chunks, and all slices.
Pairing the regions happens once per peer and is not part of it. Prompts have 128k tokens of a model with the shape of
the common 70B ones: 80 layers, 8 KV heads of 128 fp16 elements, blocks of 16 tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

import numpy as np

from kvflow.bench.cache import ITEMSIZE, PARTS
from kvflow.bench.loads import MIB, scattered_ids
from kvflow.core.cache.layout import BlockShape
from kvflow.core.cache.regions import Device, Regions
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import check_block_ids, match_chunks
from kvflow.core.plan.slices import plan_slices
from kvflow.core.plan.topology import HeadSource
from kvflow.limits import Limits, with_device_defaults
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn
from tests.bench.targets import Spread, at_most

_BLOCK_SIZE = 16
_RUN_BYTES = 128 * ITEMSIZE
_PROMPT_BLOCKS = (128 << 10) // _BLOCK_SIZE
_LIMITS = with_device_defaults(Limits(), "cpu")
_LEGEND = (
    "Planning a load: 100,000 descriptors, or a prompt of 128k tokens, 80 layers, blocks of 16; which rank reads it. "
    "Of 60 layers, 50 attend to a window of 1,024 tokens; moved is the share of all layers' bytes."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCase:
    """Planning a load of `blocks` blocks for a rank with `kv_heads` heads, from one with `remote_kv_heads`."""

    label: str
    kv_heads: int = 8
    remote_kv_heads: int = 8
    layers: int = 80
    blocks: int = _PROMPT_BLOCKS
    pool_blocks: int = 2 * _PROMPT_BLOCKS
    slice_bytes: int = _LIMITS.slice_bytes_max
    ms_max: float = 30.0
    windowed_layers: int = 0
    """How many more layers attend to a window only."""
    window: int = 1024
    """In tokens."""

    @property
    def groups(self) -> list[tuple[int, int]]:
        """(layers, blocks of the prompt) of each group."""
        groups = [(self.layers, self.blocks)]
        if self.windowed_layers:
            groups.append((self.windowed_layers, -(-self.window // _BLOCK_SIZE)))
        return groups


CASES = (
    PlanCase(label="100,000 descriptors", layers=32, blocks=1564, pool_blocks=2048, slice_bytes=16 * MIB, ms_max=20.0),
    PlanCase(label="1 of 1 head", kv_heads=1, remote_kv_heads=1),
    PlanCase(label="1 of 2 heads", kv_heads=1, remote_kv_heads=2),
    PlanCase(label="8 of 8 heads"),
    PlanCase(label="5 of 6 layers windowed", layers=10, windowed_layers=50, ms_max=10.0),
)


class PlanSample(NamedTuple):
    """Seconds for all slices, seconds until the first, the descriptors of each, and the bytes of all."""

    seconds: float
    first_s: float
    counts: list[int]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """`first_s` is when the first slice can be posted; the others are planned while bytes move."""

    label: str
    descriptors: int
    slices: int
    plan_s: Spread
    first_s: float
    moved: float
    """The bytes of the load, as a share of the bytes that all layers have of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """Measure how long kvflow plans loads of 100,000 descriptors and of 128k tokens.

    Nothing is transferred.
    """

    repeats: Annotated[int, "How often each load is planned."] = 15

    def sets(self) -> Sequence[RankSet]:
        return [RankSet(note="planning", turns=self._turns)]

    def _turns(self, _: Children) -> Iterator[Turn]:
        for case in CASES:
            block_maps = _pair_ranks(case)
            yield from (Turn(key=case, run=partial(_timed_plan, case, block_maps)) for _ in range(self.repeats))

    def judge(self, samples: Samples) -> Outcome:
        plans = {case: _summarize(case, taken) for case, taken in samples.of(PlanSample).items()}
        return Outcome(
            results={"planning": list(plans.values())},
            legend=_LEGEND,
            targets=[
                at_most(f"planning, {case.label}, ms", case.ms_max, [(plan.plan_s.p50 * 1e3, "")])
                for case, plan in plans.items()
            ]
            + [
                at_most(f"bytes moved, {case.label}", 0.2, [(plan.moved, "")])
                for case, plan in plans.items()
                if case.windowed_layers
            ],
        )


def _timed_plan(case: PlanCase, block_maps: Sequence[BlockMap]) -> PlanSample:
    given = []
    for at, (_, count) in enumerate(case.groups):
        given.append([list(scattered_ids(side * (at + 1), case.pool_blocks, count)) for side in ("local", "remote")])
    tokens = _BLOCK_SIZE * case.blocks
    start = time.perf_counter()
    reads = []
    for at, (block_map, ids) in enumerate(zip(block_maps, given, strict=True)):
        local, remote = (check_block_ids(some, num_blocks=case.pool_blocks, what="block_ids") for some in ids)
        chunks = match_chunks(
            local,
            len(remote),
            local_block_size=_BLOCK_SIZE,
            remote_block_size=_BLOCK_SIZE,
            num_tokens=tokens,
            needed_from=tokens - case.window if at else 0,
            whole=at == 0,
        )
        reads += [(block_map, some.locate(remote)) for some in chunks]
    slices = plan_slices(reads, bytes_max=case.slice_bytes, descriptors_max=_LIMITS.slice_descriptors_max)
    first = next(slices)
    first_s = time.perf_counter() - start
    counts, size_bytes = [len(first)], first.size_bytes
    for some in slices:  # each is dropped before the next, as a load drops what it has posted
        counts.append(len(some))
        size_bytes += some.size_bytes
    return PlanSample(time.perf_counter() - start, first_s, counts, size_bytes)


def _summarize(case: PlanCase, taken: list[PlanSample]) -> PlanResult:
    layers = case.layers + case.windowed_layers
    full_bytes = PARTS * layers * case.blocks * _BLOCK_SIZE * case.kv_heads * _RUN_BYTES
    return PlanResult(
        label=case.label,
        descriptors=sum(taken[0].counts),
        slices=len(taken[0].counts),
        plan_s=Spread.of([sample.seconds for sample in taken]),
        first_s=statistics.median(sample.first_s for sample in taken),
        moved=taken[0].size_bytes / full_bytes,
    )


def _pair_ranks(case: PlanCase) -> list[BlockMap]:
    """One block map for each group."""
    found, first = [], 0
    for count, _ in case.groups:
        local, remote = (
            _regions(count, heads, base + (first << 36), case.pool_blocks)
            for heads, base in ((case.kv_heads, 1 << 44), (case.remote_kv_heads, 1 << 45))
        )
        heads, layers = HeadSource(0, 0, case.remote_kv_heads - case.kv_heads, case.kv_heads, 1), range(count)
        found.append(BlockMap(local, remote, heads=heads, local_layers=layers, remote_layers=layers))
        first += count
    return found


def _regions(layers: int, heads: int, base: int, blocks: int) -> Regions:
    """K and V of all layers in HND, K and V apart by a whole pool, as [2, blocks, ...] tensors have them."""
    block = BlockShape(_BLOCK_SIZE, heads, _RUN_BYTES, _RUN_BYTES, _BLOCK_SIZE * _RUN_BYTES)
    count = PARTS * layers
    bases = base + np.arange(count, dtype=np.uint64) * np.uint64(blocks * block.size_bytes)
    return Regions(
        bases=bases.astype(np.uint64),
        strides=np.full(count, block.size_bytes, dtype=np.uint64),
        block=block,
        planes=("K", "V"),
        num_blocks=blocks,
        device=Device("cpu", 0),
    )
