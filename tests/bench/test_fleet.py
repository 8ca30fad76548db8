"""The bench `fleet`: a small fleet goes through all phases, and faults of large fleets stay mended."""

from __future__ import annotations

import pytest

from kvflow.bench.loads import SettingsError
from tests.bench.fleet.channel import Costs
from tests.bench.fleet.life import run_fleet
from tests.bench.fleet.memory import measure_memory
from tests.bench.fleet.results import MemoryResult, PhaseResult
from tests.bench.fleet.scenario import FleetBench
from tests.bench.fleet.traffic import FleetShape
from tests.bench.scenario import Samples
from tests.bench.targets import Verdict


@pytest.fixture(scope="module")
def phases() -> dict[str, PhaseResult]:
    """Phases of a small fleet with ranks that answer slowly."""
    shape = FleetShape(prefill=12, decode=12, peers=8, hot=2)
    return {row.phase: row for row in run_fleet(shape, Costs(answer_s=0.02), rate=1.0)}


def test_a_fleet_goes_through_churn_and_restarts_without_a_failed_load(phases: dict[str, PhaseResult]) -> None:
    assert list(phases) == ["cold start", "steady", "churn", "rolling restart", "all decode restart"]
    assert [(row.failed, row.wrong, row.errors) for row in phases.values()] == [(0, 0, "")] * 5
    assert phases["all decode restart"].right > 12 * 5
    assert phases["steady"].lost == 0
    assert all(row.connections > 0 and row.files > 64 for row in phases.values())


def test_a_peer_takes_less_than_50_kib_whatever_was_loaded_from_it() -> None:
    """Of a model of 80 layers, after loads of prompts that end anywhere in a block.

    What the interpreter allocates beside, a kilobyte or two, is shared by the peers: hence eight.
    """
    sample = measure_memory(peers=8, layers=80)
    assert 5_000 < sample.connected_bytes < sample.loaded_bytes < 50 * 1024


def test_a_fleet_is_judged(phases: dict[str, PhaseResult]) -> None:
    samples = Samples()
    samples.add(12, list(phases.values()))
    samples.add(("memory", 24), MemoryResult(peers=24, layers=80, connected_bytes=20_000, loaded_bytes=60_000))
    outcome = FleetBench().judge(samples)
    assert [target.verdict for target in outcome.targets] == [Verdict.PASS, Verdict.FAIL]
    assert outcome.targets[1].where == "24 peers"


@pytest.mark.parametrize("wrong", [{"sizes": "many"}, {"sizes": "0"}, {"peers": 2, "hot": 3}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, str | int]) -> None:
    with pytest.raises(SettingsError):
        FleetBench(**wrong).sets()  # type: ignore[arg-type]
