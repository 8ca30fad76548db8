"""The blocks of a lease: blocks, a seal and, with host staging, host blocks, taken all together or not at all.

A lease may be open before all of it can be read: its prompt is still being computed or, with host staging, is copied
to the host span by span. Its readable tokens grow from the prompt's first one on, in all groups alike, and its seal
says how many are missing. Blocks that a copy reads are given back only after the copy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvflow.checks import counted
from kvflow.core.cache.groups import GroupFacts, GroupKind, tokens_held
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.policy.events import DeviceEvent, Watch
from kvflow.core.policy.history import History
from kvflow.core.protocol.proof import FAILED
from kvflow.errors import HostBlocksBusy, RequestError
from kvflow.runtime.copy_thread import run_all
from kvflow.runtime.memory import CopyDirection

if TYPE_CHECKING:
    from kvflow.runtime.assembly import RegisteredCache

OnError: TypeAlias = "Callable[[BaseException], None]"


@dataclass(slots=True, eq=False)
class _Advance:
    """Tokens that are computed once an event has happened, and all advances before it."""

    tokens: int
    watch: Watch | None
    done: bool


@dataclass(slots=True, kw_only=True, eq=False)
class HeldBlocks:
    """Blocks, seal and host blocks of one lease."""

    lease_id: str
    tables: tuple[BlockIds, ...]
    """Blocks by group."""
    entries: BlockIds
    """Blocks as the ledger counts them."""
    seal_index: int
    host_tables: tuple[BlockIds, ...] | None
    """Host blocks that peers read, with host staging."""
    taken_on_host: list[tuple[BlockIds, ...]] = field(default_factory=list)
    """Host blocks by the extension that took them, as they are given back."""
    num_tokens: int
    offered_tokens: int
    """Tokens that the blocks hold in the end: all, or those of full blocks only."""
    counts: tuple[int, ...]
    """Blocks in the end, by group."""
    extends: bool
    """True while more blocks are to follow."""
    advances: deque[_Advance] = field(default_factory=deque)
    """Advances still to come, in order."""
    computed: int = 0
    """Tokens that are computed."""
    staged: int = 0
    """Tokens that are in host blocks."""
    copying: bool = False
    closed: bool = False
    failed: bool = False
    """True once the seal says that the prompt has failed."""
    history: History | None = None
    """Computed tokens by time, of a lease that grows."""
    on_error: OnError | None = None
    """Callback told why the missing tokens will never be there."""
    on_there: Callable[[], None] | None = None
    """Callback told when more tokens can be read."""
    on_free: Callable[[], None] | None = None
    """Callback told when they are free; set once they are to be given back."""

    def fail(self, error: BaseException) -> None:
        assert self.on_error is not None, "it was opened"
        self.on_error(error)

    @property
    def readable(self) -> tuple[BlockIds, ...]:
        """The blocks that peers read, by group: its own, or the host blocks that stand for them."""
        return self.tables if self.host_tables is None else self.host_tables

    @property
    def told(self) -> int:
        """Tokens computed by now, or once events have happened."""
        return self.advances[-1].tokens if self.advances else self.computed

    @property
    def missing(self) -> int:
        """Tokens that cannot be read yet."""
        return self.num_tokens - (self.computed if self.host_tables is None else self.staged)


class OfferedBlocks:
    """The blocks of one rank, as its leases take them and give them back."""

    def __init__(self, cache: RegisteredCache) -> None:
        self._groups = cache.local.groups
        self._ledger = cache.ledger
        self._seals = cache.seals
        self._staging = cache.memory.staging
        """Host blocks of each group; none if peers read the cache itself."""
        self._copy_thread = cache.resources.copy_thread
        self._stage_unit = math.lcm(*(group.block_size for group in self._groups))
        """Tokens that are whole blocks of every group."""
        self._stage_step = self._stage_unit * max(cache.config.limits.slice_bytes_max // max(self._unit_bytes(), 1), 1)
        """Tokens that are copied at once."""

    def extends(self, block_ids: object, num_tokens: int, what: str) -> bool:
        """Return True if `block_ids` do not cover all full blocks of `num_tokens`. RequestError if they cannot be."""
        tables, _ = self._ledger.find(block_ids, f"{what}: block_ids")
        groups = zip(self._groups, tables, strict=True)
        return any(group.whole and len(ids) < num_tokens // group.block_size for group, ids in groups)

    def take(self, block_ids: object, num_tokens: int, what: str, lease_id: str, *, extends: bool) -> HeldBlocks:
        """Take what a lease needs; with `extends` more blocks follow. Raises RequestError, and changes nothing then."""
        tables, entries = self._ledger.find(block_ids, f"{what}: block_ids")
        counts, offered_tokens = tuple(map(len, tables)), num_tokens
        if extends:
            given, counts = counts, tuple(group.blocks_needed(num_tokens) for group in self._groups)
            self._check_fits(counts, num_tokens, what)
            self._check_room(given, counts, num_tokens, what)
        else:
            offered_tokens = self._check_counts(counts, num_tokens, what)
        with ExitStack() as undo:
            seal_index = self._seals.take()
            if seal_index is None:
                raise RequestError(
                    f"{what}: no more than {counted(self._seals.count, 'lease')} may be open (limits.leases_max)"
                )
            undo.callback(self._seals.give_back, seal_index)
            self._ledger.lease(entries)
            undo.callback(self._ledger.release, entries)
            staged = len(self._staging) > 0 and (extends or len(entries) > 0)
            host_tables = self._take_host_blocks(what, tables, undo) if staged else None
            undo.pop_all()
        return HeldBlocks(
            lease_id=lease_id,
            tables=tables,
            entries=entries,
            seal_index=seal_index,
            host_tables=host_tables,
            taken_on_host=[] if host_tables is None else [host_tables],
            num_tokens=num_tokens,
            offered_tokens=offered_tokens,
            counts=counts,
            extends=extends and _few(tables, counts),
        )

    def give_up(self, held: HeldBlocks) -> None:
        """Give back what was taken for a lease that was never opened."""
        self._seals.give_back(held.seal_index)
        self._free(held, lambda: None)

    def extend(self, held: HeldBlocks, block_ids: object, what: str) -> None:
        """Take more blocks for a lease. Raises RequestError, and changes nothing then."""
        more, _ = self._ledger.find(block_ids, f"{what}: block_ids")
        tables = tuple(np.concatenate(both) for both in zip(held.tables, more, strict=True))
        self._check_room(tuple(map(len, tables)), held.counts, held.num_tokens, what)
        _, entries = self._ledger.find(tables[0] if len(tables) == 1 else tables, f"{what}: block_ids")
        added = np.setdiff1d(entries, held.entries)
        with ExitStack() as undo:
            self._ledger.lease(added)
            undo.callback(self._ledger.release, added)
            if held.host_tables is not None:
                host = self._take_host_blocks(what, more, undo)
                held.taken_on_host.append(host)
                held.host_tables = tuple(np.concatenate(both) for both in zip(held.host_tables, host, strict=True))
            undo.pop_all()
        held.tables, held.entries, held.extends = tables, entries, _few(tables, held.counts)

    def holds(self, held: HeldBlocks) -> int:
        """Tokens of the prompt that the lease's blocks have room for, in all groups."""
        return tokens_held(self._groups, tuple(map(len, held.tables)), held.counts, held.num_tokens)

    def _check_fits(self, counts: tuple[int, ...], tokens: int, what: str) -> None:
        """RequestError if there are fewer blocks than that: nobody could ever extend the lease to its end."""
        self._ledger.check_there(counts, f"{what}: num_tokens {tokens}")
        for group, count, buffers in zip(self._groups, counts, self._staging, strict=False):
            if count > buffers.pool.size:
                needs = f"{counted(count, 'host block')}{self._of(group)}"
                there_are = f"there are {buffers.pool.size} (host_buffer_bytes_max)"
                raise RequestError(f"{what}: num_tokens {tokens} needs {needs}, {there_are}")

    def _check_room(self, counts: tuple[int, ...], most: tuple[int, ...], tokens: int, what: str) -> None:
        """RequestError if these are more blocks than a lease that is extended has in the end."""
        for group, count, needed in zip(self._groups, counts, most, strict=True):
            if count > needed:
                given = f"{counted(count, 'block id')}{self._of(group)}"
                needs = f"{needed} of {group.block_size} for {counted(tokens, 'token')}"
                raise RequestError(f"{what}: {given} in all, expected at most {needs}")

    def _check_counts(self, counts: tuple[int, ...], num_tokens: int, what: str) -> int:
        """RequestError unless so many blocks of each group can hold so many tokens of a prompt, and its windows.

        How many of them they do hold.
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
                why = f"a state is of one slot and of the whole prompt, {counted(num_tokens, 'token')}; "
                why += f"blocks of other groups hold {tokens}"
                raise RequestError(f"{what}: {counted(count, 'block id')}{self._of(group)}: {why}")
            if count < needed:
                why = f"expected {needed} for {counted(tokens, 'token')} ({group.kind}, window {group.window})"
                raise RequestError(f"{what}: {counted(count, 'block id')}{self._of(group)}, {why}")
        return tokens

    def _check_filled(self, group: GroupFacts, count: int, tokens: int, what: str) -> None:
        size, filled = group.block_size, -(-tokens // group.block_size)
        if count > filled:
            given = f"{counted(count, 'block id')}{self._of(group)}"
            needs = f"{counted(filled, 'block')} of {size} for {counted(tokens, 'token')}"
            raise RequestError(f"{what}: {given}, expected at most {needs}")

    def _of(self, group: GroupFacts) -> str:
        return f" of group {group.name!r}" if len(self._groups) > 1 else ""

    def advance(self, held: HeldBlocks, tokens: int, ready: DeviceEvent | None) -> None:
        """Advance to so many tokens, computed once `ready` has happened, or now."""
        if ready is None and not held.advances:
            held.computed = tokens
            return
        advance = _Advance(tokens, None, ready is None)
        held.advances.append(advance)
        if ready is not None:
            advance.watch = self._copy_thread.watch(ready, partial(self._happened, held, advance))

    def grow(self, held: HeldBlocks) -> None:
        """Set the seal: from now on readers find the lease, and may read what is computed by now."""
        if held.history is not None:
            held.history.note(held.computed)
        if not held.closed:
            self._seals.seal(held.seal_index, held.lease_id, held.missing)
            if held.on_there is not None:
                held.on_there()
            if held.host_tables is not None:
                self._stage_next(held, held.host_tables)

    def _happened(self, held: HeldBlocks, advance: _Advance, error: BaseException | None) -> None:
        """Note that an event has happened. If that will never be known the lease fails."""
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
        """Wipe the seal, or have it say that the prompt has failed: no read that looks at it from now on succeeds."""
        held.closed = True
        for advance in held.advances:
            if advance.watch is not None:
                advance.watch.dropped = True
        held.failed = failed
        if failed:
            self._seals.seal(held.seal_index, held.lease_id, FAILED)
        else:
            self._seals.give_back(held.seal_index)

    def give_back(self, held: HeldBlocks, on_free: Callable[[], None]) -> None:
        """Free the blocks, which no read can take for good any more, once no copy reads them; then call `on_free`."""
        if held.failed:
            self._seals.retire(held.seal_index)
        held.on_free = on_free
        if not held.copying:
            self._free(held, on_free)

    def _take_host_blocks(self, what: str, tables: Sequence[BlockIds], undo: ExitStack) -> tuple[BlockIds, ...]:
        """Host blocks for a lease; HostBlocksBusy if there are not enough now."""
        found = []
        for ids, buffers in zip(tables, self._staging, strict=True):
            host_ids = buffers.pool.take_nowait(len(ids)) if len(ids) else ids
            if host_ids is None:
                free, size = buffers.pool.size - buffers.pool.used, buffers.pool.size
                room = f"{free} of {size} are free (host_buffer_bytes_max)"
                raise HostBlocksBusy(f"{what}: needed: {counted(len(ids), 'host block')}, {room}")
            if len(ids):
                undo.callback(buffers.pool.give_back, host_ids)
            found.append(host_ids)
        return tuple(found)

    def _stage_next(self, held: HeldBlocks, host_tables: tuple[BlockIds, ...]) -> None:
        """Copy the next computed tokens of all groups to the host, unless that is under way."""
        if held.copying:
            return
        upto = self._stage_upto(held)
        if upto <= held.staged:
            return
        copies = []
        for group, count, ids, host_ids, buffers in zip(
            self._groups, held.counts, held.tables, host_tables, self._staging, strict=True
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
        """Tokens that are on the host after the next copy: whole blocks of all groups, until all are computed."""
        upto = held.staged + self._stage_step
        if upto >= held.num_tokens <= held.computed:
            return held.num_tokens
        return min(upto, held.computed) // self._stage_unit * self._stage_unit

    def _unit_bytes(self) -> int:
        """Host memory that a unit of staging takes, without state, which comes with the last token."""
        size_bytes = 0
        for group, buffers in zip(self._groups, self._staging, strict=False):
            if group.kind is not GroupKind.STATE:
                size_bytes += buffers.block_size_bytes * (self._stage_unit // group.block_size)
        return size_bytes

    def _free(self, held: HeldBlocks, on_free: Callable[[], None]) -> None:
        """Free the blocks: the producer may reuse them (invariant I3)."""
        self._ledger.release(held.entries)
        for taken in held.taken_on_host:
            for host_ids, buffers in zip(taken, self._staging, strict=True):
                if len(host_ids):
                    buffers.pool.give_back(host_ids)
        on_free()


def _few(tables: Sequence[BlockIds], counts: Sequence[int]) -> bool:
    """True if more blocks are to come, in some group."""
    return any(len(ids) < count for ids, count in zip(tables, counts, strict=True))


def _blocks_of(group: GroupFacts, count: int, num_tokens: int, tokens: range) -> slice:
    """Blocks of a group that hold some of these tokens; what is offered of it ends with token `num_tokens`."""
    first = 0 if group.whole else max(-(-num_tokens // group.block_size) - count, 0)
    begin, end = (min(max(-(-edge // group.block_size) - first, 0), count) for edge in (tokens.start, tokens.stop))
    return slice(begin, end)
