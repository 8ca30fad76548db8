"""Records in files, and files as a timeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvflow.cli.app import app
from kvflow.observe.timeline import BadRecords, RecordFile, read_records, timeline
from tests.observe.observed import observed


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
    opened = [(event["pid"], event["id"], event["name"]) for event in events if event["ph"] == "b"]
    closed = [(event["pid"], event["id"], event["name"]) for event in events if event["ph"] == "e"]
    assert sorted(opened) == sorted(closed)
    assert {"load good", "lease good", "wire", "offered", "held"} <= {name for _, _, name in opened}
    starts = [names[event["pid"]] for event in events if event["ph"] == "s"]
    ends = [names[event["pid"]] for event in events if event["ph"] == "f"]
    assert starts == ["producer dp 0 pp 0 tp 0"] * 2
    assert ends == ["consumer dp 0 pp 0 tp 0"] * 2
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)


async def test_the_command_writes_one_timeline_of_several_files(tmp_path: Path) -> None:
    first, second = await recorded(tmp_path / "a.jsonl"), await recorded(tmp_path / "b.jsonl")
    out = tmp_path / "trace.json"
    result = CliRunner().invoke(app, ["trace", str(first), str(second), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert len([event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "s"]) == 4


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"kind": "load"}\n')
    with pytest.raises(BadRecords, match=r"broken.jsonl, line 1: .*ended_s"):
        list(read_records(path))
    result = CliRunner().invoke(app, ["trace", str(path)])
    assert result.exit_code == 1
