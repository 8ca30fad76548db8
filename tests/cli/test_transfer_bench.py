"""`kvflow bench transfer --quick` as a user runs it: real NIXL, eight processes, both transports. No bound on time."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

CONTENDERS = {"raw_example", "raw_tuned", "kvflow", "bare_hop"}
TARGET_WORDS = (
    "shm: bulk speed / (b)",
    "shm: bulk speed / (a)",
    "shm: one block",
    "shm: loop lag p99",
    "shm: loop lag max",
    "shm: idle CPU",
    "tcp: bulk speed / (b)",
    "tcp: bulk speed / (a)",
    "tcp: one block",
    "tcp: idle CPU",
    "planning",
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The JSON and the printed tables of one run."""
    path: Path = tmp_path_factory.mktemp("bench") / "bench.json"
    command = [sys.executable, "-m", "kvflow.cli.main", "bench", "transfer", "--quick", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text(encoding="utf-8")), done.stdout


def test_every_size_has_every_contender_with_sane_numbers(bench: tuple[dict[str, Any], str]) -> None:
    report, _ = bench
    assert [result["transport"] for result in report["transports"]] == ["shm", "tcp"]
    for result in report["transports"]:
        assert [size["label"] for size in result["sizes"]] == ["one block", "1 MB"]
        for size in result["sizes"]:
            assert set(size["contenders"]) == CONTENDERS
            assert size["size_bytes"] > 0
            assert size["descriptors"] == size["blocks"] * 4  # two layers, K and V
            assert 0 < size["kvflow_descriptors"] <= size["descriptors"]
            for found in size["contenders"].values():
                _check_contender(found, size["size_bytes"])
            assert size["phases_median_s"]["wire"] >= 0


def _check_contender(found: dict[str, Any], size_bytes: int) -> None:
    assert found["samples"] == len(found["seconds"]) == 40  # two pairs with a round of 20 loads each
    assert len(found["pair_medians_s"]) == 2
    assert found["median_s"] == pytest.approx(sum(found["pair_medians_s"]) / 2)
    assert found["checked_blocks"] >= found["samples"]
    assert 0 < min(found["seconds"]) <= found["median_s"] <= found["p99_s"] == max(found["seconds"])
    assert found["gb_per_s"] == pytest.approx(size_bytes / found["median_s"] / 1e9)
    assert found["ratio_to_a"] > 0
    assert found["ratio_to_b"] > 0
    assert found["cpu_s_per_gb"] > 0


def test_ratios_compare_with_the_contenders_of_the_same_run(bench: tuple[dict[str, Any], str]) -> None:
    for result in bench[0]["transports"]:
        for size in result["sizes"]:
            found = size["contenders"]
            assert found["raw_example"]["ratio_to_a"] == found["raw_tuned"]["ratio_to_b"] == 1
            for ours in (found["kvflow"], found["bare_hop"]):
                assert ours["ratio_to_b"] == pytest.approx(ours["gb_per_s"] / found["raw_tuned"]["gb_per_s"])


def test_the_loop_and_the_idle_process_were_watched(bench: tuple[dict[str, Any], str]) -> None:
    for result in bench[0]["transports"]:
        assert 0 <= result["idle_cpu_percent"] < 200
        assert 0 <= result["huge_page_share"] <= 1
        for lag in [result["idle_lag"], *(size["lag"] for size in result["sizes"])]:
            assert lag["samples"] > 0
            assert 0 <= lag["p50_ms"] <= lag["p99_ms"] <= lag["max_ms"] < math.inf


def test_every_target_has_a_row(bench: tuple[dict[str, Any], str]) -> None:
    rows = bench[0]["targets"]
    assert len(rows) == len(TARGET_WORDS)
    for row, words in zip(rows, TARGET_WORDS, strict=True):
        assert words in row["target"]
        assert row["verdict"] in ("pass", "fail", "not measured")
        assert (row["measured"] is None) == (row["verdict"] == "not measured")
    assert bench[0]["planning"]["descriptors"] >= 100_000
    assert bench[0]["planning"]["median_s"] > 0


def test_the_tables_are_printed_and_the_settings_kept(bench: tuple[dict[str, Any], str]) -> None:
    report, printed = bench
    for words in ("(a) example", "(b) tuned", "(c) kvflow", "(d) bare hop", "targets", "idle CPU"):
        assert words in printed
    assert report["schema_version"] == 2
    assert report["settings"]["quick"] is True
    assert report["machine"]["nixl"]
    assert report["machine"]["load_average_1m"] >= 0
