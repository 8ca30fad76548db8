"""A lease as its owner sees it: the request it is made for, its states, its outcome. `serving` holds all of them."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from kvflow import checks
from kvflow.config import Config
from kvflow.core.plan.descriptors import GivenBlockIds, count_block_ids
from kvflow.core.policy.events import DeviceEvent, checked_event
from kvflow.core.policy.lease_book import LeaseEntry
from kvflow.core.policy.states import LeaseState
from kvflow.core.protocol.ticket import Ticket, checked_traceparent
from kvflow.errors import RequestError
from kvflow.runtime.own_loop import require_loop


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """Offer `block_ids`, in prompt order, which hold the first `num_tokens` tokens of a prompt.

    For a cache of several groups they are a list for each, in order, or by the groups' names. A group with a window
    gives the prompt's last blocks, at least those that hold tokens of the window.

    The last block may be partly filled. Engines that offer full blocks only may give fewer blocks than the tokens
    need; no blocks at all is legal too (a prompt shorter than one block). `ttl_s` defaults to Config.lease_ttl_s;
    the lease is over once `reader_count` engines have read: how many ranks each of them has, its readers say.
    Lists may be arrays, numbers may be numpy's: the ticket has them as Python's own.
    """

    request_id: str
    block_ids: GivenBlockIds
    num_tokens: int
    ttl_s: float | None = None
    reader_count: int = 1
    traceparent: str = ""
    """Trace context (W3C) of the request, for the ticket and the records of both sides."""
    prompt: Sequence[int] | None = None
    """Token ids of the prompt: with them a load that gives its own fails if it is of another prompt."""
    ready: DeviceEvent | None = None
    """An event after which the blocks hold the prompt, such as a CUDA event behind its forward pass: until then readers
    wait. **Without it the bytes have to be there when the lease is opened**; a device that still computes them has to
    be waited for first."""
    computed_tokens: int | None = None
    """How many of the tokens are computed by now, or once `ready` has happened; `Lease.advance` tells of more. A load
    begins at once and reads what is there. None: all of them."""


def checked_serve_request(request: object, config: Config) -> ServeRequest:
    """The request with its numbers and texts as Python's own, so that its ticket is one that readers take.

    RequestError names what cannot be right whatever the cache is. The prompt is looked at when its digest is made.
    """
    given = checks.instance(request, ServeRequest, "serve_blocks")
    request_id = checks.request_id(given.request_id, config.limits.request_id_chars_max)
    try:
        count_block_ids(given.block_ids, config.limits.block_ids_max)
        return ServeRequest(
            request_id,
            given.block_ids,
            checks.whole(given.num_tokens, "num_tokens", least=0),
            None if given.ttl_s is None else checks.seconds(given.ttl_s, "ttl_s"),
            checks.whole(given.reader_count, "reader_count", least=1),
            checked_traceparent(given.traceparent),
            given.prompt,
            checked_event(given.ready, "ready"),
            None if given.computed_tokens is None else checks.whole(given.computed_tokens, "computed_tokens", least=0),
        )
    except RequestError as error:
        raise RequestError(f"request {request_id!r}: {error}") from error


class LeaseOutcome(enum.StrEnum):
    """How a lease ended; in every case the blocks may be reused."""

    READ = "read"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStatistics:
    """Leases open now, how others ended, and notifications that changed nothing."""

    open_leases: int
    read: int
    expired: int
    revoked: int
    renewals: int
    """How often a reader has renewed a lease."""
    late_notifications: int
    duplicate_notifications: int
    malformed_notifications: int
    digests: int = 0
    """Questions of readers for digests of leased blocks that were answered."""
    digests_refused: int = 0


class Lease:
    """The producer's promise to keep blocks until they have been read. Await it for its `LeaseOutcome`.

    Cancelling a task that awaits a lease leaves the lease as it is.
    """

    def __init__(
        self,
        ticket: Ticket,
        entry: LeaseEntry,
        outcome: asyncio.Future[LeaseOutcome],
        revoke: Callable[[], None],
        restart: Callable[[float | None], None],
        advance: Callable[[int, DeviceEvent | None], None],
    ) -> None:
        self.ticket = ticket
        self._entry = entry
        self._outcome = outcome
        self._revoke = revoke
        self._restart = restart
        self._advance = advance

    def __repr__(self) -> str:
        return f"<Lease {self.request_id} {self.state}, {self.readers_done} readers done>"

    def __await__(self) -> Generator[Any, None, LeaseOutcome]:
        self._require_here("awaiting it")
        return asyncio.shield(self._outcome).__await__()

    @property
    def request_id(self) -> str:
        return self.ticket.request_id

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Its blocks; those of the first group, if there are several."""
        return self.ticket.block_ids

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """Its blocks, by group."""
        return self.ticket.block_tables

    @property
    def state(self) -> LeaseState:
        """Whether it is still offered, or how it has ended; its blocks are free a moment later, when it is `done`."""
        return self._entry.state

    @property
    def done(self) -> bool:
        return self._outcome.done()

    @property
    def readers_done(self) -> int:
        """How many ranks of consumers have said that they need the blocks no more."""
        return len(self._entry.readers)

    async def wait(self) -> LeaseOutcome:
        """How it ended, once its blocks may be reused: the same as awaiting the lease."""
        return await self

    def revoke(self) -> Lease:
        """Withdraw the offer: no later load can succeed. No effect on a lease that has ended.

        A reader in the middle of a read gets LeaseExpired, never a success. The blocks are free when awaiting the
        lease returns: `await lease.revoke()` gives how it ended, which is READ if its readers were faster. Raises
        UsageError off the runtime's loop.
        """
        self._require_here("revoke()")
        self._revoke()
        return self

    def advance(self, num_tokens: int, ready: DeviceEvent | None = None) -> None:
        """The prompt's first `num_tokens` tokens are computed, in all groups, once `ready` has happened, or are now.

        For leases that were opened with `computed_tokens`. Readers take what is there, and end when all is. A group's
        state belongs to the prompt's last token. **Without `ready` the bytes have to be there.** An advance takes
        effect after all earlier ones, and none on a lease that has ended. Raises RequestError for fewer tokens than
        were told before, for more than the lease has, and for what is no event; UsageError off the runtime's loop.
        """
        self._require_here("advance()")
        self._advance(num_tokens, ready)

    def restart(self, ttl_s: float | None = None) -> None:
        """Count the lease's time from now on, as if it were offered now with that `ttl_s` (Config.lease_ttl_s).

        For engines that offer a prompt before its ticket is out, such as before the step that completes it. A lease
        never ends earlier by that; one that has ended stays so. Raises RequestError if `ttl_s` is no time, UsageError
        off the runtime's loop.
        """
        self._require_here("restart()")
        self._restart(None if ttl_s is None else checks.seconds(ttl_s, "ttl_s"))

    def _require_here(self, what: str) -> None:
        require_loop(self._outcome.get_loop(), f"lease of request {self.request_id!r}: {what}")
