"""One engine as a process: `python -m tests.endurance.engine SOCKET ROLE OPTIONS`; it ends when its stdin does."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import uvloop

from tests.endurance.consumer import Consumer
from tests.endurance.producer import Producer
from tests.endurance.rpc import Server

ROLES = {"producer": Producer, "consumer": Consumer}


async def serve(path: Path, role: str, options: dict[str, Any], until: asyncio.Event) -> None:
    """Be that engine; `until` it is told to close."""
    if role == "consumer":
        options = {**options, "producer": Path(options["producer"])}
    engine = ROLES[role](**options)
    server = Server(engine)
    await engine.open()
    await server.listen(path)
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
