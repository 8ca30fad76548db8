"""Asks several engines how much of a prefix each has in its cache.

One task asks each engine. The task continues after `PrefixSeeker.ask` has returned, so that a late offer is
released.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from kvflow import checks
from kvflow.checks import counted
from kvflow.core.cache.groups import GroupKind
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address, PeerAddress, peer_at, side_channel_address
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.ticket import Ticket, too_many_block_ids
from kvflow.errors import KVFlowError, PeerRefused, PeerUnreachable, ProtocolError, RequestError
from kvflow.hosts import split_address
from kvflow.prefix.keys import KEY_BYTES
from kvflow.prefix.load_rates import LoadRates
from kvflow.prefix.prefix_requests import PEERS_MAX, GivenPeer, PrefixOffer, PrefixRequest, token_size_bytes
from kvflow.prefix.search import Search
from kvflow.prefix.seek_request import KEYS_MAX, REQUEST_ID_PREFIX, SeekRequest
from kvflow.runtime.part import PartHost
from kvflow.runtime.peers.peer import Connection, peer_text
from kvflow.runtime.peers.ticket_resolver import lease_from_answer

_ADDRESSES_MAX = 1 << 10


class _Engine(NamedTuple):
    """An engine to be asked for a prefix, with its ranks."""

    asked_ranks: list[Address]
    """Ranks to ask: those that this reader rank reads from or, if `PrefixRequest.every_rank`, all ranks."""
    other_ranks: list[RankLease]
    """Ranks that this reader rank does not read from. The offer's ticket must name them, but they are not asked."""
    connection: Connection
    """Connection to one of `asked_ranks`."""
    fixed_ports: bool


_RankOffer: TypeAlias = tuple[Address, messages.Offer, RankLease]
"""Address of a rank, its offer of a prefix, and the offered lease."""


class PrefixSeeker:
    """Asks other engines for prefixes that can be read into one registered KV cache."""

    def __init__(self, host: PartHost, rates: LoadRates, *, follow_successors: bool = False) -> None:
        """`follow_successors`: also ask the engines that take the place of engines that have said goodbye."""
        self._context = host.context
        self._local = host.context.local
        self._token_bytes = token_size_bytes(host.context.local)
        self._resolver = host.kvflow_resolver
        self._peers = host.peers
        self._remote_leases = host.leases
        self._side_channel = host.side_channel
        self._rates = rates
        self._tasks: set[asyncio.Task[None]] = set()
        self._addresses: BoundedMap[str, PeerAddress] = BoundedMap(_ADDRESSES_MAX)
        """For each address, as requests give it: the engine and rank that listen there."""
        self._follow_successors = follow_successors
        self._successors: BoundedMap[str, PeerAddress] = BoundedMap(_ADDRESSES_MAX)
        """For each peer that is gone, by its name in requests: the rank that takes its place."""
        self._unanswered: dict[str, tuple[float, float]] = {}
        """For each peer: loop time of the oldest unanswered question, and the seconds allowed for the answer."""

    def close(self) -> None:
        """Cancel all questions to peers. Reports then say that these peers have not answered in time."""
        for task in self._tasks:
            task.cancel()

    async def ask(self, request: PrefixRequest, within_s: float) -> Search:
        """Ask all peers in `request` for the prefix. Return a search with the answers, the best holders first.

        Wait until all peers have answered, but at most `within_s`. If a peer offers the whole prefix after t seconds,
        wait at most t seconds longer. The search accepts later answers until `Search.end`. If `ask` is cancelled, all
        offers are released.

        A peer is skipped if it has left an earlier question unanswered for longer than `within_s`, and for longer than
        the seconds that were allowed for that question.
        """
        loop, question_id = asyncio.get_running_loop(), self._context.token_hex(16)
        begun_s, most = loop.time(), float(len(request.keys) * request.key_tokens)
        peers = {_peer_name(peer): peer for peer in request.peers}
        if self._follow_successors:
            self._add_successors(peers)
        search = Search(peers, self._remote_leases.release_soon)
        try:
            for name, peer in peers.items():
                asked_s, had_s = self._unanswered.setdefault(name, (begun_s, within_s))
                if begun_s - asked_s >= max(had_s, within_s):
                    search.set_reason(name, name, "it has not answered an earlier question yet")
                    continue
                body = self._ask_peer(search, name, peer, request, question_id)
                task = self._context.spawn(body, name=f"kvflow-seek {request.request_id}")
                search.tasks.append(task)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            waiting, ends_s = {*search.tasks}, begun_s + within_s
            while waiting and (left_s := ends_s - loop.time()) > 0:
                _, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if any(holder.offer.num_tokens >= most for holder in search.holders):
                    ends_s = min(ends_s, begun_s + 2 * (loop.time() - begun_s))
                    most = math.inf  # only the first full match shortens the wait
        except BaseException:
            search.end()
            raise
        search.sort(int(question_id[:8], 16))
        return search

    def _add_successors(self, peers: dict[str, GivenPeer]) -> None:
        """Add the successors of peers that are gone to `peers`, and the successors of these.

        A peer that is back at its address has no successor any longer.
        """
        names = list(peers)
        for name in names:
            peer = peers[name]
            known = self._addresses.get(peer) if isinstance(peer, str) else peer
            if isinstance(known, PeerAddress):
                gone = known.engine_id, Rank(known.dp_rank, known.pp_rank, known.tp_rank)
                if (successor := self._peers.successors.get(gone)) is None:
                    self._successors.pop(name, None)
                else:
                    self._successors[name] = successor
            found = self._successors.get(name)
            if found is not None and len(peers) < PEERS_MAX and found.address not in map(_address_of, peers.values()):
                peers[_peer_name(found)] = found
                names.append(_peer_name(found))

    async def connect(self, peers: Iterable[GivenPeer], within_s: float) -> None:
        """Connect to the ranks of `peers` that questions will ask, all at once, for at most `within_s` seconds.

        A peer that cannot be reached is left to the first question to it.
        """

        async def one(peer: GivenPeer) -> None:
            with contextlib.suppress(KVFlowError, TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._find_ranks(peer, every_rank=False)

        await asyncio.gather(*map(one, peers))

    async def _ask_peer(
        self, search: Search, given: str, peer: GivenPeer, request: PrefixRequest, question_id: str
    ) -> None:
        """Ask one engine, and record its answer in `search`. `given`: the peer as the request names it.

        Task `kvflow-seek <request>`: begun by a search, for each engine that it asks. The task ends when the engine has
        answered or failed.
        """
        name, answer = given, None
        try:
            engine = await self._find_ranks(peer, every_rank=request.every_rank)
            name = self._peers.get(engine.asked_ranks[0]).label
            search.set_reason(given, name)
            answer = await self._ask_engine(engine, name, request, question_id)
        except KVFlowError as error:
            if isinstance(peer, str):
                self._addresses.pop(peer, None)
            answer = str(error)
        self._unanswered.pop(given, None)
        if isinstance(answer, str):
            search.set_reason(given, name, answer)
        else:
            search.add_offer(given, answer)

    async def _ask_engine(
        self, engine: _Engine, name: str, request: PrefixRequest, question_id: str
    ) -> PrefixOffer | str:
        """Ask the ranks of one engine for the prefix. Return the engine's offer, or the reason why there is none."""
        ranks = engine.asked_ranks
        begun_s = asyncio.get_running_loop().time()
        every = max(-(-len(request.keys) // KEYS_MAX), 1)
        keys, key_tokens = b"".join(request.keys[every - 1 :: every]), request.key_tokens * every

        async def one(at: Address) -> _RankOffer | None:
            question = SeekRequest(
                reader=self._local.reader,
                target=at,
                request_id=question_id,
                keys=keys,
                key_tokens=key_tokens,
                alone=not request.every_rank,
                weights=self._context.weights.version,
            )
            answer = await self._peers.ask_once(self._peers.get(at), question)
            if answer.state is messages.LeaseAnswerState.FAILED:  # the rank cannot say which tokens it has
                raise at.failure(PeerRefused, peer_text(answer.reason))
            if answer.offer is None or answer.lease is None:
                return None
            return _check_tokens(question, (at, answer.offer, lease_from_answer(at, answer.lease)))

        replies = await asyncio.gather(*map(one, ranks), return_exceptions=True)
        took_s = asyncio.get_running_loop().time() - begun_s
        offers = [reply for reply in replies if isinstance(reply, tuple)]
        problem = next((reply for reply in replies if isinstance(reply, BaseException)), None)
        engine = await self._reconnect(engine, offers)
        ticket = _join_offers(engine, question_id, offers, self._context.config.limits.block_ids_max)
        if len(offers) < len(ranks) or ticket is None or ticket.num_tokens <= request.cached_tokens:
            if ticket is not None:
                self._remote_leases.release_soon(ticket)
            if problem is not None:
                raise problem
            return "it has no block of the prefix" if not offers else "it has no more tokens than the local cache"
        try:
            for at, _, _ in offers:
                self._check_blocks(ticket, at)
        except KVFlowError:
            self._remote_leases.release_soon(ticket)
            raise
        queued = max(offer.queued_bytes for _, offer, _ in offers)
        tokens, token_s = ticket.num_tokens - request.cached_tokens, request.recompute_s_per_token
        pull_s = self._rates.expected_s(ticket.engine_id, tokens, queued / max(self._token_bytes, 1))
        return PrefixOffer(
            peer=name,
            ticket=ticket,
            num_tokens=ticket.num_tokens,
            queued_bytes=queued,
            round_trip_s=took_s,
            pull_s=None if pull_s is None else took_s + pull_s,
            compute_s=None if token_s is None else tokens * token_s,
        )

    async def _reconnect(self, engine: _Engine, offers: Sequence[_RankOffer]) -> _Engine:
        """Connect again to each rank that has registered another KV cache since the last handshake.

        Return `engine` with a valid connection. `offers` name the incarnation of each rank's present cache.
        """
        connection = engine.connection
        for at, _, lease in offers:
            peer = self._peers.get(at)
            if peer.connection is not None:
                connection = await self._peers.connect(peer, lease.incarnation)
        return engine._replace(connection=connection)

    def _check_blocks(self, ticket: Ticket, at: Address) -> None:
        """Raise ProtocolError if `ticket` names blocks that the KV cache of the rank `at` does not have.

        Raise LeaseExpired if the rank has registered its KV cache again since the offer, WeightsMismatch if its blocks
        are of other weights.
        """
        peer, lease = self._peers.get(at), ticket.find(at.rank)
        if peer.connection is not None and lease is not None:
            self._resolver.source_from_answer(
                ticket, peer, peer.connection, lease, lease.block_tables or ticket.block_tables
            )

    async def _find_ranks(self, peer: GivenPeer, *, every_rank: bool) -> _Engine:
        """Connect to an engine, and find the ranks to ask. If that fails, or there are none, raise a KVFlowError."""
        if isinstance(peer, str):
            peer = self._addresses.get(peer) or await self._identify(peer)
        if isinstance(peer, PeerAddress):
            ranks, fixed = await self._resolver.ranks_at(peer, every_rank=every_rank), True
        else:
            ticket = self._resolver.read_ticket(peer)
            await self._resolver.check_compatible(ticket)
            ranks, fixed = self._resolver.addresses_of(ticket), ticket.fixed_ports
            if every_rank:
                every = ticket.parallelism.ranks(ticket.dp_rank)
                ranks = [Address(ticket.engine_id, rank, ticket.address_of(rank)) for rank in every]
        if every_rank:
            return _Engine(ranks, [], await self._peers.connect(self._peers.get(ranks[0]), None), fixed)
        wanted, others = list[Address](), list[RankLease]()
        for at in ranks:
            connection = await self._peers.connect(self._peers.get(at), None)
            if connection.report_share.numerator > 0:
                wanted.append(at)
                connected = connection
            else:
                host, port = split_address(at.address, what="peer")
                others.append(RankLease.without_lease_id(at.rank, connection.incarnation, host, port))
        if not wanted:
            raise RequestError("no rank of the engine has blocks for this reader rank")
        return _Engine(wanted, others, connected, fixed)

    async def find_rank(self, peer: GivenPeer) -> Address:
        """Return the address of the rank that `peer` names. Raise a KVFlowError if it is none, or does not answer."""
        if isinstance(peer, str):
            peer = await self._identify(peer)
        if isinstance(peer, PeerAddress):
            return Address(peer.engine_id, Rank(peer.dp_rank, peer.pp_rank, peer.tp_rank), peer.address)
        ticket = self._resolver.read_ticket(peer)
        return self._resolver.addresses_of(ticket)[0]

    async def _identify(self, given: str) -> PeerAddress:
        """Ask the rank that listens at address `given` for its engine and rank."""
        address = side_channel_address(given if given.startswith("tcp://") else f"tcp://{given}", "address")
        nobody = Address("unknown", Rank(0, 0, 0), address)
        question = messages.MetadataRequest(reader=self._local.reader, target=nobody)
        fingerprint = self._local.compatibility.fingerprint()
        reply = await self._side_channel.ask(question, fingerprint=fingerprint)
        why = f"{given}: it does not name its engine:"
        if not isinstance(reply, messages.Refusal):
            raise ProtocolError(f"{why} a {type(reply).__name__}", peer=address)
        if reply.listens is None:
            raise PeerUnreachable(f"{why} {checks.printable(reply.reason, 300)}", peer=address)
        known = self._addresses[given] = peer_at(reply.listens._replace(address=address))
        return known


def _peer_name(peer: GivenPeer) -> str:
    """Return the text that names `peer` in reports and error messages."""
    if isinstance(peer, PeerAddress | Ticket):
        return f"{peer.engine_id} at {peer.address}"
    if isinstance(peer, Mapping):
        return checks.short_repr(peer.get("remote_engine_id"))
    return peer if isinstance(peer, str) else checks.short_repr(peer)


def _address_of(peer: GivenPeer) -> str:
    """Return the address at which `peer` is asked, if `peer` says it."""
    if isinstance(peer, PeerAddress | Ticket):
        return peer.address
    return peer if isinstance(peer, str) else ""


def _check_tokens(question: SeekRequest, offered: _RankOffer) -> _RankOffer:
    """Return `offered`, or raise ProtocolError if the offered number of tokens does not fit `question`.

    The number must be a multiple of `question.key_tokens`, and covered by the question's keys.
    """
    at, offer, _ = offered
    keys, key_tokens = len(question.keys) // KEY_BYTES, question.key_tokens
    if not 0 < offer.num_tokens <= keys * key_tokens or offer.num_tokens % key_tokens:
        asked = f"asked for up to {keys * key_tokens}, in steps of {key_tokens}"
        raise at.failure(ProtocolError, f"it offers {counted(offer.num_tokens, 'token')} of a prefix, {asked}")
    return offered


def _join_offers(engine: _Engine, question_id: str, offers: Sequence[_RankOffer], block_ids_max: int) -> Ticket | None:
    """Return one ticket for the offers of an engine's ranks, with the smallest number of tokens that a rank offers.

    Ranks may have a prefix in different blocks. Blocks of a sliding window or of recurrent state fit one number of
    tokens only, so ranks with such groups must offer equally many tokens. If they do not, or if `offers` is empty,
    return None. Raise ProtocolError if a rank's blocks do not fit its tokens.
    """
    if not offers:
        return None
    first, tokens = offers[0][0], min(offer.num_tokens for _, offer, _ in offers)
    connection = engine.connection
    groups, tables, ranks = connection.groups, [], list[RankLease]()
    for at, offer, lease in offers:
        offered = lease.block_tables or offer.block_ids
        if len(offered) != len(groups) or (offer.num_tokens > tokens and not all(group.whole for group in groups)):
            return None
        own = [
            ids[: -(-tokens // group.block_size)] if group.whole else ids
            for group, ids in zip(groups, offered, strict=True)
        ]
        for group, ids in zip(groups, own, strict=True):
            least = group.blocks_needed(tokens)
            most = least if group.kind is GroupKind.STATE else -(-tokens // group.block_size)
            if not least <= len(ids) <= most:
                blocks = f"{counted(len(ids), 'block')} of {counted(group.block_size, 'token')}"
                what = f"it offers {counted(tokens, 'token')} of a prefix in {blocks}"
                raise at.failure(ProtocolError, f"{what}, which take {least}")
        tables.append(own)
        ranks.append(msgspec.structs.replace(lease, block_ids=own[0], more_block_ids=tuple(own[1:])))
    if all(own == tables[0] for own in tables):
        ranks = [msgspec.structs.replace(rank, block_ids=None, more_block_ids=()) for rank in ranks]
    cut: Any = connection.parallelism
    try:
        ticket = Ticket(
            engine_id=first.engine_id,
            request_id=REQUEST_ID_PREFIX + question_id,
            block_ids=tables[0][0],
            more_block_ids=tuple(tables[0][1:]),
            num_tokens=tokens,
            ttl_s=min(offer.ttl_s for _, offer, _ in offers),
            dp_rank=first.rank.dp,
            tp_size=cut.tp_size,
            pp_size=cut.pp_size,
            block_size=cut.block_size,
            kv_heads=cut.kv_heads,
            model_kv_heads=cut.model_kv_heads,
            more_kinds=cut.more,
            groups=connection.ticket_groups,
            fixed_ports=engine.fixed_ports,
            traceparent="",
            prompt_digest="",
            ranks=(*ranks, *engine.other_ranks),
        )
    except RequestError as error:
        raise first.failure(ProtocolError, f"its offer is invalid: {error}") from error
    if ticket.block_ids_count > block_ids_max:
        raise too_many_block_ids(ticket.block_ids_count, block_ids_max, f"the offer of {first}")
    return ticket
