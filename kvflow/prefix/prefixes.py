"""The class `Prefixes`, which shares prefixes with peers, and reads prefixes from peers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from kvflow import checks
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import PeerAddress, side_channel_address
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import ConfigError, RequestError, UsageError
from kvflow.prefix.hand_on_request import HandedOnKeysRequest, HandOnRequest
from kvflow.prefix.handing_on import HandingOn, HandOnReport, TakePrefix, TakingOver
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
from kvflow.runtime.channel.protocol import Answered, refusal
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.part import Ending, Part, PartHost, PartOwner, PartRuntime

_COUNTS = ("pulls", "hits", "tokens", "bytes", "failed_sources", "declined", "handed_on_tokens", "taken_over_tokens")


class Prefixes(Part):
    """Optional feature of a runtime that shares prefixes of prompts with peers, and reads prefixes from peers.

    To use it, create the runtime by `Runtime(config, parts=[Prefixes()])`. A runtime without this part refuses peers
    that ask for a prefix.

    Args:
        follow_successors: also ask the engines that take the place of peers that are gone, as the goodbyes of these
            peers have said (`Runtime.drain`). Without CURVE a goodbye can be forged, so that another engine is asked.

    Raises:
        ConfigError: `follow_successors` is no bool.
    """

    name = "prefix"

    def __init__(self, *, follow_successors: bool = False) -> None:
        self._follow_successors = checks.checked(follow_successors, "follow_successors", bool, ConfigError)
        self.answers = {
            SeekRequest: self._answer,
            HandOnRequest: self._answer_hand_on,
            HandedOnKeysRequest: self._answer_keys,
        }
        self._owner = PartOwner(self)
        self._rates = LoadRates()
        self._questions: PrefixSeeker | None = None
        self._counts: dict[str, int] = {}
        self._pulls: set[Pull] = set()
        self._shared: SharedPrefixes | None = None
        self._handing_on: HandingOn | None = None
        self._taking_over: TakingOver | None = None
        """Takes over the prefixes of leaving engines; None unless `accept` was called."""

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

    async def hand_on(
        self,
        successor: GivenPeer,
        prefixes: Sequence[Sequence[bytes]],
        *,
        key_tokens: int,
        bytes_max: int,
        within_s: float,
    ) -> HandOnReport:
        """Offer prefixes to the engine that takes this engine's place, and wait until it has pulled them.

        Call this before `Runtime.drain`, since a draining runtime accepts no new reader. The cache has to be shared
        (`share`) until this call ends: the successor reads the prefixes like any other peer. For an engine of several
        ranks, call this on one rank. If cancelled, stop waiting; the successor then stops before its next prefix.

        Args:
            successor: the successor, in one of the forms of `PrefixRequest.peers`. It must accept prefixes (`accept`).
            prefixes: the keys of each prefix, the most recently used prefix first; at most 65,536 prefixes, and the
                first 65,536 keys of each.
            key_tokens: number of tokens between two keys.
            bytes_max: maximum number of bytes that one rank of the successor reads.
            within_s: maximum seconds that the successor may take; at most an hour.

        Returns:
            The number of prefixes, tokens and bytes that the successor has pulled, and why not more.

        Raises:
            RequestError: an argument is invalid.
            PeerError: the successor does not answer, or refuses, for example because it accepts no prefixes of this
                engine.
            RuntimeUnavailable: the runtime drains, is closed, or has no KV cache at the moment.
            UsageError: no cache is shared, another call is under way, this object is not in the `parts` of a runtime
                with a KV cache, or this is not the runtime's loop.
        """
        host, questions = self._require("hand_on")
        assert self._handing_on is not None, "it is registered with the cache"
        if not isinstance(successor, str | PeerAddress | Ticket | Mapping):
            raise RequestError(
                f"hand_on: successor: expected an address or a ticket, got {checks.short_repr(successor)}"
            )
        offer = self._handing_on.checked(prefixes, key_tokens=key_tokens, bytes_max=bytes_max, within_s=within_s)
        if self._shared is None or self._shared.closed:
            raise UsageError(f"hand_on: no cache of engine {host.context.config.engine_id!r} is shared: call share")
        return await self._handing_on.send(await questions.find_rank(successor), offer)

    def accept(self, take: TakePrefix, *, predecessors: Sequence[str] | None) -> None:
        """Take over the prefixes of leaving engines, until the KV cache is unregistered.

        Without this call a leaving engine's offer is refused. A further call replaces both arguments; offers that have
        been accepted go on.

        Args:
            take: function of this engine, called on the runtime's loop for each offered prefix. It pulls the prefix
                from `HandedOnPrefix.holder` into blocks that it can spare, puts them in the prefix cache, and returns
                the number of pulled tokens; None if it has no room. Cancelled when the offer's time is over.
            predecessors: addresses of the engines, such as "tcp://10.0.0.7:5600", of which offers are accepted. None
                accepts any engine that reaches this one: only with CURVE, or behind a firewall.

        Raises:
            RequestError: `take` cannot be called, or `predecessors` are no addresses.
            RuntimeUnavailable: the runtime drains, is closed, or has no KV cache at the moment.
            UsageError: this object is not in the `parts` of a runtime with a KV cache, or this is not the runtime's
                loop.
        """
        host = self._owner.require("accept")
        if not callable(take):
            raise RequestError(f"accept: take: expected a function, got {checks.short_repr(take)}")
        known = None
        if predecessors is not None:
            given = checked_peers(predecessors, "accept: predecessors")
            known = frozenset(side_channel_address(one, "accept: predecessors") for one in given)
        if self._taking_over is None:
            self._taking_over = TakingOver(host, self._counts, take, known)
        else:
            self._taking_over.accept(take, known)

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
        self._questions = PrefixSeeker(host, self._rates, follow_successors=self._follow_successors)
        self._shared = None
        self._pulls = set()
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._handing_on, self._taking_over = HandingOn(host, self._counts), None

    def end(self, why: Ending, wait_s: float = 0.0) -> None:
        """Only for the runtime: cancel all questions to peers, and stop sharing, as `Part.end` says."""
        if why is Ending.ABANDONED:
            self._questions = self._shared = self._handing_on = self._taking_over = None
            return
        if self._taking_over is not None:
            self._taking_over.close()
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
        self._questions = self._shared = self._handing_on = self._taking_over = (
            None  # the engine's prefix cache may refer to tensors
        )
        return ""

    def _require(self, what: str) -> tuple[PartHost, PrefixSeeker]:
        host = self._owner.require(what)
        assert self._questions is not None, "it is registered with the cache"
        return host, self._questions

    def _answer(self, question: SeekRequest) -> Answered:
        if self._shared is None or not self._owner.open:
            return messages.NOTHING_YET
        return self._shared.answer(question)

    def _answer_hand_on(self, question: HandOnRequest) -> Answered:
        if self._taking_over is None or not self._owner.open:
            return refusal("this engine takes over no prefixes of other engines: its `Prefixes.accept` was not called")
        return self._taking_over.answer(question)

    def _answer_keys(self, question: HandedOnKeysRequest) -> Answered:
        return refusal("no prefix is handed on") if self._handing_on is None else self._handing_on.answer(question)
