"""`blocking.Runtime`: the methods of `kvflow.Runtime` for other threads, with bounded waits for the event loop."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from kvflow import checks
from kvflow.blocking.handles import Lease, Load, QuarantinedBlocks
from kvflow.blocking.loop_thread import LoopThread, ResultT, Work, checked_timeout, close_dropped
from kvflow.config import Config
from kvflow.core.cache.groups import CacheGroup
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.tensors import KVCaches
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import ConfigError, KVFlowError, RuntimeBroken, RuntimeClosed, UsageError
from kvflow.runtime import runtime as asynchronous
from kvflow.runtime.load.leases import KeptLeases
from kvflow.runtime.load.requests import LoadReport, LoadRequest
from kvflow.runtime.memory import BlockCopier
from kvflow.runtime.part import Part
from kvflow.runtime.producer.lease import ServeRequest
from kvflow.runtime.records import Observer
from kvflow.runtime.statistics import RuntimeStatistics
from kvflow.runtime.world import World


class Runtime:
    """A `kvflow.Runtime` on a thread of its own. Use it as `with Runtime(config) as rt`, or with `open` and `close`.

    Any thread may call the methods; on the thread of the runtime's event loop, methods that wait raise UsageError. All
    raise RuntimeClosed if the runtime is closed, and RuntimeBroken if its loop has died. A runtime that is dropped
    unclosed is closed in the background, with a ResourceWarning.

    Args:
        config: settings of the rank.
        observers: called on the loop's thread when a load or lease has ended, with a record of it.
        world: clock, network and the like, which tests replace.
        parts: optional features, as for `kvflow.Runtime`; call their methods through `start`.
        call_timeout_s: seconds that a call waits for the loop's thread, in addition to the time that the work may take.
            Then the call raises TimeoutError.

    Raises:
        ConfigError: an argument is of the wrong kind.
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
        self._finalizer = weakref.finalize(self, close_dropped, self._thread)
        self._finalizer.atexit = False

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
        """Maximum number of seconds that `unregister` may take, including the wait for the loop's thread."""
        limits, call_s = self.config.limits, self._thread.call_timeout_s
        return self.config.ending_s + limits.goodbye_timeout_s + 2 * limits.transport_close_timeout_s + call_s

    @property
    def _closing_s(self) -> float:
        """Maximum number of seconds that `close` may take, including the wait for the loop's thread."""
        return self._ending_s + self.config.drain_timeout_s

    def open(self) -> None:
        """Start the thread and the runtime. Return when the runtime is open, however long that takes.

        Raises:
            ConfigError: something that Config asks for is not available. The thread has ended.
            UsageError: the runtime was opened, or closed, before.
        """
        self._thread.open(self._closing_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Close the runtime as `kvflow.Runtime.aclose` does, and end the thread. Closing twice is fine.

        Args:
            timeout_s: seconds to wait at most; None: those that Config allows for closing, plus `call_timeout_s`.

        Raises:
            RuntimeBroken: reads could not be stopped, or the loop had died.
            TimeoutError: `timeout_s` has passed; the closing goes on.
            UsageError: called on the loop's own thread, or `timeout_s` is not a valid time.
        """
        bound_s = checked_timeout(timeout_s)
        self._finalizer.detach()
        self._thread.close(self._closing_s if bound_s is None else bound_s)

    def register_kv_caches(
        self,
        kv_caches: KVCaches | Sequence[CacheGroup],
        layout: CacheLayout | None = None,
        *,
        copy_blocks: BlockCopier | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        """Make the cache readable by peers and writable by loads, as `kvflow.Runtime.register_kv_caches` does.

        Args:
            kv_caches: a dict of tensors by layer name, or a list of `CacheGroup`s.
            layout: layout of the tensors in a dict; a `CacheGroup` has its own layout.
            copy_blocks: function that copies between host buffers and the cache.
            timeout_s: seconds to wait at most.

        Raises:
            LayoutError, ConfigError, UsageError: as `kvflow.Runtime.register_kv_caches` raises them.
            TimeoutError: `timeout_s` has passed; the registration is cancelled, and no cache is registered.
        """
        self._thread.call(lambda rt: rt.register_kv_caches(kv_caches, layout, copy_blocks=copy_blocks), timeout_s)

    def unregister(self) -> None:
        """Blocking form of `kvflow.Runtime.unregister`: make the cache unreachable for peers and loads.

        If this call raises TimeoutError, the unregistering goes on.
        """
        self._thread.call(asynchronous.Runtime.unregister, self._ending_s)

    def serve_blocks(self, request: ServeRequest) -> Lease:
        """Blocking form of `kvflow.Runtime.serve_blocks`: offer the blocks of a prompt.

        `Lease.wait` returns the lease's outcome.
        """
        return Lease(self._thread.call_now(lambda rt: rt.serve_blocks(request)), self._thread)

    def introduce(self) -> Ticket:
        """Blocking form of `kvflow.Runtime.introduce`: return a ticket without blocks that names this rank."""
        return self._thread.call_now(asynchronous.Runtime.introduce)

    def decline(
        self,
        request_id: str,
        reason: str = "",
        *,
        at: Ticket | Mapping[str, Any] | None = None,
        instead: Ticket | Mapping[str, Any] | None = None,
    ) -> None:
        """Blocking form of `kvflow.Runtime.decline`: announce to waiting readers that a request will not be served."""
        self._thread.call_now(lambda rt: rt.decline(request_id, reason, at=at, instead=instead))

    def start_load(self, request: LoadRequest) -> Load:
        """Start to read the blocks that a ticket offers, and return immediately.

        Never raises: the handle's `result` raises any error.

        Args:
            request: the ticket, and the local blocks to fill.

        Returns:
            The load's handle. Once the handle's `settled()` has returned, the blocks may be reused, however the load
            has ended.
        """
        return Load(self._thread, request)

    def load_blocks(self, request: LoadRequest) -> LoadReport:
        """Blocking form of `kvflow.Runtime.load_blocks`: read the blocks that a ticket offers, within a deadline.

        An interrupt in the calling thread cancels the load, and is raised once the load has ended. After an interrupt,
        bytes may still land in the blocks, and nothing says for how long; the handle of `start_load` does. If a load
        fails while bytes may still land, the error's `quarantine` is the `Load` to wait for.
        """
        ids_max = self.config.limits.block_ids_max
        deadline_s = checks.normalize_request(request, LoadRequest, "load_blocks", ids_max).deadline_s
        bound_s = self.config.load_deadline_s if deadline_s is None else max(deadline_s, 0.0)
        load = self.start_load(request)
        after_s = self.config.cancel_grace_s + self._thread.call_timeout_s
        try:
            return load.result(bound_s + after_s)
        finally:
            if not load.done:
                load.cancel()
                load.wait_done(after_s)

    def keep_leases(self, ticket: Ticket | Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Blocking form of `kvflow.Runtime.keep_leases`: renew the leases of a ticket during a `with` body.

        Leaving the body never waits.
        """
        return self._keep_on_loop(self._thread.call_now(lambda rt: rt.keep_leases(ticket)))

    @contextlib.contextmanager
    def _keep_on_loop(self, kept: contextlib.AbstractContextManager[KeptLeases]) -> Iterator[None]:
        entered = contextlib.ExitStack()
        self._thread.call_now(lambda _: entered.enter_context(kept))
        try:
            yield
        finally:
            self._thread.call_soon(entered.close)

    def release_blocks(self, ticket: Ticket | Mapping[str, Any]) -> bool:
        """Blocking form of `kvflow.Runtime.release_blocks`: release a ticket's leases without reading the blocks."""
        bound_s = self.config.lease_lifetime_s + self.config.handshake_timeout_s + self._thread.call_timeout_s
        return self._thread.call(lambda rt: rt.release_blocks(ticket), bound_s)

    def set_weights(self, version: str) -> None:
        """Blocking form of `kvflow.Runtime.set_weights`: announce that the engine has other weights than before."""
        self._thread.call_now(lambda rt: rt.set_weights(version))

    def prewarm(
        self, engines: Sequence[PeerAddress | Ticket | Mapping[str, Any]], *, timeout_s: float | None = None
    ) -> tuple[KVFlowError | None, ...]:
        """Connect to engines before the first load from each, as `kvflow.Runtime.prewarm` does.

        Args:
            engines: for each engine, the address of one rank, or a ticket.
            timeout_s: seconds to wait at most; None has no limit.

        Returns:
            For each engine, in order: None if all ranks that loads need are connected, else the error.

        Raises:
            TimeoutError: `timeout_s` has passed; handshakes under way go on.
        """
        return self._thread.call(lambda rt: rt.prewarm(engines), timeout_s)

    def forget_peer(self, engine_id: str, address: str | None = None) -> bool:
        """Blocking form of `kvflow.Runtime.forget_peer`: forget the connections and failures of a remote engine."""
        bound_s = 2 * self.config.handshake_timeout_s + self._thread.call_timeout_s
        return self._thread.call(lambda rt: rt.forget_peer(engine_id, address), bound_s)

    def drain(self, deadline_s: float | None = None, *, successor: Ticket | Mapping[str, Any] | None = None) -> bool:
        """Blocking form of `kvflow.Runtime.drain`: refuse new work, and wait until all leases and loads have ended."""
        wanted_s = self.config.drain_timeout_s if deadline_s is None else deadline_s
        bound_s = checks.seconds(wanted_s, "drain: deadline_s", error=UsageError) + self._closing_s
        return self._thread.call(lambda rt: rt.drain(deadline_s, successor=successor), bound_s)

    def statistics(self) -> RuntimeStatistics:
        """Return the statistics of the `kvflow.Runtime`. May be called in every state, even before opening.

        Returns:
            A frozen copy; once the loop has ended, the last statistics.

        Raises:
            TimeoutError: the loop's thread is stuck.
            UsageError: called on the loop's own thread.
        """
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeClosed, RuntimeBroken):  # the loop has ended meanwhile
                return self._thread.call_now(asynchronous.Runtime.statistics)
        return self._thread.runtime.statistics()

    def start(self, work: Work[ResultT]) -> Future[ResultT]:
        """Run a coroutine on the runtime's event loop, for example a method of an optional feature. Return immediately.

            saving = rt.start(lambda _: storage.save(request))
            report = saving.result(60)

        Args:
            work: function that is called on the loop with its `kvflow.Runtime`, and returns the coroutine, which must
                never block.

        Returns:
            The future of the result. `cancel` of the future cancels the coroutine, without waiting for its end. Do not
            wait for the future on the loop's own thread.

        Raises:
            RuntimeClosed: the runtime is closed; RuntimeBroken if its loop has died.
            UsageError: the runtime has not been opened.
        """

        async def run(runtime: asynchronous.Runtime) -> ResultT:
            try:
                return await work(runtime)
            except KVFlowError as error:
                if error.quarantine is not None:
                    error.quarantine = QuarantinedBlocks(error.quarantine, self._thread)
                raise

        return self._thread.submit(run)
