"""Watch of offered blocks: their bytes must not change before the lease has ended and its hold is over."""

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


class _Told(History):
    """History of a lease that tells when there is more of it."""

    def __init__(self, lease: Lease, known: History, more: Callable[[Lease], None]) -> None:
        self._lease, self._known, self._more = lease, known, more

    @property
    def moments(self) -> tuple[Moment, ...]:
        return self._known.moments

    def note(self, tokens: int) -> None:
        self._known.note(tokens)
        self._more(self._lease)


class _Slots:
    """The digests of one group's slots in a lease, as far as its tokens are computed."""

    def __init__(self, cache: PatternCache | StateCache, first_token: int) -> None:
        self.cache = cache
        self.size = cache.layout.block_size if isinstance(cache, PatternCache) else 1
        self._first = first_token
        self._upto = 0
        self._digests: torch.Tensor | None = None

    def tokens(self, blocks: range) -> torch.Tensor:
        """Tokens of the prompt that the slots of these blocks are for: (block, slot)."""
        start, stop = (self._first + block * self.size for block in (blocks.start, blocks.stop))
        return torch.arange(start, stop).view(-1, self.size)

    def remember(self, block_ids: Sequence[int], tokens: int) -> None:
        """Take the digests of tokens that are computed and were not before."""
        old, upto = self._digests, self._upto
        blocks = range(max(upto - self._first, 0) // self.size, max(-(-(tokens - self._first) // self.size), 0))
        self._upto = max(tokens, upto)
        if not blocks:
            return
        now = self.cache.digests(block_ids[blocks.start : blocks.stop])
        if old is not None:
            partly = old[:, :, blocks.start :]  # a block at most
            count = partly.shape[2]
            before = self.tokens(blocks)[:count] < upto
            now[:, :, :count] = torch.where(before, partly, now[:, :, :count])
            now = torch.cat([old[:, :, : blocks.start], now], dim=2)
        self._digests = now

    def changed(self, block_ids: Sequence[int]) -> tuple[int, str] | None:
        """The first token that was overwritten, and its place; the bytes of now count from now on."""
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
    """The watch that `watch_offers` opens; an observer of its runtime."""

    def __init__(self, caches: Sequence[PatternCache | StateCache]) -> None:
        self._caches = caches
        self._found: list[str | Exception] = []
        self._offered: dict[Lease, list[_Slots]] = {}

    def assert_unchanged(self) -> None:
        """Assert that no offer has changed so far. Legal at any moment.

        Raises:
            AssertionError: One has; it names the first place.
        """
        for lease in self._offered:
            self._compare(lease, "while it was offered")
        raise_first(self._found)

    def offer(self, lease: Lease) -> None:
        """Remember what a new lease offers.

        Args:
            lease: As the watched runtime's `serve_blocks` returned it.

        Raises:
            UsageError: It offers another number of groups of layers than are watched; it is revoked.
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
            if held.history is not None:  # not all of it is computed
                held.history = _Told(lease, held.history, self._remember)
            self._remember(lease)

    def lease_ended(self, record: LeaseRecord) -> None:
        """See `Observer`: told in the step that gives the blocks back, before anybody else can know.

        Args:
            record: How the lease has ended; its outcome is named in what is found.
        """
        for lease in [lease for lease in self._offered if lease.done]:
            try:
                self._compare(lease, f"before its lease was over ({record.outcome})")
            except Exception as error:  # noqa: BLE001 - whatever it is, the runtime would only log it
                self._found.append(error)
            del self._offered[lease]

    def load_ended(self, record: LoadRecord) -> None:
        """See `Observer`; loads change no offer.

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
    """Token of the prompt that the first slot of a lease's blocks is for, by group: those of a window are its last."""
    held, facts = _held(lease), lease.ticket.groups
    for group, cache in enumerate(caches):
        size = cache.layout.block_size if isinstance(cache, PatternCache) else 1
        windowed = bool(facts) and not facts[group].whole
        yield max(-(-held.offered_tokens // size) - held.counts[group], 0) * size if windowed else 0


@contextlib.contextmanager
def watch_offers(runtime: Runtime, cache: PatternCache | Sequence[PatternCache | StateCache]) -> Iterator[OfferWatch]:
    """Watch that nothing changes in the blocks that `runtime` offers before their lease has ended and its hold is over.

    Digests of every slot are taken as its token is computed: when `serve_blocks` returns, when `Lease.advance` covers
    it, and where there is an event, once that has happened. They are compared in the step in which the blocks are given
    back, at the end of the block, and whenever `assert_unchanged` is called. What is not computed yet, or lies behind a
    prompt's last token, may change. Works with every transport; costs a pass over the offered blocks.

    Args:
        runtime: The producer's; its `serve_blocks` is watched from here on, under any name that is looked up later.
        cache: What it has registered, or a cache for each of several groups, in their order (a `StateCache` for state);
            the content is the engine's own and need not be a pattern.

    Returns:
        A context manager; its block gets the watch, and is how long offers are watched.

    Raises:
        AssertionError: At the end, if an offer has changed, also when an error of the engine comes through; it names
            engine, layer, block, slot, token and request.
    """
    watch = OfferWatch([cache] if isinstance(cache, PatternCache) else list(cache))
    serve = runtime.serve_blocks

    def serve_watched(request: ServeRequest) -> Lease:
        lease = serve(request)
        watch.offer(lease)
        return lease

    final = checked_at_end(watch.assert_unchanged)
    with runtime.observed_by(watch), mock.patch.object(runtime, "serve_blocks", serve_watched), final:
        yield watch
