"""Device events (such as `torch.cuda.Event`) that have to happen before bytes may be read, or may land.

An event is polled until it has happened, with pauses that grow from 50 us to 5 ms. So nothing blocks, no event waits
for another, and an event that never happens costs almost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Protocol, TypeAlias

from kvflow.checks import error_text, short_repr, try_call
from kvflow.errors import RequestError

_PAUSE_LEAST_S, _PAUSE_MOST_S = 50e-6, 5e-3
_PAUSE_SHARE = 0.02


class DeviceEvent(Protocol):
    """An event of a device, such as a recorded `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the event has happened. The method must not block; any thread may call it.

        Returns:
            False before the event has happened, True afterwards.
        """

    def synchronize(self) -> None:
        """Block until the event has happened."""


OnEnd = Callable[[BaseException | None], None]


def checked_event(value: object, what: str) -> DeviceEvent | None:
    """Return `value` if it is None or has the methods of a DeviceEvent; else raise RequestError.

    `what`: name of the value in the message.
    """
    if value is None or try_call(lambda: callable(value.query) and callable(value.synchronize)):  # type: ignore[attr-defined]
        return value  # type: ignore[return-value]
    raise RequestError(f"{what}: expected an event with query() and synchronize(), got {short_repr(value)}")


GivenEvent: TypeAlias = Annotated[DeviceEvent | None, checked_event]
"""Type of a request's field for a device event or None. The checks of a request call `checked_event` on the value."""


def has_happened(event: DeviceEvent, what: str) -> bool:
    """Return True if `event` has happened. If `event.query` raises, raise RequestError.

    `what`: name of the event in the message.
    """
    try:
        return bool(event.query())
    except Exception as error:
        raise RequestError(f"{what}: its query() failed: {error_text(error)}") from error


class Watch:
    """One wait for a device event. Once the wait is over, the caller of `Watches.poll` has to call `on_end(error)`."""

    def __init__(self, event: DeviceEvent, on_end: OnEnd, since_s: float) -> None:
        self._event = event
        self._since_s = since_s
        self.on_end = on_end
        self.error: BaseException | None = None
        self.dropped = False
        """Set to True to give up the wait; then `on_end` is not called."""

    def poll(self) -> bool:
        """Poll the event.

        Return True if the wait is over: the event has happened or its `query` raised, or `dropped` is set.

        If `query` raised, the exception is in `error`.
        """
        if self.dropped:
            return True
        try:
            return bool(self._event.query())
        except BaseException as error:  # noqa: BLE001 - passed to the waiter
            self.error = error
            return True

    def pause_s(self, now_s: float) -> float:
        """Return the seconds from `now_s` until the event should be polled again."""
        return min(max((now_s - self._since_s) * _PAUSE_SHARE, _PAUSE_LEAST_S), _PAUSE_MOST_S)


class Watches:
    """All waits for device events. The owner calls `poll` repeatedly, with pauses of `pause_s` seconds."""

    def __init__(self) -> None:
        self._open: list[Watch] = []

    def add(self, watch: Watch) -> None:
        self._open.append(watch)

    def poll(self) -> list[Watch]:
        """Poll all events, and remove the waits that are over. Return the removed waits, except dropped ones."""
        over, still_open = list[Watch](), list[Watch]()
        for watch in self._open:
            (over if watch.poll() else still_open).append(watch)
        self._open = still_open
        return [watch for watch in over if not watch.dropped]

    def pause_s(self, now_s: float) -> float | None:
        """Return the seconds from `now_s` until `poll` should be called again; None if there are no waits."""
        return min((watch.pause_s(now_s) for watch in self._open), default=None)
