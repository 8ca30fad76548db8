"""The router's side of a worker: start it, talk to it, notice when it dies, see it out.

Every wait has a bound, and a dead worker ends the wait at once: its end of the socket closes with it.
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
    """A worker died, failed or fell silent; the message names it."""


class WorkerProcess:
    """One running worker."""

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
            raise await self._death() from error

    async def expect(self, kind: type[Expected]) -> Expected:
        """The next event, which must be of that kind."""
        event = await self._receive()
        if not isinstance(event, kind):
            raise WorkerError(f"{self.name} said {event!r}, expected {kind.__name__}")
        return event

    async def next_token(self) -> int | None:
        """The next token of a stream, None at its end."""
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
            raise await self._death() from error
        if isinstance(event, Failure):
            raise WorkerError(f"{self.name} failed: {event.message}")
        return event

    async def _death(self) -> WorkerError:
        await asyncio.to_thread(self._process.join, KILL_TIMEOUT_S)
        return WorkerError(f"{self.name} died unexpectedly ({_exit_text(self._process.exitcode)})")

    def hang_up(self) -> None:
        """Close the channel, which makes the worker leave."""
        self._channel.close()

    async def wait_closed(self) -> None:
        """See the worker out once its channel is closed, with growing emphasis."""
        await asyncio.to_thread(self._process.join, EXIT_TIMEOUT_S)
        for emphasis in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                emphasis()
                await asyncio.to_thread(self._process.join, KILL_TIMEOUT_S)


@asynccontextmanager
async def start_worker(settings: WorkerSettings, peers: Sequence[socket.socket]) -> AsyncIterator[WorkerProcess]:
    """A worker for as long as the `with`; it says Ready when it takes commands.

    `peers` are its sockets to the other ranks of its engine; the worker takes them over.
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
    """Set what NIXL and UCX read when the workers load them; workers inherit the environment.

    Shared memory is what UCX takes by itself between two processes of one host.
    """
    os.environ |= {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error"}
    if transport == "tcp":
        os.environ["UCX_TLS"] = "tcp"
    else:
        os.environ.pop("UCX_TLS", None)


def _spawned(settings: WorkerSettings, theirs: socket.socket, peers: Sequence[socket.socket]) -> BaseProcess:
    # Spawn, never fork: NIXL does not survive a fork, and neither do torch's threads.
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_worker, args=(settings, theirs, peers), name=settings.name, daemon=True)
    with _interrupts_ignored():
        process.start()
    # From here on the worker's ends are open in the worker alone, so that its death closes them.
    for end in (theirs, *peers):
        end.close()
    return process


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """What is started here ignores Ctrl-C: the terminal sends it to all, but the router ends its workers."""
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
