"""The engines' own books: offers, loads, pulls, and the ranks of one life."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from kvflow.core.cache.groups import GroupKind
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.protocol.ticket import Ticket, merge_tickets
from kvflow.prefix import Prefixes
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.producer.lease import Lease
from kvflow.runtime.records import Attempt
from kvflow.runtime.runtime import Runtime
from tests.simulator.cache import Content, RankCache
from tests.simulator.prompts import SimPrompt

if TYPE_CHECKING:
    from kvflow.testing.simulated_network import SimHost
    from tests.simulator.engine import SimEngine

Ending: TypeAlias = "LoadReport | BaseException"


class DeviceWork:
    """Work that a device does some time after the command. It is also the event that the work is done."""

    def __init__(self, delay_s: float, work: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._work = work
        self._over: asyncio.Future[None] = loop.create_future()
        loop.call_later(delay_s, self._do)

    def query(self) -> bool:
        return self._over.done()

    def synchronize(self) -> None:
        raise AssertionError("the loop would never get on")

    def _do(self) -> None:
        self._work()
        self._over.set_result(None)

    async def over(self) -> None:
        await asyncio.shield(self._over)


async def all_over(device: Iterable[DeviceWork | None]) -> None:
    """Wait until all delayed work in `device` is done."""
    for work in device:
        if work is not None:
            await work.over()


@dataclass(slots=True, eq=False)
class SimOffer:
    """A prompt that an engine offers, with a lease on each rank."""

    number: int
    engine: SimEngine
    tokens: int
    tables: list[list[int]]
    """Block ids by group."""
    ttl_s: float
    weights: int
    """Number of the weights with which the prompt is computed."""
    leases: list[Lease] = field(default_factory=list)
    given_back_s: float | None = None
    """Time at which the engine got the blocks back, or died; None before."""
    broken: bool = False
    """True if the prompt will never be computed."""
    loaded: bool = False
    """True once all ranks of some engine have loaded the prompt."""
    device: list[DeviceWork | None] = field(default_factory=list)
    """Device work that computes the prompt on the ranks; None where it was done at once."""
    payload: bytes = b""
    """Payload that readers get with the prompt's end. If not empty, blocks are also added during the computation."""
    early: bool = False
    """True if a consumer may have the ticket before the prompt is served, and may release it if that is late."""
    growing: list[asyncio.Task[None]] = field(default_factory=list)
    """Tasks that compute the prompt on each rank, step by step, under open leases."""

    def __str__(self) -> str:
        return f"the offer of {self.request_id}"

    @property
    def block_ids(self) -> list[int]:
        return [block for table in self.tables for block in table]

    @property
    def request_id(self) -> str:
        return f"request-{self.number}"

    def tables_upto(self, tokens: int) -> list[list[int]]:
        """Return the blocks, by group, that hold the first `tokens` tokens."""
        found = []
        for facts, table in zip(self.engine.facts, self.tables, strict=True):
            first = -(-self.tokens // facts.block_size) - len(table)
            found.append(table[: max(-(-tokens // facts.block_size) - first, 0)])
        return found

    def ticket(self) -> Ticket:
        return merge_tickets([lease.ticket for lease in self.leases])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Plan of a consumer for a load: cached blocks, deadline, cancellation, and how long it uses the blocks."""

    more: Sequence[SimOffer] = ()
    """Further offers of the same prompt: the request names the first `named`; kvflow asks for the others."""
    named: int = 0
    cached_blocks: int = 0
    deadline_s: float | None = None
    cancel_after_s: float | None = None
    use_s: float = 0.0
    extends: bool = False
    """True if the load gets its blocks while it runs."""
    tries: int = 3
    """Number of times that the load is begun at most, if the engine runs out of blocks for it."""


@dataclass(slots=True, eq=False)
class SimLoad:
    """A load of a prompt into an engine, on each rank."""

    offer: SimOffer
    engine: SimEngine
    tables: list[list[int]]
    """Block ids by group: the prompt's blocks without the cached ones at its beginning."""
    cached_tokens: int
    cancelled: bool = False
    corrupt: bool = False
    """True if a byte was flipped on a rank that had not asked to verify the load."""
    device: list[DeviceWork | None] = field(default_factory=list)
    """Device work of the blocks' former owner that may still write to them, by rank."""
    others: Sequence[SimOffer] = ()
    """Offers of the same prompt by other engines."""
    handles: list[Load] = field(default_factory=list)
    """The load on each rank, if it gets its blocks while it runs."""
    given_back: bool = False
    """True if the engine has cancelled the load, because it ran out of blocks for it."""

    @property
    def block_ids(self) -> list[int]:
        return [block for table in self.tables for block in table]

    @property
    def request_id(self) -> str:
        return self.offer.request_id

    def source(self, attempts: Sequence[Attempt]) -> SimOffer:
        """Return the offer that the whole prompt was read from, by the report's `attempts`."""
        engine_id = attempts[-1].engine_id if attempts else self.offer.engine.name
        return next(one for one in (self.offer, *self.others) if one.engine.name == engine_id)

    def __str__(self) -> str:
        return f"the load of {self.request_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """Plan of a reader for a pull."""

    number: int
    prompt: SimPrompt
    key_tokens: int
    holders: Sequence[SimEngine]
    cached_tokens: int = 0
    seeks: bool = False
    """True if the reader first asks, then takes blocks, and loads the offer like any ticket."""
    deadline_s: float | None = None
    answer_within_s: float = 0.25
    recompute_s_per_token: float | None = None
    cancel_after_s: float | None = None
    use_s: float = 0.0

    @property
    def request_id(self) -> str:
        return f"pull-{self.number}"

    @property
    def most(self) -> int:
        """Most tokens that the reader can have after the pull, with the cached tokens."""
        keyed = len(self.prompt.tokens) // self.key_tokens * self.key_tokens
        return max(keyed, self.cached_tokens)


@dataclass(slots=True, eq=False)
class SimPull:
    """A pull of a prefix into an engine, on each rank."""

    plan: PullPlan
    engine: SimEngine
    content: Content
    tables: list[list[int]]
    """Block ids by group."""
    exact: bool
    """True if the tables fit the tokens that come. If not, windows have a block for every place of the prompt."""
    cancelled: bool = False
    device: list[DeviceWork | None] = field(default_factory=list)
    """Device work of the blocks' former owner that may still write to them, by rank."""
    weights: int = 0
    """Number of the reader's weights at the beginning of the pull."""

    @property
    def request_id(self) -> str:
        return self.plan.request_id

    @property
    def block_ids(self) -> list[int]:
        return [block for table in self.tables for block in table]

    def __str__(self) -> str:
        return f"the pull {self.plan.request_id}"

    def filled(self, tokens: int) -> list[list[int]]:
        """Return the blocks, by group, that a pull of `tokens` tokens fills beyond the cached tokens."""
        cached = self.plan.cached_tokens
        if tokens <= cached:
            return [[] for _ in self.tables]
        if self.exact:
            return self.tables
        found = []
        for facts, table in zip(self.engine.facts, self.tables, strict=True):
            size, first = facts.block_size, cached // facts.block_size
            needed = max(facts.first_needed(tokens) // size - first, 0)
            state = facts.kind is GroupKind.STATE
            found.append(table if state else table[needed : -(-tokens // size) - first])
        return found


@dataclass(slots=True, eq=False)
class RankLoad:
    """One rank's part of a load or pull, to which reads belong."""

    load: SimLoad | SimPull
    last_landing_s: float = 0.0
    """Time at which bytes last landed in the blocks."""
    flipped: bool = False
    """True if a byte was flipped on its way."""
    turns: list[SimHost] = field(default_factory=list)
    """Hosts in the order in which their bytes came."""

    def came_late(self, host: SimHost) -> SimHost | None:
        """Note that bytes of `host` land. If another host's turn has begun since, return that host."""
        if any(host is one for one in self.turns[:-1]):
            return self.turns[-1]
        if not self.turns or self.turns[-1] is not host:
            self.turns.append(host)
        return None


class SimRank:
    """A rank in one life of its engine: its memory, its runtime, and counts of its leases and loads."""

    def __init__(
        self, index: int, cache: RankCache, runtime: Runtime, prefixes: Prefixes, on_change: Callable[[SimRank], None]
    ) -> None:
        self.index = index
        self.cache = cache
        self.runtime = runtime
        self.prefixes = prefixes
        self._on_change = on_change
        self.served = 0
        self.loaded = 0
        self.unsure = 0
        """Loads that may have succeeded but are in no report: another load of the pull has failed, or the caller has
        cancelled the load in the turn of its success."""
        self.look_up()

    def look_up(self) -> None:
        """Find the ledger of the cache that is registered now, and watch its changes."""
        books = self.runtime._supervisor.incarnation
        assert books is not None, "registered before"
        ledger = books.host.resources.ledger
        self.uses = ledger._use
        for name in ("lease", "release", "begin_load", "quarantine", "end_load"):
            setattr(ledger, name, partial(self._change, getattr(ledger, name)))
        self._on_change(self)

    def _change(self, verb: Callable[[BlockIds], None], ids: BlockIds) -> None:
        """Note that the ledger changes, and change it."""
        self._on_change(self)
        verb(ids)

    def holds_lease(self, offer: SimOffer) -> bool:
        """Return True if the lease of `offer` on this rank is open."""
        return len(offer.leases) > self.index and not offer.leases[self.index].done

    def unsafe(self, load: SimLoad | SimPull) -> list[Load]:
        """Return the ended loads of this rank that may still write to the blocks of `load`."""
        taken, mine = set(load.block_ids), [one for one in self.runtime.quarantines if isinstance(one, Load)]
        return [one for one in mine if not one.safe and taken & {*itertools.chain(*one.block_tables)}]

    def has_leased(self, offer: SimOffer, block: int) -> bool:
        """Return True if the lease of `offer` on this rank is open and contains `block`."""
        return self.holds_lease(offer) and any(block in ids for ids in offer.leases[self.index].block_tables)
