"""A copy thread for tests with small caches: copies run on the event loop, also in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvflow.core.policy.events import DeviceEvent, OnEnd, Watch
from kvflow.runtime.copy_thread import CopyThread


class InlineCopier(CopyThread):
    """A `CopyThread` that runs copies one after another on the event loop, instead of on a thread.

    `duration_s()` returns the seconds of loop time that the next copy takes.
    """

    def __init__(self, name: str, duration_s: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(name)
        self._loop = asyncio.get_running_loop()
        self._duration_s = duration_s
        self._free_at_s = 0.0
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def submit(self, job: Callable[[], object], on_end: OnEnd) -> None:
        self._open += 1
        self._idle.clear()
        self._free_at_s = max(self._free_at_s, self._loop.time()) + self._duration_s()
        self._loop.call_at(self._free_at_s, self._run, job, on_end)

    def watch(self, event: DeviceEvent, on_end: OnEnd) -> Watch:
        watch = Watch(event, on_end, self._loop.time())
        self._watches.add(watch)
        self._loop.call_soon(self._poll)
        return watch

    def _poll(self) -> None:
        for watch in self._watches.poll():
            watch.on_end(watch.error)
        pause_s = self._watches.pause_s(self._loop.time())
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if pause_s is None or self._closed else self._loop.call_later(pause_s, self._poll)

    async def _ended(self) -> None:
        self._closed = True
        await self._idle.wait()

    def _run(self, job: Callable[[], object], on_end: OnEnd) -> None:
        error: BaseException | None = None
        try:
            job()
        except Exception as problem:  # noqa: BLE001 - passed to the submitter by `on_end`
            error = problem
        self._loop.call_soon(self._end_copy, on_end, error)

    def _end_copy(self, on_end: OnEnd, error: BaseException | None) -> None:
        on_end(error)
        self._open -= 1
        if self._open == 0:
            self._idle.set()
