"""One save or restore. A flight moves the bytes, like those of a load, but by the store's I/O thread.

A lost move (`storage.store_thread`) makes the transfer fail at once. It counts as under way until it is known to have
stopped, so the flight keeps its blocks and its permit until then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

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

if TYPE_CHECKING:
    from kvflow.runtime.peers.peer import Source

STORE_AGENT = AgentName("store")
"""Name by which moves of files take permits, in the queue in which reads have the name of their peer's agent."""


def file_source() -> Source:
    """Return a stand-in for the `Source` of a flight, for moves of an open file.

    An open file cannot go away, so no seal is needed; digests prove the bytes.
    """
    proof = SealProof(grows=False, quick_read_max_s=0.0)
    proof.note_fetched(0, 0.0)
    return cast("Source", SimpleNamespace(connection=SimpleNamespace(agent=STORE_AGENT), proof=proof))


class StoreTransfer:
    """A save or restore under way. Also the `quarantine` of a restore that has ended while bytes may still land.

    The flight claims the blocks of a restore. The blocks of a save are leased until all moves have stopped, and are not
    written. A transfer is over when its blocks are given back and its file is closed.
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
        """Claim the blocks to fill, or lease the blocks to save. Raises BlocksBusy.

        Args:
            request: the request, checked.
            direction: save or restore.
            tables: block ids by group.
            entries: the same blocks, as ledger entries.
            resources: objects that all flights share.
            store_thread: the I/O thread that moves the bytes.
            deadline_s: seconds from now until the transfer fails.
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
        """Name of the count in `StoreStatistics` to which the transfer is added at its end."""
        self.file: EntryFile | None = None
        """The file to write or read, once known. A save has then reserved room; a restore counts as a reader."""
        self.error: TransportError | None = None
        """Error of the first move that failed; else None."""
        self._store_thread = store_thread
        self._now_s = resources.clock.now_s
        self._phase_begun_s = self._now_s()

    def __repr__(self) -> str:
        return f"<StoreTransfer {self.direction} {self.flight!r}>"

    def begin_phase(self, phase: str) -> None:
        """Begin `phase`, and add the time since the last call to the phase that ends."""
        now_s = self._now_s()
        self.seconds[self.phase] += now_s - self._phase_begun_s
        self.phase, self._phase_begun_s = phase, now_s

    def expire(self) -> None:
        """End the transfer soon, as if its deadline had passed."""
        with contextlib.suppress(RuntimeError):  # the deadline has passed, or the transfer has its outcome
            self.timeout.reschedule(asyncio.get_running_loop().time())

    def post(self, _agent: AgentName, descriptors: Descriptors, on_end: OnReadEnd) -> None:
        """Start a move for the flight; call `on_end` when it has stopped. TransportBroken if the thread has ended."""
        move = PostedRead(descriptors.size_bytes)

        def ended(error: TransportError | RuntimeBroken | None) -> None:
            if isinstance(error, RuntimeBroken):
                on_end(error)
                return
            self.error = self.error or error
            on_end(ReadEnded(move, error, 0.0))

        self._store_thread.post(descriptors, self.direction, ended, self._on_loss)

    async def stop(self, grace_s: float) -> None:
        """Wait until the transfer is over, for at most `grace_s`: see `Flight.stop`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + grace_s
        await self.flight.stop(grace_s)
        if not self.ended.done():
            await asyncio.wait([self.ended], timeout=until_s - loop.time())

    def _on_loss(self, error: TransportError) -> None:
        """Callback when a move has failed but may still run: make the transfer fail soon."""
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
        """Block ids by group."""
        return tuple(tuple(ids.tolist()) for ids in self.tables)

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Block ids of the transfer; if there are several groups, those of the first."""
        return self.block_tables[0]

    @property
    def safe(self) -> bool:
        """True once no byte can land in the blocks."""
        return self.flight.safe

    async def settled(self) -> None:
        """Wait until no byte can land in the blocks.

        Raises RuntimeBroken if that can never be known, and UsageError off the runtime's loop.
        """
        await self.flight.settled()
