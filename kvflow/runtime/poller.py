"""The transfer poller: the one task that takes events from the transport and gives them to whoever waits.

It knows who waits for every posted read. When it ends, for whatever reason, it tells all of them, so nobody waits on a
transport that nobody listens to any more (invariant I7).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvflow.core.plan.descriptors import Descriptors
from kvflow.errors import RuntimeBroken, TransportBroken
from kvflow.transport.base import AgentName, Notified, PostedRead, ReadEnded, Transport


class Waiter(Protocol):
    """Who posted a read. Gets exactly one of these calls for it, from the poller task."""

    def read_ended(self, event: ReadEnded) -> None: ...

    def read_lost(self, read: PostedRead, error: RuntimeBroken) -> None:
        """The poller ended first: nobody will ever know when the bytes have stopped."""


class Poller:
    """Posts reads and dispatches events. `run` is the poller task's body."""

    def __init__(self, transport: Transport, on_notification: Callable[[bytes], None]) -> None:
        self._transport = transport
        self._on_notification = on_notification
        self._waiters: dict[PostedRead, Waiter] = {}
        self._cause: BaseException | None = None
        self._ended = False

    def read(self, waiter: Waiter, peer: AgentName, descriptors: Descriptors) -> PostedRead:
        """Post a read (see `Transport.post_read`) and tell `waiter` its end."""
        if self._ended:
            raise RuntimeBroken("the transfer poller has ended") from self._cause
        read = self._transport.post_read(peer, descriptors)
        self._waiters[read] = waiter
        return read

    async def run(self) -> None:
        """Dispatch events until cancelled or until the transport breaks, which raises TransportBroken."""
        try:
            await self._transport.run(self._dispatch)
        except BaseException as error:
            self._cause = error
            raise
        finally:
            self._ended = True
            self._tell_all()

    def _dispatch(self, event: ReadEnded | Notified) -> None:
        match event:
            case Notified(payload=payload):
                self._on_notification(payload)
            case ReadEnded(read=read):
                self._waiters.pop(read).read_ended(event)

    def _tell_all(self) -> None:
        waiters, self._waiters = self._waiters, {}
        for read, waiter in waiters.items():
            error = TransportBroken("the transfer poller ended while the read was under way")
            error.__cause__ = self._cause
            waiter.read_lost(read, error)
