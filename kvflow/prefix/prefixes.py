"""Prefixes: the part of a runtime that shares prefixes with peers, asks peers for prefixes, and pulls them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvflow import checks
from kvflow.core.protocol import messages
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import UsageError
from kvflow.prefix.load_rates import LoadRates
from kvflow.prefix.prefix_cache import PrefixCache
from kvflow.prefix.prefix_requests import (
    PrefixOffer,
    PrefixReport,
    PrefixRequest,
    PrefixStatistics,
    checked_prefix_request,
)
from kvflow.prefix.pull import Pull
from kvflow.prefix.seek import PrefixQuestions
from kvflow.prefix.seek_request import PREFIX_OF, SeekRequest
from kvflow.prefix.sharing import SharedPrefixes
from kvflow.runtime.channel.protocol import Answered
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.part import Ending, Part, PartOwner

if TYPE_CHECKING:
    from kvflow.runtime.assembly import RegisteredCache
    from kvflow.runtime.supervisor import Supervisor


class Prefixes(Part):
    """Part of a runtime that shares prefixes and reads them from peers: `Runtime(config, parts=[Prefixes()])`.

    A runtime without this part refuses questions for prefixes.
    """

    name = "prefix"

    def __init__(self) -> None:
        self.answers = {SeekRequest: self._answer}
        self._owner = PartOwner(self)
        self._rates = LoadRates()
        self._questions: PrefixQuestions | None = None
        self._counts: dict[str, int] = {}
        self._under_way: set[Pull] = set()
        self._shared: SharedPrefixes | None = None

    def __repr__(self) -> str:
        return "<kvflow.prefix.Prefixes>"

    def share(self, cache: PrefixCache, *, pinned_blocks_max: int | None = None) -> SharedPrefixes:
        """Answer questions of peers for prefixes from an engine's prefix cache, until the KV cache is unregistered.

        The answer is an ordinary lease on the longest prefix in the cache. It is given in one turn of the loop, unless
        `PrefixCache.match` is asynchronous.

        Args:
            cache: the prefix cache; it is called on the runtime's loop.
            pinned_blocks_max: most blocks that may be pinned for readers at once; a quarter of the KV cache if None. A
                question that needs more is answered with a miss.

        Returns:
            A handle that takes blocks back (`SharedPrefixes.reclaim`) or ends the sharing (`SharedPrefixes.close`).

        Raises:
            UsageError: `cache` is no PrefixCache, the runtime is a consumer or shares a cache already, no runtime with
                a registered KV cache has this part, or this is not the runtime's event loop.
            RuntimeUnavailable: the runtime drains, is closed, or has no KV cache at the moment.
        """
        registered = self._owner.require("share")
        engine_id = registered.config.engine_id
        if registered.config.role == "consumer":
            raise UsageError(f"share: the role of engine {engine_id!r} is 'consumer'")
        if self._shared is not None and not self._shared.closed:
            raise UsageError(f"share: the cache of engine {engine_id!r} is shared already")
        self._shared = SharedPrefixes(registered, cache, pinned_blocks_max)
        return self._shared

    async def seek(self, request: PrefixRequest) -> tuple[PrefixOffer, ...]:
        """Ask peers for a prefix, side by side, and read nothing. For engines that allocate blocks after they have
        offers.

        Each offer is a lease. Load its ticket within a few seconds, or keep it by `Runtime.keep_leases`. Give offers
        that you do not use back by `Runtime.release_blocks`; otherwise they expire. Cancelling gives all offers back.

        Args:
            request: the keys, and the peers to ask. `block_ids` may be empty.

        Returns:
            The offers, the longest first, then those of the least busy engine; empty if no peer has the prefix or can
                be asked.

        Raises:
            RequestError: the request is invalid.
            RuntimeUnavailable: the runtime drains, is closed, or has no KV cache at the moment.
            UsageError: no runtime with a registered KV cache has this part, or this is not the runtime's event loop.
        """
        cache, questions = self._require("seek")
        checked = checked_prefix_request(request, "seek", cache.config.limits)
        search = await questions.ask(checked, checked.answer_within_s)
        found = search.holders
        search.give_back(found)
        return tuple(one.offer for one in found)

    async def pull(self, request: PrefixRequest) -> PrefixReport:
        """Fill local blocks with as much of a prefix as a peer has: see `PrefixRequest`.

        Peers are asked side by side, and the longest prefix is loaded. If a source fails, the next one is read into the
        same blocks, within the same deadline, once no byte of the first can land. If nothing is found or can be read,
        that is no error: the prefix has to be computed. If cancelled, this returns within Config.cancel_grace_s; if
        bytes may still land then, the load is in `Runtime.quarantines`.

        Args:
            request: the keys of the prompt, the local blocks, and the peers to ask.

        Returns:
            The number of tokens in the local blocks, the holder that they came from, and the answers of all peers.

        Raises:
            RequestError: the request is invalid; BlocksBusy.
            PeerError, LoadError: a source has failed, and bytes may still land in the blocks: `quarantine` of the error
                is the load. With `PrefixRequest.rest`, also any error of a load of that ticket.
            RuntimeUnavailable, RuntimeBroken: as for loads.
            UsageError: as for `seek`.
        """
        cache, questions = self._require("pull")
        checked = checked_prefix_request(request, "pull", cache.config.limits)
        under_way, made = self._under_way, Pull(cache, self._rates, self._counts, checked)
        under_way.add(made)
        try:
            return await made.run(questions)
        finally:
            under_way.discard(made)
            made.over.set()

    def learn(self, ticket: Ticket, report: LoadReport) -> None:
        """Note how long the load of an offer took, as a base for `PrefixOffer.pull_s`.

        For engines that load the offers of `seek` themselves; `pull` notes its own loads.

        Args:
            ticket: ticket of the load; the first if there were several. A ticket that is not of a prefix is ignored.
            report: report of the load.

        Raises:
            RequestError: `ticket` is no Ticket, or `report` no LoadReport.
        """
        checks.instance(ticket, Ticket, "learn: ticket")
        checks.instance(report, LoadReport, "learn: report")
        if ticket.request_id.startswith(PREFIX_OF):
            self._rates.learn(ticket, report)

    @property
    def statistics(self) -> PrefixStatistics | None:
        """Counts since the KV cache was registered; None if none is registered."""
        if self._questions is None or not self._owner.registered:
            return None
        sharing = None if self._shared is None or self._shared.closed else self._shared.statistics
        return PrefixStatistics(open_requests=len(self._under_way), sharing=sharing, **self._counts)

    async def registered(self, runtime: Supervisor, cache: RegisteredCache) -> None:
        """Only for the runtime: see `Part`."""
        self._owner.begin(runtime)
        self._questions, self._shared = PrefixQuestions(cache, self._rates), None
        self._under_way = set()
        self._counts = dict.fromkeys(("pulls", "hits", "tokens", "bytes", "failed_sources", "declined"), 0)

    def end(self, why: Ending, wait_s: float = 0.0) -> None:
        """Only for the runtime: see `Part`."""
        if why is Ending.ABANDONED:
            self._questions = self._shared = None
            return
        if self._questions is not None:
            self._questions.close()
        if self._shared is not None:
            self._shared.close()

    async def drained(self) -> None:
        """Only for the runtime: see `Part`."""
        for one in tuple(self._under_way):  # a search ends by itself, and holds nothing
            await one.over.wait()

    async def closed(self, timeout_s: float) -> str:
        """Only for the runtime: see `Part`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.drained()
        except TimeoutError:
            return f"a pull of a prefix is still under way after {timeout_s} s"
        return ""

    def _require(self, what: str) -> tuple[RegisteredCache, PrefixQuestions]:
        cache = self._owner.require(what)
        assert self._questions is not None, "it is registered with the cache"
        return cache, self._questions

    def _answer(self, question: SeekRequest) -> Answered:
        if self._shared is None or not self._owner.open:
            return messages.NOTHING_YET
        return self._shared.answer(question)
