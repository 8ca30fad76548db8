"""Two processes, each with a stand-in of its own, over real NIXL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvflow import LoadRequest
from kvflow.errors import TransferFailed
from kvflow.testing import PatternCache, assert_loaded
from tests.accelerator.producing import FACTOR, PRODUCER
from tests.accelerator.sides import LAYERS, OURS, THEIRS, THERE, TOKENS, Engine, Side, Site, finish
from tests.accelerator.standin import StandIn
from tests.support.tests_support import WAIT_S, until

pytestmark = [pytest.mark.nixl, pytest.mark.usefixtures("standin")]

ROOT = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def producing(transport: str, *, killed: bool = False) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.accelerator.producing", transport),
        cwd=ROOT,
        env=environment,
        stdin=pipe,
        stdout=pipe,
    )
    try:
        yield process
        assert await process.wait() == (-signal.SIGKILL if killed else 0)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        return (await process.stdout.readline()).decode().strip()


@pytest.mark.parametrize("engine_copies", [False, True], ids=["own copies", "the engine's"])
async def test_a_hand_over_between_processes(standin: StandIn, engine_copies: bool) -> None:
    """Nothing is read before the other device has computed it, nor reported before this one has copied it."""
    side = Side(device=THERE, order="HND", style="kv_first", engine_copies=engine_copies)
    async with producing("nixl") as process, Site("nixl") as site:
        consumer = await site.engine("consumer", side)
        ticket = json.loads(await line_of(process))
        load = asyncio.ensure_future(consumer.runtime.load_blocks(LoadRequest("req", ticket, OURS, verify=True)))
        await until(lambda: load.done() or consumer.runtime.statistics().loading.peers)
        assert not load.done(), "the producer's device is held"
        with standin.held():
            assert process.stdin is not None
            process.stdin.write(b"go on\n")
            await until(lambda: load.done() or standin.waiting())
            assert not load.done(), "our device is held"
        report = await load
        assert (report.tokens, report.verified) == (TOKENS, True)
        assert await line_of(process) == "read"
        assert_computed(consumer)


def assert_computed(consumer: Engine) -> None:
    """Assert that the consumer's engine sees, now, what the other process has computed."""
    found = consumer.seen()
    finish()
    theirs, layout = PRODUCER.make("producer")
    for tensor in theirs.values():
        tensor.mul_(FACTOR)
    assert_loaded(found, OURS, PatternCache("producer", theirs, layout), THEIRS)


@pytest.mark.parametrize("order", ["HND", "NHD"])
async def test_a_hand_over_from_memory_of_another_process(standin: StandIn, order: str) -> None:
    """The order of the producer's heads is NHD: of another one, each piece is small, and all are one batch."""
    async with producing("mapped") as process, Site("mapped") as site:
        consumer = await site.engine("consumer", Side(device=THERE, order=order, style="kv_first"))
        ticket = json.loads(await line_of(process))
        load = asyncio.ensure_future(consumer.runtime.load_blocks(LoadRequest("req", ticket, OURS, verify=True)))
        await until(lambda: load.done() or consumer.runtime.statistics().transport.mapped_peers)
        assert process.stdin is not None
        with standin.held():
            process.stdin.write(b"go on\n")
            await until(lambda: load.done() or standin.queued())
            assert not load.done(), "our device is held"
        report = await load
        assert (report.tokens, report.verified, standin.mapped()) == (TOKENS, True, LAYERS)
        assert await line_of(process) == "read"
        assert_computed(consumer)


async def test_memory_of_a_process_that_was_killed_is_an_error_and_free(standin: StandIn) -> None:
    async with producing("mapped", killed=True) as process, Site("mapped") as site:
        consumer = await site.engine("consumer", Side(device=THERE))
        ticket = json.loads(await line_of(process))
        load = asyncio.ensure_future(consumer.runtime.load_blocks(LoadRequest("req", ticket, OURS)))
        await until(lambda: load.done() or consumer.runtime.statistics().transport.mapped_peers)
        assert process.stdin is not None
        with standin.held():
            process.stdin.write(b"go on\n")
            await until(lambda: load.done() or standin.queued())
            process.kill()
            await process.wait()
        with pytest.raises(TransferFailed, match="process has ended"):
            await load
        await until(lambda: not standin.mapped())
