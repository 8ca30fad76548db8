"""One load's bytes: posts its reads, knows when the last one has stopped, and so when the blocks are safe.

Posted reads cannot be taken back (NIXL: releasing a handle does not stop the bytes). So a load that ends early waits
here for its posted reads, up to a bound; past it the blocks are quarantined, and this object outlives the load until
they are safe (invariant I1).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvflow.core.ledger import BlockLedger
from kvflow.core.plan import BlockIds, Descriptors, Piece
from kvflow.core.seals import fetch_seal
from kvflow.core.states import TRANSFER_TABLE, TransferEvent, TransferState, fire
from kvflow.errors import RuntimeBroken
from kvflow.runtime.poller import Poller
from kvflow.transport.base import AgentName, PostedRead, ReadEnded, TransportError

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Seal(NamedTuple):
    """How one load asks for its lease's seal."""

    piece: Piece
    carried: bool
    """Whether the first slice fetches it too; else it takes a read of its own."""
    intact: Callable[[], bool]
    """Whether what was fetched last is the id of the load's lease."""
    trust_s: float


class Transfer:
    """The bytes of one load into `ids`; also the `errors.Quarantine` of a load that ended too early.

    It claims its blocks in the ledger when it is made (BlocksBusy if it cannot) and gives them back when they are
    safe, calling `on_safe` then.
    """

    def __init__(
        self, request_id: str, ids: BlockIds, ledger: BlockLedger, on_safe: Callable[[Transfer], None]
    ) -> None:
        ledger.begin_load(ids)
        self.request_id = request_id
        self.state = TransferState.PENDING
        self.post_s = 0.0
        self.descriptor_count = 0
        self._ids = ids
        self._ledger = ledger
        self._on_safe = on_safe
        self._reads: set[PostedRead] = set()
        self._error: TransportError | None = None
        self._progress: asyncio.Future[None] | None = None
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<Transfer {self.request_id} {self.state}, {len(self._reads)} reads under way>"

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(self._ids.tolist())

    @property
    def safe(self) -> bool:
        """Whether no byte can land in the blocks any more."""
        return self._end.done() and self._end.exception() is None

    async def wait(self) -> None:
        """Return once the blocks are safe. RuntimeBroken if that can never be known because the transport died."""
        await asyncio.shield(self._end)

    async def read(
        self, poller: Poller, peer: AgentName, slices: Iterator[Descriptors], seal: Seal, in_flight_max: int
    ) -> bool:
        """Read all slices, at most `in_flight_max` at once, and the seal; whether it vouches for the data.

        The seal is fetched with the first slice: if it is broken no further slice is posted, and if it is intact and
        the whole read was quick, that is enough; else it is fetched once more at the end (`core.seals` has the two
        arguments). Raises the first TransportError, or RuntimeBroken; `stop` has to follow. Cancelling posts no more.
        """
        self._fire(TransferEvent.POST)
        begun_s = _clock_s()
        first = next(slices)
        self.descriptor_count += len(first) - seal.carried
        sealed = self._post(poller, peer, first)
        if not seal.carried:
            sealed = self._post(poller, peer, fetch_seal(seal.piece))
        for descriptors in slices:
            await self._wait_until_below(in_flight_max)
            if sealed not in self._reads and not seal.intact():
                break
            self.descriptor_count += len(descriptors)
            self._post(poller, peer, descriptors)
        await self._wait_until_below(1)
        if seal.intact() and _clock_s() - begun_s >= seal.trust_s:
            self._post(poller, peer, fetch_seal(seal.piece))
            await self._wait_until_below(1)
        self._fire(TransferEvent.LAND)
        return seal.intact()

    def finish(self) -> None:
        """The load has judged what landed: give the blocks back."""
        assert self.state is TransferState.LANDED
        self._settle()

    async def stop(self, grace_s: float) -> bool:
        """End the transfer whatever it is doing: wait up to `grace_s` for posted reads. Whether the blocks are safe.

        This is the one place that holds cancellation back: a cancel that arrives while it waits is raised at its end.
        """
        cancelled = False
        if self.state in (TransferState.PENDING, TransferState.READING):
            self._fire(TransferEvent.ABANDON)
        if self.state is TransferState.STOPPING:
            self._stop_if_last()
            cancelled = await self._hold(grace_s)
        if self.state is TransferState.STOPPING:
            self._fire(TransferEvent.OVERDUE)
            self._ledger.quarantine(self._ids)
        elif not self._end.done():
            self._settle()
        if cancelled:
            raise asyncio.CancelledError
        return self.safe

    async def _hold(self, grace_s: float) -> bool:
        """Wait for the last read to stop, or `grace_s`; whether a cancel arrived meanwhile."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + grace_s
        cancelled = False
        while not self._end.done() and (left_s := deadline_s - loop.time()) > 0:
            try:
                await asyncio.wait([self._end], timeout=left_s)
            except asyncio.CancelledError:
                cancelled = True
        return cancelled

    def read_ended(self, event: ReadEnded) -> None:
        """From the poller: one read has stopped."""
        self._reads.discard(event.read)
        self.post_s += event.post_s
        self._error = self._error or event.error
        self._stop_if_last()
        self._wake()

    def read_lost(self, read: PostedRead, error: RuntimeBroken) -> None:
        """From the poller: it ended, so it will never be known when these bytes have stopped."""
        self._reads.discard(read)
        if not self._end.done():
            self._end.set_exception(error)
            self._end.exception()  # seen: there may be nobody who waits
        self._wake()

    def _post(self, poller: Poller, peer: AgentName, descriptors: Descriptors) -> PostedRead:
        read = poller.read(self, peer, descriptors)
        self._reads.add(read)
        return read

    async def _wait_until_below(self, count: int) -> None:
        """Wait until fewer than `count` reads are under way; raises what has gone wrong once all have stopped."""
        while len(self._reads) >= (1 if self._error else count):
            self._progress = asyncio.get_running_loop().create_future()
            await self._progress
        if self._end.done():
            self._end.result()
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    def _stop_if_last(self) -> None:
        lost = self._end.done()
        if not lost and not self._reads and self.state in (TransferState.STOPPING, TransferState.QUARANTINED):
            self._fire(TransferEvent.LAST_STOPPED)
            self._settle()

    def _settle(self) -> None:
        if not self._end.done():
            self._ledger.end_load(self._ids)
            self._end.set_result(None)
            self._on_safe(self)

    def _fire(self, event: TransferEvent) -> None:
        self.state = fire(TRANSFER_TABLE, self.state, event)


def _clock_s() -> float:
    """A clock that goes on while the machine is suspended, where there is one."""
    return time.clock_gettime(_CLOCK)
