"""The supervisor: opens, runs and closes the services of a runtime in order, and ends all if one dies.

Nothing here refers to `Runtime`, the handle that users hold, so that Python frees a dropped handle, which then closes
the runtime. The listener, side channel, copy thread, clock and seals last as long as the runtime; agents, poller,
ledger and peers as long as one `Registration`. If a service dies, the runtime is *broken*: leases are revoked, loads
fail, and later calls raise RuntimeBroken with the cause.

Unregistering ends one registration; closing ends everything. Both run to their end even if the caller is cancelled
(`Tasks.run_to_end`). If the closing itself is cancelled, it stops waiting for leases and loads to end by themselves. If
the event loop no longer runs, the runtime is *abandoned*: sockets, threads and memory are released without the loop.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace

from kvflow import forks
from kvflow.config import Config
from kvflow.core.cache.groups import CacheGroup, groups_of
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.tensors import KVCaches
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.proof import SealTable
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import (
    CacheUnregistered,
    RuntimeBroken,
    RuntimeClosed,
    RuntimeDraining,
    UsageError,
)
from kvflow.hosts import address_at
from kvflow.logs import logger_of
from kvflow.runtime import open_files
from kvflow.runtime.channel.protocol import Answered, refusal
from kvflow.runtime.incarnation import Incarnation, RuntimeFacts, register
from kvflow.runtime.memory import BlockCopier
from kvflow.runtime.open_files import ReaderAdmission
from kvflow.runtime.optional import requests_of_parts
from kvflow.runtime.part import Ending, Part, PartHost
from kvflow.runtime.rank import Weights
from kvflow.runtime.records import Observers
from kvflow.runtime.registration import Registration
from kvflow.runtime.statistics import RuntimeState, RuntimeStatistics, totals
from kvflow.runtime.tasks import Tasks, require_loop, retry_if_cancelled
from kvflow.runtime.world import World

logger = logger_of(__name__)


class Supervisor:
    """The implementation of one runtime. The user's handle, `Runtime`, passes every call to this object."""

    def __init__(
        self,
        config: Config,
        observers: Observers,
        world: World,
        parts: Sequence[Part] = (),
    ) -> None:
        self.config = config
        self.rank = Rank.of(config)
        self.state = RuntimeState.NEW
        self.incarnation: Incarnation | None = None
        """The registered cache while it takes new work, else None."""
        self.observers = observers
        self.world = world
        self.parts = tuple(parts)
        self.weights = Weights()
        self.host = config.advertise_host or config.listen_host
        self.tasks = Tasks(str(self), self._on_break, self.aclose)
        self.registration: Registration | None = self._new_registration()
        """The current registration, made before its cache is registered; None once all of its work has ended."""
        self.side_channel = world.side_channel(config)
        self.clock = world.clock()
        self.seals = SealTable(config.limits.leases_max)
        self._past_statistics: RuntimeStatistics | None = None
        """Statistics of all ended registrations, added up; None before the first has ended."""
        self._registering = False
        self._admission = ReaderAdmission(config.engine_id)
        self._draining_stopped = False
        self.in_forked_child = False
        """True in a forked child, where threads and sockets belong to the parent process."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop that opened the runtime; None before the opening."""

    def __str__(self) -> str:
        return f"{self.config.engine_id!r} ({self.rank})"

    def forked(self) -> None:
        """Mark the runtime as closed. Called by `forks` in a forked child, which must not use the parent's runtime."""
        self.in_forked_child = True
        self.state = RuntimeState.CLOSED
        self.tasks.forget()

    @property
    def address(self) -> str:
        return address_at(self.host, self.listener.port)

    async def open(self) -> None:
        """Start the transport, the listener and the poller. If cancelled, the runtime is closed."""
        if self.state is not RuntimeState.NEW:
            raise UsageError(f"a Runtime is opened once; {self} is {self.state}")
        forks.register(self)
        self.state = RuntimeState.CLOSED  # until all has started: a runtime that fails to open stays closed
        self.loop = asyncio.get_running_loop()
        first = self.registration
        assert first is not None, "made with the supervisor"
        if self.world.real_process:
            open_files.prepare(self.config)
        if self.config.advertise_toward is not None:
            self.host = await self.world.own_host(self.config)
            self.config = replace(self.config, advertise_host=self.host)
        await first.open()
        try:
            of_parts = [kind for part in self.parts for kind in part.answers]
            requests = codec.requests_with([*requests_of_parts(), *of_parts])
            self.listener = await self.side_channel.listen(self._answer, requests)
            self.listener.answer_bare = self._answer_bare
        except BaseException:
            await first.transport.aclose(self.config.limits.transport_close_timeout_s)
            raise
        self.copy_thread = self.world.copy_thread(f"kvflow-copy {first.agent_name}")
        self.state = RuntimeState.OPEN
        if self.world.real_process:
            atexit.register(self.abandon, self.config.limits.transport_close_timeout_s)
        try:
            await self.tasks.start(self._start_services)
            self.require_running()
        except BaseException:
            await self.aclose()
            raise
        logger.info("runtime %s opened at %s: %s", self, self.address, self._describe())

    def _start_services(self) -> None:
        """Start two tasks: the poller, which receives the transport's events, and the listener of the side channel."""
        assert self.registration is not None, "made with the supervisor"
        self.registration.run()
        self.tasks.break_if_cancelled(self.tasks.spawn(self.listener.serve(), name="kvflow-listener"), "listener")

    async def aclose(self) -> None:
        """Close the runtime and wait until it is closed, for `Runtime.aclose`. In a forked child, do nothing."""
        if self.in_forked_child:
            return
        if self.state is RuntimeState.NEW:
            self.state = RuntimeState.CLOSED
        if self.state is not RuntimeState.CLOSED:
            self.state = RuntimeState.CLOSING
            await self.tasks.run_to_end("kvflow-close", self._close)
        await self.tasks.wait_for_supervisor()

    def abandon(self, wait_s: float = 0.0) -> None:
        """Release sockets, memory and threads. For use after the event loop has ended.

        A thread ends when no read or copy is under way; wait up to `wait_s` seconds for that.
        """
        if self.in_forked_child or self.state in (RuntimeState.NEW, RuntimeState.CLOSED):
            self.state = RuntimeState.CLOSED
            return
        logger.warning("runtime %s was abandoned: its event loop ended, or Python did, before it was closed", self)
        self.state = RuntimeState.CLOSED
        self.incarnation = None
        atexit.unregister(self.abandon)
        self.listener.close()
        self.side_channel.abandon()
        if self.registration is not None:
            self.registration.abandon(wait_s)
        self.copy_thread.abandon(wait_s)

    async def drain(self, deadline_s: float, successor: Ticket | None = None) -> bool:
        """Take no new work. Wait until all leases and loads have ended; after `deadline_s` seconds, end the rest.

        Return whether all had ended before that. `successor`: as for `Incarnation.drain`.
        """
        self.state = RuntimeState.DRAINING
        return self.registered is None or await self.registered.drain(deadline_s, successor)

    def set_weights(self, version: str) -> None:
        """Remember the version of the engine's new weights, and revoke all leases, for `Runtime.set_weights`."""
        if version == self.weights.version:
            return
        logger.info("runtime %s: weights %r are replaced by %r", self, self.weights.version, version)
        self.weights.version = version
        if self.registered is not None:
            self.registered.serving.revoke_all()

    def statistics(self) -> RuntimeStatistics:
        now, past, registration = self.registered, self._past_statistics, self.registration
        serving, loading, transport = totals(
            past,
            now.serving.statistics if now else None,
            now.loader.statistics if now else None,
            registration.transport.statistics if registration else None,
        )
        return RuntimeStatistics(
            state=self.state,
            tasks=self.tasks.count,
            blocks=now.host.resources.ledger.counts() if now else None,
            buffers_used=sum(pool.used for pool in now.host.memory.pools) if now else 0,
            serving=serving,
            loading=loading,
            peers=now.peers.statistics if now else (),
            parts=now.part_statistics() if now else past.parts if past else {},
            readers=now.goodbyes.count if now else 0,
            readers_refused=self._admission.refused,
            listener=self.listener.statistics if self.tasks.started else None,
            transport=transport,
            early_notifications=(past.early_notifications if past else 0)
            + (registration.early_notifications if registration else 0),
        )

    @property
    def registered(self) -> Incarnation | None:
        """The registered cache; None if there is none. A cache counts until its unregistration is complete."""
        return None if self.registration is None else self.registration.registered

    def require_running(self, *, new_work: bool = False) -> None:
        """Raise an error unless the runtime is open or draining. With `new_work`, also raise if it is draining."""
        match self.state:
            case RuntimeState.DRAINING if new_work:
                raise RuntimeDraining(f"the runtime {self} drains: it takes no new work")
            case RuntimeState.OPEN | RuntimeState.DRAINING:
                return
            case RuntimeState.NEW:
                raise UsageError(f"the runtime {self} is not open yet: use it as `async with Runtime(config) as rt`")
        if (cause := self.tasks.cause) is not None:
            raise RuntimeBroken(f"the runtime {self} broke: {cause}") from cause
        if self.in_forked_child:
            raise UsageError(f"the runtime {self} belongs to the process that this one was forked from")
        raise RuntimeClosed(f"the runtime {self} is {self.state}")

    def require(self, what: str, *, new_work: bool) -> None:
        """Raise an error, which names the call `what`, unless the runtime is running and belongs to this event loop."""
        self.require_running()
        require_loop(self.loop, what)
        if new_work:
            self.require_running(new_work=True)

    def require_host(self) -> PartHost:
        """Return the objects of the registered cache.

        CacheUnregistered if the cache was unregistered, UsageError if there never was one.
        """
        if self.incarnation is not None:
            return self.incarnation.host
        if self.registered is not None or (
            self._past_statistics is not None and self._past_statistics.serving is not None
        ):
            raise CacheUnregistered(f"the cache of runtime {self} was unregistered: await register_kv_caches first")
        raise UsageError("no KV cache is registered yet: await register_kv_caches first")

    def _facts(self) -> RuntimeFacts:
        """Return what this runtime gives to an incarnation."""
        return RuntimeFacts(
            config=self.config,
            rank=self.rank,
            host=self.host,
            port=self.listener.port,
            parts=self.parts,
            clock=self.clock,
            token_hex=self.world.token_hex,
            observers=self.observers,
            weights=self.weights,
            side_channel=self.side_channel,
            seals=self.seals,
            copy_thread=self.copy_thread,
        )

    async def register(
        self,
        kv_caches: KVCaches | Sequence[CacheGroup],
        layout: CacheLayout | None,
        copy_blocks: BlockCopier | None,
    ) -> None:
        """Register the cache with the transport and the parts, for `Runtime.register_kv_caches`.

        If an earlier registration is still ending, wait for its end first. UsageError if a cache is registered.
        """
        if self.incarnation is not None or self._registering:
            raise UsageError("a KV cache is registered already; a runtime has one: await unregister first")
        groups = groups_of(kv_caches, layout)
        self._registering = True
        try:
            await self.tasks.wait_ended("kvflow-unregister")
            self.require_running(new_work=True)
            await self._register(groups, copy_blocks)
        finally:
            self._registering = False

    async def unregister(self) -> None:
        """Stop all work with the cache, unregister it, and wait for that. Do nothing if no cache is registered."""
        if self._registering:
            raise UsageError("a KV cache is being registered: await register_kv_caches first")
        if self.incarnation is not None:
            self.incarnation.stop(Ending.UNREGISTERED)
            self.incarnation = None
        if self.registered is not None:
            await self.tasks.run_to_end("kvflow-unregister", self._unregister)
        await self.tasks.wait_ended("kvflow-unregister")  # a failed registration may still be ending

    async def _register(self, groups: Sequence[CacheGroup], copy_blocks: BlockCopier | None) -> None:
        registration = self.registration
        try:
            if registration is None:
                registration = self.registration = self._new_registration()
                await registration.open()
                registration.run()
            registered = await register(self._facts(), registration, groups, copy_blocks)
            registration.attach(registered)
            await registered.begin_parts(self.parts, self)
            self.require_running(new_work=True)
        except BaseException:
            await self.tasks.run_to_end("kvflow-unregister", self._unregister)
            raise
        self.incarnation = registered

    def _new_registration(self) -> Registration:
        return Registration(self.config, self.world, self.tasks)

    def _on_break(self) -> None:
        """Callback of `Tasks` when a task of the runtime has died: mark the runtime as broken, end leases and loads."""
        if self.state in (RuntimeState.OPEN, RuntimeState.DRAINING):
            self.state = RuntimeState.BROKEN
        if self.registered is not None:
            self.registered.stop(Ending.CLOSED)

    async def _unregister(self) -> None:
        """End the current registration, even if its cache was never registered. Run by `Tasks.run_to_end`.

        Task `kvflow-unregister`: begun by `unregister`, or by a registration that failed. It goes on if the caller is
        cancelled. If the task dies, the runtime breaks, and `unregister` raises the task's error.
        """
        registration = self.registration
        if registration is None:
            return  # making a new one failed
        await retry_if_cancelled(self._end_work)
        registration.poller.let_transport_close()  # flights go on waiting for their reads
        problem = await retry_if_cancelled(registration.aclose)
        if (ended := registration.registered) is not None:
            problem = problem or await retry_if_cancelled(ended.wait_for_copies)
        if problem and ended is not None:
            self.tasks.break_down(RuntimeBroken(f"the cache could not be unregistered: {problem}"))
            raise RuntimeBroken(f"unregistering the cache of {self}: {problem}")
        if ended is not None:
            ended.host.memory.release()
        self._past_statistics = self.statistics()
        registration.detach()
        self.incarnation = self.registration = None
        logger.info("runtime %s unregistered its cache: %s", self, problem or "its memory is deregistered")

    async def _close(self) -> None:
        """Close the runtime: end the registration, the listener, all tasks and all threads. Run by `Tasks.run_to_end`.

        Task `kvflow-close`: begins when `aclose` is called, when the supervisor's task is cancelled, or when the
        `Runtime` object is dropped. The task goes on if the caller of `aclose` is cancelled. If the task itself is
        cancelled, the task stops waiting for leases and loads. `aclose` raises the task's error.
        """
        on_cancel = self._stop_draining
        try:
            await retry_if_cancelled(lambda: self.tasks.wait_ended("kvflow-unregister"), on_cancel)
            drained = self.incarnation is not None
            await retry_if_cancelled(lambda: self._end_work(drained=drained), on_cancel)
            await retry_if_cancelled(self.tasks.stop, on_cancel)
            problem = "" if self.registration is None else await retry_if_cancelled(self.registration.aclose, on_cancel)
            problem = await retry_if_cancelled(self._end_copies, on_cancel) or problem
        finally:
            self.listener.close()
            self.side_channel.close()
            self.state = RuntimeState.CLOSED
            atexit.unregister(self.abandon)
        logger.info("runtime %s closed%s", self, f": {problem}" if problem else " cleanly")
        if problem:
            raise RuntimeBroken(f"closing {self}: {problem}")
        if self.registered is not None:
            self.registered.host.memory.release()

    def _stop_draining(self) -> None:
        self._draining_stopped = True

    async def _end_work(self, *, drained: bool = False) -> None:
        """End all leases and loads, and send goodbyes to readers.

        `drained`: first wait, at most Config.drain_timeout_s, until leases and loads have ended by themselves. Do not
        wait if the runtime is broken or the closing was cancelled.
        """
        registered = self.registered
        if registered is None:
            return
        if drained and not self._draining_stopped and self.tasks.cause is None and registered.busy:
            await registered.drain(self.config.drain_timeout_s)
        else:
            await registered.end(broken=self.tasks.cause is not None)
        await registered.goodbyes.send_all()

    async def _end_copies(self) -> str:
        bound_s = self.config.limits.transport_close_timeout_s
        return "" if await self.copy_thread.aclose(bound_s) else f"a copy still runs after {bound_s} s"

    def _answer(self, header: codec.Header, request: messages.Request) -> Answered:
        """Return the answer to a peer's request on the side channel, or a future of the answer. Never waits."""
        incarnation, engine_id = self.incarnation, self.config.engine_id
        if incarnation is None:
            return refusal(f"engine {engine_id!r} has no KV cache registered yet", transient=True)
        if self.state is RuntimeState.BROKEN:
            return refusal(f"engine {engine_id!r} is {self.state}")
        if isinstance(request, messages.MetadataRequest) and (why := self._reader_refusal()):
            return refusal(f"engine {engine_id!r} accepts no new reader: {why}", transient=True)
        return incarnation.answer(header, request, draining=self.state is not RuntimeState.OPEN)

    def _answer_bare(self, question: bytes) -> list[bytes] | None:
        """Return the frames of the answer to a reader that does not run kvflow, or None to send no answer."""
        if self.incarnation is None or self.state is not RuntimeState.OPEN:
            return None
        services = self.incarnation.reader_services
        if not services or self._reader_refusal():
            return None
        return next((frames for service in services if (frames := service.answer(question)) is not None), None)

    def _reader_refusal(self) -> str:
        """Return "" if a new reader may connect to this rank now, and count it as connecting. Else return why not."""
        if self.registration is not None and self.registration.transport.statistics.unreachable:
            return "its transport's listener is closed, as when open files run out: register its cache again"
        return self._admission.refusal(self.clock.now_s())

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
