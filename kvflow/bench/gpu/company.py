"""E7 and E8: what loads do to an engine's steps, and what a producer that dies leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from functools import partial

from kvflow.bench.child import BenchError, RankProcess, open_children
from kvflow.bench.gpu.engine import Engine, EngineSpec, Pair, engines, open_engine, specs
from kvflow.bench.gpu.paths import GET_ZCOPY
from kvflow.bench.gpu.pool import PoolShape, scattered_ids
from kvflow.bench.gpu.setting import Setting
from kvflow.bench.loads import QUIET
from kvflow.bench.targets import percentile

_PAUSE_S = 0.1
_MIB = 1 << 20


def steps_beside_loads(setting: Setting) -> None:
    """E7: an engine's steps of 5 ms alone, beside ten loads a second, and alone again."""
    pool = PoolShape(layers=8, blocks=setting.size(256, 32))
    count, steps = pool.blocks // 2, setting.size(1500, 1000)
    with engines(*specs(setting.device, pool), GET_ZCOPY if setting.on_cuda else {}) as pair:
        pair.must_hand_over("first", range(count), range(count))
        pair.reader.run(Engine.begin_steps)
        pair.reader.run(Engine.step_seconds, 20)
        before = pair.reader.run(Engine.step_seconds, steps)
        offers = []
        for turn in range(setting.size(200, 20)):
            name, ids = f"beside {turn}", scattered_ids(turn, pool.blocks, count)
            offers.append((name, pair.producer.run(Engine.offer_computed, name, ids), ids))
        beside, ends = pair.reader.run(Engine.load_for_a_while, offers, _PAUSE_S, steps)
        after = pair.reader.run(Engine.step_seconds, steps)
        pair.reader.run(Engine.end_steps)
    for label, seconds in (("alone", before), ("beside loads", beside), ("alone again", after)):
        for percent in (50, 99):
            setting.facts.add(f"steps {label}: p{percent} ms", percentile(seconds, percent) * 1e3)
    setting.facts.add("p50 beside / alone", percentile(beside, 50) / percentile(before, 50))
    setting.facts.add("p99 beside - alone, ms", (percentile(beside, 99) - percentile(before, 99)) * 1e3)
    setting.facts.add("loads", len(ends))
    setting.facts.add("loads that failed", sum(bool(end.error) for end in ends))


def death_of_a_producer(setting: Setting) -> None:
    """E8: a producer is killed while it is read and while it is not; how loads end, and when its memory comes back."""
    before = _memory_used_mib()
    setting.facts.add("memory used before, MiB", before)
    pool = PoolShape(layers=setting.size(32, 4), blocks=1)
    pool = replace(pool, blocks=pool.blocks_for(setting.size(8 << 10, 64) * _MIB))
    producer, reader = specs(setting.device, pool)
    small = replace(pool, blocks=max(2, pool.blocks // 4))  # what a reader takes of it
    reader = replace(reader, pool=small, config={"load_deadline_s": 20.0})
    with engines(producer, reader, GET_ZCOPY if setting.on_cuda else {}) as pair:
        _kill_while_read(setting, pair, small)
        time.sleep(setting.size(1.0, 0.0))  # the driver takes a moment to clear up
        setting.facts.add("memory used after the kill, MiB", _memory_used_mib())
        setting.facts.add("forgotten", pair.reader.run(Engine.forget, "producer"))
        setting.facts.add("memory used after forget_peer, MiB", _memory_used_mib())
        _again(setting, pair, replace(producer, engine_id="producer-again", pool=small))
    setting.facts.add("memory used after the reader has ended, MiB", _memory_used_mib())


def _kill_while_read(setting: Setting, pair: Pair, pool: PoolShape) -> None:
    every = range(pool.blocks)
    usual_s = pair.must_hand_over("first", every, every).seconds
    ticket = pair.producer.run(Engine.offer_computed, "cut off", every)
    late = pair.producer.run(Engine.offer_computed, "too late", every)
    loading = pair.reader.start(Engine.load, "cut off", ticket, every)
    time.sleep(usual_s / 2)
    killed_s = time.perf_counter()
    os.kill(pair.producer.pid, signal.SIGKILL)
    end = loading()
    setting.facts.add("load under the kill", end.error or "succeeded")
    setting.facts.add("load under the kill: s after it", time.perf_counter() - killed_s)
    end = pair.reader.run(Engine.load, "too late", late, every)
    setting.facts.add("load after the kill", end.error or "succeeded")
    setting.facts.add("load after the kill: s", end.seconds)


def _again(setting: Setting, pair: Pair, spec: EngineSpec) -> None:
    """A new producer on the same device; the reader works with it."""
    rank = RankProcess(spec.engine_id, partial(open_engine, spec))
    try:
        with open_children([rank], QUIET) as children:
            again = Pair(producer=children[spec.engine_id], reader=pair.reader, pool=spec.pool)
            end = again.hand_over("again", range(2), range(2))
            setting.facts.add("load from a new producer", end.error or "succeeded")
    except BenchError as error:
        setting.facts.add("load from a new producer", str(error).strip().splitlines()[-1])


def _memory_used_mib() -> int | None:
    """Of the first device, by nvidia-smi: it also counts what no living process of ours holds."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return int(done.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
