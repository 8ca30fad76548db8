"""Test tool that checks that the bytes of offered blocks do not change until the lease has ended and its hold is over.

The hold is the time after the end of a lease in which its blocks must not change, because earlier reads may still run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import starmap
from unittest import mock

import torch

from kvflow.checks import counted
from kvflow.core.policy.history import History, Moment
from kvflow.errors import UsageError
from kvflow.runtime.producer.blocks import HeldBlocks
from kvflow.runtime.producer.lease import Lease, ServeRequest
from kvflow.runtime.records import LeaseRecord, LoadRecord
from kvflow.runtime.runtime import Runtime
from kvflow.testing.caches import PatternCache, StateCache
from kvflow.testing.watch import checked_at_end, raise_first


class _NotifyingHistory(History):
    """The `History` of a growing lease, which calls `more(lease)` whenever more of the lease's tokens are computed."""

    def __init__(self, lease: Lease, known: History, more: Callable[[Lease], None]) -> None:
        self._lease, self._known, self._more = lease, known, more

    @property
    def moments(self) -> tuple[Moment, ...]:
        return self._known.moments

    def note(self, tokens: int) -> None:
        self._known.note(tokens)
        self._more(self._lease)


class _Slots:
    """Digests of the slots (one token each) of one lease in one group of layers, for the tokens computed so far."""

    def __init__(self, cache: PatternCache | StateCache, first_token: int) -> None:
        self.cache = cache
        self.size = cache.layout.block_size if isinstance(cache, PatternCache) else 1
        self._first = first_token
        self._upto = 0
        self._digests: torch.Tensor | None = None

    def tokens(self, blocks: range) -> torch.Tensor:
        """Return the prompt index of the token in each slot of `blocks`, with shape (block, slot).

        `blocks`: range of positions in the lease's block table, not block ids.
        """
        start, stop = (self._first + block * self.size for block in (blocks.start, blocks.stop))
        return torch.arange(start, stop).view(-1, self.size)

    def remember(self, block_ids: Sequence[int], tokens: int) -> None:
        """Store digests of the slots that were computed since the last call, up to token `tokens` of the prompt.

        `block_ids`: the lease's block ids in this group of layers.
        """
        old, upto = self._digests, self._upto
        blocks = range(max(upto - self._first, 0) // self.size, max(-(-(tokens - self._first) // self.size), 0))
        self._upto = max(tokens, upto)
        if not blocks:
            return
        now = self.cache.digests(block_ids[blocks.start : blocks.stop])
        if old is not None:
            partly = old[:, :, blocks.start :]  # at most one block, which was partly computed at the last call
            count = partly.shape[2]
            before = self.tokens(blocks)[:count] < upto
            now[:, :, :count] = torch.where(before, partly, now[:, :, :count])
            now = torch.cat([old[:, :, : blocks.start], now], dim=2)
        self._digests = now

    def changed(self, block_ids: Sequence[int]) -> tuple[int, str] | None:
        """Return the prompt index of the first overwritten token and the name of its slot; None if there is none.

        Replace the digests of changed slots, so that each change is reported once. `block_ids`: the lease's block ids
        in this group of layers.
        """
        if self._digests is None:
            return None
        count = self._digests.shape[2]
        now = self.cache.digests(block_ids[:count])
        wrong = (now != self._digests) & (self.tokens(range(count)) < self._upto)
        if not (places := wrong.nonzero().tolist()):
            return None
        self._digests = torch.where(wrong, now, self._digests)
        layer, part, index, slot = places[0]
        where = self.cache.name_of(layer, part, block_ids[index], slot)
        return self._first + index * self.size + slot, where


class OfferWatch:
    """Checks that offered blocks do not change while they are leased. `watch_offers` creates it."""

    def __init__(self, caches: Sequence[PatternCache | StateCache]) -> None:
        self._caches = caches
        self._found: list[str | Exception] = []
        self._offered: dict[Lease, list[_Slots]] = {}

    def assert_unchanged(self) -> None:
        """Assert that no offered block has changed so far. This may be called at any time.

        Raises:
            AssertionError: An offered block has changed.
        """
        for lease in self._offered:
            self._compare(lease, "while it was offered")
        raise_first(self._found)

    def offer(self, lease: Lease) -> None:
        """Watch the blocks of a new lease. `watch_offers` calls this.

        Args:
            lease: A lease of the watched runtime.

        Raises:
            UsageError: The number of the lease's groups of layers is not this watch's number of caches. Before raising,
                `offer` revokes the lease.
        """
        tables = lease.block_tables
        if len(tables) != len(self._caches):
            lease.revoke()
            watched = f"watched are the caches of {len(self._caches)}"
            given = f"offers of {counted(len(tables), 'group')} of layers"
            raise UsageError(f"request {lease.request_id!r}: {given}, {watched}")
        if not lease.done:
            held = _held(lease)
            self._offered[lease] = list(
                starmap(_Slots, zip(self._caches, _first_tokens(lease, self._caches), strict=True))
            )
            if held.history is not None:  # tokens of the lease are still to be computed
                held.history = _NotifyingHistory(lease, held.history, self._remember)
            self._remember(lease)

    def lease_ended(self, record: LeaseRecord) -> None:
        """Compare the blocks of all watched leases that have ended, and stop watching these leases.

        The runtime calls this at the end of each lease, before other code sees the end.

        Args:
            record: Record of the ended lease; a message about a changed block contains the lease's outcome.
        """
        for lease in [lease for lease in self._offered if lease.done]:
            try:
                self._compare(lease, f"before its lease was over ({record.outcome})")
            except Exception as error:  # noqa: BLE001 - kept, because the runtime would only log it
                self._found.append(error)
            del self._offered[lease]

    def load_ended(self, record: LoadRecord) -> None:
        """Do nothing, since a load changes no offered block.

        Args:
            record: Ignored.
        """

    def _remember(self, lease: Lease) -> None:
        held = _held(lease)
        for slots, block_ids in zip(self._offered.get(lease, ()), lease.block_tables, strict=False):
            slots.remember(block_ids, min(held.computed, held.offered_tokens))

    def _compare(self, lease: Lease, when: str) -> None:
        for slots, block_ids in zip(self._offered[lease], lease.block_tables, strict=True):
            if (changed := slots.changed(block_ids)) is not None:
                token, where = changed
                self._found.append(f"{where}: token {token} of request {lease.request_id!r} was overwritten {when}")


def _held(lease: Lease) -> HeldBlocks:
    held = lease._opened.held
    assert isinstance(held, HeldBlocks), "a runtime has opened it"
    return held


def _first_tokens(lease: Lease, caches: Sequence[PatternCache | StateCache]) -> Iterator[int]:
    """Yield, for each group of layers, the prompt index of the lease's first token.

    The index is 0, except for a group with a window, which offers only the last blocks of the prompt.
    """
    held, facts = _held(lease), lease.ticket.groups
    for group, cache in enumerate(caches):
        size = cache.layout.block_size if isinstance(cache, PatternCache) else 1
        windowed = bool(facts) and not facts[group].whole
        yield max(-(-held.offered_tokens // size) - held.counts[group], 0) * size if windowed else 0


@contextlib.contextmanager
def watch_offers(runtime: Runtime, cache: PatternCache | Sequence[PatternCache | StateCache]) -> Iterator[OfferWatch]:
    """Check that blocks offered by a runtime do not change until the runtime gives them back.

    A runtime gives blocks back some time after their lease has ended, because earlier reads may still run. The watch
    takes a digest of each slot (one token) once the token is computed: when `serve_blocks` returns, when
    `Lease.advance` covers the token, or, if a device event was given, when that event has happened. Digests are
    compared when the lease's blocks are given back, when the `with` block ends, and in `OfferWatch.assert_unchanged`.
    Slots without a computed token may change.

    Args:
        runtime: The producer's runtime. Its `serve_blocks` is replaced inside the `with` block. If a caller has saved
            the method `runtime.serve_blocks` before the block, leases from the saved method are not watched.
        cache: A `PatternCache` over the registered KV cache, with any content. For several groups of layers, a sequence
            in the order of the groups, with a `StateCache` for recurrent state.

    Returns:
        A context manager that yields the watch. Offers are watched until the `with` block ends.

    Raises:
        AssertionError: An offered block has changed. Raised at the end of the `with` block, in place of the block's own
            error.
    """
    watch = OfferWatch([cache] if isinstance(cache, PatternCache) else list(cache))
    serve = runtime.serve_blocks

    def serve_watched(request: ServeRequest) -> Lease:
        lease = serve(request)
        watch.offer(lease)
        return lease

    final = checked_at_end(watch.assert_unchanged)
    with runtime._supervisor.observers.adding(watch), mock.patch.object(runtime, "serve_blocks", serve_watched), final:
        yield watch
