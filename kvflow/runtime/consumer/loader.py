"""The consumer's side: one load from ticket to report.

A load passes through phases (`PHASES`), all under one deadline. What it may raise is typed; whatever happens, its
local blocks are either safe when it returns or carried by the error as a quarantine (invariant I1), and success is
reported only if the seal of every rank that was read was found intact after the last byte (invariant I2).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvflow.config import Config
from kvflow.core.plan.descriptors import BlockIds, Chunks, Piece, check_block_ids, match_chunks
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.policy.queue import Permit, PermitState
from kvflow.core.protocol.prompts import check_prompt
from kvflow.core.protocol.seals import SEAL_SIZE_BYTES, SealTable
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import (
    DeadlineExceeded,
    KVFlowError,
    LeaseExpired,
    Overloaded,
    PeerError,
    RequestError,
    RuntimeClosed,
    TransferFailed,
)
from kvflow.runtime.consumer.flight import CopyFailed, Seal, Stream, Transfer
from kvflow.runtime.consumer.load import (
    Load,
    LoadingStatistics,
    LoadReport,
    LoadRequest,
    PeerLoad,
    checked_load_request,
    refused_load,
    request_name,
)
from kvflow.runtime.consumer.read_queue import Budget, InFlight
from kvflow.runtime.consumer.releases import Releases
from kvflow.runtime.consumer.renewals import Renewals
from kvflow.runtime.memory.copy_thread import CopyThread
from kvflow.runtime.memory.route import Route, SourceRead
from kvflow.runtime.peers.link import LocalRank
from kvflow.runtime.peers.reach import Source, Sources
from kvflow.runtime.phases import PHASES, Stopwatch
from kvflow.runtime.poller import Poller
from kvflow.runtime.records import CANCELLED, LOADED, LoadRecord, Observers
from kvflow.runtime.world import Clock
from kvflow.transport.base import TransportError

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way: what was asked, how far it is, and what it has started."""

    request: LoadRequest
    ticket: Ticket
    local_ids: BlockIds
    timeout: asyncio.Timeout
    watch: Stopwatch
    handle: Load
    transfers: list[Transfer] = field(default_factory=list)
    started: bool = False

    @property
    def quarantine(self) -> Load | None:
        """The load itself, if its bytes may still land."""
        return self.handle if any(not transfer.safe for transfer in self.transfers) else None

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
        landing: Route,
        sources: Sources,
        releases: Releases,
        renewals: Renewals,
        poller: Poller,
        copier: CopyThread,
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
        self._places = Budget((config.limits.loads_max,), (config.limits.loads_max,))
        self._reads = Budget(*_read_limits(config))
        self._loads: dict[_Load, None] = {}  # in order, so that a simulation can be replayed
        self._unsafe: dict[Transfer, Load] = {}
        self._observers = observers
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._closed = False
        self._succeeded = 0
        self._failed = 0
        self._cancelled = 0
        self._refused = 0
        self._bytes = 0

    @property
    def statistics(self) -> LoadingStatistics:
        return LoadingStatistics(
            open_loads=len(self._loads),
            waiting_loads=self._places.waiting,
            waiting_reads=self._reads.waiting,
            in_flight=InFlight(*self._reads.used),
            peers={
                peer: PeerLoad(in_flight=InFlight(*used), waiting_reads=waiting)
                for peer, used, waiting in self._reads.peers()
            },
            quarantines=len(self.quarantines),
            succeeded=self._succeeded,
            failed=self._failed,
            cancelled=self._cancelled,
            refused=self._refused,
            bytes=self._bytes,
            renewals=self._renewals.sent,
        )

    @property
    def open_requests(self) -> list[str]:
        """The requests whose loads are under way, or whose bytes are."""
        under_way = dict.fromkeys(load.handle for load in self._loads) | dict.fromkeys(self._unsafe.values())
        return [handle.request_id for handle in under_way]

    @property
    def quarantines(self) -> tuple[Load, ...]:
        """Loads that have ended and whose blocks are not safe yet."""
        return tuple(handle for handle in self._unsafe.values() if handle.done)

    async def load(self, request: LoadRequest) -> LoadReport:
        """See `Runtime.load_blocks`."""
        return await self._carry_out(self._accept(request))

    def start(self, request: LoadRequest) -> Load:
        """See `Runtime.start_load`."""
        try:
            load = self._accept(request)
        except KVFlowError as error:
            return refused_load(request, error)
        load.handle.begin(partial(self._carry_out, load)).add_done_callback(partial(self._over, load))
        return load.handle

    def refuse(self, request: LoadRequest, error: KVFlowError) -> None:
        """Note that a load was not accepted, and why."""
        self._refused += 1
        logger.info("refused a load: %s", error)
        if self._observers.any:
            self._observers.load_ended(self._record_refused(request, error))

    def _accept(self, request: LoadRequest) -> _Load:
        """Check the request: from here on the load counts as open, and its time runs."""
        watch = Stopwatch(self._clock)
        try:
            plain = checked_load_request(request, self._config)
            ticket, local_ids = self._check(plain)
        except KVFlowError as error:
            self.refuse(request, error)
            raise
        deadline_s = self._config.load_deadline_s if plain.deadline_s is None else plain.deadline_s
        timeout = asyncio.timeout_at(asyncio.get_running_loop().time() + deadline_s)
        load = _Load(plain, ticket, local_ids, timeout, watch, Load(plain.request_id, local_ids))
        self._loads[load] = None
        self._quiet.clear()
        return load

    async def _carry_out(self, load: _Load) -> LoadReport:
        """From the first step to the outcome: the one place where a load ends."""
        load.started = True
        try:
            report = await self._run(load)
        except asyncio.CancelledError as cancelled:
            self._cancelled += 1
            load.handle.end(cancelled)
            self._record(load, CANCELLED)
            raise
        except KVFlowError as problem:
            error = _of_request(problem, load)
            error.quarantine = load.quarantine
            self._failed += 1
            load.handle.end(error)
            logger.info("load %s failed in phase %s: %s", load.handle.request_id, load.watch.phase, error)
            self._record(load, type(error).__name__, str(error))
            raise error from error.__cause__
        finally:
            self._forget(load)
        load.handle.end(report)
        self._succeeded += 1
        self._bytes += report.bytes
        self._record(load, LOADED)
        return report

    def _over(self, load: _Load, task: asyncio.Task[LoadReport]) -> None:
        """A load's own task has ended, perhaps cancelled before its first step."""
        if not load.started:
            self._cancelled += 1
            self._record(load, CANCELLED)
            self._forget(load)
        if not task.cancelled():
            task.exception()  # seen: it is logged, and whoever awaits the load gets it

    def _forget(self, load: _Load) -> None:
        self._loads.pop(load, None)
        self._renewals.forget(load)
        self._note_quiet()

    def close(self) -> None:
        """Make every load under way end soon, with RuntimeClosed."""
        self._closed = True
        self._renewals.close()
        now_s = asyncio.get_running_loop().time()
        for load in self._loads:
            if load.started and not load.timeout.expired():  # else it is ending already, or has yet to find out
                load.timeout.reschedule(now_s)

    def all_stopped(self) -> None:
        """The transport was closed in good order, so no byte can land any more: nothing stays quarantined."""
        for transfer in list(self._unsafe):
            transfer.all_stopped()

    async def drained(self) -> None:
        """Wait until no load is under way and no block is quarantined."""
        await self._quiet.wait()

    def _check(self, request: LoadRequest) -> tuple[Ticket, BlockIds]:
        """Everything that can be judged without the peer."""
        what = f"request {request.request_id!r}"
        ticket = self._sources.read(request.ticket)
        if request.prompt is not None:
            check_prompt(ticket, request.prompt, what)
        local_ids = check_block_ids(request.block_ids, num_blocks=self._num_blocks, what=f"{what}: block_ids")
        return ticket, local_ids

    async def _run(self, load: _Load) -> LoadReport:
        request, ticket = load.request, load.ticket
        try:
            async with load.timeout:
                if self._closed:
                    raise self._closed_error(load)
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
                raise self._closed_error(load) from None
            raise DeadlineExceeded(
                f"request {request.request_id!r} from {ticket.engine_id!r} at {ticket.address}: "
                f"deadline exceeded in phase {load.watch.phase!r}",
                request_id=request.request_id,
                peer=ticket.address,
                phase=load.watch.phase,
            ) from None

    def _closed_error(self, load: _Load) -> RuntimeClosed:
        return RuntimeClosed(
            f"request {load.request.request_id!r}: the runtime {self._config.engine_id!r} was closed, or had drained, "
            f"in phase {load.watch.phase!r}"
        )

    def _match(self, load: _Load) -> tuple[Chunks, ...]:
        """Which chunks of which offered block go where, by position instead of the remote ids; for all ranks alike."""
        ticket = load.ticket
        try:
            return match_chunks(
                load.local_ids,
                len(ticket.block_ids),
                local_block_size=self._local.cache_share.block_size,
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
        read_from = [source for source in sources if source.connection.block_map is not None]
        remote_ids = [source.block_ids(load.ticket) for source in read_from]
        transfer, places = self._start(load, read_from, await self._take_place(load, read_from))
        streams: list[Stream] = []
        try:
            streams += map(self._stream, read_from, places)
            parts = [
                SourceRead(stream, block_map, source.connection.permutation, tuple(some.locate(ids) for some in chunks))
                for stream, source, ids in zip(streams, read_from, remote_ids, strict=True)
                if (block_map := source.connection.block_map) is not None
            ]
            batches = self._landing.batches(parts, load.local_ids)
            load.watch.enter("wire")
            fresh = await transfer.read(streams, batches, self._config.limits.slices_in_flight_max)
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
            quick_read_max_s=connection.quick_read_max_s,
        )
        return Stream(
            connection.agent, seal, not_expired_before_s=source.not_expired_before_s, staged=connection.staged
        )

    async def _take_place(self, load: _Load, sources: Sequence[Source]) -> Permit:
        """Wait until as many more ranks may be read from. Overloaded if too many loads wait already."""
        what, ranks = f"request {load.request.request_id!r}", len(sources)
        if ranks > self._config.limits.loads_max:
            raise RequestError(f"{what}: reads from {ranks} ranks, loads_max is {self._config.limits.loads_max}")
        turn = self._places.ask("", (ranks,), load.request.priority)
        if turn.state is not PermitState.WAITING:
            return turn
        if self._places.waiting > self._config.loads_waiting_max:
            self._places.give_back(turn)
            raise Overloaded(
                f"{what}: {self._config.loads_waiting_max} loads (loads_waiting_max) wait already",
                request_id=load.request.request_id,
                peer=load.ticket.address,
            )
        for source in sources:  # a connection that breaks meanwhile stays until we have found out
            source.connection.hold()
        try:
            load.watch.enter("queued")
            await self._places.wait(turn)
            load.watch.enter("plan")
        finally:
            for source in sources:
                source.connection.release()
        return turn

    def _start(self, load: _Load, sources: Sequence[Source], place: Permit) -> tuple[Transfer, list[int]]:
        """Claim what a transfer needs, a landing place for each rank's seal; given back when its blocks are safe."""
        taken = [index for _ in sources if (index := self._seals.take()) is not None]
        assert len(taken) == len(sources), "there are as many landing places as ranks may be read from"

        def give_back(transfer: Transfer | None) -> None:
            for index in taken:
                self._seals.give_back(index)
            self._places.give_back(place)
            if transfer is not None:
                self._unsafe.pop(transfer, None)
                for source in sources:
                    source.connection.release()
                self._note_quiet()

        try:
            transfer = Transfer(
                load.request.request_id,
                load.local_ids,
                self._ledger,
                self._poller,
                self._copier,
                self._clock,
                give_back,
                budget=self._reads,
                priority=load.request.priority,
                watch=load.watch,
            )
        except KVFlowError:
            give_back(None)
            raise
        for source in sources:
            source.connection.hold()
        self._unsafe[transfer] = load.handle
        load.handle.carry(transfer)
        load.transfers.append(transfer)
        return transfer, taken

    def _failure(self, kind: type[TransferFailed | LeaseExpired], load: _Load, why: str) -> KVFlowError:
        ticket = load.ticket
        return kind(
            f"request {load.request.request_id!r} from {ticket.engine_id!r} at {ticket.address}: {why}",
            request_id=load.request.request_id,
            peer=ticket.address,
        )

    def _record(self, load: _Load, outcome: str, error: str = "") -> None:
        """Tell the observers how a load has ended."""
        if not self._observers.any:
            return
        load.watch.enter(load.watch.phase)
        self._observers.load_ended(
            LoadRecord(
                engine_id=self._config.engine_id,
                rank=Rank.of(self._config),
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

    def _record_refused(self, request: LoadRequest, error: KVFlowError) -> LoadRecord:
        """What is known of a load that never began; its request may hold anything."""
        return LoadRecord(
            engine_id=self._config.engine_id,
            rank=Rank.of(self._config),
            request_id=request_name(request),
            peer_engine_id="",
            remote_request_id="",
            peer="",
            outcome=type(error).__name__,
            error=str(error),
            phase="queued",
            bytes=0,
            blocks=0,
            descriptors=0,
            seconds=dict.fromkeys(PHASES, 0.0),
            traceparent="",
        )

    def _note_quiet(self) -> None:
        if not self._loads and not self._unsafe:
            self._quiet.set()


def _of_request(error: KVFlowError, load: _Load) -> KVFlowError:
    """The error as this load's caller gets it: what a peer did names the request, and is nobody else's object."""
    if isinstance(error, PeerError | Overloaded):
        return error.of_request(load.request.request_id, load.ticket.engine_id)
    return error


def _read_limits(config: Config) -> tuple[InFlight, InFlight]:
    """What may be in flight in all, and from one rank."""
    return (
        InFlight(
            config.in_flight_bytes_max, config.limits.in_flight_descriptors_max, config.limits.in_flight_reads_max
        ),
        InFlight(
            config.limits.peer_in_flight_bytes_max,
            config.limits.peer_in_flight_descriptors_max,
            config.limits.peer_in_flight_reads_max,
        ),
    )
