"""The decode deployment: `disaggregated.decode` in a replica, which also owns the hand-over.

A handle's call goes to any replica, so nobody else could tell the right prefill replica to give blocks back; a runtime
can. So it is the decode replica that picks a prefill replica, has the prompt computed there while it loads, and tries
again elsewhere; its `DecodeWorker` releases what it will not load.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Hashable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from disaggregated.decode import DecodeWorker, Line
from disaggregated.failures import EXPECTED_ERRORS
from disaggregated.messages import Again, DecodeRequest, Failure, FailureKind, PrefillReply, PrefillRequest, Step
from disaggregated.told import reported
from openai_server.attempts import AttemptError, Attempts, Prompt, hand_over
from openai_server.metrics import DecodeMetrics
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
                prefill = _Prefill(self._prefill, chosen)
                steps = hand_over(
                    request_id, prompt, [prefill], partial(self._decoding, prefill), self._opened.start_task
                )
                first = await anext(steps)
        async with aclosing(steps):
            yield first
            async for step in steps:
                yield step

    @asynccontextmanager
    async def _decoding(
        self, prefill: _Prefill, request: DecodeRequest
    ) -> AsyncIterator[AsyncGenerator[Step | Again, None]]:
        """Blocks of this replica, and the load into them. What fails there is no prefill replica's fault."""
        try:
            generation = await self._worker.decode(request)
        except EXPECTED_ERRORS as error:
            raise self._own_failure(reported(error, self._opened.metrics)) from error
        async with aclosing(generation):
            yield self._steps(generation.steps(), prefill.name)

    async def _steps(self, steps: AsyncIterator[Line], prefill: str) -> AsyncGenerator[Step | Again, None]:
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


@dataclass(frozen=True, slots=True)
class _Prefill:
    """See `openai_server.attempts.PrefillWorker`."""

    handle: DeploymentHandle
    chosen: Any

    @property
    def name(self) -> str:
        name: str = self.chosen.replica_metadata["replica"]
        return name

    @property
    def introduction(self) -> kvflow.Ticket:
        return kvflow.Ticket.from_params(self.chosen.replica_metadata["introduction"])

    async def ask(self, request: PrefillRequest) -> PrefillReply:
        response = self.handle.prefill.dispatch(self.chosen, request)
        try:
            with losses(f"prefill replica {self.name}", self.name):
                reply = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        if isinstance(reply, Failure):
            raise AttemptError(reply, self.name)
        return reply

    def give_up(self, request_id: str) -> None:
        """Cancelling what was asked ends the offer; nobody else can tell this replica."""
