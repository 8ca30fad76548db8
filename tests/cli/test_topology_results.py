"""From loads to rows and verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvflow.cli.bench.messages import LoadResult
from kvflow.cli.bench.settings import Transport
from kvflow.cli.bench.targets import TargetRow, Verdict
from kvflow.cli.topology_bench.cuts import BASELINE
from kvflow.cli.topology_bench.prompts import PeerMemory, PromptPlanning
from kvflow.cli.topology_bench.results import CaseResult, judge, summarize
from kvflow.cli.topology_bench.settings import make_settings

SETTINGS = make_settings(transport=Transport.SHM, size_mb=1, rounds=3, layers=2, quick=False)
SLICE = "decode TP 2x, head slice"
PLANNING = PromptPlanning(label="1 of 1 head", descriptors=1, slices=1, median_s=0.01, min_s=0, max_s=1, first_s=0)
MEMORY = PeerMemory(label="any", regions=4, blocks=(1, 16), bytes_of_blocks=(1000, 1000))


def load(seconds: float) -> LoadResult:
    return LoadResult(seconds=seconds, size_bytes=1 << 20, descriptors=32, phases_s={"wire": 1.0}, checked_bytes=5)


def rows(**seconds: list[float]) -> dict[str, CaseResult]:
    loads = {case.label: [load(1.0)] * 3 for case in SETTINGS.cases}
    loads |= {name: [load(second) for second in values] for name, values in seconds.items()}
    found = summarize(SETTINGS, loads, {case.label: 7 for case in SETTINGS.cases})
    return {case.label: case for case in found}


def verdicts(case: CaseResult, planning: PromptPlanning = PLANNING, memory: PeerMemory = MEMORY) -> list[TargetRow]:
    return list(judge([case], [planning], [memory]))


def test_ratios_are_taken_within_rounds() -> None:
    found = rows(**{BASELINE: [1.0, 2.0, 4.0], SLICE: [2.0, 4.0, 4.0]})
    ours = found[SLICE]
    assert (ours.baseline, ours.median_s, ours.low_s, ours.high_s) == (BASELINE, 4.0, 2.0, 4.0)
    assert (ours.ratio, ours.ratio_low, ours.ratio_high) == (0.5, 0.5, 1.0)
    assert ours.gb_per_s == pytest.approx((1 << 20) / 4.0 / 1e9)
    assert (ours.piece_bytes, ours.checked_bytes) == (32 << 10, 7 + 15)
    assert ours.phases_median_s == {"wire": 1.0}
    assert (found[BASELINE].baseline, found[BASELINE].ratio) == (BASELINE, 1.0)


def test_a_thin_rank_has_a_baseline_and_a_size_of_its_own() -> None:
    thin = rows()["thin rank, decode TP 2x"]
    assert thin.baseline == "thin rank, cut alike"
    assert thin.size_bytes == (1 << 20) // 4


@pytest.mark.parametrize(("ratio", "verdict"), [(0.8, Verdict.PASS), (0.79, Verdict.FAIL)])
def test_large_head_slices_are_judged(ratio: float, verdict: Verdict) -> None:
    case = replace(rows()[SLICE], ratio=ratio)
    assert verdicts(case)[0].verdict is verdict
    assert verdicts(replace(case, piece_bytes=16 << 10))[0].verdict is Verdict.NOT_MEASURED
    assert verdicts(replace(case, is_head_slice=False))[0].verdict is Verdict.NOT_MEASURED


def test_planning_and_memory_are_judged() -> None:
    case = rows()[SLICE]
    assert [row.verdict for row in verdicts(case)] == [Verdict.PASS] * 3
    slow = replace(PLANNING, median_s=0.031)
    grown = replace(MEMORY, bytes_of_blocks=(1000, 16000))
    assert [row.verdict for row in verdicts(case, slow, grown)] == [Verdict.PASS, Verdict.FAIL, Verdict.FAIL]
