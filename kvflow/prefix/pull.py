"""A pull: ask peers for a prefix, then load the prefix from the holders (the peers that offer it) with most tokens.

The tickets of all holders that offer equally many tokens go into one ordinary load, which tries the next ticket if one
fails. If all fail, the next load is from holders that offer fewer tokens.

As for any load, success proves that the lease covered the whole read. Nothing proves that the blocks hold the tokens
that the keys name: the reader trusts the holder.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import KVFlowError, LoadError, PeerError, Quarantine, RequestError
from kvflow.prefix.load_rates import LoadRates
from kvflow.prefix.prefix_requests import PrefixReport, PrefixRequest, check_blocks
from kvflow.prefix.search import Holder, Search
from kvflow.prefix.seek import PrefixQuestions
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.requests import TICKETS_MAX, LoadReport, LoadRequest
from kvflow.runtime.records import LOADED
from kvflow.runtime.tasks import shielded_from_scopes

if TYPE_CHECKING:
    from kvflow.runtime.assembly import RegisteredCache


class Pull:
    """One call of `Prefixes.pull`."""

    def __init__(
        self, cache: RegisteredCache, rates: LoadRates, counts: dict[str, int], request: PrefixRequest
    ) -> None:
        """Prepare a pull of `request`, a result of `checked_prefix_request`.

        Raise RequestError if the request's ticket `rest` is invalid, or if the request's blocks do not fit its tokens.
        `counts`: counts of `PrefixStatistics` by field name, which the pull increases.
        """
        self._groups = cache.local.groups
        self._loader = cache.loader
        self._remote_leases = cache.remote_leases
        self._rates, self._counts = rates, counts
        self._tables = cache.loader.tables_of(request.block_ids, request.request_id)
        if request.rest is not None:
            try:
                request = replace(request, rest=cache.resolver.read_ticket(request.rest))
            except RequestError as error:
                raise RequestError(f"request {request.request_id!r}: rest: {error}") from error
        check_blocks(request, self._groups, self._tables)
        self._request = request if request.rest is None else _cut_to_whole_blocks(request, self._groups, self._tables)
        deadline_s = cache.config.load_deadline_s if request.deadline_s is None else request.deadline_s
        self._answer_within_s = min(request.answer_within_s, deadline_s)
        now_s = asyncio.get_running_loop().time()
        self._deadline_at_s, self._answers_until_s = now_s + deadline_s, now_s + self._answer_within_s
        self._search: Search
        """The engines that were asked, with their answers; set by `run`."""
        self._tried: list[Holder] = []
        self._source_holder: Holder | None = None
        """Holder that the prefix was read from; None before a load has succeeded."""
        self._loaded_from: Sequence[Holder] = ()
        """Holders that the successful load could read from. The load itself releases the leases that it did not use."""
        self.ended = asyncio.Event()
        self._local_tokens = 0
        """Number of the prompt's tokens in the local blocks after the successful loads, including the cached tokens."""

    async def run(self, questions: PrefixQuestions) -> PrefixReport:
        """Ask the peers, load the prefix, and return the report. Errors and cancellation are as for `Prefixes.pull`."""
        self._counts["pulls"] += 1
        self._search = await questions.ask(self._request, self._answer_within_s)
        try:
            loads = await (self._load_prefix() if self._request.rest is None else self._load_both())
        finally:
            self._search.end(self._loaded_from)
        return self._make_report(loads)

    def _left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self._deadline_at_s - asyncio.get_running_loop().time()

    async def _load_prefix(self) -> list[LoadReport]:
        """Load the prefix from the holders that offer most tokens; if all fail, from holders that offer fewer.

        Return a list with the report of the successful load, or an empty list. A load may end up to `cancel_grace_s`
        after the deadline, but no load begins after the deadline.
        """
        with ExitStack() as kept:
            for spare in self._search.holders:
                # The load itself renews the leases of holders with most tokens.
                if spare.offer.num_tokens < self._search.holders[0].offer.num_tokens:
                    kept.enter_context(self._remote_leases.renewing(spare.offer.ticket))
            while self._left_s() > 0 and (holders := await self._next_holders()):
                tokens = holders[0].offer.num_tokens
                tables = _blocks_filled_by(self._groups, self._tables, self._request.cached_tokens, tokens)
                report = await self._await_load(holders, self._start_load(_tickets_of(holders), tables, tokens=tokens))
                if report is not None:
                    self._local_tokens = tokens
                    return [report]
        return []

    async def _next_holders(self) -> list[Holder]:
        """Return the holders to load from next, the least busy first; all of them offer equally many tokens.

        Leave out holders from which a read should take longer than computing the tokens. Return an empty list if no
        holder is left and none answers before the deadline.
        """
        while holders := await self._search.wait_for_best(self._tried, self._answers_until_s):
            del holders[TICKETS_MAX:]
            self._tried += holders
            if paying := [one for one in holders if self._is_worth_reading(one)]:
                return paying
        return []

    async def _load_both(self) -> list[LoadReport]:
        """Load the prefix from a holder and, at the same time, the tokens after the prefix by the ticket `rest`.

        If no holder offers a usable prefix, load all tokens by `rest`. Return the loads' reports.
        """
        cached = self._request.cached_tokens
        if holders := await self._next_holders():
            heads, tails = _divide_blocks(self._groups, self._tables, cached, holders[0].offer.num_tokens)
            if any(map(len, heads)) and any(map(len, tails)):
                return await self._load_side_by_side(holders, heads, tails)
        load = self._start_rest(self._tables, cached, keep_offer=False)
        report = await load
        self._local_tokens = load.ticket.offered_tokens
        return [report]

    async def _load_side_by_side(
        self, holders: Sequence[Holder], heads: Sequence[BlockIds], tails: Sequence[BlockIds]
    ) -> list[LoadReport]:
        rest = self._start_rest(tails, holders[0].offer.num_tokens)
        loads = [rest]
        try:
            prefix = self._start_load(_tickets_of(holders), heads, "/prefix")
            loads.append(prefix)
            await asyncio.shield(asyncio.gather(*loads, return_exceptions=True))
            report, end = await self._await_load(holders, prefix), await rest
            if report is None:  # the lease of the ticket `rest` has these tokens, too, and is open
                if self._left_s() <= 0:
                    await prefix  # raises its error: no time is left to read elsewhere
                rest = self._start_rest(self._tables, self._request.cached_tokens)
                loads.append(rest)
                end = await rest
        except BaseException as error:
            for load in loads:
                load.cancel()
            with shielded_from_scopes():
                await asyncio.shield(asyncio.gather(*loads, return_exceptions=True))
            if isinstance(error, KVFlowError):
                error.quarantine = _quarantine_of(loads)
            raise
        self._local_tokens = rest.ticket.offered_tokens
        assert isinstance(self._request.rest, Ticket), "it was parsed"
        self._remote_leases.release_soon(self._request.rest)
        return [end] if report is None else [report, end]

    def _start_load(
        self,
        ticket: Any,
        tables: Sequence[BlockIds],
        part: str = "",
        *,
        cached_tokens: int | None = None,
        tokens: int | None = None,
        keep_offer: bool = False,
    ) -> Load:
        """Start a load of `ticket` into the local blocks in `tables` (one array of block ids for each group).

        `part`: text to append to the load's request id, so that two loads of a pull have different ids.
        `cached_tokens`: the `LoadRequest.cached_tokens`; None: those of the pull's request. `tokens`: the
        `LoadRequest.num_tokens`.
        """
        request = self._request
        return self._loader.start(
            LoadRequest(
                request_id=request.request_id + part,
                ticket=ticket,
                block_ids=_as_block_ids(tables),
                deadline_s=self._left_s(),
                priority=request.priority,
                after=request.after,
                prompt=request.prompt,
                num_tokens=tokens,
                keep_offer=keep_offer,
                cached_tokens=request.cached_tokens if cached_tokens is None else cached_tokens,
            )
        )

    def _start_rest(self, tables: Sequence[BlockIds], cached_tokens: int, *, keep_offer: bool = True) -> Load:
        rest = self._request.rest
        assert isinstance(rest, Ticket), "it was parsed"
        # The blocks were given for this ticket; without an offer yet, its number of tokens is not known.
        tokens = rest.offered_tokens if rest.has_blocks and not rest.awaited else None
        return self._start_load(rest, tables, cached_tokens=cached_tokens, tokens=tokens, keep_offer=keep_offer)

    async def _await_load(self, holders: Sequence[Holder], load: Load) -> LoadReport | None:
        """Await a load from `holders`, and return its report. Return None if the load failed and the blocks are safe.

        If the load failed, and bytes may still land in the blocks at the deadline, raise the load's error.
        """
        try:
            report = await load
        except (PeerError, LoadError) as error:
            self._note_failures(holders, load, str(error))
            if not await _wait_until_safe(load, self._left_s()):
                raise
            return None
        self._loaded_from, self._source_holder = holders, self._note_failures(holders, load, "")
        self._rates.learn(holders[0].offer.ticket, report)
        return report

    def _note_failures(self, holders: Sequence[Holder], load: Load, error: str) -> Holder:
        """Set `Holder.why` of the holders that `load` tried, and count failures. Return the holder that was tried last.

        `error`: text of the load's error; "" if it succeeded.
        """
        last, attempts = holders[0], load.attempts or ()
        last.why = error
        for attempt in attempts:
            last = next(one for one in holders if one.is_at(attempt.engine_id, attempt.address))
            last.why = "" if attempt.outcome == LOADED else attempt.error or error
        self._counts["failed_sources"] += max(len(attempts), 1) - (not error)
        return last

    def _is_worth_reading(self, one: Holder) -> bool:
        """Return False, and set `Holder.why`, if computing the tokens should be faster than reading from the holder.

        Return True if the speed of loads from the holder is unknown.
        """
        offer = one.offer
        if not offer.pays:
            one.why = f"reading takes {offer.pull_s:.3g} s, computing takes {offer.compute_s:.3g} s"
            self._counts["declined"] += 1
        return offer.pays

    def _make_report(self, loads: Sequence[LoadReport]) -> PrefixReport:
        """Return the pull's report, with the reports of its successful `loads`. Count the tokens that were read."""
        request, taken = self._request, self._source_holder
        judged = taken or (self._tried[-1] if self._tried else None)
        pulled = 0 if taken is None else taken.offer.num_tokens - request.cached_tokens
        if pulled:
            self._counts["hits"] += 1
            self._counts["tokens"] += pulled
            self._counts["bytes"] += loads[0].bytes
        return PrefixReport(
            request_id=request.request_id,
            num_tokens=max(self._local_tokens, request.cached_tokens),
            pulled_tokens=pulled,
            bytes=sum(report.bytes for report in loads),
            source=taken.offer.peer if taken is not None else "",
            answers=self._search.answers,
            loads=tuple(loads),
            pull_s=judged.offer.pull_s if judged is not None else None,
            compute_s=judged.offer.compute_s if judged is not None else None,
        )


def _tickets_of(holders: Sequence[Holder]) -> list[Ticket]:
    return [one.offer.ticket for one in holders]


async def _wait_until_safe(load: Load, within_s: float) -> bool:
    """Wait until no byte can land in the blocks of a failed load. Return False if that takes longer than `within_s`."""
    if load.safe:
        return True
    try:
        async with asyncio.timeout(within_s):
            await load.settled()
    except (TimeoutError, KVFlowError):
        return False
    return True


def _quarantine_of(loads: Sequence[Load]) -> Quarantine | None:
    """Return one quarantine for all `loads` in whose blocks bytes may still land; None if there are none."""
    unsafe = [load for load in loads if not load.safe]
    return _UnsafeLoads(unsafe) if len(unsafe) > 1 else next(iter(unsafe), None)


@dataclass(frozen=True, slots=True)
class _UnsafeLoads:
    """Quarantine that joins several failed loads, for an error's attribute `quarantine`."""

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


def _cut_to_whole_blocks(
    request: PrefixRequest, groups: Sequence[GroupFacts], tables: Sequence[BlockIds]
) -> PrefixRequest:
    """Return `request` with only those keys that cover whole local blocks in every group.

    One load fills the blocks of the prefix, and another fills the blocks after the prefix. They must not share a block.
    """
    whole = [(group.block_size, len(ids)) for group, ids in zip(groups, tables, strict=True) if group.whole]
    unit = math.lcm(request.key_tokens, *(size for size, _ in whole))
    most = min((request.cached_tokens // size + count) * size for size, count in whole) if whole else 0
    every = unit // request.key_tokens
    keys = request.keys[every - 1 : most // request.key_tokens : every]
    return replace(request, keys=keys, key_tokens=unit, peers=request.peers if keys else ())


def _as_block_ids(tables: Sequence[BlockIds]) -> Any:
    """Return `tables`, one array of block ids for each group, in the form of `LoadRequest.block_ids`."""
    return tables[0].tolist() if len(tables) == 1 else [ids.tolist() for ids in tables]


def _blocks_filled_by(
    groups: Sequence[GroupFacts], tables: Sequence[BlockIds], cached: int, tokens: int
) -> list[BlockIds]:
    """Return, by group, the local blocks that a load of the prompt's tokens from `cached` to `tokens` fills.

    `cached` and `tokens` are positions in the prompt, and the token at `tokens` is not loaded. For a sliding-window
    group return only the blocks of the last window before `tokens`; for recurrent state, all blocks. `tables`: block
    ids by group; each table begins with the block that holds position `cached`.
    """
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


def _divide_blocks(
    groups: Sequence[GroupFacts], tables: Sequence[BlockIds], cached: int, tokens: int
) -> tuple[list[BlockIds], list[BlockIds]]:
    """Divide local blocks into two lists by group: blocks of the prompt's first `tokens` tokens, and later blocks.

    All blocks of sliding-window groups and of recurrent state go to the second list. `tables`: block ids by group; each
    table begins with the block that holds position `cached` of the prompt.
    """
    heads, tails = [], []
    for group, ids in zip(groups, tables, strict=True):
        at = tokens // group.block_size - cached // group.block_size if group.whole else 0
        heads.append(ids[:at])
        tails.append(ids[at:])
    return heads, tails
