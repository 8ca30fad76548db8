"""`python3 dev.py simulate`: runs many seeds on several processes, and says how to replay a failed seed."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console

from kvflow.checks import counted
from tests.simulator import Result, describe, simulate

_SEEDS_PER_JOB = 25
_REPORT_EVERY_S = 10.0


@dataclass(slots=True)
class Summary:
    """Results of many seeds, added up."""

    seeds: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.steps += result.steps
        self.virtual_s += result.time_s
        self.counts += result.counts
        if result.violation is not None:
            self.failed.append(result)


def run_all(start: int, count: int, jobs: int, *, failures_max: int, notes: Console) -> Summary:
    """Simulate `count` seeds from `start` on `jobs` processes. Stop early after `failures_max` failed seeds."""
    seeds = range(start, start + count)
    parts = [seeds[first : first + _SEEDS_PER_JOB] for first in range(0, count, _SEEDS_PER_JOB)]
    total = Summary()
    begun_s = said_s = time.monotonic()
    for results in _run_parts(parts, jobs):
        for result in results:
            total.add(result)
            if result.violation is not None:
                notes.print(f"seed {result.settings.seed} broke a promise: {result.violation}", markup=False)
        now_s = time.monotonic()
        if now_s - said_s > _REPORT_EVERY_S:
            said_s = now_s
            speed = total.seeds / (now_s - begun_s)
            notes.print(f"{total.seeds} of {counted(count, 'seed')}, {_rate(speed)}, {len(total.failed)} failed")
        if len(total.failed) >= failures_max:
            break
    return total


def _rate(per_s: float) -> str:
    """Return a speed as text: a number a second, or for slow speeds the seconds for one."""
    return f"{per_s:.3g} a second" if per_s >= 1 or not per_s else f"one in {1 / per_s:.3g} s"


def _run_parts(parts: list[range], jobs: int) -> Iterator[list[Result]]:
    if jobs == 1 or len(parts) == 1:
        yield from map(_run_seeds, parts)
        return
    # These processes only simulate: objects that exist when they start never become garbage.
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=gc.freeze) as pool:
        yield from pool.imap_unordered(_run_seeds, parts)


def _run_seeds(seeds: range) -> list[Result]:
    """Simulate `seeds` in this process. Collect garbage only afterwards, when it costs least."""
    gc.disable()
    try:
        return [simulate(seed) for seed in seeds]
    finally:
        gc.enable()
        gc.collect()


def print_summary(summary: Summary, seconds: float, console: Console) -> None:
    """Print all failed seeds, then how often each event happened."""
    for result in summary.failed:
        console.rule()
        console.print(describe(result), markup=False, soft_wrap=True)
    console.print(
        f"{counted(summary.seeds, 'seed')} in {seconds:.1f} s: {_rate(summary.seeds / seconds)}, "
        f"{summary.steps / summary.seeds:.0f} steps and {summary.virtual_s / summary.seeds:.2f} virtual seconds a seed"
    )
    for what, count in sorted(summary.counts.items()):
        console.print(f"{count:10}  {what}", markup=False)
    console.print(f"{len(summary.failed)} of {counted(summary.seeds, 'seed')} broke a promise")
