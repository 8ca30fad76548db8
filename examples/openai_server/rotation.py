"""The workers of one role: whose turn it is, who is down, and when to look whether somebody has come back.

Pure: time is an argument, and looking is the router's job. A worker is down until a probe has found it, and again
when a request or a probe has lost it. Those that are down are probed with growing pauses, those that are up steadily.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field

import kvflow


@dataclass(slots=True, eq=False)
class Worker:
    """One worker as the router knows it; it is to be probed when `probe_at_s` has come."""

    name: str
    url: str
    up: bool = False
    probe_at_s: float = 0.0
    failed_probes: int = 0
    introduction: kvflow.Ticket | None = None
    """Of a prefill worker, as of its last probe: where its blocks are to be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """How long to wait before a worker is probed again."""

    steady_s: float = 1.0
    first_s: float = 0.25
    longest_s: float = 4.0

    def after(self, failed_probes: int) -> float:
        """The pause after that many failures in a row."""
        return min(self.first_s * 2.0 ** min(failed_probes, 16), self.longest_s)


@dataclass(slots=True, eq=False)
class Rotation:
    """Round-robin over the workers that are up."""

    role: str
    workers: list[Worker]
    pauses: Pauses = field(default_factory=Pauses)
    _turn: int = 0

    @property
    def up(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.up]

    def pick(self, avoid: Collection[Hashable] = ()) -> Worker | None:
        """The next worker that is up, one that is not to be avoided if there is one; None if all are down."""
        in_turn = [*self.workers[self._turn :], *self.workers[: self._turn]]
        chosen = _first(worker for worker in in_turn if worker.up and worker not in avoid) or _first(
            worker for worker in in_turn if worker.up
        )
        if chosen is not None:
            self._turn = (self.workers.index(chosen) + 1) % len(self.workers)
        return chosen

    def lost(self, worker: Worker, now_s: float) -> None:
        """A request has lost the worker. Many requests may say so at once; only the first one counts."""
        if worker.up:
            worker.up, worker.failed_probes = False, 0
            worker.probe_at_s = now_s + self.pauses.after(0)

    def probed(self, worker: Worker, now_s: float, *, healthy: bool, introduction: kvflow.Ticket | None = None) -> None:
        """A probe of the worker has ended."""
        worker.up = healthy
        worker.introduction = introduction or worker.introduction
        worker.failed_probes = 0 if healthy else worker.failed_probes + 1
        pause_s = self.pauses.steady_s if healthy else self.pauses.after(worker.failed_probes)
        worker.probe_at_s = now_s + pause_s


def _first(workers: Iterable[Worker]) -> Worker | None:
    return next(iter(workers), None)
