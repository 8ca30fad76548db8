"""What does not need a peer: planning a prompt of 128k tokens, and what a peer costs in memory.

The model has the shape of the common 70B ones: 80 layers, 8 KV heads of 128 fp16 elements, blocks of 16 tokens. What is
timed is what a load pays on the reader: checking both lists of block ids, matching the chunks, and all slices.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from dataclasses import dataclass

import numpy as np

from kvflow.cli.topology_bench.cuts import HEAD_SIZE, ITEMSIZE, PARTS, Order
from kvflow.config import Config
from kvflow.core.layout import BlockShape
from kvflow.core.pairing import HeadSlice, Pairing
from kvflow.core.plan import check_block_ids, match_chunks, plan_slices
from kvflow.core.regions import Device, Regions

PROMPT_TOKENS = 128 << 10
_LAYERS = 80
_BLOCK_SIZE = 16
_BLOCKS = PROMPT_TOKENS // _BLOCK_SIZE
_POOL_BLOCKS = 2 * _BLOCKS
_REPEATS = 15
_LIMITS = Config(engine_id="limits")
_MEMORY_BLOCKS = (1 << 12, 1 << 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningCase:
    """Planning the prompt for a rank with `kv_heads` heads, read from one with `remote_kv_heads`."""

    kv_heads: int
    remote_kv_heads: int

    @property
    def label(self) -> str:
        plural = "s" if self.remote_kv_heads > 1 else ""
        return f"{self.kv_heads} of {self.remote_kv_heads} head{plural}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlanning:
    """`first_s` is when the first slice can be posted; the others are planned while bytes move."""

    label: str
    descriptors: int
    slices: int
    median_s: float
    min_s: float
    max_s: float
    first_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMemory:
    """Bytes that a peer's regions, the pairing with it and its region pairs take, for two sizes of its pool."""

    label: str
    regions: int
    blocks: tuple[int, int]
    bytes_of_blocks: tuple[int, int]

    @property
    def growth(self) -> float:
        return self.bytes_of_blocks[1] / self.bytes_of_blocks[0]


PLANNING_CASES = (
    PlanningCase(kv_heads=1, remote_kv_heads=1),
    PlanningCase(kv_heads=1, remote_kv_heads=2),
    PlanningCase(kv_heads=8, remote_kv_heads=8),
)


def measure_planning() -> tuple[PromptPlanning, ...]:
    return tuple(_plan_case(case) for case in PLANNING_CASES)


def measure_peer_memory() -> tuple[PeerMemory, ...]:
    """For a few layers and many, cut alike and in the smallest pieces."""
    return tuple(_peer_memory(layers, order) for layers in (20, _LAYERS) for order in (Order.HND, Order.NHD))


def regions(*, layers: int, blocks: int, heads: int, base: int, order: Order = Order.HND) -> Regions:
    """K and V of all layers, K and V apart by a whole pool, as [2, blocks, ...] tensors have them."""
    run = HEAD_SIZE * ITEMSIZE
    strides = (run, _BLOCK_SIZE * run) if order is Order.HND else (heads * run, run)
    block = BlockShape(_BLOCK_SIZE, heads, run, *strides)
    count = PARTS * layers
    bases = base + np.arange(count, dtype=np.uint64) * np.uint64(blocks * block.size_bytes)
    return Regions(
        bases=bases.astype(np.uint64),
        strides=np.full(count, block.size_bytes, dtype=np.uint64),
        block=block,
        parts=("K", "V"),
        num_blocks=blocks,
        device=Device("cpu", 0),
    )


def _plan_case(case: PlanningCase) -> PromptPlanning:
    local = regions(layers=_LAYERS, blocks=_POOL_BLOCKS, heads=case.kv_heads, base=1 << 40)
    remote = regions(layers=_LAYERS, blocks=_POOL_BLOCKS, heads=case.remote_kv_heads, base=1 << 42)
    heads = HeadSlice(0, case.remote_kv_heads - case.kv_heads, case.kv_heads)
    pairing = Pairing(local, remote, heads=heads, local_layers=range(_LAYERS), remote_layers=range(_LAYERS))
    rng = np.random.default_rng(0)
    local_ids, remote_ids = (rng.permutation(_POOL_BLOCKS)[:_BLOCKS].tolist() for _ in range(2))
    runs = [_timed_plan(pairing, local_ids, remote_ids) for _ in range(_REPEATS)]
    seconds = [run[0] for run in runs]
    return PromptPlanning(
        label=case.label,
        descriptors=sum(runs[0][2]),
        slices=len(runs[0][2]),
        median_s=statistics.median(seconds),
        min_s=min(seconds),
        max_s=max(seconds),
        first_s=statistics.median(run[1] for run in runs),
    )


def _timed_plan(pairing: Pairing, local_ids: list[int], remote_ids: list[int]) -> tuple[float, float, list[int]]:
    """Seconds for all slices, seconds until the first, and the descriptors of each."""
    start = time.perf_counter()
    local = check_block_ids(local_ids, num_blocks=_POOL_BLOCKS, what="local block_ids")
    remote = check_block_ids(remote_ids, num_blocks=_POOL_BLOCKS, what="remote block_ids")
    chunks = match_chunks(
        local,
        len(remote),
        local_block_size=_BLOCK_SIZE,
        remote_block_size=_BLOCK_SIZE,
        num_tokens=PROMPT_TOKENS,
    )
    slices = plan_slices(
        pairing,
        [some.locate(remote) for some in chunks],
        bytes_max=_LIMITS.slice_bytes_max,
        descriptors_max=_LIMITS.slice_descriptors_max,
    )
    counts = [len(next(slices))]
    first_s = time.perf_counter() - start
    counts += [len(some) for some in slices]  # each is dropped before the next, as a load drops what it has posted
    return time.perf_counter() - start, first_s, counts


def _peer_memory(layers: int, order: Order) -> PeerMemory:
    small, large = (_traced_peer(layers, blocks, order) for blocks in _MEMORY_BLOCKS)
    return PeerMemory(
        label="pieces of whole blocks" if order is Order.HND else "smallest pieces (NHD to HND)",
        regions=PARTS * layers,
        blocks=_MEMORY_BLOCKS,
        bytes_of_blocks=(small, large),
    )


def _traced_peer(layers: int, blocks: int, order: Order) -> int:
    """Bytes that stay allocated for one more peer."""
    local = regions(layers=layers, blocks=blocks, heads=8, base=1 << 40)
    _make_peer(local, layers, blocks, order)  # what is made once for all peers, such as caches of numpy
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    peer = _make_peer(local, layers, blocks, order)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peer is not None
    return after - before


def _make_peer(local: Regions, layers: int, blocks: int, order: Order) -> tuple[Pairing, object]:
    remote = regions(layers=layers, blocks=blocks, heads=8, base=1 << 44, order=order)
    layer_indices = range(layers)
    pairing = Pairing(local, remote, heads=HeadSlice(0, 0, 8), local_layers=layer_indices, remote_layers=layer_indices)
    return pairing, pairing.groups(_BLOCK_SIZE)
