"""`kvflow bench topology --quick` as a user runs it: real NIXL, a process for every rank. No bound on time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvflow.cli.topology_bench.cuts import CASES
from kvflow.cli.topology_bench.prompts import measure_peer_memory

MIB = 1 << 20


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The JSON and the printed tables of one run."""
    path: Path = tmp_path_factory.mktemp("bench") / "bench.json"
    command = [sys.executable, "-m", "kvflow.cli.main", "bench", "topology", "--quick", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text(encoding="utf-8")), done.stdout


@pytest.mark.nixl
@pytest.mark.timeout(300)
def test_every_case_was_measured_and_compared(bench: tuple[dict[str, Any], str]) -> None:
    report, printed = bench
    assert [case["label"] for case in report["cases"]] == [case.label for case in CASES]
    for case in report["cases"]:
        assert case["label"] in printed
        assert len(case["seconds"]) == 2
        assert 0 < case["low_s"] <= case["median_s"] <= case["high_s"]
        assert case["gb_per_s"] == pytest.approx(case["size_bytes"] / case["median_s"] / 1e9)
        assert case["ratio_low"] <= case["ratio"] <= case["ratio_high"]
        assert case["checked_bytes"] == 2 * case["size_bytes"]  # one load in full, two loads one of two layers
        assert case["read_bytes"] >= case["size_bytes"]
        assert case["phases_median_s"]["wire"] > 0


@pytest.mark.nixl
@pytest.mark.timeout(300)
def test_descriptors_are_what_the_cuts_make_them(bench: tuple[dict[str, Any], str]) -> None:
    report, _ = bench
    found = {case["label"]: case for case in report["cases"]}
    assert found["HND, cut alike"]["size_bytes"] == MIB
    for label in ("decode TP 2x, head slice", "decode TP 4x, head slice"):
        assert (found[label]["descriptors"], found[label]["piece_bytes"]) == (32, 32 << 10)
    assert found["prefill TP 2x, two ranks"]["piece_bytes"] == 16 << 10
    assert found["NHD to HND, no scratch"]["piece_bytes"] == 256
    assert found["thin rank, decode TP 4x"]["piece_bytes"] == 8 << 10


@pytest.mark.nixl
@pytest.mark.timeout(300)
def test_planning_memory_and_targets_are_in_the_report(bench: tuple[dict[str, Any], str]) -> None:
    report, printed = bench
    assert report["schema_version"] == 1
    assert report["settings"]["quick"] is True
    assert report["machine"]["nixl"]
    for plan in report["planning"]:
        assert plan["descriptors"] == 8192 * 160
        assert 0 < plan["first_s"] < plan["min_s"] <= plan["median_s"] <= plan["max_s"]
    assert [row["target"].split(",")[0] for row in report["targets"]] == [
        "HND slices >= 32 KiB",
        "planning",
        "planning",
        "planning",
        "peer memory",
    ]
    for words in ("planning a prompt", "memory of a peer", "targets"):
        assert words in printed


def test_a_peer_costs_memory_for_its_regions_not_for_its_blocks() -> None:
    few, _, many, _ = measure_peer_memory()
    assert 0.9 < few.growth < 1.01
    assert 0.9 < many.growth < 1.01
    assert 1 < many.bytes_of_blocks[0] / few.bytes_of_blocks[0] < many.regions / few.regions
