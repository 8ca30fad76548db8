"""Engines that are short of open files: real processes, each with a limit of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

BEGIN = """
import asyncio, json, logging, os, resource, socket, sys
import kvflow, torch

lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(f"{record.levelname} {record.getMessage()}")
logging.getLogger("kvflow").addHandler(Lines())
logging.getLogger("kvflow").setLevel(logging.INFO)

def caches():
    return {"layer.0": torch.rand(2, 16, 8, 16, 64)}

def config(name):
    return kvflow.Config(engine_id=name, listen="tcp://127.0.0.1:0", drain_timeout_s=1.0)

async def registered(runtime):
    cache = caches()
    await runtime.register_kv_caches(cache, kvflow.CacheLayout.infer(cache, order="HND", block_size=16))
    return runtime

def limit(count):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))

def used():
    return len(os.listdir("/proc/self/fd")) - 1

async def load(producer, consumer, name):
    ticket = producer.serve_blocks(kvflow.ServeRequest(name, [3, 7], 32)).ticket.to_params()
    try:
        return (await consumer.load_blocks(kvflow.LoadRequest(name, ticket, [0, 1], 20.0))).tokens
    except kvflow.errors.KVFlowError as error:
        return f"{type(error).__name__} {error.retryable} {error}"
"""


def run(code: str, **environment: str) -> Any:
    """Run a script that prints one line of JSON."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code],
        cwd=ROOT,
        env=os.environ | {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "fatal"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nixl
@pytest.mark.parametrize("left", [2, 16, 30])
def test_too_few_files_for_a_runtime_are_a_config_error(left: int) -> None:
    """ZeroMQ 4.3.5 has aborted processes that had run out of files: it is not even begun."""
    code = f"""
async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (used() + {left},) * 2)
    try:
        async with kvflow.Runtime(config("few")):
            print(json.dumps("opened"))
    except kvflow.errors.ConfigError as error:
        print(json.dumps(str(error)))

import nixl._bindings
asyncio.run(main())
"""
    assert "ulimit -n" in run(code)


@pytest.mark.nixl
def test_opening_raises_the_soft_limit_and_warns_of_a_low_hard_one() -> None:
    code = """
async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (70, 300))
    async with kvflow.Runtime(config("low")):
        print(json.dumps([resource.getrlimit(resource.RLIMIT_NOFILE), lines]))

asyncio.run(main())
"""
    limits, lines = run(code)
    assert limits == [300, 300]
    (warning,) = (line for line in lines if line.startswith("WARNING"))
    assert "open files: at most 300" in warning
    assert "readers_max" in warning


READERS = """
async def main():
    async with kvflow.Runtime(config("p")) as producer, kvflow.Runtime(config("first")) as first:
        await registered(producer), await registered(first)
        results = [await load(producer, first, "first")]
        async with kvflow.Runtime(config("second")) as second:
            await registered(second)
            await load(producer, second, "before")
            await second.forget_peer("p")  # it connects anew, and asks over the connection that is kept
            limit(used() + 6)
            results.append(await load(producer, second, "second"))
            results.append(await load(producer, first, "connected"))
            refused = producer.statistics().readers_refused
            limit(10_000)
            results.append(await load(producer, second, "later"))
        print(json.dumps([results, refused, lines, producer.statistics().transport.unreachable]))

asyncio.run(main())
"""


@pytest.mark.nixl
def test_a_new_reader_is_refused_while_few_files_are_left_and_others_go_on() -> None:
    (first, second, connected, later), refused, lines, deaf = run(READERS, UCX_TLS="tcp,self")
    assert (first, connected, later, deaf) == (32, 32, 32, False)
    kind, retryable, why = second.split(" ", 2)
    assert (kind, retryable) == ("PeerNotReady", "True")
    assert "Too many open files" in why
    assert refused >= 1
    (warning,) = (line for line in lines if line.startswith("WARNING"))
    assert "accepts no new reader: Too many open files" in warning


@pytest.mark.nixl
def test_a_reader_without_files_says_so_and_reads_once_it_has_some() -> None:
    code = """
async def main():
    async with kvflow.Runtime(config("p")) as producer, kvflow.Runtime(config("d")) as reader:
        await registered(producer), await registered(reader)
        limit(used() + 3)
        results = [await load(producer, reader, "few")]
        limit(10_000)
        await reader.forget_peer("p")  # and that it could not be asked
        results.append(await load(producer, reader, "more"))
        print(json.dumps(results))

asyncio.run(main())
"""
    few, more = run(code, UCX_TLS="tcp,self")
    assert "Too many open files" in few
    assert few.split()[1] == "True"
    assert more == 32


@pytest.mark.nixl
def test_a_listener_that_ucx_has_closed_is_told_and_a_registration_mends_it() -> None:
    """UCX 1.23 has closed listeners permanently. Here the engine itself closes them, without UCX's knowledge."""
    code = """
from kvflow.transport.nixl.native import listening_sockets

async def main():
    others = set(listening_sockets())
    async with kvflow.Runtime(config("p")) as producer:
        await registered(producer)
        port, nothing = int(producer.address.rpartition(":")[2]), os.open(os.devnull, os.O_RDONLY)
        for file, listener in listening_sockets().items():
            if file not in others and listener.port != port:
                os.dup2(nothing, file)
        while not producer.statistics().transport.unreachable:
            await asyncio.sleep(0.01)
        async with kvflow.Runtime(config("d")) as reader:
            await registered(reader)
            results = [await load(producer, reader, "deaf")]
            lost = producer.statistics().transport.listeners_lost
            await producer.unregister()
            await registered(producer)
            results.append(await load(producer, reader, "mended"))
            print(json.dumps([results, lost, producer.statistics().transport.listeners_lost, lines]))

asyncio.run(main())
"""
    (deaf, mended), lost, lost_then, lines = run(code, UCX_TLS="tcp,self", UCX_NET_DEVICES="lo")
    assert deaf.startswith("PeerNotReady True")
    assert "listener is closed" in deaf
    assert (mended, lost_then) == (32, 0)
    assert lost >= 1
    assert any(line.startswith("ERROR") and "UCX has closed its listener" in line for line in lines)
