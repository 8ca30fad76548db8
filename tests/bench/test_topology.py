"""`dev.py bench topology`: the cases, the blocks that follow from its options, and from loads to rows and verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvflow.bench.child import BenchError
from kvflow.bench.loads import SettingsError
from kvflow.core.plan.topology import head_sources
from tests.bench.consumers import LoadResult
from tests.bench.scenario import Samples
from tests.bench.targets import Spread, Verdict
from tests.bench.topology import (
    CASES,
    CONSUMERS,
    MODEL_KV_HEADS,
    PRODUCERS,
    Case,
    CaseResult,
    Topology,
    judge,
    slice_target,
    summarize,
)

SCENARIO = Topology(size=64, layers=32, rounds=3)
BASELINE = "HND, cut alike"
SLICE = "decode TP 2x, head slice"
SIZE_BYTES = 1 << 20


def find(label: str) -> Case:
    return next(case for case in CASES if case.label == label)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_a_case_names_all_ranks_that_its_consumer_reads_from(case: Case) -> None:
    ours, theirs = case.consumer, case.producers[0]
    sources = head_sources(ours.tp_rank, ours.tp_size, theirs.tp_size, MODEL_KV_HEADS)
    assert [source.tp_rank for source in sources] == [cut.tp_rank for cut in case.producers]
    assert len({cut.engine_id for cut in case.producers}) == 1


def test_cases_are_compared_with_the_same_rank_cut_alike() -> None:
    assert len({case.label for case in CASES}) == len(CASES)
    assert (CASES[0].label, CASES[0].producers) == (BASELINE, (CASES[0].consumer,))
    assert {(case.consumer.tp_rank, case.consumer.tp_size) for case in CASES} == {(1, 4)}


def test_only_what_differs_in_nothing_but_its_heads_is_a_head_slice() -> None:
    assert [case.label for case in CASES if case.is_head_slice] == [
        "decode TP 2x, head slice",
        "decode TP 4x, head slice",
    ]
    assert not find(SLICE).is_all
    assert find("prefill TP 2x, two ranks").is_all


def test_sizes_are_those_of_the_usual_model() -> None:
    consumer = find(BASELINE).consumer
    assert SCENARIO.tokens == 512
    assert SCENARIO.useful_bytes(consumer) == 64 << 20
    assert SCENARIO.shape(consumer).region_block_size_bytes == 32 << 10
    assert len({cut.name for cut in PRODUCERS}) == len(PRODUCERS) == 9
    assert (CONSUMERS[0], len(CONSUMERS)) == (consumer, 5)


@pytest.mark.parametrize(("size", "message"), [(3, "no multiple"), (12, "no multiple"), (16 << 10, "32 bits")])
def test_sizes_that_cannot_be_measured(size: int, message: str) -> None:
    with pytest.raises(SettingsError, match=f"--size: .* MB is .*{message}"):
        Topology(size=size).sets()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_the_loads_of_a_turn_fill_whole_blocks_and_share_none(case: Case) -> None:
    wake, load = SCENARIO.loads_of_turn(case, "round 0")
    for cut, ids in ((case.consumer, "local_ids"), (case.producers[0], "remote_ids")):
        first, others = getattr(wake, ids), getattr(load, ids)
        assert (len(first) * cut.block_size, len(others) * cut.block_size) == (64, SCENARIO.tokens)
        assert len({*first, *others}) == len(first) + len(others)
        assert 0 <= min(first + others) <= max(first + others) < SCENARIO.shape(cut).blocks


def test_all_cases_of_a_round_move_the_same_blocks() -> None:
    loads = [SCENARIO.loads_of_turn(case, "round 0")[1] for case in CASES if case.consumer.block_size == 16]
    assert len({load.local_ids for load in loads}) == 1
    later = SCENARIO.loads_of_turn(CASES[0], "round 1")[1]
    assert later.local_ids not in (loads[0].local_ids, later.remote_ids)


# --- results


def load(seconds: float, checked_bytes: int = 5) -> LoadResult:
    return LoadResult(seconds, SIZE_BYTES, 32, checked_bytes)


def rows(**seconds: list[float]) -> dict[str, CaseResult]:
    loads = {case.label: [load(1.0)] * 4 for case in CASES}
    loads |= {name: [load(9.0), *map(load, values)] for name, values in seconds.items()}
    return {case.label: case for case in summarize(loads, lambda cut: SIZE_BYTES * 4 // cut.tp_size)}


def test_ratios_are_taken_within_rounds() -> None:
    found = rows(**{BASELINE: [1.0, 2.0, 4.0], SLICE: [2.0, 4.0, 4.0]})
    ours = found[SLICE]
    assert (ours.load_s.p50, ours.load_s.p25, ours.load_s.p75) == (4.0, 2.0, 4.0)
    assert (ours.ratio.p50, ours.ratio.p25, ours.ratio.p75) == (0.5, 0.5, 1.0)
    assert ours.gb_per_s == pytest.approx(SIZE_BYTES / 4.0 / 1e9)
    assert (ours.piece_bytes, ours.checked_bytes, ours.load_s.samples) == (32 << 10, 4 * 5, 3)
    assert found[BASELINE].ratio.p50 == 1.0


def test_a_first_load_that_was_not_compared_as_a_whole_is_an_error() -> None:
    samples = Samples()
    for case in CASES:
        samples.add(("check", case), load(1.0, SIZE_BYTES - (case.label == SLICE)))
        samples.add(("rounds", case), load(1.0))
    with pytest.raises(BenchError, match=f"{SLICE}: 1048575 bytes compared of 1048576"):
        judge(samples, lambda cut: SIZE_BYTES)


def test_large_head_slices_are_judged() -> None:
    case = replace(rows()[SLICE], ratio=Spread.of([0.8]))
    assert slice_target([case]).verdict is Verdict.PASS
    assert slice_target([case, replace(case, ratio=Spread.of([0.79]))]).verdict is Verdict.FAIL
    small, alike = replace(case, piece_bytes=16 << 10), replace(case, is_head_slice=False)
    assert slice_target([small, alike]).verdict is Verdict.NOT_MEASURED
