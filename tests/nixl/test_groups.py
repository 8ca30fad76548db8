"""Caches of several groups over real NIXL: a few rows; `tests/runtime/test_groups.py` draws the others in process."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from kvflow.core.cache.layout import KVStyle
from tests.support.hand_overs import FULL, Attention, HandOver, LayerPart, Paths, run
from tests.support.reference_model import Engine, Look, Model

pytestmark = pytest.mark.nixl

NUM_TOKENS = 150
LAYERS = 4
MODEL = Model(layers=LAYERS, kv_heads=4, head_size=16, dtype=torch.float16)
HND = Look(order="HND", hnd_in_memory=True)


def part(
    number: int,
    attention: Attention,
    *,
    tp: tuple[int, int] = (1, 1),
    block_sizes: tuple[int, int] = (16, 16),
    looks: tuple[Look, Look] = (Look(), Look()),
    model: Model = MODEL,
) -> LayerPart:
    """Four layers of the model; their blocks lie anywhere."""
    layers = tuple(range(number * LAYERS, (number + 1) * LAYERS))
    sides, tables = [], []
    for side, size in enumerate(block_sizes):
        count = -(-NUM_TOKENS // size) - attention.first_block(NUM_TOKENS, size)
        engine = Engine(model=model, tp_size=tp[side], stages=(layers,), block_size=size, num_blocks=count + 3)
        sides.append(replace(engine, looks=(looks[side],)))
        tables.append(tuple(Random(number + side).sample(range(count + 3), count)))
    return LayerPart(producer=sides[0], consumer=sides[1], attention=attention, offered=tables[0], wanted=tables[1])


SLIDING, CHUNKED = Attention(window=40), Attention(window=64, chunked=True)
ROWS = {
    "full and sliding": HandOver(parts=(part(0, FULL), part(1, SLIDING)), num_tokens=NUM_TOKENS),
    "one pool on both sides": HandOver(
        parts=(part(0, FULL), part(1, SLIDING), part(2, CHUNKED)), num_tokens=NUM_TOKENS, one_pool=(True, True)
    ),
    "all sliding": HandOver(parts=(part(0, SLIDING),), num_tokens=NUM_TOKENS),
    "tp 2 to 1, other block sizes and orders": HandOver(
        parts=(
            part(0, FULL, tp=(2, 1), block_sizes=(16, 32), looks=(Look(), HND)),
            part(1, SLIDING, tp=(2, 1), block_sizes=(32, 8), looks=(HND, Look(style=KVStyle.BLOCKS_FIRST))),
        ),
        num_tokens=NUM_TOKENS,
    ),
    "some layers have fewer heads, tp 1 to 2": HandOver(
        parts=(part(0, FULL, tp=(1, 2)), part(1, CHUNKED, tp=(1, 2), model=replace(MODEL, kv_heads=1))),
        num_tokens=NUM_TOKENS,
        by_name=True,
    ),
    "through host buffers and scratch": HandOver(
        parts=(part(0, FULL, looks=(Look(), HND)), part(1, SLIDING, block_sizes=(32, 16))),
        num_tokens=NUM_TOKENS,
        paths=Paths(staged=(True, True), scratch="always"),
    ),
}


FAST = ("tp 2 to 1, other block sizes and orders", "through host buffers and scratch")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if name in FAST else pytest.mark.thorough, id=name) for name, row in ROWS.items()],
)
async def test_every_token_of_every_window_arrives(row: HandOver) -> None:
    await run(row)
