"""The phases of a load, and the watch that says which one it is in."""

from __future__ import annotations

from kvflow.runtime.clock import Clock

PHASES = ("queued", "handshake", "plan", "post", "wire", "notify")


class Stopwatch:
    """Which phase a load is in, and how long each took. A phase can be entered again: `queued` is, for every turn."""

    def __init__(self, clock: Clock) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.phase = "queued"
        self._clock = clock
        self._since_s = clock.now_s()

    def enter(self, phase: str) -> None:
        now_s = self._clock.now_s()
        self.seconds[self.phase] += now_s - self._since_s
        self.phase, self._since_s = phase, now_s
