"""An engine as the router sees it: one worker per tensor parallel rank. Every command goes to all ranks.

Each rank decides by itself which blocks a request gets and which token is the likeliest. The ranks decide alike,
because they start in the same state, get the same commands in the same order, and compute bitwise equal sums. The
router compares their answers nevertheless.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from paged_engine.all_reduce import connected_ranks

from disaggregated.messages import Command, Message
from disaggregated.router import WorkerError, WorkerProcess, start_worker
from disaggregated.worker import WorkerSettings

Answer = TypeVar("Answer")
Expected = TypeVar("Expected", bound=Message)


class EngineProcesses:
    """The running worker processes of one engine, one for each rank."""

    def __init__(self, engine_id: str, ranks: Sequence[WorkerProcess]) -> None:
        self.engine_id = engine_id
        self.ranks = ranks

    def __repr__(self) -> str:
        return f"EngineProcesses({self.ranks})"

    async def send(self, command: Command) -> None:
        for rank in self.ranks:
            await rank.send(command)

    async def expect(self, kind: type[Expected]) -> list[Expected]:
        """Wait for the next event of each rank, and return them. Raise WorkerError if one is not of this kind."""
        return await _gather(rank.expect(kind) for rank in self.ranks)

    async def tokens(self) -> AsyncGenerator[int, None]:
        """Yield the tokens of an answer up to its end."""
        while (token := self.common_answer(await _gather(rank.next_token() for rank in self.ranks))) is not None:
            yield token

    def common_answer(self, answers: Sequence[Answer]) -> Answer:
        """Return the answer that all ranks gave. Raise WorkerError if their answers differ."""
        if any(answer != answers[0] for answer in answers):
            raise WorkerError(f"{self.engine_id}: its ranks disagree: {answers}")
        return answers[0]


@asynccontextmanager
async def start_engine(settings: WorkerSettings) -> AsyncIterator[EngineProcesses]:
    """Start the ranks of an engine, and end them with the block. A rank sends Ready when it takes commands."""
    ranks: list[WorkerProcess] = []
    async with AsyncExitStack() as workers:
        for tp_rank, peers in enumerate(connected_ranks(settings.shard.tp_size)):
            rank_settings = replace(settings, shard=replace(settings.shard, tp_rank=tp_rank))
            ranks.append(await workers.enter_async_context(start_worker(rank_settings, peers)))
        try:
            yield EngineProcesses(settings.engine_id, ranks)
        finally:
            # Close the channels of all ranks before waiting for any: a rank may be waiting for another rank to leave.
            for rank in ranks:
                rank.close_channel()


async def _gather(coroutines: Iterable[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """Run `coroutines` concurrently and return their results. The first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as errors:
        raise WorkerError("; ".join(map(str, errors.exceptions))) from errors
    return [task.result() for task in tasks]
