"""One load's bytes: posts its reads, knows when the last one has stopped, and so when the blocks are safe.

Posted reads cannot be taken back (NIXL: releasing a handle does not stop the bytes). So a load that ends early waits
here for its posted reads, up to a bound; past it the blocks are quarantined, and the flight outlives the load until
they are safe (invariant I1).

A load's bytes come in copy groups. Most are one read each, straight into the cache. A group that cannot land there goes
through buffers: it has reads from one or several ranks and, when the last of them has landed, a copy to run on the copy
thread. A copy under way is as little to be taken back as a read, so it counts as one.

Every read needs a permit before it is posted, and has it until it has stopped, quarantined or not. Deadlock-free: a
permit is asked for when the read can be posted at once, so its holder waits for nobody, and what a load holds while it
waits (its admission, buffers) is never asked for by a holder of a permit.

The `Poller` is the one task that takes events from the transport. When it ends, for whatever reason, it settles every
flight, so nobody waits on a transport that nobody listens to any more (invariant I7). If a cache is unregistered that
is done once the transport has been closed, which waits for the reads: who waits for their end goes on with the runtime.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks, Descriptors, Piece
from kvflow.core.policy.history import History
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.policy.queue import FairQueue, Permit, PermitState
from kvflow.core.policy.states import TRANSFER_TABLE, TransferEvent, TransferState, fire, transfer_blocks_safe
from kvflow.core.protocol.freshness import SealTable, Step, Vouching, fetch_seal
from kvflow.errors import KVFlowError, RuntimeBroken, TransportBroken
from kvflow.runtime.clock import Clock
from kvflow.runtime.consumer.seal_watch import SealWatches, Told, WatchedSeal
from kvflow.runtime.memory.copy_thread import CopyThread
from kvflow.runtime.memory.digests import DigestGear
from kvflow.runtime.memory.pool import granted
from kvflow.runtime.own_loop import require_loop
from kvflow.runtime.peers.peer import Source
from kvflow.transport.base import AgentName, Notified, PostedRead, ReadEnded, Transport, TransportError

_SPEED_SHARE = 0.25  # of a new measurement in what is known


@dataclass(slots=True, eq=False)
class SourceRead:
    """What a load reads from one rank, and what it knows of that rank's lease."""

    origin: Source
    """The rank, connected, and its lease."""
    tables: Sequence[BlockIds]
    """The lease's blocks, by group."""
    seal: Piece
    """Where its seal is, and the word of ours that it is fetched to."""
    seal_index: int
    """Which word that is."""
    freshness: Vouching
    chunks: list[tuple[BlockMap, Chunks]] = field(default_factory=list)
    """With that rank's block ids, group after group."""
    watched: WatchedSeal | None = None
    """Its seal, while somebody looks at it because the lease grows."""
    known_tokens: int | None = None
    """How many tokens the blocks hold that are known, of a lease that gets more of them; None: all."""
    problem: KVFlowError | None = None
    """Why the others never will be."""
    speed: float = 0.0
    """Bytes per second of the reads of a lease that grows, as far as is known."""
    wake_at_missing: float = math.inf
    """A lease that grows is of interest again when no more of its tokens than that are missing."""

    def there(self, num_tokens: int) -> int:
        """How many of the lease's tokens may be read by now."""
        there = self.freshness.there(num_tokens)
        return there if self.known_tokens is None else min(there, self.known_tokens)

    @property
    def seen_s(self) -> float:
        """When the last look was posted that has found its lease open; of a lease that grows."""
        return max(self.freshness.seen_s, -math.inf if self.watched is None else self.watched.looked_s)


class Read(NamedTuple):
    """One read of a copy group."""

    source: SourceRead
    descriptors: Descriptors
    carries_seal: bool = False


class CopyGroup(NamedTuple):
    """Reads that belong together, and what happens when all have landed."""

    reads: Sequence[Read]
    copy: Callable[[], None] | None = None
    """Runs on the copy thread once all reads have landed."""
    release: Callable[[], None] | None = None
    """Runs on the loop once nothing can touch the group's buffers any more."""
    on_land: Callable[[float], None] | None = None
    """Told, with the time, once all of it is in the cache."""


NOTHING_YET = CopyGroup(())
"""In place of a group: what is to be read next is not there, or not worth a read, before a seal says more."""


class Routing(Protocol):
    """Where the bytes of loads go; see `memory.route.Route`."""

    def groups(
        self,
        sources: Sequence[SourceRead],
        tables: Sequence[BlockIds],
        num_tokens: int,
        tell: Callable[[int, int], None] | None = None,
        history: History | None = None,
    ) -> AsyncGenerator[CopyGroup, None]: ...


class CopyFailed(Exception):
    """A copy between buffers and the cache raised; `__cause__` says what."""


@dataclass(slots=True, eq=False)
class _Running:
    """A copy group that was begun: how many of its reads are under way, and whether it is worth copying."""

    group: CopyGroup
    pending: int = 1  # the beginning counts as one
    intact: bool = True


class _UnderWay(NamedTuple):
    """A read that is posted."""

    source: SourceRead
    permit: Permit
    running: _Running | None
    """Its copy group; None if it only fetches a seal."""
    fetches_seal: bool
    posted_s: float


class Poller:
    """Posts reads and dispatches events. `run` is the poller task's body."""

    def __init__(self, transport: Transport, on_notification: Callable[[bytes], None]) -> None:
        self._transport = transport
        self._on_notification = on_notification
        self._under_way: dict[PostedRead, Told] = {}
        self._cause: BaseException | None = None
        self._ended = self._patient = False

    @property
    def behind(self) -> bool:
        """See `Transport.behind`."""
        return self._transport.behind

    def post(self, agent: AgentName, descriptors: Descriptors, told: Told) -> None:
        """Post a read (see `Transport.post_read`); `told` is called once, when it ends."""
        if self._ended:
            raise RuntimeBroken("the transfer poller has ended") from self._cause
        self._under_way[self._transport.post_read(agent, descriptors)] = told

    async def run(self) -> None:
        """Dispatch events until cancelled or until the transport breaks, which raises TransportBroken."""
        try:
            await self._transport.run(self._dispatch)
        except BaseException as error:
            self._cause = error
            raise
        finally:
            self._ended = True
            if not self._patient:
                self.settle(stopped=False)

    def wait_for_transport(self) -> None:
        """When this ends its reads are not lost yet: the transport is about to be closed, which waits for them."""
        self._patient = True

    def settle(self, *, stopped: bool) -> None:
        """Nobody will hear of reads that are under way any more; they have `stopped`, or it is not known."""
        under_way, self._under_way = self._under_way, {}
        for posted, told in under_way.items():
            if stopped:
                told(ReadEnded(posted, TransportError("the transport was closed"), 0.0))
            else:
                lost = TransportBroken("the transfer poller ended while the read was under way")
                lost.__cause__ = self._cause
                told(lost)

    def _dispatch(self, event: ReadEnded | Notified) -> None:
        if isinstance(event, ReadEnded):
            self._under_way.pop(event.read)(event)
        else:
            self._on_notification(event.payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gear:
    """What all flights of a runtime share."""

    ledger: BlockLedger
    seals: SealTable
    """Where seals are fetched to."""
    queue: FairQueue
    """Bounds what is in flight: bytes, descriptors and reads, in all and from one rank."""
    poller: Poller
    watches: SealWatches
    """Of leases that grow."""
    copy_thread: CopyThread
    clock: Clock
    reads_max: int
    """Of one load at once, and as many copies; 2 hides the completion latency of the first."""
    digests: DigestGear


class Flight:
    """The bytes of one load into `ids`.

    It claims its blocks in the ledger when it is made (BlocksBusy if it cannot) and gives them back when they are
    safe, calling `on_safe` then.
    """

    def __init__(
        self,
        request_id: str,
        ids: BlockIds,
        priority: int,
        gear: Gear,
        enter: Callable[[str], None],
        on_safe: Callable[[Flight], None],
    ) -> None:
        """`enter` is told the load's phase: "queued" while a read waits for its permit, then "wire" again."""
        gear.ledger.begin_load(ids)
        self.request_id = request_id
        self.state = TransferState.PENDING
        self.post_s = 0.0
        self.descriptor_count = 0
        self.size_bytes = 0
        self.failed: SourceRead | None = None
        """Whose read failed first."""
        self.followed = False
        """Whether somebody wants to know how far it is: then leases that grow are looked at until it has ended."""
        self.on_wait: Callable[[], None] | None = None
        """Called once if not all is there at the first look at leases that grow."""
        self._ids = ids
        self._priority = priority
        self._gear = gear
        self._enter = enter
        self._on_safe = on_safe
        self._under_way = 0
        """Reads and copies that cannot be taken back."""
        self._begun_s: float | None = None
        """When the first read was posted: nothing of the peer's memory was seen before."""
        self._lost: list[_Running] = []
        self._copies = 0
        self._error: TransportError | CopyFailed | RuntimeBroken | None = None
        self._progress: asyncio.Future[None] | None = None
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<Flight {self.request_id} {self.state}, {self._under_way} reads and copies under way>"

    @property
    def safe(self) -> bool:
        """Whether no byte can land in the blocks any more."""
        return transfer_blocks_safe(self.state)

    async def settled(self) -> None:
        """Return once the blocks are safe. RuntimeBroken if that can never be known because the transport died.

        UsageError on another loop.
        """
        if not self._end.done():
            require_loop(self._end.get_loop(), f"request {self.request_id!r}: settled()")
        await asyncio.shield(self._end)

    async def read(
        self, sources: Sequence[SourceRead], groups: AsyncGenerator[CopyGroup, None], *, more: bool = False
    ) -> bool:
        """Read all groups, and the seals; whether those vouch for the data (`core.protocol.freshness` has the
        arguments).

        A seal is fetched with the first read from its rank: if it is broken no further group is posted. With `more` the
        blocks stay claimed: all may be read once more, and `land` or `stop` has to follow. Raises the
        first TransportError or CopyFailed, or RuntimeBroken; `stop` has to follow. Cancelling posts no more.
        """
        assert sources, "a load with blocks to fill reads from somebody"
        if self.state is TransferState.PENDING:
            self.state = fire(TRANSFER_TABLE, self.state, TransferEvent.POST)
        self._begun_s, grows = None, False
        for source in sources:
            grows = grows or source.freshness.grows
        try:
            if grows:  # from now on all are looked at, until they are complete or the read ends
                for source in sources:
                    self._watch(source)
            async for group in groups:
                if not await (self._see_more(sources) if group is NOTHING_YET else self._begin(group)):
                    break
        finally:
            for source in sources:
                if source.watched is not None:
                    self._unwatch(source)
            await groups.aclose()
        await self._wait_until_below(1)
        now_s = self._gear.clock.now_s()
        begun_s = now_s if self._begun_s is None else self._begun_s
        fresh, again = True, []
        for source in sources:
            seen_s = source.freshness.seen_s  # of a lease that grows, perhaps before anything was posted here
            verdict = source.freshness.judge(now_s - (seen_s if seen_s > -math.inf else begun_s))
            fresh = fresh and verdict is not Step.STALE
            if verdict is Step.FETCH:
                again.append(source)
        if fresh and again:
            for source in again:
                await self._fetch_seal(source)
            await self._wait_until_below(1)
            for source in again:
                fresh = fresh and source.freshness.judge(None) is Step.FRESH
        if not more:
            self.state = fire(TRANSFER_TABLE, self.state, TransferEvent.LAND)
            self._settle()
        return fresh

    def look_again(self) -> None:
        """Something has happened that it may wait for: blocks are known, or never will be."""
        self._note_end()

    def land(self) -> None:
        """After a read with `more`: there is none."""
        self.state = fire(TRANSFER_TABLE, self.state, TransferEvent.LAND)
        self._settle()

    async def stop(self, grace_s: float) -> bool:
        """End the flight whatever it is doing: wait up to `grace_s` for posted reads. Whether the blocks are safe.

        This is the one place that holds cancellation back: a cancel that arrives while it waits is raised at its end.
        """
        cancelled = False
        if self.state in (TransferState.PENDING, TransferState.READING):
            self.state = fire(TRANSFER_TABLE, self.state, TransferEvent.ABANDON)
        if self.state is TransferState.STOPPING:
            self._note_end()
            cancelled = await self._hold(grace_s)
        if self.state is TransferState.STOPPING:
            self.state = fire(TRANSFER_TABLE, self.state, TransferEvent.OVERDUE)
            self._gear.ledger.quarantine(self._ids)
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

    def _read_ended(self, read: _UnderWay, event: ReadEnded | RuntimeBroken) -> None:
        """From the poller: one read has stopped, or it will never be known when."""
        if isinstance(event, RuntimeBroken):
            self._read_lost(read, event)
            return
        self._under_way -= 1
        failed = event.error is not None
        took_s = 0.0 if failed else self._gear.clock.now_s() - read.posted_s
        self._gear.queue.end(read.permit, took_s)
        if read.source.freshness.grows and took_s > 0:
            self._note_speed(read, took_s)
        self.post_s += event.post_s
        if event.error is not None:
            if self._error is None:
                self._error, self.failed = event.error, read.source
        elif read.fetches_seal:
            index, lease_id = read.source.seal_index, read.source.origin.lease.lease_id
            read.source.freshness.fetched(self._gear.seals.tokens_missing(index, lease_id))
        if read.running is not None:
            self._ended(read.running, intact=event.error is None)
        self._note_end()

    def _note_speed(self, read: _UnderWay, took_s: float) -> None:
        """What a rank delivers, for who decides how much is worth a read."""
        speed, known = read.permit.amount[0] / took_s, read.source.speed
        read.source.speed = known + (speed - known) * _SPEED_SHARE if known else speed

    def _read_lost(self, read: _UnderWay, error: RuntimeBroken) -> None:
        """The poller has ended, so it will never be known when these bytes have stopped."""
        self._under_way -= 1
        self._gear.queue.end(read.permit)
        if read.running is not None:
            self._lost.append(read.running)
        self._note_lost(error)

    def _note_lost(self, error: RuntimeBroken) -> None:
        if not self._end.done():
            self._end.set_exception(error)
            self._end.exception()  # seen: there may be nobody who waits
        self._note_end()

    def all_stopped(self) -> None:
        """The poller ended first, but then the transport was closed in good order: what was lost has stopped, too."""
        lost, self._lost = self._lost, []
        for running in lost:
            self._ended(running, intact=False)
        if self.state is TransferState.QUARANTINED and not self._copies:
            self._end = asyncio.get_running_loop().create_future()
            self._note_end()

    async def _begin(self, group: CopyGroup) -> bool:
        """Post a group's reads when there is room; False if a lease turned out to be over. The group ends by itself."""
        running = _Running(group)
        begun = False
        try:
            for read in group.reads:
                # Reads do not wait for copies, up to as many: more would be in the way of other loads' copies.
                await self._wait_until_below(self._gear.reads_max, copies_beside=self._gear.reads_max)
                source = read.source
                step = source.freshness.next_step(self._gear.clock.now_s())
                if step is not Step.POST and not await self._see_seal(source, step):
                    return False
                descriptors = read.descriptors
                await self._post(source, descriptors, running, fetches_seal=read.carries_seal)
                self.descriptor_count += len(descriptors) - read.carries_seal
                self.size_bytes += descriptors.size_bytes - read.carries_seal * source.seal.size_bytes
                if not source.freshness.asked:
                    await self._fetch_seal(source)
            begun = True
        finally:
            self._ended(running, intact=begun)
        return True

    async def _see_seal(self, source: SourceRead, step: Step) -> bool:
        """Wait until the lease's seal was seen; False if the lease is over."""
        while step is not Step.POST:
            if step is Step.STALE:
                return False
            if step is Step.WAIT:
                await self._wait_until_below(self._under_way)
            else:
                await self._fetch_seal(source)
            step = source.freshness.next_step(self._gear.clock.now_s())
        return True

    async def _see_more(self, sources: Sequence[SourceRead]) -> bool:
        """Wait until something has happened: a seal that is looked at says more, or a read has ended. False if a lease
        is over.
        """
        if self.on_wait is not None and all(source.seen_s > -math.inf for source in sources):
            tell, self.on_wait = self.on_wait, None
            tell()
        for source in sources:
            if source.problem is not None:
                raise source.problem
        over = any(source.freshness.over for source in sources)
        if not over and self._error is None and not self._end.done():
            self._progress = asyncio.get_running_loop().create_future()
            await self._progress
        await self._wait_until_below(self._under_way + 1)  # it raises what has gone wrong
        return not over and not any(source.freshness.over for source in sources)

    def _watch(self, source: SourceRead) -> None:
        lease = source.origin.lease
        source.watched = WatchedSeal(
            agent=source.origin.connection.agent,
            address=source.seal.remote,
            lease_id=lease.lease_id,
            priority=self._priority,
            on_change=partial(self._seal_changed, source),
            on_look=self._looked,
            on_failure=partial(self._look_failed, source),
            on_loss=partial(self._look_lost, source),
        )
        self._gear.watches.add(source.watched)

    def _seal_changed(self, source: SourceRead, tokens_missing: int | None, posted_s: float) -> None:
        """From the watch: a lease has grown, or is over."""
        source.freshness.watched(tokens_missing, posted_s)
        if tokens_missing is None or (tokens_missing == 0 and not self.followed):
            self._unwatch(source)
        elif self.on_wait is None and tokens_missing > source.wake_at_missing and not source.freshness.over:
            return
        self._note_end()

    def _looked(self) -> None:
        """From the watch: a lease is open as before, which may vouch for what has landed."""
        if self.followed:
            self._note_end()

    def _look_failed(self, source: SourceRead, error: TransportError | RuntimeBroken) -> None:
        """From the watch: a look has failed as a read of ours would have."""
        if self._error is None:
            self._error, self.failed = error, source
        self._unwatch(source)
        self._note_end()

    def _look_lost(self, source: SourceRead, error: RuntimeBroken) -> None:
        """From the watch: it is as with a read of ours, though the look cannot touch our blocks."""
        self._unwatch(source)
        self._note_lost(error)

    def _unwatch(self, source: SourceRead) -> None:
        """A look that is under way counts as a read of ours until it has stopped, though it cannot touch our blocks."""
        watched, source.watched = source.watched, None
        if watched is not None:
            source.freshness.seen_s = max(source.freshness.seen_s, watched.looked_s)
            if self._gear.watches.remove(watched, self._look_over):
                self._under_way += 1

    def _look_over(self, lost: RuntimeBroken | None) -> None:
        self._under_way -= 1
        if lost is not None:
            self._note_lost(lost)
        self._note_end()

    async def _fetch_seal(self, source: SourceRead) -> None:
        await self._post(source, fetch_seal(source.seal), None, fetches_seal=True)

    async def _post(
        self, source: SourceRead, descriptors: Descriptors, running: _Running | None, *, fetches_seal: bool
    ) -> None:
        """Post a read when it has a permit; raises what has gone wrong while it waited."""
        gear = self._gear
        amount = (descriptors.size_bytes, len(descriptors), 1)
        permit = gear.queue.ask(amount, source.origin.connection.agent, self._priority)
        if permit.state is PermitState.WAITING:
            self._enter("queued")
            await granted(gear.queue, permit)
            self._enter("wire")
        try:
            if self._error is not None:
                raise self._error
            now_s = gear.clock.now_s()
            if self._begun_s is None:
                self._begun_s = now_s
            read = _UnderWay(source, permit, running, fetches_seal, now_s)
            gear.poller.post(source.origin.connection.agent, descriptors, partial(self._read_ended, read))
        except BaseException:
            gear.queue.end(permit)
            raise
        self._under_way += 1
        if fetches_seal:
            source.freshness.fetching()
        if running is not None:
            running.pending += 1

    def _ended(self, running: _Running, *, intact: bool) -> None:
        """One part of a group is over; after the last one its copy runs, or its buffers are given back."""
        running.intact = running.intact and intact
        running.pending -= 1
        if running.pending:
            return
        copy, release = running.group.copy, running.group.release
        if copy is not None and running.intact and self.state is TransferState.READING and self._error is None:
            self._copies += 1
            self._under_way += 1
            self._gear.copy_thread.submit(copy, lambda error: self._copied(running, error))
            return
        if release is not None:
            release()
        if running.group.on_land is not None and running.intact:
            self._tell_landed(running.group.on_land)

    def _tell_landed(self, on_land: Callable[[float], None]) -> None:
        if self.state is TransferState.READING and self._error is None:
            on_land(self._gear.clock.now_s())

    def _copied(self, running: _Running, error: BaseException | None) -> None:
        self._copies -= 1
        self._under_way -= 1
        if error is not None and self._error is None:
            self._error = CopyFailed(str(error))
            self._error.__cause__ = error
        if running.group.release is not None:
            running.group.release()
        if running.group.on_land is not None:
            self._tell_landed(running.group.on_land)
        self._note_end()

    async def _wait_until_below(self, count: int, *, copies_beside: int = 0) -> None:
        """Wait until fewer than `count` reads and copies are under way, not counting up to `copies_beside` copies.

        Raises what has gone wrong once all have stopped.
        """
        while self._under_way >= (1 if self._error else count + min(self._copies, copies_beside)):
            self._progress = asyncio.get_running_loop().create_future()
            await self._progress
        if self._end.done():
            self._end.result()
        if self._error is not None:
            raise self._error

    def _note_end(self) -> None:
        """A read or a copy has ended: it may have been what somebody waits for, or the last that kept the blocks."""
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)
        stopping = self.state is TransferState.STOPPING or self.state is TransferState.QUARANTINED
        if stopping and not self._under_way and not self._end.done():
            self.state = fire(TRANSFER_TABLE, self.state, TransferEvent.LAST_STOPPED)
            self._settle()

    def _settle(self) -> None:
        if not self._end.done():
            self._gear.ledger.end_load(self._ids)
            self._end.set_result(None)
            self._on_safe(self)
