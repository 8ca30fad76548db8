"""From the hand-overs of the flow bench to rows and verdicts. Pure.

Ratios and shares are within a round, where all hand-overs of a prompt are made one after the other.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from kvflow.bench.child import BenchError
from tests.bench.flow.link import Link
from tests.bench.scenario import Outcome, Samples
from tests.bench.targets import Spread, TargetRow, at_least, at_most

WIRE_TIMES_MAX, WIRE_EXTRA_S = 1.3, 2e-3
SAVED_MIN = 0.3
SAVED_OF_POSSIBLE_MIN = 0.85
SLOWER_MAX = 1.03
LAG_MAX_MS, READER_CPU_MAX, PRODUCER_CPU_MAX = 2.0, 15.0, 10.0
UNTIMED = "untimed"
"""The key of what is no result: what was measured has a case and a way, or a link and a growth."""
LEGEND = (
    "Total: from the start of prefill to the load's end. After: from the end of prefill on, when decode can start. A "
    "whole prompt's ticket goes through the scenario's parent then, as it would through a router. The "
    "last chunk is also loaded alone, as a prompt of its own. Saved: how much lower the total of a lease that grows is "
    "than the whole prompt's; possible: if nothing but the last chunk's load came after prefill. No pace: all chunks "
    "are computed at once; of a lease that grows before its load begins ('computed') or while it waits ('at once'). "
    "Many: leases that grow by one small block each, so that bytes are not the cost; CPU is of one core, the "
    "scenario's own timers included, as 'none' shows. The loop's lag is measured in the other half of the time."
)


class Way(enum.StrEnum):
    """How a prompt is handed over."""

    WHOLE = "whole"
    FLOWING = "growing"
    LAST_CHUNK = "last chunk"
    WHOLE_AT_ONCE = "whole, no pace"
    FLOWING_AT_ONCE = "growing, at once"
    COMPUTED = "growing, computed"


class HandOver(NamedTuple):
    """One prompt: when prefill began and ended, when its load did; all on one clock."""

    begun_s: float
    computed_s: float
    load_begun_s: float
    loaded_s: float

    @property
    def total_s(self) -> float:
        return self.loaded_s - self.begun_s

    @property
    def after_s(self) -> float:
        return self.loaded_s - self.computed_s

    @property
    def load_s(self) -> float:
        return self.loaded_s - self.load_begun_s


class Case(NamedTuple):
    """A prompt over a link."""

    link: Link
    tokens: int

    def __str__(self) -> str:
        return f"{self.link} {self.tokens}"


class Round(NamedTuple):
    """A prompt's hand-overs of one round."""

    whole: HandOver
    flowing: HandOver
    last_chunk: HandOver
    whole_at_once: HandOver
    flowing_at_once: HandOver
    computed: HandOver

    @property
    def saved(self) -> float:
        return 1 - self.flowing.total_s / self.whole.total_s

    @property
    def possible(self) -> float:
        return (self.whole.after_s - self.last_chunk.load_s) / self.whole.total_s

    @property
    def wait(self) -> float:
        """What comes after prefill, as a share of what it may take."""
        return self.flowing.after_s / (WIRE_TIMES_MAX * self.last_chunk.load_s + WIRE_EXTRA_S)

    @property
    def at_once_ratio(self) -> float:
        return self.flowing_at_once.total_s / self.whole_at_once.total_s

    @property
    def computed_ratio(self) -> float:
        return self.computed.load_s / self.whole_at_once.load_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """One way of handing a prompt over, over all rounds."""

    link: Link
    tokens: int
    way: Way
    total_s: Spread
    after_s: Spread
    load_s: Spread = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A lease that grows beside a whole prompt: medians of the rounds."""

    link: Link
    tokens: int
    prefill_s: float
    wire_to_prefill: float
    gbit_per_s: float
    after_to_allowed: float
    saved: float
    possible: float
    saved_of_possible: float
    at_once_ratio: float
    computed_ratio: float


class Growth(enum.StrEnum):
    """How many leases grow at once."""

    NONE = "none"
    SPREAD = "one by one"
    IN_STEP = "in one step"


class Many(NamedTuple):
    """A turn of many loads: how late the reader's loop was, shares of a core, and each load's end after its lease's."""

    lags_s: Sequence[float]
    reader_cpu: float
    producer_cpu: float
    behind_s: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyResult:
    """Many loads of one kind, over all rounds; CPU in percent of a core."""

    link: Link
    growth: Growth
    loads: int
    lag_s: Spread
    behind_s: Spread | None
    reader_cpu_percent: float
    producer_cpu_percent: float

    @property
    def label(self) -> str:
        return f"{self.link}, {self.growth}"


def judge(samples: Samples, size_of: Callable[[int], int]) -> Outcome:
    """`size_of` has the bytes of so many tokens."""
    cases = {key: found for key, found in samples.of(HandOver).items() if key != UNTIMED}
    rounds = {case: _rounds(case, cases) for case in dict.fromkeys(case for case, _ in cases)}
    times = [_times(case, way, cases[case, way]) for case in rounds for way in Way]
    compared = [_compared(case, some, size_of(case.tokens)) for case, some in rounds.items()]
    many = [_many(*key, found=some) for key, some in samples.of(Many).items() if key != UNTIMED]
    results: dict[str, Sequence[Any]] = {"hand-overs": times, "compared": compared, "many": many}
    targets = [*prompt_targets(compared), *many_targets(many)]
    return Outcome(results={name: rows for name, rows in results.items() if rows}, legend=LEGEND, targets=targets)


def _rounds(case: Case, found: dict[tuple[Case, Way], list[HandOver]]) -> list[Round]:
    counts = {way: len(found.get((case, way), ())) for way in Way}
    if len(set(counts.values())) != 1:
        raise BenchError(f"{case}: rounds are not complete: {counts}")
    return [Round(*some) for some in zip(*(found[case, way] for way in Way), strict=True)]


def _times(case: Case, way: Way, found: Sequence[HandOver]) -> Times:
    return Times(
        link=case.link,
        tokens=case.tokens,
        way=way,
        total_s=Spread.of([one.total_s for one in found]),
        after_s=Spread.of([one.after_s for one in found]),
        load_s=Spread.of([one.load_s for one in found]),
    )


def _compared(case: Case, rounds: Sequence[Round], size_bytes: int) -> Compared:
    def median(value: Callable[[Round], float]) -> float:
        return statistics.median(map(value, rounds))

    prefill_s = median(lambda one: one.flowing.computed_s - one.flowing.begun_s)
    wire_s = median(lambda one: one.whole_at_once.load_s)
    saved, possible = median(lambda one: one.saved), median(lambda one: one.possible)
    return Compared(
        link=case.link,
        tokens=case.tokens,
        prefill_s=prefill_s,
        wire_to_prefill=wire_s / prefill_s,
        gbit_per_s=size_bytes * 8 / wire_s / 1e9,
        after_to_allowed=median(lambda one: one.wait),
        saved=saved,
        possible=possible,
        saved_of_possible=saved / possible,
        at_once_ratio=median(lambda one: one.at_once_ratio),
        computed_ratio=median(lambda one: one.computed_ratio),
    )


def _many(link: Link, growth: Growth, *, found: Sequence[Many]) -> ManyResult:
    behind_s = list(chain.from_iterable(one.behind_s for one in found))
    return ManyResult(
        link=link,
        growth=growth,
        loads=len(found[0].behind_s),
        lag_s=Spread.of(list(chain.from_iterable(one.lags_s for one in found))),
        behind_s=Spread.of(behind_s) if behind_s else None,
        reader_cpu_percent=100 * statistics.median(one.reader_cpu for one in found),
        producer_cpu_percent=100 * statistics.median(one.producer_cpu for one in found),
    )


def prompt_targets(compared: Sequence[Compared]) -> Iterator[TargetRow]:
    """What is promised of a link of 1 Gbit/s, and of shared memory."""
    shaped = [row for row in compared if row.link is Link.GBIT]
    shm = [row for row in compared if row.link is Link.SHM]
    yield at_most(
        f"{Link.GBIT}: start after prefill / ({WIRE_TIMES_MAX:g} x last chunk's wire + {WIRE_EXTRA_S * 1e3:g} ms)",
        1.0,
        [(row.after_to_allowed, f"{row.tokens} tokens") for row in shaped],
    )
    yield at_least(
        f"{Link.GBIT}: time to first token saved, of what is possible",
        SAVED_OF_POSSIBLE_MIN,
        [(row.saved_of_possible, f"{row.tokens} tokens") for row in shaped],
    )
    yield at_least(
        f"{Link.GBIT}: time to first token lower by, where that is possible",
        SAVED_MIN,
        [(row.saved, f"{row.tokens} tokens") for row in shaped if row.possible >= SAVED_MIN],
    )
    ratios = [(row.at_once_ratio, f"{row.tokens} tokens, at once") for row in shm]
    ratios += [(row.computed_ratio, f"{row.tokens} tokens, computed") for row in shm]
    yield at_most(f"{Link.SHM}: no pace, time to the whole prompt's", SLOWER_MAX, ratios)


def many_targets(many: Sequence[ManyResult]) -> Iterator[TargetRow]:
    growing = [row for row in many if row.growth is not Growth.NONE]
    yield at_most("many: loop lag p99, ms", LAG_MAX_MS, [(row.lag_s.p99 * 1e3, row.label) for row in growing])
    yield at_most("many: reader's CPU, %", READER_CPU_MAX, [(row.reader_cpu_percent, row.label) for row in growing])
    yield at_most(
        "many: producer's CPU, %", PRODUCER_CPU_MAX, [(row.producer_cpu_percent, row.label) for row in growing]
    )
