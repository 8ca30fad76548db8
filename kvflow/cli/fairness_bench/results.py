"""From samples to what is promised: how much longer a small load takes behind huge ones. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kvflow.cli.bench.messages import RoundResult
from kvflow.cli.bench.samples import percentile
from kvflow.cli.bench.targets import TargetRow, at_most
from kvflow.config import Config

DELAY_SLICES_MAX = float(Config(engine_id="limits").slices_in_flight_max)
"""What one other load has in flight at most; where small reads can go first (shared memory) it is one slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One kind of load over all rounds."""

    label: str
    samples: int
    p50_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessResult:
    """`delay_p50` and `delay_p99`: how much longer small loads took behind huge ones, in times of one slice.

    The percentile of those behind, less the same one of those alone: medians over the rounds of the ratio within each,
    so that a slow moment of the machine counts on both sides.
    """

    kinds: tuple[Spread, ...]
    delay_p50: float
    delay_p99: float


def summarize(rounds: Sequence[RoundResult]) -> FairnessResult:
    return FairnessResult(
        kinds=(
            _spread("one block, alone", [one.alone_s for one in rounds]),
            _spread("one block, behind", [one.behind_s for one in rounds]),
            _spread("one slice, alone", [one.slice_s for one in rounds]),
            _spread("huge", [one.huge_s for one in rounds]),
        ),
        delay_p50=statistics.median(_delay(one, 50) for one in rounds),
        delay_p99=statistics.median(_delay(one, 99) for one in rounds),
    )


def judge(result: FairnessResult) -> tuple[TargetRow, ...]:
    return (at_most("one block behind huge, p99, slices", DELAY_SLICES_MAX, [(result.delay_p99, "")]),)


def _spread(label: str, rounds: Sequence[Sequence[float]]) -> Spread:
    seconds = [second for one in rounds for second in one]
    return Spread(
        label=label,
        samples=len(seconds),
        p50_s=percentile(seconds, 50),
        p99_s=percentile(seconds, 99),
        max_s=max(seconds),
    )


def _delay(one: RoundResult, percent: float) -> float:
    more_s = percentile(one.behind_s, percent) - percentile(one.alone_s, percent)
    return more_s / statistics.median(one.slice_s)
