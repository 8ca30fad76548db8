"""Contender (c): kvflow in two processes, on uvloop, as an engine would use it.

The pipe to the parent is read in a worker thread, so the loop has nothing to do but kvflow's work and the ticker. The
ticker runs during all timed loads; its CPU time counts as kvflow's.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import numpy as np
import torch

import kvflow
from kvflow.cli.bench.cache import BenchCache
from kvflow.cli.bench.clocks import loop_ticker, process_cpu_s
from kvflow.cli.bench.loops import receive, run_on_uvloop
from kvflow.cli.bench.messages import (
    Connect,
    Done,
    Load,
    Offer,
    Offered,
    OpenLease,
    PeerAddress,
    Quit,
    RunTurn,
    Settle,
    TickIdle,
    TurnResult,
)
from kvflow.cli.bench.raw_child import check_targets, poison_targets
from kvflow.cli.bench.settings import CacheShape

_LEASE_TTL_S = 600.0
_LOAD_DEADLINE_S = 120.0
_SETTLE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProducer:
    """Body of the producer process."""

    shape: CacheShape

    def __call__(self, pipe: Connection) -> None:
        run_on_uvloop(_produce(pipe, self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReader:
    """Body of the reader process."""

    shape: CacheShape

    def __call__(self, pipe: Connection) -> None:
        run_on_uvloop(_read(pipe, self.shape))


async def _open(runtime: kvflow.Runtime, cache: BenchCache) -> None:
    kv_caches = as_tensors(cache)
    layout = kvflow.CacheLayout.infer(kv_caches, order="HND", block_size=cache.shape.block_size)
    await runtime.register_kv_caches(kv_caches, layout)


def as_tensors(cache: BenchCache) -> dict[str, torch.Tensor]:
    """The cache as an engine holds it: one fp16 tensor [2, blocks, kv_heads, block_size, head_size] per layer."""
    shape = cache.shape
    axes = (2, shape.blocks, shape.kv_heads, shape.block_size, shape.head_size)
    return {
        f"layers.{index}": torch.from_numpy(layer.view(np.float16)).view(axes)
        for index, layer in enumerate(cache.layers)
    }


async def _produce(pipe: Connection, shape: CacheShape) -> None:
    config = kvflow.Config(engine_id="bench-producer", listen="tcp://127.0.0.1:0", lease_ttl_s=_LEASE_TTL_S)
    async with kvflow.Runtime(config) as runtime:
        await _open(runtime, BenchCache(shape, filled=True))
        pipe.send(PeerAddress())
        leases: list[kvflow.Lease] = []
        while not isinstance(message := await receive(pipe), Quit):
            match message:
                case Offer():
                    leases = [_serve(runtime, load, shape.block_size) for load in message.loads]
                    pipe.send(Offered(tickets=tuple(dict(lease.ticket.to_params()) for lease in leases)))
                case Settle():
                    await _settle(leases)
                    pipe.send(Done())
                case OpenLease():
                    leases = [_serve(runtime, message.load, shape.block_size)]
                    pipe.send(Done())
                case _:
                    raise TypeError(f"kvflow producer: unexpected {type(message).__name__}")
        for lease in leases:
            lease.revoke()  # closing would wait for the one that nobody reads


def _serve(runtime: kvflow.Runtime, load: Load, block_size: int) -> kvflow.Lease:
    num_tokens = len(load.remote_ids) * 16
    return runtime.serve_blocks(kvflow.ServeRequest(load.request_id, block_ids=load.remote_ids, num_tokens=num_tokens))


async def _settle(leases: list[kvflow.Lease]) -> None:
    """Every lease of the turn must end as read: a bench whose notifications get lost measures something else."""
    async with asyncio.timeout(_SETTLE_TIMEOUT_S):
        outcomes = [await lease for lease in leases]
    if any(outcome is not kvflow.LeaseOutcome.READ for outcome in outcomes):
        raise RuntimeError(f"leases of a turn ended as {outcomes}")


async def _read(pipe: Connection, shape: CacheShape) -> None:
    config = kvflow.Config(engine_id="bench-reader", listen="tcp://127.0.0.1:0", load_deadline_s=_LOAD_DEADLINE_S)
    cache = BenchCache(shape, filled=False)
    pids = [os.getpid()]
    async with kvflow.Runtime(config) as runtime:
        await _open(runtime, cache)
        while not isinstance(message := await receive(pipe), Quit):
            match message:
                case Connect():
                    pids.append(message.producer_pid)
                    pipe.send(Done())
                case RunTurn():
                    poison_targets(cache, message)
                    measured = await _run_turn(runtime, message, pids)
                    pipe.send(replace(measured, checked_blocks=check_targets(cache, message)))
                case TickIdle():
                    pipe.send(await _tick_idle(message.seconds))
                case _:
                    raise TypeError(f"kvflow reader: unexpected {type(message).__name__}")


async def _run_turn(runtime: kvflow.Runtime, turn: RunTurn, pids: list[int]) -> TurnResult:
    requests = [
        kvflow.LoadRequest(load.request_id, ticket=ticket, block_ids=load.local_ids)
        for load, ticket in zip(turn.loads, turn.tickets, strict=True)
    ]
    wake, *timed = requests
    await runtime.load_blocks(wake)
    seconds: list[float] = []
    lags_s: list[float] = []
    reports: list[kvflow.LoadReport] = []
    async with loop_ticker(lags_s):
        cpu_before_s = sum(map(process_cpu_s, pids))
        for request in timed:
            start = time.perf_counter()
            reports.append(await runtime.load_blocks(request))
            seconds.append(time.perf_counter() - start)
        cpu_s = sum(map(process_cpu_s, pids)) - cpu_before_s
    return TurnResult(
        seconds=tuple(seconds),
        cpu_s=cpu_s,
        checked_blocks=0,
        lags_s=tuple(lags_s),
        phases_s=tuple(dict(report.seconds) for report in reports),
        descriptors=reports[-1].descriptors,
    )


async def _tick_idle(seconds: float) -> TurnResult:
    lags_s: list[float] = []
    async with loop_ticker(lags_s):
        await asyncio.sleep(seconds)
    return TurnResult(seconds=(), cpu_s=0.0, checked_blocks=0, lags_s=tuple(lags_s))
