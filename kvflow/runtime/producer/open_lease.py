"""A lease between its opening and its end, as this rank's own services know it: `lease.Lease` is its owner's handle."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass

import msgspec

from kvflow.core.policy.lease_book import LeaseEntry
from kvflow.core.protocol import messages
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.ticket import Ticket
from kvflow.runtime.producer.blocks import HeldBlocks


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
