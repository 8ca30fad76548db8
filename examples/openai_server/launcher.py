"""All processes of the service: workers and router, each a command of its own, started again when they die.

This stands for what a process manager does in a real deployment. The processes end with the launcher, even if that is
killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

COMMAND = Path(__file__).with_name("__main__.py")
START_TIMEOUT_S = 180.0
START_POLL_S = 0.1
RESTART_PAUSE_S = 1.0
EXIT_TIMEOUT_S = 15.0
PR_SET_PDEATHSIG = 1


class StartError(RuntimeError):
    """The service, or a part of it, did not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """How many of what, and where."""

    prefill: int
    decode: int
    host: str
    port: int
    """The router's; 0 takes any free one, as workers do."""
    checkpoint: Path | None
    """A directory with the unpacked model; None unpacks it, which takes some 15 seconds."""
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running service: the router's URL, and its workers' by their names."""

    url: str
    prefill: dict[str, str]
    decode: dict[str, str]


@asynccontextmanager
async def start_service(settings: ServiceSettings) -> AsyncIterator[Service]:
    """The service for as long as the `with`; when it is entered the service takes requests."""
    with ExitStack() as stack:
        checkpoint = settings.checkpoint or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvflow-")))
        if settings.checkpoint is None:
            await unpack_model(checkpoint)
        service = _laid_out(settings)
        async with asyncio.TaskGroup() as group:
            keepers = [
                group.create_task(_keep_running(name, arguments), name=name)
                for name, arguments in _commands(service, settings, checkpoint).items()
            ]
            try:
                await _ready(service)
                yield service
            finally:
                for keeper in keepers:
                    keeper.cancel()


async def unpack_model(checkpoint: Path) -> None:
    """Unpack the model; in a process of its own, because that takes a gigabyte or two."""
    process = await _start(["unpack", str(checkpoint)])
    try:
        status = await process.wait()
    finally:
        await _end(process)
    if status:
        raise StartError(f"the model could not be unpacked: exit code {status}")


async def run_service(settings: ServiceSettings) -> None:
    """Serve until SIGTERM or Ctrl-C, which both end it by cancelling this."""
    this = asyncio.current_task()
    assert this is not None, "runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    print("starting", "" if settings.checkpoint else "; the model is unpacked first", flush=True, sep="")
    async with start_service(settings) as service:
        for name, url in (service.prefill | service.decode).items():
            print(f"{name}: {url}")
        print(f"ready: {service.url}/v1", flush=True)
        await asyncio.Event().wait()


def _laid_out(settings: ServiceSettings) -> Service:
    router_port, *ports = _free_ports(settings.host, settings.port, settings.prefill + settings.decode)
    urls = iter(f"http://{settings.host}:{port}" for port in ports)
    return Service(
        url=f"http://{settings.host}:{router_port}",
        prefill={f"prefill-{index}": next(urls) for index in range(settings.prefill)},
        decode={f"decode-{index}": next(urls) for index in range(settings.decode)},
    )


def _free_ports(host: str, first: int, count: int) -> list[int]:
    """`first`, or a free port if it is 0, and that many other free ones."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count + 1)]
        for sock in sockets:
            sock.bind((host, 0))
        free = [int(sock.getsockname()[1]) for sock in sockets]
    return [first or free[0], *free[1:]]


def _commands(service: Service, settings: ServiceSettings, checkpoint: Path) -> dict[str, list[str]]:
    """What each process is told, by its name."""
    model = ["--checkpoint", str(checkpoint)]
    commands = {}
    for role, workers in (("prefill", service.prefill), ("decode", service.decode)):
        for name, url in workers.items():
            parts = urlsplit(url)
            commands[name] = [role, "--name", name, "--host", str(parts.hostname), "--port", str(parts.port), *model]
    router = urlsplit(service.url)
    commands["router"] = [
        *("router", "--host", str(router.hostname), "--port", str(router.port), *model),
        *("--deadline-s", str(settings.deadline_s)),
        *("--prefill", *(f"{name}={url}" for name, url in service.prefill.items())),
        *("--decode", *(f"{name}={url}" for name, url in service.decode.items())),
    ]
    return commands


async def _keep_running(name: str, arguments: Sequence[str]) -> None:
    """Start it again whenever it dies, until this is cancelled."""
    while True:
        process = await _start(arguments)
        try:
            status = await process.wait()
        finally:
            await _end(process)
        print(f"{name} died ({_exit_text(status)}); starting it again", file=sys.stderr, flush=True)
        await asyncio.sleep(RESTART_PAUSE_S)


async def _start(arguments: Sequence[str]) -> Process:
    # A session of its own: Ctrl-C goes to the launcher alone, which then ends the others.
    return await asyncio.create_subprocess_exec(
        sys.executable, COMMAND, *arguments, start_new_session=True, preexec_fn=_end_with_parent
    )


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


async def _end(process: Process) -> None:
    """End a process, with growing emphasis; does nothing if it has ended."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(EXIT_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _ready(service: Service) -> None:
    """Wait until the router has found all workers."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as client:
            while not await _healthy(client, service.url):  # noqa: ASYNC110 - another process is waited for
                await asyncio.sleep(START_POLL_S)
    except TimeoutError:
        raise StartError(f"{service.url}: not all workers were up within {START_TIMEOUT_S} s") from None


async def _healthy(client: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with client.get(f"{url}/health") as response:
            return bool((await response.json())["status"] == "ok")
    except aiohttp.ClientError:
        return False


def _exit_text(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
