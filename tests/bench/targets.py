"""Promises of kvflow about speed, as rows that say whether a run kept it. Pure; nothing is raised for a miss.

A percentile here is a sample that was really measured (nearest rank); below 100 samples the p99 is their maximum. The
p50 of a `Spread` is the median.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    PASS = "pass"
    FAIL = "fail"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """One promise. `measured` is the worst of its values; `where` names that value."""

    target: str
    need: str
    measured: float | None
    where: str
    verdict: Verdict


Values = Sequence[tuple[float, str]]
"""Measurements, and where they were made."""


def at_least(target: str, bound: float, values: Values) -> TargetRow:
    return _row(target, f">= {bound:g}", min(values, default=None), lambda value: value >= bound)


def at_most(target: str, bound: float, values: Values) -> TargetRow:
    return _row(target, f"<= {bound:g}", max(values, default=None), lambda value: value <= bound)


def _row(target: str, need: str, worst: tuple[float, str] | None, holds: Callable[[float], bool]) -> TargetRow:
    if worst is None:
        return TargetRow(target=target, need=need, measured=None, where="", verdict=Verdict.NOT_MEASURED)
    value, where = worst
    verdict = Verdict.PASS if holds(value) else Verdict.FAIL
    return TargetRow(target=target, need=need, measured=value, where=where, verdict=verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Summary of samples of one kind, in their unit."""

    samples: int
    min: float
    p25: float
    p50: float
    p75: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        found = {f"p{percent}": percentile(samples, percent) for percent in (25, 75, 99)}
        return cls(samples=len(samples), min=min(samples), p50=statistics.median(samples), max=max(samples), **found)


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` % of the samples do not exceed."""
    if not samples:
        raise ValueError("percentile of no samples")
    if not 0 < percent <= 100:
        raise ValueError(f"percent: expected above 0 and at most 100, got {percent}")
    rank = math.ceil(len(samples) * percent / 100)
    return sorted(samples)[rank - 1]
