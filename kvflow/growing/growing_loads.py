"""Loads of leases that grow: their prompts are still being computed, or copied to where they can be read.

No other module of loads knows of growth. A load is told of it in one way: by the answer to a question that waits at the
producer (`news`). An answer vouches for nothing. So the seal is looked at after each answer, at the end of the read,
and every `LOOK_EVERY_S` in case that no answer comes. Tokens that a seal has shown to be there are read in the order of
the prompt, once they are worth a read, and from each rank by itself where that is possible.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import merge
from itertools import repeat

from kvflow.checks import counted
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.policy.history import History
from kvflow.errors import COMPUTE
from kvflow.growing.load_news import Followed, Follower, News
from kvflow.runtime.assembly import RegisteredCache
from kvflow.runtime.clock import Timer
from kvflow.runtime.load.flight import Flight
from kvflow.runtime.load.lanes import Grouping, GroupSpan, Lane, SourcePart, Spans, by_group, by_source
from kvflow.runtime.load.load import Load, Work
from kvflow.runtime.load.plan import Matched, Plan
from kvflow.runtime.load.reads import CopyGroup, Read
from kvflow.runtime.load.straight import Straight
from kvflow.runtime.peers.peer import Source

LOOK_EVERY_S = 0.1
_WORTH_S = 1e-3
_WORTH_LEAST_BYTES = 1 << 17  # at a gigabit per second, a millisecond
_GOLDEN = 0.618  # fractional parts of its multiples are spread evenly
_SPEED_SHARE = 0.25  # weight of a new measurement in the average


@dataclass(slots=True, eq=False)
class _Growing:
    """One source's lease as a load knows it, beside its seal."""

    source: Source
    followed: Followed | None = None
    speed: float = 0.0
    """Bytes per second of its reads, as far as is known."""
    due: bool = True
    """True if its seal is to be looked at."""

    def there(self, num_tokens: int) -> int:
        """Tokens of the lease that may be read by now."""
        there = self.source.proof.there(num_tokens)
        return there if self.followed is None else min(there, self.followed.known_tokens)

    def note_speed(self, size_bytes: int, took_s: float) -> None:
        if took_s > 0:
            speed = size_bytes / took_s
            self.speed = self.speed + (speed - self.speed) * _SPEED_SHARE if self.speed else speed


class GrowingLoads:
    """Carries loads of leases that grow."""

    def __init__(self, cache: RegisteredCache) -> None:
        self.slice_bytes_max = cache.context.config.limits.slice_bytes_max
        self.clock = cache.context.clock
        self.straight = cache.straight
        self._whole = cache.whole
        self._straight_spans = StraightSpans(cache.straight, self.slice_bytes_max)
        self.count = 0
        """Loads that were begun so far."""
        self._follower = Follower(cache.context, cache.local, cache.peers)

    def follow(self, load: Load, sources: Sequence[Source], matched: Matched) -> None:
        """Ask these ranks what becomes of their leases, for a load that needs more of them than seals say."""
        work = load.work
        assert work is not None, "it is under way"
        work.news = news = self._follower.follow(work.ticket, sources, partial(_told, work))
        for one in news.followed:
            if one.source in work.sources:
                one.attach(matched)

    async def read(self, flight: Flight, load: Load, work: Work, plan: Plan) -> bool:
        """Read the load's blocks as they are computed; see `Reader`."""
        self.count += 1
        spans: Spans = self._whole.buffered(load, plan) or self._straight_spans
        carrier = _Carrier(self, spans, load, flight, plan.matched)
        try:
            return await flight.fly_groups(carrier.groups())
        finally:
            carrier.close()


def _told(work: Work, source: Source) -> None:
    """Note an answer of a source's rank."""
    if work.grown is not None:
        work.grown(source)


class StraightSpans:
    """See `Spans`: spans of loads that go straight into the cache."""

    def __init__(self, straight: Straight, slice_bytes_max: int) -> None:
        self._straight = straight
        self._slice_bytes_max = slice_bytes_max

    def lanes(self, sources: Sequence[Source], tables: Sequence[BlockIds]) -> list[Lane]:
        """See `Spans`."""
        parts, lanes = [], []
        for source in sources:
            for block_map in source.connection.block_maps:
                if chunks := [some for its_map, some in source.chunks if its_map is block_map]:
                    parts.append(SourcePart(source, block_map, chunks))
        for at, of_group in by_group(parts):
            for some in by_source(of_group):
                grouping = Grouping(some, None)
                lanes.append(Lane(some, None, grouping, tables[at], grouping.units(self._slice_bytes_max, 0)))
        return lanes

    async def group(self, one: GroupSpan) -> CopyGroup:
        """See `Spans`."""
        reads: list[Read] = []
        for part in one.lane.parts:
            reads += self._straight.slices(part.source, zip(repeat(part.block_map), one.span.chunks_of(part)))
        return CopyGroup(reads)


class _Carrier:
    """One load of leases that grow."""

    def __init__(self, loads: GrowingLoads, spans: Spans, load: Load, flight: Flight, matched: Matched) -> None:
        assert load.work is not None, "it is under way"
        self._loads = loads
        self._spans = spans
        self._load = load
        self._work = load.work
        self._flight = flight
        self._matched = matched
        self._tokens = self._work.ticket.num_tokens
        self._growing = {source: _Growing(source) for source in self._work.sources}
        self._timer: Timer | None = None
        self._work.grown = self._told
        self._take_news()

    def close(self) -> None:
        """End the read."""
        self._work.grown = None
        if self._timer is not None:
            self._timer.cancel()

    async def groups(self) -> AsyncGenerator[CopyGroup, None]:
        """Give copy groups as they are there and worth a read.

        If all blocks are there before any was read, and go straight into the cache, they are read as of a lease that
        does not grow.
        """
        sources, work = self._work.sources, self._work
        lanes = self._spans.lanes(sources, work.tables)
        untouched = all(lane.straight for lane in lanes) and not work.ticket.extends
        growth = Growth(self._tokens, self._loads.slice_bytes_max, self._loads.count)
        frontier = Frontier(lanes, self._growing, self._load.note_progress, work.landed)
        while lanes or (self._load.followed and not frontier.done):
            frontier.look()
            await self._look(frontier)
            if any(source.proof.over for source in sources):
                return
            there = {source: one.there(self._tokens) for source, one in self._growing.items()}
            if untouched and min(there.values()) >= self._tokens:
                self._read()
                for read in self._loads.straight.reads(sources, None):
                    yield CopyGroup((read,))
                return
            due = growth.due(lanes, self._growing, there)
            untouched = untouched and not due
            if due:
                self._read()
            spans = (lane.take(there_in(lane, there)) for lane in due)
            for one in merge(*spans, key=GroupSpan.stop_token):
                group = await self._spans.group(one)
                yield group._replace(on_land=partial(self._landed, frontier, one, group))
            lanes = [lane for lane in lanes if not lane.done]
            if not due and not self._due():
                await self._wait()

    def _read(self) -> None:
        """End the wait for the producer: more can be read."""
        if self._work.phase == COMPUTE:
            self._work.enter("wire")

    def _landed(self, frontier: Frontier, one: GroupSpan, group: CopyGroup, now_s: float, begun_s: float) -> None:
        for read in group.reads:
            self._growing[read.source].note_speed(read.descriptors.size_bytes, now_s - begun_s)
        frontier.note_landed(one, now_s)

    def _due(self) -> bool:
        """True if a look could be posted now."""
        return any(one.due and not one.source.proof.looking for one in self._growing.values())

    async def _look(self, frontier: Frontier) -> None:
        """Look at the seals that are due; at all of them, if the caller follows the load and tokens have landed that no
        seal vouches for yet. One look at a time at each seal.
        """
        unvouched = self._load.followed and frontier.unvouched
        for one in self._growing.values():
            if (one.due or (unvouched and not frontier.vouches(one.source))) and not one.source.proof.looking:
                one.due = False
                await self._flight.look(one.source)

    async def _wait(self) -> None:
        """Wait until a look or another read has ended, an answer came, or a look is due."""
        if self._work.news is None and all(source.proof.seen_s > -math.inf for source in self._work.sources):
            self._loads.follow(self._load, self._work.sources, self._matched)
            self._take_news()
        for one in self._growing.values():
            if one.followed is not None and one.followed.problem is not None:
                raise one.followed.problem
        if self._timer is None:
            self._timer = self._loads.clock.call_later(LOOK_EVERY_S, self._look_again)
        if self._work.phase != COMPUTE and not self._flight.moving and self._computed < self._tokens:
            self._work.compute(self._so_far)
        await self._flight.changed()

    @property
    def _computed(self) -> int:
        return min(one.there(self._tokens) for one in self._growing.values())

    def _so_far(self) -> str:
        """How much of the prompt its producer has computed, in words."""
        flight, tokens = self._flight, f"{self._computed} of {counted(self._tokens, 'token')} computed"
        silent_s = self._loads.clock.now_s() - flight.heard_s
        if not flight.reading or silent_s < 2 * LOOK_EVERY_S:
            return tokens
        return f"{tokens}, as far as is known: a look at its lease has not ended for {silent_s:.3g} s"

    def _look_again(self) -> None:
        """Callback of the timer: look at all seals, since an answer may have been lost."""
        self._timer = None
        for one in self._growing.values():
            one.due = True
        self._flight.nudge()

    def _told(self, source: Source) -> None:
        """Note an answer of the source's rank."""
        if (one := self._growing.get(source)) is not None:
            one.due = True
        self._flight.nudge()

    def _take_news(self) -> None:
        """Take in the news of the leases that are read. At first any new token is of interest."""
        news = self._work.news
        for one in news.followed if isinstance(news, News) else ():
            if one.source in self._growing:
                self._growing[one.source].followed = one
                one.want(self._tokens - 1)


class Growth:
    """Decides for one load when new tokens are worth a read.

    Loads of leases that advance in step would all read in the same turn of the loop: so their first reads differ.
    """

    def __init__(self, num_tokens: int, slice_bytes: int, number: int) -> None:
        """`number`: of the load, so that loads differ."""
        self._num_tokens = num_tokens
        self._slice_bytes = slice_bytes
        self._share = 0.5 + (number * _GOLDEN) % 1.0

    def due(self, lanes: Sequence[Lane], growing: dict[Source, _Growing], there: dict[Source, int]) -> list[Lane]:
        """Lanes to read now: those that are complete, and the others if they are worth a read.

        `there`: tokens that may be read from each rank. If no lane is due, the ranks are asked to tell when that may
        have changed.
        """
        tokens, due, rest, size_bytes = self._num_tokens, [], [], 0
        for lane in lanes:
            upto = there_in(lane, there)
            readable = lane.readable_bytes(upto)
            if readable and upto >= tokens:
                due.append(lane)
            elif readable:
                rest.append(lane)
                size_bytes += readable
        sources = dict.fromkeys(source for lane in lanes for source in lane.sources)
        worth = int(worth_bytes([growing[source] for source in sources], self._slice_bytes) * self._share)
        if rest and size_bytes >= worth:
            due += rest
            self._share = 1.0
        if not due and lanes:
            more = max((worth - size_bytes) // max(sum(lane.size_bytes(1) for lane in lanes), 1), 1)
            for source in sources:
                missing = tokens - there[source]
                if (followed := growing[source].followed) is not None:
                    followed.want(max(missing - more, 0) if missing else -1)
        return due


def there_in(lane: Lane, there: dict[Source, int]) -> int:
    """Tokens that may be read from all ranks of a lane."""
    return min(there[source] for source in lane.sources)


def worth_bytes(growing: Iterable[_Growing], slice_bytes: int) -> int:
    """Least size of a read: as many bytes as ranks deliver in about a millisecond, so that no more are left at the end.

    So a reader of many leases that advance in small steps posts few reads.
    """
    speed = sum(one.speed for one in growing)
    return min(max(int(speed * _WORTH_S), _WORTH_LEAST_BYTES), slice_bytes)


class Frontier:
    """Tokens of the prompt, from the first one on, that have landed in all lanes and are vouched for.

    Tokens are vouched for by a look that has found the leases open. It was posted after their last byte had landed, or
    so shortly before that the blocks were held until then anyway (`core.protocol.proof`).
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        sources: Iterable[Source],
        tell: Callable[[int, int], None],
        history: History | None,
    ) -> None:
        """`tell` is given the vouched tokens, and how many there will be; `history` all that have landed."""
        self._lanes = lanes
        self._sources = tuple(sources)
        self._tell = tell
        self._history = history
        self._first = min(lane.tokens.start for lane in lanes)
        self._last = max(lane.tokens.stop for lane in lanes)
        self._told = self._first
        self._upto = self._first
        """Tokens that have landed, vouched for or not."""
        self._landed_s = -math.inf

    @property
    def done(self) -> bool:
        """True once all tokens were told."""
        return self._told >= self._last

    @property
    def unvouched(self) -> bool:
        """True if more tokens have landed than were told."""
        return self._upto > self._told

    def note_landed(self, one: GroupSpan, now_s: float) -> None:
        """Note that a span has landed in our blocks."""
        one.lane.note_landed(one.span)
        self.look()
        self._upto = min(self._last, *(lane.landed_upto for lane in self._lanes))
        self._landed_s = now_s
        if self._history is not None:
            self._history.note(self._upto)
        self.look()

    def look(self) -> None:
        """Tell how many tokens are vouched for by now."""
        if self.unvouched and all(map(self.vouches, self._sources)):
            self._told = self._upto
            self._tell(self._upto - self._first, self._last - self._first)

    def vouches(self, source: Source) -> bool:
        """True if a source vouches for all that has landed."""
        quick_s = source.connection.quick_read_max_s
        return not source.proof.over and self._landed_s - source.proof.seen_s < quick_s
