"""Waiting for permits, and pools of numbered things such as host blocks or scratch buffers."""

from __future__ import annotations

import asyncio

import numpy as np

from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.policy.queue import FairQueue, Permit, PermitState


async def granted(queue: FairQueue, permit: Permit) -> None:
    """Return once a permit that waits is under way. Cancelling gives it, or its place, back."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    permit.on_grant = lambda: None if waiter.done() else waiter.set_result(None)
    try:
        await waiter
    except asyncio.CancelledError:
        queue.end(permit)
        raise


class Pool:
    """Numbers 0 to `size` - 1, given out first come, first served. Belongs to one event loop."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._queue = FairQueue((size,))
        self._permits: dict[int, Permit] = {}
        """Permits by the first of the numbers that were taken together."""

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    def take_nowait(self, count: int) -> BlockIds | None:
        """`count` numbers, or None if they are not free now or others wait."""
        permit = self._queue.ask((count,)) if count <= len(self._free) else None
        if permit is None or permit.state is PermitState.UNDER_WAY:
            return None if permit is None else self._pop(permit)
        self._queue.end(permit)
        return None

    async def take(self, count: int) -> BlockIds:
        """`count` numbers once they are free; `count` is at most `size`. Cancelling gives the place in the queue up."""
        assert 0 < count <= self.size, f"{count} of {self.size}"
        permit = self._queue.ask((count,))
        if permit.state is PermitState.WAITING:
            await granted(self._queue, permit)
        return self._pop(permit)

    def give_back(self, numbers: BlockIds) -> None:
        """Give back numbers that were taken together. The next to take as many gets them in the same order."""
        self._free.extend(numbers[::-1].tolist())
        self._queue.end(self._permits.pop(int(numbers[0])))

    def _pop(self, permit: Permit) -> BlockIds:
        (count,) = permit.amount
        found = np.array(self._free[: -count - 1 : -1], dtype=np.int64)
        del self._free[len(self._free) - count :]
        self._permits[int(found[0])] = permit
        return found
