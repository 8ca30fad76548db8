"""The process that loads: small loads alone, loads of one slice, and small loads while huge ones run.

Small loads come one after the other with random pauses, so that they meet a huge load's slices at any moment. Those
that were not needed when the huge loads ended are made afterwards, untimed: the producer waits for every one.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import kvflow
from kvflow.cli.bench.cache import BenchCache, sample_indices
from kvflow.cli.bench.engine import as_tensors
from kvflow.cli.bench.loops import receive, run_on_uvloop
from kvflow.cli.bench.messages import Load, PeerAddress, Quit, RoundResult, RunRound, Ticket
from kvflow.cli.bench.settings import CacheShape

_PAUSE_MAX_S = 0.004


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessReader:
    """Body of the process."""

    shape: CacheShape
    config: kvflow.Config

    def __call__(self, pipe: Connection) -> None:
        run_on_uvloop(_read(pipe, self.shape, self.config))


async def _read(pipe: Connection, shape: CacheShape, config: kvflow.Config) -> None:
    cache = BenchCache(shape, filled=False)
    kv_caches = as_tensors(cache)
    async with kvflow.Runtime(config) as runtime:
        layout = kvflow.CacheLayout.infer(kv_caches, order="HND", block_size=shape.block_size)
        await runtime.register_kv_caches(kv_caches, layout)
        pipe.send(PeerAddress())
        while not isinstance(message := await receive(pipe), Quit):
            if not isinstance(message, RunRound):
                raise TypeError(f"fairness reader: unexpected {type(message).__name__}")
            cache.poison([block for load in message.loads for block in load.local_ids])
            result = await _run(runtime, message)
            for load in message.loads:
                some = sample_indices(len(load.local_ids), check_all=False)
                cache.check([load.local_ids[index] for index in some], [load.remote_ids[index] for index in some])
            pipe.send(result)


class _Requests:
    """The requests of one round, by load."""

    def __init__(self, runtime: kvflow.Runtime, message: RunRound) -> None:
        self._runtime = runtime
        self._tickets: dict[str, Ticket] = {
            load.request_id: ticket for load, ticket in zip(message.loads, message.tickets, strict=True)
        }

    async def time(self, load: Load) -> float:
        request = kvflow.LoadRequest(load.request_id, ticket=self._tickets[load.request_id], block_ids=load.local_ids)
        start = time.perf_counter()
        await self._runtime.load_blocks(request)
        return time.perf_counter() - start


async def _run(runtime: kvflow.Runtime, message: RunRound) -> RoundResult:
    requests, pauses = _Requests(runtime, message), random.Random(message.wake.request_id)
    await requests.time(message.wake)
    alone_s = await _one_by_one(requests, message.alone, pauses)
    slice_s = await _one_by_one(requests, message.slices, pauses)
    behind = list(message.behind)
    behind_s: list[float] = []
    async with asyncio.TaskGroup() as group:
        huge = [group.create_task(requests.time(load)) for load in message.huge]
        await asyncio.sleep(_PAUSE_MAX_S)
        while behind:
            seconds = await _one_by_one(requests, [behind.pop()], pauses)
            if any(task.done() for task in huge):
                break  # and this small load may have had the machine for itself
            behind_s += seconds
    await _one_by_one(requests, behind, None)
    return RoundResult(
        alone_s=alone_s,
        slice_s=slice_s,
        huge_s=tuple(task.result() for task in huge),
        behind_s=tuple(behind_s),
    )


async def _one_by_one(requests: _Requests, loads: Sequence[Load], pauses: random.Random | None) -> tuple[float, ...]:
    seconds = []
    for load in loads:
        if pauses is not None:
            await asyncio.sleep(pauses.uniform(0, _PAUSE_MAX_S))
        seconds.append(await requests.time(load))
    return tuple(seconds)
