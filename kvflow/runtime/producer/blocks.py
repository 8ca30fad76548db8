"""What a lease takes of its rank: blocks, a seal, and with host staging host blocks; all of it or nothing.

A lease may be open before all of it can be read: the prompt is still being computed, or, with host staging, is copied
to the host span by span. What is there grows from the prompt's first token on, in all groups alike, and the seal says
how many tokens are missing. Blocks that a copy reads are given back only after it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.policy.events import DeviceEvent, Watch
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.protocol.freshness import SealTable
from kvflow.errors import RequestError
from kvflow.runtime.memory.copy_thread import CopyThread, run_all
from kvflow.runtime.memory.host_buffers import CopyDirection, HostBuffers

OnError: TypeAlias = "Callable[[BaseException], None]"


@dataclass(slots=True, eq=False)
class _Advance:
    """So many tokens are computed once an event has happened, and all that was told before it."""

    tokens: int
    watch: Watch | None
    done: bool


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
    num_tokens: int
    offered_tokens: int
    """How many of them the blocks hold: of all, or of full blocks only."""
    advances: deque[_Advance] = field(default_factory=deque)
    """Those that are still to come, in order."""
    computed: int = 0
    """In tokens."""
    staged: int = 0
    """How many tokens are in host blocks."""
    copying: bool = False
    closed: bool = False
    on_error: OnError | None = None
    """Told why what is missing will never be there."""
    on_free: Callable[[], None] | None = None
    """Set once they are to be given back."""

    def fail(self, error: BaseException) -> None:
        assert self.on_error is not None, "it was opened"
        self.on_error(error)

    @property
    def told(self) -> int:
        """How many tokens are computed, or will be when events have happened."""
        return self.advances[-1].tokens if self.advances else self.computed

    @property
    def missing(self) -> int:
        """How many tokens cannot be read yet."""
        return self.num_tokens - (self.computed if self.host_tables is None else self.staged)


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
        self._stage_unit = math.lcm(*(group.block_size for group in groups))
        """Tokens that are whole blocks of every group."""
        self._stage_step = self._stage_unit * max(copy_bytes_max // max(self._unit_bytes(), 1), 1)
        """Tokens that are copied at once."""

    def take(self, block_ids: object, num_tokens: int, what: str, lease_id: str) -> HeldBlocks:
        """Take what a lease needs. Raises RequestError, and changes nothing then."""
        tables, entries = self._ledger.find(block_ids, f"{what}: block_ids")
        offered_tokens = self._check_counts(tuple(map(len, tables)), num_tokens, what)
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
            lease_id=lease_id,
            tables=tables,
            entries=entries,
            seal_index=seal_index,
            host_tables=host_tables,
            num_tokens=num_tokens,
            offered_tokens=offered_tokens,
        )

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
                why = f"a state is of one slot and of all {num_tokens} tokens; blocks of other groups hold {tokens}"
                raise RequestError(f"{what}: {count} block ids{self._of(group)}: {why}")
            if count < needed:
                why = f"{needed} hold what {tokens} tokens need ({group.kind}, window {group.window})"
                raise RequestError(f"{what}: {count} block ids{self._of(group)}, but {why}")
        return tokens

    def _check_filled(self, group: GroupFacts, count: int, tokens: int, what: str) -> None:
        size, filled = group.block_size, -(-tokens // group.block_size)
        if count > filled:
            given = f"{count} block ids{self._of(group)}"
            raise RequestError(f"{what}: {given}, but {tokens} tokens fill {filled} blocks of {size}")

    def _of(self, group: GroupFacts) -> str:
        return f" of group {group.name!r}" if len(self._groups) > 1 else ""

    def open(self, held: HeldBlocks, on_error: OnError) -> None:
        """Set the seal, so that readers find the lease; what is computed by now may be read."""
        held.on_error = on_error
        self.grow(held)

    def advance(self, held: HeldBlocks, tokens: int, ready: DeviceEvent | None) -> None:
        """So many tokens are computed once `ready` has happened, or are now."""
        if ready is None and not held.advances:
            held.computed = tokens
            return
        advance = _Advance(tokens, None, ready is None)
        held.advances.append(advance)
        if ready is not None:
            advance.watch = self._copy_thread.watch(ready, partial(self._happened, held, advance))

    def grow(self, held: HeldBlocks) -> None:
        """Let readers know of what is computed by now."""
        if not held.closed:
            self._seal(held)
            self._stage_next(held)

    def _happened(self, held: HeldBlocks, advance: _Advance, error: BaseException | None) -> None:
        """An event has, or nobody will ever know: then the lease is over."""
        if held.closed:
            return
        if error is not None:
            held.fail(error)
            return
        advance.done = True
        while held.advances and held.advances[0].done:
            held.computed = held.advances.popleft().tokens
        self.grow(held)

    def close(self, held: HeldBlocks) -> None:
        """Wipe the seal: no read that looks at it from now on succeeds."""
        held.closed = True
        for advance in held.advances:
            if advance.watch is not None:
                advance.watch.dropped = True
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

    def _stage_next(self, held: HeldBlocks) -> None:
        """Copy the next computed tokens of all groups to the host, unless that is under way."""
        if held.host_tables is None or held.copying:
            return
        upto = self._stage_upto(held)
        if upto <= held.staged:
            return
        copies = []
        for group, ids, host_ids, buffers in zip(
            self._groups, held.tables, held.host_tables, self._staging, strict=True
        ):
            some = _blocks_of(group, len(ids), held.offered_tokens, range(held.staged, upto))
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
        """The tokens that are there after the next copy: whole blocks of all groups, until all are computed."""
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
        """The producer may reuse the blocks (invariant I3)."""
        self._ledger.release(held.entries)
        for host_ids, buffers in zip(held.host_tables or (), self._staging, strict=False):
            buffers.pool.give_back(host_ids)
        on_free()


def _blocks_of(group: GroupFacts, count: int, num_tokens: int, tokens: range) -> slice:
    """Which of a group's blocks hold some of these tokens; what is offered of it ends with token `num_tokens`."""
    first = 0 if group.whole else max(-(-num_tokens // group.block_size) - count, 0)
    begin, end = (min(max(-(-edge // group.block_size) - first, 0), count) for edge in (tokens.start, tokens.stop))
    return slice(begin, end)
