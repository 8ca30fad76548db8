"""One save or restore. A `Flight` controls the copies to or from the file, as it controls the reads of a load.

The store's I/O thread copies the bytes. If a copy fails but may still run (a lost move), the save or restore fails
immediately, but the flight keeps the blocks and the permit of the copy until the copy is known to have stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvflow.core.plan.descriptors import BlockIds, Descriptors
from kvflow.core.policy.states import TransferState
from kvflow.core.protocol.proof import SealProof
from kvflow.errors import RuntimeBroken
from kvflow.runtime.load.flight import Flight
from kvflow.runtime.load.flight_resources import FlightResources, OnReadEnd
from kvflow.storage.disk import EntryFile
from kvflow.storage.storage_requests import PHASES, StoreRequest
from kvflow.storage.store_thread import Direction, StoreThread
from kvflow.transport.base import AgentName, PostedRead, ReadEnded, TransportError

STORE_AGENT = AgentName("store")
"""Agent name of all copies to and from files in the queue of permits (`FlightResources.permit_queue`). The reads of
loads have the peer's agent name there."""


class StoreQueue(NamedTuple):
    """The store as `flight.AgentOwner`."""

    agent: AgentName = STORE_AGENT


class FileSource(NamedTuple):
    """An open file as the source of a flight's reads (`flight.ReadSource`)."""

    connection: StoreQueue
    proof: SealProof


def file_source() -> FileSource:
    """Return an open file as a source. It cannot go away, so its bytes need no seal; digests prove them."""
    proof = SealProof(grows=False, quick_read_max_s=0.0)
    proof.note_fetched(0, 0.0)
    return FileSource(StoreQueue(), proof)


class StoreTransfer:
    """One save or restore. If a restore ends while bytes may still land, the error's `quarantine` is this object.

    Until all copies of bytes have stopped, a restore's blocks are claimed, and a save's blocks are leased, so that
    nothing else writes to them.
    """

    behind = False

    def __init__(
        self,
        request: StoreRequest,
        direction: Direction,
        tables: Sequence[BlockIds],
        entries: BlockIds,
        resources: FlightResources,
        store_thread: StoreThread,
        deadline_s: float,
    ) -> None:
        """Claim the blocks to fill, or lease the blocks to save. Raise BlocksBusy if a block is already in use.

        `request`: checked already. `tables`: block ids by group. `entries`: the same blocks, as numbered in the ledger
        of claimed and leased blocks. `resources`: objects that all loads, saves and restores share. `deadline_s`:
        seconds from now until the deadline.
        """
        loop = asyncio.get_running_loop()
        self.request, self.direction, self.tables = request, direction, tables
        self.timeout = asyncio.timeout_at(loop.time() + deadline_s)
        self.ended: asyncio.Future[None] = loop.create_future()
        self.leased_entries = entries if direction is Direction.SAVE else entries[:0]
        resources.ledger.lease(self.leased_entries)
        written = entries[len(self.leased_entries) :]
        self.flight = Flight(request.request_id, written, (), request.priority, replace(resources, poller=self))
        self.phase, self.seconds = PHASES[0], dict.fromkeys(PHASES, 0.0)
        self.outcome = "failed"
        """Field of `StoreStatistics` that the transfer increases by 1 at its end, such as "saved"."""
        self.file: EntryFile | None = None
        """The file to write or read; None until it is known. From then on a save has room reserved in the index, and a
        restore counts as a reader of the file's index entry.
        """
        self.error: TransportError | None = None
        """Error of the first copy of bytes that failed, or None."""
        self._store_thread = store_thread
        self._now_s = resources.clock.now_s
        self._phase_begun_s = self._now_s()

    def __repr__(self) -> str:
        return f"<StoreTransfer {self.direction} {self.flight!r}>"

    def begin_phase(self, phase: str) -> None:
        """End the current phase, add its seconds to `seconds`, and begin `phase`, one of `PHASES`."""
        now_s = self._now_s()
        self.seconds[self.phase] += now_s - self._phase_begun_s
        self.phase, self._phase_begun_s = phase, now_s

    def expire(self) -> None:
        """Make the transfer fail soon, as if its deadline had passed."""
        with contextlib.suppress(RuntimeError):  # the deadline has passed, or the transfer has its outcome
            self.timeout.reschedule(asyncio.get_running_loop().time())

    def post(self, _agent: AgentName, descriptors: Descriptors, on_end: OnReadEnd) -> None:
        """Start a copy of bytes between memory and the file. Call `on_end` when the copy has stopped.

        Raise TransportBroken if the I/O thread has ended.
        """
        move = PostedRead(descriptors.size_bytes)

        def ended(error: TransportError | RuntimeBroken | None) -> None:
            if isinstance(error, RuntimeBroken):
                on_end(error)
                return
            self.error = self.error or error
            on_end(ReadEnded(move, error, 0.0))

        self._store_thread.post(descriptors, self.direction, ended, self._on_loss)

    async def stop(self, grace_s: float) -> None:
        """Wait at most `grace_s` until the transfer is over. If bytes may still land then, quarantine its blocks."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + grace_s
        await self.flight.stop(grace_s)
        if not self.ended.done():
            await asyncio.wait([self.ended], timeout=until_s - loop.time())

    def _on_loss(self, error: TransportError) -> None:
        """Callback when a copy of bytes has failed but may still run: make the transfer fail soon, with `error`."""
        self.error = self.error or error
        self.expire()

    # --- as a quarantine

    @property
    def quarantined(self) -> bool:
        """True for a restore that has ended while bytes may still land in its blocks."""
        return self.flight.state is TransferState.QUARANTINED and self.direction is Direction.RESTORE

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(ids.tolist()) for ids in self.tables)

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Block ids of the transfer; if there are several groups, the block ids of the first group."""
        return self.block_tables[0]

    @property
    def safe(self) -> bool:
        """True once no byte can land in the transfer's blocks."""
        return self.flight.safe

    async def settled(self) -> None:
        """Wait until no byte can land in the transfer's blocks.

        Raise RuntimeBroken if that can never be known, and UsageError if this is not the runtime's event loop.
        """
        await self.flight.settled()
