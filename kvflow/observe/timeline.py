"""Record files, and a timeline of their loads and leases for Perfetto (ui.perfetto.dev) or chrome://tracing.

    with RecordFile("decode-0.jsonl") as records:
        async with kvflow.Runtime(config, observers=[records]) as runtime: ...

Each engine writes its own file, with one JSON object per line; `kvflow trace *.jsonl --out run.json` makes one timeline
of all files. Files of several machines are aligned only as well as the machines' clocks.

The timeline is in the Trace Event Format. Each rank is a process. Each load and each lease is an asynchronous slice,
with a slice inside for each phase. An arrow leads from a lease to each load of its ticket. A lease that was opened
while its prompt was still computed has one more row of slices, which shows when tokens were computed; each load of this
lease has a row that shows when the tokens landed. These two rows overlap if blocks were transferred during the
computation.
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

_US_PER_S = 1e6


class RecordLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a record file: an ended load or lease.

    `details`: fields that only loads or only leases have, by name.
    """

    kind: str
    """"load" or "lease"."""
    ended_s: float
    """Unix time at which the load or lease ended."""
    engine_id: str
    rank: Rank
    request_id: str
    outcome: str
    seconds: dict[str, float]
    details: dict[str, str | int | dict[str, int] | list[Moment]]


_RECORD_LINE = msgspec.json.Decoder(RecordLine)


class BadRecords(InvalidInput):
    """Error: a line of a record file cannot be decoded. The message names the file and the line."""


class RecordFile:
    """A `kvflow.Observer` that appends each ended load and lease to a file. Writes are buffered; `close` flushes them.

    Use this for diagnosis, not all the time: the event loop writes each record, which takes some microseconds and
    sometimes a write to the file.

    Args:
        path: Path of the file; created if it does not exist.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path | str) -> None:
        self._file = Path(path).open("ab")  # noqa: SIM115 - closed by close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write the buffered lines and close the file. Closing twice is fine."""
        self._file.close()

    def load_ended(self, record: LoadRecord) -> None:
        """Append the record of an ended load to the file. The runtime calls this.

        Args:
            record: Record of the load.
        """
        self._write("load", record)

    def lease_ended(self, record: LeaseRecord) -> None:
        """Append the record of an ended lease to the file. The runtime calls this.

        Args:
            record: Record of the lease.
        """
        self._write("lease", record)

    def _write(self, kind: str, record: LoadRecord | LeaseRecord) -> None:
        details = {entry.name: getattr(record, entry.name) for entry in fields(record)}
        shared = {name: details.pop(name) for name in ("engine_id", "rank", "request_id", "outcome")}
        line = RecordLine(
            kind=kind, ended_s=time.time(), seconds=dict(details.pop("seconds")), details=details, **shared
        )
        self._file.write(msgspec.json.encode(line) + b"\n")


def read_records(path: Path) -> Iterator[RecordLine]:
    """Read the records in a file written by `RecordFile`.

    Args:
        path: Path of the file.

    Returns:
        An iterator over the records, which reads the file line by line.

    Raises:
        BadRecords: A line is not a record. The message has the line number.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                yield _RECORD_LINE.decode(text)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise BadRecords(f"{path}, line {number}: {error}") from error


TraceEvent: TypeAlias = dict[str, Any]
_GROWTH = {"lease": "computed", "load": "landed"}
"""For each kind of record, the key of a list of moments (seconds and number of tokens) in `RecordLine.details`.

The list "computed" shows when tokens of a lease were computed, and "landed" when tokens of a load had landed.
"""
_OfferKey: TypeAlias = tuple[str, str]  # producer's engine id, producer's request id
_Begin: TypeAlias = tuple[int, float]  # process number in the timeline, Unix time


def timeline(lines: Iterable[RecordLine]) -> dict[str, list[TraceEvent]]:
    """Convert records of loads and leases into one timeline for Perfetto.

    Args:
        lines: Records of all engines' files, in any order.

    Returns:
        The timeline as a JSON object, for a file to open in Perfetto.
    """
    processes: dict[tuple[str, Rank], int] = {}
    leases: dict[_OfferKey, list[_Begin]] = {}
    loads: list[tuple[_OfferKey, _Begin, float]] = []
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


def _event(phase: str, time_s: float, common: TraceEvent, **fields: object) -> TraceEvent:
    """Return the event of `phase` ("b": begin, "e": end, "s" and "f": ends of an arrow) at a Unix time."""
    return {**common, "ph": phase, "ts": time_s * _US_PER_S, **fields}


def _slices(line: RecordLine, process: int, number: int, begin_s: float) -> Iterator[TraceEvent]:
    """Yield the trace events of one record: a bar in the timeline, with a bar inside for each phase that took time.

    `process`: process number of the rank in the timeline. `number`: number of the record in the timeline.
    """
    common: TraceEvent = {"cat": line.kind, "id": number, "pid": process, "tid": process}
    name, details = f"{line.kind} {line.request_id}", dict(line.details)
    details.pop(_GROWTH.get(line.kind, ""), None)  # `_growth` makes slices for it
    yield _event("b", begin_s, common, name=name, args={"outcome": line.outcome, **details})
    at_s = begin_s
    for phase, seconds in line.seconds.items():
        if seconds > 0:
            yield _event("b", at_s, common, name=phase)
            at_s += seconds
            yield _event("e", at_s, common, name=phase)
    yield _event("e", line.ended_s, common, name=name)


def _growth(line: RecordLine, process: int, number: int, begin_s: float) -> Iterator[TraceEvent]:
    """Yield the trace events of a row that shows when tokens of a lease were computed, or tokens of a load landed.

    The row has a bar from each moment in the record to the next, labelled with the range of tokens that were added.
    `process`: process number of the rank in the timeline. `number`: number of the record in the timeline.
    """
    what, before_s, before = _GROWTH.get(line.kind, ""), 0.0, 0
    common: TraceEvent = {"cat": what, "id": number, "pid": process, "tid": process}
    for seconds, tokens in _moments(line):
        name = f"{what} {before}..{tokens} of {line.request_id}"
        yield _event("b", begin_s + before_s, common, name=name, args={"tokens": tokens - before})
        yield _event("e", begin_s + seconds, common, name=name)
        before_s, before = seconds, tokens


def _moments(line: RecordLine) -> list[Moment]:
    moments = line.details.get(_GROWTH.get(line.kind, ""))
    return moments if isinstance(moments, list) else []


def overlap(lines: Iterable[RecordLine]) -> dict[str, float]:
    """Return, for each load, the share of the prompt that had landed when the producer computed the last token.

    A load is left out if its lease is not in the files, or was opened only after the prompt was computed. Times of two
    machines are compared by their wall clocks.

    Args:
        lines: Records of all engines' files, in any order.

    Returns:
        The share of the prompt's tokens, from 0 to 1, by request id.
    """
    computed: dict[_OfferKey, float] = {}
    loads: list[tuple[_OfferKey, RecordLine]] = []
    for line in lines:
        if line.kind == "load" and _moments(line):
            loads.append(((str(line.details["peer_engine_id"]), str(line.details["remote_request_id"])), line))
        elif line.kind == "lease" and (moments := _moments(line)):
            end_s = line.ended_s - sum(line.seconds.values()) + moments[-1].seconds
            offer = (line.engine_id, line.request_id)
            computed[offer] = max(end_s, computed.get(offer, end_s))  # the latest of several ranks
    shares = {}
    for offer, line in loads:
        if offer in computed:
            moments, begin_s = _moments(line), line.ended_s - sum(line.seconds.values())
            early = [tokens for seconds, tokens in moments if begin_s + seconds <= computed[offer]]
            shares[line.request_id] = max(early, default=0) / moments[-1].tokens
    return shares


def _arrows(
    leases: dict[_OfferKey, list[_Begin]], loads: list[tuple[_OfferKey, _Begin, float]]
) -> Iterator[TraceEvent]:
    """Yield the trace events of an arrow to each load from its lease.

    If an engine has opened several leases for the request, the arrow comes from the latest that began before the end of
    the load, since a load of a pending ticket may begin before its lease.
    """
    for number, (offer, (process, begin_s), ended_s) in enumerate(loads, 1):
        before = [moment for moment in leases.get(offer, []) if moment[1] <= ended_s]
        if not before:
            continue
        producer, offered_s = max(before, key=lambda moment: moment[1])
        common: TraceEvent = {"cat": "ticket", "name": "ticket", "id": number}
        yield _event("s", offered_s, common, pid=producer, tid=producer)
        yield _event("f", max(begin_s, offered_s), common, bp="e", pid=process, tid=process)
