"""One save or restore: its flight moves the bytes, as that of a load does, and posts them here instead of to a poller.

A move that was lost (`storage.files`) is under way until it is known to have stopped, so the flight holds its blocks
and its permit. The transfer fails at once.
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
from kvflow.runtime.load.flight_resources import FlightResources, Told
from kvflow.storage.disk import EntryFile
from kvflow.storage.files import Direction, Files
from kvflow.storage.storage_requests import PHASES, StoreRequest
from kvflow.transport.base import AgentName, PostedRead, ReadEnded, TransportError

if TYPE_CHECKING:
    from kvflow.runtime.peers.peer import Source

STORE = AgentName("store")
"""Name of the store as a peer of the queue of permits."""


def opened_file() -> Source:
    """Make the source of a flight that reads an open file, which cannot go meanwhile: digests prove its bytes."""
    proof = SealProof(grows=False, quick_read_max_s=0.0)
    proof.heard(0, 0.0)
    return cast("Source", SimpleNamespace(connection=SimpleNamespace(agent=STORE), proof=proof))


class StoreTransfer:
    """A save or restore under way; also the `quarantine` of a restore that has ended while bytes may still land.

    The flight claims the blocks of a restore. The blocks of a save are leased until the flight is safe, which writes
    none of them. A transfer is over when its blocks are given back and its file is put away.
    """

    behind = False

    def __init__(
        self,
        request: StoreRequest,
        direction: Direction,
        tables: Sequence[BlockIds],
        entries: BlockIds,
        resources: FlightResources,
        files: Files,
        deadline_s: float,
    ) -> None:
        """Claim the blocks. Raises BlocksBusy.

        Args:
            request: the request, checked.
            direction: a save or a restore.
            tables: blocks by group.
            entries: the same blocks as the ledger counts them.
            resources: the parts that flights share.
            files: moves the bytes.
            deadline_s: seconds from now until it fails.
        """
        loop = asyncio.get_running_loop()
        self.request, self.direction, self.tables = request, direction, tables
        self.timeout = asyncio.timeout_at(loop.time() + deadline_s)
        self.over: asyncio.Future[None] = loop.create_future()
        self.leased = entries if direction is Direction.SAVE else entries[:0]
        resources.ledger.lease(self.leased)
        written = entries[len(self.leased) :]
        self.flight = Flight(request.request_id, written, (), request.priority, replace(resources, poller=self))
        self.phase, self.seconds = PHASES[0], dict.fromkeys(PHASES, 0.0)
        self.outcome = "failed"
        """Outcome, as far as it is known."""
        self.file: EntryFile | None = None
        """The file that is written or read, with room for it, or counted as a reader of it."""
        self.error: TransportError | None = None
        """The first error of a move."""
        self._files = files
        self._now_s = resources.clock.now_s
        self._since_s = self._now_s()

    def __repr__(self) -> str:
        return f"<StoreTransfer {self.direction} {self.flight!r}>"

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        now_s = self._now_s()
        self.seconds[self.phase] += now_s - self._since_s
        self.phase, self._since_s = phase, now_s

    def hurry(self) -> None:
        """End soon, as if the deadline had passed."""
        with contextlib.suppress(RuntimeError):  # the deadline has passed, or there is an outcome
            self.timeout.reschedule(asyncio.get_running_loop().time())

    def post(self, _agent: AgentName, descriptors: Descriptors, told: Told) -> None:
        """Start a move of the flight. Raises TransportBroken once the store's thread has ended."""
        move = PostedRead(descriptors.size_bytes)

        def ended(error: TransportError | RuntimeBroken | None) -> None:
            if isinstance(error, RuntimeBroken):
                told(error)
                return
            self.error = self.error or error
            told(ReadEnded(move, error, 0.0))

        self._files.post(descriptors, self.direction, ended, self._lost)

    async def stop(self, grace_s: float) -> None:
        """Wait until it is over, or for `grace_s`: see `Flight.stop`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + grace_s
        await self.flight.stop(grace_s)
        if not self.over.done():
            await asyncio.wait([self.over], timeout=until_s - loop.time())

    def _lost(self, error: TransportError) -> None:
        """Fail now: the bytes of a move that has failed may still be on their way."""
        self.error = self.error or error
        self.hurry()

    # --- as a quarantine

    @property
    def quarantined(self) -> bool:
        """True for a restore that has ended and in whose blocks bytes may still land."""
        return self.flight.state is TransferState.QUARANTINED and self.direction is Direction.RESTORE

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """Blocks by group."""
        return tuple(tuple(ids.tolist()) for ids in self.tables)

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Blocks of the transfer; those of the first group, if there are several."""
        return self.block_tables[0]

    @property
    def safe(self) -> bool:
        """True once no byte can land in its blocks any more."""
        return self.flight.safe

    async def settled(self) -> None:
        """Return once no byte can land any more. RuntimeBroken if that can never be known.

        UsageError off the runtime's loop.
        """
        await self.flight.settled()
