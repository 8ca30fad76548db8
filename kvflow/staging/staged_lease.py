"""The host blocks of a lease: its blocks are copied there, since peers cannot read the cache.

The lease takes a host block for each of its blocks when it is opened or extended. Computed tokens are copied in prompt
order, one copy at a time, and the lease's seal says how many tokens are not copied yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from kvflow.checks import counted
from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.plan.descriptors import BlockIds
from kvflow.errors import HostBlocksBusy, RequestError
from kvflow.runtime.copy_thread import CopyThread, run_all
from kvflow.runtime.memory import CopyDirection, HostBlocks, Pool
from kvflow.runtime.producer.blocks import HeldBlocks


class StagedLease:
    """The host blocks of one lease, and the copies to them (`runtime.producer.blocks.LeaseCopies`)."""

    def __init__(
        self, groups: Sequence[GroupFacts], staging: Sequence[HostBlocks], bytes_max: int, copy_thread: CopyThread
    ) -> None:
        """Take nothing yet. `staging`: the host blocks of each of `groups`. `bytes_max`: about the bytes of a copy."""
        self._groups = groups
        self._staging = staging
        self._copy_thread = copy_thread
        self.tables: tuple[BlockIds, ...] = tuple(np.empty(0, dtype=np.int64) for _ in groups)
        self.copied = 0
        self._taken: list[tuple[Pool, BlockIds]] = []
        """The sets of host blocks that were taken together: a pool takes back only such sets."""
        self._copying = False
        self._on_copied: Callable[[], None] | None = None
        """Function to call when the running copy has ended."""
        self._unit = math.lcm(*(group.block_size for group in groups))
        """Least common multiple of the block sizes of all groups, in tokens."""
        # Recurrent state does not count: it is copied only together with the last token.
        unit_bytes = sum(
            blocks.block_size_bytes * (self._unit // group.block_size)
            for group, blocks in zip(groups, staging, strict=True)
            if group.kind is not GroupKind.STATE
        )
        self._step = self._unit * max(bytes_max // max(unit_bytes, 1), 1)
        """Maximum number of tokens in one copy."""

    def check_fits(self, counts: Sequence[int], what: str) -> None:
        """Raise RequestError, beginning with `what`, if a group has fewer host blocks than `counts` says."""
        for group, count, blocks in zip(self._groups, counts, self._staging, strict=True):
            if count > blocks.pool.size:
                of_group = f" of group {group.name!r}" if len(self._groups) > 1 else ""
                needs = f"{counted(count, 'host block')}{of_group}"
                raise RequestError(f"{what} needs {needs}, there are {blocks.pool.size} (host_buffer_bytes_max)")

    def extend(self, request_id: str, tables: Sequence[BlockIds], undo: ExitStack) -> None:
        """Take a host block for each block in `tables`, one table for each group, and add to `undo` what gives it back.

        HostBlocksBusy if too few host blocks are free. Then the caller calls `undo`, and nothing has changed.
        """
        more: list[BlockIds] = []
        for ids, blocks in zip(tables, self._staging, strict=True):
            pool = blocks.pool
            host_ids = pool.take_nowait(len(ids)) if len(ids) else ids
            if host_ids is None:
                room = f"{pool.size - pool.used} of {pool.size} are free (host_buffer_bytes_max)"
                what = f"request {request_id!r}: needed: {counted(len(ids), 'host block')}, {room}"
                raise HostBlocksBusy(what, request_id=request_id, peer="")
            if len(ids):
                undo.callback(pool.give_back, host_ids)
            more.append(host_ids)
        self._taken += [(blocks.pool, ids) for blocks, ids in zip(self._staging, more, strict=True) if len(ids)]
        self.tables = tuple(np.concatenate(both) for both in zip(self.tables, more, strict=True))

    def copy_computed(self, held: HeldBlocks, on_copied: Callable[[HeldBlocks], None]) -> None:
        """Start to copy the next computed tokens of all groups to host blocks, if any, unless a copy is running.

        If the copy fails, fail the lease; else call `on_copied(held)`, unless the lease has ended meanwhile.
        """
        upto = self._next_stop(held)
        if self._copying or upto <= self.copied:
            return
        copies = []
        for group, count, ids, host_ids, blocks in zip(
            self._groups, held.counts, held.tables, self.tables, self._staging, strict=True
        ):
            some = _blocks_of(group, count, held.offered_tokens, range(self.copied, upto))
            if len(ids[some]):
                copies.append(partial(blocks.copy, CopyDirection.TO_HOST, ids[some], host_ids[some]))

        def ended(error: BaseException | None) -> None:
            self._copying = False
            if error is not None:
                # This ends the lease and, if the lease has no hold, gives its blocks back before it returns: then
                # `after_copy` calls at once, and leaves nothing for the end of this copy.
                held.fail(error)
            elif not held.closed:
                self.copied = upto
                on_copied(held)
            if self._on_copied is not None:
                self._on_copied()

        self._copying = True
        self._copy_thread.submit(partial(run_all, copies), ended)

    def after_copy(self, call: Callable[[], None]) -> None:
        """Call `call` as soon as no copy reads the lease's blocks: now, or when the running copy has ended."""
        if self._copying:
            self._on_copied = call
        else:
            call()

    def give_back(self) -> None:
        """Give back all host blocks. Called once, when peers can no longer read them."""
        for pool, host_ids in self._taken:
            pool.give_back(host_ids)

    def _next_stop(self, held: HeldBlocks) -> int:
        """Return how many tokens, from the first of the prompt, will be in host blocks after the next copy.

        Copies end at block boundaries of all groups; the last copy ends with the last token.
        """
        upto = self.copied + self._step
        if upto >= held.num_tokens <= held.computed:
            return held.num_tokens
        return min(upto, held.computed) // self._unit * self._unit


def _blocks_of(group: GroupFacts, count: int, num_tokens: int, tokens: range) -> slice:
    """Return, as a Python slice, the part of a group's block table that holds the tokens at the positions `tokens`.

    `tokens` begins at a block boundary. The table has `count` blocks, and its last block holds the last of the
    `num_tokens` tokens. The table of a sliding-window group may lack the blocks of the prompt's first tokens.
    """
    first = 0 if group.whole else max(-(-num_tokens // group.block_size) - count, 0)
    begin, end = (min(max(-(-edge // group.block_size) - first, 0), count) for edge in (tokens.start, tokens.stop))
    return slice(begin, end)
