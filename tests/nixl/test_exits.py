"""Ends of processes: a process with threads in a library at Python's exit, and forked children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOUND_S = 240
"""Time limit of a script. A hang would last longer."""


def run(code: str, *, quiet: bool = False) -> list[str]:
    """Run a script, and return the words that it has printed. With `quiet` it writes to stdout alone."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore:This process", "-c", code],  # Python 3.12 and later warn at a fork
        cwd=ROOT,
        env=os.environ | {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error"},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (quiet and done.stderr), done.stderr[-3000:]
    return done.stdout.split()


def test_threads_have_left_their_library_when_python_ends_and_nothing_of_theirs_is_destroyed() -> None:
    """A process has not survived a thread that is inside NIXL at its exit. The last exit hook was made first."""
    code = """
import atexit, asyncio, threading
seen = []
atexit.register(lambda: print(*[name.name for name in threading.enumerate()], seen))

from kvflow.transport.owner_thread import OwnerThread

class Held:
    def __del__(self):
        seen.append("destroyed")
        print("destroyed")

class Crank:
    def __init__(self):
        self.held = Held()
    def turn(self):
        return 0.0

async def main():
    OwnerThread("busy", Crank().turn, print)

asyncio.run(main())
"""
    assert run(code) == ["MainThread", "[]"]


BLOCKING = """
import os, sys, torch, kvflow
from kvflow.blocking import Runtime

limits = kvflow.Limits(transport_close_timeout_s=1000.0)
config = kvflow.Config(engine_id="p", listen="tcp://127.0.0.1:0", transport="TRANSPORT", limits=limits)
child = False
with Runtime(config) as runtime:
    cache = {"layer.0": torch.rand(2, 16, 8, 16, 64)}
    runtime.register_kv_caches(cache, kvflow.CacheLayout.infer(cache, order="HND", block_size=16))
    with Runtime(kvflow.Config(engine_id="d", listen="tcp://127.0.0.1:0", transport="TRANSPORT")) as reader:
        copy = {"layer.0": torch.rand(2, 16, 8, 16, 64)}
        reader.register_kv_caches(copy, kvflow.CacheLayout.infer(copy, order="HND", block_size=16))
        pid = os.fork()
        if pid == 0:
            child = True
            LEAVE
        else:
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            lease = runtime.serve_blocks(kvflow.ServeRequest("r", [3, 7], 32))
            report = reader.load_blocks(kvflow.LoadRequest("r", lease.ticket.to_params(), [0, 1]))
            print(report.tokens)
if child:
    sys.exit(7)
"""


@pytest.mark.nixl
@pytest.mark.parametrize("transport", ["inproc", "nixl"])
@pytest.mark.parametrize("leave", ["sys.exit(7)", "pass"])
def test_a_forked_child_of_blocking_runtimes_ends_and_its_parent_goes_on(transport: str, leave: str) -> None:
    assert run(BLOCKING.replace("TRANSPORT", transport).replace("LEAVE", leave)) == ["7", "32"]


ASYNC = """
import asyncio, os, sys, torch, kvflow

async def main():
    config = kvflow.Config(engine_id="p", listen="tcp://127.0.0.1:0", transport="TRANSPORT", drain_timeout_s=1000.0)
    async with kvflow.Runtime(config) as runtime:
        cache = {"layer.0": torch.rand(2, 16, 8, 16, 64)}
        await runtime.register_kv_caches(cache, kvflow.CacheLayout.infer(cache, order="HND", block_size=16))
        lease = runtime.serve_blocks(kvflow.ServeRequest("r", [3, 7], 32))
        pid = os.fork()
        if pid == 0:
            return 7
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), runtime.state, flush=True)
        os._exit(0)  # asyncio's loops share their descriptors with a child that ends them

sys.exit(asyncio.run(main()))
"""


LOOPS = {"asyncio": "asyncio.run(main())", "uvloop": "__import__('uvloop').run(main())"}


@pytest.mark.nixl
@pytest.mark.parametrize("transport", ["inproc", "nixl"])
@pytest.mark.parametrize("loop", list(LOOPS))
def test_a_forked_child_that_leaves_asyncio_run_ends_and_calls_nothing_broken(transport: str, loop: str) -> None:
    code = ASYNC.replace("TRANSPORT", transport).replace("asyncio.run(main())", LOOPS[loop])
    assert run(code, quiet=True) == ["7", "open"]


USES = """
import asyncio, os, sys, torch, kvflow

async def main():
    config = kvflow.Config(engine_id="p", listen="tcp://127.0.0.1:0", transport="inproc")
    async with kvflow.Runtime(config) as runtime:
        cache = {"layer.0": torch.rand(2, 16, 8, 16, 64)}
        await runtime.register_kv_caches(cache, kvflow.CacheLayout.infer(cache, order="HND", block_size=16))
        pid = os.fork()
        if pid == 0:
            try:
                runtime.serve_blocks(kvflow.ServeRequest("r", [3, 7], 32))
            except kvflow.errors.UsageError as error:
                print("forked" in str(error), flush=True)
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        lease = runtime.serve_blocks(kvflow.ServeRequest("r", [3, 7], 32))
        lease.revoke()
        print(await lease)

asyncio.run(main())
"""


def test_a_forked_child_is_told_that_its_parents_runtime_is_none_of_its() -> None:
    assert run(USES, quiet=True) == ["True", "7", "revoked"]


LOCKED = """
import os, kvflow
from kvflow.blocking import Runtime

with Runtime(kvflow.Config(engine_id="p", listen="tcp://127.0.0.1:0", transport="inproc")) as runtime:
    with runtime._thread._lock:  # another thread calls at this moment
        pid = os.fork()
    if pid == 0:
        try:
            runtime._thread._lock.acquire(blocking=False)
            runtime.serve_blocks(kvflow.ServeRequest("r", [3, 7], 32))
        except kvflow.errors.UsageError:
            os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_child_that_is_forked_while_another_thread_calls_waits_for_no_lock() -> None:
    assert run(LOCKED) == ["7"]


EVENTS = """
import asyncio, os, sys
from kvflow.prefix.kv_events import EventSource, PrefixMap, Publisher, Subscriber

async def main():
    async with Publisher("tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*") as published:
        source = EventSource(holder="h", endpoint=published.endpoint, replay_endpoint=published.replay_endpoint)
        async with Subscriber(PrefixMap(), [source]) as subscriber:
            while not subscriber.statistics()["h"].connected:
                await asyncio.sleep(0.01)
            pid = os.fork()
            if pid == 0:
                return 7
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            os._exit(0)

sys.exit(asyncio.run(main()))
"""


def test_a_forked_child_that_leaves_publishers_and_subscribers_of_kv_events_ends() -> None:
    assert run(EVENTS, quiet=True) == ["7"]
