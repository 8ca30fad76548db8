"""The transfer poller: the one task that takes events from the transport and gives them to whoever waits.

It owns the future of every posted read. When it ends, for whatever reason, it settles all of them, so nobody waits on
a transport that nobody listens to any more (invariant I7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvflow.core.plan import Descriptors
from kvflow.errors import RuntimeBroken, TransportBroken
from kvflow.transport.base import AgentName, Notified, PostedRead, ReadEnded, Transport


class Poller:
    """Posts reads and dispatches events. `run` is the poller task's body."""

    def __init__(self, transport: Transport, on_notification: Callable[[bytes], None]) -> None:
        self._transport = transport
        self._on_notification = on_notification
        self._waiters: dict[PostedRead, asyncio.Future[ReadEnded]] = {}
        self._cause: BaseException | None = None
        self._ended = False
        self.strays = 0
        """Ends of reads that nobody waited for: always 0 unless a transport reports one twice."""

    @property
    def reads_under_way(self) -> int:
        return len(self._waiters)

    def read(
        self, peer: AgentName, descriptors: Descriptors, then: Descriptors | None = None
    ) -> asyncio.Future[ReadEnded]:
        """Post a read (see `Transport.post_read`); the future tells its end and fails only with RuntimeBroken.

        The future belongs to the poller: cancelling it would not stop the bytes, so waiters shield it.
        """
        if self._ended:
            raise RuntimeBroken("the transfer poller has ended") from self._cause
        posted = self._transport.post_read(peer, descriptors, then)
        future: asyncio.Future[ReadEnded] = asyncio.get_running_loop().create_future()
        self._waiters[posted] = future
        return future

    async def run(self) -> None:
        """Dispatch events until cancelled or until the transport breaks, which raises TransportBroken."""
        try:
            while True:
                for event in await self._transport.events():
                    self._dispatch(event)
        except BaseException as error:
            self._cause = error
            raise
        finally:
            self._ended = True
            self._settle_all()

    def _dispatch(self, event: ReadEnded | Notified) -> None:
        match event:
            case Notified(payload=payload):
                self._on_notification(payload)
            case ReadEnded(read=read):
                future = self._waiters.pop(read, None)
                if future is None:
                    self.strays += 1
                elif not future.done():
                    future.set_result(event)

    def _settle_all(self) -> None:
        for future in self._waiters.values():
            if not future.done():
                error = TransportBroken("the transfer poller ended while the read was under way")
                error.__cause__ = self._cause
                future.set_exception(error)
                future.exception()  # mark as seen: a cancelled load may have left nobody to look
        self._waiters.clear()
