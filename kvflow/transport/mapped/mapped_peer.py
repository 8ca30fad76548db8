"""`MappedPeer`: the device memory of one peer, mapped into this process, and the reads from that peer in their order.

A batch of copies and NIXL know nothing of each other, but a seal vouches only for bytes that had landed before it was
fetched (docs/decisions/0003-seals.md). So reads of a mapped peer stand in one queue: a read of its host memory, where
its seals are, is given to NIXL once the events of all batches before it have happened.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvflow.checks import printable
from kvflow.core.cache.regions import Span
from kvflow.core.plan.descriptors import Descriptors
from kvflow.transport.base import PeerGone, PostedRead, TransportError
from kvflow.transport.device.mapper import Mapper
from kvflow.transport.mapped.shared_memory import AddressMap, NotMappable, SharedMemory, WatchedProcess

_TEXT_CHARS_MAX = 80


@dataclass(slots=True, eq=False)
class Batch:
    """A read by one batch of copies. `event`: recorded behind the copies; None if no copy is under way."""

    read: PostedRead
    event: int | None = None
    error: TransportError | None = None
    post_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class HostRead:
    """A read of the peer's host memory, which NIXL is to post once the batches before it have ended."""

    read: PostedRead
    descriptors: Descriptors


class MappedPeer:
    """One peer with mapped device memory. All methods run on the agents' thread."""

    def __init__(self, mapper: Mapper, kind: str, shared: SharedMemory) -> None:
        """Map the memory, on a device of the given `kind`.

        NotMappable if this process cannot map it, or if it is not as large as the peer says.
        """
        if shared.kind != kind:
            raise NotMappable(f"kind of device: ours {kind}, theirs {printable(shared.kind, _TEXT_CHARS_MAX)}")
        self._mapper = mapper
        self._process = WatchedProcess(shared.process)
        self._opened: list[int] = []
        self.size_bytes = sum(one.size_bytes for one in shared.ranges)
        self.queue: deque[Batch | HostRead] = deque()
        """Reads that have not ended, or that wait for those before them, in the order of their posts."""
        try:
            self._map = AddressMap(self._open(shared))
        except BaseException:
            self.close()
            raise

    def _open(self, shared: SharedMemory) -> list[tuple[Span, int]]:
        """Open all allocations. Return each range that the peer has registered, and where it lies in this process."""
        allocations: list[tuple[Span, int]] = []
        for allocation in shared.allocations:
            try:
                opened = self._mapper.open(allocation.handle)
            except RuntimeError as error:
                raise NotMappable(str(error)) from error
            self._opened.append(opened.address)
            if opened.size_bytes < allocation.size_bytes:
                sizes = f"the peer says {allocation.size_bytes}, opened {opened.size_bytes}"
                raise NotMappable(f"bytes of an allocation: {sizes}")
            whole = Span(address=allocation.address, size_bytes=allocation.size_bytes)
            allocations.append((whole, opened.address))
        where, ranges = AddressMap(allocations), []
        for registered in shared.ranges:
            span = Span(address=registered.address, size_bytes=registered.size_bytes)
            place = where.find_one(span)
            if place is None:
                raise NotMappable(f"registered memory at {span.address:#x} is in none of the peer's allocations")
            ranges.append((span, place))
        return ranges

    def start(self, read: PostedRead, descriptors: Descriptors, targets: AddressMap) -> None:
        """Queue all copies of `read` as one batch. `targets`: the memory of this process that reads may write to."""
        batch, started_s = Batch(read), time.monotonic()
        self.queue.append(batch)
        sizes = descriptors.sizes
        sources, local = self._map.find(descriptors.remote, sizes), targets.find(descriptors.local, sizes)
        if self._process.has_ended:
            batch.error = self._gone()
        elif sources is None or local is None:
            batch.error = TransportError(f"a {'local' if local is None else 'remote'} range is not registered")
        else:
            try:
                self._mapper.copy(local, sources, sizes.copy())
            except RuntimeError as error:
                batch.error = TransportError(f"the device refuses a batch of copies: {error}")
            try:  # also after an error: some of the copies may run
                batch.event = self._mapper.record()
            except RuntimeError as error:
                batch.error = batch.error or TransportError(f"the device refuses an event: {error}")
                with suppress(RuntimeError):  # else it runs nothing any more
                    self._mapper.wait()
        batch.post_s = time.monotonic() - started_s

    def take_ended(self) -> Iterator[Batch | HostRead]:
        """Yield the batches that have ended, and the host reads behind these, and take them out of the queue."""
        while self.queue and (isinstance(head := self.queue[0], HostRead) or self._has_ended(head)):
            yield self.queue.popleft()

    def _has_ended(self, batch: Batch) -> bool:
        if batch.event is not None:
            try:
                if not self._mapper.has_happened(batch.event):
                    return False
            except RuntimeError as error:
                batch.error = TransportError(f"a batch of copies failed: {error}")
        if batch.error is None and self._process.has_ended:
            batch.error = self._gone()
        return True

    @staticmethod
    def _gone() -> PeerGone:
        return PeerGone("the peer's process has ended, and what is mapped of it is old")

    def close(self) -> None:
        """Unmap the memory, so that the peer can free it. Illegal while a batch is under way."""
        assert not self.queue, "memory is unmapped under a running read"
        self._process.close()
        for address in self._opened:
            with suppress(RuntimeError):  # of a device in error, which frees all when the process ends
                self._mapper.close(address)
        self._opened.clear()
