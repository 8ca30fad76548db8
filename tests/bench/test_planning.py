"""The bench `planning`: what it measures without a peer."""

from __future__ import annotations

from tests.bench.planning import CASES, Planning, PlanSample
from tests.bench.scenario import Samples
from tests.bench.targets import Verdict


def verdicts(seconds: float) -> list[Verdict]:
    samples = Samples()
    for case in CASES:
        samples.add(case, PlanSample(seconds, 0.0, [1], 0))
    return [row.verdict for row in Planning().judge(samples).targets]


def test_planning_is_judged() -> None:
    """Seconds of 100,000 descriptors, of three ranks and of windows, whose bytes are judged, too."""
    assert verdicts(0.010) == [Verdict.PASS] * 6
    assert verdicts(0.020) == [Verdict.PASS] * 4 + [Verdict.FAIL, Verdict.PASS]
    assert verdicts(0.030) == [Verdict.FAIL] + [Verdict.PASS] * 3 + [Verdict.FAIL, Verdict.PASS]
    assert verdicts(0.031) == [Verdict.FAIL] * 5 + [Verdict.PASS]
