"""`kvflow simulate`: many seeds of the simulator, on several processes, and how to replay one that failed."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from rich.console import Console

from kvflow.testing.simulator import Result, describe, simulate

_SEEDS_PER_JOB = 25


@dataclass(slots=True)
class Summary:
    """What came of many seeds."""

    seeds: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[Result] = field(default_factory=list)

    @classmethod
    def of(cls, result: Result) -> Summary:
        failed = [result] if result.violation is not None else []
        return cls(1, result.steps, result.time_s, counts=result.counts, failed=failed)

    def add(self, other: Summary) -> None:
        for entry in fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))


def run_seeds(seeds: range) -> Summary:
    """Simulate some seeds in this process. Garbage is collected between them, where it costs least."""
    summary = Summary()
    begun_s = time.process_time()
    gc.disable()
    try:
        for seed in seeds:
            summary.add(Summary.of(simulate(seed)))
    finally:
        gc.enable()
        gc.collect()
    summary.cpu_s = time.process_time() - begun_s
    return summary


def run_all(start: int, count: int, jobs: int, *, failures_max: int, notes: Console) -> Summary:
    """Simulate `count` seeds from `start` on `jobs` processes; stops early after `failures_max` failed ones."""
    seeds = range(start, start + count)
    parts = [seeds[first : first + _SEEDS_PER_JOB] for first in range(0, count, _SEEDS_PER_JOB)]
    total = Summary()
    begun_s = said_s = time.monotonic()
    for summary in _run_parts(parts, jobs):
        total.add(summary)
        for result in summary.failed:
            notes.print(f"seed {result.settings.seed} broke a promise: {result.violation}", markup=False)
        now_s = time.monotonic()
        if now_s - said_s > 10:
            said_s = now_s
            notes.print(
                f"{total.seeds} of {count} seeds, {total.seeds / (now_s - begun_s):.0f} a second, "
                f"{len(total.failed)} failed"
            )
        if len(total.failed) >= failures_max:
            break
    return total


def _run_parts(parts: list[range], jobs: int) -> Iterator[Summary]:
    if jobs == 1 or len(parts) == 1:
        yield from map(run_seeds, parts)
        return
    # In a process that only simulates, what is loaded by now is never garbage.
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=gc.freeze) as pool:
        yield from pool.imap_unordered(run_seeds, parts)


def print_failure(result: Result, console: Console) -> None:
    console.rule()
    console.print(describe(result), markup=False, soft_wrap=True)


def print_summary(summary: Summary, seconds: float, console: Console) -> None:
    console.print(
        f"{summary.seeds} seeds in {seconds:.1f} s: {summary.seeds / seconds:.1f} seeds a second "
        f"({summary.seeds / summary.cpu_s:.1f} a second of CPU), "
        f"{summary.steps / summary.seeds:.0f} steps and {summary.virtual_s / summary.seeds:.2f} virtual seconds a seed"
    )
    for what, count in sorted(summary.counts.items()):
        console.print(f"{count:10}  {what}", markup=False)
    console.print(f"{len(summary.failed)} of {summary.seeds} seeds broke a promise")
