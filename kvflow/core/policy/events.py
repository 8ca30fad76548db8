"""Events of a device that have to happen before bytes may be read, or may land.

An event is queried again and again until it has happened: at first after a moment, then after a fiftieth of the time
that it has taken so far. Nothing blocks, no event waits for another, and one that never happens costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Protocol, TypeAlias

from kvflow.checks import answer, said, shown
from kvflow.errors import RequestError

_PAUSE_LEAST_S, _PAUSE_MOST_S = 50e-6, 5e-3
_PAUSE_SHARE = 0.02


class DeviceEvent(Protocol):
    """Event of a device, which happens at some time, such as a `torch.cuda.Event` that has been recorded."""

    def query(self) -> bool:
        """Ask whether it has happened; never waits, and may be called on any thread.

        Returns:
            True from the moment it has happened.
        """

    def synchronize(self) -> None:
        """Wait until it has happened."""


OnEnd = Callable[[BaseException | None], None]


def checked_event(value: object, what: str) -> DeviceEvent | None:
    """An event, or None. RequestError for anything else."""
    if value is None or answer(lambda: callable(value.query) and callable(value.synchronize)):  # type: ignore[attr-defined]
        return value  # type: ignore[return-value]
    raise RequestError(f"{what}: expected an event with query() and synchronize(), got {shown(value)}")


GivenEvent: TypeAlias = Annotated[DeviceEvent | None, checked_event]
"""Event that a caller gives, or None."""


def has_happened(event: DeviceEvent, what: str) -> bool:
    """True if the event has happened by now. RequestError if it does not say."""
    try:
        return bool(event.query())
    except Exception as error:
        raise RequestError(f"{what}: its query() failed: {said(error)}") from error


class Watch:
    """Wait of somebody for an event."""

    def __init__(self, event: DeviceEvent, on_end: OnEnd, since_s: float) -> None:
        self._event = event
        self._since_s = since_s
        self.on_end = on_end
        self.error: BaseException | None = None
        self.dropped = False
        """Set by whoever gives up the wait."""

    def over(self) -> bool:
        """True if it has happened, or nobody will ever know (`error`), or nobody waits any more."""
        if self.dropped:
            return True
        try:
            return bool(self._event.query())
        except BaseException as error:  # noqa: BLE001 - handed to who waits
            self.error = error
            return True

    def pause_s(self, now_s: float) -> float:
        """Seconds for which it may be left alone."""
        return min(max((now_s - self._since_s) * _PAUSE_SHARE, _PAUSE_LEAST_S), _PAUSE_MOST_S)


class Watches:
    """All waits for events. Call `look` from time to time, as `pause_s` says."""

    def __init__(self) -> None:
        self._open: list[Watch] = []

    def add(self, watch: Watch) -> None:
        self._open.append(watch)

    def look(self) -> list[Watch]:
        """Take the events whose wait is over; they are forgotten here."""
        over = [watch for watch in self._open if watch.over()]
        if over:
            self._open = [watch for watch in self._open if watch not in over]
        return [watch for watch in over if not watch.dropped]

    def pause_s(self, now_s: float) -> float | None:
        """None if nobody waits."""
        return min((watch.pause_s(now_s) for watch in self._open), default=None)
