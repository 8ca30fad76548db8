"""The bench `profile`: where the time of small loads goes, by hop, by thread and by function.

One producer and one reader, which stamps what it is about: loads one after the other with five stamps each, loads one
after the other and all at once with the CPU time of each thread, and once more under Python's profiler, whose own cost
makes them slower: its times say what takes more than what, not how long it takes. Objects of before the measurements
are frozen (`gc.freeze`), as engines do: a full collection of what torch has made holds a loop for a tenth of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import gc
import pstats
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import kvflow
from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.child import BenchError
from kvflow.bench.loads import Fabric, PlannedLoad, SettingsError, Ticket, scattered_loads
from kvflow.transport.base import Event, ReadEnded
from kvflow.transport.nixl.agents import NixlAgents
from kvflow.transport.nixl.loop import NixlTransport
from tests.bench.busy import busy_ranks
from tests.bench.clocks import loop_ticker
from tests.bench.compared import blocks_to_compare
from tests.bench.pairs import hand_over, open_reader, pair_of, requests
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn
from tests.bench.targets import Spread, TargetRow, at_most

ALONE_CPU_US_MAX = 150.0
BURST_S_MAX = 0.4
BURST_LAG_MS_MAX = 20.0
_BURST_LOADS = 2000
_LAYERS = 8
_HOPS = (
    "loop: until the read is posted",
    "hop to the agents' thread",
    "agents' thread: around NIXL",
    "NIXL: post, which copies over shared memory",
    "hop back to the loop",
    "loop: from the event to the report",
)
_LOOP, _AGENTS, _OTHERS = "loop", "agents", "others"
_LEGEND = (
    "One-block loads. Hops: loads one after the other, wall time of each step. Threads: CPU time of a load; held off: "
    "how much longer the loop took than that, in a burst mostly waits for Python's lock. Functions: those with most "
    "time of their own on the loop's thread, loads one after the other, under the profiler, which slows them down."
)


@dataclass(frozen=True, slots=True)
class Hops:
    """Per load, the seconds of each step in the order of `_HOPS`, and of the load."""

    steps_s: Sequence[Sequence[float]]
    loads_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class Threads:
    """Some loads: CPU seconds by thread, and how late the loop was."""

    loads: int
    seconds: float
    cpu_s: Mapping[str, float]
    lag_max_s: float
    checked_bytes: int


@dataclass(frozen=True, slots=True)
class Functions:
    """Some loads under the profiler: name, calls, and seconds of its own."""

    loads: int
    found: Sequence[tuple[str, int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HopRow:
    """One step of a load."""

    step: str
    step_s: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadRow:
    """Loads one after the other, or all at once; of a burst's rounds the medians."""

    loads: str
    total_s: float
    wall_us: float
    cpu_us: float
    loop_us: float
    agents_us: float
    others_us: float
    held_off_us: float
    lag_max_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRow:
    """A function, for each load."""

    function: str
    calls: float
    own_us: float
    share: float = field(metadata={"of": "the loop's thread"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Find where the time of small loads goes, by hop, thread and function, alone and in a burst."""

    transport: Annotated[Fabric, "Fabric that moves the bytes: shm or tcp (UCX_TLS=tcp)."] = Fabric.SHM
    alone: Annotated[int, "Loads one after the other, in each round."] = 500
    burst: Annotated[int, "Loads at once, in each round."] = _BURST_LOADS
    rounds: Annotated[int, "Rounds of each."] = 5
    functions: Annotated[int, "How many functions are listed."] = 25
    busy_cores: Annotated[int, "How many processes compute all the time meanwhile, as engines do.", 0] = 0

    @property
    def shape(self) -> CacheShape:
        return CacheShape(layers=_LAYERS, blocks=max(self.alone, self.burst) + 1).checked("--alone, --burst")

    def sets(self) -> Sequence[RankSet]:
        if min(self.alone, self.burst) < 2:
            raise SettingsError(f"--alone, --burst: at least 2, got {self.alone} and {self.burst}")
        ranks = [*pair_of(open_profiled, self.shape), *busy_ranks(self.busy_cores)]
        note, environment = f"{self.transport}: {self.rounds} rounds", self.transport.environment
        return [RankSet(note=note, ranks=ranks, turns=self._turns, environment=environment)]

    def judge(self, samples: Samples) -> Outcome:
        hops, threads = samples.of(Hops)["hops"], samples.of(Threads)
        alone, burst = (thread_row(label, threads[label]) for label in ("one by one", "at once"))
        results: dict[str, Sequence[Any]] = {
            "hops": hop_rows(hops),
            "threads": [alone, burst],
            "functions": function_rows(samples.of(Functions)["functions"][0], self.functions),
        }
        return Outcome(results=results, legend=_LEGEND, targets=targets(alone, burst, self.burst))

    def _turns(self, children: Children) -> Iterator[Turn]:
        def turn(key: str, step: Callable[..., Any], count: int, index: int) -> Turn:
            loads = scattered_loads(f"{key} {index}", self.shape.blocks, [1] * count)
            return Turn(key=key, run=partial(hand_over, children, step, loads), note=f"{key}: {count} loads")

        yield turn("warm up", ProfiledReader.one_by_one, min(self.alone, 100), 0)
        for index in range(self.rounds):
            yield turn("one by one", ProfiledReader.one_by_one, self.alone, index)
            yield turn("at once", ProfiledReader.at_once, self.burst, index)
            yield turn("hops", ProfiledReader.hops, self.alone, index)
        yield turn("functions", ProfiledReader.functions, self.alone, 0)


def hop_rows(rounds: Sequence[Hops]) -> list[HopRow]:
    steps = zip(*(step for one in rounds for step in one.steps_s), strict=True)
    rows = [HopRow(step=name, step_s=Spread.of(some)) for name, some in zip(_HOPS, steps, strict=True)]
    return [*rows, HopRow(step="the load", step_s=Spread.of([load for one in rounds for load in one.loads_s]))]


def thread_row(label: str, rounds: Sequence[Threads]) -> ThreadRow:
    if not all(one.checked_bytes for one in rounds):
        raise BenchError(f"{label}: a round ended without any byte compared")
    middle = sorted(rounds, key=lambda one: one.seconds)[len(rounds) // 2]
    each_us = 1e6 / middle.loads
    return ThreadRow(
        loads=f"{middle.loads} {label}",
        total_s=middle.seconds,
        wall_us=middle.seconds * each_us,
        cpu_us=sum(middle.cpu_s.values()) * each_us,
        loop_us=middle.cpu_s[_LOOP] * each_us,
        agents_us=middle.cpu_s[_AGENTS] * each_us,
        others_us=middle.cpu_s[_OTHERS] * each_us,
        held_off_us=(middle.seconds - middle.cpu_s[_LOOP]) * each_us,
        lag_max_ms=max(one.lag_max_s for one in rounds) * 1e3,
    )


def function_rows(found: Functions, most: int) -> list[FunctionRow]:
    total_s = sum(own_s for _, _, own_s in found.found)
    longest = sorted(found.found, key=lambda one: one[2], reverse=True)[:most]
    return [
        FunctionRow(function=name, calls=calls / found.loads, own_us=own_s / found.loads * 1e6, share=own_s / total_s)
        for name, calls, own_s in longest
    ]


def targets(alone: ThreadRow, burst: ThreadRow, loads: int) -> list[TargetRow]:
    """Return the targets. The CPU of a burst is a promise for 2,000 loads only."""
    of_all = loads == _BURST_LOADS
    return [
        at_most("one load, CPU of its process, us", ALONE_CPU_US_MAX, [(alone.cpu_us, alone.loads)]),
        at_most("2,000 at once, s", BURST_S_MAX, [(burst.total_s, burst.loads)] if of_all else []),
        at_most(
            "2,000 at once, loop lag max, ms", BURST_LAG_MS_MAX, [(burst.lag_max_ms, burst.loads)] if of_all else []
        ),
    ]


# --- in the process that loads


@contextlib.asynccontextmanager
async def open_profiled(shape: CacheShape) -> AsyncIterator[ProfiledReader]:
    read_times = ReadTimes()
    with read_times.recorded():
        async with open_reader(partial(ProfiledReader, read_times), shape) as reader:
            gc.collect()
            gc.freeze()
            yield reader


class ReadTimes:
    """When a load's read passed each of the borders between loop, agents' thread and NIXL: the last one's."""

    def __init__(self) -> None:
        self.posted_s = self.picked_up_s = self.reported_s = self.delivered_s = self.post_s = 0.0

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside the block, of every runtime that is opened there."""
        post_read, post, put, run = (
            NixlTransport.post_read,
            NixlAgents.post,
            NixlTransport._put_event,
            NixlTransport.run,
        )

        def stamped_post_read(*args: Any) -> Any:
            self.posted_s = time.perf_counter()
            return post_read(*args)

        def stamped_post(*args: Any) -> None:
            self.picked_up_s = time.perf_counter()
            post(*args)

        def stamped_put(transport: NixlTransport, event: Event) -> None:
            if isinstance(event, ReadEnded):
                self.reported_s, self.post_s = time.perf_counter(), event.post_s
            put(transport, event)

        async def stamped_run(transport: NixlTransport, deliver: Callable[[Event], None]) -> None:
            def timed_deliver(event: Event) -> None:
                self.delivered_s = time.perf_counter()
                deliver(event)

            await run(transport, timed_deliver)

        with (
            patch.object(NixlAgents, "post", stamped_post),
            patch.multiple(NixlTransport, post_read=stamped_post_read, _put_event=stamped_put, run=stamped_run),
        ):
            yield

    def steps(self, begun_s: float, ended_s: float) -> tuple[float, ...]:
        """The steps of `_HOPS`, of a load of one read that began and ended then."""
        return (
            self.posted_s - begun_s,
            self.picked_up_s - self.posted_s,
            self.reported_s - self.picked_up_s - self.post_s,
            self.post_s,
            self.delivered_s - self.reported_s,
            ended_s - self.delivered_s,
        )


class ProfiledReader:
    """The rank of the reader's process."""

    def __init__(self, read_times: ReadTimes, runtime: kvflow.Runtime, cache: BenchCache) -> None:
        self._read_times = read_times
        self._runtime = runtime
        self._cache = cache

    async def one_by_one(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> Threads:
        wanted = requests(loads, tickets)
        return await self._measured(partial(self._load_each, wanted), loads)

    async def at_once(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> Threads:
        async def load() -> None:
            await asyncio.gather(*map(self._runtime.load_blocks, wanted))

        wanted = requests(loads, tickets)
        return await self._measured(load, loads)

    async def hops(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> Hops:
        steps_s, loads_s = [], []
        for request in requests(loads, tickets):
            begun_s = time.perf_counter()
            await self._runtime.load_blocks(request)
            ended_s = time.perf_counter()
            steps_s.append(self._read_times.steps(begun_s, ended_s))
            loads_s.append(ended_s - begun_s)
        return Hops(steps_s, loads_s)

    async def functions(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> Functions:
        wanted, profiler = requests(loads, tickets), cProfile.Profile()
        profiler.enable()
        await self._load_each(wanted)
        profiler.disable()
        stats: Mapping[tuple[str, int, str], tuple[int, int, float, float, object]] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
        found = [(_name_of(*where), calls, own_s) for where, (_, calls, own_s, _, _) in stats.items()]
        return Functions(len(loads), found)

    async def _load_each(self, wanted: Sequence[kvflow.LoadRequest]) -> None:
        for request in wanted:
            await self._runtime.load_blocks(request)

    async def _measured(self, load: Callable[[], Coroutine[Any, Any, None]], loads: Sequence[PlannedLoad]) -> Threads:
        local_ids, remote_ids = blocks_to_compare(loads, check_all=True)
        self._cache.poison(local_ids)
        lags_s: list[float] = []
        clocks = _thread_clocks()
        async with loop_ticker(lags_s):
            before_s = {name: sum(map(time.clock_gettime, some)) for name, some in clocks.items()}
            begun_s = time.perf_counter()
            await load()
            seconds = time.perf_counter() - begun_s
            cpu_s = {name: sum(map(time.clock_gettime, some)) - before_s[name] for name, some in clocks.items()}
        checked_bytes = self._cache.check(local_ids, remote_ids)
        return Threads(len(loads), seconds, cpu_s, max(lags_s, default=0.0), checked_bytes)


def _thread_clocks() -> dict[str, list[int]]:
    """The CPU clocks of this process's Python threads, by the work of the thread."""
    clocks: dict[str, list[int]] = {_LOOP: [], _AGENTS: [], _OTHERS: []}
    for thread in threading.enumerate():
        own = thread is threading.current_thread()
        kind = _LOOP if own else _AGENTS if thread.name.startswith("kvflow-agent") else _OTHERS
        if thread.ident is not None:
            clocks[kind].append(time.pthread_getcpuclockid(thread.ident))
    return clocks


def _name_of(file: str, _: int, function: str) -> str:
    """As in "kvflow/core/plan/descriptors.py match_chunks"; of built-ins their own name."""
    path = Path(file)
    return function if file.startswith("~") else f"{path.parent.name}/{path.name} {function}"
