"""kvflow for engines that are not asyncio programs: the same verbs, called from any thread.

`Runtime` owns a thread with an event loop of its own, and on it a `kvflow.Runtime`. Every verb comes in two forms: one
that blocks and has a bound, and one that starts the work and returns at once (`start_load`, `start`). Progress depends
on no thread of the engine. What it refuses: leaving anything behind. Closing, or the death of the loop, settles whoever
waits, and the thread ends.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import uvloop

from kvflow import checks
from kvflow.config import Config
from kvflow.core.layout import CacheLayout
from kvflow.core.tensors import KVCaches
from kvflow.core.ticket import Ticket
from kvflow.errors import ConfigError, KVFlowError, Quarantine, RuntimeBroken, RuntimeClosed, UsageError
from kvflow.runtime import runtime as asynchronous
from kvflow.runtime.drain import DrainReport
from kvflow.runtime.lease import Lease as AsyncLease
from kvflow.runtime.lease import LeaseOutcome, ServeRequest
from kvflow.runtime.load import LoadReport, LoadRequest, checked_load_request
from kvflow.runtime.prewarm import PeerAddress, Prewarmed
from kvflow.runtime.records import Observer
from kvflow.runtime.runtime import RuntimeStatistics
from kvflow.runtime.staging import BlockCopier
from kvflow.runtime.world import World

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class Pending(Generic[ResultT]):
    """Something under way on the runtime's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False
        self._future: concurrent.futures.Future[ResultT] = concurrent.futures.Future()

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> ResultT:
        """Wait for the result, or for what the work raised; CancelledError (concurrent.futures) if it was cancelled.

        TimeoutError after `timeout_s`; the work goes on then.
        """
        return self._future.result(checks.timeout(timeout_s, "timeout_s", error=UsageError))

    def cancel(self) -> None:
        """Ask the work to end. It has ended when `done` says so: until then a load may still write its blocks."""
        _tell(self._loop, self._cancel)

    def add_done_callback(self, callback: Callable[[Pending[ResultT]], object]) -> None:
        """Call `callback` with this once it is done: on the loop's thread, or here and now if it is done already."""
        self._future.add_done_callback(lambda _: callback(self))

    def begin(self, work: Callable[[], Coroutine[Any, Any, ResultT]]) -> None:
        """Only for `Runtime`, on its loop: start the task."""
        if self._cancelled:
            self.fail(concurrent.futures.CancelledError())
        else:
            self._task = self._loop.create_task(self._run(work), name="kvflow-blocking")

    def fail(self, error: BaseException) -> None:
        """Only for `Runtime`: end it, unless it has ended."""
        if not self._future.done():
            self._future.set_exception(error)

    def wait_done(self, timeout_s: float) -> None:
        """Wait until it is done, but at most `timeout_s`."""
        concurrent.futures.wait([self._future], timeout_s)

    def _cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self, work: Callable[[], Coroutine[Any, Any, ResultT]]) -> None:
        """The task: whatever comes of the work, who waits in another thread gets it."""
        try:
            self._future.set_result(await work())
        except asyncio.CancelledError:
            asked = self._cancelled
            self.fail(concurrent.futures.CancelledError() if asked else RuntimeClosed("the runtime was closed"))
            raise
        except BaseException as error:  # noqa: BLE001 - it belongs to who waits
            self.fail(error)


class Lease:
    """A lease held on the loop: see `kvflow.Lease`."""

    def __init__(self, lease: AsyncLease, outcome: Pending[LeaseOutcome], loop: asyncio.AbstractEventLoop) -> None:
        self._lease = lease
        self._loop = loop
        self.outcome = outcome
        """How it ended, once the blocks may be reused."""

    def __repr__(self) -> str:
        return f"<blocking {self._lease!r}>"

    @property
    def request_id(self) -> str:
        return self._lease.request_id

    @property
    def ticket(self) -> Ticket:
        return self._lease.ticket

    @property
    def block_ids(self) -> tuple[int, ...]:
        return self._lease.block_ids

    def wait(self, timeout_s: float | None = None) -> LeaseOutcome:
        """Wait until the blocks may be reused. TimeoutError after `timeout_s`; the lease stays as it is then."""
        return self.outcome.result(timeout_s)

    def revoke(self) -> None:
        """Withdraw the offer; `wait` tells when the blocks may be reused."""
        _tell(self._loop, self._lease.revoke)


class Runtime:
    """A `kvflow.Runtime` in a thread of its own. Use it as `with Runtime(config) as rt`, or with `open` and `close`.

    All methods may be called from any thread but the loop's own. `call_timeout_s` is how long a call waits for the
    loop's thread beyond the time that what it asks for may take; it passes only if that thread is stuck.
    """

    def __init__(
        self,
        config: Config,
        *,
        observers: Sequence[Observer] = (),
        world: World = World(),  # noqa: B008 - frozen
        call_timeout_s: float = 10.0,
    ) -> None:
        self._runtime = asynchronous.Runtime(config, observers=observers, world=world)
        self._call_timeout_s = checks.seconds(call_timeout_s, "call_timeout_s", error=ConfigError)
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._serve, name=f"kvflow-loop {config.engine_id}", daemon=True)
        # Callers add to `_pending` in their threads, the end of the loop empties it for good: hence the lock.
        self._lock = threading.Lock()
        self._pending: set[Pending[Any]] = set()
        self._ended = False
        self._cause: BaseException | None = None

    def __repr__(self) -> str:
        return f"<blocking {self._runtime!r}>"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def config(self) -> Config:
        return self._runtime.config

    def open(self) -> None:
        """Start the thread and the runtime. Raises ConfigError if something that Config asks for cannot be had."""
        if self._thread.ident is not None or self._ended:
            raise UsageError(f"a Runtime is opened once; this one is {self._runtime.state}")
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:
            self._thread.join()
            raise
        # A NIXL agent must not be destroyed by the interpreter's end while it reads.
        atexit.register(self.close)

    def close(self, timeout_s: float | None = None) -> None:
        """Close the runtime (see `kvflow.Runtime.aclose`) and end the thread. Closing twice is fine.

        Raises RuntimeBroken if reads could not be stopped or the loop had died; TimeoutError after `timeout_s`, by
        default what Config allows for closing plus `call_timeout_s`.
        """
        if self._thread.ident is None:
            self._end(None)
            self._loop.close()
            return
        timeout_s = checks.timeout(timeout_s, "timeout_s", error=UsageError)
        self._require_another_thread()
        _tell(self._loop, self._stop.set)
        self._thread.join(self._closing_s if timeout_s is None else timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self!r} has not closed in time")
        atexit.unregister(self.close)
        cause, self._cause = self._cause, None
        if cause is not None:
            raise RuntimeBroken(f"the loop of {self.config.engine_id!r} died: {cause}") from cause

    def register_kv_caches(
        self,
        kv_caches: KVCaches,
        layout: CacheLayout,
        *,
        copy_blocks: BlockCopier | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        """See `kvflow.Runtime.register_kv_caches`."""
        self._call(
            lambda runtime: runtime.register_kv_caches(kv_caches, layout, copy_blocks=copy_blocks), timeout_s=timeout_s
        )

    def serve_blocks(self, request: ServeRequest) -> Lease:
        """Offer blocks to readers: see `kvflow.Runtime.serve_blocks`. The lease is in force when this returns."""

        async def serve(runtime: asynchronous.Runtime) -> AsyncLease:
            return runtime.serve_blocks(request)

        lease = self._call(serve, timeout_s=self._call_timeout_s)
        return Lease(lease, self.start(lambda _: _outcome(lease)), self._loop)

    def start_load(self, request: LoadRequest) -> Pending[LoadReport]:
        """Start to read the blocks that a ticket offers; returns at once. What is wrong is raised by `result`."""
        return self.start(lambda runtime: runtime.load_blocks(request))

    def load_blocks(self, request: LoadRequest) -> LoadReport:
        """Read the blocks that a ticket offers: see `kvflow.Runtime.load_blocks`. Bounded by the request's deadline.

        An interrupt in the calling thread cancels the load, and is raised once it has ended.
        """
        request = checked_load_request(request, self.config)
        pending = self.start_load(request)
        config = self.config
        deadline_s = config.load_deadline_s if request.deadline_s is None else request.deadline_s
        try:
            return pending.result(deadline_s + config.cancel_grace_s + self._call_timeout_s)
        finally:
            if not pending.done:
                pending.cancel()
                pending.wait_done(config.cancel_grace_s + self._call_timeout_s)

    @contextlib.contextmanager
    def keep_leases(self, ticket: Ticket | Mapping[str, Any]) -> Iterator[None]:
        """Keep what a ticket offers while a request waits for its load: see `kvflow.Runtime.keep_leases`."""
        kept = contextlib.ExitStack()

        async def enter(runtime: asynchronous.Runtime) -> None:
            kept.enter_context(runtime.keep_leases(ticket))

        self._call(enter, timeout_s=self._call_timeout_s)
        try:
            yield
        finally:
            _tell(self._loop, kept.close)

    def release_blocks(self, ticket: Ticket | Mapping[str, Any]) -> bool:
        """Give up what a ticket offers without reading it: see `kvflow.Runtime.release_blocks`."""
        bound_s = self.config.handshake_timeout_s + self._call_timeout_s
        return self._call(lambda runtime: runtime.release_blocks(ticket), timeout_s=bound_s)

    def prewarm(
        self, engines: Sequence[PeerAddress | Ticket | Mapping[str, Any]], *, timeout_s: float | None = None
    ) -> tuple[Prewarmed, ...]:
        """Connect to engines before the first load from them: see `kvflow.Runtime.prewarm`.

        TimeoutError after `timeout_s`; handshakes under way go on then.
        """
        return self._call(lambda runtime: runtime.prewarm(engines), timeout_s=timeout_s)

    def forget_peer(self, engine_id: str, address: str | None = None) -> bool:
        """Forget an engine, or one rank of it: see `kvflow.Runtime.forget_peer`."""
        bound_s = 2 * self.config.handshake_timeout_s + self._call_timeout_s
        return self._call(lambda runtime: runtime.forget_peer(engine_id, address), timeout_s=bound_s)

    def drain(self, deadline_s: float | None = None) -> DrainReport:
        """Take no new work, and wait for what is open: see `kvflow.Runtime.drain`."""
        wanted_s = self.config.drain_timeout_s if deadline_s is None else deadline_s
        waited_s = checks.seconds(wanted_s, "drain: deadline_s", error=UsageError)
        return self._call(lambda runtime: runtime.drain(deadline_s), timeout_s=waited_s + self._closing_s)

    def wait_safe(self, quarantine: Quarantine, timeout_s: float | None = None) -> None:
        """Wait until no byte can land in a failed load's blocks any more. TimeoutError after `timeout_s`."""
        self._call(lambda _: quarantine.settled(), timeout_s=timeout_s)

    def statistics(self) -> RuntimeStatistics:
        """What is open now and what has happened so far. Legal in every state."""

        async def take(runtime: asynchronous.Runtime) -> RuntimeStatistics:
            return runtime.statistics()

        if self._thread.is_alive():
            with contextlib.suppress(RuntimeClosed, RuntimeBroken):  # it has ended meanwhile
                return self._call(take, timeout_s=self._call_timeout_s)
        return self._runtime.statistics()

    def start(self, work: Callable[[asynchronous.Runtime], Coroutine[Any, Any, ResultT]]) -> Pending[ResultT]:
        """Run a coroutine of your own on the runtime's loop; returns at once. It must never block the loop.

        Raises RuntimeClosed, RuntimeBroken if the loop has died, UsageError if it has not been opened.
        """
        pending: Pending[ResultT] = Pending(self._loop)
        with self._lock:
            self._require_open()
            self._pending.add(pending)
        pending.add_done_callback(self._forget)
        _tell(self._loop, pending.begin, lambda: work(self._runtime))
        return pending

    @property
    def _closing_s(self) -> float:
        config = self.config
        draining_s = 2 * config.drain_timeout_s + config.seal_hold_s + config.cancel_grace_s
        return draining_s + 2 * config.transport_close_timeout_s + self._call_timeout_s

    def _call(
        self,
        work: Callable[[asynchronous.Runtime], Coroutine[Any, Any, ResultT]],
        *,
        timeout_s: float | None,
    ) -> ResultT:
        self._require_another_thread()
        pending = self.start(work)
        try:
            return pending.result(timeout_s)
        finally:
            pending.cancel()  # no effect on what is done

    def _serve(self) -> None:
        """The thread: runs the loop until the runtime is closed, or until the loop dies."""
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._main())
        except BaseException as cause:  # noqa: BLE001 - whatever killed the loop, everybody gets to know
            self._end(cause if self._opened.done() else None)
            if not self._opened.done():
                self._opened.set_exception(cause)
        else:
            self._end(None)

    async def _main(self) -> None:
        async with self._runtime:
            self._opened.set_result(None)
            await self._stop.wait()

    def _end(self, cause: BaseException | None) -> None:
        """Nothing runs on the loop any more: settle everybody, and let nobody in."""
        with self._lock:
            self._ended = True
            self._cause = cause
            left, self._pending = self._pending, set()
        if cause is not None:
            logger.error("the loop of %s died", self.config.engine_id, exc_info=cause)
        for pending in left:
            pending.fail(self._closed_error())

    def _forget(self, pending: Pending[Any]) -> None:
        with self._lock:
            self._pending.discard(pending)

    def _closed_error(self) -> KVFlowError:
        if self._cause is None:
            return RuntimeClosed(f"{self!r} is closed")
        error = RuntimeBroken(f"the loop of {self.config.engine_id!r} died: {self._cause}")
        error.__cause__ = self._cause
        return error

    def _require_open(self) -> None:
        if self._ended:
            raise self._closed_error()
        if self._thread.ident is None:
            raise UsageError("the runtime is not open yet: use it as `with Runtime(config) as rt`")

    def _require_another_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise UsageError("called on the loop's own thread, which would wait for itself")


async def _outcome(lease: AsyncLease) -> LeaseOutcome:
    return await lease


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
    """Have the loop call something soon. If it has been closed everybody was settled, and there is nobody to tell."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)
