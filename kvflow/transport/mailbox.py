"""Events on their way from a transport, on any thread, to the one task that waits for them on the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from kvflow.errors import TransportBroken
from kvflow.transport.base import Event


class Mailbox:
    """Many threads put, one task takes; the loop is woken once for all that came meanwhile."""

    def __init__(self, run_on_loop: Callable[[Callable[[], None]], None]) -> None:
        self._run_on_loop = run_on_loop
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._wake_scheduled = False
        self._closed: BaseException | None = None

    def put(self, event: Event) -> None:
        """Add an event; from any thread."""
        self._events.append(event)
        if not self._wake_scheduled:
            self._wake_scheduled = True
            self._run_on_loop(self._wake)

    def close(self, cause: BaseException) -> None:
        """On the loop: no event will come any more. Those that came before are still taken."""
        self._closed = cause
        self._arrived.set()

    async def take(self) -> Sequence[Event]:
        """Wait for events, at least one; TransportBroken once closed and empty. Cancelling loses nothing."""
        while not self._events:
            if self._closed is not None:
                raise TransportBroken(f"the transport ended: {self._closed}") from self._closed
            self._arrived.clear()
            await self._arrived.wait()
        return [self._events.popleft() for _ in range(len(self._events))]

    def _wake(self) -> None:
        # Cleared before anything is taken: an event put after this schedules its own wake-up.
        self._wake_scheduled = False
        self._arrived.set()
