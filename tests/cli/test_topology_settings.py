"""The cases of the topology bench and the blocks that follow from its options."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvflow.cli.bench.settings import SettingsError, Transport
from kvflow.cli.topology_bench.cuts import BASELINE, CASES, THIN_BASELINE, Case, Cut, Order
from kvflow.cli.topology_bench.run import needed_bytes
from kvflow.cli.topology_bench.settings import TopologySettings, loads_of_turn, make_settings


def settings(*, size_mb: int = 64, layers: int = 32, quick: bool = False) -> TopologySettings:
    return make_settings(transport=Transport.SHM, size_mb=size_mb, rounds=3, layers=layers, quick=quick)


def find(label: str) -> Case:
    return next(case for case in CASES if case.label == label)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_a_case_names_all_ranks_that_its_consumer_reads_from(case: Case) -> None:
    case.check()
    assert len({cut.engine_id for cut in case.producers}) == 1
    held = sorted(head for cut in case.producers for head in cut.heads)
    assert set(case.consumer.heads) <= set(held)


def test_a_case_with_the_wrong_rank_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"reads from ranks \[1\]"):
        replace(find(BASELINE), producers=(Cut(tp_rank=2, tp_size=4),)).check()


def test_cases_are_compared_with_the_same_consumer_cut_alike() -> None:
    assert len({case.label for case in CASES}) == len(CASES)
    for case in CASES:
        baseline = find(case.baseline or case.label)
        assert baseline.baseline == ""
        assert baseline.producers == (baseline.consumer,)
        assert baseline.consumer.order is Order.HND
        assert case.consumer.heads == baseline.consumer.heads
    assert {case.label for case in CASES if not case.baseline} == {BASELINE, THIN_BASELINE}


def test_only_what_differs_in_nothing_but_its_heads_is_a_head_slice() -> None:
    assert [case.label for case in CASES if case.is_head_slice] == [
        "decode TP 2x, head slice",
        "decode TP 4x, head slice",
        "thin rank, decode TP 2x",
        "thin rank, decode TP 4x",
    ]
    assert not find("decode TP 2x, head slice").is_all
    assert find("prefill TP 2x, two ranks").is_all


def test_sizes_are_those_of_the_usual_model() -> None:
    made = settings()
    baseline = find(BASELINE)
    assert made.tokens == 512
    assert made.useful_bytes(baseline.consumer) == made.size_bytes == 64 << 20
    assert 16 * baseline.consumer.token_region_bytes == 32 << 10
    assert needed_bytes(made) < 4e9


@pytest.mark.parametrize(("size_mb", "message"), [(3, "no multiple"), (12, "no multiple"), (16 << 10, "32 bits")])
def test_sizes_that_cannot_be_measured(size_mb: int, message: str) -> None:
    with pytest.raises(SettingsError, match=f"--size: {size_mb} MB is .*{message}"):
        settings(size_mb=size_mb)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_the_loads_of_a_turn_fill_whole_blocks_and_share_none(case: Case) -> None:
    made = settings()
    wake, load = loads_of_turn(made, case, "round 0")
    local_size, remote_size = case.consumer.block_size, case.producers[0].block_size
    assert len(load.local_ids) * local_size == len(load.remote_ids) * remote_size == made.tokens
    assert len(wake.local_ids) * local_size == len(wake.remote_ids) * remote_size == 64
    for ids, block_size in (
        (wake.local_ids + load.local_ids, local_size),
        (wake.remote_ids + load.remote_ids, remote_size),
    ):
        assert len(set(ids)) == len(ids)
        assert 0 <= min(ids) <= max(ids) < made.pool_tokens // block_size


def test_all_cases_of_a_round_move_the_same_blocks() -> None:
    made = settings()
    loads = [loads_of_turn(made, case, "round 0")[1] for case in CASES if case.consumer.block_size == 16]
    assert len({load.local_ids for load in loads}) == 1
    first, later = (loads_of_turn(made, CASES[0], f"round {index}")[1] for index in range(2))
    assert first.local_ids != later.local_ids
    assert first.local_ids != first.remote_ids


def test_ranks_of_a_run_are_those_of_its_cases() -> None:
    made = settings(quick=True)
    assert len(made.producers) == len({(cut.engine_id, cut.tp_rank) for cut in made.producers}) == 10
    assert made.consumers[0] == find(BASELINE).consumer
    assert len(made.consumers) == 6
