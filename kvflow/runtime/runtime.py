"""The Runtime: what users hold. It owns every service, starts them in order and ends them in the reverse order.

One supervisor task holds a task group with the poller, the listener and the handshakes. If a service dies, the group
ends, everybody who waits is settled, and later calls raise RuntimeBroken with the cause.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kvflow.config import Config
from kvflow.core import wire
from kvflow.core.layout import CacheLayout, KVCaches
from kvflow.core.ledger import BlockCounts, BlockLedger
from kvflow.core.regions import Regions, map_regions, map_spans
from kvflow.core.seals import HOST, SealTable
from kvflow.core.states import PeerState
from kvflow.core.ticket import Ticket
from kvflow.core.topology import Rank, holding_of
from kvflow.errors import ConfigError, Quarantine, RuntimeBroken, RuntimeClosed, UsageError
from kvflow.runtime.landing import Landing
from kvflow.runtime.loading import Loader, LoadingStatistics, LoadReport, LoadRequest
from kvflow.runtime.peers import LocalRank, Peers
from kvflow.runtime.permute import Scratch
from kvflow.runtime.poller import Poller
from kvflow.runtime.records import Observer, Observers
from kvflow.runtime.releases import Releases
from kvflow.runtime.renewals import Renewals
from kvflow.runtime.serving import Lease, ServeRequest, Serving, ServingStatistics
from kvflow.runtime.side_channel import ListenerStatistics
from kvflow.runtime.sources import Sources
from kvflow.runtime.staging import BlockCopier, HostBuffers
from kvflow.runtime.world import World
from kvflow.transport.base import TransportError, TransportStatistics, choose_buffer_device

logger = logging.getLogger(__name__)


class RuntimeState(enum.StrEnum):
    NEW = "new"
    OPEN = "open"
    BROKEN = "broken"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeStatistics:
    """A snapshot. Before a cache is registered, and after closing, its parts are None."""

    state: RuntimeState
    tasks: int
    blocks: BlockCounts | None
    buffers_used: int
    """Host blocks and scratch buffers that are in use now."""
    serving: ServingStatistics | None
    loading: LoadingStatistics | None
    peers: tuple[PeerState, ...]
    listener: ListenerStatistics | None
    transport: TransportStatistics
    early_notifications: int
    """Notifications that came before a cache was registered, when no lease could exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cache:
    """Everything that exists once a cache is registered."""

    layout: CacheLayout
    regions: Regions
    local: LocalRank
    ledger: BlockLedger
    seals: SealTable
    serving: Serving
    loader: Loader
    peers: Peers
    staging: HostBuffers | None
    scratch: Scratch
    agent_metadata: bytes

    @property
    def buffers_used(self) -> int:
        return self.scratch.used + (self.staging.pool.used if self.staging else 0)


class Runtime:
    """Moves KV blocks for one rank of an engine. Use it as `async with Runtime(config) as rt`.

    It belongs to the event loop that opened it. `observers` are told how every load and lease has ended.
    Tests give it another `world`.
    """

    def __init__(
        self,
        config: Config,
        *,
        observers: Sequence[Observer] = (),
        world: World = World(),  # noqa: B008 - frozen
    ) -> None:
        self._config = config
        self._observers = Observers(observers)
        self._world = world
        self._rank = Rank.of(config)
        self._incarnation = world.token_hex(8)
        self._agent_name = wire.agent_name(config.engine_id, self._rank, self._incarnation)
        self._transport = world.transport(config, self._agent_name)
        self._side_channel = world.side_channel(config)
        self._clock = world.clock()
        self._state = RuntimeState.NEW
        self._cause: BaseException | None = None
        self._registering = False
        self._cache: _Cache | None = None
        self._early_notifications = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._supervisor: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<kvflow.Runtime {self._config.engine_id} {self._state}>"

    @property
    def config(self) -> Config:
        return self._config

    @property
    def rank(self) -> Rank:
        return self._rank

    @property
    def state(self) -> RuntimeState:
        return self._state

    @property
    def address(self) -> str:
        """The side channel's address as tickets name it."""
        self._require_open()
        return f"tcp://{self._config.advertise_host or self._config.listen_host}:{self._listener.port}"

    @property
    def quarantines(self) -> tuple[Quarantine, ...]:
        """Blocks in which bytes may still land although their load has ended; each can be awaited."""
        return self._cache.loader.quarantines if self._cache else ()

    def quarantines_of(self, request_id: str) -> tuple[Quarantine, ...]:
        """Those of `quarantines` that loads of this request have left: for cancelled ones, whose error carries none."""
        return tuple(one for one in self.quarantines if one.request_id == request_id)

    async def __aenter__(self) -> Self:
        """Start the transport, the listener and the poller. Raises ConfigError if one cannot be had."""
        if self._state is not RuntimeState.NEW:
            raise UsageError(f"a Runtime is opened once; this one is {self._state}")
        self._state = RuntimeState.CLOSED  # until everything is there: a runtime that failed to open stays closed
        await self._transport.open()
        try:
            self._listener = self._side_channel.listen(self._answer)
        except BaseException:
            await self._transport.aclose(self._config.transport_close_timeout_s)
            raise
        self._poller = Poller(self._transport, self._on_notification)
        self._copier = self._world.copier(f"kvflow-copy {self._agent_name}")
        self._stop = asyncio.Event()
        self._state = RuntimeState.OPEN
        started = asyncio.Event()
        self._supervisor = asyncio.create_task(self._supervise(started), name="kvflow-supervisor")
        await started.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close in order: no new work, let loads and leases finish, revoke what is left, deregister, stop everything.

        Bounded by Config.drain_timeout_s and transport_close_timeout_s. Closing twice is fine. Cancelling it stops
        the waiting; the closing goes on. Raises RuntimeBroken if reads could not be stopped: then the registered
        memory must stay until the process ends.
        """
        if self._state is RuntimeState.NEW:
            self._state = RuntimeState.CLOSED
        if self._state is RuntimeState.CLOSED:
            return
        if self._state is not RuntimeState.CLOSING:
            self._state = RuntimeState.CLOSING
            self._closing = asyncio.create_task(self._close(), name="kvflow-close")
        await asyncio.shield(self._closing)

    async def register_kv_caches(
        self, kv_caches: KVCaches, layout: CacheLayout, *, copy_blocks: BlockCopier | None = None
    ) -> None:
        """Make the cache readable by peers and writable by loads; once per runtime.

        Where the transport cannot reach the cache's device, or with Config.always_stage, blocks go through host
        buffers. `copy_blocks` copies between those and the cache (see `staging.BlockCopier`); without it kvflow copies
        itself, which needs tensors that torch can index.

        The tensors stay referenced until the runtime is closed. Raises LayoutError if they are not as `layout`
        says, ConfigError if the transport cannot reach their device. Cancelling leaves the runtime unregistered.
        """
        self._require_open()
        if self._cache is not None or self._registering:
            raise UsageError("a KV cache is registered already; a runtime has one")
        regions = map_regions(layout, kv_caches)
        buffer_device = choose_buffer_device(regions.device.kind, self._config.kv_buffer_device)
        staged = self._config.always_stage or buffer_device != regions.device.kind
        self._registering = True
        try:
            staging = await self._stage(kv_caches, layout, copy_blocks) if staged else None
            self._cache = await self._register(kv_caches, layout, regions, staging)
        except TransportError as error:
            raise ConfigError(f"cannot register {len(layout.layer_names)} layers: {error}") from error
        finally:
            self._registering = False

    def serve_blocks(self, request: ServeRequest) -> Lease:
        """Offer blocks to readers; the lease's ticket goes to the consumer, and awaiting the lease gives its outcome.

        The lease is in force when this returns. Raises RequestError (BlocksBusy if a block is being loaded).
        """
        return self._require_cache().serving.serve(request)

    async def load_blocks(self, request: LoadRequest) -> LoadReport:
        """Read the blocks that a ticket offers into local blocks.

        Waits its turn when others load, too (`LoadRequest.priority`). Raises RequestError, a PeerError, LeaseExpired,
        TransferFailed, Overloaded or DeadlineExceeded; never reports a success that is partial or stale. Cancelling
        returns within Config.cancel_grace_s; if bytes may still land then, the blocks are in `quarantines` (and in the
        error's `quarantine`) until they are safe.
        """
        return await self._require_cache().loader.load(request)

    async def release_blocks(self, ticket: Ticket | Mapping[str, Any]) -> bool:
        """Give up what a ticket offers without reading it, such as for a request that was rejected before decode.

        One message to each rank, no handshake; its lease ends as if we had read. Returns whether all ranks were told,
        within Config.handshake_timeout_s: a producer that has restarted or cannot be reached is no error, since
        leases run out. A release that comes late or twice changes nothing. Raises RequestError for a ticket that
        cannot be right. Cancelling stops it; some ranks may have been told then.
        """
        return await self._require_cache().loader.release(ticket)

    def statistics(self) -> RuntimeStatistics:
        """What is open now and what has happened so far. Legal in every state."""
        cache = self._cache
        supervising = self._supervisor is not None and not self._supervisor.done()
        return RuntimeStatistics(
            state=self._state,
            tasks=len(self._tasks) + supervising,
            blocks=cache.ledger.counts() if cache else None,
            buffers_used=cache.buffers_used if cache else 0,
            serving=cache.serving.statistics if cache else None,
            loading=cache.loader.statistics if cache else None,
            peers=cache.peers.states if cache else (),
            listener=self._listener.statistics if self._supervisor is not None else None,
            transport=self._transport.statistics,
            early_notifications=self._early_notifications,
        )

    async def _stage(self, kv_caches: KVCaches, layout: CacheLayout, copy_blocks: BlockCopier | None) -> HostBuffers:
        """Make the host buffers; on the copy thread, since that touches all their pages."""
        made: list[HostBuffers] = []
        await self._copier.run(lambda: made.append(HostBuffers(kv_caches, layout, self._config, copy_blocks)))
        return made[0]

    async def _register(
        self, kv_caches: KVCaches, layout: CacheLayout, regions: Regions, staging: HostBuffers | None
    ) -> _Cache:
        config = self._config
        seals, fetched = SealTable(config.leases_max), SealTable(config.loads_max)
        caches = kv_caches if staging is None else staging.caches
        regions = regions if staging is None else staging.regions
        await self._transport.register(map_spans(caches), regions.device, [kv_caches, *caches.values()])
        await self._transport.register([seals.span, fetched.span], HOST, (seals, fetched))
        agent_metadata = await self._transport.metadata()
        holding = holding_of(
            layout,
            tp_rank=config.tp_rank,
            tp_size=config.tp_size,
            pp_rank=config.pp_rank,
            pp_size=config.pp_size,
            model_kv_heads=config.num_kv_heads,
        )
        local = LocalRank(
            reader=self._agent_name,
            compatibility=wire.compatibility_of(layout, model=config.model),
            holding=holding,
            regions=regions,
        )
        ledger = BlockLedger(layout.num_blocks)
        scratch = Scratch(
            self._transport, regions.device, slot_bytes=config.scratch_slot_bytes_max, slots=config.scratch_slots_max
        )
        landing = Landing(config, kv_caches, layout, scratch, staging, self._copier)
        peers = Peers(config, self._transport, self._side_channel, local, landing, self._clock, self._spawn)
        sources = Sources(config, local, peers)
        return _Cache(
            layout=layout,
            regions=regions,
            local=local,
            ledger=ledger,
            seals=seals,
            serving=Serving(
                config,
                holding,
                ledger,
                seals,
                num_blocks=layout.num_blocks,
                block_size_bytes=layout.block_size_bytes,
                staging=staging,
                copier=self._copier,
                clock=self._clock,
                token_hex=self._world.token_hex,
                observers=self._observers,
                incarnation=self._incarnation,
                port=self._listener.port,
            ),
            loader=Loader(
                config,
                local=local,
                num_blocks=layout.num_blocks,
                ledger=ledger,
                seals=fetched,
                landing=landing,
                sources=sources,
                releases=Releases(config, reader=local.reader, sources=sources, peers=peers, transport=self._transport),
                renewals=Renewals(config, reader=local.reader, transport=self._transport, clock=self._clock),
                poller=self._poller,
                copier=self._copier,
                clock=self._clock,
                observers=self._observers,
            ),
            peers=peers,
            staging=staging,
            scratch=scratch,
            agent_metadata=agent_metadata,
        )

    async def _supervise(self, started: asyncio.Event) -> None:
        """The supervisor task: runs the services until told to stop, or until one dies."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._spawn(self._poller.run(), name="kvflow-poller")
                self._spawn(self._listener.serve(), name="kvflow-listener")
                started.set()
                await self._stop.wait()
                for task in self._tasks:
                    task.cancel()
        except* Exception as problems:  # noqa: BLE001 - whatever killed a service, everybody gets to know
            self._break(problems.exceptions[0])

    def _spawn(self, body: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
        if self._stop.is_set() or self._cause is not None:
            body.close()
            raise RuntimeClosed("the runtime is closing")
        task = self._group.create_task(body, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _break(self, cause: BaseException) -> None:
        """A service died: settle everybody."""
        logger.error("kvflow runtime %s broke", self._config.engine_id, exc_info=cause)
        self._cause = cause
        if self._state is RuntimeState.OPEN:
            self._state = RuntimeState.BROKEN
        if self._cache:
            self._cache.serving.close()
            self._cache.loader.close()

    async def _close(self) -> None:
        """The close task."""
        try:
            await self._drain()
            self._stop.set()
            if self._supervisor is not None:
                await self._supervisor
            if self._cache:
                await self._cache.peers.aclose()
            try:
                await self._transport.aclose(self._config.transport_close_timeout_s)
            except TransportError as error:
                raise RuntimeBroken(f"closing {self._config.engine_id!r}: {error}") from error
        finally:
            await self._copier.aclose()
            self._listener.close()
            self._state = RuntimeState.CLOSED

    async def _drain(self) -> None:
        """Let loads and leases end by themselves, then make them end, each within a bound."""
        if self._cache is None:
            return
        serving, loader = self._cache.serving, self._cache.loader
        if self._cause is None:
            await _bounded([serving.drained(), loader.drained()], self._config.drain_timeout_s)
        serving.close()
        loader.close()
        bound_s = self._config.seal_hold_s + self._config.drain_timeout_s
        waits = [serving.drained()] if self._cause else [serving.drained(), loader.drained()]
        await _bounded(waits, bound_s + self._config.cancel_grace_s)

    def _answer(self, header: wire.Header, request: wire.Request) -> wire.Reply:
        """Answer a peer on the side channel; never waits."""
        cache = self._cache
        if cache is None:
            return _refusal(f"engine {self._config.engine_id!r} has no KV cache registered yet")
        if self._state not in (RuntimeState.OPEN, RuntimeState.CLOSING):  # closing waits for readers of open leases
            return _refusal(f"engine {self._config.engine_id!r} is {self._state}")
        if request.target.engine_id != self._config.engine_id:
            expected = request.target.engine_id
            return _refusal(f"unknown engine: expected {expected!r}, this is {self._config.engine_id!r}")
        if header.fingerprint != cache.local.compatibility.fingerprint():
            return _refusal("the caches are not compatible", cache.local)
        rank = Rank(request.target.dp_rank, request.target.pp_rank, request.target.tp_rank)
        if rank != self._rank:
            return _refusal(f"expected {rank}, this is {self._rank}")
        match request:
            case wire.LeaseRequest():
                return cache.serving.find(request)
            case wire.ReleaseRequest():
                try:
                    return cache.serving.release(request)
                except wire.WireError as error:
                    return _refusal(str(error))
            case wire.ClockRequest():
                return wire.ClockShown(incarnation=self._incarnation, clock_s=self._clock.now_s())
            case wire.MetadataRequest():
                return self._metadata(cache)

    def _metadata(self, cache: _Cache) -> wire.Metadata:
        return wire.Metadata(
            engine_id=self._config.engine_id,
            incarnation=self._incarnation,
            clock_s=self._clock.now_s(),
            holding=cache.local.holding,
            agent_metadata=cache.agent_metadata,
            agent_metadata_crc32=wire.checksum(cache.agent_metadata),
            regions=wire.regions_to_wire(cache.regions),
            seals=wire.SealLocation(
                address=cache.seals.address(0), count=cache.seals.count, hold_s=self._config.seal_hold_s
            ),
            staged=cache.staging is not None,
        )

    def _on_notification(self, payload: bytes) -> None:
        if self._cache is None:
            self._early_notifications += 1
        else:
            self._cache.serving.on_notification(payload)

    def _require_open(self) -> None:
        match self._state:
            case RuntimeState.OPEN:
                return
            case RuntimeState.NEW:
                raise UsageError("the runtime is not open yet: use it as `async with Runtime(config) as rt`")
            case RuntimeState.BROKEN:
                raise RuntimeBroken(f"the runtime broke: {self._cause}") from self._cause
            case RuntimeState.CLOSING | RuntimeState.CLOSED:
                raise RuntimeClosed(f"the runtime is {self._state}")

    def _require_cache(self) -> _Cache:
        self._require_open()
        if self._cache is None:
            raise UsageError("no KV cache is registered yet: await register_kv_caches first")
        return self._cache


def _refusal(reason: str, local: LocalRank | None = None) -> wire.Refusal:
    """A "no"; with what we are, if that is the reason."""
    return wire.Refusal(
        reason=reason,
        version=wire.PROTOCOL_VERSION,
        compatibility=local.compatibility if local else None,
        holding=local.holding if local else None,
    )


async def _bounded(waits: Sequence[Coroutine[None, None, None]], timeout_s: float) -> None:
    """Wait for all of `waits`, but at most `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*waits)
    except TimeoutError:
        logger.warning("not done within %s s; going on", timeout_s)
