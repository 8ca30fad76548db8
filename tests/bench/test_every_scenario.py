"""Every command of `python3 dev.py bench`, small, over real NIXL. No bound on time."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvflow.bench.loads import Fabric
from tests.bench import __main__ as ours
from tests.bench.peers.contenders import Peer, runs_over
from tests.bench.topology import CASES

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
Report = dict[str, Any]


def check_transfer(report: Report) -> None:
    """One round of 20 loads of each size."""
    rows = report["speed"]
    contenders = ("raw_example", "raw_tuned", "kvflow", "bare_hop")
    assert [(*key(row), row["contender"]) for row in rows] == [
        (*some, name) for some, name in product(product(("shm", "tcp"), ("one block", "1 MB")), contenders)
    ]
    for row in rows:
        assert (row["samples"], row["pair_medians_s"]) == (20, [row["median_s"]])
        assert 0 < row["median_s"] <= row["p99_s"]
        assert row["cpu_s_per_gb"] > 0
    for row in report["loop_lag"]:
        assert 0 <= row["lag_s"]["p50"] <= row["lag_s"]["p99"] <= row["lag_s"]["max"]
    assert all(0 <= row["cpu_percent"] < 200 for row in report["idle"])
    assert [row["target"].split(":")[0] for row in report["targets"]] == ["shm"] * 6 + ["tcp"] * 4


def check_peers(report: Report) -> None:
    """Contenders that are not installed are left out, and the report names them."""
    rows = report["speed"]
    left_out = {row["contender"]: row["why"] for row in report.get("left out", [])}
    assert all("not installed" in why or "import" in why for why in left_out.values())
    here = [peer for peer in Peer if peer not in left_out]
    assert [(row["transport"], row["contender"]) for row in report["cancel"]] == [("tcp", peer) for peer in here]
    assert [(row["fault"], row["contender"]) for row in report["faults"]] == [("killed", peer) for peer in here]
    assert [row["landed_mb"] for row in report["cancel"] if row["contender"] == "kvflow"] == [0.0]
    for where in product(Fabric, ("one block", "4 x 1 MB")):
        found = [row["contender"] for row in rows if key(row) == where]
        assert found == [peer for peer in here if runs_over(peer, where[0])]
    assert {row["samples"] for row in rows} == {20}
    assert {row["size_bytes"] for row in rows} == {128 << 10, 4 * MIB}


def key(row: Report) -> tuple[str, str]:
    return row["transport"], row["size"]


def check_topology(report: Report) -> None:
    cases = {case["label"]: case for case in report["cases"]}
    assert list(cases) == [case.label for case in CASES]
    for case in cases.values():
        assert case["load_s"]["samples"] == 2
        assert 0 < case["load_s"]["p25"] <= case["load_s"]["p50"]
        assert case["checked_bytes"] == 2 * case["size_bytes"]  # one load in full, two loads one of two layers
        assert case["read_bytes"] >= case["size_bytes"]
    assert cases["HND, cut alike"]["size_bytes"] == MIB
    for label in ("decode TP 2x, head slice", "decode TP 4x, head slice"):
        assert (cases[label]["descriptors"], cases[label]["piece_bytes"]) == (32, 32 << 10)
    assert cases["prefill TP 2x, two ranks"]["piece_bytes"] == 16 << 10
    assert cases["NHD to HND, no scratch"]["piece_bytes"] == 256


def check_fairness(report: Report) -> None:
    samples = {row["kind"]: row["load_s"]["samples"] for row in report["loads"]}
    assert samples.pop("one block, behind") >= 1
    assert samples == {"one block, alone": 30, "one slice, alone": 3, "huge": 1}


def check_pages(report: Report) -> None:
    rows = report["pages"]
    assert [(row["pages"], row["ids"]) for row in rows] == list(product((64, 2048), ("scattered", "in order")))
    for row in rows:
        for name in ("serve_s", "ticket_s", "start_s", "longest_turn_s", "load_s"):
            assert row[name]["samples"] == 2
            assert row[name]["min"] > 0
        assert row["longest_turn_s"]["max"] <= row["load_s"]["max"] * 1.001
    assert [row["verdict"] for row in report["targets"]] == ["not measured"]  # which is of 262,144


def check_profile(report: Report) -> None:
    *parts, whole = (row["step_s"] for row in report["hops"])
    assert len(parts) == 6
    assert all(0 < part["min"] <= part["p50"] <= part["max"] < whole["max"] for part in parts)
    assert sum(part["min"] for part in parts) <= whole["min"] * 1.001, "the steps of a load are all of it"
    assert sum(part["max"] for part in parts) >= whole["max"] * 0.999
    assert [row["loads"] for row in report["threads"]] == ["20 one by one", "40 at once"]
    for row in report["threads"]:
        assert row["cpu_us"] == pytest.approx(row["loop_us"] + row["agents_us"] + row["others_us"])
        assert 0 < row["loop_us"] <= row["wall_us"] * 1.1
    own_us = [row["own_us"] for row in report["functions"]]
    assert (len(own_us), own_us) == (5, sorted(own_us, reverse=True))
    assert [row["verdict"] for row in report["targets"]][1:] == ["not measured"] * 2  # which are of 2,000 loads


def check_verifying(report: Report) -> None:
    assert [row["size"] for row in report["sizes"]] == ["1 MB", "16 MB"]
    for row in report["sizes"]:
        assert row["plain_s"]["samples"] == row["verified_s"]["samples"] == row["ratio"]["samples"] == 2
        assert row["checked_bytes"] == 2 * row["size_bytes"] + 4 * row["size_bytes"] // 2  # then one of two layers
    assert [row["where"] for row in report["targets"]] == ["16 MB"]


def check_surviving(report: Report) -> None:
    """Whether the source dies before or after its last byte is chance; the load is right in any case."""
    assert [row["moment"] for row in report["moments"]] == [0.0, 0.5]
    assert all(row["outcomes"].endswith("loaded") and row["load_s"]["p50"] > 0 for row in report["moments"])
    (split,) = report["split"]
    assert split["ratio"] == pytest.approx(split["whole_s"]["p50"] / split["halves_s"]["p50"])


def check_flow(report: Report) -> None:
    assert [(row["growth"], row["loads"], (row["behind_s"] or {}).get("samples", 0)) for row in report["many"]] == [
        ("none", 0, 0),
        ("one by one", 4, 4),
        ("in one step", 4, 4),
    ]
    assert all(row["measured"] is not None for row in report["targets"])


def check_late(report: Report) -> None:
    assert [(row["mode"], row["pool"]) for row in report["late"]] == [("early", 32), ("early", 16), ("late", 16)]
    assert len({row["requests"] for row in report["late"]}) == 1
    assert all(0 < row["blocks"] <= row["pool"] for row in report["late"])


def check_fleet(report: Report) -> None:
    assert len({(row["ranks"], row["phase"]) for row in report["fleet"]}) == 2 * 5
    assert all(row["failed"] == row["wrong"] == 0 for row in report["fleet"])
    assert [(row["peers"], row["layers"]) for row in report["memory"]] == [(4, 4), (8, 4)]
    assert [row["verdict"] for row in report["targets"]] == ["pass", "pass"]


def check_never_idle(report: Report) -> None:
    assert [(row["turn_ms"], row["switch_interval_ms"]) for row in report["cases"]] == [(0, 5), (1, 5)]
    assert all(row["load_s"]["samples"] == 2 for row in report["cases"])


def check_against(report: Report) -> None:
    """This checkout against itself."""
    rows = report["against"]
    assert len(rows) == 3
    assert all(row["ratio"]["samples"] == 2 and min(row["here_us"], row["there_us"]) > 0 for row in rows)


SMALLEST: dict[str, tuple[str, Callable[[Report], None], tuple[str, ...]]] = {
    # Its options, what has to be in its report, and what it prints.
    "transfer": (
        "--sizes block,1 --pairs 1 --rounds 1 --layers 2 --idle-s 0.5",
        check_transfer,
        ("raw_example", "bare_hop", "idle CPU"),
    ),
    "peers": (
        "--sizes block,4x1 --pairs 1 --rounds 1 --layers 2 --rows speed,cancel,killed --broken-mb 16 --trials 1 "
        "--bound-s 10",
        check_peers,
        ("raw_tuned", "4 x 1 MB", "landed mb", "killed"),
    ),
    "topology": ("--size 1 --rounds 2 --layers 2", check_topology, ("staged", "Ratios are of speed")),
    "fairness": ("--size 256 --rounds 1", check_fairness, ("one block, behind", "delay")),
    "pages": ("--pages 64,2048 --rounds 2", check_pages, ("scattered", "longest turn ms")),
    "profile": (
        "--alone 20 --burst 40 --rounds 1 --functions 5 --busy-cores 1",
        check_profile,
        ("hop to the agents' thread", "loop us", "own us"),
    ),
    "verifying": ("--sizes 1,16 --rounds 2 --layers 2", check_verifying, ("verified ms", "Ratios are of speed")),
    "surviving": ("--size-mb 8 --moments 2 --rounds 2", check_surviving, ("added ms", "Split")),
    "flow": (
        "--link shm --rounds 1 --many 4 --many-s 0.2",
        check_flow,
        ("one by one", "in one step", "behind"),
    ),
    "late": (
        "--pool 32 --prompt-blocks 4 --engines 2 --block-ms 1 --answer-s 0.1 --rate-per-s 20 --span-s 1",
        check_late,
        ("goodput per s", "given back"),
    ),
    "never-idle": (
        "--turns-ms 0,1 --intervals-ms 5 --loads 2",
        check_never_idle,
        ("switch interval ms", "turns of the loop"),
    ),
    "against": (
        f"--checkout {ROOT} --rounds 2 --loads 100 --burst 20",
        check_against,
        ("all at once", "here to there"),
    ),
    "fleet": ("--sizes 4,8 --peers 4 --hot 1 --layers 4", check_fleet, ("steady", "churn", "honest loads")),
}


def test_every_scenario_has_its_smallest_settings() -> None:
    assert SMALLEST.keys() == ours.SCENARIOS.keys()


@pytest.mark.thorough
@pytest.mark.nixl
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SMALLEST)
def test_every_scenario_runs_with_its_smallest_settings_and_prints_a_table_and_json(name: str, tmp_path: Path) -> None:
    """Thorough: see `test_a_scenario_runs_from_its_ranks_to_its_report` of `bench/test_scenario.py`."""
    options, check, words = SMALLEST[name]
    path = tmp_path / "bench.json"
    done = CliRunner(env={"COLUMNS": "200"}).invoke(ours.bench, [name, *options.split(), "--json", str(path)])
    assert done.exit_code == 0, done.output
    report = json.loads(path.read_text(encoding="utf-8"))
    check(report)
    assert report["machine"]["load_average_1m"] >= 0
    for row in report["targets"]:
        assert (row["measured"] is None) == (row["verdict"] == "not measured")
    for word in (*words, "targets"):
        assert word in done.stdout
