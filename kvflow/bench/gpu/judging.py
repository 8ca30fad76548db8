"""What an experiment found, held against what was expected before anybody had run it. Pure.

A value is expected because of what was read in the sources of UCX, NIXL and CUDA, so one that is not as expected means
that something is slower, or wrong, or that it was read wrongly: the row says so, and a person decides. Only a fact that
must hold anywhere (`always`), such as a count of loads with wrong bytes, is judged on a CPU too.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Fact: TypeAlias = str | int | float | bool | None
"""What is found under a name: a JSON value that fits into one cell."""


class Verdict(enum.StrEnum):
    """What a fact says beside its expectation."""

    AS_EXPECTED = "as expected"
    OTHERWISE = "not as expected"
    MISSING = "not found"
    """The experiment did not get so far."""
    NOT_JUDGED = "not judged"
    """On this device the expectation means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What one fact should be: a number within bounds, a text with a word in it, or exactly a value."""

    fact: str
    least: float | None = None
    most: float | None = None
    has: str | None = None
    equals: Fact = None
    always: bool = False
    """Whether it must hold on every device."""

    @property
    def text(self) -> str:
        """The expectation as a table shows it."""
        if self.has is not None:
            return f"has {self.has!r}"
        bounds = [(self.least, ">="), (self.most, "<=")]
        words = [f"{sign} {bound:g}" for bound, sign in bounds if bound is not None]
        return " and ".join(words) or f"= {self.equals}"

    def holds(self, found: Fact) -> bool:
        """Whether a fact is as expected."""
        if self.has is not None:
            return isinstance(found, str) and self.has in found
        if self.least is None and self.most is None:
            return found == self.equals
        if not isinstance(found, int | float):
            return False
        return (self.least is None or found >= self.least) and (self.most is None or found <= self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One expectation and what became of it."""

    fact: str
    expected: str
    found: Fact
    verdict: Verdict


def judge(expected: Iterable[Expected], found: Mapping[str, Fact], device: str) -> list[Judged]:
    """A row for each expectation, in their order."""
    return [
        Judged(
            fact=one.fact, expected=one.text, found=found.get(one.fact), verdict=_verdict(one, found, device == "cuda")
        )
        for one in expected
    ]


def _verdict(expected: Expected, found: Mapping[str, Fact], on_cuda: bool) -> Verdict:
    if not (on_cuda or expected.always):
        return Verdict.NOT_JUDGED
    if expected.fact not in found:
        return Verdict.MISSING
    return Verdict.AS_EXPECTED if expected.holds(found[expected.fact]) else Verdict.OTHERWISE


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Lines of a plain table, columns as wide as their longest cell."""
    cells = [tuple(headings), *(tuple(_cell(value) for value in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else " ".join(str(value).split())
