"""A hand-over of one prompt between two engines, rank by rank, and checks of everything that must hold afterwards.

A `HandOver` is pure data: both engines, the prompt, the ticket, and the paths that bytes may take. Each of its parts
has some layers of the model; the engines may put these layers into different groups. `run` opens a runtime for each
rank, serves, loads, and checks with the reference model: each token that attention needs, every other byte of the
consumers, the producers' memory, reports, leases and statistics.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvflow import (
    CacheGroup,
    Config,
    Lease,
    LeaseOutcome,
    Load,
    LoadReport,
    LoadRequest,
    Runtime,
    ServeRequest,
    merge_tickets,
)
from kvflow import Part as RuntimePart
from kvflow.errors import ConfigError
from kvflow.runtime.world import World
from kvflow.testing import assert_closed, assert_quiet
from tests.support.reference_model import CONSUMER_FILL, PRODUCER_FILL, Engine, Place, RankCache
from tests.support.tests_support import PATIENT, WAIT_S, limited

_FIRST_PORT, _LAST_PORT = 12000, 32000  # below the ports that systems give to outgoing connections
_port_bases = itertools.count(os.getpid() * 101)


class Arrival(enum.Enum):
    """When the consumer's ranks load: all at once, or one after another in either order."""

    TOGETHER = "together"
    IN_TURN = "in turn"
    REVERSED = "reversed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The paths that bytes may take: options of the Config of a hand-over's runtimes."""

    staged: tuple[bool, bool] = (False, False)
    """True for host staging: on the producer, on the consumer."""
    scratch: str = "never"
    scratch_slot_bytes_max: int = 1 << 16
    slice_bytes_max: int = 1 << 24
    slice_descriptors_max: int = 8192

    @property
    def exact(self) -> bool:
        """True if loads read no bytes beyond the requested ones."""
        return self.scratch == "never"


STRAIGHT = Paths()


class Attention(NamedTuple):
    """The tokens that layers attend to: all (no window), the last `window`, or those of the last chunk of `window`."""

    window: int | None = None
    chunked: bool = False

    def needs(self, token: int, tokens: int) -> bool:
        """Return True if a token is needed once `tokens` are computed. The last token may be computed again."""
        if self.window is None:
            return True
        if self.chunked:
            return token // self.window >= (tokens - 1) // self.window
        return token >= tokens - self.window

    def first_block(self, tokens: int, block_size: int) -> int:
        """Return the index of the first block with a needed token."""
        return min((token for token in range(tokens) if self.needs(token, tokens)), default=0) // block_size


FULL = Attention()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPart:
    """Some layers of the model, as both engines hold them, and the prompt's blocks for these layers on both sides."""

    producer: Engine
    consumer: Engine
    attention: Attention = FULL
    offered: tuple[int, ...]
    """Blocks of the producer: the prompt's last blocks; without a window, its first."""
    wanted: tuple[int, ...]
    """Blocks of the consumer, for the last offered blocks; the consumer has cached the blocks before."""

    def tokens(self, num_tokens: int) -> range:
        """Return the tokens of a prompt that are read: those with blocks on both sides."""
        ours, theirs, start = self.consumer.block_tokens, self.producer.block_tokens, 0
        if self.attention.window is None:
            num_tokens = min(num_tokens, len(self.offered) * theirs)
        else:
            start = (-(-num_tokens // theirs) - len(self.offered)) * theirs
        cached = (-(-num_tokens // ours) - len(self.wanted)) * ours
        return range(max(start, cached, 0), num_tokens) if self.wanted else range(num_tokens, num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """One prompt, two engines, and the options of the hand-over between them. Pairs are (producer, consumer)."""

    parts: tuple[LayerPart, ...]
    num_tokens: int
    one_pool: tuple[bool, bool] = (False, False)
    """True if the groups of an engine share one pool of block ids."""
    by_name: bool = False
    """True if block ids are given by the groups' names, False if in order."""
    merged: tuple[bool, bool] = (False, False)
    """True if an engine has all layers in one group, which keeps every token.

    All parts then have the same block table, and only the other engine has windows.
    """
    cached_tokens: int = 0
    """Number of tokens before the consumer's blocks, in groups that hold the prompt from its first token on."""
    named: tuple[int, ...] = ()
    """Producer ranks with their tickets merged, in this order; () for all."""
    fixed_ports: bool = False
    arrival: Arrival = Arrival.TOGETHER
    paths: Paths = STRAIGHT

    @property
    def plain(self) -> bool:
        """True if the engines register a dict of layers, without groups."""
        alone = len(self.parts) == 1 and self.parts[0].attention == FULL
        return alone and not (self.by_name or any(self.merged) or self.sharded)

    @property
    def sharded(self) -> bool:
        """True if the tokens of a block are sharded over ranks, on either side."""
        return any(part.producer.sharded or part.consumer.sharded for part in self.parts)

    @property
    def verified(self) -> bool:
        """True if the loads are verified: all loads with groups, and every second plain load; never sharded tokens."""
        return not self.sharded and (not self.plain or self.num_tokens % 2 == 1)

    def engines(self, side: int) -> list[Engine]:
        """Return the producer (side 0) or the consumer (side 1) for each part."""
        return [part.consumer if side else part.producer for part in self.parts]

    def ids(self, side: int) -> list[tuple[int, ...]]:
        """Return the block ids of each part. In a shared pool the parts have consecutive ranges of ids."""
        tables = [part.wanted if side else part.offered for part in self.parts]
        if not self.one_pool[side] or self.merged[side]:
            return tables
        sizes = [0, *(engine.num_blocks for engine in self.engines(side))]
        starts = itertools.accumulate(sizes)
        return [tuple(start + block for block in table) for start, table in zip(starts, tables, strict=False)]

    def request_ids(self, side: int, parts: Sequence[slice] | None = None) -> Any:
        """Return the block ids in the form of a request. `parts` selects a slice of each part's table."""
        tables = [list(table) for table in self.ids(side)]
        if parts is not None:
            tables = [table[some] for table, some in zip(tables, parts, strict=True)]
        if self.by_name and not self.merged[side]:
            return {f"part{at}": table for at, table in enumerate(tables) if table}
        return tables[0] if self.merged[side] or len(tables) == 1 else tables


def one_part(
    producer: Engine, consumer: Engine, *, offered: tuple[int, ...], wanted: tuple[int, ...], **more: Any
) -> HandOver:
    """Return a hand-over of `offered` blocks to `wanted` blocks, between engines with a single group of layers."""
    part = LayerPart(producer=producer, consumer=consumer, offered=offered, wanted=wanted)
    cached = part.tokens(more["num_tokens"]).start if wanted else 0
    return HandOver(parts=(part,), cached_tokens=cached, **more)


@dataclass(frozen=True, slots=True)
class _Rank:
    place: Place
    caches: list[RankCache]
    """The rank's cache for each part."""
    runtime: Runtime

    def __str__(self) -> str:
        """Return the rank's name as in a report, up to its address."""
        config = self.runtime.config
        return f"{config.engine_id} (dp {config.dp_rank} pp {self.place.pp} tp {self.place.tp}) at "


Compute = Callable[[list[_Rank], list[Lease]], Awaitable[None]]
"""A function that computes the prompt of open leases. When it returns, their blocks hold the whole prompt."""


Give = Callable[[list[Load]], Awaitable[None]]
"""A function that gives loads their local blocks, after they were started without any."""


async def run(
    case: HandOver,
    world: World | None = None,
    compute: Compute | None = None,
    *,
    extends: bool = False,
    give: Give | None = None,
) -> None:
    """Run a hand-over and check it. AssertionError names the first fault.

    `world` is the world of all runtimes; None for the real one, with NIXL. With `compute`, leases are opened and loads
    are started before any token is computed. With `extends`, leases start without blocks and are extended later; with
    `give`, loads are.
    """
    async with both(case, world) as (producers, consumers):
        leases = serve(case, producers, None if compute is None else 0, extends=extends)
        reports = await _load(case, producers, consumers, leases, compute, give)
        await _all_read(leases)
        _check_books(producers, consumers, reports)
        names = [f"{rank}{rank.runtime.address}" for rank in producers]
    for rank, report in zip(consumers, reports, strict=True):
        _check_report(case, rank, report, names)


@asynccontextmanager
async def both(
    case: HandOver, world: World | None, make_parts: Callable[[], Sequence[RuntimePart]] = tuple
) -> AsyncIterator[tuple[list[_Rank], list[_Rank]]]:
    """Open both engines, and yield the producer's ranks, which hold the prompt, and the consumer's.

    At the end of the block check that the consumer holds the prompt and that the producer's memory is unchanged.
    """
    async with AsyncExitStack() as stack:
        replicas = await open_producer(stack, case, world, make_parts)
        producers = replicas[case.parts[0].producer.dp_rank]
        for rank in producers:
            for cache, ids in zip(rank.caches, case.ids(0), strict=True):
                cache.pattern.fill(ids)
        theirs = [cache for rank in itertools.chain(*replicas) for cache in rank.caches]
        before = [cache.snapshot() for cache in theirs]
        consumers = await open_engine(stack, case, 1, world, make_parts=make_parts)
        yield producers, consumers
    for rank in itertools.chain(*replicas, consumers):
        assert_closed(rank.runtime.statistics())
    assert before == [cache.snapshot() for cache in theirs], "the producer was written to"
    _check_bytes(case, producers, consumers)


def serve(
    case: HandOver, producers: Iterable[_Rank], computed_tokens: int | None = None, *, extends: bool = False
) -> list[Lease]:
    """Open a lease on the prompt at every rank of the producer, and return the leases."""
    request = ServeRequest(
        "request",
        block_ids=case.request_ids(0, [slice(0)] * len(case.parts) if extends else None),
        num_tokens=case.num_tokens,
        computed_tokens=computed_tokens,
        extends=extends,
    )
    return [rank.runtime.serve_blocks(request) for rank in producers]


def ticket_of(case: HandOver, leases: list[Lease]) -> dict[str, Any]:
    """Return the merged ticket of the leases, as it comes through a router."""
    tickets = [leases[index].ticket for index in case.named or range(len(leases))]
    ticket: dict[str, Any] = json.loads(json.dumps(merge_tickets(tickets).to_params()))
    return ticket


async def open_producer(
    stack: AsyncExitStack,
    case: HandOver,
    world: World | None,
    make_parts: Callable[[], Sequence[RuntimePart]] = tuple,
) -> list[list[_Rank]]:
    """Open the producer's replicas up to the replica with the request. The other replicas hold only the sentinel."""
    engine = case.parts[0].producer
    count = (engine.dp_rank + 1) * len(engine.places)
    while True:
        base = free_ports(count) if case.fixed_ports else 0
        async with AsyncExitStack() as attempt:
            try:
                replicas = [
                    await open_engine(attempt, case, 0, world, dp_rank, base, make_parts)
                    for dp_rank in range(engine.dp_rank + 1)
                ]
            except ConfigError as error:
                if "cannot bind" in str(error):
                    continue  # another process has bound a port in the meantime
                raise
            await stack.enter_async_context(attempt.pop_all())
            return replicas


async def open_engine(
    stack: AsyncExitStack,
    case: HandOver,
    side: int,
    world: World | None,
    dp_rank: int | None = None,
    port: int = 0,
    make_parts: Callable[[], Sequence[RuntimePart]] = tuple,
) -> list[_Rank]:
    """Open a runtime for each rank of one replica, and register its caches."""
    engines, fill = case.engines(side), (PRODUCER_FILL, CONSUMER_FILL)[side]
    first = engines[0]
    if case.one_pool[side] and not case.merged[side]:
        total = sum(engine.num_blocks for engine in engines)
        engines = [replace(engine, num_blocks=total) for engine in engines]
    ranks = []
    for place in first.places:
        config = replace(
            _config(first, place, side, case.paths, world),
            listen=f"tcp://127.0.0.1:{port}",
            dp_rank=first.dp_rank if dp_rank is None else dp_rank,
            num_kv_heads=first.model.kv_heads if first.states_heads and case.plain else None,
        )
        caches = [RankCache(engine, place, fill) for engine in engines]
        runtime = await stack.enter_async_context(Runtime(config, world=world or World(), parts=make_parts()))
        if case.plain:
            await runtime.register_kv_caches(caches[0].tensors, caches[0].layout)
        else:
            await runtime.register_kv_caches(_groups_of(case, side, caches))
        ranks.append(_Rank(place, caches, runtime))
    return ranks


def _groups_of(case: HandOver, side: int, caches: Sequence[RankCache]) -> list[CacheGroup]:
    if case.merged[side]:
        layers = {f"{at}.{name}": tensor for at, cache in enumerate(caches) for name, tensor in cache.tensors.items()}
        layouts = [
            replace(cache.layout, layer_names=tuple(f"{at}.{name}" for name in cache.layout.layer_names))
            for at, cache in enumerate(caches)
        ]
        return [CacheGroup("all", layers, layouts)]
    return [
        CacheGroup(
            f"part{at}",
            cache.tensors,
            cache.layout,
            window=part.attention.window,
            kind="chunked" if part.attention.chunked else "sharded" if cache.engine.sharded else None,
            pool="all" if case.one_pool[side] else None,
            num_kv_heads=cache.engine.model.kv_heads if cache.engine.states_heads else None,
        )
        for at, (part, cache) in enumerate(zip(case.parts, caches, strict=True))
    ]


def _config(engine: Engine, place: Place, side: int, paths: Paths, world: World | None) -> Config:
    """Return the config of a rank of the producer (side 0) or the consumer (side 1)."""
    config = replace(
        PATIENT,
        engine_id="decode" if side else "prefill",
        tp_rank=place.tp,
        tp_size=engine.tp_size,
        pp_rank=place.pp,
        pp_size=len(engine.stages),
        drain_timeout_s=0.03,  # this and the next bound are reached only after a failure
        cancel_grace_s=1.0,
        staging="always" if paths.staged[side] else "auto",
        scratch=paths.scratch,
    )
    return limited(
        config,
        seal_hold_s=0.05 if world is None else 0.004,
        leases_max=64,
        source_ranks_max=64,
        scratch_slot_bytes_max=paths.scratch_slot_bytes_max,
        slice_bytes_max=paths.slice_bytes_max,
        slice_descriptors_max=paths.slice_descriptors_max,
    )


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports. Each call starts its search at another port."""
    for _ in range(200):
        base = _FIRST_PORT + next(_port_bases) * 31 % (_LAST_PORT - _FIRST_PORT)
        with ExitStack() as stack:
            try:
                for port in range(base, base + count):
                    probe = stack.enter_context(socket.socket())
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return base
    raise OSError(f"no {count} free ports in a row")


async def _load(
    case: HandOver,
    producers: list[_Rank],
    consumers: list[_Rank],
    leases: list[Lease],
    compute: Compute | None,
    give: Give | None = None,
) -> list[LoadReport]:
    """Run the loads of all consumer ranks, and return their reports in the order of the ranks."""
    verify = case.verified or None
    windowed = any(part.attention.window is not None for part in case.parts)
    request = LoadRequest(
        "request",
        ticket_of(case, leases),
        case.request_ids(1),
        verify=verify,
        cached_tokens=case.cached_tokens,
        num_tokens=leases[0].ticket.offered_tokens if windowed else None,
    )
    if give is not None:
        request = replace(request, block_ids=case.request_ids(1, [slice(0)] * len(case.parts)), extends=True)
    if case.arrival is Arrival.TOGETHER or give is not None:
        loads = [rank.runtime.start_load(request) for rank in consumers]
        giving = None if give is None else asyncio.ensure_future(give(loads))
        if compute is not None:
            await compute(producers, leases)
        if giving is not None:
            await giving
        await asyncio.gather(*loads, return_exceptions=True)
        return [await load for load in loads]
    step = -1 if case.arrival is Arrival.REVERSED else 1
    reports = [await rank.runtime.load_blocks(request) for rank in consumers[::step]]
    return reports[::step]


async def _all_read(leases: list[Lease]) -> None:
    """Assert that every lease ends as read, also on ranks without bytes to read: all readers notify them."""
    try:
        async with asyncio.timeout(WAIT_S):
            outcomes = await asyncio.gather(*leases)
    except TimeoutError:
        raise AssertionError(f"still open after {WAIT_S} s: {[x for x in leases if not x.done]}") from None
    assert set(outcomes) == {LeaseOutcome.READ}, outcomes


def _check_bytes(case: HandOver, producers: Iterable[_Rank], consumers: Iterable[_Rank]) -> None:
    """Assert that the consumers hold every needed token, and that no other byte has changed."""
    offered, wanted = case.ids(0), case.ids(1)
    for rank, (at, part) in itertools.product(consumers, enumerate(case.parts)):
        tokens, windowed = part.tokens(case.num_tokens), part.attention.window is not None
        cached = (-(-tokens.stop // part.consumer.block_tokens) - len(part.wanted)) * part.consumer.block_tokens
        for token in range(cached, tokens.start):
            assert not part.attention.needs(token, tokens.stop), f"token {token} is not read"
        source = [other.caches[at] for other in producers] if part.wanted else []
        first = tokens.start if windowed else 0
        difference = rank.caches[at].difference(source, offered[at], wanted[at], tokens.stop, first_token=first)
        assert not difference, f"consumer, part {at}: {difference}"


def _check_books(producers: Iterable[_Rank], consumers: Iterable[_Rank], reports: Iterable[LoadReport]) -> None:
    """Assert that all runtimes are idle, and that each lease ended by exactly the notifications of its readers."""
    for rank in producers:
        serving = rank.runtime.statistics().serving
        assert serving is not None
        told = (serving.read, serving.late_notifications)
        assert (*told, serving.duplicate_notifications, serving.malformed_notifications) == (1, 0, 0, 0), serving
    for rank, report in zip(consumers, reports, strict=True):
        loading = rank.runtime.statistics().loading
        assert loading is not None
        assert (loading.succeeded, loading.bytes) == (1, report.bytes), loading
    for rank in itertools.chain(producers, consumers):
        assert_quiet(rank.runtime.statistics())


def _check_report(case: HandOver, rank: _Rank, report: LoadReport, names: list[str]) -> None:
    counts = [
        sum(part.consumer.holds(rank.place, token) for token in part.tokens(case.num_tokens)) for part in case.parts
    ]
    blocks = sum(len(part.wanted) for part in (case.parts[:1] if case.merged[1] else case.parts))
    offered = any(part.offered for part in case.parts)
    told = (report.tokens, report.blocks, report.notified, bool(report.sources))
    assert told == (max(counts) if blocks else 0, blocks, offered, blocks > 0 and max(counts) > 0), report
    wanted = sum(count * part.consumer.token_bytes(rank.place) for count, part in zip(counts, case.parts, strict=True))
    assert report.bytes == wanted or (report.bytes > wanted and not case.paths.exact), report
    assert min(report.seconds.values()) >= 0.0, report
    assert report.verified == (case.verified and blocks > 0), report
    holders = {
        name
        for part in case.parts
        for name, place in zip(names, part.producer.places, strict=True)
        if set(part.producer.layers(place)) & set(part.consumer.layers(rank.place))
        and set(part.producer.heads(place)) & set(part.consumer.heads(rank.place))
    }
    assert len(set(report.sources)) == len(report.sources), report
    assert set(report.sources) <= holders, f"{report.sources} are not among {holders}"
    assert report.descriptors >= len(report.sources), report
