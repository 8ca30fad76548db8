"""The decode deployment: `disaggregated.decode` in a replica, which also owns the hand-over.

Only its load knows whether the blocks have come. So it is the decode replica that has the prompt computed while it
loads, and once more by another prefill replica when the load asks for that (`LoadRequest.again`), into the same blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import aclosing
from typing import Any

from disaggregated.decode import DecodeWorker
from disaggregated.failures import EXPECTED_ERRORS, failure_of
from disaggregated.messages import Failure, FailureKind, Step
from openai_server.attempts import AttemptError, Prompt
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

import kvflow
from kvflow.ray import keep_prewarmed
from ray_server.losses import next_said
from ray_server.messages import AnswerRequest, Begun, Ended
from ray_server.replica import Replica


@serve.deployment
class Decode:
    """Answers prompts that a prefill replica computes."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, prefill: DeploymentHandle, checkpoint: str
    ) -> None:
        self._prefill = prefill.options(stream=True)
        self._replica = Replica(checkpoint)
        self._opened = opened = await self._replica.open()
        self._worker = DecodeWorker(opened.engine, opened.kvflow.runtime, opened.start_task)
        opened.start_task(keep_prewarmed(opened.kvflow.runtime, prefill), "prewarm")

    async def generate(self, request: AnswerRequest, avoid: Collection[str]) -> AsyncIterator[Step | Ended]:
        """The steps of an answer as they come. Cancelling it ends the work for it at both ends."""
        prompt = Prompt(
            id=request.request_id,
            token_ids=request.prompt,
            max_tokens=request.max_tokens,
            deadline=asyncio.get_running_loop().time() + request.deadline_s,
            sampling=request.sampling,
        )
        prefills = _Prefills(self._prefill, prompt, avoid)
        try:
            generation = await self._worker.decode(prompt.to_answer(prompt.id), prefills.bring)
            async with aclosing(generation):
                async for step in generation.steps():
                    yield self._ended(step, prefills) if isinstance(step, Failure) else step
        except AttemptError as error:
            yield Ended(failure=error.failure, replica=str(error.worker or ""))
        except EXPECTED_ERRORS as error:
            yield self._ended(failure_of(error), prefills)
        finally:
            prefills.end()

    def _ended(self, failure: Failure, prefills: _Prefills) -> Ended:
        theirs = failure.kind is FailureKind.PREFILL_AGAIN
        return Ended(failure=failure, replica=prefills.last if theirs else self._opened.name)

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


class _Prefills:
    """The prefill replicas that one prompt is computed by, one after the other; each avoids those before."""

    def __init__(self, handle: DeploymentHandle, prompt: Prompt, avoid: Collection[str]) -> None:
        self._handle = handle
        self._prompt = prompt
        self._avoid = [*avoid]
        self._asked: list[DeploymentResponseGenerator[Any]] = []
        self.last = ""
        """The replica that was asked last."""

    async def bring(self, attempts: Sequence[kvflow.Attempt]) -> dict[str, Any]:
        """A ticket of the prompt at a replica that computes it now. See `disaggregated.decode.Bring`; AttemptError."""
        self.end()
        # Each has its own id: an earlier one's blocks may still be on offer, at the same replica if there is no other.
        request = self._prompt.to_compute(f"{self._prompt.id}-{len(self._asked)}")
        response = self._handle.prefill.remote(request, avoid=tuple(self._avoid))
        self._asked.append(response)
        begun: Begun = await next_said(response, "prefill")
        self.last = begun.replica
        self._avoid.append(begun.replica)
        return begun.ticket

    def end(self) -> None:
        """Nobody wants what was asked; no effect on what has ended."""
        for response in self._asked[-1:]:
            response.cancel()
