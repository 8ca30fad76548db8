"""The engines' own books of their work: offers, loads, pulls, and the ranks of one life."""

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
    """Work of a device, done some time after it was told to: an event that has happened then."""

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
    """Wait until the device has done all of it."""
    for work in device:
        if work is not None:
            await work.over()


@dataclass(slots=True, eq=False)
class SimOffer:
    """A prompt that an engine offers: on each of its ranks under a lease."""

    number: int
    engine: SimEngine
    tokens: int
    tables: list[list[int]]
    """Block ids by group."""
    ttl_s: float
    content: Content
    leases: list[Lease] = field(default_factory=list)
    given_back_s: float | None = None
    """Time at which its engine got the blocks back, or died."""
    broken: bool = False
    """True if it will never be computed."""
    loaded: bool = False
    """True once all ranks of some engine have loaded it."""
    device: list[DeviceWork | None] = field(default_factory=list)
    """Device work that computes it on each rank, unless it was computed at once."""
    payload: bytes = b""
    """Payload that comes with its end; then its blocks follow, too, while it is computed."""
    early: bool = False
    """True if a consumer may have heard of it before it was served, and may give it up if it is late."""
    growing: list[asyncio.Task[None]] = field(default_factory=list)
    """Tasks that compute it on each rank, step by step, under open leases."""

    def __str__(self) -> str:
        return f"the offer of {self.request_id}"

    @property
    def block_ids(self) -> list[int]:
        return [block for table in self.tables for block in table]

    @property
    def request_id(self) -> str:
        return f"request-{self.number}"

    def tables_upto(self, tokens: int) -> list[list[int]]:
        """Blocks, by group, that hold the first tokens."""
        found = []
        for facts, table in zip(self.engine.facts, self.tables, strict=True):
            first = -(-self.tokens // facts.block_size) - len(table)
            found.append(table[: max(-(-tokens // facts.block_size) - first, 0)])
        return found

    def ticket(self) -> Ticket:
        return merge_tickets([lease.ticket for lease in self.leases])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Plan of a consumer for a load: cached blocks, patience, and the time for which it uses the blocks."""

    more: Sequence[SimOffer] = ()
    """Further offers of the same prompt: the first are named with it, the others brought when asked for."""
    named: int = 0
    cached_blocks: int = 0
    deadline_s: float | None = None
    cancel_after_s: float | None = None
    use_s: float = 0.0


@dataclass(slots=True, eq=False)
class SimLoad:
    """A prompt on its way into an engine: on each of its ranks a load."""

    offer: SimOffer
    engine: SimEngine
    tables: list[list[int]]
    """Block ids by group: the prompt's last blocks, where the first are cached."""
    cached_tokens: int
    cancelled: bool = False
    corrupt: bool = False
    """True if a rank had a byte flipped in a load that it had not asked to verify."""
    device: list[DeviceWork | None] = field(default_factory=list)
    """Device work that still writes to the blocks for who had them before, on each rank."""
    others: Sequence[SimOffer] = ()
    """Offers of the same prompt by other engines."""

    @property
    def block_ids(self) -> list[int]:
        return [block for table in self.tables for block in table]

    @property
    def request_id(self) -> str:
        return self.offer.request_id

    def source(self, attempts: Sequence[Attempt]) -> SimOffer:
        """Offer whose engine has given all of it, by the report."""
        engine_id = attempts[-1].engine_id if attempts else self.offer.engine.name
        return next(one for one in (self.offer, *self.others) if one.engine.name == engine_id)

    def __str__(self) -> str:
        return f"the load of {self.request_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """Plan of a reader's pull."""

    number: int
    prompt: SimPrompt
    key_tokens: int
    holders: Sequence[SimEngine]
    cached_tokens: int = 0
    seeks: bool = False
    """True if it asks first, makes room for what is offered, and loads that as any ticket."""
    rest: SimOffer | None = None
    """Offer of all of it, which brings the rest beyond what the holders have."""
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
        """Tokens that a pull can bring, with what is cached."""
        keyed = len(self.prompt.tokens) // self.key_tokens * self.key_tokens
        return max(keyed if self.rest is None else self.rest.tokens, self.cached_tokens)


@dataclass(slots=True, eq=False)
class SimPull:
    """A prefix on its way into an engine: on each of its ranks a pull."""

    plan: PullPlan
    engine: SimEngine
    content: Content
    tables: list[list[int]]
    """Block ids by group."""
    exact: bool
    """True if the tables are for the very tokens that come; else each place of the prompt has a block in windows."""
    cancelled: bool = False
    device: list[DeviceWork | None] = field(default_factory=list)
    """Device work of the former owners, which still writes to the blocks, on each rank."""

    @property
    def request_id(self) -> str:
        return self.plan.request_id

    @property
    def block_ids(self) -> list[int]:
        return [block for table in self.tables for block in table]

    def __str__(self) -> str:
        return f"the pull {self.plan.request_id}"

    def filled(self, tokens: int) -> list[list[int]]:
        """Blocks, by group, that hold what matters of the first tokens beyond what was cached."""
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
    """One rank's part of a load, for which reads are posted."""

    load: SimLoad | SimPull
    side_by_side: bool = False
    """True if it reads from several engines at once, into different blocks."""
    last_landing_s: float = 0.0
    """Time at which bytes came to its blocks last."""
    flipped: bool = False
    """True if one of the bytes was flipped on its way."""
    turns: dict[int, list[tuple[SimHost, float]]] = field(default_factory=dict)
    """Hosts whose bytes have come, each with the time of the first ones: of each block if side by side, else of all."""

    def came_late(self, host: SimHost, block: int, posted_s: float, now_s: float) -> SimHost | None:
        """Note bytes of a host for a block. Returns the host that came after that one had come before, if any.

        If it reads side by side a host may have a second turn, once its prefix and that of others are lost, in which it
        is read for all of the prompt: then bytes are late whose read was posted before another host's came.
        """
        turns = self.turns.setdefault(block if self.side_by_side else 0, [])
        if not turns or turns[-1][0] is not host:
            current, since_s = turns[-1] if turns else (host, now_s)
            again = any(host is one for one, _ in turns)
            if again and (posted_s <= since_s or not self.side_by_side):
                return current
            turns.append((host, now_s))
        return None


class SimRank:
    """A rank in one life: its memory, its runtime, and what came of both."""

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
        """Loads of pulls from two sources that may have succeeded, and are in no report, since the other has failed."""
        self.look_up()

    def look_up(self) -> None:
        """Find the books of the cache that is registered now."""
        books = self.runtime._supervisor.cache
        assert books is not None, "registered before"
        self.uses = books.ledger._use
        for name in ("lease", "release", "begin_load", "quarantine", "end_load"):
            setattr(books.ledger, name, partial(self._change, getattr(books.ledger, name)))
        self._on_change(self)

    def _change(self, verb: Callable[[BlockIds], None], ids: BlockIds) -> None:
        """Change the ledger, and tell who watches it."""
        self._on_change(self)
        verb(ids)

    def holds_lease(self, offer: SimOffer) -> bool:
        """True if an offer's lease on this rank is open."""
        return len(offer.leases) > self.index and not offer.leases[self.index].done

    def unsafe(self, load: SimLoad | SimPull) -> list[Load]:
        """Loads of this rank that have ended, and may still write to blocks of this one."""
        taken, mine = set(load.block_ids), [one for one in self.runtime.quarantines if isinstance(one, Load)]
        return [one for one in mine if not one.safe and taken & {*itertools.chain(*one.block_tables)}]

    def has_leased(self, offer: SimOffer, block: int) -> bool:
        """True if an offer's lease on this rank is open, and has been given the block."""
        return self.holds_lease(offer) and any(block in ids for ids in offer.leases[self.index].block_tables)
