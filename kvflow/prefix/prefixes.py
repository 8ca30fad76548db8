"""The class `Prefixes`, which shares prefixes with peers, and reads prefixes from peers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from kvflow import checks
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import RequestError, UsageError
from kvflow.prefix.load_rates import LoadRates
from kvflow.prefix.prefix_cache import PrefixCache
from kvflow.prefix.prefix_requests import (
    GivenPeer,
    PrefixOffer,
    PrefixReport,
    PrefixRequest,
    PrefixStatistics,
    checked_peers,
    checked_prefix_request,
)
from kvflow.prefix.pull import Pull
from kvflow.prefix.seek import PrefixSeeker
from kvflow.prefix.seek_request import REQUEST_ID_PREFIX, SeekRequest
from kvflow.prefix.sharing import SharedPrefixes
from kvflow.runtime.channel.protocol import Answered
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.part import Ending, Part, PartHost, PartOwner, PartRuntime


class Prefixes(Part):
    """Optional feature of a runtime that shares prefixes of prompts with peers, and reads prefixes from peers.

    To use it, create the runtime by `Runtime(config, parts=[Prefixes()])`. A runtime without this part refuses peers
    that ask for a prefix.
    """

    name = "prefix"

    def __init__(self) -> None:
        self.answers = {SeekRequest: self._answer}
        self._owner = PartOwner(self)
        self._rates = LoadRates()
        self._questions: PrefixSeeker | None = None
        self._counts: dict[str, int] = {}
        self._pulls: set[Pull] = set()
        self._shared: SharedPrefixes | None = None

    def __repr__(self) -> str:
        return "<kvflow.prefix.Prefixes>"

    def share(self, cache: PrefixCache, *, pinned_blocks_max: int | None = None) -> SharedPrefixes:
        """Let peers read prefixes from an engine's prefix cache, until the KV cache is unregistered.

        A peer that asks for a prefix gets an ordinary lease on the longest beginning of that prefix in the cache.

        Args:
            cache: the prefix cache. Its methods are called on the runtime's loop.
            pinned_blocks_max: maximum number of blocks that are pinned for all readers together; None: a quarter of the
                KV cache's blocks. If a lease would exceed this number, the peer gets no prefix.

        Returns:
            A handle that can take blocks back and end the sharing.

        Raises:
            UsageError: `cache` is no PrefixCache, the runtime is a consumer or shares a cache already, this object is
                not in the `parts` of a runtime with a KV cache, or this is not the runtime's loop.
            RuntimeUnavailable: the runtime drains, is closed, or has no KV cache at the moment.
        """
        host = self._owner.require("share")
        engine_id = host.context.config.engine_id
        if host.context.config.role == "consumer":
            raise UsageError(f"share: the role of engine {engine_id!r} is 'consumer'")
        if self._shared is not None and not self._shared.closed:
            raise UsageError(f"share: the cache of engine {engine_id!r} is shared already")
        self._shared = SharedPrefixes(host, cache, pinned_blocks_max)
        return self._shared

    async def seek(self, request: PrefixRequest) -> tuple[PrefixOffer, ...]:
        """Ask all peers for a prefix, and return their offers without reading.

        Call this if the engine allocates blocks only after an offer; otherwise call `pull`.

        Each offer has a lease. Load the offer's ticket within a few seconds, or keep the lease open by
        `Runtime.keep_leases`. Release an unused offer by `Runtime.release_blocks`. If `seek` is cancelled, it releases
        all offers.

        Args:
            request: the keys, and the peers to ask. `block_ids` may be empty.

        Returns:
            The offers of more tokens than `request.cached_tokens`: most tokens first and, if equal, the least busy
                engine first.

        Raises:
            RequestError: the request is invalid.
            RuntimeUnavailable: the runtime drains, is closed, or has no KV cache at the moment.
            UsageError: this object is not in the `parts` of a runtime with a KV cache, or this is not the runtime's
                loop.
        """
        host, questions = self._require("seek")
        checked = checked_prefix_request(request, "seek", host.context.config.limits)
        search = await questions.ask(checked, checked.answer_within_s)
        holders = search.holders
        search.end(holders)
        return tuple(holder.offer for holder in holders)

    async def connect(self, peers: Sequence[GivenPeer], within_s: float | None = None) -> None:
        """Connect to peers before the first question to them: a handshake takes longer than a question may.

        A peer that cannot be reached is left to the first question to it. Cancelling stops the waiting.

        Args:
            peers: the peers, in the forms of `PrefixRequest.peers`.
            within_s: seconds that this call may take; None: Config.handshake_timeout_s.

        Raises:
            RequestError: `peers` or `within_s` is invalid.
            RuntimeUnavailable: the runtime drains, is closed, or has no KV cache at the moment.
            UsageError: this object is not in the `parts` of a runtime with a KV cache, or this is not the runtime's
                loop.
        """
        host, questions = self._require("connect")
        checked = checked_peers(peers, "connect: peers")
        if not checks.try_call(lambda: all(isinstance(peer, str | PeerAddress | Ticket | Mapping) for peer in checked)):
            raise RequestError(f"connect: peers: expected addresses and tickets, got {checks.short_repr(peers)}")
        wanted_s = host.context.config.handshake_timeout_s if within_s is None else within_s
        await questions.connect(checked, checks.seconds(wanted_s, "connect: within_s"))

    async def pull(self, request: PrefixRequest) -> PrefixReport:
        """Fill local blocks with the longest beginning of a prefix that a peer has in its prefix cache.

        All peers are asked at the same time, and the longest offered prefix is loaded. If that load fails, the next
        peer's prefix is read into the same blocks, within the same deadline, once no byte from the first peer can land.
        If no prefix could be read, no error is raised: the report has 0 pulled tokens, and the engine has to compute
        the prefix. If `pull` is cancelled, it returns within Config.cancel_grace_s. If bytes may still land in the
        blocks after that, `Runtime.quarantines` lists the load.

        Args:
            request: the keys of the prompt, the local blocks, and the peers to ask.

        Returns:
            The report of the pull.

        Raises:
            RequestError: the request is invalid, or (BlocksBusy) a local block is in use by another request.
            LayoutError: a tensor of the cache has moved since the cache was registered.
            PeerError, LoadError: reading from a peer failed, and bytes may still land in the blocks. Await `settled()`
                of the error's `quarantine` before using the blocks.
            RuntimeUnavailable: the runtime drains, is closed, or has no KV cache at the moment.
            RuntimeBroken: a task of the runtime has died.
            UsageError: this object is not in the `parts` of a runtime with a KV cache, or this is not the runtime's
                loop.
        """
        host, questions = self._require("pull")
        checked = checked_prefix_request(request, "pull", host.context.config.limits)
        under_way, pull = self._pulls, Pull(host, self._rates, self._counts, checked)
        under_way.add(pull)
        try:
            return await pull.run(questions)
        finally:
            under_way.discard(pull)
            pull.ended.set()

    def learn(self, ticket: Ticket, report: LoadReport) -> None:
        """Record how long the load of an offer took, for later values of `PrefixOffer.pull_s`.

        Call this after loading an offer of `seek`; `pull` records its own loads.

        Args:
            ticket: the load's first ticket. Nothing is recorded for a ticket that is not from `seek`.
            report: report of the load.

        Raises:
            RequestError: `ticket` is no Ticket, or `report` no LoadReport.
        """
        checks.instance(ticket, Ticket, "learn: ticket")
        checks.instance(report, LoadReport, "learn: report")
        if ticket.request_id.startswith(REQUEST_ID_PREFIX):
            self._rates.learn(ticket, report)

    @property
    def statistics(self) -> PrefixStatistics | None:
        """Counts of pulls and of shared prefixes since the last KV cache was registered; None before the first one."""
        if not self._counts:
            return None
        sharing = None if self._shared is None or self._shared.closed else self._shared.statistics
        return PrefixStatistics(open_requests=len(self._pulls), sharing=sharing, **self._counts)

    async def registered(self, runtime: PartRuntime, host: PartHost) -> None:
        """Only for the runtime: prepare for a newly registered KV cache, as `Part.registered` says."""
        self._owner.begin(runtime)
        self._questions, self._shared = PrefixSeeker(host, self._rates), None
        self._pulls = set()
        self._counts = dict.fromkeys(("pulls", "hits", "tokens", "bytes", "failed_sources", "declined"), 0)

    def end(self, why: Ending, wait_s: float = 0.0) -> None:
        """Only for the runtime: cancel all questions to peers, and stop sharing, as `Part.end` says."""
        if why is Ending.ABANDONED:
            self._questions = self._shared = None
            return
        if self._questions is not None:
            self._questions.close()
        if self._shared is not None:
            self._shared.close()

    async def drained(self) -> None:
        """Only for the runtime: wait until all pulls have ended, as `Part.drained` says."""
        for pull in tuple(self._pulls):  # a call of `seek` ends by itself, and holds no local blocks
            await pull.ended.wait()

    async def release(self, timeout_s: float) -> str:
        """Only for the runtime: wait until all pulls have ended, as `Part.release` says.

        Return "", or a message that a pull is still under way after `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self.drained()
        except TimeoutError:
            return f"a pull of a prefix is still under way after {timeout_s} s"
        self._questions = self._shared = None  # the engine's prefix cache may refer to tensors
        return ""

    def _require(self, what: str) -> tuple[PartHost, PrefixSeeker]:
        host = self._owner.require(what)
        assert self._questions is not None, "it is registered with the cache"
        return host, self._questions

    def _answer(self, question: SeekRequest) -> Answered:
        if self._shared is None or not self._owner.open:
            return messages.NOTHING_YET
        return self._shared.answer(question)
