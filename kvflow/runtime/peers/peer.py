"""One rank of a remote engine as a reader knows it: its connection, its failures, its handshake."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from kvflow.checks import counted, printable, shown
from kvflow.core.cache.groups import GroupFacts
from kvflow.core.cache.regions import Regions
from kvflow.core.plan import topology
from kvflow.core.plan.block_map import BlockMap, RegionMap
from kvflow.core.plan.descriptors import BlockIds, Chunks
from kvflow.core.plan.topology import CacheShare, Parallelism, layers_of, parallelism_of
from kvflow.core.policy.circuit import NEVER_FAILED
from kvflow.core.policy.contacts import Contact
from kvflow.core.policy.states import PEER_TABLE, PeerEvent, PeerState, fire
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.compatibility import Compatibility
from kvflow.core.protocol.proof import HOST, Proof, quick_read_max_s
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import PeerError, PeerIncompatible, PeerUnreachable
from kvflow.logs import logger_of
from kvflow.transport.base import AgentName

logger = logger_of(__name__)

T = TypeVar("T")

INCARNATIONS_MAX = 64
WORDS_MAX = 300
_ERROR_CHARS_MAX = 500
_QUESTIONS_AT_ONCE_MAX = 8
_DIGESTS_AT_ONCE_MAX = 4  # half of what a producer takes from one reader by default


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRank:
    """The facts of this rank that it tells peers and compares with theirs; complete once a cache is registered.

    There is a cache share and a table of regions for each set of layers that look alike.
    """

    reader: str
    caller: Address
    compatibility: Compatibility
    cache_shares: tuple[CacheShare, ...]
    regions: tuple[Regions, ...]
    groups: tuple[GroupFacts, ...]


class Connection:
    """A peer after its handshake, shared by all loads: what we read from it, and what we report to it."""

    def __init__(
        self,
        agent: AgentName,
        metadata: messages.Metadata,
        regions: Sequence[Regions],
        local: LocalRank,
        telling: Telling,
    ) -> None:
        self.agent = agent
        self.incarnation = metadata.incarnation
        self.layers = layers_of(metadata.cache_shares)
        self.cache_shares = metadata.cache_shares
        self.parallelism = parallelism_of(metadata.cache_shares)
        self.groups = metadata.groups
        self.told_groups = told_groups(metadata.groups)
        of_group = {share.group: one.num_blocks for share, one in zip(metadata.cache_shares, regions, strict=True)}
        self.num_blocks = tuple(of_group[at] for at in range(len(self.groups)))
        """Blocks of each of its groups."""
        self.whole = tuple(group.whole for group in self.groups)
        """True for groups whose blocks hold a prompt from its first token on."""
        self.block_maps = block_maps = tuple(_block_maps(metadata, local, regions))
        """Block maps of what we read from it, for each pair of sets of layers; none if we only report to it."""
        self.report_share = topology.report_share(local.cache_shares, metadata.cache_shares)
        self.staged = metadata.staged
        self.quick_read_max_s = quick_read_max_s(metadata.seals.hold_s)
        # Seals lie in host memory on both sides; a read is of one kind of memory on each. A staged rank's seal has to
        # be seen before anything is read.
        self.carries_seals = (
            len(block_maps) > 0
            and not self.staged
            and block_maps[0].local.device == block_maps[0].remote.device == HOST
        )
        self.seals_address, self.seal_count = metadata.seals.address, metadata.seals.count
        self.telling = telling
        self.users = 0
        """Loads that keep the transport's side of it alive."""
        self.left: asyncio.Event | None = None
        """Set when the last of them has left, once somebody waits for that."""
        self.complete_with: Sequence[Connection] = ()
        """Itself and others that were found to have all layers of ours together."""
        self.straight: bool | None = None
        """True if what is read from it goes straight into the cache, whatever it is; None: not known yet."""
        self.alike: RegionMap | None = None
        """Set with `straight` where `match_few` may plan what is read from it."""

    def __repr__(self) -> str:
        return f"<Connection {self.agent}, {counted(self.users, 'load')}>"

    async def idle(self) -> None:
        """Wait until no load holds it."""
        while self.users:
            if self.left is None or self.left.is_set():
                self.left = asyncio.Event()
            await self.left.wait()


@dataclass(slots=True, eq=False)
class Handshake:
    """A handshake under way. All who need the peer meanwhile wait for its future."""

    future: asyncio.Future[Connection]
    since_s: float
    task: asyncio.Task[None] | None = None
    contact: Contact | None = None
    """Turn of a first contact, if it needs one and has it."""
    waiters: int = 0

    def add_waiters(self, count: int) -> None:
        """Count so many waiters more, or fewer."""
        self.waiters += count
        if self.contact is not None:
            self.contact.wanted = self.waiters > 0

    def begin(self, contact: Contact) -> None:
        """Begin, since its turn has come."""
        self.contact = contact
        self.add_waiters(0)


class Peer:
    """One rank of a remote engine, by the address of its side channel."""

    def __init__(self, address: Address, now_s: float) -> None:
        self.engine_id, self.rank, self.address = address
        self.at = address
        self.label = f"{self.engine_id} ({self.rank}) at {self.address}"
        self.state = PeerState.UNKNOWN
        self.met = False
        """True once it was connected."""
        self.current: Connection | None = None
        self.handshake: Handshake | None = None
        self.circuit = NEVER_FAILED
        self.last_error = ""
        self.last_kind: type[PeerError] = PeerUnreachable
        """Class of the last failure that made it wait: what does not fit is no matter of time."""
        self.delivered = False
        """True once a load has read from it well."""
        self.used_s = now_s
        self.leases_kept = 0
        """Leases of it that we keep: until they are read or given back it is not idle."""
        self.tried_incarnations: set[str] = set()
        """Incarnations of tickets that have asked for it since it was last connected."""
        self.past_incarnations: deque[str] = deque(maxlen=INCARNATIONS_MAX)
        self.questions = asyncio.Semaphore(_QUESTIONS_AT_ONCE_MAX)
        """Bounds the questions to it at once, and so the sockets that they take if it is silent."""
        self.digest_questions = asyncio.Semaphore(_DIGESTS_AT_ONCE_MAX)
        """Bounds the questions for digests to it, which take long to answer."""

    def __repr__(self) -> str:
        return f"<Peer {self.engine_id} at {self.address}: {self.state}>"

    @property
    def busy(self) -> bool:
        """True if a load uses it or waits for it, or its leases are kept."""
        used = self.current is not None and self.current.users > 0
        return used or self.handshake is not None or self.leases_kept > 0

    def fire(self, event: PeerEvent, why: str = "") -> None:
        before, self.state = self.state, fire(PEER_TABLE, self.state, event)
        logger.info("peer %s at %s: %s -> %s%s", self.engine_id, self.address, before, self.state, why and f" ({why})")

    def note_error(self, why: str) -> None:
        """Remember what failed, without the peer's name in front."""
        self.last_error = why.removeprefix(f"{self.at}: ")[:_ERROR_CHARS_MAX]

    def usable(self, incarnation: str | None) -> Connection | None:
        """The connection, unless a ticket of this incarnation shows that it may be outdated."""
        if self.current is None or incarnation is None or incarnation in self.past_incarnations:
            return self.current
        return self.current if self.current.incarnation == incarnation else None


@dataclass(slots=True, eq=False)
class Source:
    """One rank of the producer in one load: connected, its lease, and the proof for all that is read of it."""

    peer: Peer
    connection: Connection
    lease: RankLease
    seal_address: int
    """Address of the lease's seal at the producer."""
    proof: Proof
    tables: Sequence[BlockIds] = ()
    """The lease's blocks, by group, if some of them are read."""
    chunks: dict[BlockMap, list[Chunks]] = field(default_factory=dict)
    """Chunks to read, with that rank's block ids, group after group."""
    word: int = -1
    """The word of ours that its seal is fetched to."""


@contextmanager
def held(sources: Sequence[Source]) -> Iterator[None]:
    """Keep connections open in the transport while the block waits, or claims them."""
    for source in sources:
        source.connection.users += 1
    try:
        yield
    finally:
        for source in sources:
            source.connection.users -= 1
            if not source.connection.users and source.connection.left is not None:
                source.connection.left.set()


ReadTicket: TypeAlias = Callable[[Ticket | Mapping[str, Any]], Ticket]


class Resolver(Protocol):
    """The way from a ticket to its ranks, connected, with their leases: for engines of our own make `reach.Reach`."""

    @property
    def read_ticket(self) -> ReadTicket: ...

    def reach_at_once(self, ticket: Ticket, found: Callable[[Source], None]) -> list[Source] | None: ...

    async def reach(self, ticket: Ticket, found: Callable[[Source], None]) -> list[Source]: ...


class Telling(Protocol):
    """The way in which a producer is told what becomes of its leases. Its handshake chooses it. Never waits."""

    heartbeat_s: float | None
    """Seconds in which it wants to hear of a lease that is needed; None: by the lease's ttl."""

    def needed(self, sources: Sequence[Source]) -> int:
        """Tell one rank that we still need these leases of it. Returns their number."""

    def read(self, source: Source) -> None:
        """Tell a rank that we need a lease's blocks no more."""


def blocks_by_group(groups: Sequence[GroupFacts], tables: Sequence[Sized]) -> dict[str, int]:
    """Count the blocks of each group."""
    return {group.name: len(ids) for group, ids in zip(groups, tables, strict=True)}


def _block_maps(metadata: messages.Metadata, ours: LocalRank, regions: Sequence[Regions]) -> Iterator[BlockMap]:
    """The block maps of a rank, for each pair of sets that have layers in common."""
    for at, where, mine, theirs in topology.in_common(ours.cache_shares, metadata.cache_shares):
        source = topology.source_at(mine, theirs)
        if source is not None and source.heads:
            found = BlockMap(
                ours.regions[at],
                regions[where],
                heads=source,
                local_layers=mine.layers,
                remote_layers=theirs.layers,
                opaque=not mine.plain,
                local_set=at,
                local_group=mine.group,
                remote_group=theirs.group,
            )
            if found.places:
                yield found


def told_groups(groups: tuple[GroupFacts, ...]) -> tuple[GroupFacts, ...]:
    """Groups of an engine as tickets name them: none where there is only one, of full attention."""
    return () if len(groups) == 1 and groups[0].whole else groups


def words(text: str, chars_max: int = WORDS_MAX) -> str:
    """A peer's words as they may stand in our messages and logs: printable, and not too many."""
    return printable(text, chars_max)


def check_parallelism(ticket: Ticket, peer: Peer, connection: Connection) -> None:
    """PeerIncompatible unless a rank's engine is cut, and its layers are grouped, as the ticket says."""
    if ticket.groups != connection.told_groups:
        told, has = ([f"{one.name} ({one.kind})" for one in groups] for groups in (ticket.groups, connection.groups))
        raise peer.at.failure(PeerIncompatible, f"groups: the ticket says {shown(told)}, the rank {shown(has)}")
    said, true = ticket.parallelism, connection.parallelism
    if said != true:
        fields = zip(Parallelism._fields, said, true, strict=True)
        name, mine, theirs = next(field for field in fields if field[1] != field[2])
        raise peer.at.failure(PeerIncompatible, f"{name}: the ticket says {mine}, the rank {theirs}")


def expendable(peers: Collection[Peer], *, asked_before_s: float, used_before_s: float) -> Peer | None:
    """The peer to evict for another one: the oldest of those never met, else the least recently used of the rest.

    A first contact older than `asked_before_s` is presumed dead. Of those that were met the lost ones go before those
    that are connected, which a load may have been given that does not hold it yet, unless they were used before
    `used_before_s`.
    """
    strangers = [peer for peer in peers if not peer.met]
    asked = ((one, one.handshake) for one in strangers if one.handshake)
    silent = (one for one, handshake in asked if not handshake.waiters or handshake.since_s < asked_before_s)
    found = next((one for one in strangers if one.handshake is None), None) or next(silent, None)
    if found is not None:
        return found
    unused = [one for one in peers if one.met and not one.busy and (one.current is None or one.used_s <= used_before_s)]
    return min(unused, key=lambda one: (one.current is not None, one.used_s), default=None)
