"""Progress of a prompt that is computed while it is read: the times at which tokens were computed or landed.

The records of a growing lease, and of a load that reads from a growing lease, contain this history.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

MOMENTS_MAX = 64


class Moment(NamedTuple):
    """A moment `seconds` after a lease or load began, when `tokens` tokens in all were computed or had landed."""

    seconds: float
    tokens: int


class History:
    """The progress of a lease or load: `Moment`s in order, each with more tokens than the moment before.

    If there are more than MOMENTS_MAX, every other moment is dropped, except the first and the last.
    """

    def __init__(self, now_s: Callable[[], float], begun_s: float) -> None:
        self._now_s = now_s
        self._begun_s = begun_s
        self._moments: list[Moment] = []

    @property
    def moments(self) -> tuple[Moment, ...]:
        return tuple(self._moments)

    def note(self, tokens: int) -> None:
        """Record that `tokens` tokens in all are computed, or have landed, now.

        No effect unless the number has grown.
        """
        if tokens <= (self._moments[-1].tokens if self._moments else 0):
            return
        self._moments.append(Moment(self._now_s() - self._begun_s, tokens))
        if len(self._moments) > MOMENTS_MAX:
            del self._moments[1:-1:2]
