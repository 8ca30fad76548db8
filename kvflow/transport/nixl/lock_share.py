"""A share of Python's lock for a thread beside an event loop that is never idle.

A loop that goes from turn to turn without a pause lets go of the lock between two turns for a few microseconds. A
thread that waits for it is woken each time, finds it taken again, and starts to wait anew: it never gets to the point,
after `sys.getswitchinterval()`, where Python makes the loop hand the lock over. Beside turns of a tenth of a
millisecond one load took seconds (docs/decisions/0030-lock-share.md). So the loop looks now and then whether its thread
gets on, and if it does not, sleeps for a moment, in which the thread has the lock.
"""

from __future__ import annotations

import asyncio
import time

_LOOK_S = 4e-3
"""How often is looked while the thread has something to do; it takes less, as a rule."""
_LOOK_MAX_S = 0.25
"""Looks get rarer up to this while the thread has nothing to do: an idle process wakes up for them."""
_STARVED_S = 1e-3
"""How often is looked while it does not."""
_SLEEP_S = 1e-4
_IN_VAIN_MAX = 64
"""After so many sleeps that nothing came of it is not the lock that the thread waits for."""


class Pace:
    """What a thread shows of itself: written by the thread, read by the loop. And whether the loop has called it."""

    def __init__(self) -> None:
        self.turns = 0
        """How often it has got on."""
        self.asleep = False
        """Whether it has nothing to do until it is called up, or due."""
        self.due_s = 0.0
        """When it is to get on next, by `time.monotonic`: until then it sleeps, or is in a call that takes so long and
        does not need the lock."""
        self.called = False
        """Whether there is something for it to do of which it has not heard yet."""


class LockShare:
    """The loop's side: looks at one thread until `close`."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._turns = 0
        self._called_at = -1
        """How often the thread had got on when it was called up last."""
        self._in_vain = 0
        self._interval_s = _LOOK_S
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(_LOOK_S, self._look)

    def called_up(self) -> None:
        """The thread has something new to do, and is being woken for it."""
        self._called_at = self._pace.turns
        if self._interval_s > _LOOK_S and self._timer is not None:
            self._timer.cancel()
            self._arm(_LOOK_S)

    def close(self) -> None:
        """The thread is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        pace, now_s = self._pace, time.monotonic()
        got_on, self._turns = pace.turns != self._turns, pace.turns
        called = pace.asleep and pace.turns == self._called_at
        if called or (not got_on and now_s > pace.due_s + _STARVED_S):
            time.sleep(_SLEEP_S)
            self._in_vain = 0 if got_on else self._in_vain + 1
            hangs = self._in_vain > _IN_VAIN_MAX
            self._arm(min(2 * self._interval_s, _LOOK_MAX_S) if hangs else _STARVED_S)
        elif pace.asleep and pace.due_s > now_s + _LOOK_S:
            self._in_vain = 0
            self._arm(min(max(2 * self._interval_s, _LOOK_S), _LOOK_MAX_S))
        else:
            self._in_vain = 0
            self._arm(_LOOK_S)

    def _arm(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._timer = self._loop.call_later(interval_s, self._look)
