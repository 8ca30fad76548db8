"""The memory of a lease: blocks, a seal and, with host staging, host blocks, all taken together or not at all.

With host staging, readers read copies of computed blocks in host memory. A lease may be open before all of its tokens
can be read. The readable tokens grow from the first token of the prompt, in all groups alike, and the seal holds the
number of missing tokens. Blocks that a copy reads are given back only after the copy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np

from kvflow.checks import counted
from kvflow.core.cache.groups import GroupFacts, GroupKind, tokens_held
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.policy.events import DeviceEvent, Watch
from kvflow.core.policy.history import History
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.protocol.proof import FAILED, SealTable
from kvflow.errors import HostBlocksBusy, Overloaded, RequestError
from kvflow.runtime.copy_thread import CopyThread, run_all
from kvflow.runtime.memory import CopyDirection, RankMemory
from kvflow.runtime.rank import RankContext

OnError: TypeAlias = "Callable[[BaseException], None]"


@dataclass(slots=True, eq=False)
class _Advance:
    """One call of `Lease.advance`: the first `tokens` tokens are computed once a device event has happened.

    `watch` reports the device event, such as a torch.cuda.Event. `done` is True once that event has happened. The
    advance takes effect once `done` is True for this advance and for all earlier advances of the lease.
    """

    tokens: int
    watch: Watch | None
    done: bool


@dataclass(slots=True, kw_only=True, eq=False)
class HeldBlocks:
    """The blocks, seal and host blocks that one lease holds, and how many of its tokens readers can read."""

    lease_id: str
    tables: tuple[BlockIds, ...]
    """Ids of the blocks in the lease, one table for each group."""
    entries: BlockIds
    """Positions of the lease's blocks in the block ledger, which numbers the blocks of all groups in one sequence."""
    seal_index: int
    host_tables: tuple[BlockIds, ...] | None
    """Ids of the host blocks that peers read, one table for each group; None without host staging."""
    host_tables_by_call: list[tuple[BlockIds, ...]] = field(default_factory=list)
    """Ids of the host blocks that peers read, split by the call that took them: the opening, then each `Lease.extend`.

    A pool takes back only whole sets that were taken together.
    """
    num_tokens: int
    offered_tokens: int
    """Number of tokens that all blocks of the lease hold: `num_tokens`, or fewer if only full blocks are offered.

    Blocks that `Lease.extend` has still to add count as well.
    """
    counts: tuple[int, ...]
    """Number of blocks of each group in the lease, including blocks that `Lease.extend` has still to add."""
    extends: bool
    """True while the lease has too few blocks for its tokens. `Lease.extend` will add the others."""
    advances: deque[_Advance] = field(default_factory=deque)
    """Calls of `Lease.advance` that have not taken effect yet, oldest first."""
    computed: int = 0
    """Number of tokens, from the first of the prompt, that are computed now."""
    staged: int = 0
    """Number of tokens, from the first of the prompt, already copied to host blocks; 0 without host staging."""
    copying: bool = False
    closed: bool = False
    failed: bool = False
    """True once the seal says FAILED: the prompt cannot be computed."""
    history: History | None = None
    """Record of how many tokens were computed at which time; None if all were computed when the lease was opened."""
    on_error: OnError | None = None
    """Callback that fails the lease. It is called with the error if peers can never read the missing tokens."""
    on_readable: Callable[[], None] | None = None
    """Callback, called whenever peers can read more tokens than before."""
    on_free: Callable[[], None] | None = None
    """Callback, called when the blocks are free; None until `OfferedBlocks.give_back` sets it."""

    def fail(self, error: BaseException) -> None:
        assert self.on_error is not None, "it was opened"
        self.on_error(error)

    @property
    def readable(self) -> tuple[BlockIds, ...]:
        """Ids of the blocks that peers read, by group: host blocks with host staging, else cache blocks."""
        return self.tables if self.host_tables is None else self.host_tables

    @property
    def announced(self) -> int:
        """Number of tokens in the last `Lease.advance`, even if the device event of that call has not happened yet."""
        return self.advances[-1].tokens if self.advances else self.computed

    @property
    def missing(self) -> int:
        """Number of tokens of the lease that peers cannot read yet."""
        return self.num_tokens - (self.computed if self.host_tables is None else self.staged)


class OfferedBlocks:
    """Takes blocks, seals and host blocks of one rank for its leases, and frees them."""

    def __init__(
        self,
        context: RankContext,
        ledger: BlockLedger,
        seals: SealTable,
        memory: RankMemory,
        copy_thread: CopyThread,
    ) -> None:
        self._groups = context.local.groups
        self._ledger = ledger
        self._seals = seals
        self._memory = memory
        self._copy_thread = copy_thread
        self._stage_unit = math.lcm(*(group.block_size for group in self._groups))
        """Least common multiple of the block sizes of all groups, in tokens."""
        self._stage_step = self._stage_unit * max(
            context.config.limits.slice_bytes_max // max(self._unit_bytes(), 1), 1
        )
        """Maximum number of tokens that one copy job moves to host blocks, about `limits.slice_bytes_max` bytes."""

    def needs_more_blocks(self, block_ids: object, num_tokens: int, what: str) -> bool:
        """Return True if `block_ids` have fewer blocks than `num_tokens` tokens fill, so that more blocks must follow.

        Groups with a sliding window or recurrent state do not count. RequestError, beginning with `what`, for an
        invalid block id.
        """
        tables, _ = self._ledger.find_entries(block_ids, f"{what}: block_ids")
        groups = zip(self._groups, tables, strict=True)
        return any(group.whole and len(ids) < num_tokens // group.block_size for group, ids in groups)

    def take(self, request_id: str, block_ids: object, num_tokens: int, lease_id: str, *, extends: bool) -> HeldBlocks:
        """Take and return what a lease needs: `block_ids`, a seal and, with host staging, a host block for each block.

        `extends`: the caller will add blocks with `extend`. If this raises, for example Overloaded because there are no
        more seals or host blocks, nothing has been taken.
        """
        what = f"request {request_id!r}"
        tables, entries = self._ledger.find_entries(block_ids, f"{what}: block_ids")
        counts, offered_tokens = tuple(map(len, tables)), num_tokens
        if extends:
            given, counts = counts, tuple(group.blocks_needed(num_tokens) for group in self._groups)
            self._check_fits(counts, num_tokens, what)
            self._check_room(given, counts, num_tokens, what)
        else:
            offered_tokens = self._check_counts(counts, num_tokens, what)
        with ExitStack() as undo:
            seal_index = self._seals.take_slot()
            if seal_index is None:
                full = f"at most {counted(self._seals.count, 'lease')} may be open (limits.leases_max)"
                raise Overloaded(f"{what}: {full}", request_id=request_id, peer="")
            undo.callback(self._seals.free_slot, seal_index)
            self._ledger.lease(entries)
            undo.callback(self._ledger.release, entries)
            staged = len(self._memory.staging) > 0 and (extends or len(entries) > 0)
            host_tables = self._take_host_blocks(request_id, tables, undo) if staged else None
            undo.pop_all()
        return HeldBlocks(
            lease_id=lease_id,
            tables=tables,
            entries=entries,
            seal_index=seal_index,
            host_tables=host_tables,
            host_tables_by_call=[] if host_tables is None else [host_tables],
            num_tokens=num_tokens,
            offered_tokens=offered_tokens,
            counts=counts,
            extends=extends and _lacks_blocks(tables, counts),
        )

    def undo_take(self, held: HeldBlocks) -> None:
        """Give back what `take` has taken for a lease that will not be opened."""
        self._seals.free_slot(held.seal_index)
        self._free(held, lambda: None)

    def extend(self, request_id: str, held: HeldBlocks, block_ids: object) -> None:
        """Add the blocks in `block_ids` to an open lease and, with host staging, take a host block for each.

        If this raises, nothing has changed.
        """
        what = f"request {request_id!r}: extend()"
        more, _ = self._ledger.find_entries(block_ids, f"{what}: block_ids")
        tables = tuple(np.concatenate(both) for both in zip(held.tables, more, strict=True))
        self._check_room(tuple(map(len, tables)), held.counts, held.num_tokens, what)
        _, entries = self._ledger.find_entries(tables[0] if len(tables) == 1 else tables, f"{what}: block_ids")
        added = np.setdiff1d(entries, held.entries)
        with ExitStack() as undo:
            self._ledger.lease(added)
            undo.callback(self._ledger.release, added)
            if held.host_tables is not None:
                host = self._take_host_blocks(request_id, more, undo)
                held.host_tables_by_call.append(host)
                held.host_tables = tuple(np.concatenate(both) for both in zip(held.host_tables, host, strict=True))
            undo.pop_all()
        held.tables, held.entries, held.extends = tables, entries, _lacks_blocks(tables, held.counts)

    def check_tensors(self) -> None:
        """Raise LayoutError if a tensor of the cache has moved since the cache was registered."""
        self._ledger.check_tensors()

    def tokens_with_blocks(self, held: HeldBlocks) -> int:
        """Return for how many of the prompt's first tokens the lease has blocks now, in every group."""
        return tokens_held(self._groups, tuple(map(len, held.tables)), held.counts, held.num_tokens)

    def _check_fits(self, counts: tuple[int, ...], tokens: int, what: str) -> None:
        """Raise RequestError if a group of the cache, or its host buffers, has fewer blocks than `counts` says.

        `counts`: number of blocks of each group that a lease of `tokens` tokens needs in the end.
        """
        self._ledger.check_enough_blocks(counts, f"{what}: num_tokens {tokens}")
        for group, count, buffers in zip(self._groups, counts, self._memory.staging, strict=False):
            if count > buffers.pool.size:
                needs = f"{counted(count, 'host block')}{self._group_text(group)}"
                there_are = f"there are {buffers.pool.size} (host_buffer_bytes_max)"
                raise RequestError(f"{what}: num_tokens {tokens} needs {needs}, {there_are}")

    def _check_room(self, counts: tuple[int, ...], most: tuple[int, ...], tokens: int, what: str) -> None:
        """Raise RequestError if the count of some group in `counts` is greater than in `most`.

        `counts`: blocks given so far, by group. `most`: blocks that `tokens` tokens need.
        """
        for group, count, needed in zip(self._groups, counts, most, strict=True):
            if count > needed:
                given = f"{counted(count, 'block id')}{self._group_text(group)}"
                needs = f"{needed} of {group.block_size} for {counted(tokens, 'token')}"
                raise RequestError(f"{what}: {given} in all, expected at most {needs}")

    def _check_counts(self, counts: tuple[int, ...], num_tokens: int, what: str) -> int:
        """Return how many of `num_tokens` tokens a lease with `counts` blocks, one number for each group, can offer.

        RequestError if a group has more blocks than the tokens need, or too few for its sliding window or recurrent
        state.
        """
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
                why = f"a state has one slot, for the whole prompt of {counted(num_tokens, 'token')}; "
                why += f"blocks of other groups hold {tokens}"
                raise RequestError(f"{what}: {counted(count, 'block id')}{self._group_text(group)}: {why}")
            if count < needed:
                why = f"expected {needed} for {counted(tokens, 'token')} ({group.kind}, window {group.window})"
                raise RequestError(f"{what}: {counted(count, 'block id')}{self._group_text(group)}, {why}")
        return tokens

    def _check_filled(self, group: GroupFacts, count: int, tokens: int, what: str) -> None:
        size, filled = group.block_size, -(-tokens // group.block_size)
        if count > filled:
            given = f"{counted(count, 'block id')}{self._group_text(group)}"
            needs = f"{counted(filled, 'block')} of {size} for {counted(tokens, 'token')}"
            raise RequestError(f"{what}: {given}, expected at most {needs}")

    def _group_text(self, group: GroupFacts) -> str:
        return f" of group {group.name!r}" if len(self._groups) > 1 else ""

    def advance(self, held: HeldBlocks, tokens: int, ready: DeviceEvent | None) -> None:
        """Record that the first `tokens` tokens are computed, now or once the device event `ready` has happened.

        Without `ready` the caller must call `grow` afterwards, which updates the seal.
        """
        if ready is None and not held.advances:
            held.computed = tokens
            return
        advance = _Advance(tokens, None, ready is None)
        held.advances.append(advance)
        if ready is not None:
            advance.watch = self._copy_thread.watch(ready, partial(self._on_event, held, advance))

    def grow(self, held: HeldBlocks) -> None:
        """Write the number of missing tokens into the lease's seal, so that readers can read all other tokens.

        With host staging, also start to copy computed tokens to host blocks. Call this after each change of
        `held.computed` or of the lease's blocks.
        """
        if held.history is not None:
            held.history.note(held.computed)
        if not held.closed:
            self._seals.seal(held.seal_index, held.lease_id, held.missing)
            if held.on_readable is not None:
                held.on_readable()
            if held.host_tables is not None:
                self._stage_next(held, held.host_tables)

    def _on_event(self, held: HeldBlocks, advance: _Advance, error: BaseException | None) -> None:
        """Called when the device event of `advance` has happened: let it and earlier advances take effect.

        If querying the event raised `error`, fail the lease.
        """
        if held.closed:
            return
        if error is not None:
            held.fail(error)
            return
        advance.done = True
        while held.advances and held.advances[0].done:
            held.computed = held.advances.popleft().tokens
        self.grow(held)

    def close(self, held: HeldBlocks, *, failed: bool) -> None:
        """End the lease for readers: clear its seal or, if `failed`, set the seal to FAILED.

        A read that checks the seal after this call fails.
        """
        held.closed = True
        for advance in held.advances:
            if advance.watch is not None:
                advance.watch.dropped = True
        held.failed = failed
        if failed:
            self._seals.seal(held.seal_index, held.lease_id, FAILED)
        else:
            self._seals.free_slot(held.seal_index)

    def give_back(self, held: HeldBlocks, on_free: Callable[[], None]) -> None:
        """Free the blocks of a lease as soon as no copy to host blocks reads them, then call `on_free`.

        Call this once no read of these blocks can succeed: `limits.seal_hold_s` after `close` or, if
        `LeaseEntry.holds_blocks` is False, immediately after `close`.
        """
        if held.failed:
            self._seals.retire_slot(held.seal_index)
        held.on_free = on_free
        if not held.copying:
            self._free(held, on_free)

    def _take_host_blocks(self, request_id: str, tables: Sequence[BlockIds], undo: ExitStack) -> tuple[BlockIds, ...]:
        """Take one host block for each block id in `tables`. Return their ids, one table for each group.

        Callbacks that give the host blocks back are added to `undo`. HostBlocksBusy if too few host blocks are free.
        """
        found = []
        for ids, buffers in zip(tables, self._memory.staging, strict=True):
            host_ids = buffers.pool.take_nowait(len(ids)) if len(ids) else ids
            if host_ids is None:
                free, size = buffers.pool.size - buffers.pool.used, buffers.pool.size
                room = f"{free} of {size} are free (host_buffer_bytes_max)"
                what = f"request {request_id!r}: needed: {counted(len(ids), 'host block')}, {room}"
                raise HostBlocksBusy(what, request_id=request_id, peer="")
            if len(ids):
                undo.callback(buffers.pool.give_back, host_ids)
            found.append(host_ids)
        return tuple(found)

    def _stage_next(self, held: HeldBlocks, host_tables: tuple[BlockIds, ...]) -> None:
        """Start to copy the next computed tokens of all groups to host blocks, if any, unless a copy is running."""
        if held.copying:
            return
        upto = self._stage_upto(held)
        if upto <= held.staged:
            return
        copies = []
        for group, count, ids, host_ids, buffers in zip(
            self._groups, held.counts, held.tables, host_tables, self._memory.staging, strict=True
        ):
            some = _blocks_of(group, count, held.offered_tokens, range(held.staged, upto))
            if len(ids[some]):
                copies.append(partial(buffers.copy, CopyDirection.TO_HOST, ids[some], host_ids[some]))

        def copied(error: BaseException | None) -> None:
            held.copying = False
            if error is not None:
                held.fail(error)
            elif not held.closed:
                held.staged = upto
                self.grow(held)
            if held.on_free is not None:
                self._free(held, held.on_free)

        held.copying = True
        self._copy_thread.submit(partial(run_all, copies), copied)

    def _stage_upto(self, held: HeldBlocks) -> int:
        """Return how many tokens, from the first of the prompt, will be in host blocks after the next copy.

        Copies end at block boundaries of all groups; the last copy ends with the last token.
        """
        upto = held.staged + self._stage_step
        if upto >= held.num_tokens <= held.computed:
            return held.num_tokens
        return min(upto, held.computed) // self._stage_unit * self._stage_unit

    def _unit_bytes(self) -> int:
        """Return the size in bytes of `_stage_unit` tokens in host blocks of all groups.

        Recurrent state does not count: it is copied only together with the last token.
        """
        size_bytes = 0
        for group, buffers in zip(self._groups, self._memory.staging, strict=False):
            if group.kind is not GroupKind.STATE:
                size_bytes += buffers.block_size_bytes * (self._stage_unit // group.block_size)
        return size_bytes

    def _free(self, held: HeldBlocks, on_free: Callable[[], None]) -> None:
        """Free the blocks and host blocks of a lease, then call `on_free`. The producer may now reuse the blocks."""
        self._ledger.release(held.entries)
        for taken in held.host_tables_by_call:
            for host_ids, buffers in zip(taken, self._memory.staging, strict=True):
                if len(host_ids):
                    buffers.pool.give_back(host_ids)
        on_free()


def _lacks_blocks(tables: Sequence[BlockIds], counts: Sequence[int]) -> bool:
    return any(len(ids) < count for ids, count in zip(tables, counts, strict=True))


def _blocks_of(group: GroupFacts, count: int, num_tokens: int, tokens: range) -> slice:
    """Return, as a Python slice, the part of a group's block table that holds the tokens at the positions `tokens`.

    `tokens` begins at a block boundary. The table has `count` blocks, and its last block holds the last of the
    `num_tokens` tokens. The table of a sliding-window group may lack the blocks of the prompt's first tokens.
    """
    first = 0 if group.whole else max(-(-num_tokens // group.block_size) - count, 0)
    begin, end = (min(max(-(-edge // group.block_size) - first, 0), count) for edge in (tokens.start, tokens.stop))
    return slice(begin, end)
