"""The planner broken on purpose, in each kind of cache: the reference models have to find it within 100 examples."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvflow.core.cache.state import SegmentLayout
from kvflow.core.plan import block_map, topology
from kvflow.core.plan.block_map import BlockMap, RegionMap
from kvflow.core.plan.descriptors import Chunks, match_chunks
from kvflow.errors import KVFlowError
from kvflow.runtime.load import plan
from kvflow.runtime.world import World
from kvflow.testing import InprocCluster, run_virtual
from tests.runtime import test_groups, test_state, test_topologies
from tests.support import hand_overs

Patch = Callable[[pytest.MonkeyPatch], None]


def change_heads(patch: pytest.MonkeyPatch, **starts: int) -> None:
    """As if the heads of every source began elsewhere."""
    real = topology.source_at

    def changed(ours: topology.CacheShare, theirs: topology.CacheShare) -> topology.HeadSource | None:
        source = real(ours, theirs)
        return None if source is None else source._replace(**starts)

    patch.setattr(topology, "source_at", changed)


def read_the_first_heads(patch: pytest.MonkeyPatch) -> None:
    """Read the first heads, whichever heads a rank needs."""
    change_heads(patch, remote_start=0)


def write_the_first_heads(patch: pytest.MonkeyPatch) -> None:
    change_heads(patch, local_start=0)


def match_layers_by_position(patch: pytest.MonkeyPatch) -> None:
    """As if both sides had the same layers, in the same order."""
    real = block_map._rows

    def rows(local: Any, remote: Any, heads: Any, places: Any) -> Any:
        return real(local, remote, heads, [(ours, at) for at, (ours, _) in enumerate(places)])

    patch.setattr(block_map, "_rows", rows)


def read_tails_whole(patch: pytest.MonkeyPatch) -> None:
    """Also read the bytes behind the prompt's end."""
    real = BlockMap._make_region_maps
    patch.setattr(BlockMap, "_make_region_maps", lambda self, tokens: real(self, self.chunk_tokens))


def put_all_parts_of_a_block_first(patch: pytest.MonkeyPatch) -> None:
    """Where one side's blocks are larger."""
    patch.setattr(block_map, "RegionMap", lambda **facts: RegionMap(**{**facts, "local_step": 0}))


def swap_strides(patch: pytest.MonkeyPatch) -> None:
    """Heads before tokens, or after."""
    real = block_map._pieces

    def pieces(ours: Any, theirs: Any, tokens: int, heads: int) -> Any:
        turned = theirs._replace(token_stride=theirs.head_stride, head_stride=theirs.token_stride)
        return real(ours, turned if theirs.tokens > 1 and theirs.heads > 1 else theirs, tokens, heads)

    patch.setattr(block_map, "_pieces", pieces)


def take_windows_for_beginnings(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a window for those of the prompt's first tokens."""

    def match(*args: Any, whole: bool, **facts: Any) -> tuple[Chunks, ...]:
        return match_chunks(*args, whole=True, **{**facts, "needed_from": 0})

    patch.setattr(plan, "match_chunks", match)


def begin_segments_at_the_first(patch: pytest.MonkeyPatch) -> None:
    """Read x where B and C are."""
    real = SegmentLayout.region_addresses
    patch.setattr(SegmentLayout, "region_addresses", lambda self, caches: real(replace(self, start=0), caches))


def forget_rows(patch: pytest.MonkeyPatch) -> None:
    """All rows in front of a sliced axis but the first."""
    patch.setattr(SegmentLayout, "rows", property(lambda self: 1))


TENSOR_PARALLEL = test_topologies.hand_overs(tp_sizes=(1, 2, 4))
PIPELINES = test_topologies.hand_overs(pp_sizes=(1, 2, 3))
LAYOUTS = test_topologies.hand_overs()
WHOLE_HEADS = test_topologies.of_whole_heads()
WINDOWS = test_groups.group_hand_overs()
STATE = test_state.cases()
SEVERAL_RANKS = test_groups.group_hand_overs(tp_sizes=((1, 2), (2, 1)), pp_sizes=(1, 2))

MUTATIONS: dict[str, tuple[Patch, st.SearchStrategy[Any]]] = {
    "heads, read": (read_the_first_heads, TENSOR_PARALLEL),
    "heads, written": (write_the_first_heads, TENSOR_PARALLEL),
    "heads of opaque blocks": (read_the_first_heads, WHOLE_HEADS),
    "heads of groups": (read_the_first_heads, SEVERAL_RANKS),
    "layers": (match_layers_by_position, PIPELINES),
    "layers of groups": (match_layers_by_position, SEVERAL_RANKS),
    "tails": (read_tails_whole, LAYOUTS),
    "tails of groups": (read_tails_whole, WINDOWS),
    "block sizes": (put_all_parts_of_a_block_first, LAYOUTS),
    "block sizes of groups": (put_all_parts_of_a_block_first, WINDOWS),
    "strides": (swap_strides, LAYOUTS),
    "windows": (take_windows_for_beginnings, WINDOWS),
    "segments of state": (begin_segments_at_the_first, STATE),
    "rows of state": (forget_rows, STATE),
}
RUN: dict[type, Callable[[Any, World], Coroutine[Any, Any, None]]] = {
    hand_overs.HandOver: hand_overs.run,
    test_state.Case: test_state.run,
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_planner_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, cases = MUTATIONS[name]
    mutate(monkeypatch)
    tried = 0

    @settings(
        max_examples=100,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def attempt(case: Any) -> None:
        nonlocal tried
        tried += 1
        run_virtual(RUN[type(case)](case, InprocCluster().world()))

    with pytest.raises((AssertionError, KVFlowError)):
        attempt()
    print(f"found by example {tried}")
