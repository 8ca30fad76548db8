"""What a lease takes of its rank: blocks, a seal, and with host staging host blocks; all of it or nothing.

A lease may be open before its blocks can be read: the device has yet to compute them, or, with host staging, they are
copied to the host group by group. The seal says how many are still missing. Blocks that a copy reads are given back
only after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.policy.events import DeviceEvent, Watch
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.protocol.freshness import SealTable
from kvflow.errors import RequestError
from kvflow.runtime.memory.copy_thread import CopyThread
from kvflow.runtime.memory.host_buffers import CopyDirection, HostBuffers


@dataclass(slots=True, kw_only=True, eq=False)
class HeldBlocks:
    """What one lease has taken."""

    lease_id: str
    tables: tuple[BlockIds, ...]
    """Its blocks, by group."""
    entries: BlockIds
    """The same, as the ledger counts them."""
    seal_index: int
    host_tables: tuple[BlockIds, ...] | None
    """Where peers read the blocks, with host staging."""
    staged: int = 0
    """How many of them are there, group after group."""
    computing: Watch | None = None
    """While the device computes them: who waits for that."""
    copying: bool = False
    closed: bool = False
    on_free: Callable[[], None] | None = None
    """Set once they are to be given back."""

    @property
    def missing(self) -> int:
        """How many blocks cannot be read yet."""
        if self.computing is None and self.host_tables is None:
            return 0
        return sum(map(len, self.tables)) - self.staged


class OfferedBlocks:
    """The blocks of one rank, as its leases take them and give them back."""

    def __init__(
        self,
        groups: Sequence[GroupFacts],
        ledger: BlockLedger,
        seals: SealTable,
        staging: Sequence[HostBuffers],
        copy_thread: CopyThread,
        copy_bytes_max: int,
    ) -> None:
        """`staging` has the host blocks of each group, or none if peers read the cache itself."""
        self._groups = groups
        self._ledger = ledger
        self._seals = seals
        self._staging = staging
        self._copy_thread = copy_thread
        self._copy_bytes_max = copy_bytes_max

    def take(self, block_ids: object, num_tokens: int, what: str, lease_id: str) -> HeldBlocks:
        """Take what a lease needs. Raises RequestError, and changes nothing then."""
        tables, entries = self._ledger.find(block_ids, f"{what}: block_ids")
        self._check_counts(tuple(map(len, tables)), num_tokens, what)
        with ExitStack() as undo:
            seal_index = self._seals.take()
            if seal_index is None:
                raise RequestError(f"{what}: {self._seals.count} leases are open (leases_max)")
            undo.callback(self._seals.give_back, seal_index)
            self._ledger.lease(entries)
            undo.callback(self._ledger.release, entries)
            host_tables = self._take_host_blocks(what, tables, undo) if self._staging and len(entries) else None
            undo.pop_all()
        return HeldBlocks(
            lease_id=lease_id, tables=tables, entries=entries, seal_index=seal_index, host_tables=host_tables
        )

    def _check_counts(self, counts: tuple[int, ...], num_tokens: int, what: str) -> None:
        """RequestError unless so many blocks of each group can hold so many tokens of a prompt, and its windows."""
        tokens = num_tokens
        for group, count in zip(self._groups, counts, strict=True):
            self._check_filled(group, count, num_tokens, what)
            tokens = min(tokens, count * group.block_size) if group.whole else tokens
        for group, count in zip(self._groups, counts, strict=True):
            if group.whole or not any(counts):
                continue
            self._check_filled(group, count, tokens, what)
            needed = -(-tokens // group.block_size) - group.first_needed(tokens) // group.block_size
            if group.kind is GroupKind.STATE and (count > 1 or tokens < num_tokens):
                why = f"a state is of one slot and of all {num_tokens} tokens; blocks of other groups hold {tokens}"
                raise RequestError(f"{what}: {count} block ids{self._of(group)}: {why}")
            if count < needed:
                why = f"{needed} hold what {tokens} tokens need ({group.kind}, window {group.window})"
                raise RequestError(f"{what}: {count} block ids{self._of(group)}, but {why}")

    def _check_filled(self, group: GroupFacts, count: int, tokens: int, what: str) -> None:
        size, filled = group.block_size, -(-tokens // group.block_size)
        if count > filled:
            given = f"{count} block ids{self._of(group)}"
            raise RequestError(f"{what}: {given}, but {tokens} tokens fill {filled} blocks of {size}")

    def _of(self, group: GroupFacts) -> str:
        return f" of group {group.name!r}" if len(self._groups) > 1 else ""

    def open(self, held: HeldBlocks, ready: DeviceEvent | None, on_error: Callable[[BaseException], None]) -> None:
        """Set the seal, so that readers find the lease, and have the blocks be there: once `ready`, and staged.

        `on_error` is told why they never will be, if so.
        """

        def computed(error: BaseException | None = None) -> None:
            held.computing = None
            if held.closed:
                return
            if error is not None:
                on_error(error)
                return
            self._seal(held)
            if held.host_tables is not None:
                self._stage_next(held, held.host_tables, on_error)

        if ready is None:
            computed()
        else:
            held.computing = self._copy_thread.watch(ready, computed)
            self._seal(held)

    def close(self, held: HeldBlocks) -> None:
        """Wipe the seal: no read that looks at it from now on succeeds."""
        held.closed = True
        if held.computing is not None:
            held.computing.dropped = True
        self._seals.give_back(held.seal_index)

    def give_back(self, held: HeldBlocks, on_free: Callable[[], None]) -> None:
        """Free the blocks, which no read can take for good any more, once no copy reads them; then call `on_free`."""
        held.on_free = on_free
        if not held.copying:
            self._free(held, on_free)

    def _take_host_blocks(self, what: str, tables: Sequence[BlockIds], undo: ExitStack) -> tuple[BlockIds, ...]:
        """Host blocks for a lease; RequestError if there are not enough now."""
        found = []
        for ids, buffers in zip(tables, self._staging, strict=True):
            host_ids = buffers.pool.take_nowait(len(ids)) if len(ids) else ids
            if host_ids is None:
                free, size = buffers.pool.size - buffers.pool.used, buffers.pool.size
                room = f"{free} of {size} are free (host_buffer_bytes_max)"
                raise RequestError(f"{what}: {len(ids)} host blocks are needed, {room}")
            undo.callback(buffers.pool.give_back, host_ids)
            found.append(host_ids)
        return tuple(found)

    def _seal(self, held: HeldBlocks) -> None:
        self._seals.seal(held.seal_index, held.lease_id, held.missing)

    def _stage_next(
        self, held: HeldBlocks, host_tables: Sequence[BlockIds], on_error: Callable[[BaseException], None]
    ) -> None:
        """Copy the next blocks of a group to the host, until all are there or the lease has ended."""
        if held.closed or not held.missing:
            return
        group, first = 0, held.staged
        while first >= len(held.tables[group]):
            first -= len(held.tables[group])
            group += 1
        buffers = self._staging[group]
        some = slice(first, first + max(self._copy_bytes_max // buffers.block_size_bytes, 1))
        count = len(held.tables[group][some])
        copy = partial(buffers.copy, CopyDirection.TO_HOST, held.tables[group][some], host_tables[group][some])

        def copied(error: BaseException | None) -> None:
            held.copying = False
            if error is not None:
                on_error(error)
            elif not held.closed:
                held.staged += count
                self._seal(held)
                self._stage_next(held, host_tables, on_error)
            if held.on_free is not None:
                self._free(held, held.on_free)

        held.copying = True
        self._copy_thread.submit(copy, copied)

    def _free(self, held: HeldBlocks, on_free: Callable[[], None]) -> None:
        """The producer may reuse the blocks (invariant I3)."""
        self._ledger.release(held.entries)
        for host_ids, buffers in zip(held.host_tables or (), self._staging, strict=False):
            buffers.pool.give_back(host_ids)
        on_free()
