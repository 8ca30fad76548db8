"""How long kvflow's planner takes for 100,000 descriptors: from block ids to arrays of addresses, nothing merged.

What is timed is what a load pays on the reader: checking both lists of block ids, planning the read, and cutting it
into slices. Pairing the regions happens once per peer and is not part of it.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from kvflow.cli.bench.samples import PlanningResult
from kvflow.core.layout import BlockShape
from kvflow.core.pairing import Pairing, pair_whole
from kvflow.core.plan import check_block_ids, match_chunks, plan_slices
from kvflow.core.regions import Device, Regions

_LAYERS = 32
_BLOCKS = 2048
_BLOCK = BlockShape(tokens=16, heads=8, run=256, token_stride=256, head_stride=16 * 256)
_DESCRIPTORS = 100_000
_REPEATS = 15
_SLICE_BYTES = 16 << 20
_SLICE_DESCRIPTORS = 8192


def measure_planning() -> PlanningResult:
    pairing = pair_whole(_regions(1 << 40), _regions(1 << 41))
    count = -(-_DESCRIPTORS // (2 * _LAYERS))
    rng = np.random.default_rng(0)
    local_ids, remote_ids = (rng.permutation(_BLOCKS)[:count].tolist() for _ in range(2))
    runs = [_timed_plan(pairing, local_ids, remote_ids) for _ in range(_REPEATS)]
    return PlanningResult(descriptors=runs[0][1], median_s=statistics.median(seconds for seconds, _ in runs))


def _regions(base: int) -> Regions:
    """K and V of all layers, K and V apart by a whole pool, as [2, blocks, ...] tensors have them."""
    pool_bytes = _BLOCKS * _BLOCK.size_bytes
    count = 2 * _LAYERS
    return Regions(
        bases=(base + np.arange(count, dtype=np.uint64) * np.uint64(pool_bytes)).astype(np.uint64),
        strides=np.full(count, _BLOCK.size_bytes, dtype=np.uint64),
        block=_BLOCK,
        parts=("K", "V"),
        num_blocks=_BLOCKS,
        device=Device("cpu", 0),
    )


def _timed_plan(pairing: Pairing, local_ids: list[int], remote_ids: list[int]) -> tuple[float, int]:
    """Seconds, and how many descriptors came out."""
    start = time.perf_counter()
    local = check_block_ids(local_ids, num_blocks=_BLOCKS, what="local block_ids")
    remote = check_block_ids(remote_ids, num_blocks=_BLOCKS, what="remote block_ids")
    tokens = _BLOCK.tokens
    chunks = match_chunks(
        local, len(remote), local_block_size=tokens, remote_block_size=tokens, num_tokens=tokens * len(remote)
    )
    located = [some.locate(remote) for some in chunks]
    slices = list(plan_slices(pairing, located, bytes_max=_SLICE_BYTES, descriptors_max=_SLICE_DESCRIPTORS))
    return time.perf_counter() - start, sum(map(len, slices))
