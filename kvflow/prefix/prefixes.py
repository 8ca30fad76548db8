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
from kvflow.prefix.prefix_requests import PrefixOffer, PrefixReport, PrefixRequest, PrefixStatistics
from kvflow.prefix.pull import Pulls
from kvflow.prefix.seek_request import PREFIX_OF, SeekRequest
from kvflow.prefix.sharing import SharedPrefixes
from kvflow.runtime.channel.protocol import Answered
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.part import Ending, Part
from kvflow.runtime.part_owner import PartOwner

if TYPE_CHECKING:
    from kvflow.runtime.assembly import RegisteredCache
    from kvflow.runtime.supervisor import Supervisor


class Prefixes(Part):
    """Shares prefixes of prompts with other engines, and pulls theirs: `Runtime(config, parts=[Prefixes()])`.

    An engine whose runtime has no such part answers no question for a prefix.
    """

    name = "prefix"

    def __init__(self) -> None:
        self.answers = {SeekRequest: self._answer}
        self._owner = PartOwner(self)
        self._rates = LoadRates()
        self._pulls: Pulls | None = None
        self._shared: SharedPrefixes | None = None

    def __repr__(self) -> str:
        return "<kvflow.prefix.Prefixes>"

    def share(self, cache: PrefixCache, *, pinned_blocks_max: int | None = None) -> SharedPrefixes:
        """Answer peers that look for a prefix by what an engine's prefix cache has, until the KV cache is unregistered.

        A peer's question is answered in one turn of the loop, by an ordinary lease on the longest prefix that is there.

        Args:
            cache: the prefix cache; it is asked on the runtime's loop.
            pinned_blocks_max: blocks that may be pinned for readers at once; a quarter of the KV cache if None.
                Questions for more are answered with a miss.

        Returns:
            What is shared, to take blocks back (`SharedPrefixes.reclaim`), or to end it.

        Raises:
            UsageError: it is no PrefixCache, the runtime is a consumer or shares one already, no runtime with a
                registered KV cache has this part, or this is not its loop.
            RuntimeUnavailable: the runtime drains, is closed, or has no KV cache just now.
        """
        registered = self._owner.require("share")
        engine_id = registered.context.config.engine_id
        if registered.context.config.role == "consumer":
            raise UsageError(f"share: the role of engine {engine_id!r} is 'consumer'")
        if self._shared is not None and not self._shared.closed:
            raise UsageError(f"share: the cache of engine {engine_id!r} is shared already")
        self._shared = SharedPrefixes(registered, cache, pinned_blocks_max)
        return self._shared

    async def seek(self, request: PrefixRequest) -> tuple[PrefixOffer, ...]:
        """Ask peers for a prefix, side by side, and read nothing: for engines that make room once they know how much.

        Each offer is a lease: load its ticket within some seconds, or keep it (`Runtime.keep_leases`), and give those
        back that are not used (`Runtime.release_blocks`), or they run out. Cancelling gives back what was offered.

        Args:
            request: whom to ask, and for what. Local blocks need not be named.

        Returns:
            What is offered, the longest first, then the least busy; none if nobody has it, or can be asked.

        Raises:
            RequestError: it cannot be right.
            RuntimeUnavailable: the runtime drains, is closed, or has no KV cache just now.
            UsageError: no runtime with a registered KV cache has this part, or this is not its loop.
        """
        return await self._require("seek").seek(request)

    async def pull(self, request: PrefixRequest) -> PrefixReport:
        """Fill local blocks with as much of a prefix as some peer has: see `PrefixRequest`.

        Peers are asked side by side, and the longest prefix is loaded. If a source fails the next one is read into the
        same blocks once no byte of the first can land any more, within the same deadline. That nothing is found, or
        nothing could be read, is no error: then it has to be computed. Cancelling returns within
        Config.cancel_grace_s; if bytes may still land then, the load is in `Runtime.quarantines`.

        Args:
            request: the prompt's keys, the local blocks, and whom to ask.

        Returns:
            How many tokens are there now, and from whom; what the others said.

        Raises:
            RequestError: it cannot be right; BlocksBusy.
            PeerError, LoadError: a source has failed, and bytes may still land in the blocks: its `quarantine` is the
                load. With `PrefixRequest.rest`, what a load of that raises.
            RuntimeUnavailable, RuntimeBroken: as for loads.
            UsageError: as for `seek`.
        """
        return await self._require("pull").pull(request)

    def learn(self, ticket: Ticket, report: LoadReport) -> None:
        """Note how long a load of an offer took: what an engine that loads offers of `seek` itself tells.

        `PrefixOffer.pull_s` is made from it. Loads of `pull` are noted anyway.

        Args:
            ticket: of the load, the first one if there were several. A load of no prefix is passed over.
            report: of the load.

        Raises:
            RequestError: it is no ticket, or no report.
        """
        checks.instance(ticket, Ticket, "learn: ticket")
        checks.instance(report, LoadReport, "learn: report")
        if ticket.request_id.startswith(PREFIX_OF):
            self._rates.learn(ticket, report)

    @property
    def statistics(self) -> PrefixStatistics | None:
        """Counts since the KV cache was registered; None without one."""
        if self._pulls is None or not self._owner.registered:
            return None
        shared = self._shared
        return self._pulls.statistics(None if shared is None or shared.closed else shared.statistics)

    async def registered(self, runtime: Supervisor, cache: RegisteredCache) -> None:
        """Only for the runtime: see `Part`."""
        self._owner.begin(runtime)
        self._pulls, self._shared = Pulls(cache, self._rates), None

    def end(self, why: Ending, wait_s: float = 0.0) -> None:
        """Only for the runtime: see `Part`."""
        if why is Ending.ABANDONED:
            self._pulls = self._shared = None
            return
        if self._pulls is not None:
            self._pulls.close()
        if self._shared is not None:
            self._shared.close()

    async def drained(self) -> None:
        """Only for the runtime: see `Part`."""
        if self._pulls is not None:
            await self._pulls.drained()

    async def closed(self, timeout_s: float) -> str:
        """Only for the runtime: see `Part`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.drained()
        except TimeoutError:
            return f"a pull of a prefix is still under way after {timeout_s} s"
        return ""

    def _require(self, what: str) -> Pulls:
        self._owner.require(what)
        assert self._pulls is not None, "it is registered with the cache"
        return self._pulls

    def _answer(self, question: SeekRequest) -> Answered:
        if self._shared is None or not self._owner.open:
            return messages.NOTHING_YET
        return self._shared.answer(question)
