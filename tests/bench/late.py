"""The bench `late`: how much smaller a decode engine's pool of blocks may be if blocks are taken as bytes flow.

Several scripted prefill engines, each with a queue of its own, compute prompts of very different lengths, some blocks
at a time. Decode gets every request at the same moment as prefill does. It takes the blocks of a whole prompt then
("early"), or as tokens are computed ("late"), and keeps them for the time of an answer. Goodput is the number of
prompts that decode has in time, per second. Producer and reader are two processes on one machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import heapq
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Annotated, NamedTuple, TypeAlias

import kvflow
from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.child import BenchError, RankProcess
from kvflow.bench.engine import config_of, open_runtime
from kvflow.bench.loads import Fabric, SettingsError, Ticket
from tests.bench.pairs import open_reader
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn
from tests.bench.targets import Spread, at_least

BLOCK_SIZE = 16
_CHUNK_BLOCKS = 8
_LONGEST = 4  # times the mean length of a prompt
_SIGMA = 0.9  # of the logarithm of a prompt's length
_GOODPUT_MIN = 0.95
_BEGIN_AFTER_S = 0.5
_END_TIMEOUT_S = 120.0
_LEGEND = (
    "Goodput: prompts that were handed over in time, per second. Waited: from a request's arrival to its last byte. "
    "Blocks: the most that were taken at once. Given back: loads that were cancelled because no block was left, and "
    "begun again. How much of the pool can be saved depends on the time in prefill's queues beside that of answers."
)


class Mode(enum.StrEnum):
    """When decode takes the blocks of a prompt."""

    EARLY = "early"
    LATE = "late"


class Prompt(NamedTuple):
    """One request: when it comes, its length, the prefill engine that computes it, and how long its answer takes."""

    name: str
    arrival_s: float
    blocks: int
    engine: int
    answer_s: float


class Run(NamedTuple):
    """One run: times from arrivals to last bytes, most blocks taken at once, and number of loads given back."""

    waited_s: Sequence[float]
    blocks: int
    given_back: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LateResult:
    """A pool of one size, and when blocks are taken from it."""

    mode: Mode
    pool: int
    blocks: int
    requests: int
    goodput_per_s: float
    waited_s: Spread
    given_back: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """Measure goodput with decode pools of two sizes, if blocks are taken at a request's arrival, and as bytes flow."""

    link: Annotated[Fabric, "Fabric that moves the bytes: shm or tcp."] = Fabric.SHM
    pool: Annotated[int, "Blocks of decode's whole pool; the other has half of them."] = 1200
    engines: Annotated[int, "Prefill engines."] = 4
    prompt_blocks: Annotated[int, "Mean length of a prompt in blocks of 16 tokens."] = 64
    block_ms: Annotated[float, "Time in which a prefill engine computes a block."] = 5.0
    answer_s: Annotated[float, "Mean time of an answer."] = 0.4
    rate_per_s: Annotated[float, "Requests per second."] = 11.0
    within_s: Annotated[float, "Time in which a prompt has to be handed over."] = 1.0
    span_s: Annotated[float, "Seconds in which requests arrive."] = 20.0
    seed: Annotated[int, "Of the requests."] = 1

    @property
    def prefill_blocks(self) -> int:
        """Blocks of all prefill engines."""
        return self.engines * 2 * _LONGEST * self.prompt_blocks

    def sets(self) -> Sequence[RankSet]:
        if self.pool < 2 * (longest := _LONGEST * self.prompt_blocks):
            raise SettingsError(f"--pool: half of {self.pool} blocks is less than the longest prompt, of {longest}")
        shape = partial(CacheShape, layers=2, kv_heads=2, head_size=64, block_size=BLOCK_SIZE)
        ranks = (
            RankProcess("producer", partial(open_prefill, shape(blocks=self.prefill_blocks))),
            RankProcess("reader", partial(open_reader, Decode, shape(blocks=self.pool))),
        )
        note = f"{self.link}: {len(self.prompts('count'))} requests in {self.span_s:g} s, three times"
        return [RankSet(note=note, ranks=ranks, turns=self._turns, environment=self.link.environment)]

    def prompts(self, turn: str) -> list[Prompt]:
        """Return the requests of a turn; those of all turns are alike."""
        rng, at_s, found = random.Random(self.seed), 0.0, list[Prompt]()
        while (at_s := at_s + rng.expovariate(self.rate_per_s)) < self.span_s:
            length = rng.lognormvariate(-(_SIGMA**2) / 2, _SIGMA) * self.prompt_blocks
            blocks = min(max(round(length), 1), _LONGEST * self.prompt_blocks)
            answer_s = rng.expovariate(1 / self.answer_s)
            name = f"bench {turn} {len(found)}"
            found.append(Prompt(name, at_s, blocks, rng.randrange(self.engines), answer_s))
        return found

    def _turns(self, children: Children) -> Iterator[Turn]:
        for mode, pool in ((Mode.EARLY, self.pool), (Mode.EARLY, self.pool // 2), (Mode.LATE, self.pool // 2)):
            note = f"{mode}, {pool} blocks"
            run = partial(self._run, children, self.prompts(f"{mode} {pool}"), mode, pool)
            yield Turn(key=(mode, pool), run=run, note=note)

    def _run(self, children: Children, prompts: Sequence[Prompt], mode: Mode, pool: int) -> Run:
        producer, reader = children["producer"], children["reader"]
        introduction = producer.run(Prefill.introduction)
        start_s = time.monotonic() + _BEGIN_AFTER_S
        computing = producer.start(Prefill.compute, prompts, start_s, self.block_ms / 1e3)
        run = reader.run(Decode.answer, prompts, introduction, start_s, mode, pool)
        computing()
        return run

    def judge(self, samples: Samples) -> Outcome:
        rows = []
        for (mode, pool), (run,) in samples.of(Run).items():
            in_time = sum(waited_s <= self.within_s for waited_s in run.waited_s)
            row = LateResult(
                mode=mode,
                pool=pool,
                blocks=run.blocks,
                requests=len(run.waited_s),
                goodput_per_s=in_time / self.span_s,
                waited_s=Spread.of(run.waited_s),
                given_back=run.given_back,
            )
            rows.append(row)
        whole, early, late = rows
        if not whole.goodput_per_s:
            raise BenchError(f"no prompt was handed over within {self.within_s:g} s (--within-s)")
        values = [(late.goodput_per_s / whole.goodput_per_s, f"early: {early.goodput_per_s / whole.goodput_per_s:.2f}")]
        target = at_least("late in half of the pool, to early in the whole: goodput", _GOODPUT_MIN, values)
        return Outcome(results={"late": rows}, legend=_LEGEND, targets=[target])


class BlockPool:
    """Blocks that requests wait for, the one that came first before the others."""

    def __init__(self, block_ids: Sequence[int]) -> None:
        self._free = list(block_ids)
        self._waiting: list[tuple[int, int, asyncio.Future[list[int]]]] = []
        """Heap of (place in the order of arrival, number of blocks, future of the blocks)."""
        self._taken = self.most_taken = 0

    @property
    def stuck(self) -> bool:
        """True if requests wait for blocks."""
        return len(self._waiting) > 0

    async def take(self, count: int, place: int) -> list[int]:
        blocks: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (place, count, blocks))
        self._serve()
        return await blocks

    def give_back(self, block_ids: Sequence[int]) -> None:
        self._free += block_ids
        self._taken -= len(block_ids)
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            _, count, blocks = self._waiting[0]
            if not blocks.cancelled():
                if count > len(self._free):
                    return
                blocks.set_result([self._free.pop() for _ in range(count)])
                self._taken += count
                self.most_taken = max(self.most_taken, self._taken)
            heapq.heappop(self._waiting)


class Prefill:
    """Scripted prefill engines, which share a runtime."""

    def __init__(self, runtime: kvflow.Runtime, shape: CacheShape) -> None:
        self._runtime = runtime
        self._blocks = shape.blocks

    async def introduction(self) -> Ticket:
        return dict(self._runtime.introduce().to_params())

    async def compute(self, prompts: Sequence[Prompt], start_s: float, block_s: float) -> None:
        """Compute all prompts; each engine in the order of arrival. Return once all leases have ended as read."""
        by_engine = attrgetter("engine")
        queues = [list(some) for _, some in groupby(sorted(prompts, key=by_engine), by_engine)]
        share = self._blocks // len(queues)
        engines = [
            self._compute_in_turn(queue, BlockPool(range(at * share, (at + 1) * share)), start_s, block_s)
            for at, queue in enumerate(queues)
        ]
        await asyncio.gather(*engines)

    async def _compute_in_turn(
        self, prompts: Sequence[Prompt], pool: BlockPool, start_s: float, block_s: float
    ) -> None:
        reading = []
        for place, prompt in enumerate(prompts):
            await _sleep_until(start_s + prompt.arrival_s)
            block_ids = await pool.take(prompt.blocks, place)
            request = kvflow.ServeRequest(
                kvflow_name(prompt), [], prompt.blocks * BLOCK_SIZE, computed_tokens=0, extends=True
            )
            lease = self._runtime.serve_blocks(request)
            for first in range(0, prompt.blocks, _CHUNK_BLOCKS):
                chunk = block_ids[first : first + _CHUNK_BLOCKS]
                await asyncio.sleep(len(chunk) * block_s)
                lease.extend(chunk)
                lease.advance((first + len(chunk)) * BLOCK_SIZE)
            reading.append(asyncio.create_task(_free_when_read(lease, pool, block_ids)))
        async with asyncio.timeout(_END_TIMEOUT_S):
            await asyncio.gather(*reading)


async def _free_when_read(lease: kvflow.Lease, pool: BlockPool, block_ids: Sequence[int]) -> None:
    outcome = await lease
    if outcome is not kvflow.LeaseOutcome.READ:
        raise BenchError(f"a lease ended as {outcome}")
    pool.give_back(block_ids)


@contextlib.asynccontextmanager
async def open_prefill(shape: CacheShape) -> AsyncIterator[Prefill]:
    cache = BenchCache(shape)
    cache.fill()
    async with open_runtime(config_of("bench-producer"), cache) as runtime:
        yield Prefill(runtime, shape)


class Decode:
    """A scripted decode engine with a pool of blocks of its own."""

    def __init__(self, runtime: kvflow.Runtime, cache: BenchCache) -> None:
        self._runtime = runtime

    async def answer(
        self, prompts: Sequence[Prompt], introduction: Ticket, start_s: float, mode: Mode, pool: int
    ) -> Run:
        run = _Answers(self._runtime, introduction, BlockPool(range(pool)), start_s)
        receive = run.receive_early if mode is Mode.EARLY else run.receive_late
        answers = [run.answer(place, prompt, receive) for place, prompt in enumerate(prompts)]
        waited_s = await asyncio.gather(*answers)
        return Run(waited_s, run.pool.most_taken, run.given_back)


Receive: TypeAlias = Callable[[int, Prompt, Ticket], Awaitable[list[int]]]
"""Function that receives a prompt, and returns its blocks."""


class _Answers:
    """The requests of one run."""

    def __init__(self, runtime: kvflow.Runtime, introduction: Ticket, pool: BlockPool, start_s: float) -> None:
        self._runtime = runtime
        self._introduction = introduction
        self._start_s = start_s
        self.pool = pool
        self.given_back = 0
        self._answering = 0
        self._loading: dict[int, kvflow.Load] = {}
        """Loads that get blocks as bytes flow, by the place of their request in the order of arrival."""
        self._lacking: set[int] = set()
        """Places of those that wait for blocks."""

    async def answer(self, place: int, prompt: Prompt, receive: Receive) -> float:
        """Wait for the request, receive its prompt, and answer it. Return the seconds from its arrival to its bytes."""
        await _sleep_until(self._start_s + prompt.arrival_s)
        name = kvflow_name(prompt)
        ticket = dict(kvflow.Ticket.rendezvous(self._introduction, name, ttl_s=_END_TIMEOUT_S).to_params())
        block_ids = await receive(place, prompt, ticket)
        waited_s = time.monotonic() - self._start_s - prompt.arrival_s
        self._answering += 1
        await asyncio.sleep(prompt.answer_s)
        self._answering -= 1
        self.pool.give_back(block_ids)
        self._unstick()
        return waited_s

    async def receive_early(self, place: int, prompt: Prompt, ticket: Ticket) -> list[int]:
        """Take all blocks, then load. The prompt may be in its prefill engine's queue for long."""
        with self._runtime.keep_leases(ticket):
            block_ids = await self.pool.take(prompt.blocks, place)
            await self._runtime.load_blocks(kvflow.LoadRequest(prompt.name, ticket, block_ids))
        return block_ids

    async def receive_late(self, place: int, prompt: Prompt, ticket: Ticket) -> list[int]:
        """Load, and take blocks as tokens are computed. If the load is given back, begin again."""
        with self._runtime.keep_leases(ticket):
            while (block_ids := await self._receive_once(place, prompt, ticket)) is None:
                self.given_back += 1
        return block_ids

    async def _receive_once(self, place: int, prompt: Prompt, ticket: Ticket) -> list[int] | None:
        load = self._runtime.start_load(kvflow.LoadRequest(prompt.name, ticket, [], extends=True))
        self._loading[place], tokens, block_ids = load, 0, list[int]()
        while len(block_ids) < prompt.blocks and (computed := await load.computed(tokens)) is not None:
            tokens = computed
            wait = asyncio.ensure_future(self.pool.take(math.ceil(tokens / BLOCK_SIZE) - len(block_ids), place))
            self._lacking.add(place)
            self._unstick()
            ended = asyncio.ensure_future(load.settled())
            await asyncio.wait([wait, ended], return_when=asyncio.FIRST_COMPLETED)
            self._lacking.discard(place)
            ended.cancel()
            if not wait.done():
                wait.cancel()
                break
            block_ids += wait.result()
            load.extend(block_ids[len(load.block_ids) :])
        await asyncio.wait([asyncio.ensure_future(load.settled())])
        del self._loading[place]
        try:
            await load
        except asyncio.CancelledError:
            self.pool.give_back(block_ids)
            return None
        return block_ids

    def _unstick(self) -> None:
        """If every load waits for blocks, and no answer will free some, give back the load that came last."""
        holding = [place for place, load in self._loading.items() if load.block_ids]
        if self.pool.stuck and not self._answering and set(holding) <= self._lacking and holding:
            self._loading[max(holding)].cancel()


def kvflow_name(prompt: Prompt) -> str:
    """Return the name of a prompt's lease: known to both sides, in a run without strangers."""
    return f"{prompt.name} of both engines"


async def _sleep_until(when_s: float) -> None:
    if (wait_s := when_s - time.monotonic()) > 0:
        await asyncio.sleep(wait_s)
