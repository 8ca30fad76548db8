"""E0 to E15, the most valuable first. The expected speeds are for one H100 or H200 that both processes share."""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvflow.bench.child import BenchError, Environment, call_in_child
from kvflow.bench.ucx import ucx_log
from kvflow.doctor.version import installed
from kvflow.transport.device.cuda import DriverError, load_driver
from tests.bench.targets import percentile
from tests.gpu.conftest import Found
from tests.gpu.pair import Pair, engines, request, specs
from tests.gpu.raw import Moved, RawRank, raw_pair
from tests.support.engine import EngineSetup, open_engine
from tests.support.pools import VALUES, PoolShape, scattered_ids
from tests.support.verbs import EngineError

pytestmark = pytest.mark.gpu
experiment = pytest.mark.experiment

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
GET_ZCOPY = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": None}
SIZES = {"4K": 4 << 10, "32K": 32 << 10, "256K": 256 << 10, "2M": 2 << 20, "8M": 8 << 20}
REPEATS = 5
STEPS_S = 300.0
MAPPED: dict[str, Any] = {"cuda_ipc": True}
IDS = list(range(0, 32, 2))
OVERWRITTEN = 1999.0
"""Value of blocks after their lease: no value of a turn."""


def gb_per_s(size_bytes: int, seconds: Sequence[float]) -> float:
    return size_bytes / statistics.median(seconds) / 1e9


def sized(layers: int, size_bytes: int, **others: Any) -> PoolShape:
    """Return a pool of `size_bytes`."""
    pool = PoolShape(layers=layers, blocks=1, **others)
    return replace(pool, blocks=pool.blocks_for(size_bytes))


def output(*command: str) -> str:
    """Return the output of a tool, or the reason why it cannot run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


@contextmanager
def pair_or_reason(
    found: Found, label: str, producer: EngineSetup, reader: EngineSetup, environment: Environment | None = None
) -> Iterator[Pair | None]:
    """A pair, or None and the reason as a fact if they do not start with such a configuration."""
    with ExitStack() as stack:
        try:
            given = environment or (GET_ZCOPY if found.on_cuda else {})
            pair = stack.enter_context(engines(producer, reader, given))
        except EngineError as error:
            found.add(f"{label}: does not start", str(error))
            yield None
            return
        yield pair


def doctor(found: Found, *options: str) -> None:
    """Every finding that is not OK as a fact."""
    command = [sys.executable, "-m", "kvflow.cli.main", "doctor", "--json", *options]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    findings = json.loads(said.stdout)["findings"]
    found.add("doctor fails", sum(one["status"] == "fail" for one in findings), equals=0)
    for one in findings:
        if one["status"] != "ok" or one["name"].endswith("on GPUs"):
            found.add(f"doctor, {one['name']}", f"{one['status']}: {one['found']}")


@experiment("E0", 30)
def test_the_machine(found: Found) -> None:
    """The doctor's findings about the machine."""
    found.add("python", platform.python_version())
    found.add("kernel", platform.release())
    for package in ("torch", "nixl", "nixl-cu12", "nixl-cu13", "numpy", "uvloop"):
        found.add(package, installed(package))
    attributes: dict[str, int | None] = {}
    try:
        driver = load_driver()
        found.add("driver's CUDA", ".".join(map(str, driver.version())))
        attributes = dict(driver.attributes())
    except DriverError as error:
        found.add("driver's CUDA", str(error))
    for name, value in attributes.items():
        found.add(name, value)
    ordering = "GPUDirect RDMA writes ordering"
    found.add(ordering, attributes.get(ordering), least=100)
    query = "name,driver_version,memory.total,memory.used,mig.mode.current,compute_mode,pcie.link.gen.max"
    found.add("nvidia-smi", output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader").strip())
    print(output("nvidia-smi", "-q"), output("nvidia-smi", "topo", "-m"), sep="\n")
    doctor(found, "--no-transfer")


@experiment("E1", 50)
def test_the_way_of_reads(found: Found) -> None:
    """Whether cuda_ipc needs GET_ZCOPY, and a CUDA context on the agent's thread: raw reads by two processes."""
    size_bytes, piece_bytes = found.size(64, 4) * MIB, found.size(8, 1) * MIB
    cases: dict[str, Environment] = {"default": dict.fromkeys(GET_ZCOPY), "on": GET_ZCOPY}
    every = [*itertools.product(cases.items(), (True, False))]
    for (zcopy, environment), context in found.size(every, every[-1:]):
        case = f"GET_ZCOPY {zcopy}, context {'set' if context else 'none'}"
        try:
            with ucx_log() as log:
                with raw_pair(found.device, size_bytes, {**environment, **log.environment}, context=context) as reader:
                    pid = reader.pid
                    moved = move(reader, piece_bytes, size_bytes)
                    right = reader.run(RawRank.count_value, 1)
                path = str(log.read_path(pid, piece_bytes))
        except BenchError as error:  # one case that crashes is a result, and no reason to leave out the others
            found.add(f"{case}: failed", error.reason, equals="")
            continue
        on, both = zcopy == "on", zcopy == "on" and context
        speed = gb_per_s(size_bytes, [one.seconds for one in moved])
        found.add(f"{case}: path", path, has="cuda_ipc" if on else "tcp")
        found.add(f"{case}: GB/s", speed, least=200 if both else 0.2, most=None if on else 2)
        found.add(f"{case}: wrong bytes", size_bytes - right, equals=0, always=True)


def move(reader: Any, piece_bytes: int, size_bytes: int, operation: str = "READ") -> list[Moved]:
    """Some transfers, without the first, which opens memory handles."""
    seeds = range(REPEATS + 1)
    return [reader.run(RawRank.move, piece_bytes, size_bytes, operation, seed) for seed in seeds][1:]


@experiment("E3", 80)
def test_computed_late_and_written_late(found: Found) -> None:
    """Whether events keep loads from old bytes: blocks are offered, or loaded into, behind a kernel that sleeps."""
    ways = (("straight", {}), ("staged", {"staging": "always"}), *found.size((("mapped", MAPPED),), ()))
    for (label, config), own_stream in itertools.product(ways, found.size((True, False), (True,))):
        case = f"{label}, {'own' if own_stream else 'default'} stream"
        both = specs(found.device, PoolShape(layers=4, blocks=32), **config)
        producer, reader = (replace(spec, own_stream=own_stream) for spec in both)
        with engines(producer, reader) as pair:
            late(found, pair, case, events=True)
            if "staging" not in config:  # the control; a staged lease without an event may be refused
                late(found, pair, case, events=False)


def late(found: Found, pair: Pair, case: str, *, events: bool) -> None:
    """With events no load may be wrong; without them some must be, or the experiment sees nothing."""
    count, delay_s = found.size((25 if events else 10, 0.02), (5, 0.05))
    wrong = {"served early": 0, "loaded early": 0}
    for turn, what in itertools.product(range(count), wrong):
        name, value = f"{what} {case} {events} {turn}", float(turn % VALUES + 2)
        behind = {"delay_s": delay_s, "events": events}
        if what == "served early":
            offer = {"request_id": name, "block_ids": IDS, "value": value}
            end = pair.load(name, pair.producer.call("compute_and_offer", **offer, **behind), IDS)
        else:
            pair.producer.call("fill", block_ids=IDS, value=value)
            end = pair.load(name, pair.offer(name, IDS), IDS, "load_behind", **behind)
        if end.error:
            found.add(f"{what}, {case}: failed with", end.error)
            continue
        wrong[what] += pair.reader.call("count_other", block_ids=IDS, value=value) > 0
        pair.producer.call("outcome", request_id=name)
    for what, loads in wrong.items():
        fact = f"{what}, {case}, {'with event' if events else 'without'}: wrong loads"
        if events:
            found.add(fact, loads, equals=0, always=True)
        else:
            found.add(fact, loads, least=1)


@experiment("E6", 70)
def test_leases_that_end_under_their_loads(found: Found) -> None:
    """Whether seals hold where devices overwrite: a load that succeeds has the bytes of its lease."""
    end_leases(found, "NIXL", {}, until_s=found.left_s() / 2)
    end_leases(found, "mapped", MAPPED, until_s=1.0)


def end_leases(found: Found, way: str, config: dict[str, Any], *, until_s: float) -> None:
    """End leases under their loads, and overwrite the blocks, until `until_s` of the experiment's time is left."""
    pool = PoolShape(layers=8, blocks=found.size(1024, 64))
    half = pool.blocks // 2
    remote, local = scattered_ids(1, pool.blocks, half), scattered_ids(2, pool.blocks, half)
    fresh = gone = wrong = 0
    with engines(*specs(found.device, pool, **config)) as pair:
        pair.hand_over("first", remote, local).succeeded()
        usual_s = pair.hand_over("second", remote, local).succeeded().seconds
        for turn in itertools.takewhile(lambda _: found.left_s() > until_s, range(found.size(300, 12))):
            value, name = float(turn % (VALUES - 10) + 2), f"stale {turn}"
            pair.producer.call("fill", block_ids=remote, value=value)
            loading = pair.reader.start("load", **request(name, pair.offer(name, remote), local))
            # From well before the load's usual end to well after it.
            pause_s = usual_s * (turn % 12) / 8
            pair.producer.call("revoke_after", request_id=name, value=OVERWRITTEN, pause_s=pause_s)
            if pair.ended(loading, 0.0).error:
                gone += 1
            else:
                fresh += 1
                wrong += pair.reader.call("count_other", block_ids=local, value=value) > 0
        add_mapping(found, way, pair, mapped=bool(config))
    found.add(f"{way}: succeeded", fresh, least=1)
    found.add(f"{way}: failed", gone, least=1)
    found.add(f"{way}: succeeded with other bytes", wrong, equals=0, always=True)


def add_mapping(found: Found, label: str, pair: Pair, *, mapped: bool) -> None:
    """Record whether the reader has mapped the producer's memory, or why not."""
    transport = pair.reader.call("statistics")["transport"]
    found.add(f"{label}: mapped peers", transport["mapped_peers"], equals=int(mapped), always=found.device != "cpu")
    found.add(f"{label}: not mapped, because", transport["mapping_problem"], equals="", always=True)


PIECES: dict[str, dict[str, Any]] = {
    "4K": {"kv_heads": 1, "kv_first": True},
    "32K": {"kv_first": True},
    "512K": {"across_layers": True},
}
"""Shapes of pools of eight layers, by the size of a block's pieces."""


@experiment("E13", 120)
def test_memory_that_is_mapped(found: Found) -> None:
    """One batch of copies from the producer's mapped memory against NIXL's reads, in turns."""
    sizes = found.size((16, 64, 256, 1024), (1, 4))
    least = {("32K", 256): 300, ("512K", 256): 600}
    for label, shape in PIECES.items():
        pool = sized(8, 2 * sizes[-1] * MIB, **shape)
        for way, config in (("NIXL", {}), ("mapped", MAPPED)):
            if found.left_s() < 12:
                return
            with engines(*specs(found.device, pool, **config), GET_ZCOPY if found.on_cuda else {}) as pair:
                one = statistics.median(pair.times(f"{label} {way} one block", 1, found.size(50, 5))) * 1e6
                most = 250 if (label, way) == ("512K", "mapped") else None
                found.add(f"{label} {way}: one block of {pool.block_bytes >> 10} KiB, us", one, most=most)
                for size in sizes:
                    count = pool.blocks_for(size * MIB)
                    speed = gb_per_s(count * pool.block_bytes, pair.times(f"{label} {way} {size}", count, REPEATS))
                    bound = least.get((label, size)) if config else None
                    found.add(f"{label} {way} {size} MB: GB/s", speed, least=bound)
                add_mapping(found, f"{label} {way}", pair, mapped=bool(config))


@experiment("E14", 60)
def test_steps_and_cancelled_loads_beside_mapped_memory(found: Found) -> None:
    """The cost of batches for an engine that computes on two streams beside them, and the time from cancel to safe."""
    pool = PoolShape(layers=8, blocks=found.size(1024, 32), kv_first=True)
    count, steps = pool.blocks // 2, found.size(1000, 100)
    with engines(*specs(found.device, pool, **MAPPED)) as pair:
        pair.hand_over("first", range(count), range(count)).succeeded()
        add_steps(found, pair, found.size(150, 10), count, steps)
        pair.reader.call("set_busy", busy=True)  # the default stream, beside the stream of the steps
        add_steps(found, pair, found.size(150, 10), count, steps, beside="a busy stream, ")
        pair.reader.call("set_busy", busy=False)
        seconds = []
        for turn in range(found.size(30, 5)):
            name, ids = f"cancelled {turn}", scattered_ids(turn, pool.blocks, count)
            loading = pair.reader.start("load", **request(name, pair.offer(name, ids), ids))
            with suppress(EngineError):  # the load may be over
                pair.reader.call("cancel", request_id=name)
            start_s = time.perf_counter()
            pair.ended(loading, start_s)
            seconds.append(time.perf_counter() - start_s)
        found.add("cancel to safe: median ms", statistics.median(seconds) * 1e3, most=10)
        add_mapping(found, "steps", pair, mapped=True)
        pair.producer.call("revoke_all")


def add_steps(found: Found, pair: Pair, turns: int, count: int, steps: int, beside: str = "") -> None:
    alone = pair.reader.start("steps", count=steps).result(STEPS_S)["seconds"]
    offers = []
    for turn in range(turns):
        name, ids = f"{beside}beside {turn}", scattered_ids(turn, pair.pool.blocks, count)
        offers.append(request(name, pair.offer(name, ids), ids))
    stepping = pair.reader.start("steps", count=steps, loads=offers, pause_s=0.1).result(STEPS_S)
    for percent, most in ((50, 1.02), (99, 1.1)):
        both = [percentile(seconds, percent) * 1e3 for seconds in (alone, stepping["seconds"])]
        found.add(f"{beside}p{percent} alone, ms", both[0])
        found.add(f"{beside}p{percent} beside loads / alone", both[1] / both[0], most=None if beside else most)
    found.add(f"{beside}loads that failed", sum(map(bool, stepping["errors"])), equals=0, always=True)


@experiment("E15", 60)
def test_mapped_memory_is_free_when_the_peer_is_forgotten(found: Found) -> None:
    """A producer ends, is killed, and is forgotten; its memory, of 8 GiB, is free each time."""
    pool = sized(found.size(32, 4), found.size(8 << 10, 64) * MIB)
    producer, reader = specs(found.device, pool, **MAPPED)
    small = replace(pool, blocks=max(2, pool.blocks // 64))
    reader = replace(reader, pool=small)
    every = range(small.blocks)
    with engines(producer, reader) as pair:
        pair.hand_over("first", every, every).succeeded()
        add_mapping(found, "first", pair, mapped=True)
        both = memory_used_mib()
        found.add("memory used by both, MiB", both)
        ticket, late = pair.offer("cut off", every), pair.offer("too late", every)
        loading = pair.reader.start("load", **request("cut off", ticket, every))
        pair.producer.kill()
        found.add("load under the kill", pair.ended(loading, time.perf_counter()).error or "succeeded")
        end = pair.load("too late", late, every)
        found.add("load after the kill", end.error or "succeeded", has="Failed" if found.on_cuda else None)
        found.add("forgotten", pair.reader.call("forget", engine_id="producer"), equals=True, always=True)
        time.sleep(found.size(1.0, 0.0))  # the driver takes a moment to clear up
        after = memory_used_mib()
        freed = None if both is None or after is None else both - after
        found.add("freed by the kill and forget_peer, MiB", freed, least=found.size(8 << 10, None))
        (again,) = pair.engines.start(replace(producer, engine_id="producer-again", pool=small))
        error = replace(pair, producer=again, pool=small).hand_over("again", every, every).error
        found.add("load from a new producer", error or "succeeded", equals="succeeded", always=True)


@experiment("E2", 70)
def test_the_cost_of_a_piece(found: Found) -> None:
    """How large pieces and the window should be, and whether pushing with NIXL's batched copies is faster."""
    size_bytes = found.size(64, 8) * MIB
    fast = {"32K": (4, 32), "2M": (250, None), "8M": (600, None)}
    with raw_pair(found.device, size_bytes, GET_ZCOPY) as reader:
        for label, piece_bytes in SIZES.items():
            moved = move(reader, piece_bytes, size_bytes)
            post_us = statistics.median(one.post_s for one in moved) * 1e6 / (size_bytes // piece_bytes)
            bounds: dict[str, Any] = {"least": 1, "most": 8} if label == "32K" else {}
            found.add(f"READ {label}: post us/piece", post_us, **bounds)
            least, most = fast.get(label, (None, None))
            speed = gb_per_s(size_bytes, [one.seconds for one in moved])
            found.add(f"READ {label}: GB/s", speed, least=least, most=most)
    for batched in found.size(("0", "1"), ("1",)):
        with raw_pair(found.device, size_bytes, {**GET_ZCOPY, "NIXL_UCX_SGL_ENABLE": batched}) as reader:
            moved = move(reader, SIZES["32K"], size_bytes, "WRITE")
        speed = gb_per_s(size_bytes, [one.seconds for one in moved])
        found.add(f"WRITE 32K, SGL {batched}: GB/s", speed, least=8 if batched == "1" else None)


@experiment("E4", 80)
def test_loads_straight_between_devices(found: Found) -> None:
    """The cost of kvflow over bare NIXL, LBHNC against BLHNC, and the window."""
    sizes = found.size((1, 16, 256), (1, 4))
    orders = (("LBHNC", False), ("BLHNC", True))
    for label, across in found.size(orders, orders[-1:]):
        pool = sized(8, 2 * sizes[-1] * MIB, across_layers=across)
        with ucx_log() as log:
            with engines(*specs(found.device, pool), log.environment) as pair:
                pid = pair.reader.pid
                one = statistics.median(pair.times(f"{label} one block", 1, found.size(50, 5))) * 1e6
                found.add(f"{label}: one block, us", one, most=1500)
                for size in sizes:
                    count = pool.blocks_for(size * MIB)
                    speed = gb_per_s(count * pool.block_bytes, pair.times(f"{label} {size}", count, REPEATS))
                    bounds: dict[str, Any] = {"least": 40} if across else {"least": 8, "most": 32}
                    found.add(f"{label} {size} MB: GB/s", speed, **(bounds if size == 256 else {}))
            found.add(f"{label}: path", str(log.read_path(pid, pool.piece_bytes)), has="cuda_ipc")
        with raw_pair(found.device, sizes[-1] * MIB, GET_ZCOPY) as reader:
            moved = move(reader, pool.piece_bytes, sizes[-1] * MIB)
        found.add(f"{label} bare NIXL: GB/s", gb_per_s(sizes[-1] * MIB, [one.seconds for one in moved]))
    pool = sized(8, 2 * sizes[-1] * MIB, across_layers=True)
    for in_flight in itertools.takewhile(lambda _: found.left_s() > 8, found.size((16, 64, 256, 1024), (4,))):
        with engines(*specs(found.device, pool, in_flight_bytes_max=in_flight * MIB)) as pair:
            count = pool.blocks // 2
            speed = gb_per_s(count * pool.block_bytes, pair.times(f"window {in_flight}", count, REPEATS))
        found.add(f"BLHNC, {in_flight} MB in flight: GB/s", speed, least=40 if in_flight == 256 else None)


@experiment("E5", 70)
def test_copies_on_idle_and_on_busy_devices(found: Found) -> None:
    """Whether copies wait for the engine's kernels; dense copies of page-locked memory are the ceiling of staging.

    Two processes that compute on one GPU take turns by time, whatever their streams are, so what kvflow's copies wait
    for shows within one process; between two a busy GPU may well make loads slower.
    """
    if found.on_cuda:
        for label, speed in call_in_child("pinned", pinned_copies).items():
            found.add(f"pinned, {label}: GB/s", speed, least=25)
    hnd = PoolShape(layers=found.size(64, 4), blocks=64, kv_heads=2)
    idle_s, busy_s = call_in_child("one process", copies_in_one_process, found.device, hnd)
    found.add("one process, staged, idle: ms", idle_s * 1e3)
    found.add("one process, staged: busy / idle", busy_s / idle_s, most=2)
    cases = (("staged", {"staging": "always"}, "HND"), ("scratch", {"scratch": "always"}, "NHD"))
    for label, config, order in cases:
        producer, reader = specs(found.device, hnd, **config)
        with pair_or_reason(found, label, replace(producer, pool=replace(hnd, order=order)), reader) as pair:
            for busy in (False, True):
                if pair is None:
                    break
                for engine in (pair.producer, pair.reader):
                    engine.call("set_busy", busy=busy)
                word = "busy" if busy else "idle"
                found.add(f"{label}, {word}: ms", statistics.median(pair.times(f"{label} {word}", 32, REPEATS)) * 1e3)


def pinned_copies() -> dict[str, float]:
    host = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    there, found = torch.empty_like(host, device="cuda"), {}
    for label, source, target in (("device to host", there, host), ("host to device", host, there)):
        seconds = []
        for _ in range(10):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start_s)
        found[label] = gb_per_s(64 * MIB, seconds)
    return found


async def copies_in_one_process(device: str, pool: PoolShape) -> tuple[float, float]:
    """Staged loads, idle and busy, with the in-process transport between host buffers: copies are what takes time."""
    medians = []
    async with AsyncExitStack() as stack:
        both = specs(device, pool, transport="inproc", staging="always")
        producer, reader = [await stack.enter_async_context(open_engine(spec)) for spec in both]
        for busy in (False, True):
            await producer.do_set_busy(busy)
            seconds = []
            for turn in range(REPEATS + 1):
                name, ids = f"one process {busy} {turn}", scattered_ids(turn, pool.blocks, pool.blocks // 2)
                start_s = time.perf_counter()  # from the offer, with which staging begins
                await reader.do_load(name, await producer.do_offer(name, ids), ids)
                seconds.append(time.perf_counter() - start_s)
                await producer.do_outcome(name)
            medians.append(statistics.median(seconds[1:]))
    return medians[0], medians[1]


@experiment("E12", 180, only_cuda=True)
def test_the_tests_on_the_device_and_the_doctor(found: Found) -> None:
    """Regressions."""
    doctor(found)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-v", "--thorough"]
    done = subprocess.run([*command, "tests/nixl/test_gpu.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    found.add("tests", (done.stdout.strip().splitlines() or ["nothing was said"])[-1])
    found.add("tests: exit code", done.returncode, equals=0)


@experiment("E7", 60)
def test_an_engines_steps_beside_loads(found: Found) -> None:
    """The cost of polling for an engine: its steps of 5 ms alone, beside ten loads a second, and alone again."""
    pool = PoolShape(layers=8, blocks=found.size(256, 32))
    count, steps = pool.blocks // 2, found.size(1500, 200)
    with engines(*specs(found.device, pool), GET_ZCOPY if found.on_cuda else {}) as pair:
        pair.hand_over("first", range(count), range(count)).succeeded()
        before = pair.reader.start("steps", count=steps).result(STEPS_S)["seconds"]
        offers = []
        for turn in range(found.size(200, 20)):
            ids = scattered_ids(turn, pool.blocks, count)
            offers.append(request(f"beside {turn}", pair.offer(f"beside {turn}", ids), ids))
        stepping = pair.reader.start("steps", count=steps, loads=offers, pause_s=0.1).result(STEPS_S)
        beside, errors = stepping["seconds"], stepping["errors"]
        after = pair.reader.start("steps", count=steps).result(STEPS_S)["seconds"]
    for label, seconds in (("alone", before), ("beside loads", beside), ("alone again", after)):
        for percent in (50, 99):
            found.add(f"steps {label}: p{percent} ms", percentile(seconds, percent) * 1e3)
    found.add("p50 beside / alone", percentile(beside, 50) / percentile(before, 50), most=1.02)
    found.add("p99 beside - alone, ms", (percentile(beside, 99) - percentile(before, 99)) * 1e3, most=0.5)
    found.add("loads", len(errors), least=1, always=True)
    found.add("loads that failed", sum(map(bool, errors)), equals=0, always=True)


@experiment("E8", 60)
def test_the_death_of_a_producer(found: Found) -> None:
    """How soon readers know, and how long its memory stays taken; it is killed while it is read."""
    found.add("memory used before, MiB", memory_used_mib())
    pool = sized(found.size(32, 4), found.size(8 << 10, 64) * MIB)
    producer, reader = specs(found.device, pool)
    small = replace(pool, blocks=max(2, pool.blocks // 4))  # what a reader takes of it
    reader = replace(reader, pool=small, config={"load_deadline_s": 20.0})
    every = range(small.blocks)
    with engines(producer, reader, GET_ZCOPY if found.on_cuda else {}) as pair:
        usual_s = pair.hand_over("first", every, every).succeeded().seconds
        ticket, late = pair.offer("cut off", every), pair.offer("too late", every)
        loading = pair.reader.start("load", **request("cut off", ticket, every))
        time.sleep(usual_s / 2)
        killed_s = time.perf_counter()
        pair.producer.kill()
        found.add("load under the kill", pair.ended(loading, killed_s).error or "succeeded")
        found.add("load under the kill: s after it", time.perf_counter() - killed_s, most=1)
        end = pair.load("too late", late, every)
        found.add("load after the kill", f"{end.error or 'succeeded'} in {end.seconds:.2f} s")
        time.sleep(found.size(1.0, 0.0))  # the driver takes a moment to clear up
        found.add("memory used after the kill, MiB", memory_used_mib())
        found.add("forgotten", pair.reader.call("forget", engine_id="producer"))
        found.add("memory used after forget_peer, MiB", memory_used_mib())
        (again,) = pair.engines.start(replace(producer, engine_id="producer-again", pool=small))
        error = replace(pair, producer=again, pool=small).hand_over("again", range(2), range(2)).error
        found.add("load from a new producer", error or "succeeded", equals="succeeded", always=True)
    found.add("memory used after the reader has ended, MiB", memory_used_mib())


def memory_used_mib() -> int | None:
    """Of the first device, by nvidia-smi: it also counts what no living process of ours holds."""
    said = output("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits").split()
    return int(said[0]) if said and said[0].isdecimal() else None


@experiment("E9", 40)
def test_reads_over_tcp(found: Found) -> None:
    """Whether the serving agent misses wake-ups (steps of 100 ms) when it copies for readers."""
    pool = PoolShape(layers=8, blocks=found.size(256, 32))
    with ucx_log() as log:
        tls = {"UCX_TLS": found.size("tcp,cuda_copy,self", "tcp")}
        with engines(*specs(found.device, pool), {**log.environment, **tls}) as pair:
            pid = pair.reader.pid
            ones = pair.times("one block", 1, found.size(200, 20))
            count = pool.blocks // 2
            bulk = gb_per_s(count * pool.block_bytes, pair.times("bulk", count, 3))
        found.add("path", str(log.read_path(pid, pool.piece_bytes)), has="tcp", always=True)
    found.add("one block: p50 ms", statistics.median(ones) * 1e3, most=3)
    found.add("one block: max ms", max(ones) * 1e3)
    found.add("steps of 100 ms", sum(one > 0.09 for one in ones), equals=0)
    found.add("bulk: GB/s", bulk, least=0.3, most=3)


@experiment("E10", 30, only_cuda=True)
def test_memory_that_is_mapped_by_hand(found: Found) -> None:
    """Whether expandable segments are noticed, and which way they are read if they are taken."""
    found.add("cuda_ipc can open it", call_in_child("mapped", can_be_opened), equals=False)
    pool = PoolShape(layers=4, blocks=64)
    with ucx_log() as log:
        environment = {**EXPANDABLE, **log.environment}
        with pair_or_reason(found, "registering", *specs(found.device, pool), environment) as pair:
            if pair is None:
                why = found.facts["registering: does not start"]
                found.add("registering", why, has="PYTORCH_CUDA_ALLOC_CONF")
                return
            end = pair.hand_over("mapped", scattered_ids(1, 64, 32), scattered_ids(2, 64, 32))
            pid = pair.reader.pid
        found.add("registering", f"taken; load: {end.error or end.seconds}", has="PYTORCH_CUDA_ALLOC_CONF")
        found.add("path", str(log.read_path(pid, pool.piece_bytes)))


def can_be_opened() -> bool | str:
    """Whether the driver lets other processes open such memory."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # read at first use
    memory = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    try:
        return load_driver().is_shareable(memory.data_ptr())
    except DriverError as error:
        return str(error)


@experiment("E11", 60)
def test_host_buffers_large_caches_little_memory(found: Found) -> None:
    """Defaults of staging, and whether scratch memory can fail safely where there is hardly any left."""
    pool = PoolShape(layers=8, blocks=found.size(256, 32))
    with pair_or_reason(found, "staged", *specs(found.device, pool, staging="always")) as pair:
        if pair is not None:
            count = pool.blocks // 2
            speed = gb_per_s(count * pool.block_bytes, pair.times("staged", count, REPEATS))
            found.add("staged 64 MB: GB/s", speed, least=2)
    with engines(*specs(found.device, sized(found.size(32, 4), found.size(16 << 10, 32) * MIB))) as pair:
        found.add("registering: s", pair.reader.call("registered_s"), most=0.1)
    hnd = PoolShape(layers=8, blocks=64, kv_heads=2)
    producer, reader = specs(found.device, hnd, scratch="always")
    producer = replace(producer, pool=replace(hnd, order="NHD"))
    with pair_or_reason(found, "little memory", producer, reader) as pair:
        if pair is not None:
            ids = scattered_ids(1, 64, 32), scattered_ids(2, 64, 32)
            if found.on_cuda:
                found.add("little memory: MB left", pair.reader.call("take_memory", left_bytes=100 * MIB) / MIB)
                found.add("little memory: load", pair.hand_over("little memory", *ids).error or "succeeded")
                pair.reader.call("give_memory_back")
            error = pair.hand_over("again", *ids).error
            found.add("little memory: load afterwards", error or "succeeded", equals="succeeded", always=True)
