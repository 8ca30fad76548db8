"""One engine as a process: `python -m tests.endurance.engine SOCKET ROLE OPTIONS`; it ends when its stdin does."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch
import uvloop

from tests.endurance.consumer import Consumer
from tests.endurance.producer import Producer
from tests.support import verbs

ROLES = {"producer": Producer, "consumer": Consumer}


async def serve(path: Path, role: str, options: dict[str, Any], until: asyncio.Event) -> None:
    """Run the engine until `until` is set by a command to close."""
    if role == "consumer":
        options = {**options, "producer": Path(options["producer"])}
    engine, calls = ROLES[role](**options), set[asyncio.Task[None]]()

    def start(work: Coroutine[Any, Any, None]) -> None:
        calls.add(task := asyncio.create_task(work))
        task.add_done_callback(calls.discard)

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await verbs.serve(engine, reader, writer, start)
        except ConnectionError:
            pass  # a process that was killed
        finally:
            writer.close()

    await engine.open()
    server = await asyncio.start_unix_server(listen, path, limit=verbs.LINE_BYTES_MAX)
    try:
        await until.wait()
    finally:
        await engine.close()
        server.close()


async def main(path: Path, role: str, options: dict[str, Any]) -> None:
    until = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), until.set)
    gc.freeze()
    await serve(path, role, options, until)
    print("closed in order", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    uvloop.run(main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
