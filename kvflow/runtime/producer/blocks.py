"""The memory of a lease: blocks, a seal and, if peers read copies, room for these, all taken together or not at all.

A lease may be open before all of its tokens can be read. The readable tokens grow from the first token of the prompt,
in all groups alike, and the seal holds the number of missing tokens. If peers cannot read the cache, they read copies
of its computed blocks (`LeaseCopies`). Blocks that a copy reads are given back only after the copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from kvflow.checks import counted
from kvflow.core.cache.groups import GroupFacts, GroupKind, tokens_held
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.policy.events import DeviceEvent, Watch
from kvflow.core.policy.history import History
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.protocol.proof import FAILED, SealTable
from kvflow.errors import Overloaded, RequestError
from kvflow.runtime.copy_thread import CopyThread
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


class LeaseCopies(Protocol):
    """Copies of one lease's blocks, which peers read if they cannot read the cache itself. `kvflow.staging` makes them.

    No copy is made, and no room for copies taken, before a call of a method says so.
    """

    tables: tuple[BlockIds, ...]
    """Ids of the copies, one table for each group."""
    copied: int
    """Number of tokens, from the first of the prompt, already copied."""

    def check_fits(self, counts: Sequence[int], what: str) -> None:
        """Raise RequestError, beginning with `what`, if there can never be copies of `counts` blocks, by group."""

    def extend(self, request_id: str, tables: Sequence[BlockIds], undo: ExitStack) -> None:
        """Take room for a copy of each block in `tables`, and add to `undo` what gives the room back.

        HostBlocksBusy if there is too little room.
        """

    def copy_computed(self, held: HeldBlocks, on_copied: Callable[[HeldBlocks], None]) -> None:
        """Start to copy the next computed tokens, if any, unless a copy is running. Then call `on_copied(held)`."""

    def after_copy(self, call: Callable[[], None]) -> None:
        """Call `call` as soon as no copy reads the lease's blocks: now, or when the running copy has ended."""

    def give_back(self) -> None:
        """Give back the room of all copies. Called once, when peers can no longer read them."""


@dataclass(slots=True, kw_only=True, eq=False)
class HeldBlocks:
    """The blocks, seal and copies that one lease holds, and how many of its tokens readers can read."""

    lease_id: str
    tables: tuple[BlockIds, ...]
    """Ids of the blocks in the lease, one table for each group."""
    entries: BlockIds
    """Positions of the lease's blocks in the block ledger, which numbers the blocks of all groups in one sequence."""
    seal_index: int
    copies: LeaseCopies | None
    """Copies of the blocks, which peers read; None if peers read the cache itself."""
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
    closed: bool = False
    failed: bool = False
    """True once the seal says FAILED: the prompt cannot be computed."""
    history: History | None = None
    """Record of how many tokens were computed at which time; None if all were computed when the lease was opened."""
    on_error: OnError | None = None
    """Callback that fails the lease. It is called with the error if peers can never read the missing tokens."""
    on_readable: Callable[[], None] | None = None
    """Callback, called whenever peers can read more tokens than before."""

    def fail(self, error: BaseException) -> None:
        assert self.on_error is not None, "it was opened"
        self.on_error(error)

    @property
    def readable(self) -> tuple[BlockIds, ...]:
        """Ids of the blocks that peers read, by group."""
        return self.tables if self.copies is None else self.copies.tables

    @property
    def announced(self) -> int:
        """Number of tokens in the last `Lease.advance`, even if the device event of that call has not happened yet."""
        return self.advances[-1].tokens if self.advances else self.computed

    @property
    def missing(self) -> int:
        """Number of tokens of the lease that peers cannot read yet."""
        return self.num_tokens - (self.computed if self.copies is None else self.copies.copied)


class OfferedBlocks:
    """Takes blocks, seals and room for copies of one rank for its leases, and frees them."""

    def __init__(
        self,
        context: RankContext,
        ledger: BlockLedger,
        seals: SealTable,
        copy_thread: CopyThread,
        new_copies: Callable[[], LeaseCopies] | None,
        expect_notifications: Callable[[], None],
    ) -> None:
        """`new_copies`: function that returns the copies of one lease's blocks; None if peers read the cache itself.

        `expect_notifications`: `Transport.expect_notifications`, called when readers can read all tokens of a lease.
        """
        self._groups = context.local.groups
        self._ledger = ledger
        self._seals = seals
        self._copy_thread = copy_thread
        self._new_copies = new_copies
        self._expect_notifications = expect_notifications

    def needs_more_blocks(self, block_ids: object, num_tokens: int, what: str) -> bool:
        """Return True if `block_ids` have fewer blocks than `num_tokens` tokens fill, so that more blocks must follow.

        Groups with a sliding window or recurrent state do not count. RequestError, beginning with `what`, for an
        invalid block id.
        """
        tables, _ = self._ledger.find_entries(block_ids, f"{what}: block_ids")
        groups = zip(self._groups, tables, strict=True)
        # Full blocks only: an engine may leave out a partly filled last block.
        return any(group.whole and len(ids) < num_tokens // group.block_size for group, ids in groups)

    def take(self, request_id: str, block_ids: object, num_tokens: int, lease_id: str, *, extends: bool) -> HeldBlocks:
        """Take and return what a lease needs: `block_ids`, a seal and, if peers read copies, room for these.

        `extends`: the caller will add blocks with `extend`. If this raises, for example Overloaded because there are no
        more seals, nothing has been taken.
        """
        what = f"request {request_id!r}"
        tables, entries = self._ledger.find_entries(block_ids, f"{what}: block_ids")
        counts, offered_tokens = tuple(map(len, tables)), num_tokens
        copies = self._new_copies() if self._new_copies is not None and (extends or len(entries) > 0) else None
        if extends:
            given, counts = counts, tuple(group.blocks_needed(num_tokens) for group in self._groups)
            self._ledger.check_enough_blocks(counts, f"{what}: num_tokens {num_tokens}")
            if copies is not None:
                copies.check_fits(counts, f"{what}: num_tokens {num_tokens}")
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
            if copies is not None:
                copies.extend(request_id, tables, undo)
            undo.pop_all()
        return HeldBlocks(
            lease_id=lease_id,
            tables=tables,
            entries=entries,
            seal_index=seal_index,
            copies=copies,
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
        """Add the blocks in `block_ids` to an open lease and, if peers read copies, take room for a copy of each.

        If this raises, nothing has changed.
        """
        what = f"request {request_id!r}: extend()"
        more, _ = self._ledger.find_entries(block_ids, f"{what}: block_ids")
        tables = tuple(np.concatenate(both) for both in zip(held.tables, more, strict=True))
        self._check_room(tuple(map(len, tables)), held.counts, held.num_tokens, what)
        _, entries = self._ledger.find_entries(tables[0] if len(tables) == 1 else tables, f"{what}: block_ids")
        added = np.setdiff1d(entries, held.entries)  # several blocks of a split group share an entry
        with ExitStack() as undo:
            self._ledger.lease(added)
            undo.callback(self._ledger.release, added)
            if held.copies is not None:
                held.copies.extend(request_id, more, undo)
            undo.pop_all()
        held.tables, held.entries, held.extends = tables, entries, _lacks_blocks(tables, held.counts)

    def check_tensors(self) -> None:
        """Raise LayoutError if a tensor of the cache has moved since the cache was registered."""
        self._ledger.check_tensors()

    def tokens_with_blocks(self, held: HeldBlocks) -> int:
        """Return for how many of the prompt's first tokens the lease has blocks now, in every group."""
        if not held.extends:
            return held.num_tokens
        return tokens_held(self._groups, tuple(map(len, held.tables)), held.counts, held.num_tokens)

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
        # Only now: a window or a state belongs to the last token that the blocks of all other groups hold.
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

        If readers read copies, also start to copy computed tokens. Call this after each change of `held.computed` or of
        the lease's blocks.
        """
        if held.history is not None:
            held.history.note(held.computed)
        if not held.closed:  # else the slot may hold another lease's seal by now
            # The seal before the answers: a reader that is told of tokens reads the seal first (decision 0020).
            missing = held.missing
            self._seals.seal(held.seal_index, held.lease_id, missing)
            if not missing:  # before that a reader's notification says at most that it gives up
                self._expect_notifications()
            if held.on_readable is not None:
                held.on_readable()
            if held.copies is not None:
                held.copies.copy_computed(held, self.grow)

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
        # In order: the event of another stream may happen before an earlier one, whose tokens are not computed yet.
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
        """Free the blocks of a lease as soon as no copy reads them, then call `on_free`.

        Call this once no read of these blocks can succeed: `limits.seal_hold_s` after `close` or, if
        `LeaseEntry.holds_blocks` is False, immediately after `close`.
        """
        if held.failed:  # a reader that comes late still finds FAILED, until another lease needs the slot
            self._seals.retire_slot(held.seal_index)
        if held.copies is None:
            self._free(held, on_free)
        else:
            held.copies.after_copy(partial(self._free, held, on_free))

    def _free(self, held: HeldBlocks, on_free: Callable[[], None]) -> None:
        """Free the blocks and copies of a lease, then call `on_free`. The producer may now reuse the blocks."""
        self._ledger.release(held.entries)
        if held.copies is not None:
            held.copies.give_back()
        on_free()


def _lacks_blocks(tables: Sequence[BlockIds], counts: Sequence[int]) -> bool:
    return any(len(ids) < count for ids, count in zip(tables, counts, strict=True))
