"""What an experiment is told, and how large it may be: on a CPU small, as a trial of the code."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TypeVar

from kvflow.bench.gpu.facts import Facts

T = TypeVar("T")
_RESERVE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where an experiment runs, how long it may, and where its facts go."""

    device: str
    limit_s: float
    facts: Facts
    started_s: float = field(default_factory=time.monotonic)

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    def size(self, on_cuda: T, on_cpu: T) -> T:
        """The one that is for this device."""
        return on_cuda if self.on_cuda else on_cpu

    def left_s(self) -> float:
        """What is left of the limit, less what it takes to end in order."""
        return self.limit_s - _RESERVE_S - (time.monotonic() - self.started_s)
