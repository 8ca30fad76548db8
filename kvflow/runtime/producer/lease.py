"""A lease: the request that it is made for, the lease while it is open, and the handle that its owner has.

`serving` holds all of them.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from kvflow import checks
from kvflow.checks import Count, Seconds, Size, counted
from kvflow.core.bounds import Traceparent
from kvflow.core.plan.descriptors import GivenBlockIds
from kvflow.core.policy.events import DeviceEvent, GivenEvent
from kvflow.core.policy.lease_book import LeaseEntry
from kvflow.core.policy.states import LeaseState
from kvflow.core.protocol import messages
from kvflow.core.protocol.proof import FAILED
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.ticket import Ticket
from kvflow.runtime.producer.blocks import HeldBlocks
from kvflow.runtime.tasks import require_loop

if TYPE_CHECKING:
    from kvflow.runtime.producer.serving import Serving


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
    num_tokens: TokenCount
    ttl_s: Seconds | None = None
    reader_count: Size = 1
    traceparent: Traceparent = ""
    """Trace context (W3C) of the request, for the ticket and the records of both sides."""
    prompt: Sequence[int] | None = None
    """Token ids of the prompt: with them a load that gives its own fails if it is of another prompt."""
    ready: GivenEvent = None
    """An event after which the blocks hold the prompt, such as a CUDA event behind its forward pass: until then readers
    wait. **Without it the bytes have to be there when the lease is opened**; a device that still computes them has to
    be waited for first."""
    computed_tokens: Count | None = None
    """Tokens that are computed by now, or once `ready` has happened; `Lease.advance` tells of more. A load
    begins at once and reads what is there. None: all of them. RequestError if the blocks of all tokens are more than
    the cache has: nobody could ever complete the lease."""
    extends: bool = False
    """True if more blocks follow by `Lease.extend`, until they hold all tokens; only with `computed_tokens`. Where they
    are fewer than the full blocks of the tokens that goes without saying."""
    payload: bool = False
    """True if a payload comes with the lease's end, such as the first token: loads wait for `Lease.complete`."""


TokenCount: TypeAlias = Annotated[int, Meta(ge=0, le=FAILED - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStatistics:
    """Leases open now, how others ended, and notifications that changed nothing."""

    open_leases: int
    read: int
    expired: int
    revoked: int
    failed: int
    """Leases whose prompts could not be computed."""
    renewals: int
    """Renewals by readers."""
    late_notifications: int
    duplicate_notifications: int
    malformed_notifications: int
    digests: int = 0
    """Questions of readers for digests of leased blocks that were answered."""
    digests_refused: int = 0
    late_reads: int = 0
    """Reads of stock readers, who look at no seal, that they have told of when the lease was over: what they have read
    may be another prompt's."""


class LeaseOutcome(enum.StrEnum):
    """End of a lease; in every case the blocks may be reused."""

    READ = "read"
    EXPIRED = "expired"
    REVOKED = "revoked"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class OpenLease:
    """A lease that is open or holds its blocks: its entry in the book, its blocks, and the future of its end."""

    entry: LeaseEntry
    ticket: Ticket
    held: HeldBlocks
    outcome: asyncio.Future[LeaseOutcome]
    payload: bytes | None
    """The payload; None if it is promised and not given yet."""
    reason: str = ""
    """The reason why its prompt could not be computed."""

    @property
    def complete(self) -> bool:
        """True once readers have nothing to wait for any more."""
        return not self.held.missing and self.payload is not None

    def is_of(self, num_tokens: int, blocks_digest: bytes) -> bool:
        """Return whether the lease is of these blocks and tokens: those of its ticket, or all that it has by now."""
        ticket, tables = self.ticket, self.held.tables
        if ticket.num_tokens != num_tokens or ticket.blocks_digest == blocks_digest:
            return ticket.num_tokens == num_tokens
        if list(map(len, tables)) == list(map(len, ticket.block_tables)):
            return False
        ids = tuple(tuple(table.tolist()) for table in tables)
        return messages.digest_of(ids if len(ids) > 1 else ids[0]) == blocks_digest

    def lease(self) -> RankLease:
        """Return the lease for a reader that does not have the ticket."""
        own, held = self.ticket.first, self.held
        return msgspec.structs.replace(own, pending=held.computed < held.num_tokens or self.ticket.extends)

    def offer(self, queued_bytes: int = 0) -> messages.Offer:
        """Return the content of the ticket for a reader that does not have it."""
        ticket = self.ticket
        return messages.Offer(
            num_tokens=ticket.num_tokens,
            ttl_s=ticket.ttl_s,
            block_ids=ticket.block_tables,
            extends=ticket.extends,
            prompt_digest=ticket.prompt_digest,
            queued_bytes=queued_bytes,
        )


class Lease:
    """The producer's promise to keep blocks until they have been read. Await it for its `LeaseOutcome`.

    Cancelling a task that awaits a lease leaves the lease as it is.
    """

    def __init__(self, opened: OpenLease, serving: Serving) -> None:
        self.ticket = opened.ticket
        """The ticket for its readers, as it was when the lease was opened: they ask for what has come since."""
        self._opened = opened
        self._entry = opened.entry
        self._outcome = opened.outcome
        self._serving = serving

    def __repr__(self) -> str:
        return f"<Lease {self.request_id} {self.state}, {counted(self.readers_done, 'reader')} done>"

    def __await__(self) -> Generator[Any, None, LeaseOutcome]:
        self._require_here("awaiting it")
        return asyncio.shield(self._outcome).__await__()

    @property
    def request_id(self) -> str:
        return self.ticket.request_id

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Blocks of the lease by now; those of the first group, if there are several."""
        return self.block_tables[0]

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """Blocks of the lease by now, by group."""
        return tuple(tuple(ids.tolist()) for ids in self._opened.held.tables)

    @property
    def state(self) -> LeaseState:
        """Offered, or how it has ended; its blocks are free a moment later, when it is `done`."""
        return self._entry.state

    @property
    def done(self) -> bool:
        return self._outcome.done()

    @property
    def readers_done(self) -> int:
        """Ranks of consumers that need the blocks no more."""
        return len(self._entry.readers)

    async def wait(self) -> LeaseOutcome:
        """Wait until the blocks may be reused: the same as awaiting the lease.

        Returns:
            How the lease ended.

        Raises:
            UsageError: off the runtime's loop.
        """
        return await self

    def revoke(self) -> Lease:
        """Withdraw the offer: no later load can succeed. No effect on a lease that has ended.

        A reader in the middle of a read gets LeaseExpired, never a success.

        Returns:
            The lease: `await lease.revoke()` gives how it ended once its blocks are free, which is READ if its readers
            were faster.

        Raises:
            UsageError: off the runtime's loop.
        """
        self._require_here("revoke()")
        self._serving.revoke(self._entry)
        return self

    def fail(self, reason: str = "") -> Lease:
        """End the lease as FAILED: its prompt will never be computed. Its readers end at once, with PrefillFailed.

        For a prefill that broke, so that the request goes elsewhere; nobody waits for its time to be over then. An
        engine of several ranks fails all of its leases. No effect on a lease that has ended.

        Args:
            reason: for logs, records and readers' errors, as far as these learn of it.

        Returns:
            The lease: its blocks are free when awaiting it returns, as after `revoke`.

        Raises:
            RequestError: `reason` is no text.
            UsageError: off the runtime's loop.
        """
        self._require_here("fail()")
        self._serving.fail(self._entry, checks.text(reason, f"request {self.request_id!r}: fail: reason"))
        return self

    def advance(self, num_tokens: int, ready: DeviceEvent | None = None) -> None:
        """Say that the first `num_tokens` tokens are computed in all groups: once `ready` has happened, or now.

        For leases that were opened with `computed_tokens`. Readers take what is there, and end when all is. A group's
        state belongs to the prompt's last token. An advance takes effect after all earlier ones, and none on a lease
        that has ended.

        Args:
            num_tokens: how many are computed by then, from the first one on.
            ready: an event behind the step that computes them. **Without it the bytes have to be there.**

        Raises:
            RequestError: fewer tokens than were told before, more than the lease has or its blocks hold (`extend`), or
                what is no event.
            UsageError: off the runtime's loop.
        """
        self._require_here("advance()")
        self._serving.growing(self.request_id).advance(self._opened, num_tokens, ready)

    def extend(self, block_ids: GivenBlockIds) -> None:
        """Add the blocks that follow, in prompt order, to a lease that was opened with fewer than its tokens need.

        They are the lease's from now on. In the end a group has as many as hold all tokens; one with a window, as many
        as hold the tokens of the window at the prompt's end. No effect on a lease that has ended. Readers that know
        fewer blocks ask for them.

        Args:
            block_ids: the further blocks only, given as in `ServeRequest.block_ids`.

        Raises:
            RequestError: the ids cannot be right, or are more than the tokens need; with host staging also if there are
                not enough host blocks now. The lease is as it was then.
            BlocksBusy: a block is being loaded.
            UsageError: off the runtime's loop.
        """
        self._require_here("extend()")
        self._serving.growing(self.request_id).extend(self._opened, block_ids)

    def complete(self, payload: bytes = b"", ready: DeviceEvent | None = None) -> None:
        """Say that all tokens are computed: once `ready` has happened, or now. Every load of the lease gets `payload`.

        The same as `advance` to the last token, and the end of what a lease has to tell that was opened with
        `ServeRequest.payload`: `LoadReport.payload` has it, and no load of it ends before. kvflow does not look into
        it. An engine of several ranks gives each of them the same. No effect on a lease that has ended.

        Args:
            payload: such as the first token with its logprobs, at most 4 KiB.
            ready: see `advance`.

        Raises:
            RequestError: there is a payload, and none was promised, or it is too large, or another one was given
                before; or what `advance` raises.
            UsageError: off the runtime's loop.
        """
        self._require_here("complete()")
        self._serving.growing(self.request_id).complete(self._opened, payload, ready)

    def restart(self, ttl_s: float | None = None) -> None:
        """Count the lease's time from now on, as if it were offered now with that `ttl_s`.

        For engines that offer a prompt before its ticket is out, such as before the step that completes it. A lease
        never ends earlier by that; one that has ended stays so.

        Args:
            ttl_s: Config.lease_ttl_s if None.

        Raises:
            RequestError: `ttl_s` is no time.
            UsageError: off the runtime's loop.
        """
        self._require_here("restart()")
        self._serving.restart(
            self._entry, None if ttl_s is None else checks.seconds(ttl_s, f"request {self.request_id!r}: ttl_s")
        )

    def _require_here(self, what: str) -> None:
        if asyncio._get_running_loop() is not self._outcome.get_loop():  # in few steps: engines advance often
            require_loop(self._outcome.get_loop(), f"lease of request {self.request_id!r}: {what}")
