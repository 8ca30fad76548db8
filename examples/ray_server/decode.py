"""The decode deployment: `disaggregated.decode` in a replica, which also owns the hand-over.

Only the load knows whether the blocks have arrived. So the decode replica asks a prefill replica to compute the prompt,
and asks another if the load calls for that (`LoadRequest.again`); the second prompt is loaded into the same blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import aclosing
from typing import Any

from disaggregated.decode import DecodeWorker
from disaggregated.failures import EXPECTED_ERRORS, failure_of
from disaggregated.messages import AnswerRequest, Failure, FailureKind, Step
from openai_server.attempts import AttemptError, renamed
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

import kvflow
from kvflow.ray import keep_prewarmed
from ray_server.errors import next_message
from ray_server.messages import Begun, Ended
from ray_server.replica import Replica


@serve.deployment
class Decode:
    """Answers requests. A prefill replica computes each prompt."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, prefill: DeploymentHandle, checkpoint: str
    ) -> None:
        self._prefill = prefill.options(stream=True)
        self._replica = Replica(checkpoint)
        self._components = components = await self._replica.open()
        self._worker = DecodeWorker(components.engine, components.kvflow.runtime, components.start_task)
        components.start_task(keep_prewarmed(components.kvflow.runtime, prefill), "prewarm")

    async def generate(self, request: AnswerRequest, avoid: Collection[str]) -> AsyncIterator[Step | Ended]:
        """Yield the steps of an answer as they come. Cancelling ends the work at both replicas."""
        prefills = _Prefills(self._prefill, request, avoid)
        try:
            generation = await self._worker.decode(request.decode_request(), prefills.next_ticket)
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
        return Ended(failure=failure, replica=prefills.last if theirs else self._components.name)

    async def metadata(self) -> dict[str, Any]:
        return self._replica.metadata()

    async def record_replica_metadata(self) -> dict[str, Any]:
        return self._replica.metadata()

    async def record_routing_stats(self) -> dict[str, Any]:
        return self._replica.routing_stats()

    async def check_health(self) -> None:
        self._replica.check()

    async def __del__(self) -> None:
        await self._replica.close()


class _Prefills:
    """The prefill replicas that compute one prompt, one after another. Each request avoids the replicas before."""

    def __init__(self, handle: DeploymentHandle, request: AnswerRequest, avoid: Collection[str]) -> None:
        self._handle = handle
        self._request = request
        self._deadline = asyncio.get_running_loop().time() + request.deadline_s
        self._avoid = [*avoid]
        self._asked: list[DeploymentResponseGenerator[Any]] = []
        self.last = ""
        """Name of the replica that was asked last."""

    async def next_ticket(self, attempts: Sequence[kvflow.Attempt]) -> dict[str, Any]:
        """Ask the next prefill replica to compute the prompt, and return its ticket. Raises AttemptError.

        See `disaggregated.decode.NextTicket`.
        """
        self.end()
        # Each request has its own id: earlier blocks may still be on offer, at the same replica if there is no other.
        request = renamed(self._request, f"{self._request.request_id}-{len(self._asked)}", self._deadline)
        response = self._handle.prefill.remote(request.prefill_request(), avoid=tuple(self._avoid))
        self._asked.append(response)
        begun: Begun = await next_message(response, "prefill")
        self.last = begun.replica
        self._avoid.append(begun.replica)
        return begun.ticket

    def end(self) -> None:
        """Cancel the last request to a prefill replica. No effect if it has ended."""
        for response in self._asked[-1:]:
            response.cancel()
