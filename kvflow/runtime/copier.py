"""The copy thread: runs copies between buffers and caches off the loop, one after the other.

It is started by the first copy. What runs cannot be stopped, so who submitted it waits for its end (`transfer`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Copier:
    """Jobs for one thread; their ends are told on the loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self._open = 0

    @property
    def busy(self) -> bool:
        """Whether a copy runs or waits."""
        return self._open > 0

    def submit(self, job: Callable[[], None], on_end: Callable[[BaseException | None], None]) -> None:
        """Run `job` on the copy thread, then `on_end` with what it raised, or None, on the loop."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
        self._open += 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, job)

        def tell(done: asyncio.Future[None]) -> None:
            self._open -= 1
            on_end(done.exception())

        future.add_done_callback(tell)

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

    def close(self) -> None:
        """Let the thread end after its last copy. Closing twice is fine."""
        if self._executor is not None:
            self._executor.shutdown(wait=not self.busy)
            self._executor = None
