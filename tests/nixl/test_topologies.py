"""Prefill topologies to decode topologies over real NIXL: a fixed table that covers every axis, same reference model.

`tests/runtime/test_topologies.py` draws thousands of engines on the in-process transport. Here each row is one
difference, or a few at once, between two engines whose ranks all live in this process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest
import torch

from kvflow.core.cache.layout import KVStyle
from tests.hand_overs import STRAIGHT, Arrival, HandOver, Paths, run
from tests.reference_model import Engine, Look, Model

pytestmark = pytest.mark.nixl

PLAIN = Model(layers=4, kv_heads=4, head_size=16, dtype=torch.float16)
ONE_HEAD = replace(PLAIN, kv_heads=1)
TWO_HEADS = replace(PLAIN, kv_heads=2)
LATENT = Model(layers=4, kv_heads=1, head_size=72, dtype=torch.bfloat16, latent=True)

STAGES = {1: ((0, 1, 2, 3),), 2: ((0,), (1, 2, 3)), 3: ((0, 1), (2,), (3,))}

NHD = Look(order="NHD")
HND = Look(order="HND", hnd_in_memory=True)
NHD_SEEN_AS_HND = Look(order="HND", hnd_in_memory=False)
APART = Look(style=KVStyle.APART)
BLOCKS_FIRST = Look(style=KVStyle.BLOCKS_FIRST)
BLOCKS_FIRST_HND = Look(style=KVStyle.BLOCKS_FIRST, order="HND", hnd_in_memory=True)
FUSED = Look(style=KVStyle.FUSED)
FUSED_HND = Look(style=KVStyle.FUSED, order="HND", hnd_in_memory=True)
ONE_STORAGE = Look(shared=True)
LAYERS_INSIDE_BLOCKS = Look(shared=True, outer=("block", "layer", "kv"))
PADDED = Look(block_padding=24, spare_blocks=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A hand-over in short: pairs are (producer, consumer)."""

    id: str
    model: Model = PLAIN
    tp: tuple[int, int] = (1, 1)
    pp: tuple[int, int] = (1, 1)
    block_sizes: tuple[int, int] = (16, 16)
    looks: tuple[Look, Look] = (NHD, NHD)
    tells_heads: tuple[bool, bool] = (True, True)
    dp: tuple[int, int] = (0, 0)
    num_tokens: int = 100
    full_blocks_only: bool = False
    cached: int = 0
    """The consumer's blocks that need not be read."""
    named: tuple[int, ...] = ()
    fixed_ports: bool = False
    arrival: Arrival = Arrival.TOGETHER
    paths: Paths = STRAIGHT

    def hand_over(self) -> HandOver:
        ours, theirs = self.block_sizes
        offered = self.num_tokens // ours if self.full_blocks_only else -(-self.num_tokens // ours)
        wanted = -(-min(self.num_tokens, offered * ours) // theirs) - self.cached
        return HandOver(
            producer=self._engine(0, offered),
            consumer=self._engine(1, wanted),
            num_tokens=self.num_tokens,
            offered=tuple(Random(1).sample(range(offered + 4), offered)),
            wanted=tuple(Random(2).sample(range(wanted + 4), wanted)),
            named=self.named,
            fixed_ports=self.fixed_ports,
            arrival=self.arrival,
            paths=self.paths,
        )

    def _engine(self, side: int, blocks: int) -> Engine:
        return Engine(
            model=self.model,
            tp_size=self.tp[side],
            stages=STAGES[self.pp[side]],
            block_size=self.block_sizes[side],
            num_blocks=blocks + 4,
            looks=(self.looks[side],),
            tells_heads=self.tells_heads[side],
            dp_rank=self.dp[side],
        )


ROWS = [
    # Tensor parallelism.
    Row(id="same"),
    Row(id="tp 1:2", tp=(1, 2)),
    Row(id="tp 1:4 HND", tp=(1, 4), looks=(HND, HND)),
    Row(id="tp 2:1", tp=(2, 1)),
    Row(id="tp 4:1 in turn", tp=(4, 1), arrival=Arrival.IN_TURN),
    Row(id="tp 2:2 heads untold", tp=(2, 2), tells_heads=(False, False)),
    Row(id="tp 2:4 HND to NHD", tp=(2, 4), looks=(HND, NHD)),
    Row(id="tp 4:2 in turn", tp=(4, 2), arrival=Arrival.REVERSED),
    # More ranks than KV heads.
    Row(id="gqa replicas at producer", model=TWO_HEADS, tp=(4, 2)),
    Row(id="gqa replicas at producer, one reader", model=ONE_HEAD, tp=(4, 1)),
    Row(id="gqa replicas at consumer", model=TWO_HEADS, tp=(1, 4)),
    Row(id="gqa replicas at both", model=TWO_HEADS, tp=(4, 8), tells_heads=(True, False)),
    Row(id="mla tp 1:4", model=LATENT, tp=(1, 4)),
    Row(id="mla tp 4:1", model=LATENT, tp=(4, 1)),
    Row(id="mla tp 2:2 blocks 16:64", model=LATENT, tp=(2, 2), block_sizes=(16, 64)),
    # Orders and styles.
    Row(id="NHD to HND", looks=(NHD, HND)),
    Row(id="HND to NHD", looks=(HND, NHD)),
    Row(id="NHD as HND shape to HND", looks=(NHD_SEEN_AS_HND, HND)),
    Row(id="kv first to blocks first", looks=(NHD, BLOCKS_FIRST)),
    Row(id="kv first to apart", looks=(NHD, APART)),
    Row(id="kv first to fused", looks=(NHD, FUSED)),
    Row(id="blocks first to kv first HND", looks=(BLOCKS_FIRST_HND, HND)),
    Row(id="blocks first to apart", looks=(BLOCKS_FIRST, APART)),
    Row(id="blocks first to fused", looks=(BLOCKS_FIRST, FUSED)),
    Row(id="blocks first to itself", looks=(BLOCKS_FIRST, BLOCKS_FIRST)),
    Row(id="apart to kv first", looks=(APART, NHD)),
    Row(id="apart to blocks first", looks=(APART, BLOCKS_FIRST)),
    Row(id="apart to fused", looks=(APART, FUSED)),
    Row(id="apart to itself", looks=(APART, APART)),
    Row(id="fused to kv first", looks=(FUSED, NHD)),
    Row(id="fused HND to blocks first, tp 1:2", looks=(FUSED_HND, BLOCKS_FIRST), tp=(1, 2)),
    Row(id="fused to apart", looks=(FUSED, APART)),
    Row(id="fused to fused HND, tp 2:1", looks=(FUSED, FUSED_HND), tp=(2, 1)),
    Row(id="one storage for all layers", looks=(ONE_STORAGE, NHD)),
    Row(id="layers inside blocks on both sides", looks=(LAYERS_INSIDE_BLOCKS, LAYERS_INSIDE_BLOCKS)),
    Row(id="layers inside blocks to padded blocks", looks=(LAYERS_INSIDE_BLOCKS, PADDED)),
    # Block sizes, tails and prefixes.
    Row(id="blocks 16:64", block_sizes=(16, 64), num_tokens=150),
    Row(id="blocks 64:16", block_sizes=(64, 16), num_tokens=150),
    Row(id="blocks 16:64 HND tp 2:1", block_sizes=(16, 64), looks=(HND, HND), tp=(2, 1), num_tokens=129),
    Row(id="blocks 64:16 HND prefix in the midst of a block", block_sizes=(64, 16), looks=(HND, HND), cached=2),
    Row(id="blocks 64:16 full blocks only", block_sizes=(64, 16), num_tokens=150, full_blocks_only=True),
    Row(id="prefix cached", cached=3),
    Row(id="full hit", cached=7),
    Row(id="full hit, tp 2:4 pp 2:1", cached=7, tp=(2, 4), pp=(2, 1)),
    Row(id="prompt below one block", num_tokens=9, full_blocks_only=True),
    # Pipelines, replicas of the engine, tickets.
    Row(id="pp 1:2", pp=(1, 2)),
    Row(id="pp 2:1", pp=(2, 1)),
    Row(id="pp 2:3", pp=(2, 3)),
    Row(id="pp 2:3 tp 2:1 from one rank's ticket", pp=(2, 3), tp=(2, 1), fixed_ports=True, named=(2,)),
    Row(id="pp 3:2 mla", model=LATENT, pp=(3, 2), tp=(1, 2)),
    Row(id="second replica, one rank's ticket", dp=(1, 0), tp=(2, 1), fixed_ports=True, named=(1,)),
    Row(id="second replica, merged ticket", dp=(1, 1), tp=(2, 2)),
    # Dtypes.
    Row(id="bf16", model=replace(PLAIN, dtype=torch.bfloat16), tp=(2, 1)),
    Row(id="fp8", model=replace(PLAIN, dtype=torch.float8_e4m3fn), tp=(1, 2), looks=(NHD, HND)),
    Row(id="int8", model=replace(PLAIN, dtype=torch.int8), tp=(4, 2)),
    Row(id="fp32", model=replace(PLAIN, dtype=torch.float32), block_sizes=(16, 32)),
    # Ways for the bytes.
    Row(id="many slices", paths=Paths(slice_bytes_max=1000, slice_descriptors_max=7), tp=(2, 1)),
    Row(id="staged both sides, tp 2:1", paths=Paths(staged=(True, True)), tp=(2, 1)),
    Row(id="scratch, NHD to HND, tp 1:2", paths=Paths(scratch="always"), looks=(NHD, HND), tp=(1, 2)),
    Row(
        id="staged and scratch, blocks 64:16",
        paths=Paths(staged=(True, True), scratch="always"),
        looks=(HND, NHD),
        block_sizes=(64, 16),
    ),
]


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if index % 3 == 0 else pytest.mark.thorough) for index, row in enumerate(ROWS)],
    ids=lambda row: row.id,
)
async def test_the_right_bytes_move(row: Row) -> None:
    await run(row.hand_over())


def test_rows_differ() -> None:
    """A row that is there twice covers nothing."""
    assert len({row.id for row in ROWS}) == len({replace(row, id="") for row in ROWS}) == len(ROWS)
