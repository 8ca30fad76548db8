"""E4, E5, E9 and E11: how fast loads are between devices, straight, over tcp, staged and through scratch memory."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise

from kvflow.bench.child import BenchError, Environment
from kvflow.bench.gpu.engine import PRODUCER_VALUE, Engine, EngineSpec, Pair, engines, open_engine, specs, ucx_log
from kvflow.bench.gpu.paths import GET_ZCOPY
from kvflow.bench.gpu.pool import PoolShape, scattered_ids
from kvflow.bench.gpu.raw import RawRank, raw_pair
from kvflow.bench.gpu.setting import Setting

MIB = 1 << 20
_REPEATS = 10
_TCP = {"UCX_TLS": "tcp,cuda_copy,self"}
_STEP_S = 0.09
"""A progress thread that misses its wake-up looks again after 100 ms."""


def straight(setting: Setting) -> None:
    """E4: kvflow beside bare NIXL with the same pieces, by size, with layers apart (LBHNC) and together (BLHNC)."""
    sizes = setting.size((1, 16, 256), (1, 4))
    for label, across in (("LBHNC", False), ("BLHNC", True)):
        pool = PoolShape(layers=8, blocks=2 * sizes[-1], across_layers=across)  # a block has half a MB
        pool = replace(pool, blocks=2 * pool.blocks_for(sizes[-1] * MIB))
        with ucx_log() as log:
            with engines(*specs(setting.device, pool), log.environment) as pair:
                pid = pair.reader.pid
                one = _times(pair, f"{label} one block", 1, 50)
                setting.facts.add(f"{label}: one block, us", statistics.median(one) * 1e6)
                for size in sizes:
                    count = pool.blocks_for(size * MIB)
                    seconds = statistics.median(_times(pair, f"{label} {size}", count, _REPEATS))
                    setting.facts.add(f"{label} {size} MB: GB/s", count * pool.block_bytes / seconds / 1e9)
            setting.facts.add(f"{label}: path", log.said(pid, pool.piece_bytes))
        _bare(setting, label, pool.piece_bytes, sizes[-1] * MIB)
    _windows(setting, sizes[-1])


def _times(pair: Pair, name: str, count: int, repeats: int, *, offered_at_once: bool = True) -> list[float]:
    """The seconds of loads of so many blocks, each in another order; without the first, which connects."""
    orders = [scattered_ids(turn, pair.pool.blocks, count) for turn in range(repeats + 2)]
    ids = list(pairwise(orders))
    if offered_at_once:
        ends = pair.must_hand_over_all(name, ids)
    else:  # staged leases take host buffers until they are read
        ends = [pair.must_hand_over(f"{name} {turn}", *both) for turn, both in enumerate(ids)]
    wrong = pair.reader.run(Engine.count_other, orders[-1], PRODUCER_VALUE)
    if wrong:
        raise RuntimeError(f"{name}: {wrong} of {count} blocks are not the producer's")
    return [end.seconds for end in ends[1:]]


def _bare(setting: Setting, label: str, piece_bytes: int, size_bytes: int) -> None:
    with raw_pair(setting.device, size_bytes, GET_ZCOPY) as (_, reader):
        moved = [reader.run(RawRank.move, piece_bytes, size_bytes, "READ", seed) for seed in range(_REPEATS)]
    seconds = statistics.median(one.seconds for one in moved[1:])
    setting.facts.add(f"{label} bare NIXL: GB/s", size_bytes / seconds / 1e9)


def _windows(setting: Setting, size: int) -> None:
    """The same load with other bounds of what is in flight: what the defaults should be."""
    pool = PoolShape(layers=8, blocks=1, across_layers=True)
    pool = replace(pool, blocks=2 * pool.blocks_for(size * MIB))
    for in_flight in setting.size((16, 64, 256, 1024), (4,)):
        if setting.left_s() < 8:
            return
        with engines(*specs(setting.device, pool, in_flight_bytes_max=in_flight * MIB)) as pair:
            count = pool.blocks_for(size * MIB)
            seconds = statistics.median(_times(pair, f"window {in_flight}", count, _REPEATS))
        setting.facts.add(f"BLHNC, {in_flight} MB in flight: GB/s", count * pool.block_bytes / seconds / 1e9)


def copies(setting: Setting) -> None:
    """E5: staged loads and loads through scratch memory, on idle and on busy devices; pinned copies beside them.

    Two processes that compute on one GPU take turns by time, whatever their streams are, so what kvflow's copies wait
    for shows within one process; between two a busy GPU may well make loads slower.
    """
    _pinned_copies(setting)
    layers = setting.size(64, 4)
    hnd = PoolShape(layers=layers, blocks=64, kv_heads=2)
    asyncio.run(_copies_in_one_process(setting, hnd))
    nhd = replace(hnd, order="NHD")
    cases = (("staged", {"staging": "always"}, hnd), ("scratch", {"scratch": "always"}, nhd))
    for label, config, ours in cases:
        producer, reader = specs(setting.device, hnd, **config)
        with _engines_or_reason(setting, label, replace(producer, pool=ours), reader) as pair:
            if pair is not None:
                _idle_and_busy(setting, pair, label)


async def _copies_in_one_process(setting: Setting, pool: PoolShape) -> None:
    """Both engines here, with the in-process transport between their host buffers: the copies are what takes time."""
    both = specs(setting.device, pool, transport="inproc", staging="always")
    async with AsyncExitStack() as stack:
        producer, reader = [await stack.enter_async_context(open_engine(spec)) for spec in both]
        medians = {}
        for busy in (False, True):
            await producer.set_busy(busy)
            seconds = []
            for turn in range(_REPEATS):
                name, ids = f"one process {busy} {turn}", scattered_ids(turn, pool.blocks, pool.blocks // 2)
                ready = await producer.computed()
                start_s = time.perf_counter()
                end = await reader.load(name, await producer.offer(name, ids, ready), ids)
                seconds.append(time.perf_counter() - start_s)  # from the offer, with which staging begins
                if end.error:
                    raise RuntimeError(f"load {name!r} failed: {end.error}: {end.text}")
                await producer.outcome(name)
            medians[busy] = statistics.median(seconds[1:])
            setting.facts.add(f"one process, staged, {'busy' if busy else 'idle'}: ms", medians[busy] * 1e3)
        await producer.set_busy(False)
        setting.facts.add("one process, staged: busy / idle", medians[True] / medians[False])


def _idle_and_busy(setting: Setting, pair: Pair, label: str) -> None:
    count = pair.pool.blocks // 2
    idle_s = statistics.median(_times(pair, f"{label} idle", count, 5, offered_at_once=False))
    setting.facts.add(f"{label}, idle: ms", idle_s * 1e3)
    setting.facts.add(f"{label}, idle: GB/s", count * pair.pool.block_bytes / idle_s / 1e9)
    for child in (pair.producer, pair.reader):
        child.run(Engine.set_busy, True)
    busy_s = statistics.median(_times(pair, f"{label} busy", count, 5, offered_at_once=False))
    for child in (pair.producer, pair.reader):
        child.run(Engine.set_busy, False)
    setting.facts.add(f"{label}, busy: ms", busy_s * 1e3)
    setting.facts.add(f"{label}: busy / idle", busy_s / idle_s)


def _pinned_copies(setting: Setting) -> None:
    """The ceiling of any staging: one dense copy between page-locked memory and the device."""
    if not setting.on_cuda:
        return
    import torch

    host = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    for label, source, target in (("device to host", there, host), ("host to device", host, there)):
        seconds = []
        for _ in range(_REPEATS):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            target.copy_(source, non_blocking=True)
            last.record()
            last.synchronize()
            seconds.append(first.elapsed_time(last) / 1e3)
        setting.facts.add(f"pinned, {label}: GB/s", 64 * MIB / statistics.median(seconds) / 1e9)


def over_tcp(setting: Setting) -> None:
    """E9: where no transport reaches device memory, UCX emulates reads over tcp and the producer's process copies."""
    pool = PoolShape(layers=8, blocks=setting.size(256, 32))
    with ucx_log() as log:
        environment: Environment = {**log.environment, **(_TCP if setting.on_cuda else {"UCX_TLS": "tcp"})}
        with engines(*specs(setting.device, pool), environment) as pair:
            pid = pair.reader.pid
            ones = _times(pair, "one block", 1, setting.size(200, 20))
            setting.facts.add("one block: p50 ms", statistics.median(ones) * 1e3)
            setting.facts.add("one block: max ms", max(ones) * 1e3)
            setting.facts.add("steps of 100 ms", sum(one > _STEP_S for one in ones))
            count = pool.blocks // 2
            seconds = statistics.median(_times(pair, "bulk", count, 3))
            setting.facts.add("bulk: GB/s", count * pool.block_bytes / seconds / 1e9)
        setting.facts.add("path", log.said(pid, pool.piece_bytes))
    setting.facts.add("ended in order", True)


def memory(setting: Setting) -> None:
    """E11: staged loads at full size, registering a large cache, and scratch memory where there is hardly any left."""
    _staged(setting)
    _registering(setting)
    if setting.on_cuda:
        _little_memory(setting)


def _staged(setting: Setting) -> None:
    pool = PoolShape(layers=8, blocks=setting.size(256, 32))
    with _engines_or_reason(setting, "staged", *specs(setting.device, pool, staging="always")) as pair:
        if pair is not None:
            count = pool.blocks // 2
            seconds = statistics.median(_times(pair, "staged", count, _REPEATS, offered_at_once=False))
            setting.facts.add("staged 64 MB: GB/s", count * pool.block_bytes / seconds / 1e9)


def _registering(setting: Setting) -> None:
    pool = PoolShape(layers=setting.size(32, 4), blocks=1)
    pool = replace(pool, blocks=pool.blocks_for(setting.size(16 << 10, 32) * MIB))
    with engines(*specs(setting.device, pool)) as pair:
        setting.facts.add("registering: GB", pool.blocks * pool.block_bytes / 1e9)
        setting.facts.add("registering: s", pair.reader.run(Engine.registered_s))


def _little_memory(setting: Setting) -> None:
    """A reader that has filled its device: a load through scratch must work, read straight, or fail by name."""
    hnd = PoolShape(layers=8, blocks=64, kv_heads=2)
    producer, reader = specs(setting.device, hnd, scratch="always")
    producer = replace(producer, pool=replace(hnd, order="NHD"))
    with _engines_or_reason(setting, "little memory", producer, reader) as pair:
        if pair is None:
            return
        left = pair.reader.run(Engine.take_memory, 100 * MIB)
        setting.facts.add("little memory: MB left", left / MIB)
        end = pair.hand_over("little memory", scattered_ids(1, 64, 32), scattered_ids(2, 64, 32))
        setting.facts.add("little memory: load", end.error or "succeeded")
        pair.reader.run(Engine.give_memory_back)
        again = pair.hand_over("again", scattered_ids(1, 64, 32), scattered_ids(2, 64, 32))
        setting.facts.add("little memory: load afterwards", again.error or "succeeded")


@contextmanager
def _engines_or_reason(setting: Setting, label: str, producer: EngineSpec, reader: EngineSpec) -> Iterator[Pair | None]:
    """A pair, or None and the reason as a fact if they do not start with such a configuration."""
    with ExitStack() as stack:
        try:
            pair = stack.enter_context(engines(producer, reader, GET_ZCOPY if setting.on_cuda else {}))
        except BenchError as error:
            setting.facts.add(f"{label}: does not start", str(error).strip().splitlines()[-1])
            yield None
            return
        yield pair
