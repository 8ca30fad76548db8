"""The decode deployment: `openai_server.decode` in a replica, which also owns the hand-over.

A handle's call goes to any replica, so nobody else could tell the right prefill replica to give blocks back; a runtime
can. So it is the decode replica that picks a prefill replica, has the prompt computed there while it loads, and tries
again elsewhere; its `DecodeWorker` releases what it will not load.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Hashable
from contextlib import aclosing, suppress
from typing import Any

from openai_server.attempts import AttemptError, Attempts, Prompt, first_of
from openai_server.decode import DecodeWorker, Generation
from openai_server.failures import EXPECTED_ERRORS
from openai_server.messages import Failure, FailureKind, PrefillReply, Step
from openai_server.metrics import DecodeMetrics
from openai_server.worker import reported
from ray import serve
from ray.serve.handle import DeploymentHandle

import kvflow
from kvflow.ray import keep_prewarmed
from ray_server.losses import losses
from ray_server.messages import AnswerRequest, Ended
from ray_server.replica import Replica

PREFIX_TOKENS = 64


@serve.deployment
class Decode:
    """Answers prompts that a prefill replica computes."""

    async def __init__(self, prefill: DeploymentHandle, checkpoint: str) -> None:
        self._prefill = prefill
        self._replica = Replica(checkpoint, DecodeMetrics)
        self._opened = opened = await self._replica.open()
        self._worker = DecodeWorker(opened.engine, opened.kvflow.runtime, opened.start_task, opened.metrics)
        self._attempts = Attempts(attempt=self._attempt)
        opened.start_task(keep_prewarmed(opened.kvflow.runtime, prefill), "prewarm")

    async def generate(self, request: AnswerRequest) -> AsyncIterator[Step | Ended]:
        """The steps of an answer as they come. Cancelling it ends the work for it at both ends."""
        try:
            stream = await self._attempts.stream(request.as_prompt())
            async with aclosing(stream), aclosing(stream.steps()) as steps:
                async for step in steps:
                    yield step
        except AttemptError as error:
            ours = error.worker == self._opened.name
            yield Ended(failure=error.failure, replica=self._opened.name if ours else "")

    async def _attempt(self, request_id: str, prompt: Prompt, avoid: set[Hashable]) -> AsyncGenerator[Step, None]:
        prefix = tuple(prompt.token_ids[:PREFIX_TOKENS])
        asking = self._prefill.prefill
        with losses("prefill"):
            async with asking.choose_replica(needs_tokens=len(prompt.token_ids), prefix=prefix, avoid=avoid) as chosen:
                if prompt.max_tokens == 1:
                    yield (await self._ask(chosen, request_id, prompt)).step
                    return
                generation, steps, first = await self._begin(chosen, request_id, prompt)
        async with aclosing(generation), aclosing(steps):
            yield first
            async for step in steps:
                yield step

    async def _begin(
        self, chosen: Any, request_id: str, prompt: Prompt
    ) -> tuple[Generation, AsyncGenerator[Step, None], Step]:
        """Have the prompt computed while it is loaded; the answer, and its first step."""
        metadata = chosen.replica_metadata
        ticket = kvflow.Ticket.rendezvous(metadata["introduction"], request_id, ttl_s=prompt.remaining_s)
        generation = await self._room(request_id, prompt, ticket)
        steps = self._steps(generation.steps(), metadata["replica"])
        asking = asyncio.create_task(self._ask(chosen, request_id, prompt), name=f"prefill {request_id}")
        first = asyncio.create_task(first_of(steps), name=f"decode {request_id}")
        try:
            await asyncio.wait((asking, first), return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                asking.result()  # raises why there will be no step
            step = await first
        except BaseException:
            asking.cancel()
            first.cancel()
            await asyncio.gather(asking, first, return_exceptions=True)
            await generation.aclose()
            raise
        self._opened.start_task(_over(asking), f"prefill {request_id}")  # its answer comes later, and says no more
        return generation, steps, step

    async def _room(self, request_id: str, prompt: Prompt, ticket: kvflow.Ticket) -> Generation:
        """Blocks of this replica, and the load into them. What fails here is nobody else's fault."""
        request = prompt.to_answer(request_id, ticket)
        try:
            return await self._worker.decode(request)
        except EXPECTED_ERRORS as error:
            raise self._own_failure(reported(error, self._opened.metrics)) from error

    async def _ask(self, chosen: Any, request_id: str, prompt: Prompt) -> PrefillReply:
        request = prompt.to_compute(request_id)
        name = chosen.replica_metadata["replica"]
        response = self._prefill.prefill.dispatch(chosen, request)
        try:
            with losses(f"prefill replica {name}", name):
                reply = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        if isinstance(reply, Failure):
            raise AttemptError(reply, name)
        return reply

    async def _steps(self, steps: AsyncIterator[Step | Failure], prefill: str) -> AsyncGenerator[Step, None]:
        async for step in steps:
            if isinstance(step, Failure):
                if step.kind is FailureKind.PREFILL_AGAIN:
                    raise AttemptError(step, prefill)
                raise self._own_failure(step)
            yield step

    def _own_failure(self, failure: Failure) -> AttemptError:
        """This replica's: no other prefill helps, another decode replica may."""
        return AttemptError(failure, self._opened.name, final=True)

    async def metadata(self) -> dict[str, Any]:
        return self._replica.metadata()

    async def record_replica_metadata(self) -> dict[str, Any]:
        return self._replica.metadata()

    async def record_routing_stats(self) -> dict[str, Any]:
        return self._replica.routing_stats()

    async def check_health(self) -> None:
        self._replica.check()

    async def metrics(self) -> str:
        return self._replica.metrics_text()

    async def __del__(self) -> None:
        await self._replica.close()


async def _over(asking: asyncio.Task[PrefillReply]) -> None:
    """Wait for an answer that nobody needs."""
    with suppress(AttemptError):
        await asking
