"""`kvflow bench planning`: what it measures without a peer."""

from __future__ import annotations

from kvflow.bench.cache import Order
from kvflow.bench.planning import CASES, PeerMemory, Planning, PlanSample, peer_memory
from kvflow.bench.scenario import Samples
from kvflow.bench.targets import Verdict


def test_a_peer_costs_memory_for_its_regions_not_for_its_blocks() -> None:
    few, many = (peer_memory(layers, Order.HND) for layers in (20, 80))
    assert 0.9 < few.growth < 1.01
    assert 0.9 < many.growth < 1.01
    assert 1 < many.bytes_of_blocks[0] / few.bytes_of_blocks[0] < many.regions / few.regions


def verdicts(seconds: float, growth: float) -> list[Verdict]:
    samples = Samples()
    for case in CASES:
        samples.add(case, PlanSample(seconds, 0.0, [1]))
    size = (1000, round(1000 * growth))
    samples.add("peer", PeerMemory(label="any", regions=4, blocks=(1, 16), bytes_of_blocks=size))
    return [row.verdict for row in Planning().judge(samples).targets]


def test_planning_and_memory_are_judged() -> None:
    assert verdicts(0.020, 1.0) == [Verdict.PASS] * 5
    assert verdicts(0.030, 1.0) == [Verdict.FAIL] + [Verdict.PASS] * 4
    assert verdicts(0.031, 16.0) == [Verdict.FAIL] * 5
