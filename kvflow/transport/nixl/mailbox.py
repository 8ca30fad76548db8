"""Events on their way from a transport, on any thread, to the one task that takes them on the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvflow.errors import TransportBroken
from kvflow.transport.base import Event


class Mailbox:
    """Queue of events: many threads put, one task takes.

    The loop is woken once for all that came meanwhile and delivers them then and there: waking the task first would
    cost every read a turn of the loop.
    """

    def __init__(self, run_on_loop: Callable[[Callable[[], None]], None]) -> None:
        self._run_on_loop = run_on_loop
        self._events: deque[Event] = deque()
        self._wake_scheduled = False
        self._deliver: Callable[[Event], None] | None = None
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, event: Event) -> None:
        """Add an event; from any thread."""
        self._events.append(event)
        if not self._wake_scheduled:
            self._wake_scheduled = True
            self._run_on_loop(self._wake)

    def close(self, cause: BaseException) -> None:
        """Close on the loop: no event will come any more. Those that came before are delivered first."""
        self._wake()
        self._fail(cause)

    async def deliver_to(self, deliver: Callable[[Event], None]) -> None:
        """Call `deliver` for each event, on the loop, until cancelled or closed; closing raises TransportBroken.

        Events that nobody takes wait for the next call. If `deliver` raises, that ends it as closing does.
        """
        self._deliver = deliver
        try:
            self._wake()
            await asyncio.shield(self._end)
        finally:
            self._deliver = None

    def _wake(self) -> None:
        # Cleared before anything is taken: an event put after this schedules its own wake-up.
        self._wake_scheduled = False
        while self._events and self._deliver is not None:
            try:
                self._deliver(self._events.popleft())
            except BaseException as error:  # noqa: BLE001 - whoever takes events is broken; its task gets to know
                self._fail(error)
                return

    def _fail(self, cause: BaseException) -> None:
        if not self._end.done():
            error = TransportBroken(f"the transport ended: {cause}")
            error.__cause__ = cause
            self._end.set_exception(error)
            self._end.exception()  # seen: there may be nobody who takes events
