"""The copy thread: runs copies between buffers and caches off the loop, one after the other.

It is started by the first copy. What runs cannot be stopped, so who submitted it waits for its end (`transfer`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvflow.transport.owner import OwnerThread

_IDLE_S = 3600.0  # nothing has to be done between jobs


class Copier:
    """Jobs for one thread; their ends are told on the loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: OwnerThread | None = None
        self._open = 0
        self._ending = False

    @property
    def busy(self) -> bool:
        """Whether a copy runs or waits."""
        return self._open > 0

    def submit(self, job: Callable[[], None], on_end: Callable[[BaseException | None], None]) -> None:
        """Run `job` on the copy thread, then `on_end` with what it raised, or None, on the loop."""
        if self._thread is None:
            self._thread = OwnerThread(self._name, self._crank, self._died)
        thread = self._thread
        self._open += 1

        def run() -> None:
            error: BaseException | None = None
            try:
                job()
            except BaseException as problem:  # noqa: BLE001 - handed to who submitted the copy
                error = problem
            thread.run_on_loop(lambda: self._tell(on_end, error))

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
        thread = self._thread
        if thread is None:
            return True
        thread.submit(self._end)
        try:
            async with asyncio.timeout(timeout_s):
                await thread.ended()
        except TimeoutError:
            return False
        return True

    def _tell(self, on_end: Callable[[BaseException | None], None], error: BaseException | None) -> None:
        self._open -= 1
        on_end(error)

    def _crank(self) -> float | None:
        return None if self._ending else _IDLE_S

    def _end(self) -> None:
        self._ending = True

    def _died(self, cause: BaseException) -> None:
        raise AssertionError("jobs of the copy thread do not raise") from cause
