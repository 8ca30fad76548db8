"""`serve`: workers and a router, each in its own process, restarted when they die, as by a process manager."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from openai_server.command import CANNOT_START, StartError

COMMAND = Path(__file__).with_name("__main__.py")
START_TIMEOUT_S, EXIT_TIMEOUT_S, RESTART_PAUSE_S = 180.0, 15.0, 1.0
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running service: the router's URL, the workers' URLs by name, and all processes by name."""

    url: str
    prefill: dict[str, str]
    decode: dict[str, str]
    processes: dict[str, Process] = field(default_factory=dict)


async def run_service(options: argparse.Namespace) -> None:
    """Run the service until SIGTERM or Ctrl-C, which cancel this task."""
    this = asyncio.current_task()
    assert this is not None, "runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    print("starting", "" if options.checkpoint else "; the model is unpacked first", flush=True, sep="")
    async with start_service(options) as service:
        for name, url in (service.prefill | service.decode).items():
            print(f"{name}: {url} (process {service.processes[name].pid})")
        print(f"ready: {service.url}/v1", flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def start_service(options: argparse.Namespace) -> AsyncIterator[Service]:
    """Start a service, yield it once it takes requests, and end it with the block. Raises StartError."""
    free_port(options.host, options.port)  # fail early, before the model is unpacked
    try:
        async with _started(options) as service:
            yield service
    except ExceptionGroup as problems:
        if (starts := problems.subgroup(StartError)) is None:
            raise
        raise StartError(str(starts.exceptions[0])) from None


@asynccontextmanager
async def _started(options: argparse.Namespace) -> AsyncIterator[Service]:
    async with AsyncExitStack() as stack:
        checkpoint = options.checkpoint
        if checkpoint is None:
            checkpoint = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvflow-")))
            await unpack_model(checkpoint)
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)  # for the router only
        ports = {
            name: free_port(local)
            for role in ("prefill", "decode")
            for name in (f"{role}-{index}" for index in range(getattr(options, role)))
        }
        urls = {name: _url(local, port) for name, port in ports.items()}
        port = free_port(options.host, options.port)
        service = Service(
            url=_url(options.host, port),
            prefill={name: url for name, url in urls.items() if name.startswith("prefill")},
            decode={name: url for name, url in urls.items() if name.startswith("decode")},
        )
        model = ["--checkpoint", str(checkpoint), *(["--share-prefixes"] if options.share_prefixes else [])]
        told = [
            *("router", "--host", options.host, "--port", str(port), "--deadline-s", str(options.deadline_s), *model),
            *("--prefill", *(f"{name}={url}" for name, url in service.prefill.items())),
            *("--decode", *(f"{name}={url}" for name, url in service.decode.items())),
        ]
        commands = {
            name: [name.split("-")[0], "--name", name, "--host", local, "--port", str(port), *model]
            for name, port in ports.items()
        }
        group = await stack.enter_async_context(asyncio.TaskGroup())
        keeping = [
            group.create_task(_keep_running(service, name, command), name=name)
            for name, command in {**commands, "router": told}.items()
        ]
        try:
            await _wait_ready(service)
            yield service
        finally:
            for task in keeping:
                if not task.cancelling():  # a second cancellation would interrupt its wait for the process to end
                    task.cancel()
            await asyncio.wait(keeping)


async def _keep_running(service: Service, name: str, command: list[str]) -> None:
    """Start a process, and restart it whenever it dies. Raises StartError if it exits with `CANNOT_START`."""
    while True:
        process = await _start(*command)
        service.processes[name] = process
        try:
            status = await process.wait()
        finally:
            await _end(process)
        if status == CANNOT_START:
            raise StartError(f"{name} cannot start; what it says itself is above")
        print(
            f"{name} died ({_exit_text(status)}); starting it again in {RESTART_PAUSE_S:g} s",
            file=sys.stderr,
            flush=True,
        )
        await asyncio.sleep(RESTART_PAUSE_S)


async def unpack_model(checkpoint: Path) -> None:
    """Unpack the model in another process, because that takes one or two gigabytes of memory."""
    process = await _start("unpack", str(checkpoint))
    try:
        if status := await process.wait():
            raise StartError(f"the model could not be unpacked: {_exit_text(status)}")
    finally:
        await _end(process)


async def _start(*arguments: str) -> Process:
    # A new session: Ctrl-C reaches only `serve`, which then ends the other processes.
    return await asyncio.create_subprocess_exec(
        sys.executable, COMMAND, *arguments, start_new_session=True, preexec_fn=_end_with_parent
    )


def _end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


async def _end(process: Process) -> None:
    """Terminate a process and wait for its end. Kill it if that takes too long. Do nothing if it has ended."""
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _wait_ready(service: Service) -> None:
    """Wait until the router reports that all workers are up. Raises StartError after `START_TIMEOUT_S`."""
    try:
        async with aiohttp.ClientSession() as client, asyncio.timeout(START_TIMEOUT_S):
            while (await health(client, service.url)).get("status") != "ok":  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise StartError(f"{service.url}: not all workers were up within {START_TIMEOUT_S:g} s") from None


async def health(client: aiohttp.ClientSession, url: str) -> Mapping[str, Any]:
    """Return the reply of a server's /health; {} if the server does not answer."""
    with suppress(aiohttp.ClientError, TimeoutError, ValueError):
        async with client.get(f"{url}/health", timeout=HEALTH_TIMEOUT) as response:
            reply = json.loads(await response.read())
            return reply if isinstance(reply, dict) else {}
    return {}


def free_port(host: str, port: int = 0) -> int:
    """Return `port`, or a free port for 0. Raises StartError if a socket cannot listen there."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            return int(server.getsockname()[1])
    except OSError as error:
        raise StartError(f"cannot listen at {host}:{port}: {error.strerror}; see --host and --port") from error


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _exit_text(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
