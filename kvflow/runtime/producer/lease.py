"""A lease: the request that opens it (`ServeRequest`), its state while open (`OpenLease`), and its handle (`Lease`)."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from kvflow import checks
from kvflow.checks import Count, Seconds, Size, counted
from kvflow.core.bounds import GivenTraceparent
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


@checks.hides_secrets
@dataclass(frozen=True, slots=True)
class ServeRequest:
    """An offer of blocks: `block_ids`, in prompt order, hold the first `num_tokens` tokens of a prompt.

    If the cache has several groups, `block_ids` is one list per group, in order, or a mapping from group name to list.
    A sliding-window group offers the last blocks of the prompt, at least all blocks that hold tokens of the window.

    The last block may be partly filled. An engine that offers only full blocks may give fewer blocks than the tokens
    need, and none for a prompt shorter than a block. `ttl_s` defaults to Config.lease_ttl_s. The lease ends as READ
    once `reader_count` engines have read it, each with all of its ranks. A field may be an array instead of a list, or
    a number of numpy; the ticket has only built-in types.
    """

    request_id: str
    block_ids: GivenBlockIds
    num_tokens: TokenCount
    ttl_s: Seconds | None = None
    reader_count: Size = 1
    traceparent: GivenTraceparent = ""
    """W3C trace context of the request, which the ticket and the records of both sides carry. It may be a client's
    header, as it came: what is no trace context is ignored."""
    prompt: Sequence[int] | None = None
    """Token ids of the prompt. The ticket carries their digest, and a load with another `prompt` fails."""
    ready: GivenEvent = None
    """Device event after which the blocks hold the prompt, for example a torch.cuda.Event behind the forward pass.

    Readers wait until it has happened. **Without `ready` the blocks must hold the prompt when the lease is opened**: if
    the device still computes, synchronize first.
    """
    computed_tokens: Count | None = None
    """Number of tokens, from the first, that are computed now, or once `ready` has happened; None: all tokens.

    Call `Lease.advance` when more are computed. A load begins immediately and reads the computed tokens. `serve_blocks`
    raises RequestError if the cache has too few blocks for all tokens, since that lease could never be completed.
    """
    extends: bool = False
    """True if `Lease.extend` will add blocks until the lease's blocks hold all tokens. This needs `computed_tokens`.

    It is implied if `computed_tokens` is given and `block_ids` do not cover every full block of `num_tokens`.
    """
    payload: bool = False
    """True if `Lease.complete` will give bytes to the readers, for example the first token. Loads wait for that call.
    """


TokenCount: TypeAlias = Annotated[int, Meta(ge=0, le=FAILED - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStatistics:
    """Counts of this rank's leases, by outcome, and of readers' notifications and questions about digests."""

    open_leases: int
    read: int
    expired: int
    revoked: int
    failed: int
    """Number of leases that ended because the prompt could not be computed."""
    renewals: int
    """Number of times that a reader's notification has renewed a lease."""
    late_notifications: int
    duplicate_notifications: int
    malformed_notifications: int
    digests: int = 0
    """Number of answered questions in which readers asked for digests of leased blocks."""
    digests_refused: int = 0
    late_reads: int = 0
    """Number of reads that stock readers (vLLM's own NixlConnector) reported after the lease had ended.

    Stock readers do not check seals, so the bytes of these reads may belong to another prompt.
    """


class LeaseOutcome(enum.StrEnum):
    """How a lease has ended. After each of these outcomes the blocks may be reused."""

    READ = "read"
    EXPIRED = "expired"
    REVOKED = "revoked"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class OpenLease:
    """The `LeaseEntry`, ticket, blocks and outcome of a lease that is open, or has ended and still holds its blocks."""

    entry: LeaseEntry
    ticket: Ticket
    held: HeldBlocks
    outcome: asyncio.Future[LeaseOutcome]
    payload: bytes | None
    """Bytes for the readers from `Lease.complete`: None until that call if bytes are promised, empty if not."""
    reason: str = ""
    """Reason why the prompt could not be computed; "" if it could."""

    @property
    def complete(self) -> bool:
        """True once peers can read all tokens, and `Lease.complete` has given the payload, if one was promised."""
        return not self.held.missing and self.payload is not None

    def matches(self, num_tokens: int, blocks_digest: bytes) -> bool:
        """Return whether this lease has `num_tokens` tokens and block tables with the digest `blocks_digest`.

        The digest may be that of the block tables in the ticket, or of the current ones.
        """
        ticket, tables = self.ticket, self.held.tables
        if ticket.num_tokens != num_tokens or ticket.blocks_digest == blocks_digest:
            return ticket.num_tokens == num_tokens
        if list(map(len, tables)) == list(map(len, ticket.block_tables)):
            return False
        ids = tuple(tuple(table.tolist()) for table in tables)
        return messages.digest_of(ids if len(ids) > 1 else ids[0]) == blocks_digest

    def rank_lease(self) -> RankLease:
        """Return this rank's `RankLease`, for the answer to a reader with a ticket that does not have this entry."""
        own, held = self.ticket.first, self.held
        return msgspec.structs.replace(own, pending=held.computed < held.num_tokens or self.ticket.extends)

    def offer(self, queued_bytes: int = 0) -> messages.Offer:
        """Return an offer of this lease's tokens, block tables and `ttl_s`, for a reader without the lease's ticket.

        `queued_bytes`: number of bytes that are leased to other readers and may be read before the bytes of this lease.
        """
        ticket = self.ticket
        return messages.Offer(
            num_tokens=ticket.num_tokens,
            ttl_s=ticket.ttl_s,
            block_ids=ticket.block_tables,
            extends=ticket.extends,
            prompt_digest=ticket.prompt_digest,
            queued_bytes=queued_bytes,
        )


class LeaseGrowth(Protocol):
    """Serves leases that are opened before all tokens are computed: takes their blocks, and grows them for `Lease`."""

    def take(self, request: ServeRequest, lease_id: str, ready: DeviceEvent | None) -> HeldBlocks: ...

    def advance(self, opened: OpenLease, num_tokens: int, ready: DeviceEvent | None) -> None: ...

    def extend(self, opened: OpenLease, block_ids: object) -> None: ...

    def complete(self, opened: OpenLease, payload: bytes, ready: DeviceEvent | None) -> None: ...


class LeaseControl(Protocol):
    """The calls of `serving.Serving` by which a lease's handle ends or changes the lease."""

    def revoke(self, entry: LeaseEntry) -> None: ...

    def fail(self, entry: LeaseEntry, reason: str) -> None: ...

    def restart(self, entry: LeaseEntry, ttl_s: float | None) -> None: ...

    def lease_growth(self, request_id: str) -> LeaseGrowth: ...


@checks.hides_secrets
class Lease:
    """A producer's promise to keep blocks until they have been read. Await it for its `LeaseOutcome`.

    Cancelling a task that awaits a lease does not change the lease.
    """

    def __init__(self, opened: OpenLease, leases: LeaseControl) -> None:
        self.ticket = opened.ticket
        """The ticket for readers, made when the lease was opened. Readers ask this rank for blocks that were added
        later."""
        self._opened = opened
        self._entry = opened.entry
        self._outcome = opened.outcome
        self._leases = leases

    def __repr__(self) -> str:
        return f"<Lease {self.request_id} {self.state}, {counted(self.readers_done, 'reader')} done>"

    def __await__(self) -> Generator[Any, None, LeaseOutcome]:
        self._require_loop("awaiting it")
        return asyncio.shield(self._outcome).__await__()

    @property
    def request_id(self) -> str:
        return self.ticket.request_id

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Current block ids of the lease; if there are several groups, only the block ids of the first group."""
        return self.block_tables[0]

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """Current block ids of the lease: one tuple for each group."""
        return tuple(tuple(ids.tolist()) for ids in self._opened.held.tables)

    @property
    def state(self) -> LeaseState:
        """State of the lease: `LeaseState.OFFERED`, or its outcome. After its end the blocks stay held until `done`."""
        return self._entry.state

    @property
    def done(self) -> bool:
        return self._outcome.done()

    @property
    def readers_done(self) -> int:
        """Number of consumer ranks that have reported that they do not need the blocks any longer."""
        return len(self._entry.readers)

    async def wait(self) -> LeaseOutcome:
        """Wait until the blocks may be reused, as awaiting the lease does.

        If cancelled, stop waiting; the lease does not change.

        Returns:
            The outcome of the lease.

        Raises:
            UsageError: not called on the runtime's event loop.
        """
        return await self

    def revoke(self) -> Lease:
        """End the lease as REVOKED: no load of it can succeed after this call. No effect on a lease that has ended.

        A load that is reading the blocks now fails with LeaseExpired.

        Returns:
            The lease. `await lease.revoke()` waits until the blocks are free and returns the outcome, which is READ if
            the readers finished first.

        Raises:
            UsageError: not called on the runtime's event loop.
        """
        self._require_loop("revoke()")
        self._leases.revoke(self._entry)
        return self

    def fail(self, reason: str = "") -> Lease:
        """End the lease as FAILED, since its prompt will never be computed. No effect on a lease that has ended.

        Loads of the lease then fail with PrefillFailed. Call this after a failed prefill, so that readers need not wait
        for the deadline and the request can run elsewhere. An engine of several ranks calls it on each rank.

        Args:
            reason: goes into logs, records and, if the reader asks this rank, the reader's error.

        Returns:
            The lease. As after `revoke`, its blocks are free once awaiting it returns.

        Raises:
            RequestError: `reason` is not a text.
            UsageError: not called on the runtime's event loop.
        """
        self._require_loop("fail()")
        self._leases.fail(self._entry, checks.text(reason, f"request {self.request_id!r}: fail: reason"))
        return self

    def advance(self, num_tokens: int, ready: DeviceEvent | None = None) -> None:
        """Announce that the first `num_tokens` tokens are computed in all groups, now or once `ready` has happened.

        The lease must have been opened with `computed_tokens`. Readers read tokens as soon as these are announced and
        computed, so a load ends after the announcement of the last token. Recurrent state is read with the last token.
        Each advance takes effect after all earlier ones. No effect on a lease that has ended.

        Args:
            num_tokens: number of computed tokens, from the first token of the prompt.
            ready: a device event, such as a torch.cuda.Event, recorded behind the step that computes these tokens.
                **Without it the blocks must hold these tokens now.**

        Raises:
            RequestError: `num_tokens` is less than in an earlier call, more than the lease has, or more than the blocks
                of the lease hold (see `extend`); or `ready` is not an event.
            LayoutError: a tensor of the cache has moved since the cache was registered.
            UsageError: not called on the runtime's event loop.
        """
        self._require_loop("advance()")
        self._leases.lease_growth(self.request_id).advance(self._opened, num_tokens, ready)

    def extend(self, block_ids: GivenBlockIds) -> None:
        """Add the next blocks, in prompt order, to a lease that was opened with fewer blocks than its tokens need.

        In the end each group must have the blocks that hold all tokens; a sliding-window group only the blocks that
        hold the window at the end of the prompt. Readers ask this rank for the added blocks. No effect on a lease that
        has ended.

        Args:
            block_ids: the added blocks only, in the form of `ServeRequest.block_ids`.

        Raises:
            RequestError: the block ids are wrong, or more than the tokens need. The lease is unchanged.
            BlocksBusy: one of the blocks is being loaded. The lease is unchanged.
            HostBlocksBusy: with host staging, too few host blocks are free. The lease is unchanged.
            LayoutError: a tensor of the cache has moved since the cache was registered.
            UsageError: not called on the runtime's event loop.
        """
        self._require_loop("extend()")
        self._leases.lease_growth(self.request_id).extend(self._opened, block_ids)

    def complete(self, payload: bytes = b"", ready: DeviceEvent | None = None) -> None:
        """Announce that all tokens are computed, now or once `ready` has happened. Every load receives `payload`.

        This also does what `advance` to the last token does. If the lease was opened with `ServeRequest.payload`, its
        loads wait for this call. kvflow passes `payload` on, without interpreting it, in `LoadReport.payload`. An
        engine of several ranks gives the same payload on each rank. No effect on a lease that has ended.

        Args:
            payload: at most 4 KiB, for example the first token and its logprobs.
            ready: a device event after which the blocks hold all tokens. **Without it the blocks must hold all tokens
                now.**

        Raises:
            RequestError: `payload` was not promised, is too large, or differs from an earlier one; the lease has too
                few blocks for all tokens; or `ready` is not an event.
            LayoutError: a tensor of the cache has moved since the cache was registered.
            UsageError: not called on the runtime's event loop.
        """
        self._require_loop("complete()")
        self._leases.lease_growth(self.request_id).complete(self._opened, payload, ready)

    def restart(self, ttl_s: float | None = None) -> None:
        """Start the lease's time again, as if the lease were opened now with `ttl_s`. This never shortens the lease.

        For an engine that opens a lease some time before it sends the ticket, for example before the last step of the
        prefill. No effect on a lease that has ended.

        Args:
            ttl_s: seconds from now; None: Config.lease_ttl_s.

        Raises:
            RequestError: `ttl_s` is not a valid number of seconds.
            UsageError: not called on the runtime's event loop.
        """
        self._require_loop("restart()")
        self._leases.restart(
            self._entry, None if ttl_s is None else checks.seconds(ttl_s, f"request {self.request_id!r}: ttl_s")
        )

    def _require_loop(self, what: str) -> None:
        if asyncio._get_running_loop() is not self._outcome.get_loop():  # fewer steps: engines advance often
            require_loop(self._outcome.get_loop(), f"lease of request {self.request_id!r}: {what}")
