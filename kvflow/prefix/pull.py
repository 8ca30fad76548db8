"""A pull: ask peers for a prefix, then load the prefix from the holders (the peers that offer it) with most tokens.

The tickets of all holders that offer equally many tokens go into one ordinary load, which tries the next ticket if one
fails. If all fail, the next load is from holders that offer fewer tokens.

As for any load, success proves that the lease covered the whole read. Nothing proves that the blocks hold the tokens
that the keys name: the reader trusts the holder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.plan.descriptors import BlockIds, given_block_ids
from kvflow.errors import KVFlowError, LoadError, PeerError, WeightsMismatch
from kvflow.prefix.load_rates import LoadRates
from kvflow.prefix.prefix_requests import PrefixReport, PrefixRequest, check_blocks
from kvflow.prefix.search import Holder, Search
from kvflow.prefix.seek import PrefixSeeker
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.requests import TICKETS_MAX, LoadReport, LoadRequest
from kvflow.runtime.part import PartHost
from kvflow.runtime.records import LOADED


class Pull:
    """One call of `Prefixes.pull`."""

    def __init__(self, host: PartHost, rates: LoadRates, counts: dict[str, int], request: PrefixRequest) -> None:
        """Prepare a pull of `request`, a result of `checked_prefix_request`.

        Raise RequestError if the request's blocks do not fit its tokens.
        `counts`: counts of `PrefixStatistics` by field name, which the pull increases.
        """
        self._groups = host.context.local.groups
        self._weights = host.context.weights
        self._loader = host.loader
        self._remote_leases = host.leases
        self._rates, self._counts = rates, counts
        self._tables = host.loader.tables_of(request.block_ids, request.request_id)
        check_blocks(request, self._groups, self._tables)
        self._request = request
        deadline_s = host.context.config.load_deadline_s if request.deadline_s is None else request.deadline_s
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

    async def run(self, questions: PrefixSeeker) -> PrefixReport:
        """Ask the peers, load the prefix, and return the report. Errors and cancellation are as for `Prefixes.pull`."""
        self._counts["pulls"] += 1
        weights = self._weights.version
        self._search = await questions.ask(self._request, self._answer_within_s)
        try:
            load = await self._load_prefix()
        finally:
            self._search.end(self._loaded_from)
        if self._source_holder is not None and weights != self._weights.version:  # cached tokens are of the old ones
            self._source_holder.why = f"this engine's weights {weights!r} were replaced during the pull"
            self._source_holder = load = None
        return self._make_report(load)

    def _left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self._deadline_at_s - asyncio.get_running_loop().time()

    async def _load_prefix(self) -> LoadReport | None:
        """Load the prefix from the holders that offer most tokens; if all fail, from holders that offer fewer.

        Return the report of the successful load; None if there is none. A load may end up to `cancel_grace_s` after the
        deadline, but no load begins after the deadline.
        """
        with ExitStack() as kept:
            for spare in self._search.holders:
                # The load itself renews the leases of holders with most tokens.
                if spare.offer.num_tokens < self._search.holders[0].offer.num_tokens:
                    kept.enter_context(self._remote_leases.renewing(spare.offer.ticket))
            while self._left_s() > 0 and (holders := await self._next_holders()):
                tokens = holders[0].offer.num_tokens
                tables = _blocks_filled_by(self._groups, self._tables, self._request.cached_tokens, tokens)
                report = await self._await_load(holders, self._start_load(holders, tables))
                if report is not None:
                    return report
        return None

    async def _next_holders(self) -> list[Holder]:
        """Return the holders to load from next, the least busy first; all of them offer equally many tokens.

        Leave out holders from which a read should take longer than computing the tokens. Return an empty list if no
        holder is left and none answers before the deadline.
        """
        while holders := await self._search.wait_for_best(self._tried, self._answers_until_s):
            del holders[TICKETS_MAX:]
            self._tried += holders
            if paying := [holder for holder in holders if self._is_worth_reading(holder)]:
                return paying
        return []

    def _start_load(self, holders: Sequence[Holder], tables: Sequence[BlockIds]) -> Load:
        """Start a load from `holders` into the local blocks in `tables` (one array of block ids for each group)."""
        request = self._request
        return self._loader.start(
            LoadRequest(
                request_id=request.request_id,
                ticket=[holder.offer.ticket for holder in holders],
                block_ids=given_block_ids([ids.tolist() for ids in tables]),
                deadline_s=self._left_s(),
                priority=request.priority,
                after=request.after,
                num_tokens=holders[0].offer.num_tokens,
                cached_tokens=request.cached_tokens,
            )
        )

    async def _await_load(self, holders: Sequence[Holder], load: Load) -> LoadReport | None:
        """Await a load from `holders`, and return its report. Return None if the load failed and the blocks are safe.

        If the load failed, and bytes may still land in the blocks at the deadline, raise the load's error.
        """
        try:
            report = await load
        except (PeerError, LoadError, WeightsMismatch) as error:
            self._note_failures(holders, load, str(error))
            with suppress(TimeoutError, KVFlowError):
                async with asyncio.timeout(self._left_s()):
                    await load.settled()
            if not load.safe:
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
            last = next(holder for holder in holders if holder.is_at(attempt.engine_id, attempt.address))
            last.why = "" if attempt.outcome == LOADED else attempt.error or error
        self._counts["failed_sources"] += max(len(attempts), 1) - (not error)
        return last

    def _is_worth_reading(self, holder: Holder) -> bool:
        """Return False, and set `Holder.why`, if computing the tokens should be faster than reading from the holder.

        Return True if the speed of loads from the holder is unknown.
        """
        offer = holder.offer
        if not offer.pays:
            holder.why = f"reading takes {offer.pull_s:.3g} s, computing takes {offer.compute_s:.3g} s"
            self._counts["declined"] += 1
        return offer.pays

    def _make_report(self, load: LoadReport | None) -> PrefixReport:
        """Return the pull's report, with the report of its successful `load`. Count the tokens that were read."""
        request, taken = self._request, self._source_holder
        judged = taken or (self._tried[-1] if self._tried else None)
        pulled = 0 if taken is None else taken.offer.num_tokens - request.cached_tokens
        size_bytes = 0 if load is None else load.bytes
        if pulled:
            self._counts["hits"] += 1
            self._counts["tokens"] += pulled
            self._counts["bytes"] += size_bytes
        return PrefixReport(
            request_id=request.request_id,
            num_tokens=request.cached_tokens + pulled,
            pulled_tokens=pulled,
            bytes=size_bytes,
            source=taken.offer.peer if taken is not None else "",
            answers=self._search.answers,
            load=load,
            pull_s=judged.offer.pull_s if judged is not None else None,
            compute_s=judged.offer.compute_s if judged is not None else None,
        )


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
        first, stop = cached // group.block_size, -(-tokens // group.block_size)
        needed = ids[max(group.first_needed(tokens) // group.block_size - first, 0) : stop - first]
        filled.append(ids if group.kind is GroupKind.STATE else needed)
    return filled
