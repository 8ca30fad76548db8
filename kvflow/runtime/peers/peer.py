"""One remote rank as a reader sees it: its connection, its failures and the handshake under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from kvflow.checks import counted, printable, short_repr
from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.cache.regions import HOST, Regions
from kvflow.core.plan import topology
from kvflow.core.plan.block_map import BlockMap, RegionMap
from kvflow.core.plan.descriptors import BlockIds, Chunks
from kvflow.core.plan.topology import CacheShare, Parallelism, layers_of, parallelism_of
from kvflow.core.policy.circuit import NEVER_FAILED
from kvflow.core.policy.contacts import Contact, ContactState
from kvflow.core.policy.states import PEER_TABLE, PeerEvent, PeerState, fire
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.compatibility import Compatibility
from kvflow.core.protocol.proof import Proof, quick_read_max_s
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import PeerError, PeerIncompatible, PeerUnreachable
from kvflow.logs import logger_of
from kvflow.transport.base import AgentName

logger = logger_of(__name__)

T = TypeVar("T")

INCARNATIONS_MAX = 64
PEER_TEXT_CHARS_MAX = 300
_ERROR_CHARS_MAX = 500
_QUESTIONS_AT_ONCE_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRank:
    """Description of this rank, which is sent to peers and compared with the descriptions of peers.

    `reader`: name of this rank's own agent. `caller`: this rank's engine, rank and side channel address, which its
    handshakes give to peers. `cache_shares` (which layers this rank has) and `regions` (the memory of these layers)
    have one entry for each set of layers of the same shape.
    """

    reader: str
    caller: Address
    compatibility: Compatibility
    cache_shares: tuple[CacheShare, ...]
    regions: tuple[Regions, ...]
    groups: tuple[GroupFacts, ...]


class Connection:
    """The connection to a peer after its handshake, shared by all loads: facts from the peer's metadata."""

    def __init__(
        self,
        agent: AgentName,
        metadata: messages.Metadata,
        regions: Sequence[Regions],
        local: LocalRank,
        lease_notifier: LeaseNotifier,
    ) -> None:
        self.agent = agent
        self.incarnation = metadata.incarnation
        self.layers = layers_of(metadata.cache_shares)
        self.cache_shares = metadata.cache_shares
        self.parallelism = parallelism_of(metadata.cache_shares)
        self.groups = metadata.groups
        self.ticket_groups = ticket_groups(metadata.groups)
        counts = {share.group: held.num_blocks for share, held in zip(metadata.cache_shares, regions, strict=True)}
        self.num_blocks = tuple(counts[group] for group in range(len(self.groups)))
        """Number of blocks in the peer's cache, by group of layers."""
        self.whole = tuple(group.whole for group in self.groups)
        """By group: True if the group's blocks hold a prompt from the first token on (no sliding window, no recurrent
        state)."""
        self.block_maps = block_maps = tuple(_block_maps(metadata, local, regions))
        """Block maps, one for each pair of a local and a remote set of layers that have layers and heads in common.

        A block map says which bytes of a remote block go where in a local block. If there is none, loads read nothing
        from this peer, and at most notify it.
        """
        self.report_share = topology.report_share(local.cache_shares, metadata.cache_shares)
        self.staged = metadata.staged
        self.quick_read_max_s = quick_read_max_s(metadata.seals.hold_s)
        # A seal can be read along with blocks only if those are in host memory on both sides, as seals are: one read
        # has one kind of memory on each side. The seal of a staged rank must be seen before anything is read.
        self.carries_seals = (
            len(block_maps) > 0
            and not self.staged
            and block_maps[0].local.device == block_maps[0].remote.device == HOST
        )
        self.seals_address, self.seal_count = metadata.seals.address, metadata.seals.count
        self.lease_notifier = lease_notifier
        self.users = 0
        """Number of loads that hold the connection; until it is 0 the peer's agent stays in the transport."""
        self.unused: asyncio.Event | None = None
        """Set when `users` becomes 0; None until a task first waits for that."""
        self.complete_with: Sequence[Connection] = ()
        """Connections of the last load of which this connection was the first. Together their ranks have all local
        layers, so another load over the same connections need not check that again.
        """
        self.reads_directly: bool | None = None
        """True if every read from the peer goes straight into the cache, without buffers; None until computed."""
        self.region_map: RegionMap | None = None
        """Mapping of remote to local regions for the fast planner of small loads (`match_few`). None if that planner
        cannot be used for this peer, and before the first load over this connection has been planned."""

    def __repr__(self) -> str:
        return f"<Connection {self.agent}, {counted(self.users, 'load')}>"

    async def wait_idle(self) -> None:
        """Wait until no load holds the connection."""
        while self.users:
            if self.unused is None or self.unused.is_set():
                self.unused = asyncio.Event()
            await self.unused.wait()


@dataclass(slots=True, eq=False)
class Handshake:
    """A handshake under way. Every load that needs the peer waits for `future`, the connection."""

    future: asyncio.Future[Connection]
    started_s: float
    task: asyncio.Task[None] | None = None
    contact: Contact | None = None
    """The turn of this handshake in the queue of first contacts; None without a turn."""
    waiters: int = 0

    def add_waiters(self, count: int) -> None:
        """Add `count`, which may be negative, to the number of loads that wait for the handshake."""
        self.waiters += count
        if self.contact is not None:
            self.contact.wanted = self.waiters > 0

    @property
    def waits_for_turn(self) -> bool:
        return self.contact is None or self.contact.state is ContactState.WAITING

    def start_turn(self, contact: Contact) -> None:
        self.contact = contact
        self.add_waiters(0)  # all loads may have stopped waiting before the turn


class Peer:
    """One rank of a remote engine at one side channel address: its state, connection, failures and handshake."""

    def __init__(self, address: Address, now_s: float) -> None:
        self.engine_id, self.rank, self.address = address
        self.at = address
        self.label = f"{self.engine_id} ({self.rank}) at {self.address}"
        self.state = PeerState.UNKNOWN
        self.was_connected = False
        self.connection: Connection | None = None
        self.handshake: Handshake | None = None
        self.circuit = NEVER_FAILED
        self.last_error = ""
        self.last_error_type: type[PeerError] = PeerUnreachable
        """Class of the last error that began a back-off. Loads that fail during the back-off raise the same class."""
        self.has_delivered = False
        """True once a load has read fresh bytes from the peer."""
        self.last_used_s = now_s
        self.leases_kept = 0
        """Number of the peer's leases that this rank renews now. Above 0 the peer is not evicted as unused."""
        self.tried_incarnations: set[str] = set()
        """The incarnation of the last connection, and the incarnations in tickets that led to handshakes after that.

        A ticket of any other incarnation shows that the peer has restarted, and leads to one handshake even during a
        back-off.
        """
        self.past_incarnations: deque[str] = deque(maxlen=INCARNATIONS_MAX)
        self.questions = asyncio.Semaphore(_QUESTIONS_AT_ONCE_MAX)
        """Semaphore that limits concurrent questions to the peer, and so the sockets that a silent peer occupies."""

    def __repr__(self) -> str:
        return f"<Peer {self.engine_id} at {self.address}: {self.state}>"

    @property
    def busy(self) -> bool:
        """True if a load holds the connection, a handshake is under way, or this rank renews leases of the peer."""
        used = self.connection is not None and self.connection.users > 0
        return used or self.handshake is not None or self.leases_kept > 0

    def fire(self, event: PeerEvent, why: str = "") -> None:
        before, self.state = self.state, fire(PEER_TABLE, self.state, event)
        logger.info("peer %s at %s: %s -> %s%s", self.engine_id, self.address, before, self.state, why and f" ({why})")

    def note_error(self, why: str) -> None:
        """Store `why`, without the leading name of the peer, as the text of the peer's last error."""
        self.last_error = why.removeprefix(f"{self.at}: ")[:_ERROR_CHARS_MAX]

    def usable_connection(self, incarnation: str | None) -> Connection | None:
        """Return the connection to use for a ticket of `incarnation`, or None if a handshake is needed first.

        A handshake is needed if there is no connection, or if `incarnation` is new: neither the connection's
        incarnation nor one of `past_incarnations`. A past incarnation needs no handshake, because a load with a ticket
        of that incarnation fails in any case.
        """
        if self.connection is None or incarnation is None or incarnation in self.past_incarnations:
            return self.connection
        return self.connection if self.connection.incarnation == incarnation else None


@dataclass(slots=True, eq=False)
class Source:
    """One producer rank that a load reads from, or only notifies when the load ends: connection, lease, and proof.

    The proof decides whether bytes that were read are still those of the leased prompt.
    """

    peer: Peer
    connection: Connection
    lease: RankLease
    seal_address: int
    """Address of the lease's seal in the producer's memory."""
    proof: Proof
    tables: Sequence[BlockIds] = ()
    """Block ids on the producer that the lease offers, one table for each group; empty if no block is read."""
    chunks: dict[BlockMap, list[Chunks]] = field(default_factory=dict)
    """Chunks to read, keyed by block map. A chunk has as many tokens as the smaller of a local and a remote block."""
    seal_slot: int = -1
    """Index of the local slot into which the lease's seal is read; -1 until a slot is taken."""


@contextmanager
def hold_connections(sources: Sequence[Source]) -> Iterator[None]:
    """Keep the agents of the connections of `sources` in the transport until the `with` body ends."""
    for source in sources:
        source.connection.users += 1
    try:
        yield
    finally:
        for source in sources:
            source.connection.users -= 1
            if not source.connection.users and source.connection.unused is not None:
                source.connection.unused.set()


ReadTicket: TypeAlias = Callable[[Ticket | Mapping[str, Any]], Ticket]


class Resolver(Protocol):
    """Interface that resolves tickets: it connects the ranks that a ticket names and finds their leases.

    See `ticket_resolver.TicketResolver`.
    """

    @property
    def read_ticket(self) -> ReadTicket: ...

    def resolve_nowait(self, ticket: Ticket, on_source: Callable[[Source], None]) -> list[Source] | None: ...

    async def resolve(self, ticket: Ticket, on_source: Callable[[Source], None]) -> list[Source]: ...


class LeaseNotifier(Protocol):
    """Interface that sends producers notifications: a lease is still needed, or was read. No method waits.

    There is one for kvflow ranks, and one for stock peers (vLLM's own NixlConnector).
    """

    heartbeat_s: float | None
    """Seconds between two `notify_needed` calls for a lease. None: a fixed share of the lease's own `ttl_s`."""

    def notify_needed(self, sources: Sequence[Source]) -> int:
        """Notify a producer rank that this rank still needs the leases of `sources`, all at that rank.

        Return the number of leases.
        """

    def notify_read(self, source: Source) -> None:
        """Notify the producer rank of `source` that this rank no longer needs the leased blocks of `source`."""


def blocks_by_group(groups: Sequence[GroupFacts], tables: Sequence[Sized]) -> dict[str, int]:
    """Return the number of block ids by group name; `tables` has one table of ids for each of `groups`."""
    return {group.name: len(ids) for group, ids in zip(groups, tables, strict=True)}


def _block_maps(metadata: messages.Metadata, local: LocalRank, regions: Sequence[Regions]) -> Iterator[BlockMap]:
    """Yield one block map for each pair of a local and a remote set of layers that have layers and heads in common.

    `local` describes this rank, the other arguments the remote rank.
    """
    for index, remote_index, local_share, remote_share in topology.common_shares(
        local.cache_shares, metadata.cache_shares
    ):
        source = topology.source_at(local_share, remote_share)
        if source is not None and source.heads:
            block_map = BlockMap(
                local.regions[index],
                regions[remote_index],
                heads=source,
                local_layers=local_share.layers,
                remote_layers=remote_share.layers,
                opaque=not local_share.plain,
                local_set=index,
                local_group=local_share.group,
                remote_group=remote_share.group,
                local_shard=local_share.shard,
                remote_shard=remote_share.shard,
            )
            if block_map.layer_pairs:
                yield block_map


def ticket_groups(groups: tuple[GroupFacts, ...]) -> tuple[GroupFacts, ...]:
    """Return `groups` in the form that tickets use: empty if there is only one group of full attention, else all."""
    return () if len(groups) == 1 and groups[0].kind is GroupKind.FULL else groups


def peer_text(text: str, chars_max: int = PEER_TEXT_CHARS_MAX) -> str:
    """Return `text`, which a peer has sent, made printable and cut to `chars_max` characters for errors and logs."""
    return printable(text, chars_max)


def check_parallelism(ticket: Ticket, peer: Peer, connection: Connection) -> None:
    """Raise PeerIncompatible if `connection` has another parallelism or other groups than the ticket says."""
    if ticket.groups != connection.ticket_groups:
        told, has = (
            [f"{group.name} ({group.kind})" for group in groups] for groups in (ticket.groups, connection.groups)
        )
        raise peer.at.failure(
            PeerIncompatible, f"groups: the ticket says {short_repr(told)}, the rank {short_repr(has)}"
        )
    for name, claimed, actual in zip(Parallelism._fields, ticket.parallelism, connection.parallelism, strict=True):
        if claimed != actual:
            raise peer.at.failure(PeerIncompatible, f"{name}: the ticket says {claimed}, the rank {actual}")


def peer_to_evict(peers: Collection[Peer], *, asked_before_s: float, used_before_s: float) -> Peer | None:
    """Return the peer to evict to make room for a new peer, or None if none may be evicted.

    Choose by the first of these rules that yields a peer:
    1. the oldest peer that was never connected and has no handshake under way;
    2. a peer that was never connected, with a handshake that began before `asked_before_s`, or for which no load waits;
    3. the least recently used disconnected peer that was connected before and is not busy;
    4. the least recently used connected peer that is not busy and was not used after `used_before_s`. A peer that was
       used later stays, because a load may be about to hold its connection.
    """
    never_met = [peer for peer in peers if not peer.was_connected]
    asked = ((peer, peer.handshake) for peer in never_met if peer.handshake)
    silent = (peer for peer, handshake in asked if not handshake.waiters or handshake.started_s < asked_before_s)
    unmet = next((peer for peer in never_met if peer.handshake is None), None) or next(silent, None)
    if unmet is not None:
        return unmet
    unused = [
        peer
        for peer in peers
        if peer.was_connected and not peer.busy and (peer.connection is None or peer.last_used_s <= used_before_s)
    ]
    return min(unused, key=lambda peer: (peer.connection is not None, peer.last_used_s), default=None)
