"""`kvflow bench fairness`: its arithmetic, and `--quick` as a user runs it, over real NIXL. No bound on time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvflow.cli.bench.messages import RoundResult
from kvflow.cli.bench.settings import MIB, SettingsError, Transport
from kvflow.cli.bench.targets import Verdict
from kvflow.cli.fairness_bench.results import judge, summarize
from kvflow.cli.fairness_bench.settings import FairnessSettings, loads_of_round, make_settings


def settings_of(*, size_mb: int = 64, huge_loads: int = 2, quick: bool = False) -> FairnessSettings:
    return make_settings(
        transport=Transport.SHM, size_mb=size_mb, huge_loads=huge_loads, rounds=3, slice_bytes=8 * MIB, quick=quick
    )


def test_the_loads_of_a_round_share_no_block() -> None:
    settings = settings_of()
    loads = loads_of_round(settings, 1)
    for ids in ([load.local_ids for load in loads.loads], [load.remote_ids for load in loads.loads]):
        flat = [block for some in ids for block in some]
        assert len(set(flat)) == len(flat) == settings.shape.blocks
    assert {len(load.local_ids) for load in (*loads.alone, *loads.behind)} == {1}
    assert [len(load.local_ids) * settings.shape.block_size_bytes for load in loads.huge] == [64 * MIB] * 2
    assert {len(load.local_ids) * settings.shape.block_size_bytes for load in loads.slices} == {8 * MIB}
    assert loads_of_round(settings, 1) == loads
    assert loads_of_round(settings, 2) != loads


def test_a_huge_load_has_at_least_two_slices() -> None:
    with pytest.raises(SettingsError, match=r"--size: 8 MB .* less than two slices, which have 16777216"):
        settings_of(size_mb=8)


def test_the_delay_is_a_ratio_within_each_round() -> None:
    quiet = RoundResult(alone_s=(1.0, 1.0, 1.0), slice_s=(4.0,), huge_s=(40.0,), behind_s=(3.0, 5.0))
    slow = RoundResult(alone_s=(2.0, 2.0, 9.0), slice_s=(8.0,), huge_s=(80.0,), behind_s=(6.0, 10.0))
    result = summarize([quiet, slow, quiet])
    assert (result.delay_p50, result.delay_p99) == (0.5, 1.0)
    alone, behind, one_slice, huge = result.kinds
    assert (alone.samples, alone.p50_s, alone.max_s) == (9, 1.0, 9.0)
    assert (behind.samples, behind.p99_s, one_slice.p50_s, huge.max_s) == (6, 10.0, 4.0, 80.0)
    assert [row.verdict for row in judge(result)] == [Verdict.PASS]
    late = RoundResult(alone_s=(1.0,), slice_s=(4.0,), huge_s=(40.0,), behind_s=(10.0,))
    assert [row.verdict for row in judge(summarize([late]))] == [Verdict.FAIL]


@pytest.mark.nixl
@pytest.mark.timeout(120)
def test_the_quick_bench_measures_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    command = [sys.executable, "-m", "kvflow.cli.main", "bench", "fairness", "--quick", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text(encoding="utf-8"))
    samples = {kind["label"]: kind["samples"] for kind in report["result"]["kinds"]}
    assert samples.pop("one block, behind") >= 1
    assert samples == {"one block, alone": 3, "one slice, alone": 3, "huge": 1}
    assert "one block behind 1 x 256 MB, slices of 8 MB" in done.stdout
