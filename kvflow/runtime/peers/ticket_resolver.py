"""From a ticket to the ranks that its load reads from or reports to: their connections and their leases.

A ticket names one or more ranks of an engine. The parallelism of both engines decides which ranks the load needs
(`core.plan.ranks`). A needed rank is asked for its lease if the ticket does not have it. The rank answers a
`LeaseRequest` as soon as it knows something that the reader does not, or after some seconds.

Tickets are not signed, so trust grows in steps. An impossible ticket is refused before any rank is asked. Then one rank
is asked for its engine's parallelism. Only if the answer agrees with the ticket, the other ranks are asked, a few at a
time, until one fails.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias, TypeVar

import msgspec

from kvflow.checks import counted, is_name
from kvflow.config import rank_offset
from kvflow.core.bounds import INCARNATION_CHARS_MAX
from kvflow.core.plan import topology
from kvflow.core.plan.descriptors import check_block_ids
from kvflow.core.plan.ranks import RankPlan, plan_ranks
from kvflow.core.plan.topology import Parallelism, Rank
from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address, PeerAddress
from kvflow.core.protocol.messages import LeaseAnswerState
from kvflow.core.protocol.proof import SEAL_SIZE_BYTES, SealProof
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.ticket import Ticket, check_lease, check_weights, read_ticket
from kvflow.errors import (
    LeaseExpired,
    PeerError,
    PeerIncompatible,
    PrefillFailed,
    ProtocolError,
    RequestError,
)
from kvflow.hosts import PORT_MAX, address_at, loopback_hint, split_address
from kvflow.logs import logger_of
from kvflow.runtime.peers.peer import Connection, Peer, ReadTicket, Source, check_parallelism, peer_text
from kvflow.runtime.peers.table import Peers
from kvflow.runtime.rank import RankContext
from kvflow.runtime.tasks import for_each

logger = logger_of(__name__)

VISITS_AT_ONCE_MAX = 8
"""Maximum number of ranks of an engine that are connected at the same time for one ticket."""

_QUESTIONS_AT_ONCE_MAX = 16
_PLANS_MAX = 256


@lru_cache(maxsize=_PLANS_MAX)
def _compare_layers(
    local: tuple[int, ...], stages: tuple[tuple[int, ...], ...], *, whole: bool
) -> tuple[str, Collection[int], Collection[int]]:
    """Compare `local`, the layers of this rank, with `stages`, the layers of each pipeline stage of a producer.

    Return (text that names missing layers, or ""; draft model layers that only this rank has; draft model layers that
    only the producer has). `whole`: this rank has all layers of its engine. If not, the third result is empty.
    """
    left_out = topology.layers_left_out(local, [layer for layers in stages for layer in layers])
    only_local = left_out & {*local}
    return topology.missing_layers(local, stages, whole=whole), only_local, left_out - only_local if whole else ()


ResultT = TypeVar("ResultT")
OnSource = Callable[[Source], None]


_ConnectedRank: TypeAlias = tuple[Peer, Connection, Source | None]
"""A connected producer rank: its peer, its connection, and its source.

The source is None if the rank's lease is not needed, or not known yet.
"""


class TicketResolver:
    """The `Resolver` of kvflow tickets: it connects the ranks of a ticket and finds their leases."""

    def __init__(self, context: RankContext, peers: Peers) -> None:
        config, local = context.config, context.local
        self._config = config
        self._clock = context.clock
        self._weights = context.weights
        self.read_ticket: ReadTicket = partial(read_ticket, block_ids_max=config.limits.block_ids_max)
        """Function that decodes and checks a ticket given by a caller. RequestError if the ticket is invalid."""
        self._local = local
        self._layers = topology.layers_of(local.cache_shares)
        self._peers = peers
        self.list_offset = zlib.crc32(local.reader.encode())
        """Number that decides at which engine of a list this rank begins, when it contacts all engines of the list.

        The number differs between ranks and incarnations, so ranks that start together do not all contact the same
        engine first.
        """
        self._plans: BoundedMap[tuple[Parallelism, int], RankPlan] = BoundedMap(_PLANS_MAX)
        self._warned_of_drafts: BoundedMap[tuple[str, str], None] = BoundedMap(_PLANS_MAX)
        """Bounded set of producers, as (engine id, address), about which `_warn_of_drafts` has warned."""

    async def resolve(self, ticket: Ticket, on_source: OnSource) -> list[Source]:
        """Connect the ranks that a load with a checked ticket needs. Together they have all layers of this rank.

        Return a source for each rank that the load reads from or only notifies at its end. `on_source` is called with
        each source as soon as it is known. LeaseExpired if a rank restarted or its lease has ended; PrefillFailed if a
        rank answers that the prompt will not be computed; WeightsMismatch if a rank has computed the blocks with other
        weights; RequestError if the ticket is impossible, or the address of a rank cannot be derived. If cancelled,
        stop waiting; handshakes under way go on.
        """

        async def visit(at: Address) -> _ConnectedRank:
            lease, source = ticket.find(at.rank), None
            peer, connection = await self.connect_rank(ticket, at)
            check_parallelism(ticket, peer, connection)
            if connection.report_share.numerator > 0 and lease is not None:
                if lease.lease_id:
                    source = self.source_from_ticket(ticket, peer, connection, lease)
                    on_source(source)
                else:
                    self._check_incarnation(ticket, peer, connection, lease.incarnation)
            return peer, connection, source

        async def complete(reached: _ConnectedRank) -> _ConnectedRank:
            peer, connection, source = reached
            if source is None and connection.report_share.numerator > 0:
                lease = await self.find_lease(ticket, peer)
                # The rank may have restarted, or the peer been evicted, while it was asked (simulator, seed 5457).
                connection = await self._peers.connect(peer, lease.incarnation, ticket.request_id)
                source = self.source_from_answer(ticket, peer, connection, lease, lease.block_tables)
                on_source(source)
            return peer, connection, source

        for lease in ticket.ranks:
            if lease.lease_id:  # else the rank's answer says with which weights it has computed the blocks
                check_weights(ticket, lease, self._weights.version)
        await self.check_compatible(ticket)
        reached = await for_each(await self.visit_ranks(ticket, visit), complete, _QUESTIONS_AT_ONCE_MAX)
        self._check_layers(ticket, [(peer, connection) for peer, connection, _ in reached])
        return [source for *_, source in reached if source is not None]

    def resolve_nowait(self, ticket: Ticket, on_source: OnSource) -> list[Source] | None:
        """Return the same sources as `resolve` without waiting, or None if `resolve` has to wait.

        No waiting is needed if the ticket has the lease of every needed rank and all these ranks are connected. If None
        is returned, `on_source` has not been called. PeerIncompatible if the ranks do not have all layers of this rank.
        """
        parallelism, engine_id, known = ticket.parallelism, ticket.engine_id, self._peers.by_address
        weights = self._weights.version
        plan = self._plans.get((parallelism, ticket.dp_rank))
        if plan is None or not plan.ranks:
            return None
        reached: list[tuple[Peer, Connection]] = []
        connections: list[Connection] = []
        sources: list[Source] = []
        for rank in plan.ranks:
            lease = ticket.leases.get((rank.pp, rank.tp))
            if lease is None or not lease.lease_id or (peer := known.get((engine_id, rank, lease.address))) is None:
                return None
            connection = peer.connection
            if connection is None or connection.incarnation != lease.incarnation:
                return None
            cut_alike = connection.parallelism == parallelism and connection.ticket_groups == ticket.groups
            if not cut_alike or not 0 <= lease.seal_index < connection.seal_count:
                return None
            if lease.weights != weights:
                return None
            reached.append((peer, connection))
            connections.append(connection)
            if connection.report_share.numerator > 0:
                sources.append(_source(peer, connection, lease))
        if connections[0].complete_with != connections:
            self._check_layers(ticket, reached)
            connections[0].complete_with = connections
        now_s = self._clock.now_s()
        for peer, _ in reached:
            peer.last_used_s = now_s
        for source in sources:
            on_source(source)
        return sources

    def _check_layers(self, ticket: Ticket, reached: Sequence[tuple[Peer, Connection]]) -> None:
        """Raise PeerIncompatible unless the ranks in `reached` together have all layers that this rank has.

        If only layers of a draft model differ, log a warning instead.
        """
        stages: dict[int, Mapping[str, tuple[int, ...]]] = {}
        for peer, connection in reached:
            stages[peer.rank.pp] = connection.layers
        for segment, local in self._layers.items():
            by_stage = []
            for layers in stages.values():
                by_stage.append(layers.get(segment, ()))
            problem, only_local, only_remote = _compare_layers(local, tuple(by_stage), whole=self._config.pp_size == 1)
            if problem:
                raise self._incompatible_error(ticket, [f"{segment}: {problem}" if segment else problem])
            if only_local or only_remote:
                self._warn_of_drafts(ticket, only_local, only_remote)

    def _warn_of_drafts(self, ticket: Ticket, only_local: Collection[int], only_remote: Collection[int]) -> None:
        """Log, once for each engine and address, that some layers of a draft model are on one side only.

        `only_local`: layers that only this rank has. `only_remote`: layers that only the producer has.
        """
        known = (ticket.engine_id, ticket.address)
        if known in self._warned_of_drafts:
            return
        self._warned_of_drafts[known] = None
        logger.warning(
            "engine %r at %s: some layers of a draft model are on one side only (ours %d, theirs %d); loads leave them"
            " out. Outputs stay correct, but fewer draft tokens are accepted after these loads",
            *(*known, len(only_local), len(only_remote)),
        )

    async def ask_about_lease(self, ticket: Ticket, peer: Peer) -> messages.LeaseAnswer:
        """Ask the producer rank `peer` for the lease of the ticket's request, and return the answer.

        While the lease is not open yet, ask again, until `limits.lease_wait_s` after the call. The rank delays each
        further answer until the lease is open, but at most some seconds.
        """
        self._peers.check_back_off(peer, None)
        give_up_s = asyncio.get_running_loop().time() + self._config.limits.lease_wait_s
        question = messages.LeaseRequest(
            reader=self._local.reader,
            target=peer.at,
            request_id=ticket.request_id,
            num_tokens=ticket.num_tokens,
            blocks_digest=ticket.blocks_digest,
        )
        answer = await self._peers.ask_once(peer, question)
        return (
            answer
            if answer.state is not LeaseAnswerState.WAITING
            else await self._peers.ask_until_answered(peer, question, give_up_s)
        )

    async def find_lease(self, ticket: Ticket, peer: Peer) -> RankLease:
        """Ask the producer rank `peer` for the lease of the ticket's request, and return the lease once it is open.

        LeaseExpired if the lease has ended or is not open after `limits.lease_wait_s`; PrefillFailed if the prompt
        cannot be computed.
        """
        answer = await self.ask_about_lease(ticket, peer)
        who = f"{ticket.engine_id!r} ({peer.rank}) at {peer.address}"
        if answer.state is LeaseAnswerState.FAILED:
            why = f"{who} will not compute the prompt: {peer_text(answer.reason)}"
            raise PrefillFailed(
                f"request {ticket.request_id!r}: {why}", request_id=ticket.request_id, peer=peer.address
            )
        if answer.state is LeaseAnswerState.WAITING:
            within = f"none within {self._config.limits.lease_wait_s} s (limits.lease_wait_s)"
            raise expired_error(ticket, peer, f"{who} has no lease for it: {within}")
        if answer.state is LeaseAnswerState.ENDED or answer.lease is None:
            raise expired_error(ticket, peer, f"{who} has no lease for it: it has ended")
        lease = lease_from_answer(peer.at, answer.lease)
        try:
            check_lease(lease, ticket)
        except RequestError as error:  # the peer's fault: the caller's ticket does not have this lease
            raise wrong_lease_error(peer.at, error) from error
        return lease

    async def visit_ranks(
        self, ticket: Ticket, visit: Callable[[Address], Coroutine[Any, Any, ResultT]]
    ) -> list[ResultT]:
        """Await `visit` for the address of each rank that a load with a checked ticket may need. Return the results.

        Results are in the order of `addresses_of`. A rank that the ticket names is visited first and alone, then the
        others, a few at a time. If a visit raises, or this task is cancelled, cancel the visits under way and begin no
        other.
        """
        ranks = self.addresses_of(ticket)
        if not ranks:
            return []
        # One rank has to confirm the ticket: one of 575 bytes had a million ranks connected at once (decision 0012).
        first = first_to_ask(ticket, ranks)
        results = {first: await visit(first)}
        if others := [at for at in ranks if at != first]:
            results |= zip(others, await for_each(others, visit, VISITS_AT_ONCE_MAX), strict=True)
        return [results[at] for at in ranks]

    def addresses_of(self, ticket: Ticket) -> list[Address]:
        """Compute, without asking any rank, the addresses of the ranks that a load with a checked ticket may need.

        The list may have ranks that share no layer with this rank, which only a connection shows. The list is empty if
        the ticket's engine is not compatible. RequestError if the ticket is impossible or an address cannot be derived.
        """
        ranks = self.ranks_of(ticket.parallelism, ticket.dp_rank, f"ticket of request {ticket.request_id!r}")
        return [Address(ticket.engine_id, rank, ticket.address_of(rank)) for rank in ranks]

    def ranks_of(self, parallelism: Parallelism, dp_rank: int, what: str) -> Sequence[Rank]:
        """Return the ranks that this rank must connect, in DP group `dp_rank` of a producer engine with `parallelism`.

        RequestError, beginning with `what`, if no engine can have this parallelism.
        """
        plan = self._plan(parallelism, dp_rank)
        if plan.impossible:
            raise RequestError(f"{what}: {plan.impossible}")
        return plan.ranks

    async def ranks_at(self, engine: PeerAddress, *, every_rank: bool = False) -> list[Address]:
        """Connect the rank that `engine` addresses. Return the addresses of the engine's ranks that this rank needs.

        `every_rank`: return the addresses of all ranks in the DP group of the addressed rank. RequestError if addresses
        cannot be derived.
        """
        host, port = split_address(engine.address, what="address")
        here = Rank(engine.dp_rank, engine.pp_rank, engine.tp_rank)
        peer = self._peers.get(Address(engine.engine_id, here, engine.address))
        parallelism = (await self._peers.connect(peer, None)).parallelism
        sizes = {"tp_size": parallelism.tp_size, "pp_size": parallelism.pp_size}
        base, wanted = port - rank_offset(*here, **sizes), []
        what = f"engine {engine.engine_id!r} at {engine.address}"
        ranks = self.ranks_of(parallelism, engine.dp_rank, what)
        if every_rank:
            ranks = parallelism.ranks(engine.dp_rank)
        for rank in ranks:
            there = base + rank_offset(*rank, **sizes)
            if not 0 < there <= PORT_MAX:
                raise RequestError(f"{what}: port {port} of {here} puts {rank} at port {there}")
            wanted.append(Address(engine.engine_id, rank, address_at(host, there)))
        return wanted

    def source_from_ticket(self, ticket: Ticket, peer: Peer, connection: Connection, lease: RankLease) -> Source:
        """Return the source for `lease`, which the ticket has.

        LeaseExpired if the lease is of another incarnation than the connection, RequestError if the lease's seal index
        is outside the peer's seals.
        """
        self._check_incarnation(ticket, peer, connection, lease.incarnation)
        if not 0 <= lease.seal_index < connection.seal_count:
            seals = f"{peer.label} has {counted(connection.seal_count, 'seal')}"
            raise RequestError(f"seal_index {lease.seal_index} of its lease: {seals}")
        return _source(peer, connection, lease)

    def source_from_answer(
        self, ticket: Ticket, peer: Peer, connection: Connection, lease: RankLease, tables: Sequence[Sequence[int]]
    ) -> Source:
        """Return the source for `lease`, which `peer` has sent in an answer, after checking the lease.

        `tables`: leased block ids by group, or empty. LeaseExpired if the lease is of another incarnation than the
        connection; WeightsMismatch if `peer` has computed the blocks with other weights; ProtocolError if the lease is
        impossible, since the peer is at fault, not the caller.
        """
        check_weights(ticket, lease, self._weights.version)
        counts = connection.num_blocks
        if tables and len(tables) != len(counts):
            what = f"a lease of blocks of {counted(len(tables), 'group')}"
            raise peer.at.failure(ProtocolError, f"{what}, it has {len(counts)}")
        try:
            for ids, count in zip(tables, counts, strict=False):
                check_block_ids(ids, num_blocks=count, what="block_ids")
            return self.source_from_ticket(ticket, peer, connection, lease)
        except RequestError as error:
            raise wrong_lease_error(peer.at, error) from error

    async def check_compatible(self, ticket: Ticket) -> None:
        """Raise PeerIncompatible if an engine with the ticket's parallelism cannot fill this rank's cache.

        Before raising, connect the first rank that the ticket names. If that handshake fails, raise its error in place
        of this one, because it lists all differences between the engines.
        """
        plan = self._plan(ticket.parallelism, ticket.dp_rank)
        if plan.problems and not plan.impossible:  # `addresses_of` refuses what is impossible
            first = Rank(ticket.dp_rank, ticket.first.pp_rank, ticket.first.tp_rank)
            await self.connect_rank(ticket, Address(ticket.engine_id, first, ticket.address))  # names all differences
            raise self._incompatible_error(ticket, plan.problems)

    def _plan(self, parallelism: Parallelism, dp_rank: int) -> RankPlan:
        """Return which ranks to connect in DP group `dp_rank` of an engine with `parallelism`. Plans are cached."""
        plan = self._plans.get((parallelism, dp_rank))
        if plan is None:
            plan = plan_ranks(self._local.cache_shares, parallelism, dp_rank, self._config.limits.load_ranks_max)
            self._plans[parallelism, dp_rank] = plan
        return plan

    async def connect_rank(self, ticket: Ticket, at: Address) -> tuple[Peer, Connection]:
        """Return the peer at `at` and its connection, after a handshake if there is none."""
        named, peer = ticket.find(at.rank), self._peers.get(at)
        return peer, await self._peers.connect(peer, named.incarnation if named else None, ticket.request_id)

    def _check_incarnation(self, ticket: Ticket, peer: Peer, connection: Connection, wanted: str) -> None:
        if connection.incarnation != wanted:
            lives = f"the ticket is of incarnation {wanted}, the engine is {connection.incarnation}"
            if connection.agent == self._local.reader:
                back = f"its address {peer.address} leads back to this engine, which has the same name"
                raise expired_error(
                    ticket, peer, f"engine {ticket.engine_id!r}: {back}{loopback_hint(peer.address)}: {lives}"
                )
            raise expired_error(ticket, peer, f"engine {ticket.engine_id!r} has restarted or slept: {lives}")

    def _incompatible_error(self, ticket: Ticket, problems: Sequence[str]) -> PeerIncompatible:
        what = f"engine {ticket.engine_id!r} at {ticket.address}: it is not compatible"
        error = PeerIncompatible(f"{what}: {'; '.join(problems)}", peer=ticket.address, engine_id=ticket.engine_id)
        self._peers.note_incompatible(error)
        return error


def _source(peer: Peer, connection: Connection, lease: RankLease) -> Source:
    """Return the source for `lease`, with a `SealProof`, which decides by the lease's seal whether bytes are fresh."""
    proof = SealProof(
        grows=connection.staged or lease.pending,
        # Blocks of a prefix are not held after the lease, so how long a read took proves nothing (decision 0003).
        quick_read_max_s=connection.quick_read_max_s if lease.held else 0.0,
    )
    address = connection.seals_address + lease.seal_index * SEAL_SIZE_BYTES
    return Source(peer, connection, lease, address, proof)


def lease_from_answer(at: Address, lease: RankLease) -> RankLease:
    """Return a copy of `lease`, which the rank at `at` sent in an answer, with that rank and its address filled in.

    ProtocolError if the lease is malformed.
    """
    if not lease.lease_id or not is_name(lease.incarnation, INCARNATION_CHARS_MAX):
        details = (
            f"lease_id of {counted(len(lease.lease_id), 'character')}, incarnation {peer_text(lease.incarnation, 80)!r}"
        )
        raise at.failure(ProtocolError, f"the lease in its answer is impossible: {details}")
    host, port = split_address(at.address, what="peer")
    place = {"pp_rank": at.rank.pp, "tp_rank": at.rank.tp, "host": host, "port": port}
    return msgspec.structs.replace(lease, **place)


def wrong_lease_error(at: Address, error: RequestError) -> PeerError:
    """Return the ProtocolError to raise because the rank at `at` sent an impossible lease: `error` says why."""
    return at.failure(ProtocolError, f"the lease in its answer is impossible: {error}")


def expired_error(ticket: Ticket, peer: Peer, why: str) -> LeaseExpired:
    return LeaseExpired(f"request {ticket.request_id!r}: {why}", request_id=ticket.request_id, peer=peer.address)


def first_to_ask(ticket: Ticket, ranks: Sequence[Address]) -> Address:
    """Return the rank to connect first: the first of `ranks` that the ticket names, or `ranks[0]` if it names none."""
    return next((address for address in ranks if ticket.find(address.rank) is not None), ranks[0])
