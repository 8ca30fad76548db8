"""Keeps leases open for requests that wait for their turn to load: the engine has no room for them yet.

Each request has a task. It finds the ticket's leases as a load would, so that their peers are connected before the
load comes, leaves them to `Renewals`, and waits until it is cancelled. All of it is best effort: what could not be kept
is for the load to say, which may find its producer back by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from kvflow.config import Config
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import KVFlowError
from kvflow.runtime.consumer.renewals import Renewals
from kvflow.runtime.context import Spawn
from kvflow.runtime.peers.reach import Sources

logger = logging.getLogger(__name__)


class Keeping:
    """The requests that wait."""

    def __init__(self, config: Config, *, sources: Sources, renewals: Renewals, spawn: Spawn) -> None:
        self._config = config
        self._sources = sources
        self._renewals = renewals
        self._spawn = spawn

    def keep(self, ticket: Ticket | Mapping[str, Any]) -> AbstractContextManager[None]:
        """Keep a ticket's leases open until the block ends. Raises RequestError, or RuntimeClosed."""
        return self._kept(self._sources.read(ticket))

    @contextmanager
    def _kept(self, ticket: Ticket) -> Iterator[None]:
        if not ticket.block_ids:
            yield  # its leases ended when they were made
            return
        owner = object()
        task = self._spawn(self._keep(owner, ticket), name=f"kvflow-keep {ticket.request_id}")
        try:
            yield
        finally:
            task.cancel()
            self._renewals.forget(owner)

    async def _keep(self, owner: object, ticket: Ticket) -> None:
        try:
            async with asyncio.timeout(self._config.load_deadline_s):
                await self._sources.check(ticket)
                await self._sources.find(ticket, partial(self._renewals.keep, owner, ticket.ttl_s))
            await asyncio.get_running_loop().create_future()
        except (KVFlowError, TimeoutError) as error:
            what = f"request {ticket.request_id} from {ticket.engine_id}: its leases could not be kept"
            logger.info("%s: %s", what, error or f"not found within {self._config.load_deadline_s} s")
        finally:
            self._renewals.forget(owner)  # once more: a lease may be found while the task ends
