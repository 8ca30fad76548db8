"""All processes of the service: workers and router, each a command of its own, started again when they die.

This stands for what a process manager does in a real deployment. One that does not start, though tried several times,
ends the service (`starts`). The processes end with the launcher, even if that is killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from openai_server.starts import CANNOT_START, StartError, Starts, bare, listen_at, url_of

COMMAND = Path(__file__).with_name("__main__.py")
START_TIMEOUT_S = 180.0
START_POLL_S = 0.1
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
EXIT_TIMEOUT_S = 15.0
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses for the workers where everybody may reach the router: they are for the router only."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """How many of what, and where."""

    prefill: int
    decode: int
    host: str
    port: int
    """The router's; 0 takes any free one, as workers do."""
    checkpoint: Path | None
    """A directory with the unpacked model; None unpacks it, which takes some seconds."""
    deadline_s: float
    share_prefixes: bool = False
    """Whether prefill workers load prefixes from each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running service: the router's URL, and its workers' by their names."""

    url: str
    prefill: dict[str, str]
    decode: dict[str, str]
    pids: dict[str, int] = field(default_factory=dict)
    """Process ids of what is up, by name."""


@asynccontextmanager
async def start_service(settings: ServiceSettings) -> AsyncIterator[Service]:
    """The service for as long as the `with`; when it is entered the service takes requests.

    Raises StartError if a part of it does not start, also later, when it has died and does not come back.
    """
    # Known at once, and not only when the model has been unpacked.
    listen_at(settings.host, settings.port).close()
    with ExitStack() as stack:
        checkpoint = settings.checkpoint or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvflow-")))
        if settings.checkpoint is None:
            await unpack_model(checkpoint)
        service = _laid_out(settings)
        keepers = _keepers(service, settings, checkpoint)
        try:
            async with aiohttp.ClientSession(timeout=HEALTH_TIMEOUT) as client, asyncio.TaskGroup() as group:
                keeping = [group.create_task(keeper.keep(client), name=keeper.name) for keeper in keepers]
                try:
                    await _ready(client, service, keepers)
                    yield service
                finally:
                    await _end_all(keeping)
        except ExceptionGroup as problems:
            starts, others = problems.split(StartError)
            if starts is None or others is not None:
                raise
            raise starts.exceptions[0] from None


async def _end_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel each once, and wait: the group cancels again who still runs, which would end the wait for its process."""
    for task in tasks:
        if not task.cancelling():
            task.cancel()
    await asyncio.wait(tasks)


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
            print(f"{name}: {url} (process {service.pids[name]})")
        print(f"ready: {service.url}/v1", flush=True)
        await asyncio.Event().wait()


def _laid_out(settings: ServiceSettings) -> Service:
    workers_host = LOOPBACK_OF.get(bare(settings.host), settings.host)
    with ExitStack() as stack:
        # All at once, so that they are different ports.
        router_port = _port(stack.enter_context(listen_at(settings.host, settings.port)))
        workers = [stack.enter_context(listen_at(workers_host, 0)) for _ in range(settings.prefill + settings.decode)]
        urls = iter([url_of(workers_host, _port(worker)) for worker in workers])
    return Service(
        url=url_of(settings.host, router_port),
        prefill={f"prefill-{index}": next(urls) for index in range(settings.prefill)},
        decode={f"decode-{index}": next(urls) for index in range(settings.decode)},
    )


def _port(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


def _keepers(service: Service, settings: ServiceSettings, checkpoint: Path) -> list[Keeper]:
    """One for each process, with what it is told."""
    model = ["--checkpoint", str(checkpoint), *(["--share-prefixes"] if settings.share_prefixes else [])]
    workers = [
        Keeper(name=name, url=url, arguments=[role, "--name", name, *_place(url), *model], pids=service.pids)
        for role, urls in (("prefill", service.prefill), ("decode", service.decode))
        for name, url in urls.items()
    ]
    told = [
        *("router", *_place(service.url), *model, "--deadline-s", str(settings.deadline_s)),
        *("--prefill", *(f"{name}={url}" for name, url in service.prefill.items())),
        *("--decode", *(f"{name}={url}" for name, url in service.decode.items())),
    ]
    return [*workers, Keeper(name="router", url=service.url, arguments=told, pids=service.pids)]


def _place(url: str) -> tuple[str, ...]:
    parts = urlsplit(url)
    return ("--host", str(parts.hostname), "--port", str(parts.port))


@dataclass(slots=True, kw_only=True, eq=False)
class Keeper:
    """Keeps one process running."""

    name: str
    url: str
    arguments: Sequence[str]
    starts: Starts = field(default_factory=Starts)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """It has answered at least once."""
    pids: dict[str, int] = field(default_factory=dict)
    """Where its process id is written down once it is up, by its name."""

    async def keep(self, client: aiohttp.ClientSession) -> None:
        """Start it again whenever it dies, until this is cancelled. Raises StartError when that is given up."""
        while True:
            self.ready.clear()
            status = await self._run(client)
            pause_s = self.starts.ended(status, was_ready=self.ready.is_set())
            if pause_s is None:
                raise StartError(f"{self.name} {self._why_given_up(status)}; what it says itself is above")
            died = f"{self.name} died ({_exit_text(status)})"
            print(f"{died}; starting it again in {pause_s:g} s", file=sys.stderr, flush=True)
            await asyncio.sleep(pause_s)

    async def _run(self, client: aiohttp.ClientSession) -> int:
        """One life of it; its exit status."""
        process = await _start(self.arguments)
        try:
            while process.returncode is None and not self.ready.is_set():
                if (await _health(client, self.url)).get("pid") == process.pid:
                    self.starts.worked()
                    if self.name in self.pids:
                        print(f"{self.name} is up again (process {process.pid})", flush=True)
                    self.pids[self.name] = process.pid
                    self.ready.set()
                else:
                    await asyncio.sleep(START_POLL_S)
            return await process.wait()
        finally:
            await _end(process)

    def _why_given_up(self, status: int) -> str:
        if status == CANNOT_START:
            return "cannot start"
        return f"died {self.starts.failures} times before it was ready ({_exit_text(status)})"


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


async def _ready(client: aiohttp.ClientSession, service: Service, keepers: Sequence[Keeper]) -> None:
    """Wait until all processes answer, and the router has found all workers."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            for keeper in keepers:
                await keeper.ready.wait()
            while (await _health(client, service.url)).get("status") != "ok":  # noqa: ASYNC110 - another process is waited for
                await asyncio.sleep(START_POLL_S)
    except TimeoutError:
        raise StartError(f"{service.url}: not all workers were up within {START_TIMEOUT_S} s") from None


async def _health(client: aiohttp.ClientSession, url: str) -> Mapping[str, Any]:
    """What answers there says of itself; nothing if nobody answers, or somebody else."""
    try:
        async with client.get(f"{url}/health") as response:
            said = json.loads(await response.read())
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _exit_text(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
