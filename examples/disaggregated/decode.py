"""The decode worker: loads the prompt's blocks instead of computing them, and generates from there.

This is one of the two modules to read if you want to use kvflow in an engine of your own; the demo, the server and the
replicas of Ray Serve all have this worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import msgspec
from paged_engine import BlockId, Engine

import kvflow
from disaggregated.background import StartTask, load_into
from disaggregated.failures import NoFirstTokenError, failure_of, require_length
from disaggregated.groups import LayerGroups
from disaggregated.messages import DecodeRequest, Failure, FirstToken, Step
from kvflow.errors import KVFlowError

Bring = Callable[[Sequence[kvflow.Attempt]], Awaitable[dict[str, Any] | None]]
"""Has the prompt computed by another worker than those of the attempts; returns its ticket, or None if none is left."""


class DecodeWorker:
    """Answers requests; a background task generates each answer, and owns its blocks."""

    def __init__(self, engine: Engine, runtime: kvflow.Runtime, start_task: StartTask) -> None:
        self._engine = engine
        self._runtime = runtime
        self._start_task = start_task
        self._groups = LayerGroups(engine)

    async def decode(self, request: DecodeRequest, bring: Bring | None = None) -> Generation:
        """Reserve blocks, then start a task that loads and generates. Cancelling this call takes nothing.

        `bring` is called once there are blocks, and again if the load fails. Without it the request has a ticket.
        Raises RequestTooLongError, OutOfBlocksError, and what `bring` raises the first time.
        """
        require_length(self._engine, request.prompt_count, request.max_tokens)
        async with AsyncExitStack() as blocks:
            room = self._engine.reserve(request.prompt_count + request.max_tokens)
            block_ids = await blocks.enter_async_context(room)
            load = kvflow.LoadRequest(
                request.request_id,
                ticket=request.ticket if bring is None else await bring(()) or (),
                block_ids=self._groups.tables(block_ids, request.prompt_count),
                deadline_s=request.deadline_s,
                again=bring,
            )
            generation = Generation()
            body = self._answer(request, load, block_ids, blocks.pop_all(), generation)
            generation.task = self._start_task(body, f"answer {request.request_id}")
            return generation

    async def _answer(
        self,
        request: DecodeRequest,
        load: kvflow.LoadRequest,
        block_ids: Sequence[BlockId],
        blocks: AsyncExitStack,
        generation: Generation,
    ) -> None:
        """Load, then generate. Blocks are given back when no byte can land and no step runs."""
        async with blocks:
            try:
                generation.report = await load_into(blocks, self._runtime, load, self._start_task)
                token = self._first_token(request, generation.report.payload)
            except (KVFlowError, NoFirstTokenError) as error:
                generation.lines.put_nowait(failure_of(error))
                return
            eos = self._engine.eos_token_id
            generation.lines.put_nowait(Step.of(token, eos_token_id=eos, last=request.max_tokens == 1))
            decoding = self._engine.decode(
                token,
                position=request.prompt_count,
                block_ids=block_ids,
                max_tokens=request.max_tokens - 1,
                sampling=request.sampling,
            )
            async with aclosing(decoding) as tokens:
                count = 1
                async for token in tokens:
                    count += 1
                    generation.lines.put_nowait(Step.of(token, eos_token_id=eos, last=count == request.max_tokens))

    def _first_token(self, request: DecodeRequest, payload: bytes) -> int:
        """Return the token that came with the blocks. Raises NoFirstTokenError if the model does not have it."""
        what = f"request {request.request_id!r}: what came with its blocks"
        try:
            token = FirstToken.read(payload).token
        except msgspec.DecodeError as error:
            raise NoFirstTokenError(f"{what} is no first token: {payload[:100]!r}") from error
        if not 0 <= token < self._engine.vocabulary_size:
            raise NoFirstTokenError(f"{what} is token {token}, the model has {self._engine.vocabulary_size}")
        return token


class Generation:
    """One answer: its steps, once, or why it ends without. Closing it early ends the answer."""

    task: asyncio.Task[None]
    report: kvflow.LoadReport
    """kvflow's report of the load; set before the first step."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[Step | Failure] = asyncio.Queue()

    async def steps(self) -> AsyncIterator[Step | Failure]:
        """Yield each step; a failure is the last one."""
        while True:
            step = await self.lines.get()
            yield step
            if isinstance(step, Failure) or step.finish_reason is not None:
                return

    async def ended(self) -> None:
        """Wait until the blocks were given back."""
        await asyncio.wait([self.task])

    async def aclose(self) -> None:
        """Cancel the task, which gives the blocks back once its step has ended; does not wait for that."""
        self.task.cancel()
