"""`serve`: the whole service on one machine, for a demo or a test. A deployment starts the processes by its own means.

If a process ends before the service is ready, the service ends. Later a process that dies is started again.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp

COMMAND = Path(__file__).with_name("__main__.py")
LOCAL = "127.0.0.1"
"""Where the workers listen."""
START_TIMEOUT_S, EXIT_TIMEOUT_S, RESTART_PAUSE_S = 180.0, 15.0, 1.0


class StartError(Exception):
    """The service cannot start. The message says why."""


async def serve(options: argparse.Namespace) -> None:
    """Run the service until SIGTERM or Ctrl-C, which cancel this task. Raises StartError."""
    this = asyncio.current_task()
    assert this is not None, "runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    host = f"[{options.host}]" if ":" in options.host else options.host
    router_port = free_port(options.host, options.port)
    url = f"http://{host}:{router_port}"
    roles = ("prefill", "decode")
    names = [f"{role}-{index}" for role in roles for index in range(getattr(options, role))]
    ports = {name: free_port(LOCAL) for name in names}
    with ExitStack() as stack:
        checkpoint = options.checkpoint
        if checkpoint is None:
            checkpoint = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvflow-"))
            print("unpacking the model", flush=True)
            async with started("unpack", checkpoint) as process:  # it takes one or two gigabytes of memory
                if await process.wait():
                    raise StartError("the model could not be unpacked")
        model = ["--checkpoint", str(checkpoint), *(["--share-prefixes"] if options.share_prefixes else [])]
        commands = {name: ["worker", "--name", name, "--port", str(port), *model] for name, port in ports.items()}
        router = ["router", "--host", options.host, "--port", str(router_port), *model]
        for role in roles:
            of_role = [f"{name}=http://{LOCAL}:{ports[name]}" for name in names if name.startswith(role)]
            router += [f"--{role}", *of_role]
        router += ["--deadline-s", str(options.deadline_s)]
        ready = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for name, command in {**commands, "router": router}.items():
                group.create_task(keep_running(name, command, ready), name=name)
            await all_up(url)
            ready.set()
            print(f"ready: {url}/v1", flush=True)


async def keep_running(name: str, command: list[str], ready: asyncio.Event) -> None:
    """Start a process again whenever it dies. Raises StartError if it ends before `ready`."""
    while True:
        async with started(*command) as process:
            print(f"{name}: process {process.pid}", flush=True)
            status = await process.wait()
        if not ready.is_set():
            raise StartError(f"{name} ended with status {status}; what it says itself is above")
        print(f"{name} died with status {status}; starting it again in {RESTART_PAUSE_S:g} s", flush=True)
        await asyncio.sleep(RESTART_PAUSE_S)


@asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[Process]:
    """Start a process of this server. At the end of the block terminate it, and kill it if it does not end in time."""
    # A new session: Ctrl-C reaches only `serve`, which then ends the other processes.
    process = await asyncio.create_subprocess_exec(sys.executable, COMMAND, *arguments, start_new_session=True)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def all_up(url: str) -> None:
    """Wait until the router reports that all workers are up. Raises StartError after `START_TIMEOUT_S`."""
    status = ""
    try:
        async with aiohttp.ClientSession() as client, asyncio.timeout(START_TIMEOUT_S):
            while status != "ok":
                await asyncio.sleep(0.1)
                with suppress(aiohttp.ClientError):
                    async with client.get(f"{url}/health") as response:
                        status = (await response.json())["status"]
    except TimeoutError:
        raise StartError(f"{url}: not all workers were up within {START_TIMEOUT_S:g} s") from None


def free_port(host: str, port: int = 0) -> int:
    """Return `port`, or a free port for 0. Raises StartError if a socket cannot listen there."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            return int(server.getsockname()[1])
    except OSError as error:
        raise StartError(f"cannot listen at {host}:{port}: {error.strerror}; see --host and --port") from error
