"""Contender (d): (b) behind one thread and an event loop, nothing else: the floor of whatever keeps NIXL off a loop.

The reader's agent belongs to one thread; a coroutine on uvloop hands it each load, which is word for word (b)'s, and
awaits the end. The ticker runs beside it as it does for kvflow. What (c) takes longer than this is kvflow's own work;
what this takes longer than (b) are two changes of thread. The thread is no code of kvflow's runtime, so that the
floor does not move with it. The producer is (b)'s.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

from kvflow.cli.bench.cache import BenchCache
from kvflow.cli.bench.clocks import loop_ticker, process_cpu_s
from kvflow.cli.bench.loops import receive, run_on_uvloop
from kvflow.cli.bench.messages import Connect, Done, Load, Quit, RunTurn, TurnResult
from kvflow.cli.bench.raw import TunedAgent
from kvflow.cli.bench.raw_child import check_targets, poison_targets
from kvflow.cli.bench.settings import CacheShape

_Job = Callable[[], None]


class HopThread:
    """Runs jobs in order on one thread; the least that does."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="bench-hop", daemon=True)
        self._thread.start()

    async def call(self, job: _Job) -> None:
        done: asyncio.Future[None] = self._loop.create_future()

        def run() -> None:
            try:
                job()
            except Exception as error:  # noqa: BLE001  (raised where the job was handed over)
                self._loop.call_soon_threadsafe(done.set_exception, error)
            else:
                self._loop.call_soon_threadsafe(done.set_result, None)

        self._jobs.put(run)
        await done

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


@dataclass(frozen=True, slots=True, kw_only=True)
class HopReader:
    """Body of the reader process."""

    shape: CacheShape

    def __call__(self, pipe: Connection) -> None:
        run_on_uvloop(_read(pipe, self.shape))


async def _read(pipe: Connection, shape: CacheShape) -> None:
    cache = BenchCache(shape, filled=False)
    agent = TunedAgent("hop-reader", cache, producer=False)
    pids = [os.getpid()]
    thread = HopThread()
    while not isinstance(message := await receive(pipe), Quit):
        match message:
            case Connect():
                await thread.call(partial(agent.connect, message.address))
                pids.append(message.producer_pid)
                pipe.send(Done())
            case RunTurn():
                pipe.send(await _run_turn(thread, agent, cache, message, pids))
            case _:
                raise TypeError(f"hop reader: unexpected {type(message).__name__}")
    thread.close()


async def _run_turn(
    thread: HopThread, agent: TunedAgent, cache: BenchCache, turn: RunTurn, pids: list[int]
) -> TurnResult:
    poison_targets(cache, turn)
    wake, *timed = turn.loads
    await _load(thread, agent, wake)
    seconds: list[float] = []
    lags_s: list[float] = []
    async with loop_ticker(lags_s):
        cpu_before_s = sum(map(process_cpu_s, pids))
        for load in timed:
            start = time.perf_counter()
            await _load(thread, agent, load)
            seconds.append(time.perf_counter() - start)
        cpu_s = sum(map(process_cpu_s, pids)) - cpu_before_s
    checked = check_targets(cache, turn)
    return TurnResult(seconds=tuple(seconds), cpu_s=cpu_s, checked_blocks=checked, lags_s=tuple(lags_s))


async def _load(thread: HopThread, agent: TunedAgent, load: Load) -> None:
    await thread.call(partial(agent.load, load.local_ids, load.remote_ids))
