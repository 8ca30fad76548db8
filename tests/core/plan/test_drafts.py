"""Layers of a draft model on one side only: the plan, and the end of the lease."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow.config import Config
from kvflow.core.cache.layout import CacheLayout, is_draft
from kvflow.core.cache.tensors import FIRST_DRAFT_LAYER
from kvflow.core.plan import topology
from kvflow.core.plan.ranks import plan_ranks
from kvflow.core.plan.topology import CacheShare, Rank, cache_share_of, head_sources, parallelism_of
from kvflow.core.protocol.compatibility import compatibility_of
from tests.core.plan.test_topology import CUTS, STAGES, cut_layers, hold
from tests.support.budgets import examples
from tests.support.tests_support import each

FIRST = FIRST_DRAFT_LAYER
MARK = (
    "; if they are of a draft model, mark them on both sides: by a name such as 'draft.0' or 'mtp.0', or by "
    f"layer_indices from {FIRST} on"
)


@each(
    ("name", "found"),
    [
        ("draft_model.layers.0.self_attn.attn", True),
        ("model.eagle_layers.40.self_attn.attn", True),
        ("mtp.layers.0.self_attn.attn", True),
        ("model/nextn/0", True),
        ("speculator.0", True),
        ("draft", True),
        ("model.layers.0.self_attn.attn", False),
        ("overdraft.0", False),
        ("beagle.0.attn", False),
        ("", False),
    ],
)
def test_a_draft_is_told_by_a_word_of_its_name(name: str, found: bool) -> None:
    assert is_draft(name) is found


@each(
    ("names", "numbers"),
    [
        (("model.layers.0", "model.layers.1", "draft.layers.0"), (0, 1, FIRST)),
        (("draft.layers.1", "model.layers.1", "draft.layers.0", "model.layers.0"), (FIRST + 1, 1, FIRST, 0)),
        (("layers.7", "draft"), (7, FIRST)),
        (("only", "draft.5"), (0, FIRST + 5)),
        (("layers.3", "eagle.0", "mtp.1"), (3, FIRST, FIRST + 1)),
        (("draft.0", "draft.1"), (FIRST, FIRST + 1)),
        ((f"layers.{FIRST}", "draft.0"), (0, FIRST)),  # no number of a name makes a draft of a layer
    ],
)
def test_drafts_are_numbered_apart(names: tuple[str, ...], numbers: tuple[int, ...]) -> None:
    """So the numbers of the model's own layers are the same with a draft and without."""
    caches = {name: torch.zeros(2, 5, 4, 1, 8) for name in names}
    assert CacheLayout.infer(caches, order="NHD", block_size=4).layer_indices == numbers


@each(
    ("ours", "theirs", "left"),
    [
        ((0, 1), (0, 1), set()),
        ((0, 1, FIRST), (0, 1), {FIRST}),
        ((0, 1), (0, 1, FIRST, FIRST + 1), {FIRST, FIRST + 1}),
        ((0, 1, FIRST), (1, 0, FIRST + 1), {FIRST, FIRST + 1}),
        ((0, 1, FIRST), (0, 1, FIRST), set()),
        ((0, 1), (0, 1, 2), set()),
        ((0, FIRST), (0, 1), {FIRST}),  # the other difference is refused
        ((FIRST,), (0, 1), set()),  # nothing of the model would be read
        ((FIRST, FIRST + 1), (FIRST,), set()),
        ((), (FIRST,), set()),
    ],
)
def test_what_is_left_out(ours: tuple[int, ...], theirs: tuple[int, ...], left: set[int]) -> None:
    assert topology.layers_left_out(ours, theirs) == topology.layers_left_out(theirs, ours) == left


@each(
    ("ours", "theirs", "problem"),
    [
        ((0, 1, FIRST), (0, 1), ""),
        ((0, 1), (0, 1, FIRST), ""),
        ((0, 1), (0, 1, 2), f"layers: ours 2 (0, 1), theirs 3 (0, 1, 2){MARK}"),
        ((0, 1, FIRST), (0, 1, 2), f"layers: ours 3 (0, 1, {FIRST}), theirs 3 (0, 1, 2){MARK}"),
        ((0, 1, 2), (0, 2), "layers: ours 3 (0, 1, 2), theirs 2 (0, 2)"),
        ((0, 1), (2, 3), "layers: ours 2 (0, 1), theirs 2 (2, 3)"),
        ((FIRST,), (0, 1), f"layers: ours 1 ({FIRST}), theirs 2 (0, 1)"),
        ((FIRST, FIRST + 1), (FIRST,), f"layers: ours 2 ({FIRST}, {FIRST + 1}), theirs 1 ({FIRST})"),
    ],
)
def test_only_drafts_may_be_on_one_side(ours: tuple[int, ...], theirs: tuple[int, ...], problem: str) -> None:
    found = topology.differences((hold(0, 1, 8, layers=ours),), (hold(0, 1, 8, layers=theirs),))
    assert found == ([problem] if problem else [])


def test_a_draft_of_other_heads_is_left_out_too() -> None:
    draft = hold(0, 1, 4, layers=(FIRST,))
    assert topology.differences((hold(0, 1, 8), draft), (hold(0, 1, 8),)) == []
    assert topology.differences((hold(0, 1, 8),), (hold(0, 1, 8), draft)) == []
    other = hold(0, 1, 2, layers=(FIRST,))
    found = topology.differences((hold(0, 1, 8), draft), (hold(0, 1, 8), other))
    assert found == ["model's num_kv_heads: ours 4, theirs 2"], "both have it, and it differs"


@each(
    ("ours", "stages", "whole", "expected"),
    [
        ((0, 1, FIRST), [(0,), (1,)], True, ""),
        ((0, 1), [(0,), (1, FIRST)], True, ""),
        ((0, 1, FIRST), [(0,), (1, FIRST)], True, ""),
        ((0, 1, FIRST), [(0,)], True, f"3 (0, 1, {FIRST}), theirs 1 (0): no stage holds 1 (1){MARK}"),
        (
            (0, 1),
            [(0, 1), (2, FIRST)],
            True,
            f"2 (0, 1), theirs 4 (0, 1, 2, {FIRST}): ours are all, but there are 1 (2){MARK}",
        ),
        ((1, FIRST), [(0,), (1,)], False, ""),
        ((0,), [(0,), (1, FIRST)], False, ""),
        ((FIRST,), [(0,), (1,)], False, f"1 ({FIRST}), theirs 2 (0, 1): no stage holds 1 ({FIRST})"),
        (
            (0, FIRST),
            [(0, FIRST), (1, FIRST)],
            False,
            f"2 (0, {FIRST}), theirs 4 (0, 1, {FIRST}, {FIRST}): 1 ({FIRST}) held twice",
        ),
    ],
)
def test_drafts_that_no_stage_holds(
    ours: tuple[int, ...], stages: list[tuple[int, ...]], whole: bool, expected: str
) -> None:
    assert topology.missing_layers(ours, stages, whole=whole) == (f"layers: ours {expected}" if expected else "")


def test_whoever_reads_a_rank_is_the_same_for_any_number_of_heads() -> None:
    """So a reader of a draft's layers reads some of the model's own from the same rank, whatever heads both have."""
    readers: dict[tuple[int, int], set[tuple[object, ...]]] = {}
    for cut in CUTS:
        found = tuple(
            tuple((source.tp_rank, source.reporters) for source in head_sources(rank, *cut)) for rank in range(cut[0])
        )
        readers.setdefault(cut[:2], set()).add(found)
    assert {len(found) for found in readers.values()} == {1}


SIDE = st.sampled_from([(), (FIRST,), (FIRST, FIRST + 1)])


@examples(60, 300)
@given(
    cut=st.sampled_from(CUTS), layers=st.integers(1, 6), ours=STAGES, theirs=STAGES, our_drafts=SIDE, their_drafts=SIDE
)
def test_the_shares_of_all_readers_still_add_up_to_1(
    cut: tuple[int, int, int],
    layers: int,
    ours: set[int],
    theirs: set[int],
    our_drafts: tuple[int, ...],
    their_drafts: tuple[int, ...],
) -> None:
    """A draft is held by the last stage, with a head for each rank, and is on any side."""
    ours_tp, theirs_tp, heads = cut

    def ranks(tp_size: int, cuts: set[int], drafts: tuple[int, ...]) -> list[list[CacheShare]]:
        found = []
        for (pp, stages), held in cut_layers(layers, cuts):
            for rank in range(tp_size):
                shares = [hold(rank, tp_size, heads, pp=(pp, stages), layers=held)]
                if drafts and pp == stages - 1:
                    shares.append(hold(rank, tp_size, 1, pp=(pp, stages), layers=drafts))
                found.append(shares)
        return found

    readers = ranks(ours_tp, ours, our_drafts)
    for other in ranks(theirs_tp, theirs, their_drafts):
        shares = [topology.report_share(mine, other) for mine in readers]
        assert sum((Fraction(*share) for share in shares), Fraction(0)) == 1
        for mine, share in zip(readers, shares, strict=True):
            for _, _, our_share, their_share in topology.common_shares(mine, other):
                source = topology.source_at(our_share, their_share)
                assert source is None or share.numerator > 0, "whoever reads also reports"


def test_a_rank_with_nothing_but_a_draft_is_released_by_its_readers() -> None:
    draft = hold(0, 1, 8, layers=(FIRST, FIRST + 1))
    assert topology.report_share((draft,), (draft,)) == (1, 1)
    assert topology.report_share((hold(0, 1, 8),), (draft,)) == (0, 1)


def test_what_a_ticket_says_of_an_engine_leaves_its_draft_out() -> None:
    """Else the tickets of a pipeline's stages could not be merged, and readers without it would refuse the engine."""
    model, draft = hold(0, 2, 8), hold(0, 2, 4, layers=(FIRST,))
    assert parallelism_of((model, draft)) == parallelism_of((draft, model)) == parallelism_of((model,))
    assert parallelism_of((draft,)).kv_heads == 2
    assert parallelism_of((model, hold(0, 2, 4, layers=(1,)))).more == ((16, 2, 4),)


@each(("theirs"), [1, 2, 4])
def test_the_ranks_to_reach_follow_from_the_models_own_layers(theirs: int) -> None:
    """Ours may have a draft of any heads: no engine has to have the like of it."""
    model, draft = hold(0, 2, 8), hold(0, 2, 6, layers=(FIRST,))
    parallelism = parallelism_of((hold(0, theirs, 8),))
    plan = plan_ranks((model, draft), parallelism, 0, 64)
    assert plan == plan_ranks((model,), parallelism, 0, 64)
    assert plan.ranks == tuple(Rank(0, 0, tp) for tp in range(max(theirs // 2, 1)))
    assert plan_ranks((draft,), parallelism_of((draft,)), 0, 64).ranks == (Rank(0, 0, 0),)


def layout_of(names: Sequence[str], head_size: int, dtype: torch.dtype = torch.float32) -> CacheLayout:
    caches = {name: torch.zeros(2, 5, 4, 1, head_size, dtype=dtype) for name in names}
    return CacheLayout.infer(caches, order="NHD", block_size=4)


def test_a_drafts_facts_are_none_that_engines_have_to_agree_on() -> None:
    model = layout_of(("layers.0", "layers.1"), 8)
    for draft in (layout_of(("draft.0",), 16), layout_of(("draft.0",), 8, torch.float16)):
        assert compatibility_of([model, draft], model="m") == compatibility_of([model], model="m")
        assert compatibility_of([draft], model="m") != compatibility_of([model], model="m")
    beside = layout_of(("layers.0", "draft.0"), 16)
    assert compatibility_of([model, beside], model="m").head_size == "16 and 8", "it holds some of the model's"


def test_shares_are_numbered_as_layouts_are() -> None:
    share = cache_share_of(layout_of(("layers.1", "draft.0"), 8), Config(engine_id="e"), model_kv_heads=None)
    assert share.layers == (1, FIRST)
    for order in itertools.permutations(("layers.0", "layers.1", "draft.0")):
        numbers = dict(zip(order, layout_of(order, 8).layer_indices, strict=True))
        assert numbers == {"layers.0": 0, "layers.1": 1, "draft.0": FIRST}
