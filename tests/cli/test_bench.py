"""`kvflow bench transfer`: its sizes, and a small run over real NIXL. No bound on time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvflow.bench.loads import SettingsError
from kvflow.bench.transfer_bench import blocks_by_size
from kvflow.cli.app import app


def test_sizes_are_words_of_mb_smallest_first() -> None:
    assert blocks_by_size("256, 1,block", layers=8) == {"one block": 1, "1 MB": 2, "256 MB": 512}


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1.5", "3", "block,,1", "4x1"])
def test_sizes_that_cannot_be_measured_are_errors(text: str) -> None:
    with pytest.raises(SettingsError, match="--sizes"):
        blocks_by_size(text, layers=32)


@pytest.mark.nixl
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_children")
def test_it_compares_with_nixl_alone(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    options = ("--transport", "shm", "--sizes", "block,1", "--pairs", "1", "--rounds", "2", "--layers", "2")
    done = CliRunner().invoke(app, ["bench", "transfer", *options, "--json", str(path)])
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text(encoding="utf-8"))["speed"]
    assert [(row["transport"], row["size"]) for row in rows] == [("shm", "one block"), ("shm", "1 MB")]
    for row in rows:
        assert row["loads"] == 2 * 20
        assert 0 < row["kvflow_s"] <= row["kvflow_p99_s"]
        assert row["ratio"] == pytest.approx(row["raw_s"] / row["kvflow_s"])
    for word in ("one block", "NIXL ms", "ratio", "Every byte was compared"):
        assert word in " ".join(done.stdout.split())
