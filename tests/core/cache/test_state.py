"""State per request: which bytes of a slot belong to which unit of which segment, and invalid descriptions."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
import torch

from kvflow.core.cache.groups import CacheGroup, GroupKind, groups_of, layer_sets
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.state import Segment, StateLayout, StateTensor, segment_layouts
from kvflow.errors import LayoutError
from tests.support.tests_support import each

SLOTS, HEADS, HEAD_DIM, STATES, GROUPS, WIDTH = 3, 4, 2, 3, 2, 4
X = Segment(name="x", size=HEADS * HEAD_DIM, units=HEADS, model_units=HEADS)
B = Segment(name="B", size=GROUPS * STATES, units=GROUPS, model_units=GROUPS)
C = Segment(name="C", size=GROUPS * STATES, units=GROUPS, model_units=GROUPS)
CONV, SSM = StateTensor(name="conv", axis=0, segments=(X, B, C)), StateTensor(name="ssm", axis=0)
HEADS_OF_SSM = StateTensor(
    name="ssm", axis=0, segments=(Segment(name="h", size=HEADS, units=HEADS, model_units=HEADS),)
)
CHANNELS = X.size + B.size + C.size


def caches(*layers: int, transposed: bool = False) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    conv = (WIDTH - 1, CHANNELS) if transposed else (CHANNELS, WIDTH - 1)
    return {
        f"layers.{layer}": (torch.zeros(SLOTS, *conv), torch.zeros(SLOTS, HEADS, HEAD_DIM, STATES)) for layer in layers
    }


def read(address: int, size: int) -> list[float]:
    return torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=torch.float32).tolist()


@pytest.mark.parametrize("transposed", [False, True])
def test_every_unit_of_every_segment_is_where_torch_has_it(transposed: bool) -> None:
    layers = caches(1, 3, transposed=transposed)
    for tensor in (tensor for pair in layers.values() for tensor in pair):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
    axis = 1 if transposed else 0
    conv = StateTensor(name="conv", axis=axis, segments=CONV.segments)
    group = CacheGroup("mamba", layers, StateLayout.infer(layers, (conv, HEADS_OF_SSM)))
    starts = {"conv.x": 0, "conv.B": X.size, "conv.C": X.size + B.size, "ssm.h": 0}
    sets = layer_sets([group], tp_size=1)
    assert [one.layout.name for one in sets if not isinstance(one.layout, CacheLayout)] == [*starts]
    for one in sets:
        assert not isinstance(one.layout, CacheLayout)
        regions, segment, rows = one.regions, one.layout.segment, one.layout.rows
        assert rows == (WIDTH - 1 if transposed and one.layout.name != "ssm.h" else 1)
        each_unit = segment.size // segment.units
        for region, (name, row) in enumerate((name, row) for name in layers for row in range(rows)):
            tensor = layers[name][0 if one.layout.name.startswith("conv") else 1]
            for slot, unit in itertools.product(range(SLOTS), range(segment.units)):
                address = int(regions.bases[region] + slot * regions.strides[region]) + unit * regions.block.head_stride
                first = starts[one.layout.name] + unit * each_unit
                entries = tensor[slot, row] if rows > 1 else tensor[slot]
                assert read(address, regions.block.run) == entries[first : first + each_unit].flatten().tolist()


def test_a_state_group_says_so_and_its_blocks_are_slots() -> None:
    layers = caches(0)
    group = CacheGroup("mamba", layers, StateLayout.infer(layers, (CONV, SSM)))
    assert (group.kind, group.num_blocks, group.facts.block_size) == (GroupKind.STATE, SLOTS, 1)
    assert group.block_size_bytes == 4 * (CHANNELS * (WIDTH - 1) + HEADS * HEAD_DIM * STATES)
    assert group.facts.first_needed(41) == 40
    kv = {"layers.0": torch.zeros(2, 4, 4, 2, 8)}
    both = [group, CacheGroup("full", kv, CacheLayout.infer(kv, order="NHD", block_size=4))]
    assert groups_of(both, None) == tuple(both), "a layer may have state and K and V"


def test_a_slot_that_is_not_sliced_is_no_other_ranks() -> None:
    parts = segment_layouts(StateLayout.infer(caches(0), (StateTensor(name="conv"), SSM)), 4)
    assert [(part.name, part.segment.model_units) for part in parts] == [("conv.all", 4), ("ssm.all", 4)]


def state(*tensors: StateTensor, of: dict[str, Any] | None = None) -> StateLayout:
    return StateLayout.infer(of or caches(0), tensors)


WHOLE = caches(0)["layers.0"]
BROKEN = {"layers.0": (torch.zeros(SLOTS, WIDTH - 1, CHANNELS).transpose(1, 2), WHOLE[1])}
TURNED = {"layers.0": WHOLE, "layers.1": WHOLE[::-1]}


@each(
    ("make", "problem"),
    [
        (lambda: state(CONV), "expected 1 tensor, got 2"),
        (lambda: state(), "expected `array` of length >= 1"),
        (lambda: state(StateTensor(name="ssm"), SSM), "two have the same name"),
        (lambda: state(StateTensor(name="conv", axis=2), SSM), "has no axis 2 in a slot"),
        (lambda: state(StateTensor(name="c", segments=(X, B)), SSM), r"axis 0 has 20 entries, segments have \[8, 6\]"),
        (lambda: state(CONV, SSM, of=BROKEN), "tensor 'conv': a slot is not contiguous"),
        (lambda: state(StateTensor(name="a"), SSM, of=TURNED), "layer 'layers.1': tensor 'a' is"),
        (lambda: StateTensor(name="a b"), "without spaces"),
        (lambda: Segment(name="x", size=7, units=2, model_units=2), "size 7 is not a multiple of units, 2"),
        (lambda: StateTensor(name="a", segments=(X, X)), "two of its segments have the same name"),
        (lambda: Segment(name="x", size=4, units=0, model_units=2), "units"),
        (lambda: CacheGroup("m", caches(0), state(CONV, SSM), window=4), "window is 4"),
        (lambda: CacheGroup("m", caches(0), state(CONV, SSM), kind="full"), "StateLayout"),
        (lambda: CacheGroup("m", caches(1), state(CONV, SSM)), "layers differ"),
    ],
)
def test_what_cannot_be_is_named(make: Any, problem: str) -> None:
    with pytest.raises(LayoutError, match=problem):
        make()
