"""From a ticket to the ranks that a load reads from or has to tell: who they are, their connections, their leases.

A ticket names one or more ranks of an engine. Which of the engine's ranks concern us follows from how both engines
are cut (`core.plan.topology`); those whose lease the ticket does not name are asked for it.

Tickets are not signed, so what one says of its engine is believed step by step. What cannot be right is refused before
anybody is asked. Then one rank is asked, and only if it says itself that its engine is cut like that the others are, a
few at a time, and no more of them once one has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvflow.config import Config
from kvflow.core.plan import topology
from kvflow.core.plan.descriptors import BlockIds, check_block_ids
from kvflow.core.plan.topology import Parallelism, Rank
from kvflow.core.protocol import messages
from kvflow.core.protocol.ticket import RankLease, Ticket, read_ticket
from kvflow.errors import KVFlowError, LeaseExpired, PeerIncompatible, RequestError
from kvflow.runtime.peers.link import Address, Connection, LocalRank
from kvflow.runtime.peers.peer import Peer
from kvflow.runtime.peers.table import Peers

DIALS_AT_ONCE_MAX = 8
"""How many ranks of one engine are connected at once, for one load."""

_QUESTIONS_AT_ONCE_MAX = 16
_ASK_AGAIN_FIRST_S, _ASK_AGAIN_MOST_S = 0.002, 0.05
_PLANS_MAX = 256

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Source:
    """One rank of the producer, connected, and its lease for this load."""

    peer: Peer
    connection: Connection
    lease: RankLease
    not_expired_before_s: float
    """Until when, on our clock, the lease cannot have run out; it may have been ended."""

    def __str__(self) -> str:
        return f"{self.peer.engine_id} ({self.peer.rank}) at {self.peer.address}"

    def block_ids(self, ticket: Ticket) -> BlockIds:
        """The rank's blocks, checked; RequestError names the first that it does not have."""
        ids = ticket.block_ids if self.lease.block_ids is None else self.lease.block_ids
        what = f"request {ticket.request_id!r}: remote_block_ids of {ticket.engine_id!r}"
        return check_block_ids(ids, num_blocks=self.connection.num_blocks, what=what)


class _Plan(NamedTuple):
    """What follows from how the producer's engine is cut."""

    impossible: str
    """Why no engine that we could read from is cut like this; "" if one may be."""
    problems: tuple[str, ...]
    places: tuple[tuple[int, int], ...]
    """(pp_rank, tp_rank) of each rank that we read from or tell."""


class _Room:
    """How much one search for a ticket's ranks does at once. One that finds all connected needs none of it."""

    @cached_property
    def dials(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(DIALS_AT_ONCE_MAX)

    @cached_property
    def questions(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(_QUESTIONS_AT_ONCE_MAX)


class Sources:
    """Finds the sources of loads."""

    def __init__(self, config: Config, local: LocalRank, peers: Peers) -> None:
        self._config = config
        self._local = local
        self._peers = peers
        self._plans: dict[Parallelism, _Plan] = {}

    def read(self, ticket: Ticket | Mapping[str, Any]) -> Ticket:
        """A ticket that somebody gave us, checked. RequestError names what is wrong with it."""
        return read_ticket(ticket, self._config.limits.block_ids_max)

    async def find(self, ticket: Ticket, found: Callable[[Source], None]) -> list[Source]:
        """Every rank that a load with a checked ticket reads from or has to tell, its own stages' layers complete.

        `found` gets each one as soon as it is known, while others are still waited for. Raises a PeerError,
        LeaseExpired if a rank has restarted or its lease is over, Overloaded if there is no room for more peers, or
        RequestError if the ticket cannot be right, or a rank's address cannot be known. Cancelling stops the waiting;
        handshakes that have begun go on.
        """
        ranks = self.whereabouts(ticket)
        if len(ranks) > 1:
            peer, connection = await self._connect(ticket, first_to_ask(ticket, ranks))
            self._check(ticket, peer, connection)
        room = _Room()
        all_found = await wait_for_all([self._find_one(ticket, rank, found, room) for rank in ranks])
        stages = {peer.rank.pp: connection.cache_share.layers for peer, connection, _ in all_found}
        ours = self._local.cache_share
        problem = topology.missing_layers(ours.layers, list(stages.values()), whole=ours.pp_size == 1)
        if problem:
            raise self._incompatible(ticket, [problem])
        return [source for _, _, source in all_found if source is not None]

    def whereabouts(self, ticket: Ticket) -> list[Address]:
        """The ranks that a checked ticket may concern, and where they listen.

        Nobody is asked, so some may hold nothing of what we hold. There is none if the ticket's engine does not go
        with ours. RequestError if the ticket cannot be right, or an address cannot be known.
        """
        plan = self._plan(ticket.parallelism)
        if plan.impossible:
            raise RequestError(f"ticket of request {ticket.request_id!r}: {plan.impossible}")
        ranks = [Rank(ticket.dp_rank, pp, tp) for pp, tp in plan.places]
        return [Address(ticket.engine_id, rank, ticket.address_of(rank)) for rank in ranks]

    def ranks_of(self, parallelism: Parallelism, dp_rank: int, what: str) -> list[Rank]:
        """The ranks of an engine cut like this that we read from or have to tell. RequestError if none can be."""
        plan = self._plan(parallelism)
        if plan.impossible:
            raise RequestError(f"{what}: {plan.impossible}")
        return [Rank(dp_rank, pp, tp) for pp, tp in plan.places]

    def succeeded(self, sources: Sequence[Source]) -> None:
        """Bytes were read from all of them."""
        for source in sources:
            self._peers.succeeded(source.peer)

    def failed(self, source: Source, why: str) -> None:
        """A read from it failed."""
        self._peers.failed(source.connection, why)

    async def check(self, ticket: Ticket) -> None:
        """PeerIncompatible if the ticket itself shows that its engine's cut does not go with ours. Before `find`."""
        plan = self._plan(ticket.parallelism)
        if plan.problems and not plan.impossible:  # which `find` refuses
            first = Rank(ticket.dp_rank, ticket.first.pp_rank, ticket.first.tp_rank)
            await self._connect(ticket, Address(ticket.engine_id, first, ticket.address))  # names them all
            raise self._incompatible(ticket, plan.problems)

    def _plan(self, parallelism: Parallelism) -> _Plan:
        """Whom a load from an engine cut like this concerns. Remembered: engines are cut in a few ways only."""
        found = self._plans.get(parallelism)
        if found is None:
            if len(self._plans) >= _PLANS_MAX:
                self._plans.clear()
            found = self._plans[parallelism] = self._make_plan(parallelism)
        return found

    def _make_plan(self, parallelism: Parallelism) -> _Plan:
        """The ranks are counted before there is a list of them: a ticket can say a million."""
        ours = self._local.cache_share
        theirs = msgspec.structs.replace(ours, tp_rank=0, pp_rank=0, **parallelism._asdict())
        stages = topology.stages_max(ours)
        if parallelism.pp_size > stages:
            return _Plan(
                f"pp_size {parallelism.pp_size}, but the model has {stages} layers, and each stage has one", (), ()
            )
        problems = tuple(topology.differences(ours, theirs))
        sources = () if problems else topology.sources_of(ours, theirs)
        count, most = parallelism.pp_size * len(sources), self._config.limits.load_ranks_max
        if count > most:
            engine = f"tp_size {parallelism.tp_size}, pp_size {parallelism.pp_size}"
            return _Plan(f"{engine}: a load concerns {count} ranks of it, at most {most} (load_ranks_max)", (), ())
        return _Plan(
            "", problems, tuple((pp, source.tp_rank) for pp in range(parallelism.pp_size) for source in sources)
        )

    async def _connect(self, ticket: Ticket, at: Address) -> tuple[Peer, Connection]:
        named = ticket.find(at.rank)
        peer = self._peers.get(*at)
        incarnation = named.incarnation if named else None
        return peer, await self._peers.connect(peer, incarnation, ticket.request_id)

    async def _find_one(
        self, ticket: Ticket, at: Address, found: Callable[[Source], None], room: _Room
    ) -> tuple[Peer, Connection, Source | None]:
        """A rank's connection, and it as a source unless we have no layer in common."""
        named = ticket.find(at.rank)
        known = self._peers.is_connected(at, named.incarnation if named else None)
        if not known:
            await room.dials.acquire()
        peer, connection = await self._connect(ticket, at)
        self._check(ticket, peer, connection)
        if not known:
            room.dials.release()  # after one that failed no other rank gets its place
        if connection.share == 0:
            return peer, connection, None
        if named is None or not named.lease_id:
            named = await self._ask_for_lease(ticket, peer, room)
            connection = await self._peers.connect(peer, named.incarnation, ticket.request_id)
            self._check_incarnation(ticket, peer, connection, named.incarnation)
        if connection.seal_address(named.seal_index) is None:
            raise RequestError(f"ticket: seal_index {named.seal_index} is not one of the peer's")
        not_expired_before_s = self._peers.not_expired_before_s(peer, named.incarnation, named.expires_s)
        source = Source(peer, connection, named, not_expired_before_s)
        found(source)
        return peer, connection, source

    def _check(self, ticket: Ticket, peer: Peer, connection: Connection) -> None:
        """PeerIncompatible or LeaseExpired if a rank is not what the ticket says of it."""
        check_cut(ticket, peer, connection)
        named = ticket.find(peer.rank)
        if named is not None and connection.share > 0:
            self._check_incarnation(ticket, peer, connection, named.incarnation)

    def _check_incarnation(self, ticket: Ticket, peer: Peer, connection: Connection, wanted: str) -> None:
        if connection.incarnation != wanted:
            raise LeaseExpired(
                f"request {ticket.request_id!r}: engine {ticket.engine_id!r} has restarted: the ticket is of "
                f"incarnation {wanted}, the engine is {connection.incarnation}",
                request_id=ticket.request_id,
                peer=peer.address,
            )

    async def when_served(self, ask: Callable[[], Awaitable[ResultT | messages.NoLease]]) -> ResultT | messages.NoLease:
        """The answer of a rank that a ticket does not name: it may open its lease a moment later, so `ask` again.

        NoLease if the lease has ended, or is still not there after Limits.lease_wait_s.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._config.limits.lease_wait_s
        pause_s = _ASK_AGAIN_FIRST_S
        while True:
            reply = await ask()
            if not isinstance(reply, messages.NoLease) or reply.ended or loop.time() >= give_up_s:
                return reply
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _ASK_AGAIN_MOST_S)

    async def _ask_for_lease(self, ticket: Ticket, peer: Peer, room: _Room) -> RankLease:
        """Ask a rank that the ticket does not name for its lease. Raises a PeerError, or LeaseExpired."""
        question = messages.LeaseRequest(
            reader=self._local.reader,
            target=peer.at.target,
            request_id=ticket.request_id,
            num_tokens=ticket.num_tokens,
            blocks_digest=ticket.blocks_digest,
        )

        async def ask() -> messages.LeaseFound | messages.NoLease:
            async with room.questions:
                return await self._peers.find_lease(peer, question)

        reply = await self.when_served(ask)
        if isinstance(reply, messages.NoLease):
            raise LeaseExpired(
                f"request {ticket.request_id!r}: {ticket.engine_id!r} ({peer.rank}) at {peer.address} has no lease "
                f"for it: {'it has ended' if reply.ended else f'none within {self._config.limits.lease_wait_s} s'}",
                request_id=ticket.request_id,
                peer=peer.address,
            )
        lease = RankLease(
            pp_rank=peer.rank.pp,
            tp_rank=peer.rank.tp,
            lease_id=reply.lease_id,
            seal_index=reply.seal_index,
            incarnation=reply.incarnation,
            expires_s=reply.expires_s,
            host=ticket.first.host,
            port=ticket.first.port,
            block_ids=reply.block_ids,
        )
        lease.check(len(ticket.block_ids))
        return lease

    def _incompatible(self, ticket: Ticket, problems: Sequence[str]) -> PeerIncompatible:
        return PeerIncompatible(
            f"engine {ticket.engine_id!r} at {ticket.address}: it is not compatible: {'; '.join(problems)}",
            peer=ticket.address,
            engine_id=ticket.engine_id,
        )


def first_to_ask(ticket: Ticket, ranks: Sequence[Address]) -> Address:
    """Whom to ask before the others: the first of the ranks that the ticket names itself."""
    return next((one for one in ranks if ticket.find(one.rank) is not None), ranks[0])


def check_cut(ticket: Ticket, peer: Peer, connection: Connection) -> None:
    """PeerIncompatible unless a rank's engine is cut as the ticket says."""
    said, true = ticket.parallelism, connection.parallelism
    if said != true:
        name, mine, theirs = next(
            entry for entry in zip(Parallelism._fields, said, true, strict=True) if entry[1] != entry[2]
        )
        raise peer.at.failure(PeerIncompatible, f"{name}: the ticket says {mine}, the rank {theirs}")


async def wait_for_all(waits: Sequence[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Wait for all at once; the first failure ends the others and is raised."""
    if len(waits) == 1:
        return [await waits[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait) for wait in waits]
    except BaseExceptionGroup as problems:
        ours, others = problems.split(KVFlowError)
        if ours is None or others is not None:
            raise
        raise ours.exceptions[0] from None
    return [task.result() for task in tasks]
