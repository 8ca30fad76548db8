"""The consumer's side: one load from ticket to report.

A load passes through phases (`PHASES`), all under one deadline. What it may raise is typed; whatever happens, its
local blocks are either safe when it returns or carried by the error as a quarantine (invariant I1), and success is
reported only if the producer's seal was found intact after the last byte (invariant I2).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvflow.config import Config
from kvflow.core import wire
from kvflow.core.layout import CacheLayout
from kvflow.core.ledger import BlockLedger
from kvflow.core.plan import BlockIds, Piece, check_block_ids, plan_slices
from kvflow.core.seals import SEAL_SIZE_BYTES, SealTable
from kvflow.errors import (
    DeadlineExceeded,
    KVFlowError,
    LeaseExpired,
    PeerError,
    Quarantine,
    RequestError,
    RuntimeClosed,
    TransferFailed,
)
from kvflow.runtime.peers import Connection, Peer, Peers
from kvflow.runtime.poller import Poller
from kvflow.runtime.serving import check_request_id
from kvflow.runtime.transfer import Seal, Transfer
from kvflow.transport.base import Transport, TransportError

logger = logging.getLogger(__name__)

PHASES = ("queued", "handshake", "plan", "post", "wire", "notify")


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Fill `block_ids`, in prompt order, from the blocks that `ticket` offers.

    With fewer local than offered blocks (a prefix was cached), the tail of the offer is read; with none (all was
    cached), nothing is read and the producer is told at once. `ticket` is a Ticket or its dict. `deadline_s` covers
    every phase and defaults to Config.load_deadline_s.
    """

    request_id: str
    ticket: wire.Ticket | Mapping[str, Any]
    block_ids: Sequence[int]
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one load did. `seconds` has an entry for each phase; they add up to `total_s`."""

    request_id: str
    bytes: int
    blocks: int
    descriptors: int
    sources: tuple[str, ...]
    notified: bool
    """Whether the producer was told that it may free its blocks."""
    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingStatistics:
    """Loads under way now, how others ended, and blocks that no ended load could declare safe yet."""

    open_loads: int
    quarantines: int
    succeeded: int
    failed: int
    cancelled: int
    bytes: int


class _Stopwatch:
    """Which phase a load is in, and how long each took."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.phase = "queued"
        self._since_s = time.monotonic()

    def enter(self, phase: str) -> None:
        now_s = time.monotonic()
        self.seconds[self.phase] += now_s - self._since_s
        self.phase, self._since_s = phase, now_s


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way: what was asked, how far it is, and what it has started."""

    request: LoadRequest
    ticket: wire.Ticket
    local_ids: BlockIds
    timeout: asyncio.Timeout
    watch: _Stopwatch
    transfers: list[Transfer] = field(default_factory=list)

    @property
    def quarantine(self) -> Quarantine | None:
        return next((transfer for transfer in self.transfers if not transfer.safe), None)

    def report(self, *, size_bytes: int = 0, blocks: int = 0, notified: bool = False) -> LoadReport:
        self.watch.enter("notify")
        seconds = self.watch.seconds
        descriptors = 0
        for transfer in self.transfers:
            posted_s = min(transfer.post_s, seconds["wire"])
            seconds["post"] += posted_s
            seconds["wire"] -= posted_s
            descriptors += transfer.descriptor_count
        return LoadReport(
            request_id=self.request.request_id,
            bytes=size_bytes,
            blocks=blocks,
            descriptors=descriptors,
            sources=(f"{self.ticket.engine_id} at {self.ticket.address}",),
            notified=notified,
            seconds=seconds,
        )


class Loader:
    """All loads of a runtime."""

    def __init__(
        self,
        config: Config,
        *,
        layout: CacheLayout,
        ledger: BlockLedger,
        landing: SealTable,
        peers: Peers,
        poller: Poller,
        transport: Transport,
        reader: str,
    ) -> None:
        self._config = config
        self._num_blocks = layout.num_blocks
        self._block_size_bytes = layout.block_size_bytes
        self._ledger = ledger
        self._landing = landing
        self._peers = peers
        self._poller = poller
        self._transport = transport
        self._reader = reader
        self._loads: set[_Load] = set()
        self._unsafe: set[Transfer] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._closed = False
        self._succeeded = 0
        self._failed = 0
        self._cancelled = 0
        self._bytes = 0

    @property
    def statistics(self) -> LoadingStatistics:
        return LoadingStatistics(
            open_loads=len(self._loads),
            quarantines=len(self.quarantines),
            succeeded=self._succeeded,
            failed=self._failed,
            cancelled=self._cancelled,
            bytes=self._bytes,
        )

    @property
    def quarantines(self) -> tuple[Quarantine, ...]:
        """Transfers whose load has ended and whose blocks are not safe yet."""
        running = {transfer for load in self._loads for transfer in load.transfers}
        return tuple(transfer for transfer in self._unsafe if transfer not in running)

    async def load(self, request: LoadRequest) -> LoadReport:
        """See `Runtime.load_blocks`."""
        watch = _Stopwatch()
        ticket, local_ids = self._check(request)
        deadline_s = self._config.load_deadline_s if request.deadline_s is None else request.deadline_s
        load = _Load(request, ticket, local_ids, asyncio.timeout(deadline_s), watch)
        self._loads.add(load)
        self._quiet.clear()
        try:
            report = await self._run(load)
        except asyncio.CancelledError:
            self._cancelled += 1
            raise
        except KVFlowError as error:
            self._failed += 1
            logger.info("load %s failed in phase %s: %s", request.request_id, load.watch.phase, error)
            raise
        finally:
            self._loads.discard(load)
            self._note_quiet()
        self._succeeded += 1
        self._bytes += report.bytes
        return report

    def close(self) -> None:
        """Make every load under way end soon, with RuntimeClosed."""
        self._closed = True
        now_s = asyncio.get_running_loop().time()
        for load in self._loads:
            if not load.timeout.expired():  # else it is ending already
                load.timeout.reschedule(now_s)

    async def drained(self) -> None:
        """Wait until no load is under way and no block is quarantined."""
        await self._quiet.wait()

    def _check(self, request: LoadRequest) -> tuple[wire.Ticket, BlockIds]:
        """Everything that can be judged without the peer."""
        what = f"request {request.request_id!r}"
        check_request_id(request.request_id, self._config.request_id_chars_max)
        ticket = _ticket_of(request)
        most = max(len(request.block_ids), len(ticket.block_ids))
        if most > self._config.block_ids_max:
            raise RequestError(f"{what}: {most} block ids, at most {self._config.block_ids_max}")
        if request.deadline_s is not None and not request.deadline_s > 0:
            raise RequestError(f"{what}: deadline_s {request.deadline_s} is not above 0")
        local_ids = check_block_ids(request.block_ids, num_blocks=self._num_blocks, what=f"{what}: block_ids")
        if ticket.block_ids and len(local_ids) > len(ticket.block_ids):
            raise RequestError(f"{what}: {len(local_ids)} local blocks, but only {len(ticket.block_ids)} are offered")
        return ticket, local_ids

    async def _run(self, load: _Load) -> LoadReport:
        request, ticket = load.request, load.ticket
        try:
            async with load.timeout:
                if not ticket.block_ids:
                    return load.report()
                if len(load.local_ids) == 0:
                    return await self._release_only(load)
                peer, connection = await self._connect(load)
                return await self._read(load, peer, connection)
        except TimeoutError:
            if self._closed:
                raise RuntimeClosed(f"request {request.request_id!r}: the runtime was closed") from None
            raise DeadlineExceeded(
                f"request {request.request_id!r} from {ticket.engine_id!r} at {ticket.address}: "
                f"deadline exceeded in phase {load.watch.phase!r}",
                request_id=request.request_id,
                peer=ticket.address,
                phase=load.watch.phase,
                quarantine=load.quarantine,
            ) from None

    async def _connect(self, load: _Load) -> tuple[Peer, Connection]:
        ticket = load.ticket
        load.watch.enter("handshake")
        peer = self._peers.get(ticket.engine_id, ticket.address)
        connection = await self._peers.connect(peer, ticket.incarnation)
        if connection.incarnation != ticket.incarnation:
            raise LeaseExpired(
                f"request {load.request.request_id!r}: engine {ticket.engine_id!r} has restarted: the ticket is of "
                f"incarnation {ticket.incarnation}, the engine is {connection.incarnation}",
                request_id=load.request.request_id,
                peer=ticket.address,
            )
        return peer, connection

    async def _release_only(self, load: _Load) -> LoadReport:
        """A full hit: tell the producer. If it cannot be told its lease runs out, which costs the load nothing."""
        try:
            _, connection = await self._connect(load)
        except (PeerError, LeaseExpired) as error:
            logger.warning("request %s: could not tell the producer: %s", load.request.request_id, error)
            return load.report(notified=False)
        load.watch.enter("notify")
        self._notify(load.ticket, connection)
        return load.report(notified=True)

    async def _read(self, load: _Load, peer: Peer, connection: Connection) -> LoadReport:
        load.watch.enter("plan")
        remote_ids = self._remote_ids(load, connection)
        seal_address = connection.seal_address(load.ticket.seal_index)
        if seal_address is None:
            raise RequestError(f"ticket: seal_index {load.ticket.seal_index} is not one of the peer's")
        transfer, landing_index = self._start(load, connection)
        seal = Seal(
            piece=Piece(self._landing.address(landing_index), seal_address, SEAL_SIZE_BYTES),
            carried=connection.carries_seals,
            intact=lambda: self._landing.holds(landing_index, load.ticket.lease_id),
            trust_s=connection.seal_trust_s,
        )
        slices = plan_slices(
            connection.pairs,
            load.local_ids,
            remote_ids,
            bytes_max=self._config.slice_bytes_max,
            descriptors_max=self._config.slice_descriptors_max,
            head=seal.piece if seal.carried else None,
        )
        load.watch.enter("wire")
        try:
            fresh = await transfer.read(self._poller, connection.agent, slices, seal, self._config.slices_in_flight_max)
        except TransportError as error:
            peer.retire(connection, str(error))
            await transfer.stop(self._config.cancel_grace_s)
            raise self._failure(TransferFailed, load, f"the transfer failed: {error}") from error
        except BaseException:
            await transfer.stop(self._config.cancel_grace_s)
            raise
        transfer.finish()
        if not fresh:
            raise self._failure(LeaseExpired, load, "its lease ended before the read did")
        load.watch.enter("notify")
        self._notify(load.ticket, connection)
        size_bytes = len(load.local_ids) * self._block_size_bytes
        return load.report(size_bytes=size_bytes, blocks=len(load.local_ids), notified=True)

    def _remote_ids(self, load: _Load, connection: Connection) -> BlockIds:
        """The offered blocks that belong to the local ones: the tail."""
        what = f"request {load.request.request_id!r}: remote_block_ids of {load.ticket.engine_id!r}"
        remote_ids = check_block_ids(load.ticket.block_ids, num_blocks=connection.num_blocks, what=what)
        return remote_ids[-len(load.local_ids) :]

    def _start(self, load: _Load, connection: Connection) -> tuple[Transfer, int]:
        """Claim what a transfer needs; all of it is given back when its blocks are safe."""
        index = self._landing.take()
        if index is None:
            raise RequestError(f"request {load.request.request_id!r}: {self._landing.count} loads are open (loads_max)")

        def give_back(transfer: Transfer) -> None:
            self._landing.give_back(index)
            self._unsafe.discard(transfer)
            connection.release()
            self._note_quiet()

        try:
            transfer = Transfer(load.request.request_id, load.local_ids, self._ledger, give_back)
        except KVFlowError:
            self._landing.give_back(index)
            raise
        connection.hold()
        self._unsafe.add(transfer)
        load.transfers.append(transfer)
        return transfer, index

    def _failure(self, kind: type[TransferFailed | LeaseExpired], load: _Load, why: str) -> KVFlowError:
        ticket = load.ticket
        return kind(
            f"request {load.request.request_id!r} from {ticket.engine_id!r} at {ticket.address}: {why}",
            request_id=load.request.request_id,
            peer=ticket.address,
            quarantine=load.quarantine,
        )

    def _notify(self, ticket: wire.Ticket, connection: Connection) -> None:
        message = wire.ReadDone(lease_id=ticket.lease_id, reader=self._reader)
        self._transport.notify(connection.agent, wire.encode(message))

    def _note_quiet(self) -> None:
        if not self._loads and not self._unsafe:
            self._quiet.set()


def _ticket_of(request: LoadRequest) -> wire.Ticket:
    """The request's ticket, checked; RequestError names what is wrong with it."""
    if isinstance(request.ticket, wire.Ticket):
        request.ticket.check()
        return request.ticket
    return wire.Ticket.from_params(request.ticket)
