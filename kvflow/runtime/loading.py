"""The consumer's side: one load from ticket to report.

A load passes through phases (`PHASES`), all under one deadline. What it may raise is typed; whatever happens, its
local blocks are either safe when it returns or carried by the error as a quarantine (invariant I1), and success is
reported only if the seal of every rank that was read was found intact after the last byte (invariant I2).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvflow.config import Config
from kvflow.core.ledger import BlockLedger
from kvflow.core.plan import BlockIds, Chunks, Piece, check_block_ids, match_chunks
from kvflow.core.seals import SEAL_SIZE_BYTES, SealTable
from kvflow.core.ticket import Ticket, read_ticket
from kvflow.core.topology import Rank
from kvflow.errors import (
    DeadlineExceeded,
    KVFlowError,
    LeaseExpired,
    Quarantine,
    RequestError,
    RuntimeClosed,
    TransferFailed,
)
from kvflow.runtime.connection import LocalRank
from kvflow.runtime.copier import Copier
from kvflow.runtime.landing import Landing, Part
from kvflow.runtime.poller import Poller
from kvflow.runtime.records import CANCELLED, LOADED, LoadRecord, Observers
from kvflow.runtime.releases import Releases
from kvflow.runtime.renewals import Renewals
from kvflow.runtime.serving import check_request_id
from kvflow.runtime.sources import Source, Sources
from kvflow.runtime.transfer import CopyFailed, Seal, Stream, Transfer
from kvflow.runtime.world import Clock
from kvflow.transport.base import TransportError

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
    ticket: Ticket | Mapping[str, Any]
    block_ids: Sequence[int]
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one load did. `seconds` has an entry for each phase; they add up to `total_s`."""

    request_id: str
    bytes: int
    blocks: int
    tokens: int
    """Tokens that were read into the local blocks; the last of those may be partly filled."""
    descriptors: int
    sources: tuple[str, ...]
    """The ranks of the producer that were read from."""
    notified: bool
    """Whether every rank of the producer that holds a lease for us was told that it may free its blocks."""
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
    renewals: int
    """How often a lease was renewed for a load under way."""


class _Stopwatch:
    """Which phase a load is in, and how long each took."""

    def __init__(self, clock: Clock) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.phase = "queued"
        self._clock = clock
        self._since_s = clock.now_s()

    def enter(self, phase: str) -> None:
        now_s = self._clock.now_s()
        self.seconds[self.phase] += now_s - self._since_s
        self.phase, self._since_s = phase, now_s


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way: what was asked, how far it is, and what it has started."""

    request: LoadRequest
    ticket: Ticket
    local_ids: BlockIds
    timeout: asyncio.Timeout
    watch: _Stopwatch
    transfers: list[Transfer] = field(default_factory=list)

    @property
    def quarantine(self) -> Quarantine | None:
        return next((transfer for transfer in self.transfers if not transfer.safe), None)

    def report(self, *, sources: tuple[str, ...] = (), tokens: int = 0, notified: bool = False) -> LoadReport:
        self.watch.enter("notify")
        seconds = self.watch.seconds
        for transfer in self.transfers:
            posted_s = min(transfer.post_s, seconds["wire"])
            seconds["post"] += posted_s
            seconds["wire"] -= posted_s
        return LoadReport(
            request_id=self.request.request_id,
            bytes=sum(transfer.size_bytes for transfer in self.transfers),
            blocks=len(self.local_ids) if self.transfers else 0,
            tokens=tokens,
            descriptors=sum(transfer.descriptor_count for transfer in self.transfers),
            sources=sources,
            notified=notified,
            seconds=seconds,
        )


class Loader:
    """All loads of a runtime."""

    def __init__(
        self,
        config: Config,
        *,
        local: LocalRank,
        num_blocks: int,
        ledger: BlockLedger,
        seals: SealTable,
        landing: Landing,
        sources: Sources,
        releases: Releases,
        renewals: Renewals,
        poller: Poller,
        copier: Copier,
        clock: Clock,
        observers: Observers,
    ) -> None:
        self._config = config
        self._local = local
        self._num_blocks = num_blocks
        self._ledger = ledger
        self._seals = seals
        self._landing = landing
        self._sources = sources
        self._releases = releases
        self._renewals = renewals
        self._poller = poller
        self._copier = copier
        self._clock = clock
        self._observers = observers
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
            renewals=self._renewals.sent,
        )

    @property
    def quarantines(self) -> tuple[Quarantine, ...]:
        """Transfers whose load has ended and whose blocks are not safe yet."""
        running = {transfer for load in self._loads for transfer in load.transfers}
        return tuple(transfer for transfer in self._unsafe if transfer not in running)

    async def release(self, ticket: Ticket | Mapping[str, Any]) -> bool:
        """See `Runtime.release_blocks`."""
        return await self._releases.release(self._check_ticket(ticket))

    async def load(self, request: LoadRequest) -> LoadReport:
        """See `Runtime.load_blocks`."""
        watch = _Stopwatch(self._clock)
        ticket, local_ids = self._check(request)
        deadline_s = self._config.load_deadline_s if request.deadline_s is None else request.deadline_s
        load = _Load(request, ticket, local_ids, asyncio.timeout(deadline_s), watch)
        self._loads.add(load)
        self._quiet.clear()
        try:
            report = await self._run(load)
        except asyncio.CancelledError:
            self._cancelled += 1
            self._record(load, CANCELLED)
            raise
        except KVFlowError as error:
            self._failed += 1
            logger.info("load %s failed in phase %s: %s", request.request_id, load.watch.phase, error)
            self._record(load, type(error).__name__, str(error))
            raise
        finally:
            self._loads.discard(load)
            self._renewals.forget(load)
            self._note_quiet()
        self._succeeded += 1
        self._bytes += report.bytes
        self._record(load, LOADED)
        return report

    def close(self) -> None:
        """Make every load under way end soon, with RuntimeClosed."""
        self._closed = True
        self._renewals.close()
        now_s = asyncio.get_running_loop().time()
        for load in self._loads:
            if not load.timeout.expired():  # else it is ending already
                load.timeout.reschedule(now_s)

    async def drained(self) -> None:
        """Wait until no load is under way and no block is quarantined."""
        await self._quiet.wait()

    def _check(self, request: LoadRequest) -> tuple[Ticket, BlockIds]:
        """Everything that can be judged without the peer."""
        what = f"request {request.request_id!r}"
        check_request_id(request.request_id, self._config.request_id_chars_max)
        ticket = self._check_ticket(request.ticket)
        if len(request.block_ids) > self._config.block_ids_max:
            raise RequestError(f"{what}: {len(request.block_ids)} block_ids, at most {self._config.block_ids_max}")
        if request.deadline_s is not None and not request.deadline_s > 0:
            raise RequestError(f"{what}: deadline_s {request.deadline_s} is not above 0")
        local_ids = check_block_ids(request.block_ids, num_blocks=self._num_blocks, what=f"{what}: block_ids")
        return ticket, local_ids

    def _check_ticket(self, ticket: Ticket | Mapping[str, Any]) -> Ticket:
        checked = read_ticket(ticket)
        count = len(checked.block_ids)
        if count > self._config.block_ids_max:
            raise RequestError(
                f"ticket of request {checked.request_id!r}: {count} block ids, at most {self._config.block_ids_max}"
            )
        return checked

    async def _run(self, load: _Load) -> LoadReport:
        request, ticket = load.request, load.ticket
        try:
            async with load.timeout:
                if not ticket.block_ids:
                    return load.report()
                if len(load.local_ids) == 0:
                    return await self._release_only(load)
                load.watch.enter("handshake")
                await self._sources.check(ticket)
                chunks = self._match(load)
                sources = await self._sources.find(ticket, partial(self._renewals.keep, load, ticket.ttl_s))
                return await self._read(load, sources, chunks)
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

    def _match(self, load: _Load) -> tuple[Chunks, ...]:
        """Which chunks of which offered block go where, by position instead of the remote ids; for all ranks alike."""
        ticket = load.ticket
        try:
            return match_chunks(
                load.local_ids,
                len(ticket.block_ids),
                local_block_size=self._local.holding.block_size,
                remote_block_size=ticket.block_size,
                num_tokens=ticket.num_tokens,
            )
        except RequestError as error:
            raise RequestError(f"request {load.request.request_id!r}: {error}") from None

    async def _release_only(self, load: _Load) -> LoadReport:
        """A full hit: tell the producer. If it cannot be told its lease runs out, which costs the load nothing."""
        load.watch.enter("notify")
        return load.report(notified=await self._releases.release(load.ticket))

    async def _read(self, load: _Load, sources: Sequence[Source], chunks: Sequence[Chunks]) -> LoadReport:
        load.watch.enter("plan")
        read_from = [source for source in sources if source.connection.pairing is not None]
        remote_ids = [source.block_ids(load.ticket) for source in read_from]
        transfer, places = self._start(load, read_from)
        streams: list[Stream] = []
        try:
            streams += map(self._stream, read_from, places)
            parts = [
                Part(stream, pairing, source.connection.permutation, tuple(some.locate(ids) for some in chunks))
                for stream, source, ids in zip(streams, read_from, remote_ids, strict=True)
                if (pairing := source.connection.pairing) is not None
            ]
            batches = self._landing.batches(parts, load.local_ids)
            load.watch.enter("wire")
            fresh = await transfer.read(streams, batches, self._config.slices_in_flight_max)
        except (TransportError, CopyFailed) as error:
            for source, stream in zip(read_from, streams, strict=True):
                if stream is transfer.failed:
                    self._sources.failed(source, str(error))
            await transfer.stop(self._config.cancel_grace_s)
            raise self._failure(TransferFailed, load, f"the transfer failed: {error}") from error
        except BaseException:
            await transfer.stop(self._config.cancel_grace_s)
            raise
        transfer.finish()
        self._sources.succeeded(read_from)
        if not fresh:
            raise self._failure(LeaseExpired, load, "its lease ended before the read did")
        load.watch.enter("notify")
        self._releases.tell(sources)
        return load.report(
            sources=tuple(str(source) for source in read_from),
            tokens=sum(len(some) * some.tokens for some in chunks),
            notified=True,
        )

    def _stream(self, source: Source, place: int) -> Stream:
        connection, lease = source.connection, source.lease
        seal_address = connection.seal_address(lease.seal_index)
        assert seal_address is not None, "checked when the lease was found"
        seal = Seal(
            piece=Piece(self._seals.address(place), seal_address, SEAL_SIZE_BYTES),
            carried=connection.carries_seals,
            missing=lambda: self._seals.missing(place, lease.lease_id),
            trust_s=connection.seal_trust_s,
        )
        return Stream(connection.agent, seal, sure_until_s=source.sure_until_s, staged=connection.staged)

    def _start(self, load: _Load, sources: Sequence[Source]) -> tuple[Transfer, list[int]]:
        """Claim what a transfer needs, a landing place for each rank's seal; given back when its blocks are safe."""
        taken = [index for _ in sources if (index := self._seals.take()) is not None]

        def give_back(transfer: Transfer | None) -> None:
            for index in taken:
                self._seals.give_back(index)
            if transfer is not None:
                self._unsafe.discard(transfer)
                for source in sources:
                    source.connection.release()
                self._note_quiet()

        try:
            if len(taken) < len(sources):
                raise RequestError(
                    f"request {load.request.request_id!r}: {self._seals.count} reads are open (loads_max)"
                )
            transfer = Transfer(
                load.request.request_id,
                load.local_ids,
                self._ledger,
                self._poller,
                self._copier,
                self._clock,
                give_back,
            )
        except KVFlowError:
            give_back(None)
            raise
        for source in sources:
            source.connection.hold()
        self._unsafe.add(transfer)
        load.transfers.append(transfer)
        return transfer, taken

    def _failure(self, kind: type[TransferFailed | LeaseExpired], load: _Load, why: str) -> KVFlowError:
        ticket = load.ticket
        return kind(
            f"request {load.request.request_id!r} from {ticket.engine_id!r} at {ticket.address}: {why}",
            request_id=load.request.request_id,
            peer=ticket.address,
            quarantine=load.quarantine,
        )

    def _record(self, load: _Load, outcome: str, error: str = "") -> None:
        """Tell the observers how a load has ended."""
        if not self._observers.any:
            return
        load.watch.enter(load.watch.phase)
        self._observers.load_ended(
            LoadRecord(
                engine_id=self._config.engine_id,
                rank=str(Rank.of(self._config)),
                request_id=load.request.request_id,
                peer_engine_id=load.ticket.engine_id,
                remote_request_id=load.ticket.request_id,
                peer=load.ticket.address,
                outcome=outcome,
                error=error,
                phase=load.watch.phase,
                bytes=sum(transfer.size_bytes for transfer in load.transfers),
                blocks=len(load.local_ids),
                descriptors=sum(transfer.descriptor_count for transfer in load.transfers),
                seconds=load.watch.seconds,
                traceparent=load.ticket.traceparent,
            )
        )

    def _note_quiet(self) -> None:
        if not self._loads and not self._unsafe:
            self._quiet.set()
