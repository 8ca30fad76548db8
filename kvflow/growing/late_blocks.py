"""Local blocks that a load gets while it runs (`LoadRequest.extends`, `Load.extend`).

So an engine takes blocks from its pool as the prompt's tokens are computed, not before. Once the offer is known, the
load's block tables have their final length. Until its id is given, a block stands there, and in the load's chunks, as a
negative number: -1 for the first block of its group's table, -2 for the second, and so on. Nothing is read into such a
block: the load reads only the tokens before `usable_tokens`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvflow import checks
from kvflow.checks import counted, error_text
from kvflow.core.cache.groups import GroupFacts, tokens_held
from kvflow.core.policy.events import Watch, checked_event, has_happened
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import LoadError, RequestError, TransferFailed
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.optional import PendingTickets
from kvflow.runtime.part import PartHost
from kvflow.runtime.peers.peer import Source


@dataclass(slots=True, eq=False)
class _Extension:
    """One call of `extend`. `counts`: number of given blocks, by group, after the call.

    `watch` reports the device event after which the blocks may be written. `done` is True once that event has happened.
    """

    counts: tuple[int, ...]
    watch: Watch | None
    done: bool


class LateBlocks:
    """The local blocks of one load, given by and by. The offer decides how many there are in the end."""

    def __init__(self, host: PartHost, pending_tickets: PendingTickets, load: Load) -> None:
        """Begin with the blocks of the load's request, perhaps none.

        RequestError if the load may read from several producers, from one that runs no kvflow, or if the request has
        more blocks than the offer needs, as far as the offer is known.
        """
        self._groups = host.context.local.groups
        self._ledger = host.resources.ledger
        self._copy_thread = host.resources.copy_thread
        self._block_ids_max = host.context.config.limits.block_ids_max
        self._steps = host.steps
        self._pending_tickets = pending_tickets
        self._load = load
        self._what = f"request {load.request_id!r}"
        self._known = tuple(map(len, load.tables))
        """Number of given blocks, by group."""
        self._usable = self._known
        """Number of given blocks, by group, that may be written: their device events have happened."""
        self._counts: tuple[int, ...] | None = None
        """Number of blocks that the load needs, by group; None before the offer is known."""
        self._extensions: deque[_Extension] = deque()
        """Calls of `extend` with blocks that are not usable yet, oldest first."""
        self._sources: Sequence[Source] = ()
        self.problem: LoadError | None = None
        """Error with which the load must fail, because the device event of a call of `extend` has failed."""
        if not load.ticket.awaited:
            if not load.ticket.leases_can_be_asked:
                stock = f"engine {load.ticket.engine_id!r} does not run kvflow: its lease does not wait for blocks"
                raise RequestError(f"{self._what}: extends: {stock}")
            self.settle(load.ticket)

    async def perform(self, load: Load) -> LoadReport:
        """Perform the load, and return its report. RequestError if the load has no handle with a method `extend`."""
        if not load.has_handle:
            raise RequestError(f"{self._what}: extends: load_blocks returns no handle to extend: use start_load")
        if load.ticket.awaited:
            return await self._pending_tickets.perform(load)
        return await self._steps.perform(load)

    @property
    def usable_tokens(self) -> int:
        """Number of the prompt's first tokens for which every group has blocks that may be written."""
        if self._usable == self._counts:
            return self._load.ticket.num_tokens
        if self._counts is None:
            return 0
        return tokens_held(self._groups, self._usable, self._counts, self._load.ticket.offered_tokens)

    @property
    def lacking(self) -> bool:
        """True while tokens are computed for which the load has no block yet."""
        return not self._load.done and self.usable_tokens < self._load.computed_tokens

    @property
    def lacking_text(self) -> str:
        """What the load waits for, as text for errors."""
        tokens, offered = self.usable_tokens, counted(self._load.ticket.num_tokens, "token")
        return f"it has local blocks for {tokens} of {offered}, {self._load.computed_tokens} are computed (Load.extend)"

    def settle(self, ticket: Ticket) -> None:
        """Record the offer of `ticket`, which decides how many blocks the load needs.

        RequestError if the load has more blocks already. No effect if the offer has no blocks.
        """
        if not ticket.offered_tokens:
            return
        cached, tokens = self._load.request.cached_tokens, ticket.offered_tokens
        counts = tuple(_blocks_needed(group, tokens, cached) for group in self._groups)
        self._check_room(self._known, counts, tokens)
        self._counts = counts
        self._load.tables = tuple(
            np.concatenate((ids, -1 - np.arange(len(ids), count)))
            for ids, count in zip(self._load.tables, counts, strict=True)
        )

    def begin_read(self, sources: Sequence[Source]) -> None:
        """Record the ranks that are read: `extend` also writes the ids of new blocks to their chunks."""
        self._sources = sources
        self._fill_chunks()

    def note_computed(self, tokens: int) -> None:
        """Record that readers may read the first `tokens` tokens, and wake the callers of `Load.computed`."""
        if tokens > self._load.computed_tokens:
            self._load.note_computed(tokens)

    def extend(self, block_ids: object, after: object) -> None:
        """Add the next blocks of the prompt, into which nothing lands before the device event `after` has happened.

        No effect if the load has ended, or is about to. If this raises, for example RequestError or BlocksBusy, nothing
        has changed.
        """
        load, what = self._load, f"{self._what}: extend()"
        checks.count_block_ids(block_ids, self._block_ids_max, f"{what}: block_ids")
        event = checked_event(after, f"{what}: after")
        awaited = None if event is None or has_happened(event, f"{what}: after") else event
        flight = load.flight
        if load.done or (flight is not None and not flight.takes_blocks):
            return
        more, _ = self._ledger.find_entries(block_ids, f"{what}: block_ids")
        tables = tuple(
            np.concatenate((ids[:count], added))
            for ids, count, added in zip(load.tables, self._known, more, strict=True)
        )
        known = tuple(map(len, tables))
        if sum(known) > self._block_ids_max:
            most = f"at most {self._block_ids_max} (limits.block_ids_max)"
            raise RequestError(f"{what}: {counted(sum(known), 'block id')} in all, {most}")
        if self._counts is not None:
            self._check_room(known, self._counts, load.ticket.offered_tokens)
        _, entries = self._ledger.find_entries(tables[0] if len(tables) == 1 else tables, f"{what}: block_ids")
        if flight is not None:
            flight.add_blocks(np.setdiff1d(entries, load.entries))  # several blocks of a split group share an entry
        load.entries = entries
        if self._counts is None:
            load.tables = tables
        else:
            for table, ids in zip(load.tables, tables, strict=True):  # in place: others refer to the tables
                table[: len(ids)] = ids
        self._known = known
        self._fill_chunks()
        extension = _Extension(known, None, awaited is None)
        self._extensions.append(extension)
        if awaited is not None:
            extension.watch = self._copy_thread.watch(awaited, partial(self._on_event, extension))
        self._use_extensions()

    def close(self) -> None:
        """Stop watching device events, at the end of the load."""
        for extension in self._extensions:
            if extension.watch is not None:
                extension.watch.dropped = True

    def _on_event(self, extension: _Extension, error: BaseException | None) -> None:
        """Callback of the copy thread: the device event of an extension has happened, or failed with `error`."""
        extension.done = error is None
        if error is not None and self.problem is None:
            self.problem = self._load.failure(TransferFailed, f"its event `after` failed: {error_text(error)}")
            self.problem.__cause__ = error
        self._use_extensions()

    def _use_extensions(self) -> None:
        """Make the blocks of all calls usable for which, and for all earlier ones, the device events have happened."""
        while self._extensions and self._extensions[0].done:
            self._usable = self._extensions.popleft().counts
        if self._load.flight is not None:
            self._load.flight.nudge()

    def _fill_chunks(self) -> None:
        """Write the ids of the given blocks to the chunks of the ranks that are read."""
        for source in self._sources:
            for block_map, chunks in source.chunks.items():
                table = self._load.tables[block_map.local_group]
                for some in chunks:
                    missing = some.local_ids < 0
                    some.local_ids[missing] = table[-1 - some.local_ids[missing]]

    def _check_room(self, given: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        """Raise RequestError if the load has more blocks of a group than `tokens` tokens need.

        `given`, `counts`: number of blocks that it has, and that it needs, by group.
        """
        for group, have, count in zip(self._groups, given, counts, strict=True):
            if have > count:
                of_group = f" of group {group.name!r}" if len(self._groups) > 1 else ""
                cached = self._load.request.cached_tokens
                needs = f"{count} of {group.block_size} for {counted(tokens, 'token')} (cached_tokens {cached})"
                raise RequestError(
                    f"{self._what}: {counted(have, 'local block')}{of_group} in all, expected at most {needs}"
                )


def _blocks_needed(group: GroupFacts, tokens: int, cached_tokens: int) -> int:
    """Return how many local blocks of `group` hold the tokens of an offer that are needed and not cached."""
    if cached_tokens >= tokens:
        return 0
    return -(-tokens // group.block_size) - max(group.first_needed(tokens), cached_tokens) // group.block_size
