"""What an event loop that is never idle costs a load (docs/decisions/0033-one-thread.md). No test.

    python tests/bench/never_idle.py [--turns-ms 0,0.1,1] [--intervals-ms 5,0.05] [--loads 5] [--blocks 1]

A task of the reader's loop computes for as long as a turn takes, lets others run, and begins anew; loads go one after
the other beside it. For each length of a turn (0: no such task) and each switch interval of Python's lock
(`sys.setswitchinterval`, the host's to set). The producer is another process; bytes go through shared memory. Threads
are starved only where cores are free: on a busy machine run it under `chrt -f 1`, and only for some seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial

from kvflow import LoadRequest, Runtime
from kvflow.bench.cache import CacheShape, PatternCache
from kvflow.bench.child import RankProcess, open_children
from kvflow.bench.engine import EngineProducer, config_of, open_producer, open_runtime
from kvflow.bench.loads import PlannedLoad, Ticket, Transport, scattered, share_out

_LAYERS = 8


class Reader:
    """The process that loads beside a task that is never idle."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def load(
        self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket], turn_s: float, interval_s: float
    ) -> list[float]:
        """How long each load took."""
        took_s = []
        with switch_interval(interval_s):
            turns = asyncio.create_task(take_turns(turn_s)) if turn_s else None
            for load, ticket in zip(loads, tickets, strict=True):
                begun_s = time.perf_counter()
                await self._runtime.load_blocks(LoadRequest(load.request_id, ticket=ticket, block_ids=load.local_ids))
                took_s.append(time.perf_counter() - begun_s)
            if turns is not None:
                turns.cancel()
        return took_s


async def take_turns(turn_s: float) -> None:
    while True:
        end_s = time.perf_counter() + turn_s
        while time.perf_counter() < end_s:
            pass
        await asyncio.sleep(0)


@contextlib.contextmanager
def switch_interval(interval_s: float) -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


@contextlib.asynccontextmanager
async def open_reader(shape: CacheShape) -> AsyncIterator[Reader]:
    async with open_runtime(config_of("bench-reader"), PatternCache(shape)) as runtime:
        yield Reader(runtime)


def measure(turns_ms: Sequence[float], intervals_ms: Sequence[float], count: int, blocks: int) -> None:
    shape = CacheShape(layers=_LAYERS, blocks=count * blocks + 1)
    ranks = [
        RankProcess("producer", partial(open_producer, config_of("bench-producer"), shape)),
        RankProcess("reader", partial(open_reader, shape)),
    ]
    cases = [(turn, interval) for turn in turns_ms for interval in intervals_ms]
    print(f"{count} loads of {blocks} blocks, ms: turn, switch interval | middle, most")
    with open_children(ranks, Transport.SHM.environment) as children:
        for index, (turn_ms, interval_ms) in enumerate([(0.0, 5.0), *cases]):
            name = f"{index} {turn_ms} {interval_ms}"
            ids = [scattered(f"{name} {side}", shape.blocks, count * blocks) for side in ("local", "remote")]
            loads = share_out(name, [blocks] * count, *ids)
            tickets = children["producer"].run(EngineProducer.offer, loads)
            found = sorted(children["reader"].run(Reader.load, loads, tickets, turn_ms / 1e3, interval_ms / 1e3))
            children["producer"].run(EngineProducer.settle)
            if index:  # the first one connects
                middle_ms, most_ms = 1e3 * found[len(found) // 2], 1e3 * found[-1]
                print(f"{turn_ms:5} {interval_ms:6} | {middle_ms:9.2f} {most_ms:9.2f}", flush=True)


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns-ms", type=numbers, default=[0.0, 0.1, 1.0])
    parser.add_argument("--intervals-ms", type=numbers, default=[5.0, 0.05])
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=1)
    given = parser.parse_args()
    measure(given.turns_ms, given.intervals_ms, given.loads, given.blocks)
