"""Runs experiments one after the other, each in processes of its own and within a limit; writes down what they find.

An experiment's process leads a session, so that when its time is over it can be killed with all that it has started;
processes of the bench die with their parent besides. Whatever happens to it, there is one line of JSON for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvflow.bench.gpu.facts import read_facts
from kvflow.bench.gpu.judging import Expected, Fact, Judged, Verdict, judge, table_lines

RESULTS, LOG, TABLE = "results.jsonl", "log.txt", "table.txt"
"""What is left in the output folder."""
_LEAST_S = 10.0
_EXIT_S = 10.0
_REASON_CHARS_MAX = 300


class Ending(enum.StrEnum):
    """How an experiment ended."""

    DONE = "done"
    FAILED = "failed"
    LIMIT = "over its limit"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One question to a machine. `run` names its function, `module:function`, which is given a `Setting`."""

    name: str
    title: str
    settles: str
    run: str
    limit_s: float
    expected: Sequence[Expected] = ()
    only_cuda: bool = False
    """Whether it means nothing on a CPU, not even as a trial of its code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is kept of an experiment: one line of JSON."""

    experiment: str
    title: str
    settles: str
    device: str
    ending: Ending
    why: str
    seconds: float
    found: dict[str, Fact]
    judged: list[Judged]

    @property
    def wrong(self) -> bool:
        """Whether somebody has to look at it."""
        return self.ending in (Ending.FAILED, Ending.LIMIT) or any(
            row.verdict in (Verdict.OTHERWISE, Verdict.MISSING) for row in self.judged
        )


def run_all(
    experiments: Iterable[Experiment], device: str, out: Path, total_s: float, note: Callable[[str], None]
) -> list[Record]:
    """Run them in their order until `total_s` is over; a line for each is written as soon as it has ended."""
    out.mkdir(parents=True, exist_ok=True)
    records, until_s = list[Record](), time.monotonic() + total_s
    with (out / RESULTS).open("w", encoding="utf-8") as lines, (out / LOG).open("wb") as log:
        for experiment in experiments:
            record = run_one(experiment, device, until_s - time.monotonic(), log)
            records.append(record)
            lines.write(json.dumps(dataclasses.asdict(record)) + "\n")
            lines.flush()
            note(f"{record.experiment} {record.title}: {record.ending}, {record.seconds:.1f} s {record.why}".rstrip())
    text = "\n".join(summary(records)) + "\n"
    (out / TABLE).write_text(text, encoding="utf-8")
    return records


def run_one(experiment: Experiment, device: str, left_s: float, log: IO[bytes]) -> Record:
    """Run one in its process, for its limit or for what is left of the whole time."""
    why = "needs a CUDA device" if experiment.only_cuda and device != "cuda" else ""
    if not why and left_s < _LEAST_S:
        why = f"{max(left_s, 0):.0f} s left of the whole time"
    if why:
        return _record(experiment, device, Ending.SKIPPED, why, 0.0, {})
    limit_s, start_s = min(experiment.limit_s, left_s), time.monotonic()
    log.write(f"--- {experiment.name} {experiment.title}\n".encode())
    log.flush()
    with tempfile.TemporaryDirectory(prefix="kvflow-gpu-") as folder:
        facts = Path(folder) / "facts.jsonl"
        ending, why = _run_process([experiment.run, device, str(limit_s), str(facts)], limit_s, folder, log)
        found = read_facts(facts)
    return _record(experiment, device, ending, why, time.monotonic() - start_s, found)


def _run_process(arguments: Sequence[str], limit_s: float, folder: str, log: IO[bytes]) -> tuple[Ending, str]:
    command = [sys.executable, "-m", "kvflow.bench.gpu.one", *arguments]
    with (Path(folder) / "stderr").open("w+b") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True
        )
        try:
            in_time = _wait(process.pid, limit_s)
        finally:
            code = _end_session(process)
        errors.seek(0)
        said = errors.read()
    log.write(said)
    log.flush()
    if not in_time:
        return Ending.LIMIT, f"killed after {limit_s:.0f} s"
    return (Ending.FAILED, f"exit code {code}: {_last_line(said)}"[:_REASON_CHARS_MAX]) if code else (Ending.DONE, "")


def _wait(pid: int, limit_s: float) -> bool:
    """Whether a child has ended in time. It is not collected, so that its number is nobody else's yet."""
    ended = os.pidfd_open(pid)
    try:
        return bool(select.select([ended], [], [], limit_s)[0])
    finally:
        os.close(ended)


def _end_session(process: subprocess.Popen[bytes]) -> int:
    """Kill what is left of the process and of the session that it leads; its exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:  # it hangs in the driver, where no signal reaches it
        return -signal.SIGKILL


def _last_line(said: bytes) -> str:
    lines = said.decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing was said")


def _record(
    experiment: Experiment, device: str, ending: Ending, why: str, seconds: float, found: dict[str, Fact]
) -> Record:
    judged = [] if ending is Ending.SKIPPED else judge(experiment.expected, found, device)
    return Record(
        experiment=experiment.name,
        title=experiment.title,
        settles=experiment.settles,
        device=device,
        ending=ending,
        why=why,
        seconds=seconds,
        found=found,
        judged=judged,
    )


def summary(records: Sequence[Record]) -> list[str]:
    """Two tables: every fact that was found, and how each experiment ended."""
    facts, endings = list[Sequence[object]](), list[Sequence[object]]()
    for record in records:
        judged = {row.fact: row for row in record.judged}
        names = dict.fromkeys([*record.found, *judged])
        for name in names:
            row = judged.get(name)
            beside = (row.expected, row.verdict) if row else ("", "")
            facts.append((record.experiment, name, record.found.get(name), *beside))
        endings.append((record.experiment, record.title, record.ending, record.seconds, record.why))
    return [
        *table_lines(("", "fact", "found", "expected", "verdict"), facts),
        "",
        *table_lines(("", "experiment", "ended", "s", "why"), endings),
    ]
