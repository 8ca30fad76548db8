"""Two processes, each with a stand-in of its own, over real NIXL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvflow import LoadRequest
from kvflow.testing import PatternCache, assert_loaded
from tests.accelerator.producing import FACTOR, PRODUCER
from tests.accelerator.sides import OURS, THEIRS, THERE, TOKENS, Side, Site, finish
from tests.accelerator.standin import StandIn
from tests.support.tests_support import WAIT_S, until

pytestmark = [pytest.mark.nixl, pytest.mark.usefixtures("standin")]

ROOT = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def producing() -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.accelerator.producing", cwd=ROOT, env=environment, stdin=pipe, stdout=pipe
    )
    try:
        yield process
        assert await process.wait() == 0
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
    async with producing() as process, Site("nixl") as site:
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
        found = consumer.seen()
        finish()
        theirs, layout = PRODUCER.make("producer")
        for tensor in theirs.values():
            tensor.mul_(FACTOR)
        assert_loaded(found, OURS, PatternCache("producer", theirs, layout), THEIRS)
