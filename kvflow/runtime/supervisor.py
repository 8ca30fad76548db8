"""The supervisor: opens, runs and closes the parts of a runtime in order, and ends them all if one dies.

`Runtime` is the handle that users hold. Nothing here refers to it, so that a handle which is dropped is noticed. The
listener, the side channel, the copy thread, the clock and the seals last as long as the runtime. Agents, poller,
ledger and peers last as long as one registration, which is an `Incarnation`. If a service dies the runtime is
*broken*: leases are revoked, loads fail, and later calls raise RuntimeBroken with the cause.

Unregistering ends one incarnation, closing ends everything. Both are errands: they go on if who waits is cancelled. A
closing that is cancelled no longer waits for leases and loads to end by themselves. A runtime whose loop has gone is
*abandoned*: sockets, threads and memory are given back without the loop.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvflow.config import Config
from kvflow.core.cache.groups import CacheGroup, groups_of
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.tensors import KVCaches
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.proof import SealTable
from kvflow.errors import (
    CacheUnregistered,
    RuntimeBroken,
    RuntimeClosed,
    RuntimeDraining,
    TransportBroken,
    UsageError,
)
from kvflow.hosts import address_at
from kvflow.logs import logger_of
from kvflow.runtime import open_files
from kvflow.runtime.assembly import RegisteredCache, register
from kvflow.runtime.channel.protocol import Answered, refusal
from kvflow.runtime.context import Identity, RankContext
from kvflow.runtime.drain import DrainReport, busy, drain, end, open_of
from kvflow.runtime.errand import Errand, carry_out
from kvflow.runtime.foreign import Foreign
from kvflow.runtime.incarnation import Incarnation
from kvflow.runtime.open_files import ReaderAdmission
from kvflow.runtime.own_loop import require_loop
from kvflow.runtime.part import Ending, Part
from kvflow.runtime.records import Observers
from kvflow.runtime.services import Services
from kvflow.runtime.statistics import Past, RuntimeState, RuntimeStatistics
from kvflow.runtime.world import World
from kvflow.staging.host_buffers import BlockCopier
from kvflow.transport.base import TransportError

logger = logger_of(__name__)


class Supervisor:
    """Everything of one runtime but its handle."""

    def __init__(
        self,
        config: Config,
        observers: Observers,
        world: World,
        foreign: Foreign | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        self.config = config
        self.rank = Rank.of(config)
        self.state = RuntimeState.NEW
        self.cache: RegisteredCache | None = None
        """The registered cache, while it takes work."""
        self.held: RegisteredCache | None = None
        """The cache, also while it is being unregistered: its books are open still."""
        self._observers = observers
        self._world = world
        self._foreign = foreign
        self.parts = tuple(parts)
        self._host = config.advertise_host or config.listen_host
        self._incarnation: Incarnation | None = self._new_incarnation()
        self._side_channel = world.side_channel(config)
        self._clock = world.clock()
        self._seals = SealTable(config.limits.leases_max)
        self._past = Past()
        self._registering = False
        self._early_notifications = 0
        self._admission = ReaderAdmission(config.engine_id)
        self._services: Services | None = None
        self._unregistering = Errand(self._unregister, "kvflow-unregister")
        self._closing = Errand(self._close, "kvflow-close")
        self._hurried = False
        self._pid = os.getpid()
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop that has opened it; None before."""

    def __str__(self) -> str:
        """Name in log lines."""
        return f"{self.config.engine_id!r} ({self.rank})"

    @property
    def forked(self) -> bool:
        """True in a child of the process that has opened it: its threads, and what they own, are the parent's."""
        return self._pid != os.getpid()

    @property
    def address(self) -> str:
        return address_at(self._host, self._listener.port)

    async def open(self) -> None:
        """Start the transport, the listener and the poller. Raises ConfigError; cancelling leaves it closed."""
        if self.state is not RuntimeState.NEW:
            raise UsageError(f"a Runtime is opened once; {self} is {self.state}")
        self._pid = os.getpid()
        self.state = RuntimeState.CLOSED  # until everything is there: a runtime that failed to open stays closed
        self.loop = asyncio.get_running_loop()
        first = self._incarnation
        assert first is not None, "made with the supervisor"
        if self._world.real:
            open_files.prepare(self.config)
        if self.config.advertise_toward is not None:
            self._host = await self._world.own_host(self.config)
            self.config = replace(self.config, advertise_host=self._host)
        await first.open()
        try:
            self._listener = await self._side_channel.listen(self._answer)
            if self._foreign is not None:
                self._listener.strangers = self._answer_stranger
        except BaseException:
            await first.transport.aclose(self.config.limits.transport_close_timeout_s)
            raise
        self._copier = self._world.copier(f"kvflow-copy {first.agent_name}")
        self._services = Services(str(self), self._on_break, self.aclose)
        self.state = RuntimeState.OPEN
        if self._world.real:
            atexit.register(self.abandon, self.config.limits.transport_close_timeout_s)
        try:
            await self._services.start(partial(self._begin, first, self._services))
            self.require_running()
        except BaseException:
            await self.aclose()
            raise
        logger.info("runtime %s opened at %s: %s", self, self.address, self._describe())

    def _begin(self, first: Incarnation, services: Services) -> None:
        """Start the services that run from the beginning."""
        first.run(services)
        services.must_last(services.spawn(self._listener.serve(), name="kvflow-listener"), "listener")

    async def aclose(self) -> None:
        """See `Runtime.aclose`."""
        if self.forked:
            self.state = RuntimeState.CLOSED
            return
        if self.state is RuntimeState.NEW:
            self.state = RuntimeState.CLOSED
        if self.state is not RuntimeState.CLOSED:
            self.state = RuntimeState.CLOSING
            await self._closing.done()
        if self._services is not None:
            await self._services.supervised()

    def abandon(self, wait_s: float = 0.0) -> None:
        """Give sockets back now, and threads when reads have ended, without the loop, which is gone.

        Waits up to `wait_s` for the threads. Whoever waited on the loop was settled by the loop's own end.
        """
        if self.forked or self.state in (RuntimeState.NEW, RuntimeState.CLOSED):
            self.state = RuntimeState.CLOSED
            return
        logger.warning("runtime %s was abandoned: its event loop ended, or Python did, before it was closed", self)
        self.state = RuntimeState.CLOSED
        self.cache = self.held = None
        atexit.unregister(self.abandon)
        self._listener.close()
        self._side_channel.abandon()
        if self._incarnation is not None:
            self._incarnation.transport.abandon(wait_s)
        for part in self.parts:
            part.end(Ending.ABANDONED, wait_s)
        self._copier.abandon(wait_s)

    async def drain(self, deadline_s: float) -> DrainReport:
        """See `Runtime.drain`."""
        self.state, cache = RuntimeState.DRAINING, self.held
        return DrainReport(finished=True) if cache is None else await drain(cache, self.config, deadline_s)

    def statistics(self) -> RuntimeStatistics:
        cache, past, services = self.held, self._past, self._services
        return RuntimeStatistics(
            state=self.state,
            tasks=services.count if services else 0,
            blocks=cache.ledger.counts() if cache else None,
            buffers_used=cache.route.buffers_used if cache else 0,
            serving=past.with_serving(cache.serving.statistics if cache else None),
            loading=past.with_loading(cache.loader.statistics if cache else None),
            peers=cache.peers.statistics if cache else (),
            parts={part.name: now for part in self.parts if (now := part.statistics) is not None},
            sharing=cache.sharing.statistics if cache and cache.sharing else None,
            prefixes=cache.prefixes.statistics if cache else None,
            readers=cache.readers.count if cache else 0,
            readers_refused=self._admission.refused,
            listener=self._listener.statistics if services else None,
            transport=past.with_transport(self._incarnation.transport.statistics if self._incarnation else None),
            early_notifications=self._early_notifications,
        )

    def require_running(self, *, new_work: bool = False) -> None:
        """Raise unless the runtime runs and, with `new_work`, takes new work."""
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

    def require(self, what: str, *, new_work: bool) -> None:
        """Raise unless the runtime runs, this is its loop and, with `new_work`, it takes new work."""
        self.require_running()
        require_loop(self.loop, what)
        if new_work:
            self.require_running(new_work=True)

    def require_cache(self) -> RegisteredCache:
        """The cache that takes work. UsageError if none was registered ever, CacheUnregistered if none is now."""
        if self.cache is not None:
            return self.cache
        if self.held is not None or self._past.serving is not None:
            raise CacheUnregistered(f"the cache of runtime {self} was unregistered: await register_kv_caches first")
        raise UsageError("no KV cache is registered yet: await register_kv_caches first")

    async def register(
        self,
        kv_caches: KVCaches | Sequence[CacheGroup],
        layout: CacheLayout | None,
        copy_blocks: BlockCopier | None,
    ) -> None:
        """See `Runtime.register_kv_caches`. What is left of a registration before is waited for first."""
        if self.cache is not None or self._registering:
            raise UsageError("a KV cache is registered already; a runtime has one: await unregister first")
        groups = groups_of(kv_caches, layout)
        self._registering = True
        try:
            await self._unregistering.over()
            self.require_running(new_work=True)
            await self._register(groups, copy_blocks)
        finally:
            self._registering = False

    async def unregister(self) -> None:
        """See `Runtime.unregister`."""
        if self._registering:
            raise UsageError("a KV cache is being registered: await register_kv_caches first")
        if self.cache is not None:
            self.cache.serving.close()
            self.cache.loader.close(unregistered=True)
            for part in self.parts:
                part.end(Ending.UNREGISTERED)
            self.cache = None
        if self.held is not None:
            await self._unregistering.done()
        await self._unregistering.over()  # a registration that failed may be ending

    async def _register(self, groups: Sequence[CacheGroup], copy_blocks: BlockCopier | None) -> None:
        assert self._services is not None, "it runs"
        incarnation, services = self._incarnation, self._services
        try:
            if incarnation is None:
                incarnation = self._incarnation = self._new_incarnation()
                await incarnation.open()
                incarnation.run(services)
            context, foreign = self._context(incarnation), self._foreign
            cache = self.held = await register(
                context, incarnation.poller, self._copier, groups, copy_blocks, foreign, self.parts
            )
            for part in self.parts:
                await part.registered(self, cache)
            self.require_running(new_work=True)
        except BaseException:
            await self._unregistering.done()
            raise
        self.cache = cache

    def _context(self, incarnation: Incarnation) -> RankContext:
        return RankContext(
            config=self.config,
            identity=Identity(
                rank=self.rank,
                incarnation=incarnation.name,
                agent_name=incarnation.agent_name,
                host=self._host,
                port=self._listener.port,
            ),
            clock=self._clock,
            spawn=incarnation.spawn,
            observers=self._observers,
            transport=incarnation.transport,
            side_channel=self._side_channel,
            seals=self._seals,
            token_hex=self._world.token_hex,
        )

    def _new_incarnation(self) -> Incarnation:
        return Incarnation(self.config, self._world, self._on_notification)

    @property
    def _cause(self) -> Exception | None:
        return self._services.cause if self._services is not None else None

    def _on_break(self) -> None:
        """Settle everybody, since a service has died."""
        if self.state in (RuntimeState.OPEN, RuntimeState.DRAINING):
            self.state = RuntimeState.BROKEN
        if self.held:
            self.held.serving.close()
            self.held.loader.close()
            for part in self.parts:
                part.end(Ending.CLOSED)

    async def _unregister(self) -> None:
        """Body of the errand: end a registration, also one that is half done."""
        services, cache = self._services, self.held
        assert services is not None, "it was opened"
        await carry_out(self._end_work)
        if self._incarnation is not None:
            self._incarnation.poller.wait_for_transport()  # flights wait on for their reads to stop
        problem = await carry_out(self._end_incarnation)
        if cache is not None:
            problem = problem or await carry_out(partial(self._end_copies_of, cache))
        if problem and cache is not None:
            services.break_down(RuntimeBroken(f"the cache could not be unregistered: {problem}"))
            raise RuntimeBroken(f"unregistering the cache of {self}: {problem}")
        self._past = self._past_now()
        self.cache = self.held = self._incarnation = None
        logger.info("runtime %s has no cache any more: %s", self, problem or "its memory is deregistered")

    def _past_now(self) -> Past:
        now = self.statistics()
        return Past(serving=now.serving, loading=now.loading, transport=now.transport)

    async def _close(self) -> None:
        """Body of the errand: end everything."""
        hurry = self._hurry
        assert self._services is not None, "it was opened"
        try:
            await carry_out(self._unregistering.over, hurry)
            await carry_out(partial(self._end_work, drained=self.cache is not None), hurry)
            await carry_out(self._services.stop, hurry)
            problem = await carry_out(self._end_incarnation, hurry)
            problem = await carry_out(self._end_copies, hurry) or problem
        finally:
            self._listener.close()
            self._side_channel.close()
            self.state = RuntimeState.CLOSED
            atexit.unregister(self.abandon)
        logger.info("runtime %s closed%s", self, f": {problem}" if problem else " in good order")
        if problem:
            raise RuntimeBroken(f"closing {self}: {problem}")

    def _hurry(self) -> None:
        self._hurried = True

    async def _end_work(self, *, drained: bool = False) -> None:
        """End leases and loads, and tell readers. With `drained` they may first end by themselves, if there is time."""
        cache = self.held
        if cache is None:
            return
        if self._cause is not None:
            await end(cache, self.config, broken=True)
        elif drained and not self._hurried and busy(cache):
            await drain(cache, self.config, self.config.drain_timeout_s)
        else:
            await end(cache, self.config)
        await cache.readers.tell()

    async def _end_incarnation(self) -> str:
        """End its tasks and its transport, once no read is under way, and no copy. Returns what went wrong, or ""."""
        incarnation, cache = self._incarnation, self.held
        if incarnation is None:
            return ""
        bound_s = self.config.limits.transport_close_timeout_s
        await incarnation.end_tasks()
        if cache:
            await cache.peers.aclose()
        problem = ""
        try:
            await incarnation.transport.aclose(bound_s)
        except TransportError as error:
            problem = str(error)
        stopped = not problem and not isinstance(self._cause, TransportBroken)  # after the last read
        incarnation.poller.settle(stopped=stopped)
        if cache and stopped:
            cache.loader.all_stopped()
        for part in self.parts:
            problem = await part.closed(bound_s) or problem
        return problem

    async def _end_copies_of(self, cache: RegisteredCache) -> str:
        """Wait until no copy of a registration runs: the copy thread stays. Then nothing may be left of it."""
        bound_s = self.config.limits.transport_close_timeout_s
        try:
            async with asyncio.timeout(bound_s):
                await self._copier.run(lambda: None)  # jobs run one after the other
        except TimeoutError:
            return f"a copy still runs after {bound_s} s"
        loads, leases = cache.loader.open_requests, cache.serving.open_requests
        parts = {part.name: count for part in self.parts if (count := open_of(part))}
        if not (loads or leases or parts):
            return ""
        return f"bytes of loads {loads} may still land, leases {leases} hold their blocks, requests of parts: {parts}"

    async def _end_copies(self) -> str:
        bound_s = self.config.limits.transport_close_timeout_s
        return "" if await self._copier.aclose(bound_s) else f"a copy still runs after {bound_s} s"

    def _answer(self, header: codec.Header, request: messages.Request) -> Answered:
        """Answer a peer on the side channel, or promise to; never waits."""
        cache, engine_id = self.cache, self.config.engine_id
        if cache is None:
            return refusal(f"engine {engine_id!r} has no KV cache registered yet", transient=True)
        if self.state is RuntimeState.BROKEN:
            return refusal(f"engine {engine_id!r} is {self.state}")
        if isinstance(request, messages.MetadataRequest) and (why := self._no_new_reader()):
            return refusal(f"engine {engine_id!r} takes no new reader: {why}", transient=True)
        return cache.answer(header, request, draining=self.state is not RuntimeState.OPEN)

    def _answer_stranger(self, question: bytes) -> list[bytes] | None:
        """Answer a reader of another make; None if it gets no answer."""
        cache = self.cache
        if cache is None or cache.strangers is None or self.state is not RuntimeState.OPEN or self._no_new_reader():
            return None
        return cache.strangers.answer(question)

    def _no_new_reader(self) -> str:
        """Return why this rank can connect no new reader now, or ""."""
        if self._incarnation is not None and self._incarnation.transport.statistics.deaf:
            return "its transport's listener is closed, as when open files run out: register its cache again"
        return self._admission.refusal(self._clock.now_s())

    def _on_notification(self, payload: bytes) -> None:
        if self.held is None:
            self._early_notifications += 1
        elif self.held.strangers is None or not self.held.strangers.hears(payload):
            self.held.serving.on_notification(payload)

    def _describe(self) -> str:
        config = self.config
        backend = f" ({config.nixl_backend}, NIXL {_NIXL_VERSION})" if config.transport == "nixl" else ""
        parts = "".join(f", {part.name}" for part in self.parts)
        transport = f"kvflow {_VERSION}, transport {config.transport}{backend}{parts}"
        return f"{transport}, CURVE {'off' if config.curve_secret_key_file is None else 'on'}"


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


_VERSION, _NIXL_VERSION = _version_of("kvflow"), _version_of("nixl")
