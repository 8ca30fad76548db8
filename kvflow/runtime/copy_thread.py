"""The copy thread: runs copies between buffers and caches one after another, outside the event loop.

Between copies it polls device events, such as a `torch.cuda.Event`, until they have happened. A running copy cannot be
stopped, so its flight waits for its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvflow.core.cache.regions import Device
from kvflow.core.policy.events import DeviceEvent, OnEnd, Watch, Watches
from kvflow.errors import ConfigError
from kvflow.transport.device.cache_device import CacheDevice
from kvflow.transport.device.opening import make_device
from kvflow.transport.owner_thread import OwnerThread

T = TypeVar("T")

_IDLE_S = 3600.0  # nothing to do between jobs


class CopyFailed(Exception):
    """A copy between buffers and the cache failed. `__cause__` is the error of the copy."""


class CopyThread:
    """A thread that runs copies and watches device events. After each it calls a callback on the event loop.

    Thread `kvflow-copy <name>`: begun by the first copy or device event. It ends when the runtime closes and no copy
    runs. The caller that submitted a copy gets the copy's error, or ConfigError if the system starts no thread.
    """

    def __init__(self, name: str, make_device: Callable[[Device], CacheDevice] | None = None) -> None:
        """Make the object; the first copy or event starts the thread `name`.

        `make_device`: for tests, called instead of `opening.make_device`.
        """
        self._name = name
        self._make_device = make_device
        self._thread: OwnerThread | None = None
        self._watches = Watches()
        self._ending = False

    def submit(self, job: Callable[[], object], on_end: OnEnd) -> None:
        """Run `job` on the copy thread. Then call `on_end` on the event loop with the error of `job`, or None."""
        thread = self._start_thread(on_end)
        if thread is None:
            return

        def run() -> None:
            error: BaseException | None = None
            try:
                job()
            except BaseException as problem:  # noqa: BLE001 - `on_end` gets it
                error = problem
            thread.run_on_loop(lambda: on_end(error))

        thread.submit(run)

    def watch(self, event: DeviceEvent, on_end: OnEnd) -> Watch:
        """Call `on_end` on the event loop with None once `event` has happened, or with the error of `event.query()`.

        Return the watch. To prevent the call, set its `dropped` to True.
        """
        watch = Watch(event, on_end, time.monotonic())
        thread = self._start_thread(lambda error: None if watch.dropped else on_end(error))
        if thread is not None:
            thread.submit(lambda: self._watches.add(watch))
        return watch

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` on the copy thread, and return its result or raise its error. Cancelling does not stop `job`."""
        results: list[T] = []
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.submit(lambda: results.append(job()), partial(_complete, end))
        await end
        return results[0]

    async def run_into_buffers(self, copy: Callable[[], None], give_back: Callable[[], None]) -> None:
        """Run `copy`, which writes into buffers, on the copy thread, and wait for its end. CopyFailed if it raises.

        `give_back` frees the buffers. If the copy fails, call `give_back`. If this coroutine is cancelled, the copy
        goes on, and `give_back` is called after the copy. After a success the caller keeps the buffers.
        """
        copying = asyncio.ensure_future(self.run(copy))

        def ended(done: asyncio.Future[None]) -> None:
            done.exception()  # retrieved here, since the caller was cancelled
            give_back()

        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            copying.add_done_callback(ended)
            raise
        except Exception as error:
            give_back()
            raise CopyFailed(str(error)) from error

    async def cache_device(self, where: Device, *, engine_copies: bool = False) -> CacheDevice:
        """Make a `CacheDevice` for a cache on the device `where`, on the copy thread, and return it.

        `engine_copies`: the engine's own function copies blocks, so kvflow needs no streams. ConfigError, or
        RuntimeError from torch, if the device cannot be used.
        """
        make = self._make_device or partial(make_device, engine_copies=engine_copies)
        if self._make_device is None and where.kind == "cpu":
            return make(where)  # starts no thread
        return await self.run(lambda: make(where))

    async def wait_for_event(self, event: DeviceEvent) -> None:
        """Wait until `event` has happened, or raise the error of `event.query()`.

        If cancelled, stop watching the event.
        """
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watch = self.watch(event, partial(_complete, end))
        try:
            await end
        finally:
            watch.dropped = True

    async def aclose(self, timeout_s: float) -> bool:
        """End the thread after the copies that were submitted. Return whether it ended within `timeout_s` seconds.

        If not, the thread ends after the copy that still runs.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_ended()
        except TimeoutError:
            return False
        return True

    def abandon(self, wait_s: float) -> None:
        """End the thread. For use after the event loop has ended. Wait up to `wait_s` seconds for a running copy."""
        if self._thread is not None:
            self._thread.abandon(self._end, wait_s)

    async def _wait_ended(self) -> None:
        if self._thread is not None and self._thread.alive:
            self._thread.submit(self._end)
            await self._thread.ended()

    def _start_thread(self, on_failure: OnEnd) -> OwnerThread | None:
        """Return the thread, started if it is not. If that fails, return None, and have the loop call `on_failure`."""
        if self._thread is None:
            try:
                self._thread = OwnerThread(self._name, self._step, self._died)
            except ConfigError as error:
                asyncio.get_running_loop().call_soon(on_failure, error)
        return self._thread

    def _step(self) -> float | None:
        if self._ending:
            return None
        for watch in self._watches.poll():
            self._call_on_end(watch)
        pause_s = self._watches.pause_s(time.monotonic())
        return _IDLE_S if pause_s is None else pause_s

    def _call_on_end(self, watch: Watch) -> None:
        assert self._thread is not None, "it runs"
        self._thread.run_on_loop(lambda: None if watch.dropped else watch.on_end(watch.error))

    def _end(self) -> None:
        self._ending = True

    def _died(self, cause: BaseException) -> None:
        raise AssertionError("jobs of the copy thread do not raise") from cause


def _complete(end: asyncio.Future[None], error: BaseException | None) -> None:
    """Set the result of the future `end` to None, or its exception to `error`, unless `end` was cancelled."""
    if not end.cancelled():
        end.set_result(None) if error is None else end.set_exception(error)


def run_all(jobs: Sequence[Callable[[], None]]) -> None:
    for job in jobs:
        job()
