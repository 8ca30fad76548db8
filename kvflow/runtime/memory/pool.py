"""A bounded pool of numbered things, such as host blocks or scratch buffers, given out first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np

from kvflow.core.plan.descriptors import BlockIds


class Pool:
    """Numbers 0 to `size` - 1 and who waits for some. Belongs to one event loop."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._waiters: deque[tuple[int, asyncio.Future[BlockIds]]] = deque()

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    def take_nowait(self, count: int) -> BlockIds | None:
        """`count` numbers, or None if they are not free now or others wait."""
        return None if self._waiters or count > len(self._free) else self._pop(count)

    async def take(self, count: int) -> BlockIds:
        """`count` numbers once they are free; `count` is at most `size`. Cancelling gives the place in the queue up."""
        assert count <= self.size, f"{count} of {self.size}"
        found = self.take_nowait(count)
        if found is not None:
            return found
        granted: asyncio.Future[BlockIds] = asyncio.get_running_loop().create_future()
        waiter = (count, granted)
        self._waiters.append(waiter)
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give_back(granted.result())
            elif waiter in self._waiters:  # else it was passed over already: its future was cancelled a moment ago
                self._waiters.remove(waiter)
                self._grant()
            raise

    def give_back(self, numbers: BlockIds) -> None:
        self._free.extend(numbers.tolist())
        self._grant()

    def _grant(self) -> None:
        while self._waiters and self._waiters[0][0] <= len(self._free):
            count, granted = self._waiters.popleft()
            if granted.cancelled():
                continue
            granted.set_result(self._pop(count))

    def _pop(self, count: int) -> BlockIds:
        found = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return np.array(found[::-1], dtype=np.int64)
