"""The bench `pages`: how long prompts of many pages of one token hold the event loops of both engines.

As engines with pages of one token have them (SGLang's default with some kernels): a producer serves the prompt, makes
the ticket's dict, and the reader starts and performs the load. The pages are tiny, so that bytes are not the cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, NamedTuple

import kvflow
from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.child import RankProcess
from kvflow.bench.engine import config_of, open_runtime
from kvflow.bench.loads import Fabric, PlannedLoad, SettingsError, Ticket, scattered_loads
from tests.bench.clocks import loop_ticker
from tests.bench.compared import blocks_to_compare
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn, interleaved
from tests.bench.targets import Spread, at_most

HELD_MS_MAX = 20.0
_PROMISED_PAGES = 1 << 18
_ORDERS = ("scattered", "in order")
_LEGEND = (
    "A call holds its event loop for as long as it takes. Longest turn: of the reader's loop, during the load. Of each "
    "load's pages a few are compared."
)


class Held(NamedTuple):
    """Seconds in which one hand-over held a loop: in three calls and, at most, in a turn of the load's."""

    serve_s: float
    ticket_s: float
    start_s: float
    turn_s: float
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesRow:
    """Times for prompts of `pages` pages."""

    pages: int
    ids: str
    serve_s: Spread
    ticket_s: Spread
    start_s: Spread
    longest_turn_s: Spread
    load_s: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Measure how long prompts of many pages of one token hold the event loops of both engines."""

    pages: Annotated[str, "Pages of a prompt, one token each, separated by commas."] = "32768,262144"
    rounds: Annotated[int, "Hand-overs of each."] = 7

    @property
    def counts(self) -> list[int]:
        words = self.pages.split(",")
        if not all(word.strip().isdecimal() and int(word) for word in words):
            raise SettingsError(f"--pages: expected numbers and commas, got {self.pages[:80]!r}")
        return sorted({int(word) for word in words})

    @property
    def cases(self) -> list[tuple[int, str]]:
        """Every number of pages, scattered and in order."""
        return [(pages, order) for pages in self.counts for order in _ORDERS]

    @property
    def shape(self) -> CacheShape:
        """An eighth more pages than the longest prompt takes, so that they are scattered."""
        most = self.counts[-1]
        shape = CacheShape(layers=1, blocks=most + -(-most // 8), kv_heads=1, block_size=1, head_size=8)
        return shape.checked("--pages")

    def sets(self) -> Sequence[RankSet]:
        ranks = [
            RankProcess("producer", partial(open_rank, PagesProducer, "bench-producer", self.shape)),
            RankProcess("reader", partial(open_rank, PagesReader, "bench-reader", self.shape)),
        ]
        note = f"{self.rounds} rounds of {' and '.join(map(str, self.counts))} pages"
        return [RankSet(note=note, ranks=ranks, turns=self._turns, environment=Fabric.SHM.environment)]

    def judge(self, samples: Samples) -> Outcome:
        taken = samples.of(Held)
        rows = [
            PagesRow(
                pages=pages, ids=ids, **{f"{name}_s": Spread.of(some) for name, some in _columns(taken[pages, ids])}
            )
            for pages, ids in self.cases
        ]
        held = [
            (spread.p50 * 1e3, f"{row.ids}, {call}")
            for row in rows
            if row.pages == _PROMISED_PAGES
            for call, spread in (("serve", row.serve_s), ("start", row.start_s), ("turn", row.longest_turn_s))
        ]
        target = at_most(f"{_PROMISED_PAGES} pages, a loop is held, ms", HELD_MS_MAX, held)
        return Outcome(results={"pages": rows}, legend=_LEGEND, targets=[target])

    def _turns(self, children: Children) -> Iterator[Turn]:
        yield Turn(key="connect", run=partial(self._hand_over, children, self.planned("connect", 8, _ORDERS[0])))
        for index, (pages, order) in interleaved(self.cases, range(self.rounds)):
            load = self.planned(f"round {index}", pages, order)
            yield Turn(key=(pages, order), run=partial(self._hand_over, children, load))

    def planned(self, turn: str, pages: int, order: str) -> PlannedLoad:
        (load,) = scattered_loads(f"{turn} {pages} {order}", self.shape.blocks, [pages])
        ids = tuple(range(pages))
        return load if order == _ORDERS[0] else replace(load, local_ids=ids, remote_ids=ids)

    def _hand_over(self, children: Children, load: PlannedLoad) -> Held:
        ticket, serve_s, ticket_s = children["producer"].run(PagesProducer.offer, load)
        start_s, turn_s, load_s = children["reader"].run(PagesReader.load, load, ticket)
        children["producer"].run(PagesProducer.end)
        return Held(serve_s, ticket_s, start_s, turn_s, load_s)


def _columns(taken: Sequence[Held]) -> Iterator[tuple[str, Sequence[float]]]:
    return zip(("serve", "ticket", "start", "longest_turn", "load"), zip(*taken, strict=True), strict=True)


@contextlib.asynccontextmanager
async def open_rank(
    kind: type[PagesProducer] | type[PagesReader], engine_id: str, shape: CacheShape
) -> AsyncIterator[PagesProducer | PagesReader]:
    cache, limits = BenchCache(shape), kvflow.Limits(block_ids_max=2 * shape.blocks)
    cache.fill()
    async with open_runtime(replace(config_of(engine_id), limits=limits), cache) as runtime:
        gc.collect()
        gc.freeze()  # as engines do
        yield kind(runtime, cache)


class PagesProducer:
    """The process that serves."""

    def __init__(self, runtime: kvflow.Runtime, _: BenchCache) -> None:
        self._runtime = runtime
        self._lease: kvflow.Lease

    async def offer(self, load: PlannedLoad) -> tuple[Ticket, float, float]:
        """The ticket, and how long serving and making its dict took."""
        request = kvflow.ServeRequest(load.request_id, list(load.remote_ids), len(load.remote_ids))
        begun_s = time.perf_counter()
        self._lease = self._runtime.serve_blocks(request)
        served_s = time.perf_counter()
        ticket = self._lease.ticket.to_params()
        return ticket, served_s - begun_s, time.perf_counter() - served_s

    async def end(self) -> None:
        if (outcome := await self._lease) is not kvflow.LeaseOutcome.READ:
            raise RuntimeError(f"a lease ended as {outcome}")


class PagesReader:
    """The process that loads."""

    def __init__(self, runtime: kvflow.Runtime, cache: BenchCache) -> None:
        self._runtime = runtime
        self._cache = cache

    async def load(self, load: PlannedLoad, ticket: Ticket) -> tuple[float, float, float]:
        """How long starting the load took, the longest turn of the loop meanwhile, and the load."""
        local_ids, remote_ids = blocks_to_compare([load], check_all=False)
        self._cache.poison(local_ids)
        request = kvflow.LoadRequest(load.request_id, ticket=ticket, block_ids=list(load.local_ids))
        lags_s: list[float] = []
        begun_s = time.perf_counter()
        started = self._runtime.start_load(request)
        started_s = time.perf_counter()
        await asyncio.sleep(0)  # the load's first turn
        lags_s.append(time.perf_counter() - started_s)
        async with loop_ticker(lags_s):
            await started
            ended_s = time.perf_counter()
        self._cache.check(local_ids, remote_ids)
        return started_s - begun_s, max(lags_s), ended_s - started_s
