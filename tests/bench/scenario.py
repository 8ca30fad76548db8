"""The harness of scenarios: ranks are started and take turns, then a judge looks at the samples.

While a turn runs the parent sleeps in a read; it draws no progress bars.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from kvflow.bench.child import Child, Environment, RankProcess, open_children
from tests.bench.targets import TargetRow

Children = Mapping[str, Child]
Note = Callable[[str], None]
ContenderT = TypeVar("ContenderT")
SampleT = TypeVar("SampleT")


class SpinningRank(RankProcess):
    """A rank that spins. It is stopped by SIGSTOP whenever it is not its turn; nothing is in flight then."""


@contextlib.contextmanager
def paused(children: Iterable[Child]) -> Iterator[None]:
    """Stop the spinning children inside the block, so that they take no core from the others."""
    with send_signals(signal.SIGSTOP, signal.SIGCONT, children):
        yield


@contextlib.contextmanager
def resumed(children: Iterable[Child]) -> Iterator[None]:
    """Let the stopped children run inside the block."""
    with send_signals(signal.SIGCONT, signal.SIGSTOP, children):
        yield


@contextlib.contextmanager
def send_signals(before: signal.Signals, after: signal.Signals, children: Iterable[Child]) -> Iterator[None]:
    spinning = [child for child in children if isinstance(child.rank, SpinningRank)]
    for child in spinning:
        os.kill(child.pid, before)
    try:
        yield
    finally:
        for child in spinning:
            if child.exit_code is None:
                os.kill(child.pid, after)


@contextlib.contextmanager
def open_ranks(ranks: Sequence[RankProcess], environment: Environment) -> Iterator[Children]:
    """Start ranks as `open_children` does. Spinning ranks end last, and are woken all at once."""
    spinning = [rank for rank in ranks if isinstance(rank, SpinningRank)]
    others = [rank for rank in ranks if not isinstance(rank, SpinningRank)]
    with (
        open_children(spinning, environment) as first,
        paused(first.values()),
        open_children(others, environment) as second,
    ):
        yield {**first, **second}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The work of some children while the others rest. What `run` returns is a sample, kept under `key`.

    `note` is printed once for successive turns with the same note.
    """

    key: Hashable
    run: Callable[[], object]
    children: Sequence[Child] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSet:
    """Ranks that live at the same time, and the turns that they take, in order; without ranks, turns of the parent."""

    note: str
    turns: Callable[[Children], Iterable[Turn]]
    ranks: Sequence[RankProcess] = ()
    environment: Environment = field(default_factory=dict)


class Samples:
    """Samples that turns returned, in their order."""

    def __init__(self) -> None:
        self._all: list[tuple[Hashable, object]] = []

    def add(self, key: Hashable, sample: object) -> None:
        self._all.append((key, sample))

    def of(self, kind: type[SampleT]) -> dict[Any, list[SampleT]]:
        """The samples of one kind, by key."""
        found: dict[Any, list[SampleT]] = {}
        for key, sample in self._all:
            if isinstance(sample, kind):
                found.setdefault(key, []).append(sample)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of a judge: tables by name, which the legend explains. Fields without repr stay hidden."""

    results: Mapping[str, Sequence[Any]]
    legend: str
    targets: Sequence[TargetRow]


class Scenario(Protocol):
    """A measurement: a dataclass. Its fields are the options of its command, and its docstring is the help.

    A field is annotated with its type, its help and, if that is not 1 or 0.1, the least that it may be.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def sets(self) -> Sequence[RankSet]:
        """Sets of ranks, which live one after the other. SettingsError if the options make no sense."""
        ...

    def judge(self, samples: Samples) -> Outcome:
        """Judge the samples; pure. BenchError if they prove nothing. A missed target is no error."""
        ...


def run_scenario(scenario: Scenario, note: Note) -> Outcome:
    """Measure everything; raises BenchError when a child fails or a block does not hold the right bytes."""
    samples, said = Samples(), ""
    for some in scenario.sets():
        note(some.note)
        with open_ranks(some.ranks, some.environment) as children:
            for turn in some.turns(children):
                if turn.note not in ("", said):
                    note(f"  {turn.note}")
                said = turn.note
                with resumed(turn.children):
                    samples.add(turn.key, turn.run())
    return scenario.judge(samples)


def interleaved(contenders: Sequence[ContenderT], rounds: Iterable[int]) -> Iterator[tuple[int, ContenderT]]:
    """Every contender once a round, in an order that rotates, so that noise and the caches' state hit all alike."""
    for index in rounds:
        start = index % len(contenders)
        for contender in (*contenders[start:], *contenders[:start]):
            yield index, contender
