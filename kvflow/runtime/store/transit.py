"""The moves of one save or restore: posts them, knows when the last has stopped, and so when the blocks are safe.

It is to the store what `consumer.flight` is to loads: a move cannot be taken back, so who ends early waits here for
what is posted, up to a bound. Past it the blocks of a restore are quarantined; those of a save stay leased (invariant
I1). Every move takes a permit of the queue that reads take theirs from, so the two share what may be in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from kvflow.core.plan.descriptors import BlockIds, Descriptors
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.policy.queue import FairQueue, Permit, PermitState
from kvflow.core.policy.states import TRANSFER_TABLE, TransferEvent, TransferState, fire, transfer_blocks_safe
from kvflow.errors import RuntimeBroken
from kvflow.runtime.memory.pool import granted
from kvflow.runtime.own_loop import require_loop
from kvflow.transport.base import TransportError
from kvflow.transport.files import Direction, Files, MoveLost

STORE = "store"
"""Whose permits they are: the store's, as if it were a peer."""


class MoveGear(NamedTuple):
    """What all of a store's moves share."""

    ledger: BlockLedger
    queue: FairQueue
    files: Files
    now_s: Callable[[], float]
    moves_max: int
    """Of one save or restore at once."""


class Transit:
    """One save or restore under way. It claims its blocks when it is made (BlocksBusy if it cannot).

    Of a restore that has ended while bytes may still land it is the `quarantine` of the error.
    """

    def __init__(
        self,
        request_id: str,
        tables: Sequence[BlockIds],
        entries: BlockIds,
        direction: Direction,
        gear: MoveGear,
        on_safe: Callable[[], None],
    ) -> None:
        ledger, saves = gear.ledger, direction is Direction.SAVE
        self._give_back = ledger.release if saves else ledger.end_load
        (ledger.lease if saves else ledger.begin_load)(entries)
        self.request_id = request_id
        self.state = TransferState.PENDING
        self.size_bytes = 0
        self.queued_s = 0.0
        self.direction = direction
        self._tables = tables
        self._entries = entries
        self._gear = gear
        self._on_safe = on_safe
        self._under_way = 0
        self._lost = 0
        self._settled = False
        self.error: TransportError | None = None
        """What went wrong first."""
        self._progress: asyncio.Future[None] | None = None
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<{self.direction} {self.request_id} {self.state}, {self._under_way} moves under way>"

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Its blocks; those of the first group, if there are several."""
        return self.block_tables[0]

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """Its blocks, by group."""
        return tuple(tuple(ids.tolist()) for ids in self._tables)

    @property
    def safe(self) -> bool:
        """Whether no byte can land in its blocks any more."""
        return transfer_blocks_safe(self.state)

    @property
    def quarantined(self) -> bool:
        return self.state is TransferState.QUARANTINED and self.direction is Direction.RESTORE

    async def settled(self) -> None:
        """Return once no byte can land any more. RuntimeBroken if that can never be known.

        UsageError off the runtime's loop.
        """
        if not self._end.done():
            require_loop(self._end.get_loop(), f"request {self.request_id!r}: settled()")
        await asyncio.shield(self._end)

    async def run(self, slices: Iterable[Descriptors], priority: int) -> None:
        """Move everything. Raises the first TransportError; `stop` has to follow then. Cancelling posts no more."""
        gear = self._gear
        if self.state is TransferState.PENDING:
            self.state = fire(TRANSFER_TABLE, self.state, TransferEvent.POST)
        for descriptors in slices:
            await self._wait_until_below(gear.moves_max)
            asked_s = gear.now_s()
            permit = gear.queue.ask((descriptors.size_bytes, len(descriptors), 1), STORE, priority)
            if permit.state is PermitState.WAITING:
                await granted(gear.queue, permit)
            posted_s = gear.now_s()
            self.queued_s += posted_s - asked_s
            try:
                if self.error is not None:
                    raise self.error
                gear.files.post(descriptors, self.direction, partial(self._moved, permit, posted_s), self._stopped)
            except BaseException:
                gear.queue.end(permit)
                raise
            self._under_way += 1
            self.size_bytes += descriptors.size_bytes
        await self._wait_until_below(1)

    def land(self) -> None:
        """All is done, and what is in the blocks is right."""
        if self.state is TransferState.PENDING:
            self.state = fire(TRANSFER_TABLE, self.state, TransferEvent.POST)
        self.state = fire(TRANSFER_TABLE, self.state, TransferEvent.LAND)
        self._settle()

    def abandon(self) -> None:
        """It ends early, or badly: nothing more is posted."""
        if self.state in (TransferState.PENDING, TransferState.READING):
            self.state = fire(TRANSFER_TABLE, self.state, TransferEvent.ABANDON)
        if self.state is TransferState.STOPPED:
            self._settle()
        self._note_end()

    def quarantine(self) -> None:
        """It was waited for long enough."""
        if self.state is TransferState.STOPPING:
            self.state = fire(TRANSFER_TABLE, self.state, TransferEvent.OVERDUE)
            if self.direction is Direction.RESTORE:
                self._gear.ledger.quarantine(self._entries)

    def all_stopped(self) -> None:
        """The store's thread has ended in good order: what was lost has stopped, too."""
        self._under_way -= self._lost
        self._lost = 0
        self._note_end()

    def never_known(self, cause: RuntimeBroken) -> None:
        """The store could not be closed: nobody will ever tell when its bytes have stopped."""
        if not self._end.done():
            self._end.set_exception(cause)
            self._end.exception()  # seen: there may be nobody who waits

    def _moved(self, permit: Permit, posted_s: float, error: TransportError | None) -> None:
        self._gear.queue.end(permit, 0.0 if error else self._gear.now_s() - posted_s)
        if error is not None and self.error is None:
            self.error = error
        if isinstance(error, MoveLost):
            self._lost += 1
        else:
            self._under_way -= 1
        self._note_end()

    def _stopped(self) -> None:
        """A move that was lost has stopped."""
        self._lost -= 1
        self._under_way -= 1
        self._note_end()

    async def _wait_until_below(self, count: int) -> None:
        """Wait until fewer than `count` moves are under way; raises what has gone wrong once all known ones stopped."""
        while self._under_way - self._lost >= (1 if self.error else count):
            self._progress = asyncio.get_running_loop().create_future()
            await self._progress
        if self.error is not None:
            raise self.error

    def _note_end(self) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)
        stopping = self.state is TransferState.STOPPING or self.state is TransferState.QUARANTINED
        if stopping and not self._under_way:
            self.state = fire(TRANSFER_TABLE, self.state, TransferEvent.LAST_STOPPED)
            self._settle()

    def _settle(self) -> None:
        if self._settled:
            return
        self._settled = True
        self._give_back(self._entries)
        if not self._end.done():  # else who waits was told that nobody will ever know
            self._end.set_result(None)
        self._on_safe()
