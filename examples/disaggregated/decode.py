"""The decode worker: loads the prompt's blocks instead of computing them, and generates from there.

This is one of the two modules to read if you want to use kvflow in your own engine. The demo, the server and the Ray
Serve replicas all use this worker.
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

NextTicket = Callable[[Sequence[kvflow.Attempt]], Awaitable[dict[str, Any] | None]]
"""A function that has the prompt computed by a prefill worker that no attempt has used yet.

It returns the new worker's ticket, or None if no worker is left.
"""


class DecodeWorker:
    """Answers requests. A background task generates each answer and owns its blocks."""

    def __init__(self, engine: Engine, runtime: kvflow.Runtime, start_task: StartTask) -> None:
        self._engine = engine
        self._runtime = runtime
        self._start_task = start_task
        self._groups = LayerGroups(engine)

    async def decode(self, request: DecodeRequest, next_ticket: NextTicket | None = None) -> Generation:
        """Reserve blocks, and start a task that loads the prompt and generates. Return the answer under way.

        `next_ticket` gets the first ticket once blocks are reserved, and another if the load fails. Without it the
        ticket is `request.ticket`. Cancelling this call frees the blocks. Raises RequestTooLongError, OutOfBlocksError,
        and any error of the first `next_ticket`.
        """
        require_length(self._engine, request.prompt_count, request.max_tokens)
        async with AsyncExitStack() as blocks:
            reservation = self._engine.reserve(request.prompt_count + request.max_tokens)
            block_ids = await blocks.enter_async_context(reservation)
            load = kvflow.LoadRequest(
                request.request_id,
                ticket=request.ticket if next_ticket is None else await next_ticket(()) or (),
                block_ids=self._groups.tables(block_ids, request.prompt_count),
                deadline_s=request.deadline_s,
                again=next_ticket,
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
        """Load, then generate. Free the blocks once no byte can land in them and no step of the engine uses them."""
        async with blocks:
            try:
                generation.report = await load_into(blocks, self._runtime, load, self._start_task)
                token = self._first_token(request, generation.report.payload)
            except (KVFlowError, NoFirstTokenError) as error:
                generation.events.put_nowait(failure_of(error))
                return
            eos = self._engine.eos_token_id
            generation.events.put_nowait(Step.of(token, eos_token_id=eos, last=request.max_tokens == 1))
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
                    generation.events.put_nowait(Step.of(token, eos_token_id=eos, last=count == request.max_tokens))

    def _first_token(self, request: DecodeRequest, payload: bytes) -> int:
        """Decode the payload that came with the blocks, and return the first token.

        Raises NoFirstTokenError if the payload is not a token of this model.
        """
        what = f"request {request.request_id!r}: what came with its blocks"
        try:
            token = FirstToken.read(payload).token
        except msgspec.DecodeError as error:
            raise NoFirstTokenError(f"{what} is not a first token: {payload[:100]!r}") from error
        if not 0 <= token < self._engine.vocabulary_size:
            raise NoFirstTokenError(f"{what} is token {token}, the model has {self._engine.vocabulary_size}")
        return token


class Generation:
    """One answer under way. `steps` can be read once; closing the generation early ends the answer."""

    task: asyncio.Task[None]
    report: kvflow.LoadReport
    """kvflow's report of the load. Set before the first step."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Step | Failure] = asyncio.Queue()

    async def steps(self) -> AsyncIterator[Step | Failure]:
        """Yield each step up to the last; a failure ends the answer."""
        while True:
            step = await self.events.get()
            yield step
            if isinstance(step, Failure) or step.finish_reason is not None:
                return

    async def ended(self) -> None:
        """Wait until the answer has ended and its blocks are free."""
        await asyncio.wait([self.task])

    async def aclose(self) -> None:
        """Cancel the answer without waiting. Its task frees the blocks once its running step has ended."""
        self.task.cancel()
