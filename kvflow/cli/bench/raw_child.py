"""What the processes of contenders (a) and (b) do: answer messages, in plain blocking code.

The producer waits for messages in a blocking recv; its agent's progress thread serves the reads.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from kvflow.cli.bench.cache import BenchCache, sample_indices
from kvflow.cli.bench.clocks import process_cpu_s
from kvflow.cli.bench.messages import (
    Connect,
    Done,
    Load,
    Message,
    Offer,
    Offered,
    Quit,
    RunTurn,
    Settle,
    TurnResult,
)
from kvflow.cli.bench.raw import ExampleAgent, RawAgent, TunedAgent
from kvflow.cli.bench.settings import CacheShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RawProducer:
    """Body of a producer process."""

    shape: CacheShape
    tuned: bool

    def __call__(self, pipe: Connection) -> None:
        agent = _make_agent("producer", BenchCache(self.shape, filled=True), tuned=self.tuned)
        pipe.send(agent.address())
        while True:
            message: Message = pipe.recv()
            match message:
                case Offer():
                    pipe.send(Offered())
                case Settle():
                    agent.drain()
                    pipe.send(Done())
                case Quit():
                    return
                case _:
                    raise TypeError(f"raw producer: unexpected {type(message).__name__}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawReader:
    """Body of a reader process."""

    shape: CacheShape
    tuned: bool

    def __call__(self, pipe: Connection) -> None:
        cache = BenchCache(self.shape, filled=False)
        agent = _make_agent("reader", cache, tuned=self.tuned)
        pids = [os.getpid()]
        while True:
            message: Message = pipe.recv()
            match message:
                case Connect():
                    agent.connect(message.address)
                    pids.append(message.producer_pid)
                    pipe.send(Done())
                case RunTurn():
                    pipe.send(_run_turn(agent, cache, message, pids))
                case Quit():
                    return
                case _:
                    raise TypeError(f"raw reader: unexpected {type(message).__name__}")


def _make_agent(role: str, cache: BenchCache, *, tuned: bool) -> RawAgent:
    if tuned:
        return TunedAgent(f"tuned-{role}", cache, producer=role == "producer")
    return ExampleAgent(f"example-{role}", cache)


def _run_turn(agent: RawAgent, cache: BenchCache, turn: RunTurn, pids: list[int]) -> TurnResult:
    poison_targets(cache, turn)
    wake, *timed = turn.loads
    agent.load(wake.local_ids, wake.remote_ids)
    cpu_before_s = sum(map(process_cpu_s, pids))
    seconds = tuple(_timed_load(agent, load) for load in timed)
    cpu_s = sum(map(process_cpu_s, pids)) - cpu_before_s
    return TurnResult(seconds=seconds, cpu_s=cpu_s, checked_blocks=check_targets(cache, turn))


def _timed_load(agent: RawAgent, load: Load) -> float:
    start = time.perf_counter()
    agent.load(load.local_ids, load.remote_ids)
    return time.perf_counter() - start


def poison_targets(cache: BenchCache, turn: RunTurn) -> None:
    """Make sure that what `check_targets` will look at was not right before."""
    for load in turn.loads:
        cache.poison([load.local_ids[i] for i in sample_indices(len(load.local_ids), check_all=turn.check_all)])


def check_targets(cache: BenchCache, turn: RunTurn) -> int:
    """Compare blocks of every load with what the producer holds; how many were compared."""
    checked = 0
    for load in turn.loads:
        chosen = sample_indices(len(load.local_ids), check_all=turn.check_all)
        checked += cache.check([load.local_ids[i] for i in chosen], [load.remote_ids[i] for i in chosen])
    return checked
