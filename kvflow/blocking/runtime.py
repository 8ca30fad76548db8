"""The verbs of `kvflow.Runtime` for other threads: each is carried out on the loop, within a bound."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from kvflow import checks
from kvflow.blocking.handles import Lease, Load, QuarantinedBlocks
from kvflow.blocking.loop_thread import LoopThread, ResultT, Work, bound, dropped
from kvflow.config import Config
from kvflow.core.cache.groups import CacheGroup
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.tensors import KVCaches
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import ConfigError, KVFlowError, RuntimeBroken, RuntimeClosed, UsageError
from kvflow.runtime import runtime as asynchronous
from kvflow.runtime.load.requests import LoadReport, LoadRequest
from kvflow.runtime.memory import BlockCopier
from kvflow.runtime.part import Part
from kvflow.runtime.producer.lease import ServeRequest
from kvflow.runtime.records import Observer
from kvflow.runtime.statistics import RuntimeStatistics
from kvflow.runtime.world import World


class Runtime:
    """A `kvflow.Runtime` in a thread of its own. Use it as `with Runtime(config) as rt`, or with `open` and `close`.

    All methods may be called from any thread but the loop's own, where those that wait raise UsageError. Verbs raise
    RuntimeClosed if the runtime is closed, RuntimeBroken if its loop has died. A runtime that is dropped without being
    closed is closed in the background, with a ResourceWarning.

    Args:
        config: settings of the rank.
        observers: are told, on the loop's thread, how every load and lease has ended.
        world: clock, network and the like, for tests.
        parts: capabilities beside the core, as for `kvflow.Runtime`; `start` calls what is theirs.
        call_timeout_s: how long a call waits for the loop's thread, in seconds, beyond the time that what it asks for
            may take. It passes only if that thread is stuck, and then the call raises TimeoutError.

    Raises:
        ConfigError: what was given is not of that kind.
    """

    def __init__(
        self,
        config: Config,
        *,
        observers: Sequence[Observer] = (),
        world: World | None = None,
        parts: Sequence[Part] = (),
        call_timeout_s: float = 10.0,
    ) -> None:
        bound_s = checks.seconds(call_timeout_s, "call_timeout_s", error=ConfigError)
        runtime = asynchronous.Runtime(config, observers=observers, world=world, parts=parts)
        self._thread = LoopThread(runtime, bound_s)
        self.config = config
        self._drop = weakref.finalize(self, dropped, self._thread)
        self._drop.atexit = False

    def __repr__(self) -> str:
        return f"<blocking {self._thread.runtime!r}>"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _ending_s(self) -> float:
        """Seconds that unregistering may take."""
        limits, call_s = self.config.limits, self._thread.call_timeout_s
        return self.config.ending_s + limits.goodbye_timeout_s + 2 * limits.transport_close_timeout_s + call_s

    @property
    def _closing_s(self) -> float:
        """Seconds that closing may take."""
        return self._ending_s + self.config.drain_timeout_s

    def open(self) -> None:
        """Start the thread and the runtime; returns when it is open, however long that takes.

        Raises:
            ConfigError: something that Config asks for cannot be had. The thread has ended then.
            UsageError: it was opened, or closed, before.
        """
        self._thread.open(self._closing_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Close the runtime (see `kvflow.Runtime.aclose`) and end the thread. Closing twice is fine.

        Args:
            timeout_s: how long to wait, in seconds; what Config allows for closing plus `call_timeout_s` if None.

        Raises:
            RuntimeBroken: reads could not be stopped, or the loop had died.
            TimeoutError: `timeout_s` has passed; the closing goes on.
            UsageError: on the loop's own thread; or `timeout_s` is no time.
        """
        bound_s = bound(timeout_s)
        self._drop.detach()
        self._thread.close(self._closing_s if bound_s is None else bound_s)

    def register_kv_caches(
        self,
        kv_caches: KVCaches | Sequence[CacheGroup],
        layout: CacheLayout | None = None,
        *,
        copy_blocks: BlockCopier | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        """Make the cache readable by peers and writable by loads: see `kvflow.Runtime.register_kv_caches`.

        Args:
            kv_caches: a dict of tensors by layer name, or a list of `CacheGroup`s.
            layout: what the tensors of a dict look like; groups have their own.
            copy_blocks: copies between host buffers and the cache.
            timeout_s: how long to wait, in seconds.

        Raises:
            LayoutError, ConfigError, UsageError: as `kvflow.Runtime.register_kv_caches` has it.
            TimeoutError: `timeout_s` has passed; the registration is cancelled, and leaves no cache registered.
        """
        self._thread.call(lambda rt: rt.register_kv_caches(kv_caches, layout, copy_blocks=copy_blocks), timeout_s)

    def unregister(self) -> None:
        """Blocking form of `kvflow.Runtime.unregister`. If it raises TimeoutError the unregistering goes on."""
        self._thread.call(asynchronous.Runtime.unregister, self._ending_s)

    def serve_blocks(self, request: ServeRequest) -> Lease:
        """Blocking form of `kvflow.Runtime.serve_blocks`. The lease's `wait` gives how it ended."""
        return Lease(self._thread.ask(lambda rt: rt.serve_blocks(request)), self._thread)

    def introduce(self) -> Ticket:
        """Blocking form of `kvflow.Runtime.introduce`."""
        return self._thread.ask(asynchronous.Runtime.introduce)

    def decline(
        self,
        request_id: str,
        reason: str = "",
        *,
        at: Ticket | Mapping[str, Any] | None = None,
        instead: Ticket | Mapping[str, Any] | None = None,
    ) -> None:
        """Blocking form of `kvflow.Runtime.decline`."""
        self._thread.ask(lambda rt: rt.decline(request_id, reason, at=at, instead=instead))

    def start_load(self, request: LoadRequest) -> Load:
        """Start to read the blocks that a ticket offers; returns at once.

        Never raises: whatever is wrong is raised by the handle's `result`.

        Args:
            request: the ticket, and the local blocks to fill.

        Returns:
            The load's handle. The blocks may be reused when its `settled()` returns, however it has ended.
        """
        return Load(self._thread, request)

    def load_blocks(self, request: LoadRequest) -> LoadReport:
        """Blocking form of `kvflow.Runtime.load_blocks`. Bounded by the request's deadline.

        An interrupt in the calling thread cancels the load, and is raised once it has ended; bytes may still land then:
        who may be interrupted uses `start_load`, whose handle tells. The `quarantine` of an error is a `Load` of this
        module.
        """
        ids_max = self.config.limits.block_ids_max
        deadline_s = checks.settled_request(request, LoadRequest, "load_blocks", ids_max).deadline_s
        bound_s = self.config.load_deadline_s if deadline_s is None else deadline_s
        load = self.start_load(request)
        after_s = self.config.cancel_grace_s + self._thread.call_timeout_s
        try:
            return load.result(bound_s + after_s)
        finally:
            if not load.done:
                load.cancel()
                load.wait_done(after_s)

    @contextlib.contextmanager
    def keep_leases(self, ticket: Ticket | Mapping[str, Any]) -> Iterator[None]:
        """Blocking form of `kvflow.Runtime.keep_leases`. Leaving the block never waits."""
        kept = contextlib.ExitStack()
        self._thread.ask(lambda rt: kept.enter_context(rt.keep_leases(ticket)))
        try:
            yield
        finally:
            self._thread.tell(kept.close)

    def release_blocks(self, ticket: Ticket | Mapping[str, Any]) -> bool:
        """Blocking form of `kvflow.Runtime.release_blocks`."""
        bound_s = self.config.lease_lifetime_s + self.config.handshake_timeout_s + self._thread.call_timeout_s
        return self._thread.call(lambda rt: rt.release_blocks(ticket), bound_s)

    def prewarm(
        self, engines: Sequence[PeerAddress | Ticket | Mapping[str, Any]], *, timeout_s: float | None = None
    ) -> tuple[KVFlowError | None, ...]:
        """Connect to engines before the first load from them: see `kvflow.Runtime.prewarm`.

        Args:
            engines: each named by the address of one of its ranks, or by a ticket of it.
            timeout_s: how long to wait, in seconds; None waits as long as the handshakes take.

        Returns:
            For each engine, in order, None if all ranks that loads need are connected, else the error.

        Raises:
            TimeoutError: `timeout_s` has passed; handshakes under way go on.
        """
        return self._thread.call(lambda rt: rt.prewarm(engines), timeout_s)

    def forget_peer(self, engine_id: str, address: str | None = None) -> bool:
        """Blocking form of `kvflow.Runtime.forget_peer`."""
        bound_s = 2 * self.config.handshake_timeout_s + self._thread.call_timeout_s
        return self._thread.call(lambda rt: rt.forget_peer(engine_id, address), bound_s)

    def drain(self, deadline_s: float | None = None) -> bool:
        """Blocking form of `kvflow.Runtime.drain`."""
        wanted_s = self.config.drain_timeout_s if deadline_s is None else deadline_s
        bound_s = checks.seconds(wanted_s, "drain: deadline_s", error=UsageError) + self._closing_s
        return self._thread.call(lambda rt: rt.drain(deadline_s), bound_s)

    def statistics(self) -> RuntimeStatistics:
        """Return what `kvflow.Runtime.statistics` does, in every state: of the loop's end if it has ended.

        Returns:
            A frozen copy.

        Raises:
            TimeoutError: the loop's thread is stuck.
            UsageError: on the loop's own thread.
        """
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeClosed, RuntimeBroken):  # it has ended meanwhile
                return self._thread.ask(asynchronous.Runtime.statistics)
        return self._thread.runtime.statistics()

    def start(self, work: Work[ResultT]) -> Future[ResultT]:
        """Run a coroutine of your own on the runtime's loop, such as a part's verb; returns at once.

            saving = rt.start(lambda _: storage.save(request))
            report = saving.result(60)

        Args:
            work: called on the loop with the `kvflow.Runtime` there; the coroutine that it returns must never block.

        Returns:
            The future of its result. Its `cancel` cancels the coroutine, and does not wait until that has ended. Do
            not wait for it on the loop's own thread.

        Raises:
            RuntimeClosed: the runtime is closed; RuntimeBroken if its loop has died.
            UsageError: it has not been opened.
        """

        async def run(runtime: asynchronous.Runtime) -> ResultT:
            try:
                return await work(runtime)
            except KVFlowError as error:
                if error.quarantine is not None:
                    error.quarantine = QuarantinedBlocks(error.quarantine, self._thread)
                raise

        return self._thread.submit(run)
