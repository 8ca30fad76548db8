"""The bench `flow`: its options, its schedule and its verdicts."""

from __future__ import annotations

from typing import Any

import pytest
from tests_support import each

from kvflow.bench.loads import Fabric, SettingsError
from tests.bench.flow import UNTIMED, Flow, Growth, Many, Schedule
from tests.bench.scenario import Samples
from tests.bench.targets import Verdict

QUIET = Many(lags_s=[0.001] * 100, reader_cpu=0.14, producer_cpu=0.09, behind_s=[0.01])


def test_leases_that_do_not_grow_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"leases grow 1 times, at least 2 are needed"):
        Flow(many_s=0.02).sets()


def test_loads_share_no_block() -> None:
    flow = Flow()
    loads = flow.planned("turn", flow.advances)
    assert len({block for load in loads for block in load.remote_ids}) == flow.shape.blocks == 64 * 300
    assert flow.shape.block_size_bytes == 4096


def test_leases_grow_in_one_step_or_spread_over_it() -> None:
    spread, in_step = (Schedule(leases=4, advances=2, every_s=0.02, in_step=in_step) for in_step in (False, True))
    assert [spread.due_s(1, lease) for lease in range(4)] == pytest.approx([0.025, 0.03, 0.035, 0.04])
    assert [in_step.due_s(1, lease) for lease in range(4)] == pytest.approx([0.04] * 4)


@each(
    ("changes", "growth", "verdicts"),
    [
        # The verdicts: the loop's lag, the reader's CPU, the producer's.
        ({}, Growth.SPREAD, "PPP"),
        ({"lags_s": [0.001] * 98 + [0.003] * 2}, Growth.SPREAD, "FPP"),
        ({"reader_cpu": 0.16}, Growth.IN_STEP, "PFP"),
        ({"producer_cpu": 0.11}, Growth.IN_STEP, "PPF"),
        ({"lags_s": [0.1], "reader_cpu": 0.5, "producer_cpu": 0.5, "behind_s": []}, Growth.NONE, "---"),
    ],
)
def test_what_is_promised(changes: dict[str, Any], growth: Growth, verdicts: str) -> None:
    samples = Samples()
    samples.add(UNTIMED, Many([9.0], 9.0, 9.0, [9.0]))
    samples.add((Fabric.SHM, growth), QUIET._replace(**changes))
    letters = {Verdict.PASS: "P", Verdict.FAIL: "F", Verdict.NOT_MEASURED: "-"}
    assert "".join(letters[row.verdict] for row in Flow().judge(samples).targets) == verdicts
