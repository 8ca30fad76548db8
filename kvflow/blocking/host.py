"""The thread of a blocking runtime, its loop, and the `kvflow.Runtime` on it."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import threading
import warnings
from collections.abc import Callable
from typing import Any

import uvloop

from kvflow import forks
from kvflow.blocking.pending import WAITS_FOR_ITSELF, Pending, ResultT, Work, bound, tell
from kvflow.errors import KVFlowError, Quarantine, RuntimeBroken, RuntimeClosed, UsageError
from kvflow.logs import logger_of
from kvflow.runtime import runtime as asynchronous

logger = logger_of(__name__)


class LoopHost:
    """The thread, its loop and the runtime on it. It does not refer to its handle, whose loss it has to notice."""

    def __init__(self, runtime: asynchronous.Runtime, call_timeout_s: float) -> None:
        self.runtime = runtime
        self.config = runtime.config
        self.call_timeout_s = call_timeout_s
        """Seconds that calls wait for the thread, beyond the time that what they ask for may take."""
        self.loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._serve, name=f"kvflow-loop {runtime.config.engine_id}", daemon=True)
        # Callers add to `_pending` in their threads, the end of the loop empties it for good: hence the lock.
        self._lock = threading.Lock()
        self._pending: set[Pending[Any]] = set()
        self._ended = False
        self._inherited = False
        """True in a forked child, where nothing of it runs."""
        self._cause: BaseException | None = None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def begun(self) -> bool:
        return self._thread.ident is not None

    def open(self, closing_s: float) -> None:
        """See `Runtime.open`; `closing_s` bounds closing at the interpreter's end."""
        if self.begun or self._ended:
            raise UsageError(f"a Runtime is opened once; this one is {self.runtime.state}")
        forks.watch(self)
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:
            self._thread.join()
            raise
        # A NIXL agent must not be destroyed by the interpreter's end while it reads.
        atexit.register(self.close, closing_s)

    def forked(self) -> None:
        """See `forks`. A thread that is not here may hold the lock."""
        self._inherited = True

    def stop(self) -> None:
        """Have the runtime closed and the thread end, some time soon."""
        atexit.unregister(self.close)
        if self._inherited:
            return
        if self.begun:
            tell(self.loop, self._stop.set)
        else:
            self._end(None)
            self.loop.close()

    def close(self, timeout_s: float) -> None:
        """See `Runtime.close`."""
        if self._inherited:
            return
        if not self.begun:
            self.stop()
            return
        self._require_another_thread()
        tell(self.loop, self._stop.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.runtime!r} has not closed within {timeout_s} s")
        atexit.unregister(self.close)
        if self._cause is not None:
            error, self._cause = self._closed_error(), None
            raise error

    def start(self, work: Work[ResultT]) -> Pending[ResultT]:
        """See `Runtime.start`."""
        pending: Pending[ResultT] = Pending(self.loop)
        self.begin(pending, work)
        return pending

    def begin(self, pending: Pending[ResultT], work: Work[ResultT]) -> None:
        """Have `pending` run a coroutine on the loop, soon."""
        if self._inherited:
            raise UsageError("the runtime belongs to the process that this one was forked from")
        with self._lock:
            if self._ended:
                raise self._closed_error()
            if not self.begun:
                raise UsageError("the runtime is not open yet: use it as `with Runtime(config) as rt`")
            self._pending.add(pending)
        pending.add_done_callback(self._forget)
        tell(self.loop, pending._begin, lambda: work(self.runtime))

    def call_at_once(self, verb: Callable[[asynchronous.Runtime], ResultT]) -> ResultT:
        """Call a verb that waits for nothing, on the loop."""

        async def work(runtime: asynchronous.Runtime) -> ResultT:
            return verb(runtime)

        return self.call(work, self.call_timeout_s)

    def call(self, work: Work[ResultT], timeout_s: float | None) -> ResultT:
        """Run a coroutine on the loop and wait for it, up to `timeout_s`; then it is cancelled."""
        self._require_another_thread()
        bound_s = bound(timeout_s)
        pending = self.start(work)
        try:
            return pending.result(bound_s)
        finally:
            pending.cancel()  # no effect on what is done

    def settle(self, held: Quarantine, work: Work[None], timeout_s: float | None) -> None:
        """See `Load.settled`."""
        try:
            self.call(work, timeout_s)
        except RuntimeClosed:  # the loop has ended meanwhile, in good order or not
            if not held.safe:
                raise RuntimeBroken(f"request {held.request_id!r}: its reads were not seen to stop") from None

    def _serve(self) -> None:
        """Body of the thread: run the loop until the runtime is closed, or until the loop dies.

        Thread `kvflow-loop <engine>`: begun by opening a `blocking.Runtime`. Ends when it closes, or its loop
        dies; then waiters get `RuntimeBroken`.
        """
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._main())
        except BaseException as cause:  # noqa: BLE001 - whatever killed the loop, everybody gets to know
            self._end(cause if self._opened.done() else None)
            if not self._opened.done():
                self._opened.set_exception(cause)
        else:
            self._end(None)

    async def _main(self) -> None:
        async with self.runtime:
            self._opened.set_result(None)
            await self._stop.wait()

    def _end(self, cause: BaseException | None) -> None:
        """Settle everybody and let nobody in: nothing runs on the loop any more."""
        with self._lock:
            self._ended = True
            self._cause = cause
            left, self._pending = self._pending, set()
        if cause is not None:
            logger.error("the loop of %s died", self.runtime.config.engine_id, exc_info=cause)
        for pending in left:
            pending._fail(self._closed_error())

    def _forget(self, pending: Pending[Any]) -> None:
        with self._lock:
            self._pending.discard(pending)

    def _closed_error(self) -> KVFlowError:
        if self._cause is None:
            return RuntimeClosed(f"{self.runtime!r} is closed")
        error = RuntimeBroken(f"the loop of {self.runtime.config.engine_id!r} died: {self._cause}")
        error.__cause__ = self._cause
        return error

    def _require_another_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise UsageError(WAITS_FOR_ITSELF)


def dropped(host: LoopHost) -> None:
    """Close a runtime whose handle is gone, with a warning: nobody has closed it."""
    if host.alive:
        warnings.warn(f"{host.runtime!r} was dropped without being closed", ResourceWarning, stacklevel=2)
    host.stop()
