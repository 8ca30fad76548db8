"""A lease between its opening and its end, as this rank's own services know it: `lease.Lease` is its owner's handle."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator
from dataclasses import dataclass

from kvflow.core.policy.lease_book import LeaseEntry
from kvflow.core.protocol import messages
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

    def extended_digest(self) -> Iterator[bytes]:
        """The digest of the blocks that it has by now, if it has got more than its ticket names."""
        if list(map(len, self.held.tables)) != list(map(len, self.ticket.block_tables)):
            tables = tuple(tuple(ids.tolist()) for ids in self.held.tables)
            yield messages.digest_of(tables if len(tables) > 1 else tables[0])

    def found(self) -> messages.LeaseFound:
        """The answer to a reader that does not have the ticket."""
        own, held = self.ticket.first, self.held
        return messages.LeaseFound(
            incarnation=own.incarnation,
            lease_id=own.lease_id,
            seal_index=own.seal_index,
            block_ids=own.block_ids,
            more_block_ids=own.more_block_ids,
            pending=held.computed < held.num_tokens or self.ticket.extends,
            payload=own.payload,
            held=own.held,
        )
