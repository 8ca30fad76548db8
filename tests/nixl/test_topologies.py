"""Prefill topologies to decode topologies over real NIXL: a fixed table that covers every axis, same reference model.

`tests/runtime/test_topologies.py` draws thousands of engines on the in-process transport. Here each row differs
in what NIXL does: how many peers there are, what memory is registered, whether anything is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
import torch

from tests.support.hand_overs import STRAIGHT, Arrival, HandOver, Paths, one_part, run
from tests.support.reference_model import Engine, Look, Model

pytestmark = pytest.mark.nixl

PLAIN = Model(layers=4, kv_heads=4, head_size=16, dtype=torch.float16)
LATENT = Model(layers=4, kv_heads=1, head_size=72, dtype=torch.bfloat16, latent=True)

STAGES = {1: ((0, 1, 2, 3),), 2: ((0,), (1, 2, 3)), 3: ((0, 1), (2,), (3,))}

NHD = Look(order="NHD")
HND = Look(order="HND", hnd_in_memory=True)
ONE_STORAGE = Look(shared=True)
LAYERS_INSIDE_BLOCKS = Look(shared=True, outer=("block", "layer", "kv"))
PADDED = Look(block_padding=24, spare_blocks=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A hand-over in short: pairs are (producer, consumer)."""

    id: str
    model: Model = PLAIN
    tp: tuple[int, int] = (1, 1)
    sharded: tuple[bool, bool] = (False, False)
    pp: tuple[int, int] = (1, 1)
    block_sizes: tuple[int, int] = (16, 16)
    looks: tuple[Look, Look] = (NHD, NHD)
    states_heads: tuple[bool, bool] = (True, True)
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
        ours, theirs = (self._engine(side, 0).block_tokens for side in (0, 1))
        offered = self.num_tokens // ours if self.full_blocks_only else -(-self.num_tokens // ours)
        wanted = -(-min(self.num_tokens, offered * ours) // theirs) - self.cached
        return one_part(
            self._engine(0, offered),
            self._engine(1, wanted),
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
            sharded=self.sharded[side],
            looks=(self.looks[side],),
            states_heads=self.states_heads[side],
            dp_rank=self.dp[side],
        )


ROWS = [
    Row(id="same"),
    Row(id="tp 2:4 HND to NHD", tp=(2, 4), looks=(HND, NHD)),
    Row(id="mla tp 1:4", model=LATENT, tp=(1, 4)),
    Row(id="mla, tokens sharded over 2:4", model=LATENT, tp=(2, 4), sharded=(True, True)),
    Row(id="blocks 64:16 HND prefix in the midst of a block", block_sizes=(64, 16), looks=(HND, HND), cached=2),
    Row(id="full hit", cached=7),
    Row(id="pp 2:3 tp 2:1 from one rank's ticket", pp=(2, 3), tp=(2, 1), fixed_ports=True, named=(2,)),
    Row(id="staged both sides, tp 2:1", paths=Paths(staged=(True, True)), tp=(2, 1)),
]
MORE_ROWS = [
    Row(id="one storage for all layers", looks=(ONE_STORAGE, NHD)),
    Row(id="layers inside blocks to padded blocks", looks=(LAYERS_INSIDE_BLOCKS, PADDED)),
    Row(id="full hit, tp 2:4 pp 2:1", cached=7, tp=(2, 4), pp=(2, 1)),
    Row(id="second replica, one rank's ticket", dp=(1, 0), tp=(2, 1), fixed_ports=True, named=(1,)),
    Row(
        id="staged and scratch, blocks 64:16",
        paths=Paths(staged=(True, True), scratch="always"),
        looks=(HND, NHD),
        block_sizes=(64, 16),
    ),
]


@pytest.mark.parametrize(
    "row", [*ROWS, *(pytest.param(row, marks=pytest.mark.thorough) for row in MORE_ROWS)], ids=lambda row: row.id
)
async def test_the_right_bytes_move(row: Row) -> None:
    await run(row.hand_over())
