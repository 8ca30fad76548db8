"""Records in files, and a timeline of them that Perfetto (ui.perfetto.dev) and chrome://tracing open.

    with RecordFile("decode-0.jsonl") as records:
        async with kvflow.Runtime(config, observers=[records]) as runtime: ...

Each engine writes a file of its own, one JSON object a line; `kvflow trace *.jsonl --out run.json` makes one timeline
of them. Times are the machine's wall clock, so files of several machines are as well aligned as their clocks are.

The timeline is in the Trace Event Format: an engine's rank is a process, loads and leases are asynchronous slices with
one slice inside for each phase, and an arrow leads from a lease to each load of the same ticket. A lease that grew and
its loads have a row of slices more: tokens as they were computed, and as they landed. Where blocks flow while their
prompt is computed, the one lies under the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Self, TypeAlias

import msgspec

from kvflow.core.plan.topology import Rank
from kvflow.core.policy.history import Moment
from kvflow.errors import InvalidInput
from kvflow.runtime.records import LeaseRecord, LoadRecord

__all__ = ["BadRecords", "RecordFile", "overlap", "read_records", "timeline"]

_US = 1e6


class RecordLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a file: what all records have, and as details what only loads or leases have."""

    kind: str
    """"load" or "lease"."""
    ended_s: float
    """Unix time."""
    engine_id: str
    rank: Rank
    request_id: str
    outcome: str
    seconds: dict[str, float]
    details: dict[str, str | int | dict[str, int] | list[Moment]]


class BadRecords(InvalidInput):
    """Line of a file that is no record."""


class RecordFile:
    """A `kvflow.Observer` that appends to a file. Lines are buffered; closing writes what is left.

    Writing happens on the event loop, some microseconds per record and a write now and then: for diagnosing, not for
    every day.

    Args:
        path: of the file, which is made if there is none.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path | str) -> None:
        self._file = Path(path).open("ab")  # noqa: SIM115 - closed by close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closing twice is fine."""
        self._file.close()

    def load_ended(self, record: LoadRecord) -> None:
        """Write a line.

        Args:
            record: of the load, which has just ended.
        """
        self._write("load", record)

    def lease_ended(self, record: LeaseRecord) -> None:
        """Write a line.

        Args:
            record: of the lease, which has just ended.
        """
        self._write("lease", record)

    def _write(self, kind: str, record: LoadRecord | LeaseRecord) -> None:
        told = {entry.name: getattr(record, entry.name) for entry in fields(record)}
        shared = {name: told.pop(name) for name in ("engine_id", "rank", "request_id", "outcome")}
        line = RecordLine(kind=kind, ended_s=time.time(), seconds=dict(told.pop("seconds")), details=told, **shared)
        self._file.write(msgspec.json.encode(line) + b"\n")


def read_records(path: Path) -> Iterator[RecordLine]:
    """Read a file that `RecordFile` has written.

    Args:
        path: of the file.

    Returns:
        Its lines, each read when it is asked for.

    Raises:
        BadRecords: a line is no record; its number is named.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                yield msgspec.json.decode(text, type=RecordLine)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise BadRecords(f"{path}, line {number}: {error}") from error


TraceEvent: TypeAlias = dict[str, Any]
_GROWTH = {"lease": "computed", "load": "landed"}
"""Details that have the moments at which tokens were there."""
_Offer: TypeAlias = tuple[str, str]  # engine and its name for the request
_Moment: TypeAlias = tuple[int, float]  # process of the timeline, Unix time


def timeline(lines: Iterable[RecordLine]) -> dict[str, list[TraceEvent]]:
    """All records as one trace, for Perfetto.

    Args:
        lines: of all engines' files, in any order.

    Returns:
        A JSON object: dumped to a file, Perfetto opens it.
    """
    processes: dict[tuple[str, Rank], int] = {}
    leases: dict[_Offer, list[_Moment]] = {}
    loads: list[tuple[_Offer, _Moment, float]] = []
    events: list[TraceEvent] = []
    for number, line in enumerate(lines, 1):
        process = processes.setdefault((line.engine_id, line.rank), len(processes) + 1)
        begin_s = line.ended_s - sum(line.seconds.values())
        events += _slices(line, process, number, begin_s)
        events += _growth(line, process, number, begin_s)
        if line.kind == "lease":
            leases.setdefault((line.engine_id, line.request_id), []).append((process, begin_s))
        else:
            offer = (str(line.details["peer_engine_id"]), str(line.details["remote_request_id"]))
            loads.append((offer, (process, begin_s), line.ended_s))
    events += _arrows(leases, loads)
    names = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"{engine_id} {rank}"}}
        for (engine_id, rank), process in processes.items()
    ]
    return {"traceEvents": names + sorted(events, key=lambda event: event["ts"])}


def _slices(line: RecordLine, process: int, number: int, begin_s: float) -> Iterator[TraceEvent]:
    """A slice for the record and, inside, one for each phase."""
    common: TraceEvent = {"cat": line.kind, "id": number, "pid": process, "tid": process}
    name, details = f"{line.kind} {line.request_id}", dict(line.details)
    details.pop(_GROWTH.get(line.kind, ""), None)  # it has slices of its own
    yield {**common, "ph": "b", "name": name, "ts": begin_s * _US, "args": {"outcome": line.outcome, **details}}
    at_s = begin_s
    for phase, seconds in line.seconds.items():
        if seconds > 0:
            yield {**common, "ph": "b", "name": phase, "ts": at_s * _US}
            at_s += seconds
            yield {**common, "ph": "e", "name": phase, "ts": at_s * _US}
    yield {**common, "ph": "e", "name": name, "ts": line.ended_s * _US}


def _growth(line: RecordLine, process: int, number: int, begin_s: float) -> Iterator[TraceEvent]:
    """A row with a slice for each moment of a lease that grew, or of a load of one: the tokens that came until then."""
    what, before_s, before = _GROWTH.get(line.kind, ""), 0.0, 0
    common: TraceEvent = {"cat": what, "id": number, "pid": process, "tid": process}
    for seconds, tokens in _moments(line):
        name = f"{what} {before}..{tokens} of {line.request_id}"
        yield {**common, "ph": "b", "name": name, "ts": (begin_s + before_s) * _US, "args": {"tokens": tokens - before}}
        yield {**common, "ph": "e", "name": name, "ts": (begin_s + seconds) * _US}
        before_s, before = seconds, tokens


def _moments(line: RecordLine) -> list[Moment]:
    found = line.details.get(_GROWTH.get(line.kind, ""))
    return found if isinstance(found, list) else []


def overlap(lines: Iterable[RecordLine]) -> dict[str, float]:
    """Share of each prompt that had landed when its last token was computed, for loads of leases that grew.

    Args:
        lines: of all engines' files, in any order.

    Returns:
        By request, a share from 0 to 1 of its tokens, by the wall clocks of both machines. Without loads whose lease is
        in no file.
    """
    computed: dict[_Offer, float] = {}
    loads: list[tuple[_Offer, RecordLine]] = []
    for line in lines:
        if line.kind == "load" and _moments(line):
            loads.append(((str(line.details["peer_engine_id"]), str(line.details["remote_request_id"])), line))
        elif line.kind == "lease" and (moments := _moments(line)):
            end_s = line.ended_s - sum(line.seconds.values()) + moments[-1].seconds
            offer = (line.engine_id, line.request_id)
            computed[offer] = max(end_s, computed.get(offer, end_s))  # of several ranks the last
    found = {}
    for offer, line in loads:
        if offer in computed:
            moments, begin_s = _moments(line), line.ended_s - sum(line.seconds.values())
            early = [tokens for seconds, tokens in moments if begin_s + seconds <= computed[offer]]
            found[line.request_id] = max(early, default=0) / moments[-1].tokens
    return found


def _arrows(leases: dict[_Offer, list[_Moment]], loads: list[tuple[_Offer, _Moment, float]]) -> Iterator[TraceEvent]:
    """Arrows to each load from the latest lease of what it loads that began before its end: one that asks by name
    may begin before its lease does, and when a line was written is known less exactly than its phases.
    """
    for number, (offer, (process, begin_s), ended_s) in enumerate(loads, 1):
        before = [moment for moment in leases.get(offer, []) if moment[1] <= ended_s]
        if not before:
            continue
        producer, offered_s = max(before, key=lambda moment: moment[1])
        common: TraceEvent = {"cat": "ticket", "name": "ticket", "id": number}
        yield {**common, "ph": "s", "pid": producer, "tid": producer, "ts": offered_s * _US}
        yield {**common, "ph": "f", "bp": "e", "pid": process, "tid": process, "ts": max(begin_s, offered_s) * _US}
