"""The leases of stock producers: heartbeats while they are needed, and one notification when they are not any more.

A producer is sent the texts of `core.stock.texts` and nothing else: anything that it does not expect ends its engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from kvflow.core.protocol.ticket import Ticket
from kvflow.core.stock.deadline import DeadlineProof
from kvflow.core.stock.params import StockTicket, is_stock
from kvflow.core.stock.texts import heartbeat_texts
from kvflow.errors import KVFlowError
from kvflow.logs import logger_of
from kvflow.runtime.clock import Timer
from kvflow.runtime.context import RankContext
from kvflow.runtime.load.leases import keeping
from kvflow.runtime.peers.peer import Keeping, Source
from kvflow.stock.reach import StockReach, StockSource
from kvflow.stock.sights import Sights
from kvflow.transport.base import AgentName

logger = logger_of(__name__)


class StockLeases:
    """Keeps leases of stock producers, and gives them back."""

    def __init__(self, context: RankContext, reach: StockReach, sights: Sights, own: Keeping) -> None:
        """`own` keeps what turns out to be of our own make."""
        self._own = own
        self._config = context.config
        self._clock = context.clock
        self._spawn = context.spawn
        self._transport = context.transport
        self._reach = reach
        self._sights = sights
        self._kept: dict[object, list[StockSource]] = {}
        self._timer: Timer | None = None
        self._closed = False
        self.sent = 0
        """How many leases heartbeats have named, counting each time."""

    def keep(self, owner: object, source: StockSource) -> None:
        """Send heartbeats for it from now on until its owner needs it no more."""
        self._kept.setdefault(owner, []).append(source)
        source.peer.leases_kept += 1
        if self._timer is None and not self._closed:
            self._timer = self._clock.call_later(self._sights.terms.heartbeat_s, self._beat)

    def forget(self, owner: object) -> None:
        """Send none for this owner any more."""
        for source in self._kept.pop(owner, ()):
            source.peer.leases_kept -= 1

    @contextmanager
    def keep_while(self, ticket: StockTicket) -> Iterator[None]:
        """See `RemoteLeases.keep_while`. The parameters count as arrived now, unless they say otherwise."""
        if not any(ticket.block_tables):
            yield
            return
        with keeping(self._spawn, partial(self._keep_for, ticket=ticket), self.forget, ticket.request_id):
            yield

    def tell(self, sources: Sequence[StockSource]) -> None:
        """Report to every rank that we need it no more: from now on nothing is read for this request."""
        for source in sources:
            self._sights.told(source.sight)
            self._transport.notify(source.connection.agent, source.text)

    def parse(self, given: Ticket | Mapping[str, Any]) -> StockTicket | None:
        """A ticket of this kind, checked; None if it is of another. Raises RequestError."""
        if isinstance(given, StockTicket) or (isinstance(given, Mapping) and is_stock(given)):
            return self._reach.read_ticket(given, self._reach.block_ids_max)
        return None

    async def release(self, ticket: StockTicket) -> bool:
        """Give a prompt back unread; whether all its ranks were told. Takes Config.handshake_timeout_s at most."""
        if not any(ticket.block_tables):
            return True
        try:
            async with asyncio.timeout(self._config.handshake_timeout_s):
                sources = await self._reach.reach(ticket, lambda _: None)
        except (KVFlowError, TimeoutError) as error:
            logger.info("a stock lease could not be given back: %s", error or "nobody answered in time")
            return False
        stock = [source for source in sources if isinstance(source, StockSource)]
        if stock:
            self.tell(stock)
        else:
            self._own.tell(sources)
        return True

    def close(self) -> None:
        """Send no heartbeats any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _keep_for(self, owner: object, ticket: StockTicket) -> None:
        """The body of a task: until it is cancelled."""

        def found(source: Source) -> None:
            if isinstance(source, StockSource):
                self.keep(owner, source)
            else:
                self._own.keep(owner, ticket.ttl_s, source)

        try:
            async with asyncio.timeout(self._config.load_deadline_s):
                await self._reach.reach(ticket, found)
            await asyncio.get_running_loop().create_future()
        except (KVFlowError, TimeoutError) as error:
            logger.info("request %s: its stock lease is not kept: %s", ticket.request_id, error or "no answer in time")
        finally:
            self.forget(owner)
            self._own.forget(owner)

    def _beat(self) -> None:
        """The timer: one heartbeat to each rank for all that is needed of it."""
        self._timer = None
        needed: dict[AgentName, dict[str, DeadlineProof | None]] = {}
        for source in (source for sources in self._kept.values() for source in sources):
            source.peer.used_s = self._clock.now_s()
            deadline = source.proof if isinstance(source.proof, DeadlineProof) else None
            needed.setdefault(source.connection.agent, {})[source.sight.request_id] = deadline
        for agent, requests in needed.items():
            for deadline in filter(None, requests.values()):
                deadline.beat()
            for text in heartbeat_texts(requests):
                self._transport.notify(agent, text)
            self.sent += len(requests)
        if self._kept:
            self._timer = self._clock.call_later(self._sights.terms.heartbeat_s, self._beat)


class BothLeases:
    """Leases of producers of either kind; see `runtime.peers.peer.Keeping`."""

    def __init__(self, own: Keeping, stock: StockLeases) -> None:
        self._own = own
        self._stock = stock

    @property
    def sent(self) -> int:
        return self._own.sent + self._stock.sent

    def keep(self, owner: object, ttl_s: float, source: Source) -> None:
        """See `RemoteLeases.keep`."""
        if isinstance(source, StockSource):
            self._stock.keep(owner, source)
        else:
            self._own.keep(owner, ttl_s, source)

    def forget(self, owner: object) -> None:
        """See `RemoteLeases.forget`."""
        self._own.forget(owner)
        self._stock.forget(owner)

    @contextmanager
    def keep_while(self, ticket: Ticket) -> Iterator[None]:
        """See `RemoteLeases.keep_while`."""
        keeping = self._stock.keep_while(ticket) if isinstance(ticket, StockTicket) else self._own.keep_while(ticket)
        with keeping:
            yield

    def tell(self, sources: Sequence[Source]) -> None:
        """See `RemoteLeases.tell`."""
        stock = [source for source in sources if isinstance(source, StockSource)]
        if stock:
            self._stock.tell(stock)
        else:
            self._own.tell(sources)

    async def release(self, given: Ticket | Mapping[str, Any]) -> bool:
        """See `RemoteLeases.release`."""
        ticket = self._stock.parse(given)
        return await (self._own.release(given) if ticket is None else self._stock.release(ticket))

    def close(self) -> None:
        """See `RemoteLeases.close`."""
        self._own.close()
        self._stock.close()
