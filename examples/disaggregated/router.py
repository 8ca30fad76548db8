"""The router's side of a worker process: start it, send commands, notice its death, end it.

Every wait has a bound. If a worker dies, a wait for it ends at once, because its end of the socket closes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.process import BaseProcess
from typing import TypeVar

import msgspec

from disaggregated.channel import Channel, ChannelClosedError
from disaggregated.messages import Command, Done, Event, Failure, Message, Step
from disaggregated.worker import WorkerSettings, run_worker

ANSWER_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 15.0
KILL_TIMEOUT_S = 2.0

Expected = TypeVar("Expected", bound=Message)


class WorkerError(RuntimeError):
    """A worker died, failed, or did not answer in time. The message names the worker."""


class WorkerProcess:
    """One running worker process and the channel to it."""

    def __init__(self, name: str, process: BaseProcess, channel: Channel[Event, Command]) -> None:
        self.name = name
        self._process = process
        self._channel = channel

    def __repr__(self) -> str:
        return f"WorkerProcess({self.name!r}, pid={self.pid}, exitcode={self._process.exitcode})"

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def send(self, command: Command) -> None:
        try:
            await self._channel.send(command)
        except ChannelClosedError as error:
            raise await self._exit_error() from error

    async def expect(self, kind: type[Expected]) -> Expected:
        """Wait for the next event and return it. Raises WorkerError if it is not of this kind."""
        event = await self._receive()
        if not isinstance(event, kind):
            raise WorkerError(f"{self.name} said {event!r}, expected {kind.__name__}")
        return event

    async def next_token(self) -> int | None:
        """Wait for the next token of an answer and return it; None at the end of the answer."""
        match await self._receive():
            case Step(token=token):
                return token
            case Done():
                return None
            case event:
                raise WorkerError(f"{self.name} said {event!r} in the middle of a stream")

    async def _receive(self) -> Event:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                event = await self._channel.receive()
        except TimeoutError as error:
            raise WorkerError(f"{self.name} did not answer within {ANSWER_TIMEOUT_S} s") from error
        except ChannelClosedError as error:
            raise await self._exit_error() from error
        if isinstance(event, Failure):
            raise WorkerError(f"{self.name} failed: {event.message}")
        return event

    async def _exit_error(self) -> WorkerError:
        await asyncio.to_thread(self._process.join, KILL_TIMEOUT_S)
        return WorkerError(f"{self.name} died unexpectedly ({_exit_text(self._process.exitcode)})")

    def close_channel(self) -> None:
        """Close the channel, by which the worker ends."""
        self._channel.close()

    async def wait_closed(self) -> None:
        """Wait for the worker's end, after `close_channel`. Terminate it if it does not end in time, then kill it."""
        await asyncio.to_thread(self._process.join, EXIT_TIMEOUT_S)
        for emphasis in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                emphasis()
                await asyncio.to_thread(self._process.join, KILL_TIMEOUT_S)


@asynccontextmanager
async def start_worker(settings: WorkerSettings, peers: Sequence[socket.socket]) -> AsyncIterator[WorkerProcess]:
    """Start a worker process, and end it with the block. The worker sends Ready when it takes commands.

    `peers` are the worker's sockets to the other ranks of its engine. They are closed in this process.
    """
    ours, theirs = socket.socketpair()
    process = _spawned(settings, theirs, peers)
    decoder = msgspec.json.Decoder[Event](Event)
    channel = await Channel[Event, Command].open(ours, decoder)
    worker = WorkerProcess(settings.name, process, channel)
    try:
        async with channel:
            yield worker
    finally:
        await worker.wait_closed()


def set_worker_environment(transport: str) -> None:
    """Set the environment variables that NIXL and UCX read in the workers, which inherit them.

    `transport` is "tcp" or "shm". For shm UCX_TLS is unset: by default UCX uses shared memory between local processes.
    """
    os.environ |= {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error"}
    if transport == "tcp":
        os.environ["UCX_TLS"] = "tcp"
    else:
        os.environ.pop("UCX_TLS", None)


def _spawned(settings: WorkerSettings, theirs: socket.socket, peers: Sequence[socket.socket]) -> BaseProcess:
    # Spawn, never fork: neither NIXL nor torch's threads survive a fork.
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_worker, args=(settings, theirs, peers), name=settings.name, daemon=True)
    with _ignore_interrupts():
        process.start()
    # With these ends closed here, only the worker has them open, so its death closes the connections.
    for end in (theirs, *peers):
        end.close()
    return process


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Make processes started in the block ignore SIGINT: on Ctrl-C the terminal signals all processes.

    The router ends its workers itself.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _exit_text(exitcode: int | None) -> str:
    if exitcode is None:
        return "it closed its channel and is still running"
    if exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"
