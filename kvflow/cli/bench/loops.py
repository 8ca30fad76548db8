"""How a child of the bench lives on an event loop: uvloop, and a pipe that is read without blocking it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from multiprocessing.connection import Connection

import uvloop

from kvflow.cli.bench.messages import Message


def run_on_uvloop(main: Coroutine[None, None, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


async def receive(pipe: Connection) -> Message:
    message: Message = await asyncio.to_thread(pipe.recv)
    return message
