"""The copy thread: runs copies between buffers and caches off the loop, one after the other.

It is started by the first copy. What runs cannot be stopped, so who submitted it waits for its end (`transfer`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvflow.transport.nixl.owner import OwnerThread

_IDLE_S = 3600.0  # nothing has to be done between jobs


class CopyThread:
    """Jobs for one thread; their ends are told on the loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: OwnerThread | None = None
        self._ending = False

    def submit(self, job: Callable[[], None], on_end: Callable[[BaseException | None], None]) -> None:
        """Run `job` on the copy thread, then `on_end` with what it raised, or None, on the loop."""
        if self._thread is None:
            self._thread = OwnerThread(self._name, self._crank, self._died)
        thread = self._thread

        def run() -> None:
            error: BaseException | None = None
            try:
                job()
            except BaseException as problem:  # noqa: BLE001 - handed to who submitted the copy
                error = problem
            thread.run_on_loop(lambda: on_end(error))

        thread.submit(run)

    async def run(self, job: Callable[[], None]) -> None:
        """Run `job` on the copy thread and wait for it. Cancelling stops the waiting only."""
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def tell(error: BaseException | None) -> None:
            if end.cancelled():
                return
            if error is None:
                end.set_result(None)
            else:
                end.set_exception(error)

        self.submit(job, tell)
        await end

    async def aclose(self, timeout_s: float) -> bool:
        """End the thread; whether it has in time. If a copy still runs the thread ends after it."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended()
        except TimeoutError:
            return False
        return True

    def abandon(self, wait_s: float) -> None:
        """End the thread without the loop, which is gone; waits up to `wait_s` for a copy that still runs."""
        if self._thread is not None:
            self._thread.abandon(self._end, wait_s)

    async def _ended(self) -> None:
        """Wait until no copy runs, and none ever will."""
        if self._thread is not None and self._thread.alive:
            self._thread.submit(self._end)
            await self._thread.ended()

    def _crank(self) -> float | None:
        return None if self._ending else _IDLE_S

    def _end(self) -> None:
        self._ending = True

    def _died(self, cause: BaseException) -> None:
        raise AssertionError("jobs of the copy thread do not raise") from cause
