"""What a lease takes of its rank: blocks, a seal, and with host staging host blocks; all of it or nothing.

With host staging a lease is open before its blocks can be read: they are copied to the host group by group, and the
seal says how many are still missing. Blocks that a copy reads are given back only after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from kvflow.core.cache.layout import CacheLayout
from kvflow.core.plan.descriptors import BlockIds, check_block_ids
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.protocol.freshness import SealTable
from kvflow.errors import RequestError
from kvflow.runtime.memory.copy_thread import CopyThread
from kvflow.runtime.memory.host_buffers import CopyDirection, HostBuffers


@dataclass(slots=True, kw_only=True, eq=False)
class HeldBlocks:
    """What one lease has taken."""

    lease_id: str
    ids: BlockIds
    seal_index: int
    host_ids: BlockIds | None
    """Where peers read the blocks, with host staging."""
    staged: int = 0
    """How many of them are there."""
    copying: bool = False
    closed: bool = False
    on_free: Callable[[], None] | None = None
    """Set once they are to be given back."""


class OfferedBlocks:
    """The blocks of one rank, as its leases take them and give them back."""

    def __init__(
        self,
        layout: CacheLayout,
        ledger: BlockLedger,
        seals: SealTable,
        staging: HostBuffers | None,
        copy_thread: CopyThread,
        copy_bytes_max: int,
    ) -> None:
        self._layout = layout
        self._ledger = ledger
        self._seals = seals
        self._staging = staging
        self._copy_thread = copy_thread
        self._copy_blocks_max = max(copy_bytes_max // layout.block_size_bytes, 1)

    def take(self, block_ids: Sequence[int], num_tokens: int, what: str, lease_id: str) -> HeldBlocks:
        """Take what a lease needs. Raises RequestError, and changes nothing then."""
        size = self._layout.block_size
        ids = check_block_ids(block_ids, num_blocks=self._layout.num_blocks, what=f"{what}: block_ids")
        filled = -(-num_tokens // size)
        if len(ids) > filled:
            raise RequestError(f"{what}: {len(ids)} block ids, but {num_tokens} tokens fill {filled} blocks of {size}")
        with ExitStack() as undo:
            seal_index = self._seals.take()
            if seal_index is None:
                raise RequestError(f"{what}: {self._seals.count} leases are open (leases_max)")
            undo.callback(self._seals.give_back, seal_index)
            self._ledger.lease(ids)
            undo.callback(self._ledger.release, ids)
            host_ids = self._take_host_blocks(what, len(ids))
            undo.pop_all()
        return HeldBlocks(lease_id=lease_id, ids=ids, seal_index=seal_index, host_ids=host_ids)

    def open(self, held: HeldBlocks, on_error: Callable[[BaseException], None]) -> None:
        """Set the seal, so that readers find the lease, and begin to stage the blocks.

        `on_error` is told why they cannot be staged, if they cannot.
        """
        self._seal(held)
        if held.host_ids is not None:
            self._stage_next(held, held.host_ids, on_error)

    def close(self, held: HeldBlocks) -> None:
        """Wipe the seal: no read that looks at it from now on succeeds."""
        held.closed = True
        self._seals.give_back(held.seal_index)

    def give_back(self, held: HeldBlocks, on_free: Callable[[], None]) -> None:
        """Free the blocks, which no read can take for good any more, once no copy reads them; then call `on_free`."""
        held.on_free = on_free
        if not held.copying:
            self._free(held, on_free)

    def _take_host_blocks(self, what: str, count: int) -> BlockIds | None:
        """Host blocks for a lease; RequestError if there are not enough now."""
        if self._staging is None or count == 0:
            return None
        pool = self._staging.pool
        host_ids = pool.take_nowait(count)
        if host_ids is None:
            room = f"{pool.size - pool.used} of {pool.size} are free (host_buffer_bytes_max)"
            raise RequestError(f"{what}: {count} host blocks are needed, {room}")
        return host_ids

    def _seal(self, held: HeldBlocks) -> None:
        self._seals.seal(held.seal_index, held.lease_id, 0 if held.host_ids is None else len(held.ids) - held.staged)

    def _stage_next(self, held: HeldBlocks, host_ids: BlockIds, on_error: Callable[[BaseException], None]) -> None:
        """Copy the next group of blocks to the host, until all are there or the lease has ended."""
        assert self._staging is not None
        group = slice(held.staged, held.staged + self._copy_blocks_max)
        count = len(held.ids[group])
        if held.closed or count == 0:
            return
        copy = partial(self._staging.copy, CopyDirection.TO_HOST, held.ids[group], host_ids[group])

        def copied(error: BaseException | None) -> None:
            held.copying = False
            if error is not None:
                on_error(error)
            elif not held.closed:
                held.staged += count
                self._seal(held)
                self._stage_next(held, host_ids, on_error)
            if held.on_free is not None:
                self._free(held, held.on_free)

        held.copying = True
        self._copy_thread.submit(copy, copied)

    def _free(self, held: HeldBlocks, on_free: Callable[[], None]) -> None:
        """The producer may reuse the blocks (invariant I3)."""
        self._ledger.release(held.ids)
        if self._staging is not None and held.host_ids is not None:
            self._staging.pool.give_back(held.host_ids)
        on_free()
