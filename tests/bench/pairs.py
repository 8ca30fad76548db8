"""A producer and a reader in processes of their own, and loads of scattered blocks, as most benches here have them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import kvflow
from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.child import RankProcess
from kvflow.bench.engine import EngineProducer, config_of, open_producer, open_runtime
from kvflow.bench.loads import PlannedLoad, SettingsError, Ticket
from tests.bench.scenario import Children

ReaderT = TypeVar("ReaderT")
Opening = Callable[[CacheShape], contextlib.AbstractAsyncContextManager[Any]]


def pair_of(reader: Opening, shape: CacheShape, producers: Sequence[str] = ("producer",)) -> list[RankProcess]:
    """Producers of equal caches, and what `reader` opens."""
    ranks = [RankProcess(name, partial(open_producer, config_of(f"bench-{name}"), shape)) for name in producers]
    return [*ranks, RankProcess("reader", partial(reader, shape))]


@contextlib.asynccontextmanager
async def open_reader(
    kind: Callable[[kvflow.Runtime, BenchCache], ReaderT], shape: CacheShape
) -> AsyncIterator[ReaderT]:
    cache = BenchCache(shape)
    async with open_runtime(config_of("bench-reader"), cache) as runtime:
        yield kind(runtime, cache)


def hand_over(
    children: Children, step: Callable[..., Coroutine[Any, Any, Any]], loads: Sequence[PlannedLoad], *others: object
) -> Any:
    """Offer, have the reader do its step, and see that every lease has ended as read."""
    tickets = children["producer"].run(EngineProducer.offer, loads)
    result = children["reader"].run(step, loads, tickets, *others)
    children["producer"].run(EngineProducer.end_leases)
    return result


def requests(loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> list[kvflow.LoadRequest]:
    both = zip(loads, tickets, strict=True)
    return [kvflow.LoadRequest(load.request_id, ticket=ticket, block_ids=load.local_ids) for load, ticket in both]


def numbers(option: str, text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise SettingsError(f"{option}: expected numbers and commas, got {text[:80]!r}") from error
