"""The router's side of an engine: one worker process for each tensor parallel rank. Every call goes to all ranks.

Each rank decides by itself which blocks a request gets and which token is the likeliest. The ranks decide alike,
because they start in the same state, get the same calls in the same order, and compute bitwise equal sums. The router
compares their answers nevertheless. Every wait has a bound; if a worker dies, a wait for it ends at once, because its
end of the pipe closes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from socket import socket
from typing import Any

from paged_engine.all_reduce import connected_ranks

from disaggregated.messages import Failure, Message
from disaggregated.worker import WorkerSettings, run_worker

START_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 15.0
KILL_TIMEOUT_S = 2.0


class WorkerError(RuntimeError):
    """A worker died, failed, or did not answer in time. The message names the worker."""


class Rank:
    """The worker process of one rank. `peers` are its sockets to the other ranks; they are closed in this process."""

    def __init__(self, settings: WorkerSettings, peers: Sequence[socket]) -> None:
        self.name = settings.name
        context = multiprocessing.get_context("spawn")  # never fork: neither NIXL nor torch's threads survive that
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=run_worker, args=(settings, theirs, peers), name=self.name, daemon=True)
        # The worker inherits this: on Ctrl-C the terminal signals all processes, and the router ends its workers.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
        theirs.close()  # now only the worker has these open, so its death closes the connections
        for peer in peers:
            peer.close()

    async def send(self, call: Message) -> None:
        try:
            self._pipe.send(call)
        except OSError as error:
            raise await self._exit_error() from error

    async def receive(self, timeout_s: float) -> Any:
        """Wait for the next value of an answer and return it; None at the end of the answer. Raises WorkerError."""
        try:
            if not await asyncio.to_thread(self._pipe.poll, timeout_s):
                raise WorkerError(f"{self.name} did not answer within {timeout_s} s")
            value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise await self._exit_error() from error
        if isinstance(value, Failure):
            raise WorkerError(f"{self.name} failed: {value.message}")
        return value

    def leave(self) -> None:
        """Make the worker end."""
        with suppress(OSError):  # it has ended
            self._pipe.send(None)

    async def ended(self) -> None:
        """Wait for the worker's end, and kill it if that takes too long."""
        await asyncio.to_thread(self.process.join, EXIT_TIMEOUT_S)
        if self.process.is_alive():
            self.process.kill()
            await asyncio.to_thread(self.process.join, KILL_TIMEOUT_S)
        self._pipe.close()

    async def _exit_error(self) -> WorkerError:
        await asyncio.to_thread(self.process.join, KILL_TIMEOUT_S)
        code = self.process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return WorkerError(f"{self.name} died unexpectedly ({how})")


class EngineProcesses:
    """The running worker processes of one engine, one for each rank."""

    def __init__(self, engine_id: str, ranks: Sequence[Rank]) -> None:
        self.engine_id = engine_id
        self.ranks = ranks

    async def ready(self) -> None:
        """Wait until all ranks take calls. Raises WorkerError."""
        await self._receive(START_TIMEOUT_S)

    async def call(self, call: Message) -> AsyncGenerator[list[Any], None]:
        """Send a call to all ranks, and yield their answers: each time the next value of every rank."""
        for rank in self.ranks:
            await rank.send(call)
        while (values := await self._receive(ANSWER_TIMEOUT_S)) != [None] * len(self.ranks):
            yield values

    def common(self, values: Sequence[Any]) -> Any:
        """Return the value that all ranks gave. Raises WorkerError if their values differ."""
        if any(value != values[0] for value in values):
            raise WorkerError(f"{self.engine_id}: its ranks disagree: {values}")
        return values[0]

    async def _receive(self, timeout_s: float) -> list[Any]:
        """Wait for the next value of each rank. The first failure cancels the other waits."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(rank.receive(timeout_s)) for rank in self.ranks]
        except ExceptionGroup as errors:
            raise WorkerError("; ".join(map(str, errors.exceptions))) from errors
        return [task.result() for task in tasks]


@asynccontextmanager
async def start_engine(settings: WorkerSettings) -> AsyncIterator[EngineProcesses]:
    """Start the ranks of an engine, and end them with the block."""
    ranks: list[Rank] = []
    try:
        for tp_rank, peers in enumerate(connected_ranks(settings.shard.tp_size)):
            shard = replace(settings.shard, tp_rank=tp_rank)
            ranks.append(Rank(replace(settings, shard=shard), peers))
        yield EngineProcesses(settings.engine_id, ranks)
    finally:
        for rank in ranks:  # all, before waiting for any: a rank may be waiting for another rank to leave
            rank.leave()
        for rank in ranks:
            await rank.ended()
