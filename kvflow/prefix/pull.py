"""Pulls: seek a prefix, then load it from the holders that have most of it.

The load is an ordinary one, of as many tickets as there are holders with the same number of tokens, so it goes on with
the next holder if one fails. If all of them fail, the holders that have fewer tokens are loaded from.

A load of a prefix proves as much as any load: that the lease covered the whole read. That the blocks hold what their
keys stand for is the holder's word, as with any offer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import KVFlowError, LoadError, PeerError, Quarantine, RequestError
from kvflow.prefix.load_rates import LoadRates
from kvflow.prefix.prefix_cache import SharingStatistics
from kvflow.prefix.prefix_requests import (
    PrefixOffer,
    PrefixReport,
    PrefixRequest,
    PrefixStatistics,
    check_blocks,
    checked_prefix_request,
)
from kvflow.prefix.search import Holder, Search
from kvflow.prefix.seek import PrefixQuestions
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.requests import TICKETS_MAX, LoadReport, LoadRequest
from kvflow.runtime.records import LOADED

if TYPE_CHECKING:
    from kvflow.runtime.assembly import RegisteredCache


@dataclass(slots=True)
class _Pull:
    """A pull under way."""

    request: PrefixRequest
    tables: tuple[BlockIds, ...]
    search: Search
    ends_s: float
    answers_end_s: float
    """Time until which peers that have not answered yet are waited for."""
    tried: list[Holder] = field(default_factory=list)
    taken: Holder | None = None
    """The holder of the prefix that was read."""
    told: Sequence[Holder] = ()
    """Holders of the load that has succeeded, which gives back the leases that it has not used."""
    there: int = 0
    """Tokens of the prompt that were found, and are in the local blocks."""

    def left_s(self) -> float:
        """Return the time until its deadline; not above 0 once that has passed."""
        return self.ends_s - asyncio.get_running_loop().time()


class Pulls:
    """All pulls of a registration, and its searches, of which nothing is read."""

    def __init__(self, cache: RegisteredCache, rates: LoadRates) -> None:
        self._config = cache.context.config
        self._groups = cache.local.groups
        self._resolver = cache.resolver
        self._remote_leases = cache.remote_leases
        self._loader = cache.loader
        self._questions = PrefixQuestions(cache, rates)
        self._rates = rates
        self._counts = dict.fromkeys(("pulls", "hits", "tokens", "bytes", "failed_sources", "declined"), 0)
        self._open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()

    def statistics(self, sharing: SharingStatistics | None) -> PrefixStatistics:
        """Return the counts until now, with those of what is shared."""
        return PrefixStatistics(open_requests=self._open, sharing=sharing, **self._counts)

    def close(self) -> None:
        """Ask nobody any more: searches are over with the answers that have come."""
        self._questions.close()

    async def drained(self) -> None:
        """Wait until no pull is under way. Searches end by themselves, and hold nothing."""
        await self._none_open.wait()

    async def seek(self, given: PrefixRequest) -> tuple[PrefixOffer, ...]:
        """See `Prefixes.seek`."""
        request = checked_prefix_request(given, "seek", self._config.limits)
        search = await self._questions.ask(request, request.answer_within_s)
        found = search.holders
        search.give_back(found)
        return tuple(one.offer for one in found)

    async def pull(self, given: PrefixRequest) -> PrefixReport:
        """See `Prefixes.pull`."""
        request = checked_prefix_request(given, "pull", self._config.limits)
        self._open += 1
        self._none_open.clear()
        try:
            return await self._pull_checked(request)
        finally:
            self._open -= 1
            if not self._open:
                self._none_open.set()

    async def _pull_checked(self, request: PrefixRequest) -> PrefixReport:
        deadline_s = self._config.load_deadline_s if request.deadline_s is None else request.deadline_s
        tables = self._loader.tables_of(request.block_ids, request.request_id)
        if request.rest is not None:
            try:
                request = replace(request, rest=self._resolver.read_ticket(request.rest))
            except RequestError as error:
                raise RequestError(f"request {request.request_id!r}: rest: {error}") from error
        check_blocks(request, self._groups, tables)
        if request.rest is not None:
            request = _in_whole_blocks(request, self._groups, tables)
        now_s, answers_s = asyncio.get_running_loop().time(), min(request.answer_within_s, deadline_s)
        self._counts["pulls"] += 1
        search = await self._questions.ask(request, answers_s)
        pull = _Pull(request, tables, search, ends_s=now_s + deadline_s, answers_end_s=now_s + answers_s)
        try:
            loads = await (self._pull(pull) if request.rest is None else self._pull_both(pull))
        finally:
            search.give_back(pull.told)
        return self._report(pull, loads)

    async def _pull(self, pull: _Pull) -> list[LoadReport]:
        """Load the prefix from the holders that have most of it; if they fail, from those that have less.

        No load begins after the deadline: a load has `cancel_grace_s` to end in, and a pull has that once.
        """
        with ExitStack() as kept:
            for spare in pull.search.holders:
                if spare.offer.num_tokens < pull.search.holders[0].offer.num_tokens:  # the load keeps the others
                    kept.enter_context(self._remote_leases.keep_while(spare.offer.ticket))
            while pull.left_s() > 0 and (holders := await self._best(pull)):
                tokens = holders[0].offer.num_tokens
                tables = _filled(self._groups, pull.tables, pull.request.cached_tokens, tokens)
                report = await self._taken(pull, holders, self._start(pull, _tickets(holders), tables, tokens=tokens))
                if report is not None:
                    pull.there = tokens
                    return [report]
        return []

    async def _best(self, pull: _Pull) -> list[Holder]:
        """Return the holders to load from next, the best first: all have as many tokens, and pulling from each pays."""
        while alike := await pull.search.best(pull.tried, pull.answers_end_s):
            del alike[TICKETS_MAX:]
            pull.tried += alike
            if paying := [one for one in alike if self._pays(one)]:
                return paying
        return []

    async def _pull_both(self, pull: _Pull) -> list[LoadReport]:
        """Read the prefix and, side by side, the rest from the engine that has the whole prompt, in one outcome."""
        if holders := await self._best(pull):
            tables, cached = pull.tables, pull.request.cached_tokens
            heads, tails = _divided(self._groups, tables, cached, holders[0].offer.num_tokens)
            if any(map(len, heads)) and any(map(len, tails)):
                return await self._pull_side_by_side(pull, holders, heads, tails)
        load = self._start_rest(pull, pull.tables, pull.request.cached_tokens, keep_offer=False)
        report = await load
        pull.there = _offered(load)
        return [report]

    async def _pull_side_by_side(
        self, pull: _Pull, holders: Sequence[Holder], heads: Sequence[BlockIds], tails: Sequence[BlockIds]
    ) -> list[LoadReport]:
        rest = self._start_rest(pull, tails, holders[0].offer.num_tokens)
        loads = [rest]
        try:
            prefix = self._start(pull, _tickets(holders), heads, "/prefix")
            loads.append(prefix)
            await asyncio.shield(asyncio.gather(*loads, return_exceptions=True))
            report, end = await self._taken(pull, holders, prefix), await rest
            if report is None:  # the engine of the rest has these blocks, too, and its lease is still open
                if pull.left_s() <= 0:
                    await prefix  # raises why it failed: the time to read its blocks from elsewhere is over
                rest = self._start_rest(pull, pull.tables, pull.request.cached_tokens)
                loads.append(rest)
                end = await rest
        except BaseException as error:
            for load in loads:
                load.cancel()
            await asyncio.shield(asyncio.gather(*loads, return_exceptions=True))
            if isinstance(error, KVFlowError):
                error.quarantine = _quarantine(loads)
            raise
        pull.there = _offered(rest)
        assert isinstance(pull.request.rest, Ticket), "it was parsed"
        self._remote_leases.release_soon(pull.request.rest)
        return [end] if report is None else [report, end]

    def _start(
        self,
        pull: _Pull,
        ticket: Any,
        tables: Sequence[BlockIds],
        part: str = "",
        *,
        cached_tokens: int | None = None,
        tokens: int | None = None,
        keep_offer: bool = False,
    ) -> Load:
        """Start a load into `tables`, which begin at token `cached_tokens` (the request's, if None)."""
        request = pull.request
        return self._loader.start(
            LoadRequest(
                request_id=request.request_id + part,
                ticket=ticket,
                block_ids=_given(tables),
                deadline_s=max(pull.left_s(), 1e-6),  # a moment at least, in which it finds out that it is over
                priority=request.priority,
                after=request.after,
                prompt=request.prompt,
                num_tokens=tokens,
                keep_offer=keep_offer,
                cached_tokens=request.cached_tokens if cached_tokens is None else cached_tokens,
            )
        )

    def _start_rest(
        self, pull: _Pull, tables: Sequence[BlockIds], cached_tokens: int, *, keep_offer: bool = True
    ) -> Load:
        rest = pull.request.rest
        assert isinstance(rest, Ticket), "it was parsed"
        tokens = rest.offered_tokens if rest.has_blocks and not rest.awaited else None  # the blocks are for this ticket
        return self._start(pull, rest, tables, cached_tokens=cached_tokens, tokens=tokens, keep_offer=keep_offer)

    async def _taken(self, pull: _Pull, holders: Sequence[Holder], load: Load) -> LoadReport | None:
        """Await a load from holders. None if it fails and its blocks are safe, to be filled from elsewhere."""
        try:
            report = await load
        except (PeerError, LoadError) as error:
            self._note(holders, load, str(error))
            if not await _settled(load, pull.left_s()):
                raise
            return None
        pull.told, pull.taken = holders, self._note(holders, load, "")
        self._rates.learn(holders[0].offer.ticket, report)
        return report

    def _note(self, holders: Sequence[Holder], load: Load, error: str) -> Holder:
        """Note for each holder that had its turn why it has failed. Return the one that had the last turn."""
        assert load.work is not None, "it was started"
        last, attempts = holders[0], load.work.attempts or ()
        last.why = error
        for attempt in attempts:
            last = next(one for one in holders if one.is_at(attempt.engine_id, attempt.address))
            last.why = "" if attempt.outcome == LOADED else attempt.error or error
        self._counts["failed_sources"] += max(len(attempts), 1) - (not error)
        return last

    def _pays(self, one: Holder) -> bool:
        """Return True if pulling is expected to be faster than computing, or nothing is known; else note why not."""
        offer = one.offer
        if not offer.pays:
            one.why = f"it takes {offer.pull_s:.3g} s from there, and {offer.compute_s:.3g} s to compute"
            self._counts["declined"] += 1
        return offer.pays

    def _report(self, pull: _Pull, loads: Sequence[LoadReport]) -> PrefixReport:
        request, taken = pull.request, pull.taken
        judged = taken or (pull.tried[-1] if pull.tried else None)
        pulled = 0 if taken is None else taken.offer.num_tokens - request.cached_tokens
        if pulled:
            self._counts["hits"] += 1
            self._counts["tokens"] += pulled
            self._counts["bytes"] += loads[0].bytes
        return PrefixReport(
            request_id=request.request_id,
            num_tokens=max(pull.there, request.cached_tokens),
            pulled_tokens=pulled,
            bytes=sum(report.bytes for report in loads),
            source=taken.offer.peer if taken is not None else "",
            answers=pull.search.answers(),
            loads=tuple(loads),
            pull_s=judged.offer.pull_s if judged is not None else None,
            compute_s=judged.offer.compute_s if judged is not None else None,
        )


def _tickets(holders: Sequence[Holder]) -> list[Ticket]:
    return [one.offer.ticket for one in holders]


async def _settled(load: Load, within_s: float) -> bool:
    """Wait until no byte can land in the blocks of a load that has failed. False if the time is over before."""
    if load.safe:
        return True
    try:
        async with asyncio.timeout(within_s):
            await load.settled()
    except (TimeoutError, KVFlowError):
        return False
    return True


def _quarantine(loads: Sequence[Load]) -> Quarantine | None:
    """The quarantine of those loads whose bytes may still land."""
    unsafe = [load for load in loads if not load.safe]
    return _Unsafe(unsafe) if len(unsafe) > 1 else next(iter(unsafe), None)


@dataclass(frozen=True, slots=True)
class _Unsafe:
    """The `quarantine` of an error of several loads, side by side."""

    loads: Sequence[Load]

    @property
    def request_id(self) -> str:
        return self.loads[0].request_id

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(block_id for load in self.loads for block_id in load.block_ids)

    @property
    def safe(self) -> bool:
        return all(load.safe for load in self.loads)

    async def settled(self) -> None:
        for load in self.loads:
            await load.settled()


def _offered(load: Load) -> int:
    """Tokens that the offer of a load has: they are there once it has succeeded."""
    assert load.work is not None, "it was started"
    return load.work.ticket.offered_tokens


def _in_whole_blocks(request: PrefixRequest, groups: Sequence[GroupFacts], tables: Sequence[BlockIds]) -> PrefixRequest:
    """Cut the request so that the prefix ends where local blocks do: the tokens behind it come from elsewhere."""
    whole = [(group.block_size, len(ids)) for group, ids in zip(groups, tables, strict=True) if group.whole]
    unit = math.lcm(request.key_tokens, *(size for size, _ in whole))
    most = min((request.cached_tokens // size + count) * size for size, count in whole) if whole else 0
    every = unit // request.key_tokens
    keys = request.keys[every - 1 : most // request.key_tokens : every]
    return replace(request, keys=keys, key_tokens=unit, peers=request.peers if keys else ())


def _given(tables: Sequence[BlockIds]) -> Any:
    """Block ids as requests have them."""
    return tables[0].tolist() if len(tables) == 1 else [ids.tolist() for ids in tables]


def _filled(groups: Sequence[GroupFacts], tables: Sequence[BlockIds], cached: int, tokens: int) -> list[BlockIds]:
    """The local blocks that a prefix of so many tokens fills, of tables that begin behind what is cached."""
    filled = []
    for group, ids in zip(groups, tables, strict=True):
        size = group.block_size
        first, stop = cached // size, -(-tokens // size)
        if group.whole:
            filled.append(ids[: stop - first])
        elif group.kind is not GroupKind.STATE:
            filled.append(ids[max(group.first_needed(tokens) // size - first, 0) : stop - first])
        else:
            filled.append(ids)
    return filled


def _divided(
    groups: Sequence[GroupFacts], tables: Sequence[BlockIds], cached: int, tokens: int
) -> tuple[list[BlockIds], list[BlockIds]]:
    """Divide the local blocks: those that a prefix fills, and those of the rest, which has windows and state."""
    heads, tails = [], []
    for group, ids in zip(groups, tables, strict=True):
        at = tokens // group.block_size - cached // group.block_size if group.whole else 0
        heads.append(ids[:at])
        tails.append(ids[at:])
    return heads, tails
