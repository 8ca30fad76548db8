"""The sources of each reader, compared with a slow model that looks at every head, every reader and every holder."""

from __future__ import annotations

import itertools
import time
from fractions import Fraction
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvflow.config import RANKS_MAX, Config
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.plan import topology
from kvflow.core.plan.ranks import plan_ranks
from kvflow.core.plan.topology import CacheShare, HeadSource, Rank, cache_share_of, head_sources
from tests.core.plans import SHARE
from tests.support.budgets import examples
from tests.support.tests_support import each

Parallelism = tuple[int, int, int]  # our tp_size, their tp_size, the model's KV heads
SIZES = range(1, 17)


CUTS = [
    cut
    for cut in itertools.product(SIZES, repeat=3)
    if all(a % b == 0 or b % a == 0 for a, b in itertools.combinations(cut, 2))
]
assert len(CUTS) == 376


# --- the slow model


def heads_of(rank: int, size: int, heads: int) -> list[int]:
    """Head by head: with as many ranks as heads or fewer each has a run of heads, else neighbours share one."""
    if size <= heads:
        return [head for head in range(heads) if head // (heads // size) == rank]
    return [head for head in range(heads) if rank // (size // heads) == head]


def slow_sources(cut: Parallelism) -> list[list[HeadSource]]:
    """Return each rank's sources: reader j of n of a head reads from holder j*m/n of m, and notifies all its holders.

    A holder that no rank reads is notified by the first reader of the last rank before it that has one.
    """
    ours, theirs, heads = cut
    reads: dict[tuple[int, int], list[int]] = {}  # (our rank, their rank) -> the model's heads that are read
    for head in range(heads):
        readers = [rank for rank in range(ours) if head in heads_of(rank, ours, heads)]
        holders = [rank for rank in range(theirs) if head in heads_of(rank, theirs, heads)]
        for index, reader in enumerate(readers):
            reads.setdefault((reader, holders[index * len(holders) // len(readers)]), []).append(head)
    found: list[list[HeadSource]] = [[] for _ in range(ours)]
    reporters: list[int] = []
    for holder in range(theirs):
        reporters = [reader for reader in range(ours) if (reader, holder) in reads] or reporters[:1]
        for rank in reporters:
            read = reads.get((rank, holder), [])
            local_start = heads_of(rank, ours, heads).index(read[0]) if read else 0
            remote_start = heads_of(holder, theirs, heads).index(read[0]) if read else 0
            found[rank].append(HeadSource(holder, local_start, remote_start, len(read), len(reporters)))
    return found


def test_sources_are_those_of_the_slow_model() -> None:
    for cut in CUTS:
        assert [list(head_sources(rank, *cut)) for rank in range(cut[0])] == slow_sources(cut), cut


# --- what must hold whatever the rule is


def test_the_readers_of_a_head_spread_over_its_holders() -> None:
    """No rank serves more than one reader above another rank that holds the same heads."""
    for cut in CUTS:
        ours, theirs, heads = cut
        readers = [0] * theirs
        for source in itertools.chain(*(head_sources(rank, *cut) for rank in range(ours))):
            readers[source.tp_rank] += source.heads > 0
        for head in range(heads):
            holders = [readers[rank] for rank in range(theirs) if head in heads_of(rank, theirs, heads)]
            assert max(holders) - min(holders) <= 1, cut


# --- holdings


def hold(
    rank: int, size: int, heads: int, *, said: bool = True, pp: tuple[int, int] = (0, 1), **changes: Any
) -> CacheShare:
    """Return the holding of rank `rank` of `size` of a model with `heads` heads."""
    of_heads = {"kv_heads": len(heads_of(rank, size, heads)), "model_kv_heads": heads if said else 0}
    place = {"tp_rank": rank, "tp_size": size, "pp_rank": pp[0], "pp_size": pp[1]}
    return replace(SHARE, **{**place, **of_heads, **changes})


def test_a_cache_share_is_what_the_layout_says() -> None:
    caches = {f"layers.{index}": torch.zeros(2, 5, 4, 3, 8) for index in (12, 11)}
    layout = CacheLayout.infer(caches, order="NHD", block_size=4)
    found = cache_share_of(layout, Config(engine_id="e", tp_rank=1, tp_size=2, pp_rank=3, pp_size=4), model_kv_heads=6)
    assert found == hold(1, 2, 6, pp=(3, 4), layers=(12, 11), block_size=4, dtype="float32")
    assert found.kv_head_slots == 6
    latent = CacheLayout.infer({"l0": torch.zeros(5, 4, 8)}, order="NHD", block_size=4)
    found = cache_share_of(latent, Config(engine_id="e"), model_kv_heads=None)
    assert (found.latent, found.kv_heads, found.model_kv_heads) == (True, 1, 0)
    found = cache_share_of(latent, Config(engine_id="e", tp_rank=1, tp_size=2), model_kv_heads=None, sharded=True)
    assert (found.block_size, found.held_tokens, found.shard) == (8, 4, (1, 2))


def test_ranks_are_shown_in_words() -> None:
    assert str(Rank(2, 0, 5)) == "dp 2 pp 0 tp 5"


@each(("ours_said", "theirs_said"), itertools.product([False, True], repeat=2))
def test_whatever_is_known_of_the_models_heads_the_right_bytes_are_read(ours_said: bool, theirs_said: bool) -> None:
    """Also if both sides hold replicas and neither says of how many heads."""
    for cut in CUTS:
        ours, theirs, heads = cut
        known = ours_said or theirs_said or ours <= heads or theirs <= heads
        told = set()
        for rank in range(ours):
            mine, read = hold(rank, ours, heads, said=ours_said), []
            other = hold(0, theirs, heads, said=theirs_said)
            assert topology.differences((mine,), (other,)) == []
            found = topology.kv_heads_of_model(mine, other)
            assert found == heads if known else found % heads == 0, cut
            for source in topology.sources_of(mine, other):
                told.add(source.tp_rank)
                for index in range(source.heads):
                    head = heads_of(rank, ours, heads)[source.local_start + index]
                    assert head == heads_of(source.tp_rank, theirs, heads)[source.remote_start + index], cut
                    read.append(source.local_start + index)
            assert sorted(read) == list(range(mine.kv_heads)), cut
        assert told == set(range(theirs)), cut


@each(
    ("ours", "theirs", "expected"),
    [
        (hold(0, 16, 2, said=False), hold(0, 8, 2, said=False), 8),  # both: as good as the truth
        (hold(0, 4, 1, latent=True), hold(0, 8, 1, latent=True), 1),
        (hold(0, 4, 1, latent=True, model_kv_heads=128), hold(0, 8, 1, latent=True), 1),  # attention's, not the cache's
    ],
)
def test_the_models_heads_follow_from_what_both_sides_know(ours: CacheShare, theirs: CacheShare, expected: int) -> None:
    assert topology.kv_heads_of_model(ours, theirs) == expected
    assert topology.differences((ours,), (theirs,)) == []


# --- shares


STAGES = st.sets(st.integers(1, 8), max_size=3)
CUT = st.sampled_from(CUTS)


def cut_layers(layers: int, cuts: set[int]) -> list[tuple[tuple[int, int], tuple[int, ...]]]:
    """Return stages of layers 0.. as (pp_rank, pp_size) and layers. The layers are cut at `cuts`, where they reach."""
    bounds = [0, *sorted(at for at in cuts if at < layers), layers]
    stages = [tuple(range(start, stop)) for start, stop in itertools.pairwise(bounds)]
    return [((pp, len(stages)), held) for pp, held in enumerate(stages)]


@examples(30, 150)
@given(cut=CUT, layers=st.integers(1, 9), ours=STAGES, theirs=STAGES, said=st.booleans(), latent=st.booleans())
def test_the_shares_of_all_readers_add_up_to_1(
    cut: Parallelism, layers: int, ours: set[int], theirs: set[int], said: bool, latent: bool
) -> None:
    """For every rank of the producer, however both engines are cut: exactly when the last one is done."""
    ours_tp, theirs_tp, heads = (*cut[:2], 1) if latent else cut
    first = hold(0, theirs_tp, heads, said=said, latent=latent)
    for theirs_pp, their_layers in cut_layers(layers, theirs):
        sums = dict.fromkeys(range(theirs_tp), Fraction(0))
        for (ours_pp, our_layers), rank in itertools.product(cut_layers(layers, ours), range(ours_tp)):
            mine = hold(rank, ours_tp, heads, said=said, latent=latent, pp=ours_pp, layers=our_layers)
            for source in topology.sources_of(mine, first):
                other = hold(source.tp_rank, theirs_tp, heads, latent=latent, pp=theirs_pp, layers=their_layers)
                share = Fraction(*topology.report_share((mine,), (other,)))
                assert (share == 0) == (not set(our_layers) & set(their_layers))
                sums[source.tp_rank] += share
        assert set(sums.values()) == {1}, cut


@each(("ours_sharded", "theirs_sharded"), [(True, True), (True, False), (False, True)])
def test_the_shares_of_readers_of_sharded_tokens_add_up_to_1(ours_sharded: bool, theirs_sharded: bool) -> None:
    """With blocks of several sizes. Where one side is not sharded, all its ranks hold all tokens."""
    for (ours, theirs), (size, other_size) in itertools.product(
        itertools.product((1, 2, 3, 4, 8), repeat=2), [(16, 16), (16, 64), (64, 16)]
    ):
        sums = dict.fromkeys(range(theirs), Fraction(0))
        for rank, other in itertools.product(range(ours), range(theirs)):
            mine = hold(
                rank, ours, 1, latent=True, sharded=ours_sharded, block_size=size * (ours if ours_sharded else 1)
            )
            block_size = other_size * (theirs if theirs_sharded else 1)
            found = hold(other, theirs, 1, latent=True, sharded=theirs_sharded, block_size=block_size)
            assert (mine.held_tokens, found.held_tokens) == (size, other_size)
            sums[other] += Fraction(*topology.report_share((mine,), (found,)))
        assert set(sums.values()) == {1}, (ours, theirs, size, other_size)


def test_ranks_with_the_same_shards_read_from_each_other() -> None:
    """n to n: one source each. n to 2n: two each. From all holders otherwise, which all hold what the others lack."""

    def sources(ours: tuple[int, int], theirs: int, *, sharded: bool = True) -> list[int]:
        mine = hold(*ours, 1, latent=True, sharded=sharded, block_size=16 * (ours[1] if sharded else 1))
        other = hold(0, theirs, 1, latent=True, sharded=True, block_size=16 * theirs)
        return [source.tp_rank for source in topology.sources_of(mine, other)]

    assert sources((3, 4), 4) == [3]
    assert sources((1, 2), 4) == [1, 3]
    assert sources((3, 4), 2) == [1]
    assert sources((1, 4), 4, sharded=False) == [0, 1, 2, 3]


def test_the_parallelism_of_a_ticket_says_whether_tokens_are_sharded() -> None:
    share = hold(0, 4, 1, latent=True, sharded=True, block_size=64)
    parallelism = topology.parallelism_of((share,))
    assert (parallelism.block_size, parallelism.sharded) == (64, True)
    one, all_of_them = (
        plan_ranks((hold(1, 2, 1, latent=True),), how, 0, 8).ranks
        for how in (parallelism._replace(sharded=False), parallelism)
    )
    assert [rank.tp for rank in one] == [2, 3], "the second has no reader, and is only told"
    assert [rank.tp for rank in all_of_them] == [0, 1, 2, 3]
    assert "at most 3" in plan_ranks((hold(1, 2, 1, latent=True),), parallelism, 0, 3).impossible


def test_a_reader_with_nothing_in_common_has_no_share() -> None:
    other = hold(0, 1, 8, layers=(4, 3, 2))
    assert topology.report_share((hold(0, 1, 8),), (other,)) == (0, 1)
    assert topology.report_share((hold(0, 2, 8, layers=(0, 2)),), (other,)) == (1, 6)
    assert topology.report_share((hold(0, 2, 8),), (hold(1, 2, 8),)) == (0, 1), "it holds other heads"


# --- why not


UNSAID, TWELVE = hold(0, 2, 8, said=False), hold(0, 8, 8, model_kv_heads=12)
HEADS = "num_kv_heads: ours {} on each of {} ranks, theirs {} on each of {} ranks"


@each(
    ("ours", "theirs", "expected"),
    [
        (hold(0, 1, 8), hold(0, 1, 8, layers=(1, 0)), []),
        (hold(0, 1, 8, block_size=64), hold(0, 1, 8, block_size=16), []),
        (
            hold(0, 1, 8),
            hold(0, 1, 8, layers=tuple(range(8))),
            [f"layers: ours 2 (0, 1), theirs 8 (0, 1, 2, 3, 4, 5, ...){topology._HINT}"],
        ),
        # Stages of a pipeline hold some of the layers: whether none is missing is known when all have been asked.
        (hold(0, 1, 8, pp=(0, 2)), hold(0, 1, 8, layers=(0, 1, 2, 3)), []),
        (hold(0, 1, 8), hold(0, 1, 8, layers=(0,), pp=(0, 2)), []),
        (hold(0, 2, 8), hold(0, 2, 4), ["model's num_kv_heads: ours 8, theirs 4"]),
        (UNSAID, hold(0, 2, 4), [HEADS.format(4, 2, 2, 2)]),
        (UNSAID, hold(0, 4, 4, said=False), [HEADS.format(4, 2, 1, 4)]),
        # Sizes that do not go with the heads: nobody knows who would hold what.
        (TWELVE, TWELVE, [HEADS.format(1, 8, 1, 8) + ", where one side says that the model has 12"]),
        # A latent has no heads to split.
        (hold(0, 4, 1, latent=True), hold(0, 2, 1, latent=True, model_kv_heads=128), []),
        (
            hold(0, 4, 8, layers=(0,), block_size=10),
            hold(0, 3, 3, layers=(1,), block_size=16),
            [
                "tp_size: ours 4, theirs 3: neither divides the other",
                "block_size: ours 10, theirs 16: neither divides the other",
                "layers: ours 1 (0), theirs 1 (1)",
                "model's num_kv_heads: ours 8, theirs 3",
            ],
        ),
    ],
)
def test_differences_name_every_problem_with_both_values(
    ours: CacheShare, theirs: CacheShare, expected: list[str]
) -> None:
    assert topology.differences((ours,), (theirs,)) == expected
    assert len(topology.differences((theirs,), (ours,))) == len(expected)


SIZE = st.integers(1, 16)
cache_shares = st.builds(
    lambda size, held, of_model: hold(0, size, 1, kv_heads=held, model_kv_heads=of_model), SIZE, SIZE, SIZE | st.just(0)
)


@examples(100, 350)
@given(ours=cache_shares, theirs=cache_shares)
def test_heads_that_pass_are_planned_within_bounds(ours: CacheShare, theirs: CacheShare) -> None:
    """Heads of a peer that pass `differences` never lead outside of a block."""
    if topology.differences((ours,), (theirs,)):
        return
    for rank in range(ours.tp_size):
        mine = replace(ours, tp_rank=rank)
        sources = topology.sources_of(mine, theirs)
        assert sum(source.heads for source in sources) == ours.kv_heads
        for source in sources:
            assert 0 <= source.tp_rank < theirs.tp_size
            assert 0 <= source.local_start <= source.local_start + source.heads <= ours.kv_heads
            assert 0 <= source.remote_start <= source.remote_start + source.heads <= theirs.kv_heads


# --- which layers


@each(
    ("ours", "stages", "whole", "expected"),
    [
        ((0, 1, 2, 3), [(0, 1), (2, 3)], False, ""),
        ((3, 1), [(1, 0), (3, 2)], False, ""),
        ((), [(0,)], False, ""),
        ((0, 1), [(0,), (1,)], True, ""),
        ((0,), [(0,), (5,), (5,)], False, ""),  # twice, but none of ours
        (
            (0, 1),
            [(0,), (1, 2)],
            True,
            f"2 (0, 1), theirs 3 (0, 1, 2): ours are all, but there are 1 (2){topology._HINT}",
        ),
        ((0, 1, 2), [(0,), (2,)], False, "3 (0, 1, 2), theirs 2 (0, 2): no stage holds 1 (1)"),
        ((1, 0), [], False, "2 (0, 1), theirs 0 (): no stage holds 2 (0, 1)"),
        ((0, 1), [(0, 1), (1, 2)], False, "2 (0, 1), theirs 4 (0, 1, 1, 2): 1 (1) held twice"),
        ((0, 1), [(0,), (0,)], False, "2 (0, 1), theirs 2 (0, 0): no stage holds 1 (1)"),
    ],
)
def test_what_is_wrong_with_the_layers(
    ours: tuple[int, ...], stages: list[tuple[int, ...]], whole: bool, expected: str
) -> None:
    assert topology.missing_layers(ours, stages, whole=whole) == (f"layers: ours {expected}" if expected else "")


def test_stages_are_as_many_as_layers_where_all_are_known() -> None:
    assert topology.stages_max((hold(0, 1, 2, layers=tuple(range(16))),)) == 16
    assert topology.stages_max((hold(0, 1, 2, layers=tuple(range(16)), pp=(0, 2)),)) == RANKS_MAX


# --- bounds


@each(
    ("ours", "theirs", "heads"),
    [(RANKS_MAX, RANKS_MAX, 1), (1, RANKS_MAX, 1), (RANKS_MAX, 2, 8), (2, RANKS_MAX, 8), (512, RANKS_MAX, RANKS_MAX)],
)
def test_the_largest_engines_are_planned_in_no_time(ours: int, theirs: int, heads: int) -> None:
    head_sources.cache_clear()
    ranks = {0, ours // 2, ours - 1}
    start_s = time.process_time()
    for rank in ranks:
        assert sum(source.heads for source in head_sources(rank, ours, theirs, heads)) == max(heads // ours, 1)
    shards = [hold(rank, ours, 1, latent=True, sharded=True, block_size=ours) for rank in ranks]
    for share in shards:
        assert topology.sources_of(share, hold(0, theirs, 1, latent=True, sharded=True, block_size=theirs))
    assert time.process_time() - start_s < 0.5  # some milliseconds; looking at all pairs of ranks takes minutes


def test_layers_are_compared_in_no_time() -> None:
    """As many as a peer may claim."""
    many = tuple(range(1 << 15))
    start_s = time.process_time()
    assert topology.missing_layers(many, [many[::2], many[1::2]]) == ""
    assert time.process_time() - start_s < 0.5
