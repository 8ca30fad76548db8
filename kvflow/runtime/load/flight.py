"""The flight of a load: it owns what the load has claimed, posts reads, and knows when the last read has stopped.

A posted read cannot be taken back (NIXL: releasing a handle does not stop the bytes). So a load that ends early waits
for its posted reads, up to a bound. After that bound its blocks are quarantined, and the flight outlives the load until
no further byte can land in the blocks (invariant I1).

Most reads go straight into the cache. The others go through buffers, in copy groups (`CopyGroup`). A running copy
cannot be taken back either, so it counts as a read.

Every read needs a permit before it is posted, and keeps the permit until the read has stopped, quarantined or not. This
cannot deadlock: a permit is requested only when its read can be posted immediately, so the holder of a permit waits for
nothing, also not for seal slots or buffers, which a load may hold while it waits.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from kvflow import checks
from kvflow.checks import counted
from kvflow.core.plan.descriptors import BlockIds, Descriptors, Piece
from kvflow.core.policy.queue import Permit, PermitState
from kvflow.core.policy.states import TRANSFER_TABLE, TransferState, fire, transfer_blocks_safe
from kvflow.core.protocol.proof import SEAL_SIZE_BYTES, Proof, ProofStep, fetch_seal
from kvflow.errors import InvalidInput, RuntimeBroken
from kvflow.runtime.copy_thread import CopyFailed
from kvflow.runtime.load.flight_resources import FlightResources
from kvflow.runtime.memory import wait_granted
from kvflow.runtime.peers.peer import Source
from kvflow.runtime.tasks import require_loop, shielded_from_scopes
from kvflow.transport.base import AgentName, ReadEnded, TransportError

SealPieceOf: TypeAlias = Callable[[Source], Piece]
"""Function that returns where to read a rank's seal: (local address, remote address, size in bytes)."""


class AgentOwner(Protocol):
    """What has the agent that reads are posted to, such as a `peers.peer.Connection`."""

    @property
    def agent(self) -> AgentName: ...


class ReadSource(Protocol):
    """What a read comes from: a rank's lease (`peers.peer.Source`), or a file (`kvflow.storage`), which has no seal."""

    @property
    def connection(self) -> AgentOwner: ...

    @property
    def proof(self) -> Proof: ...


class Read(NamedTuple):
    """A read from one rank, posted in one call. `carries_seal`: the read also fetches the rank's seal."""

    source: ReadSource
    descriptors: Descriptors
    carries_seal: bool = False


class CopyGroup(NamedTuple):
    """Reads into buffers, and the function `copy`, which copies the buffers to the cache once all reads have landed.

    In a group without `copy`, the reads go straight into the cache.
    """

    reads: Sequence[Read]
    copy: Callable[[], None] | None = None
    """Function that copies the filled buffers into the cache, on the copy thread."""
    release: Callable[[], None] | None = None
    """Function that frees the buffers, on the event loop, when no read or copy can touch them again."""
    on_land: Callable[[float, float], None] | None = None
    """Called when all bytes of the group are in the cache: `on_land(time now, time when its first read was posted)`."""


# Transitions of every load, looked up once.
_READING = fire(TRANSFER_TABLE, TransferState.PENDING, "post")
_LANDED = fire(TRANSFER_TABLE, TransferState.READING, "land")


@dataclass(slots=True, eq=False)
class _GroupState:
    """Progress of a copy group: its number of `pending` reads, and whether all reads so far succeeded (`intact`)."""

    group: CopyGroup
    pending: int = 1  # posting the group counts as one until it is finished
    intact: bool = True
    begun_s: float = math.inf


@checks.hides_secrets
class Flight:
    """The reads and copies of one load, and everything that the load has claimed for them.

    That is the load's local blocks, the connections to the ranks that it reads from, and a slot of host memory
    (`SealSlots`) for each rank's seal. Everything is given back when no further byte can land in the blocks.
    """

    def __init__(
        self,
        request_id: str,
        ids: BlockIds,
        sources: Sequence[Source],
        priority: int,
        resources: FlightResources,
    ) -> None:
        """Claim the load's local blocks: `ids` are their numbers in the block ledger.

        BlocksBusy if one is in use, LayoutError if a tensor of the cache has moved. `sources`: the ranks to read from.
        The caller must have taken a slot for the seal of each (`SealSlots`). If this raises, it has given the slots
        back.
        """
        try:
            resources.ledger.begin_load(ids)
        except InvalidInput:
            resources.seal_slots.give_back(sources)
            raise
        self.request_id = request_id
        self.state = TransferState.PENDING
        self.post_s = self.queued_s = 0.0
        self.last_read_s = 0.0
        """Time of the load's latest progress: when a read ended, or when a read was posted while no other was under
        way."""
        self.descriptor_count = self.size_bytes = 0
        self.waits_for_permit = False
        """True while a read waits for its permit. Stays True if that wait was cancelled."""
        self.failed_source: ReadSource | None = None
        self._ids = ids
        self._sources = sources
        self._priority = priority
        self._resources = resources
        self.on_safe: Callable[[Flight], None] | None = None
        """Callback, called with this flight when no further byte can land in the blocks."""
        self._under_way = 0
        self._lost_groups: list[_GroupState] = []
        self._copies = 0
        self._seal_reads: dict[Source, Descriptors] = {}
        """Descriptors of a read that fetches only the seal, by source. Kept because a growing lease's seal is read many
        times."""
        self._error: TransportError | CopyFailed | RuntimeBroken | None = None
        self._progress: asyncio.Future[None] | None = None
        self._end: asyncio.Future[None] | None = None
        """Future that is done when the last read or copy ends, or has an exception if that end can never be known."""
        for source in sources:
            source.connection.users += 1

    def __repr__(self) -> str:
        return f"<Flight {self.request_id} {self.state}, {counted(self._under_way, 'read')} and copies under way>"

    @property
    def safe(self) -> bool:
        """True when no further byte can land in the load's local blocks."""
        return transfer_blocks_safe(self.state)

    @property
    def loss_error(self) -> BaseException | None:
        """Error if the poller ended while reads were under way, so that their end can never be known; else None."""
        return self._end.exception() if self._end is not None and self._end.done() else None

    async def settled(self) -> None:
        """Wait until no further byte can land in the load's local blocks. UsageError if called on another event loop.

        RuntimeBroken if that can never be known, because the transport died.
        """
        if not self.safe:
            ending = self._end_future()
            require_loop(ending.get_loop(), f"request {self.request_id!r}: settled()")
            await asyncio.shield(ending)

    @property
    def under_way(self) -> int:
        """Number of reads and copies under way."""
        return self._under_way

    @property
    def reads_blocks(self) -> bool:
        """True while a copy, or a read of more than a seal, is under way."""
        return self._under_way > sum(source.proof.fetch_under_way for source in self._sources)

    @property
    def takes_blocks(self) -> bool:
        """True until the flight has ended, or is about to end."""
        return self.state is TransferState.PENDING or self.state is TransferState.READING

    def add_blocks(self, ids: BlockIds) -> None:
        """Claim more local blocks for a flight that `takes_blocks`: `ids` are their numbers in the block ledger.

        BlocksBusy if one is in use, LayoutError if a tensor of the cache has moved; then nothing has changed.
        """
        self._resources.ledger.begin_load(ids)
        self._ids = np.concatenate((self._ids, ids))

    def seal_piece(self, source: Source) -> Piece:
        """Return where to read the seal of `source`: (address of the local slot, address at the producer, size)."""
        slots = self._resources.seal_slots
        return Piece(slots.address + source.seal_slot * SEAL_SIZE_BYTES, source.seal_address, SEAL_SIZE_BYTES)

    async def read_all(self, reads: Iterable[Read]) -> bool:
        """Post `reads`, which go straight into the cache, and wait until all have landed.

        Return True if the leases covered all reads (see `core.protocol.proof`). If a seal shows that its lease has
        ended, post no further read, and return False. If TransportError, RuntimeBroken or CancelledError is raised, no
        further read is posted either, and the caller has to call `stop`. A rank's seal is fetched with the first read
        from that rank, or right after.
        """
        if self.state is TransferState.PENDING:
            self.state = _READING
        for read in reads:
            if self._under_way >= self._resources.reads_max or self._error is not None:
                await self.wait_until_below(self._resources.reads_max)
            if not await self._post(read, None):
                break
        await self.wait_until_below(1)
        fresh, unproven = self._judge_proofs()
        return await self._fetch_seals_again(unproven) if fresh and unproven else fresh

    async def read_groups(self, groups: AsyncGenerator[CopyGroup, None]) -> bool:
        """Post the reads of each copy group that `groups` yields, and wait for all reads and copies.

        Return True if the leases covered all reads, False if a lease has ended. After TransportError, CopyFailed or
        RuntimeBroken the caller has to call `stop`.
        """
        if self.state is TransferState.PENDING:
            self.state = _READING
        try:
            async for group in groups:
                if not await self._post_group(group):
                    break
        finally:
            await groups.aclose()
        await self.wait_until_below(1)
        fresh, unproven = self._judge_proofs()
        return await self._fetch_seals_again(unproven) if fresh and unproven else fresh

    def land(self) -> None:
        """End the flight after every posted byte has landed, and give back everything that it has claimed."""
        assert self.state is TransferState.READING, "it has flown"
        self.state = _LANDED
        self._give_back()

    async def stop(self, grace_s: float) -> bool:
        """End the flight in any state. Wait up to `grace_s` seconds for posted reads. Return whether all have stopped.

        If not, quarantine the blocks. If the waiting task is cancelled, the wait goes on, and CancelledError is raised
        at its end.
        """
        cancelled = False
        if self.state in (TransferState.PENDING, TransferState.READING):
            self.state = fire(TRANSFER_TABLE, self.state, "abandon")
            if self.state is TransferState.STOPPED:
                self._give_back()
        if self.state is TransferState.STOPPING:
            self.nudge()
            cancelled = await self._wait_for_last_read(grace_s)
        if self.state is TransferState.STOPPING:
            self.state = fire(TRANSFER_TABLE, self.state, "overdue")
            # NIXL takes no posted read back: bytes may land until the last read has stopped (I1).
            self._resources.ledger.quarantine(self._ids)
        if cancelled:
            raise asyncio.CancelledError
        return self.safe

    def note_all_stopped(self) -> None:
        """Record that all reads have stopped, and end a quarantine. For use once the transport was closed cleanly."""
        lost, self._lost_groups = self._lost_groups, []
        for group_state in lost:
            self._group_step_ended(group_state, intact=False)
        if self.state is TransferState.QUARANTINED and not self._copies:
            self._end = None
            self.nudge()

    async def wait_until_below(self, count: int, *, copies_beside: int = 0) -> None:
        """Wait until fewer than `count` reads and copies are under way. Of the copies, `copies_beside` do not count.

        If the flight has failed, wait until all have stopped, then raise its error.
        """
        while self._under_way >= (1 if self._error else count + min(self._copies, copies_beside)):
            self._progress = asyncio.get_running_loop().create_future()
            await self._progress
        if self._end is not None and self._end.done():
            self._end.result()
        if self._error is not None:
            raise self._error

    async def wait_for_change(self) -> None:
        """Wait until a read or a copy has ended, or `nudge` was called.

        If the flight has failed, wait until all have stopped, then raise its error.
        """
        if self._error is None and (self._end is None or not self._end.done()):
            self._progress = asyncio.get_running_loop().create_future()
            await self._progress
        await self.wait_until_below(self._under_way + 1)

    def nudge(self) -> None:
        """Wake the task that waits in `wait_until_below` or `wait_for_change`.

        If the flight is stopping and no read or copy is under way, give back everything that the flight has claimed.
        """
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)
        stopping = self.state is TransferState.STOPPING or self.state is TransferState.QUARANTINED
        if stopping and not self._under_way and not (self._end is not None and self._end.done()):
            self.state = fire(TRANSFER_TABLE, self.state, "last_stopped")
            self._give_back()

    async def post_seal_read(self, source: Source) -> None:
        """Wait for a permit, then post a read of only the seal of `source`. Do not wait for the read."""
        if (seal := self._seal_reads.get(source)) is None:
            seal = self._seal_reads[source] = fetch_seal(self.seal_piece(source))
        await self._post_when_permitted(source, seal, None, fetches_seal=True)

    def _judge_proofs(self) -> tuple[bool, list[Source]]:
        """Return (fresh, unproven), after all reads have ended. `fresh`: False if a source's proof says STALE.

        `unproven`: the sources with a proof that cannot decide before the seal is fetched again.
        """
        # By this rank's clock alone: the clocks of two machines are never compared (I2).
        now_s = self._resources.clock.now_s()
        fresh, unproven = True, []
        for source in self._sources:
            verdict = source.proof.judge_after_read(now_s - source.proof.last_open_s)
            fresh = fresh and verdict is not ProofStep.STALE
            if verdict is ProofStep.FETCH:
                unproven.append(source)
        return fresh, unproven

    async def _fetch_seals_again(self, sources: Sequence[Source]) -> bool:
        """Fetch the seals of `sources` again, after the last byte has landed. Return whether all leases are open."""
        for source in sources:
            await self.post_seal_read(source)
        await self.wait_until_below(1)
        return all(source.proof.judge_after_read(None) is ProofStep.FRESH for source in sources)

    async def _post_group(self, group: CopyGroup) -> bool:
        """Post the reads of `group`, one after another. If a lease has ended, post no further read, and return False.

        Before each read, wait until fewer than `FlightResources.reads_max` reads are under way.
        """
        group_state = _GroupState(group)
        begun = False
        try:
            for read in group.reads:
                # Up to `reads_max` copies do not hold reads up. More copies would delay the copies of other loads.
                await self.wait_until_below(self._resources.reads_max, copies_beside=self._resources.reads_max)
                if not await self._post(read, group_state):
                    return False
            begun = True
        finally:
            self._group_step_ended(group_state, intact=begun)
        return True

    async def _post(self, read: Read, group_state: _GroupState | None) -> bool:
        """Wait for a permit, then post `read`. If no read fetches the source's seal yet, post a read of the seal too.

        Return False, and post nothing, if the lease of the source has ended.
        """
        source, descriptors, carries_seal = read
        proof = source.proof
        if proof.judge_before_post() is ProofStep.STALE:  # saves reads that the proof at the end would discard
            return False
        await self._post_when_permitted(source, descriptors, group_state, fetches_seal=carries_seal)
        if not proof.fetch_posted:
            assert isinstance(source, Source), "the proof of a file is complete from the start"
            await self.post_seal_read(source)
        return True

    async def _post_when_permitted(
        self, source: ReadSource, descriptors: Descriptors, group_state: _GroupState | None, *, fetches_seal: bool
    ) -> None:
        """Wait for a permit, then post a read of `descriptors` from `source`. Raise the error of a flight that failed.

        `group_state`: progress of the read's copy group, if any. `fetches_seal`: one of the descriptors is the source's
        seal.
        """
        resources, agent = self._resources, source.connection.agent
        size_bytes, count = descriptors.size_bytes, descriptors.table.shape[1]
        permit = resources.permit_queue.request_permit((size_bytes, count, 1), agent, self._priority)
        if permit.state is PermitState.WAITING:
            await self._wait_for_permit(permit)
        try:
            if self._error is not None:  # another read has failed during the wait
                raise self._error
            now_s = resources.clock.now_s()
            on_end = partial(self._read_ended, source, permit, group_state, now_s, fetches_seal)
            resources.poller.post(agent, descriptors, on_end)
        except BaseException:
            resources.permit_queue.end(permit)
            raise
        if not self._under_way:
            self.last_read_s = now_s
        self._under_way += 1
        self.size_bytes += size_bytes
        self.descriptor_count += count
        if fetches_seal:
            self.size_bytes -= SEAL_SIZE_BYTES
            self.descriptor_count -= 1
            source.proof.note_fetch_posted()
        else:
            source.proof.note_read_posted()
        if group_state is not None:
            group_state.pending += 1
            group_state.begun_s = min(group_state.begun_s, now_s)

    async def _wait_for_permit(self, permit: Permit) -> None:
        """Wait until `permit` is granted, and add the seconds of the wait to `queued_s`."""
        since_s, self.waits_for_permit = self._resources.clock.now_s(), True
        try:
            await wait_granted(self._resources.permit_queue, permit)
            self.waits_for_permit = False
        finally:
            self.queued_s += self._resources.clock.now_s() - since_s

    def _read_ended(
        self,
        source: ReadSource,
        permit: Permit,
        group_state: _GroupState | None,
        posted_s: float,
        fetches_seal: bool,
        event: ReadEnded | RuntimeBroken,
    ) -> None:
        """Called by the poller when a read has stopped, or with RuntimeBroken when its end can never be known."""
        resources = self._resources
        self._under_way -= 1
        if isinstance(event, RuntimeBroken):
            resources.permit_queue.end(permit)
            if group_state is not None:  # its buffers stay taken: bytes may still land in them (I1)
                self._lost_groups.append(group_state)
            self._note_lost(event)
            return
        failed = event.error is not None  # a read that NIXL reports as failed counts as stopped
        self.last_read_s = resources.clock.now_s()
        resources.permit_queue.end(permit, 0.0 if failed else self.last_read_s - posted_s)
        self.post_s += event.post_s
        if failed:
            if self._error is None:
                self._error, self.failed_source = event.error, source
        elif fetches_seal and isinstance(source, Source):
            source.proof.note_fetched(
                resources.seal_slots.table.tokens_missing(source.seal_slot, source.lease.lease_id), posted_s
            )
        if group_state is not None:
            self._group_step_ended(group_state, intact=not failed)
        self.nudge()

    def _note_lost(self, error: RuntimeBroken) -> None:
        """Make every wait for the flight's end raise `error`, because that end can never be known without a poller."""
        end = self._end_future()
        if not end.done():
            end.set_exception(error)
            end.exception()  # mark it as retrieved: there may be no waiter
        self.nudge()

    def _end_future(self) -> asyncio.Future[None]:
        if self._end is None:
            self._end = asyncio.get_running_loop().create_future()
        return self._end

    async def _wait_for_last_read(self, grace_s: float) -> bool:
        """Wait up to `grace_s` seconds until the last read has stopped, even if the task is cancelled meanwhile.

        Return True if the task was cancelled.
        """
        loop, end = asyncio.get_running_loop(), self._end_future()
        deadline_s = loop.time() + grace_s
        cancelled = False
        # A cancelled scope of anyio cancels its task once per turn of the loop: without the shield, the wait spins.
        with shielded_from_scopes():
            while not self.safe and not end.done() and (left_s := deadline_s - loop.time()) > 0:
                try:
                    await asyncio.wait([end], timeout=left_s)
                except asyncio.CancelledError:
                    cancelled = True
        return cancelled

    def _group_step_ended(self, group_state: _GroupState, *, intact: bool) -> None:
        """Record the end of one step of a copy group. Its steps are each of its reads, and the posting of all reads.

        `intact`: this step succeeded. After the last step, start the group's copy, or free its buffers if there is no
        copy or a step has failed.
        """
        group_state.intact = group_state.intact and intact
        group_state.pending -= 1
        if group_state.pending:
            return
        copy, release = group_state.group.copy, group_state.group.release
        # A load that has failed or stops writes nothing more into its blocks: its caller may get them back (I1).
        if copy is not None and group_state.intact and self.state is TransferState.READING and self._error is None:
            self._copies += 1
            self._under_way += 1
            self._resources.copy_thread.submit(copy, lambda error: self._copy_ended(group_state, error))
            return
        if release is not None:
            release()
        if group_state.intact:
            self._call_on_land(group_state)

    def _call_on_land(self, group_state: _GroupState) -> None:
        on_land = group_state.group.on_land
        if on_land is not None and self.state is TransferState.READING and self._error is None:
            on_land(self._resources.clock.now_s(), group_state.begun_s)

    def _copy_ended(self, group_state: _GroupState, error: BaseException | None) -> None:
        """Callback of the copy thread: a group's copy has ended, with `error` if it failed."""
        self._copies -= 1
        self._under_way -= 1
        if error is not None and self._error is None:
            self._error = CopyFailed(str(error))
            self._error.__cause__ = error
        if group_state.group.release is not None:
            group_state.group.release()
        self._call_on_land(group_state)
        self.nudge()

    def _give_back(self) -> None:
        """Give back the blocks, the slots for seals and the connections. Called once, when no further byte can land."""
        resources = self._resources
        resources.ledger.end_load(self._ids)
        resources.seal_slots.give_back(self._sources)
        for source in self._sources:
            connection = source.connection
            connection.users -= 1
            if not connection.users and connection.unused is not None:
                connection.unused.set()
        if self._end is not None and not self._end.done():
            self._end.set_result(None)
        if self.on_safe is not None:
            self.on_safe(self)
