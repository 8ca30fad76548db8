"""Records in files, and files as a timeline."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests_support import in_virtual_time
from typer.testing import CliRunner

from kvflow.cli.app import app
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.history import Moment
from kvflow.observe.timeline import BadRecords, RecordFile, RecordLine, overlap, read_records, timeline
from tests.observe.observed import grown, observed


async def recorded(path: Path) -> Path:
    with RecordFile(path) as records:
        async with observed([records]):
            pass
    return path


async def test_a_run_becomes_a_timeline(tmp_path: Path) -> None:
    lines = list(read_records(await recorded(tmp_path / "run.jsonl")))
    assert sorted((line.kind, line.request_id, line.outcome) for line in lines) == [
        ("lease", "bad", "revoked"),
        ("lease", "good", "read"),
        ("load", "bad", "LeaseExpired"),
        ("load", "good", "loaded"),
    ]
    assert {line.rank for line in lines} == {(0, 0, 0)}
    events = timeline(lines)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert sorted(names.values()) == ["consumer dp 0 pp 0 tp 0", "producer dp 0 pp 0 tp 0"]
    opened, closed = (
        sorted((event["pid"], event["id"], event["name"]) for event in events if event["ph"] == phase) for phase in "be"
    )
    assert opened == closed
    assert {"load good", "lease good", "wire", "offered", "held"} <= {name for _, _, name in opened}
    arrows = [[names[event["pid"]] for event in events if event["ph"] == phase] for phase in "sf"]
    assert arrows == [["producer dp 0 pp 0 tp 0"] * 2, ["consumer dp 0 pp 0 tp 0"] * 2]
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)


async def test_the_command_writes_one_timeline_of_several_files(tmp_path: Path) -> None:
    first, second = await recorded(tmp_path / "a.jsonl"), await recorded(tmp_path / "b.jsonl")
    out = tmp_path / "trace.json"
    result = CliRunner().invoke(app, ["trace", str(first), str(second), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert len([event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "s"]) == 4


@in_virtual_time
async def test_what_flows_has_a_row_of_what_was_computed_and_one_of_what_landed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RecordFile(path) as records:
        await grown([records])
    lines = list(read_records(path))
    events = timeline(lines)["traceEvents"]
    assert not [event for event in events if {"computed", "landed"} & set(event.get("args", {}))]
    for what in ("computed", "landed"):
        begun, ended = ([event for event in events if (event.get("cat"), event["ph"]) == (what, ph)] for ph in "be")
        assert sum(event["args"]["tokens"] for event in begun) == 15
        assert begun[0]["name"] == f"{what} 0..{begun[0]['args']['tokens']} of flows"
        assert [event["name"] for event in begun] == [event["name"] for event in ended]
        assert [event["ts"] for event in begun[1:]] == [event["ts"] for event in ended[:-1]]


def line(kind: str, begun_s: float, moments: list[Moment], **more: str) -> RecordLine:
    what = {"lease": "computed", "load": "landed"}[kind]
    return RecordLine(
        kind=kind,
        ended_s=begun_s + 10.0,
        engine_id="decode" if kind == "load" else "prefill",
        rank=Rank(0, 0, 0),
        request_id=f"{kind} flows",
        outcome="",
        seconds={"wire": 7.0, "notify": 3.0},
        details={what: moments, "peer_engine_id": "prefill", "remote_request_id": "lease flows", **more},
    )


def test_an_arrow_leads_from_the_latest_lease_that_began_before_the_load_ended() -> None:
    def arrow(*leases_begin_s: float) -> list[float]:
        lines = [line("lease", begin_s, []) for begin_s in leases_begin_s]
        events = timeline([*lines, line("load", 102.0, [])])["traceEvents"]
        return [event["ts"] / 1e6 for event in events if event["ph"] in "sf"]

    assert arrow(100.0, 101.0, 120.0) == [101.0, 102.0]
    assert arrow(102.001) == [102.001, 102.001], "an arrow never leads back in time"
    assert arrow(120.0) == []


def test_the_overlap_is_what_had_landed_when_all_was_computed(tmp_path: Path) -> None:
    lease = line("lease", 100.0, [Moment(1.0, 8), Moment(4.0, 16)])
    other_rank = line("lease", 101.0, [Moment(4.0, 16)])
    load = line("load", 102.0, [Moment(1.0, 8), Moment(2.5, 12), Moment(5.0, 16)])
    assert overlap([load, lease]) == {"load flows": 0.5}
    assert overlap([lease, load, other_rank]) == {"load flows": 0.75}
    assert overlap([load]) == overlap([line("lease", 0.0, []), load]) == overlap([lease]) == {}
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in (lease, load)))
    result = CliRunner().invoke(app, ["trace", str(path), "--out", str(tmp_path / "trace.json")])
    said = "1 load of leases that grew: 50% of the tokens (median) had landed when the last one was computed"
    assert said in " ".join(result.output.split())


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"kind": "load"}\n')
    with pytest.raises(BadRecords, match=r"broken.jsonl, line 1: .*ended_s"):
        list(read_records(path))
    result = CliRunner().invoke(app, ["trace", str(path)])
    assert result.exit_code == 1
