"""One load's bytes: posts its reads, knows when the last one has stopped, and so when the blocks are safe.

Posted reads cannot be taken back (NIXL: releasing a handle does not stop the bytes). So a load that ends early waits
here for its posted reads, up to a bound; past it the blocks are quarantined, and this object outlives the load until
they are safe (invariant I1).

A load's bytes come in batches. Most are one read each, straight into the cache. A batch that cannot land there goes
through buffers: it has reads from one or several ranks and, when the last of them has landed, a copy to run on the
copy thread. A copy under way is as little to be taken back as a read, so it counts as one.

Every read takes its turn in the runtime's budget before it is posted, and has it until it has stopped, quarantined or
not. A load asks for one turn at a time, so loads that want the same peer take turns read by read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from kvflow.core.plan.descriptors import BlockIds, Descriptors, Piece
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.policy.queue import Permit, PermitState
from kvflow.core.policy.states import TRANSFER_TABLE, TransferEvent, TransferState, fire, transfer_blocks_safe
from kvflow.core.protocol.seals import fetch_seal
from kvflow.errors import RuntimeBroken
from kvflow.runtime.clock import Clock
from kvflow.runtime.consumer.read_queue import Budget, InFlight
from kvflow.runtime.memory.copy_thread import CopyThread
from kvflow.runtime.phases import Stopwatch
from kvflow.runtime.poller import Poller
from kvflow.transport.base import AgentName, PostedRead, ReadEnded, TransportError

_STAGED_LOOK_FIRST_S, _STAGED_LOOK_MOST_S = 0.0005, 0.01


class Seal(NamedTuple):
    """How one load asks for its lease's seal."""

    piece: Piece
    carried: bool
    """Whether a read of blocks may fetch it, too; else it takes a read of its own."""
    missing: Callable[[], int | None]
    """How many of the lease's blocks cannot be read yet, by what was fetched last; None if it is not the lease's."""
    quick_read_max_s: float


class Stream:
    """What one load reads from one rank, and what it knows of that rank's lease."""

    def __init__(self, agent: AgentName, seal: Seal, *, not_expired_before_s: float, staged: bool) -> None:
        self.agent = agent
        self.seal = seal
        self.not_expired_before_s = not_expired_before_s
        """Until when the lease cannot have run out by its clock; a later read asks for its seal first."""
        self.staged = staged
        """Whether the rank fills host buffers before they can be read, so that reads have to wait for it."""
        self.fetching: PostedRead | None = None

    @property
    def intact(self) -> bool:
        """Whether the seal that was fetched last is the lease's."""
        return self.seal.missing() is not None


class Read(NamedTuple):
    """One read of a batch; from a staged rank only when at most `missing_max` blocks are missing there."""

    stream: Stream
    descriptors: Descriptors
    missing_max: int = 0
    carries_seal: bool = False


class CopyGroup(NamedTuple):
    """Reads that belong together, and what happens when all have landed."""

    reads: Sequence[Read]
    copy: Callable[[], None] | None = None
    """Runs on the copy thread once all reads have landed."""
    release: Callable[[], None] | None = None
    """Runs on the loop once nothing can touch the batch's buffers any more."""


class CopyFailed(Exception):
    """A copy between buffers and the cache raised; `__cause__` says what."""


class _Running:
    """A batch that was begun: how many of its reads are under way, and whether it is worth copying."""

    def __init__(self, batch: CopyGroup) -> None:
        self.batch = batch
        self.pending = 1  # the beginning counts as one
        self.intact = True


class _UnderWay(NamedTuple):
    """A read that is posted."""

    stream: Stream
    running: _Running | None
    """Its batch; None if it only fetches a seal."""
    turn: Permit


class Transfer:
    """The bytes of one load into `ids`; also the `errors.Quarantine` of a load that ended too early.

    It claims its blocks in the ledger when it is made (BlocksBusy if it cannot) and gives them back when they are
    safe, calling `on_safe` then.
    """

    def __init__(
        self,
        request_id: str,
        ids: BlockIds,
        ledger: BlockLedger,
        poller: Poller,
        copier: CopyThread,
        clock: Clock,
        on_safe: Callable[[Transfer], None],
        *,
        budget: Budget,
        priority: int,
        watch: Stopwatch,
    ) -> None:
        ledger.begin_load(ids)
        self.request_id = request_id
        self.state = TransferState.PENDING
        self.post_s = 0.0
        self.descriptor_count = 0
        self.size_bytes = 0
        self.failed: Stream | None = None
        """Whose read failed first."""
        self._ids = ids
        self._ledger = ledger
        self._poller = poller
        self._copier = copier
        self._clock = clock
        self._on_safe = on_safe
        self._budget = budget
        self._priority = priority
        self._watch = watch
        self._reads: dict[PostedRead, _UnderWay] = {}
        self._lost: list[_Running] = []
        self._copies = 0
        self._error: TransportError | CopyFailed | None = None
        self._progress: asyncio.Future[None] | None = None
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<Transfer {self.request_id} {self.state}, {self._under_way} reads and copies under way>"

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(self._ids.tolist())

    @property
    def safe(self) -> bool:
        """Whether no byte can land in the blocks any more."""
        return transfer_blocks_safe(self.state)

    async def settled(self) -> None:
        """Return once the blocks are safe. RuntimeBroken if that can never be known because the transport died."""
        await asyncio.shield(self._end)

    async def read(
        self, streams: Sequence[Stream], batches: AsyncGenerator[CopyGroup, None], in_flight_max: int
    ) -> bool:
        """Read all batches, at most `in_flight_max` reads at once, and the seals; whether those vouch for the data.

        A seal is fetched with its stream's first read: if it is broken no further batch is posted, and if all are
        intact and the whole read was quick, that is enough; else they are fetched once more at the end
        (`core.protocol.seals` has the two arguments). Raises the first TransportError or CopyFailed, or RuntimeBroken;
        `stop` has to follow. Cancelling posts no more.
        """
        assert streams, "a load with blocks to fill reads from somebody"
        self._fire(TransferEvent.POST)
        begun_s = self._clock.now_s()
        async with aclosing(batches):
            async for batch in batches:
                if not await self._begin(batch, in_flight_max):
                    break
        await self._wait_until_below(1)
        intact = all(stream.intact for stream in streams)
        if intact and self._clock.now_s() - begun_s >= min(stream.seal.quick_read_max_s for stream in streams):
            for stream in streams:
                await self._fetch_seal(stream)
            await self._wait_until_below(1)
            intact = all(stream.intact for stream in streams)
        self._fire(TransferEvent.LAND)
        return intact

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
        stream, running, turn = self._reads.pop(event.read)
        self._budget.give_back(turn)
        self.post_s += event.post_s
        if event.error is not None and self._error is None:
            self._error, self.failed = event.error, stream
        if running is not None:
            self._ended(running, intact=event.error is None)
        self._note_progress()

    def read_lost(self, read: PostedRead, error: RuntimeBroken) -> None:
        """From the poller: it ended, so it will never be known when these bytes have stopped."""
        _, running, turn = self._reads.pop(read)
        self._budget.give_back(turn)
        if running is not None:
            self._lost.append(running)
        if not self._end.done():
            self._end.set_exception(error)
            self._end.exception()  # seen: there may be nobody who waits
        self._wake()

    def all_stopped(self) -> None:
        """The poller ended first, but then the transport was closed in good order: what was lost has stopped, too."""
        lost, self._lost = self._lost, []
        for running in lost:
            self._ended(running, intact=False)
        if self.state is TransferState.QUARANTINED and not self._copies:
            self._end = asyncio.get_running_loop().create_future()
            self._stop_if_last()

    @property
    def _under_way(self) -> int:
        return len(self._reads) + self._copies

    async def _begin(self, batch: CopyGroup, in_flight_max: int) -> bool:
        """Post a batch's reads when there is room; False if a lease turned out to be over. The batch ends by itself."""
        running = _Running(batch)
        begun = False
        try:
            for read in batch.reads:
                await self._wait_until_below(in_flight_max)
                if not await self._readable(read):
                    return False
                await self._read_in_turn(read, running)
            begun = True
        finally:
            self._ended(running, intact=begun)
        return True

    async def _readable(self, read: Read) -> bool:
        """Whether the lease still stands, as far as is known; waits until a staged rank has the blocks of the read.

        Before anything is read from a rank whose lease may have run out its seal is asked for, too.
        """
        stream = read.stream
        if not stream.staged and stream.fetching is not None:
            return stream.fetching in self._reads or stream.intact
        if not stream.staged and self._clock.now_s() < stream.not_expired_before_s:
            return True
        look_s = _STAGED_LOOK_FIRST_S
        while stream.fetching is None or (stream.seal.missing() or 0) > read.missing_max:
            if stream.fetching is not None:
                await asyncio.sleep(look_s)
                look_s = min(2 * look_s, _STAGED_LOOK_MOST_S)
            await self._fetch_seal(stream)
            while stream.fetching in self._reads:
                await self._wait_for_progress()
        return stream.intact

    async def _read_in_turn(self, read: Read, running: _Running) -> None:
        stream, descriptors = read.stream, read.descriptors
        posted = await self._post(stream, descriptors, running)
        self.descriptor_count += len(descriptors)
        self.size_bytes += descriptors.size_bytes
        running.pending += 1
        if read.carries_seal:
            stream.fetching = posted
            self.descriptor_count -= 1
            self.size_bytes -= stream.seal.piece.size_bytes
        elif stream.fetching is None:
            await self._fetch_seal(stream)

    async def _fetch_seal(self, stream: Stream) -> None:
        stream.fetching = await self._post(stream, fetch_seal(stream.seal.piece), None)

    async def _post(self, stream: Stream, descriptors: Descriptors, running: _Running | None) -> PostedRead:
        """Post a read when it is its turn; raises what has gone wrong while it waited."""
        amount = InFlight(descriptors.size_bytes, len(descriptors), 1)
        turn = self._budget.ask(stream.agent, amount, self._priority)
        if turn.state is PermitState.WAITING:
            self._watch.enter("queued")
            await self._budget.wait(turn)
            self._watch.enter("wire")
        try:
            if self._error is not None:
                raise self._error
            posted = self._poller.read(self, stream.agent, descriptors)
        except BaseException:
            self._budget.give_back(turn)
            raise
        self._reads[posted] = _UnderWay(stream, running, turn)
        return posted

    def _ended(self, running: _Running, *, intact: bool) -> None:
        """One part of a batch is over; after the last one its copy runs, or its buffers are given back."""
        running.intact = running.intact and intact
        running.pending -= 1
        if running.pending:
            return
        copy = running.batch.copy
        if copy is not None and running.intact and self.state is TransferState.READING and self._error is None:
            self._copies += 1
            self._copier.submit(copy, lambda error: self._copied(running, error))
        elif running.batch.release is not None:
            running.batch.release()

    def _copied(self, running: _Running, error: BaseException | None) -> None:
        self._copies -= 1
        if error is not None and self._error is None:
            self._error = CopyFailed(str(error))
            self._error.__cause__ = error
        if running.batch.release is not None:
            running.batch.release()
        self._note_progress()

    async def _wait_until_below(self, count: int) -> None:
        """Wait until fewer than `count` reads and copies are under way; raises what has gone wrong once all stopped."""
        while self._under_way >= (1 if self._error else count):
            await self._wait_for_progress()
        if self._end.done():
            self._end.result()
        if self._error is not None:
            raise self._error

    async def _wait_for_progress(self) -> None:
        self._progress = asyncio.get_running_loop().create_future()
        await self._progress

    def _note_progress(self) -> None:
        self._stop_if_last()
        self._wake()

    def _wake(self) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    def _stop_if_last(self) -> None:
        lost = self._end.done()
        if not lost and not self._under_way and self.state in (TransferState.STOPPING, TransferState.QUARANTINED):
            self._fire(TransferEvent.LAST_STOPPED)
            self._settle()

    def _settle(self) -> None:
        if not self._end.done():
            self._ledger.end_load(self._ids)
            self._end.set_result(None)
            self._on_safe(self)

    def _fire(self, event: TransferEvent) -> None:
        self.state = fire(TRANSFER_TABLE, self.state, event)
