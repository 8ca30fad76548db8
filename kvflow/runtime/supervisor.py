"""The supervisor: opens, runs and closes everything that a runtime consists of, in order, and ends it if a part dies.

`Runtime` is the handle that users hold; nothing here refers to it, so that a handle which is dropped is noticed. One
task holds a task group with the poller, the listener and the handshakes. If one of the first two ends before it is
told to, by an error or because somebody has cancelled it, the runtime is *broken*: leases are revoked, loads fail, and
later calls raise RuntimeBroken with the cause.

Closing is carried out to its end by a task of its own. Hosts cancel all tasks when they end, that one included, so it
holds cancellation back: each of its steps is bounded and can be begun anew, and after a cancel it waits for nobody who
could still finish in peace. A runtime whose loop has gone is *abandoned*: what must not stay is given back without it.
"""

from __future__ import annotations

import asyncio
import atexit
import enum
import importlib.metadata
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass

from kvflow.config import Config
from kvflow.core.cache.groups import CacheGroup, groups_of
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.tensors import KVCaches
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.ledger import BlockCounts
from kvflow.core.protocol import messages
from kvflow.errors import RuntimeBroken, RuntimeClosed, RuntimeDraining, TransportBroken, UsageError
from kvflow.runtime.assembly import RegisteredCache, refusal, register
from kvflow.runtime.channel.protocol import Answered, ListenerStatistics
from kvflow.runtime.consumer.flight import Poller
from kvflow.runtime.consumer.load import LoadingStatistics
from kvflow.runtime.context import Identity, RankContext
from kvflow.runtime.drain import DrainReport, busy, drain, end
from kvflow.runtime.memory.host_buffers import BlockCopier
from kvflow.runtime.peers.table import PeerStatistics
from kvflow.runtime.producer.lease import ServingStatistics
from kvflow.runtime.records import Observers
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
    """A snapshot. Before a cache is registered, and in a runtime that was abandoned, its parts are None."""

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


class Supervisor:
    """Everything of one runtime but its handle."""

    def __init__(self, config: Config, observers: Observers, world: World) -> None:
        self.config = config
        self.rank = Rank.of(config)
        self.state = RuntimeState.NEW
        self.cache: RegisteredCache | None = None
        self._observers = observers
        self._world = world
        self._incarnation = world.token_hex(8)
        self._host = config.advertise_host or config.listen_host
        self._agent_name = messages.agent_name(config.engine_id, self.rank, self._incarnation)
        self._transport = world.transport(config, self._agent_name)
        self._side_channel = world.side_channel(config)
        self._clock = world.clock()
        self._cause: Exception | None = None
        self._early_notifications = 0
        self._tasks: dict[asyncio.Task[None], None] = {}  # in order, so that a simulation can be replayed
        self._supervision: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._hurried = False
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop that has opened it; None before."""

    def __str__(self) -> str:
        """As log lines name it."""
        return f"{self.config.engine_id!r} ({self.rank})"

    @property
    def address(self) -> str:
        return f"tcp://{self._host}:{self._listener.port}"

    async def open(self) -> None:
        """Start the transport, the listener and the poller. Raises ConfigError; cancelling leaves it closed."""
        if self.state is not RuntimeState.NEW:
            raise UsageError(f"a Runtime is opened once; {self} is {self.state}")
        self.state = RuntimeState.CLOSED  # until everything is there: a runtime that failed to open stays closed
        self.loop = asyncio.get_running_loop()
        await self._transport.open()
        try:
            self._listener = await self._side_channel.listen(self._answer)
        except BaseException:
            await self._transport.aclose(self.config.limits.transport_close_timeout_s)
            raise
        self._poller = Poller(self._transport, self._on_notification)
        self._copier = self._world.copier(f"kvflow-copy {self._agent_name}")
        self._stop = asyncio.Event()
        self._services_over = asyncio.Event()
        self.state = RuntimeState.OPEN
        if self._world.real:
            atexit.register(self.abandon, self.config.limits.transport_close_timeout_s)
        started = asyncio.Event()
        self._supervision = asyncio.create_task(self._supervise(started), name="kvflow-supervisor")
        self._supervision.add_done_callback(lambda _: self._never_ran(started))
        try:
            await started.wait()
            self.require_running()
        except BaseException:
            await self.aclose()
            raise
        logger.info("runtime %s opened at %s: %s", self, self.address, self._describe())

    async def aclose(self) -> None:
        """See `Runtime.aclose`."""
        if self.state is RuntimeState.NEW:
            self.state = RuntimeState.CLOSED
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        while self.state is not RuntimeState.CLOSED:
            self.state = RuntimeState.CLOSING
            if self._closing is None or self._closing.cancelled():  # before its first step: later it would go on
                self._closing = asyncio.create_task(self._close(), name="kvflow-close")
                self._closing.add_done_callback(seen)
            try:
                await asyncio.shield(self._closing)
            except asyncio.CancelledError:
                if not self._closing.cancelled() or (task is not None and task.cancelling() > cancels):
                    raise
        if self._supervision is not None and self._supervision is not task:
            await asyncio.wait([self._supervision])

    def abandon(self, wait_s: float = 0.0) -> None:
        """Give back what must not stay, without the loop, which is gone: sockets now, threads when reads have ended.

        Waits up to `wait_s` for the threads. Whoever waited on the loop was settled by the loop's own end.
        """
        if self.state in (RuntimeState.NEW, RuntimeState.CLOSED):
            return
        logger.warning("runtime %s was abandoned: its event loop ended, or Python did, before it was closed", self)
        self.state = RuntimeState.CLOSED
        self.cache = None
        atexit.unregister(self.abandon)
        self._listener.close()
        self._side_channel.abandon()
        self._transport.abandon(wait_s)
        self._copier.abandon(wait_s)

    async def drain(self, deadline_s: float) -> DrainReport:
        """See `Runtime.drain`."""
        self.state = RuntimeState.DRAINING
        return await self._drain(deadline_s)

    def statistics(self) -> RuntimeStatistics:
        cache = self.cache
        supervising = self._supervision is not None and not self._supervision.done()
        return RuntimeStatistics(
            state=self.state,
            tasks=len(self._tasks) + supervising,
            blocks=cache.ledger.counts() if cache else None,
            buffers_used=cache.route.buffers_used if cache else 0,
            serving=cache.serving.statistics if cache else None,
            loading=cache.loader.statistics if cache else None,
            peers=cache.peers.statistics if cache else (),
            readers=cache.readers.count if cache else 0,
            listener=self._listener.statistics if self._supervision is not None else None,
            transport=self._transport.statistics,
            early_notifications=self._early_notifications,
        )

    def require_running(self, *, new_work: bool = False) -> None:
        """The services are there; and they take `new_work`, if that is meant."""
        match self.state:
            case RuntimeState.DRAINING if new_work:
                raise RuntimeDraining(f"the runtime {self} drains: it takes no new work")
            case RuntimeState.OPEN | RuntimeState.DRAINING:
                return
            case RuntimeState.NEW:
                raise UsageError(f"the runtime {self} is not open yet: use it as `async with Runtime(config) as rt`")
        if self._cause is not None:
            raise RuntimeBroken(f"the runtime {self} broke: {self._cause}") from self._cause
        raise RuntimeClosed(f"the runtime {self} is {self.state}")

    async def register(
        self,
        kv_caches: KVCaches | Sequence[CacheGroup],
        layout: CacheLayout | None,
        copy_blocks: BlockCopier | None,
    ) -> None:
        """See `Runtime.register_kv_caches`."""
        groups = groups_of(kv_caches, layout)
        context = RankContext(
            config=self.config,
            identity=Identity(
                rank=self.rank,
                incarnation=self._incarnation,
                agent_name=self._agent_name,
                host=self._host,
                port=self._listener.port,
            ),
            clock=self._clock,
            spawn=self.spawn,
            observers=self._observers,
            transport=self._transport,
            side_channel=self._side_channel,
            token_hex=self._world.token_hex,
        )
        self.cache = await register(context, self._poller, self._copier, groups, copy_blocks)

    def spawn(self, body: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
        """See `context.Spawn`."""
        if self._stop.is_set() or self._cause is not None:
            body.close()
            raise RuntimeClosed(f"the runtime {self} is closing")
        task = self._group.create_task(self._watched(body), name=name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        task.add_done_callback(lambda _: body.close())  # cancelled before its first step, it has never begun
        return task

    async def _supervise(self, started: asyncio.Event) -> None:
        """The supervisor task: runs the services until told to stop, or until one ends before that.

        Cancelled from outside, by a host that ends, it closes everything before it goes: nobody else may be left to.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self.spawn(self._lasting(self._poller.run, "poller"), name="kvflow-poller")
                self.spawn(self._lasting(self._listener.serve, "listener"), name="kvflow-listener")
                started.set()
                await self._stop.wait()
                for task in list(self._tasks):
                    task.cancel()
        except asyncio.CancelledError:
            self._break(RuntimeBroken("the supervisor's task was cancelled from outside"))
            self._services_over.set()
            await self._close_whoever_cancels()
            raise
        finally:
            self._services_over.set()

    async def _close_whoever_cancels(self) -> None:
        while self.state is not RuntimeState.CLOSED:
            try:
                await self.aclose()
            except asyncio.CancelledError:
                continue  # bounded: each cancel makes the closing hurry
            except RuntimeBroken:
                return  # it is logged

    def _never_ran(self, started: asyncio.Event) -> None:
        """The supervisor's task has ended, perhaps cancelled before its first step: nobody may wait for it."""
        if not started.is_set():
            self._cause = RuntimeBroken("the supervisor's task was cancelled before it began")
            self.state = RuntimeState.BROKEN
            self._services_over.set()
            started.set()

    async def _watched(self, body: Coroutine[None, None, None]) -> None:
        """The body of every task: what it raises breaks the runtime."""
        try:
            await body
        except Exception as problem:  # noqa: BLE001 - whatever it is, everybody gets to know
            self._break(problem)

    async def _lasting(self, service: Callable[[], Awaitable[None]], name: str) -> None:
        """A service's task has to last: if somebody else than its supervisor cancels it, it has died."""
        try:
            await service()
        except asyncio.CancelledError:
            if not self._stop.is_set():
                self._break(RuntimeBroken(f"the {name}'s task was cancelled from outside"))
            raise

    def _break(self, cause: Exception) -> None:
        """A task died: settle everybody, once, and end the others."""
        if self._cause is not None or self._stop.is_set():
            return
        logger.error("runtime %s broke: %s: %s", self, type(cause).__name__, cause, exc_info=cause.__cause__)
        self._cause = cause
        self._stop.set()
        if self.state in (RuntimeState.OPEN, RuntimeState.DRAINING):
            self.state = RuntimeState.BROKEN
        if self.cache:
            self.cache.serving.close()
            self.cache.loader.close()

    async def _close(self) -> None:
        """The close task."""
        try:
            await self._carry_out(self._end_work)
            await self._carry_out(self._end_services)
            problem = await self._carry_out(self._end_transport)
            problem = await self._carry_out(self._end_copies) or problem
        finally:
            self._listener.close()
            self._side_channel.close()
            self.state = RuntimeState.CLOSED
            atexit.unregister(self.abandon)
        logger.info("runtime %s closed%s", self, f": {problem}" if problem else " in good order")
        if problem:
            raise RuntimeBroken(f"closing {self}: {problem}")

    async def _carry_out(self, step: Callable[[], Awaitable[str]]) -> str:
        """One step of closing, to its end: cancelled, it is begun anew in a hurry. Returns what went wrong, or ""."""
        while True:
            try:
                return await step()
            except asyncio.CancelledError:
                self._hurried = True
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()

    async def _end_work(self) -> str:
        """Drain, unless a service has died or there is no time, and let readers know that this rank goes."""
        cache = self.cache
        if cache is None:
            return ""
        if self._cause is not None:
            await end(cache.serving, cache.loader, self.config, broken=True)
        elif not self._hurried and busy(cache.serving, cache.loader):
            await self._drain(self.config.drain_timeout_s)
        else:
            await end(cache.serving, cache.loader, self.config)
        await cache.readers.tell()
        return ""

    async def _end_services(self) -> str:
        self._stop.set()
        await self._services_over.wait()
        if self.cache:
            await self.cache.peers.aclose()
        return ""

    async def _end_transport(self) -> str:
        try:
            await self._transport.aclose(self.config.limits.transport_close_timeout_s)
        except TransportError as error:
            return str(error)
        if self.cache and not isinstance(self._cause, TransportBroken):  # it has waited for the last read
            self.cache.loader.all_stopped()
        return ""

    async def _end_copies(self) -> str:
        bound_s = self.config.limits.transport_close_timeout_s
        return "" if await self._copier.aclose(bound_s) else f"a copy still runs after {bound_s} s"

    async def _drain(self, deadline_s: float) -> DrainReport:
        cache = self.cache
        if cache is None:
            return DrainReport(finished=True)
        return await drain(cache.serving, cache.loader, self.config, deadline_s)

    def _answer(self, header: messages.Header, request: messages.Request) -> Answered:
        """Answer a peer on the side channel, or promise to; never waits."""
        cache, engine_id = self.cache, self.config.engine_id
        if cache is None:
            return refusal(f"engine {engine_id!r} has no KV cache registered yet", transient=True)
        if self.state is RuntimeState.BROKEN:
            return refusal(f"engine {engine_id!r} is {self.state}")
        return cache.answer(header, request, draining=self.state is not RuntimeState.OPEN)

    def _on_notification(self, payload: bytes) -> None:
        if self.cache is None:
            self._early_notifications += 1
        else:
            self.cache.serving.on_notification(payload)

    def _describe(self) -> str:
        config = self.config
        backend = f" ({config.nixl_backend}, NIXL {_NIXL_VERSION})" if config.transport == "nixl" else ""
        transport = f"kvflow {_VERSION}, transport {config.transport}{backend}"
        curve = "off" if config.curve_secret_key_file is None else "on"
        return f"{transport}, CURVE {curve}, incarnation {self._incarnation}"


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


_VERSION, _NIXL_VERSION = _version_of("kvflow"), _version_of("nixl")


def seen(closing: asyncio.Future[None]) -> None:
    """The closing's error belongs to who waits for it; nobody may, and it is logged."""
    if not closing.cancelled():
        closing.exception()
