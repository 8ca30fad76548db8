"""The Runtime: what users hold. It owns every service, starts them in order and ends them in the reverse order.

One supervisor task holds a task group with the poller, the listener and the handshakes. If a service dies, the group
ends, everybody who waits is settled, and later calls raise RuntimeBroken with the cause.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kvflow import checks
from kvflow.config import Config
from kvflow.core import wire
from kvflow.core.layout import CacheLayout
from kvflow.core.ledger import BlockCounts
from kvflow.core.tensors import KVCaches
from kvflow.core.ticket import Ticket
from kvflow.core.topology import Rank
from kvflow.errors import ConfigError, Quarantine, RuntimeBroken, RuntimeClosed, RuntimeDraining, UsageError
from kvflow.runtime.answers import answer, refusal
from kvflow.runtime.cache import RegisteredCache, Services, register
from kvflow.runtime.drain import DrainReport, busy, drain, end
from kvflow.runtime.lease import Lease, ServeRequest, ServingStatistics
from kvflow.runtime.load import LoadingStatistics, LoadReport, LoadRequest
from kvflow.runtime.peers import PeerStatistics
from kvflow.runtime.poller import Poller
from kvflow.runtime.prewarm import PeerAddress, Prewarmed, prewarm
from kvflow.runtime.records import Observer, Observers
from kvflow.runtime.side_channel import ListenerStatistics
from kvflow.runtime.staging import BlockCopier
from kvflow.runtime.world import World
from kvflow.transport.base import TransportError, TransportStatistics

logger = logging.getLogger(__name__)


class RuntimeState(enum.StrEnum):
    NEW = "new"
    OPEN = "open"
    DRAINING = "draining"
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
    peers: tuple[PeerStatistics, ...]
    readers: int
    """Ranks that have connected to this one and will be told when it goes."""
    listener: ListenerStatistics | None
    transport: TransportStatistics
    early_notifications: int
    """Notifications that came before a cache was registered, when no lease could exist."""


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
        self._config = checks.instance(config, Config, "config", error=ConfigError)
        self._observers = Observers(observers)
        self._world = checks.instance(world, World, "world", error=ConfigError)
        self._rank = Rank.of(config)
        self._incarnation = world.token_hex(8)
        self._host = config.advertise_host or config.listen_host
        self._agent_name = wire.agent_name(config.engine_id, self._rank, self._incarnation)
        self._transport = world.transport(config, self._agent_name)
        self._side_channel = world.side_channel(config)
        self._clock = world.clock()
        self._state = RuntimeState.NEW
        self._cause: BaseException | None = None
        self._registering = False
        self._cache: RegisteredCache | None = None
        self._early_notifications = 0
        self._tasks: dict[asyncio.Task[None], None] = {}  # in order, so that a simulation can be replayed
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
        self._require_running()
        return f"tcp://{self._host}:{self._listener.port}"

    @property
    def quarantines(self) -> tuple[Quarantine, ...]:
        """Blocks in which bytes may still land although their load has ended; each can be awaited."""
        return self._cache.loader.quarantines if self._cache else ()

    def quarantines_of(self, request_id: str) -> tuple[Quarantine, ...]:
        """Those of `quarantines` that loads of this request have left: for cancelled ones, whose error carries none."""
        return tuple(one for one in self.quarantines if one.request_id == request_id)

    async def __aenter__(self) -> Self:
        """Start the transport, the listener and the poller. Raises ConfigError if one cannot be had.

        Cancelling leaves it closed.
        """
        if self._state is not RuntimeState.NEW:
            raise UsageError(f"a Runtime is opened once; this one is {self._state}")
        self._state = RuntimeState.CLOSED  # until everything is there: a runtime that failed to open stays closed
        await self._transport.open()
        try:
            self._listener = await self._side_channel.listen(self._answer)
        except BaseException:
            await self._transport.aclose(self._config.transport_close_timeout_s)
            raise
        self._poller = Poller(self._transport, self._on_notification)
        self._copier = self._world.copier(f"kvflow-copy {self._agent_name}")
        self._stop = asyncio.Event()
        self._state = RuntimeState.OPEN
        started = asyncio.Event()
        self._supervisor = asyncio.create_task(self._supervise(started), name="kvflow-supervisor")
        try:
            await started.wait()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close in order: no new work, let loads and leases finish, revoke what is left, deregister, stop everything.

        Bounded by Config.drain_timeout_s and transport_close_timeout_s. Closing twice is fine. Cancelling it stops
        the waiting; the closing goes on. Raises RuntimeBroken if reads, or a copy, could not be stopped: then the
        registered memory must stay until the process ends.
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
        self._registering = True
        try:
            self._cache = await register(self._services(), kv_caches, layout, copy_blocks)
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
        returns within Config.cancel_grace_s; if bytes may still land then, the blocks are in `quarantines` (see also
        `quarantines_of`, and an error's `quarantine`) until they are safe.
        """
        return await self._require_cache().loader.load(request)

    async def release_blocks(self, ticket: Ticket | Mapping[str, Any]) -> bool:
        """Give up what a ticket offers without reading it, such as for a request that was rejected before decode.

        One message to each rank, no handshake; its lease ends as if we had read. Returns whether all ranks were told,
        within Config.handshake_timeout_s: a producer that has restarted or cannot be reached is no error, since
        leases run out. A release that comes late or twice changes nothing. Raises RequestError for a ticket that
        cannot be right. Cancelling stops it; some ranks may have been told then.
        """
        return await self._require_cache().releases.release(ticket)

    def keep_leases(self, ticket: Ticket | Mapping[str, Any]) -> AbstractContextManager[None]:
        """Keep what a ticket offers while a request waits for its load, as in `with runtime.keep_leases(ticket): ...`.

        Nothing waits for it: the ticket's ranks are connected, and its leases renewed, beside the block, up to
        Config.lease_lifetime_s; how often is in `statistics().loading.renewals`. A lease that cannot be kept raises
        nothing here; its load says why. Raises RequestError for a ticket that cannot be right.
        """
        return self._require_cache().keeping.keep(ticket)

    async def prewarm(self, engines: Iterable[PeerAddress | Ticket | Mapping[str, Any]]) -> tuple[Prewarmed, ...]:
        """Connect to engines before the first load from them, so that no load waits for a handshake.

        Each is named by the address of one of its ranks, or by a ticket of it. Returns one result for each, in order,
        with the error if there was one; one bad engine does not keep others from being connected. Takes at most
        Config.handshake_timeout_s for each rank. Cancelling stops the waiting; handshakes under way go on.
        """
        cache = self._require_cache()
        return await prewarm(cache.sources, cache.peers, engines)

    async def forget_peer(self, engine_id: str, address: str | None = None) -> bool:
        """Forget all ranks of an engine, or the one at an address: connections, failures, waits.

        The next load from it starts from scratch. Loads that read from it now go on; the transport forgets the engine
        when they have left. Returns whether that was so within Config.handshake_timeout_s; if not it will be later.
        Cancelling stops the waiting.
        """
        self._require_running()
        checks.text(engine_id, "engine_id")
        if address is not None:
            checks.text(address, "address")
        return self._cache is None or await self._cache.peers.forget(engine_id, address)

    async def drain(self, deadline_s: float | None = None) -> DrainReport:
        """Take no new work, tell readers, and wait until all leases and loads have ended, or until `deadline_s`.

        From the first moment `serve_blocks` and `load_blocks` raise RuntimeDraining, and readers that come are refused
        with PeerNotReady unless they have a ticket of an open lease. At the deadline (Config.drain_timeout_s if None)
        leases are revoked and loads ended, which takes at most Config.seal_hold_s, cancel_grace_s and drain_timeout_s.
        Draining twice is fine. Cancelling stops the waiting: the runtime stays draining, and nothing is revoked.
        """
        self._require_running()
        if deadline_s is not None:
            deadline_s = checks.seconds(deadline_s, "drain: deadline_s", error=UsageError)
        self._state = RuntimeState.DRAINING
        return await self._drain(self._config.drain_timeout_s if deadline_s is None else deadline_s)

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
            peers=cache.peers.statistics if cache else (),
            readers=cache.readers.count if cache else 0,
            listener=self._listener.statistics if self._supervisor is not None else None,
            transport=self._transport.statistics,
            early_notifications=self._early_notifications,
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
                for task in list(self._tasks):
                    task.cancel()
        except* Exception as problems:  # noqa: BLE001 - whatever killed a service, everybody gets to know
            self._break(problems.exceptions[0])

    def _spawn(self, body: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
        if self._stop.is_set() or self._cause is not None:
            body.close()
            raise RuntimeClosed("the runtime is closing")
        try:
            task = self._group.create_task(body, name=name)
        except RuntimeError as error:  # a service has died, and the others are just ending
            body.close()
            raise RuntimeClosed("the runtime is breaking") from error
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def _break(self, cause: BaseException) -> None:
        """A service died: settle everybody."""
        logger.error("kvflow runtime %s broke", self._config.engine_id, exc_info=cause)
        self._cause = cause
        if self._state in (RuntimeState.OPEN, RuntimeState.DRAINING):
            self._state = RuntimeState.BROKEN
        if self._cache:
            self._cache.serving.close()
            self._cache.loader.close()

    async def _close(self) -> None:
        """The close task."""
        try:
            await self._end_work()
            self._stop.set()
            if self._supervisor is not None:
                await self._supervisor
            if self._cache:
                await self._cache.peers.aclose()
            try:
                await self._transport.aclose(self._config.transport_close_timeout_s)
            except TransportError as error:
                raise RuntimeBroken(f"closing {self._config.engine_id!r}: {error}") from error
            if self._cache and self._cause is None:
                self._cache.loader.all_stopped()
        finally:
            bound_s = self._config.transport_close_timeout_s
            copied = await self._copier.aclose(bound_s)
            self._listener.close()
            self._side_channel.close()
            self._state = RuntimeState.CLOSED
        if not copied:
            raise RuntimeBroken(f"closing {self._config.engine_id!r}: a copy still runs after {bound_s} s")

    async def _end_work(self) -> None:
        """Drain, unless a service has died, and let readers know that this rank goes."""
        cache = self._cache
        if cache is None:
            return
        if self._cause is not None:
            await end(cache.serving, cache.loader, self._config, broken=True)
        elif busy(cache.serving, cache.loader):
            await self._drain(self._config.drain_timeout_s)
        else:
            await end(cache.serving, cache.loader, self._config)
        await cache.readers.tell(closing=True)

    async def _drain(self, deadline_s: float) -> DrainReport:
        cache = self._cache
        if cache is None:
            return DrainReport(finished=True)
        async with asyncio.TaskGroup() as group:
            group.create_task(cache.readers.tell(closing=False), name="kvflow-goodbye")
            return await drain(cache.serving, cache.loader, self._config, deadline_s)

    def _services(self) -> Services:
        return Services(
            config=self._config,
            world=self._world,
            observers=self._observers,
            clock=self._clock,
            transport=self._transport,
            side_channel=self._side_channel,
            poller=self._poller,
            copier=self._copier,
            spawn=self._spawn,
            agent_name=self._agent_name,
            incarnation=self._incarnation,
            rank=self._rank,
            host=self._host,
            port=self._listener.port,
        )

    def _answer(self, header: wire.Header, request: wire.Request) -> wire.Reply:
        """Answer a peer on the side channel; never waits."""
        cache, engine_id = self._cache, self._config.engine_id
        if cache is None:
            return refusal(f"engine {engine_id!r} has no KV cache registered yet", passing=True)
        if self._state is RuntimeState.BROKEN:
            return refusal(f"engine {engine_id!r} is {self._state}")
        return answer(cache, header, request, draining=self._state is not RuntimeState.OPEN)

    def _on_notification(self, payload: bytes) -> None:
        if self._cache is None:
            self._early_notifications += 1
        else:
            self._cache.serving.on_notification(payload)

    def _require_open(self) -> None:
        """New work is possible."""
        self._require_running()
        if self._state is RuntimeState.DRAINING:
            raise RuntimeDraining(f"the runtime {self._config.engine_id!r} drains: it takes no new work")

    def _require_running(self) -> None:
        """The services are there."""
        match self._state:
            case RuntimeState.OPEN | RuntimeState.DRAINING:
                return
            case RuntimeState.NEW:
                raise UsageError("the runtime is not open yet: use it as `async with Runtime(config) as rt`")
            case RuntimeState.BROKEN:
                raise RuntimeBroken(f"the runtime broke: {self._cause}") from self._cause
            case RuntimeState.CLOSING | RuntimeState.CLOSED:
                raise RuntimeClosed(f"the runtime is {self._state}")

    def _require_cache(self) -> RegisteredCache:
        self._require_open()
        if self._cache is None:
            raise UsageError("no KV cache is registered yet: await register_kv_caches first")
        return self._cache
