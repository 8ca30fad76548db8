"""A prompt handed over between engines whose layers come in groups: windows, pools, other groups on the other side.

A `GroupHandOver` is pure data, as a `hand_overs.HandOver` is for one group. Each `Part` is some layers of the model,
as both engines hold them; the engines may put the same layers into different groups. What has to arrive is worked out
token by token, from what attention needs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvflow import (
    CacheGroup,
    CacheLayout,
    Lease,
    LeaseOutcome,
    LoadReport,
    LoadRequest,
    Runtime,
    ServeRequest,
    merge_tickets,
)
from kvflow.runtime.world import World
from kvflow.testing import assert_closed, assert_quiet
from tests.support.hand_overs import STRAIGHT, Paths, rank_config
from tests.support.reference_model import CONSUMER_FILL, PRODUCER_FILL, Engine, Place, RankCache
from tests.support.tests_support import WAIT_S


class Attention(NamedTuple):
    """Which tokens layers need: all (no window), the last `window` ones, or those since its last multiple."""

    window: int | None = None
    chunked: bool = False

    def needs(self, token: int, tokens: int) -> bool:
        """Whether a token matters once `tokens` are computed, of which the last may be computed again."""
        if self.window is None:
            return True
        if self.chunked:
            return token // self.window >= (tokens - 1) // self.window
        return token >= tokens - self.window

    def first_block(self, tokens: int, block_size: int) -> int:
        """The first block with a token that matters."""
        return min((token for token in range(tokens) if self.needs(token, tokens)), default=0) // block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some layers of the model, as both engines hold them, and the blocks of the prompt on both sides."""

    producer: Engine
    consumer: Engine
    attention: Attention
    offered: tuple[int, ...]
    """The producer's blocks: the prompt's last ones, or all of them without a window."""
    wanted: tuple[int, ...]
    """The consumer's, the last of its window's; those before are cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHandOver:
    parts: tuple[Part, ...]
    num_tokens: int
    one_pool: tuple[bool, bool] = (False, False)
    """Whether the groups of the producer, and of the consumer, have their block ids in common."""
    by_name: bool = False
    """Whether block ids are given by the groups' names, or in order."""
    merged: tuple[bool, bool] = (False, False)
    """Whether the producer, and the consumer, hold all layers in one group, for which every token is kept: the parts
    have one table of blocks then, and windows are only the other side's."""
    paths: Paths = STRAIGHT


@dataclass(frozen=True, slots=True)
class _Rank:
    place: Place
    caches: list[RankCache]
    """Of each part."""
    runtime: Runtime


def engines_of(case: GroupHandOver, side: int) -> list[Engine]:
    return [part.consumer if side else part.producer for part in case.parts]


def ids_of(case: GroupHandOver, side: int) -> list[tuple[int, ...]]:
    """Block ids of each part. Those of a common pool are told apart by the order of the parts."""
    tables = [part.wanted if side else part.offered for part in case.parts]
    if not case.one_pool[side] or case.merged[side]:
        return tables
    starts = [sum(engine.num_blocks for engine in engines_of(case, side)[:at]) for at in range(len(tables))]
    return [tuple(start + block for block in table) for start, table in zip(starts, tables, strict=True)]


def request_ids(case: GroupHandOver, side: int, parts: Sequence[slice] | None = None) -> Any:
    """Block ids as a request has them; `parts` says which of each table."""
    tables = [list(table) for table in ids_of(case, side)]
    if parts is not None:
        tables = [table[some] for table, some in zip(tables, parts, strict=True)]
    if case.merged[side]:
        return tables[0]
    if case.by_name:
        return {f"part{at}": table for at, table in enumerate(tables) if table}
    return tables if len(tables) > 1 else tables[0]


Compute = Callable[[list["_Rank"], list[Lease]], Awaitable[None]]
"""Computes the prompt in leases that were opened before, whose blocks hold all of it when it returns."""


async def run(
    case: GroupHandOver, world: World | None = None, compute: Compute | None = None, *, extends: bool = False
) -> None:
    """Do it in this world (None takes the real one, with NIXL); AssertionError says what is not as it should be.

    With `compute` the leases are opened and loads begun before anything is computed; with `extends` the leases have
    no blocks before they are given some.
    """
    async with AsyncExitStack() as stack:
        producers = await open_engine(stack, case, 0, world)
        for rank in producers:
            for cache, ids in zip(rank.caches, ids_of(case, 0), strict=True):
                cache.pattern.fill(ids)
        before = [cache.snapshot() for rank in producers for cache in rank.caches]
        consumers = await open_engine(stack, case, 1, world)
        leases = serve(case, producers, None if compute is None else 0, extends=extends)
        ticket = ticket_of(leases)
        request = LoadRequest("request", ticket=ticket, block_ids=request_ids(case, 1), verify=True)
        loads = [rank.runtime.start_load(request) for rank in consumers]
        if compute is not None:
            await compute(producers, leases)
        reports = [await load for load in loads]
        async with asyncio.timeout(WAIT_S):
            assert {await lease for lease in leases} == {LeaseOutcome.READ}
        for rank in (*producers, *consumers):
            assert_quiet(rank.runtime.statistics())
    for rank in (*producers, *consumers):
        assert_closed(rank.runtime.statistics())
    after = [cache.snapshot() for rank in producers for cache in rank.caches]
    assert before == after, "the producer was written to"
    _check_bytes(case, producers, consumers)
    for rank, report in zip(consumers, reports, strict=True):
        _check_report(case, rank, report)


def serve(
    case: GroupHandOver, producers: Iterable[_Rank], computed_tokens: int | None = None, *, extends: bool = False
) -> list[Lease]:
    request = ServeRequest(
        "request",
        block_ids=request_ids(case, 0, [slice(0)] * len(case.parts) if extends else None),
        num_tokens=case.num_tokens,
        computed_tokens=computed_tokens,
        extends=extends,
    )
    return [rank.runtime.serve_blocks(request) for rank in producers]


def ticket_of(leases: Sequence[Lease]) -> dict[str, Any]:
    """The ticket as a router hands it over."""
    ticket: dict[str, Any] = json.loads(json.dumps(merge_tickets([lease.ticket for lease in leases]).to_params()))
    return ticket


async def open_engine(stack: AsyncExitStack, case: GroupHandOver, side: int, world: World | None) -> list[_Rank]:
    """A registered runtime for each rank."""
    engines, fill = engines_of(case, side), (PRODUCER_FILL, CONSUMER_FILL)[side]
    total = sum(engine.num_blocks for engine in engines)
    if case.one_pool[side] and not case.merged[side]:
        engines = [replace(engine, num_blocks=total) for engine in engines]
    ranks = []
    for place in engines[0].places:
        config = rank_config(engines[0], place, side, case.paths, world)
        caches = [RankCache(engine, place, fill) for engine in engines]
        runtime = await stack.enter_async_context(Runtime(config, world=world or World()))
        await runtime.register_kv_caches(groups_of(case, side, caches))
        ranks.append(_Rank(place, caches, runtime))
    return ranks


def groups_of(case: GroupHandOver, side: int, caches: Sequence[RankCache]) -> list[CacheGroup]:
    if case.merged[side]:
        layers = {f"{at}.{name}": tensor for at, cache in enumerate(caches) for name, tensor in cache.tensors.items()}
        layouts = [renamed(cache.layout, f"{at}.") for at, cache in enumerate(caches)]
        return [CacheGroup("all", layers, layouts)]
    return [
        CacheGroup(
            f"part{at}",
            cache.tensors,
            cache.layout,
            window=part.attention.window,
            kind="chunked" if part.attention.chunked else None,
            pool="all" if case.one_pool[side] else None,
            num_kv_heads=cache.engine.model.kv_heads if cache.engine.tells_heads else None,
        )
        for at, (part, cache) in enumerate(zip(case.parts, caches, strict=True))
    ]


def renamed(layout: CacheLayout, prefix: str) -> CacheLayout:
    """The layout of layers whose names have something in front, so that they are different from all others."""
    return replace(layout, layer_names=tuple(prefix + name for name in layout.layer_names))


def first_read(case: GroupHandOver, part: Part) -> int:
    """The first token of a part that is read: both sides have its block."""
    ours = (-(-case.num_tokens // part.consumer.block_size) - len(part.wanted)) * part.consumer.block_size
    theirs = (-(-case.num_tokens // part.producer.block_size) - len(part.offered)) * part.producer.block_size
    return max(ours, theirs, 0)


def _check_bytes(case: GroupHandOver, producers: Iterable[_Rank], consumers: Iterable[_Rank]) -> None:
    """Every token that matters is there, and no other byte has changed."""
    offered, wanted = ids_of(case, 0), ids_of(case, 1)
    for rank in consumers:
        for at, part in enumerate(case.parts):
            first = first_read(case, part) if part.wanted else case.num_tokens
            cached = (-(-case.num_tokens // part.consumer.block_size) - len(part.wanted)) * part.consumer.block_size
            for token in range(cached, case.num_tokens):
                assert token >= first or not part.attention.needs(token, case.num_tokens), f"token {token} is not read"
            source = [other.caches[at] for other in producers] if part.wanted else []
            cache = rank.caches[at]
            difference = cache.difference(source, offered[at], wanted[at], case.num_tokens, first_token=first)
            assert not difference, f"consumer, part {at}: {difference}"


def _check_report(case: GroupHandOver, rank: _Rank, report: LoadReport) -> None:
    tokens = [case.num_tokens - first_read(case, part) if part.wanted else 0 for part in case.parts]
    wanted = sum(count * part.consumer.token_bytes(rank.place) for count, part in zip(tokens, case.parts, strict=True))
    blocks = sum(len(part.wanted) for part in (case.parts[:1] if case.merged[1] else case.parts))
    assert (report.tokens, report.blocks, report.notified) == (max(tokens) if blocks else 0, blocks, True), report
    assert report.bytes == wanted or (report.bytes > wanted and not case.paths.exact), report
