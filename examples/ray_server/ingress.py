"""The ingress: `openai_server.front` in a replica, on an answer that a decode replica gives."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Hashable
from pathlib import Path

from disaggregated.messages import Failure, FailureKind, Step
from fastapi import FastAPI
from openai_server.attempts import AttemptError, Attempts, Prompt
from openai_server.front import Front, RouterHealth, front_app
from openai_server.metrics import RouterMetrics
from paged_engine.tokenizer import ChatTokenizer
from ray import serve
from ray.serve.handle import DeploymentHandle

from ray_server.losses import losses
from ray_server.messages import AnswerRequest, Ended


@serve.deployment
@serve.ingress()
class Ingress:
    """OpenAI's endpoints."""

    def __init__(self, decode: DeploymentHandle, checkpoint: str, deadline_s: float) -> None:
        logging.getLogger("openai_server").setLevel(logging.INFO)
        metrics = RouterMetrics()
        self._front = Front(
            router=Attempts(attempt=_Asking(decode).attempt, retried=metrics.retried),
            tokenizer=ChatTokenizer(Path(checkpoint)),
            metrics=metrics,
            deadline_s=deadline_s,
            health=lambda: RouterHealth(status="ok", workers=[]),  # `serve status` knows the replicas
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return front_app(self._front)


class _Asking:
    """Attempts of a request, each with another decode replica."""

    def __init__(self, decode: DeploymentHandle) -> None:
        self._decode = decode.options(stream=True)

    async def attempt(self, request_id: str, prompt: Prompt, avoid: set[Hashable]) -> AsyncGenerator[Step, None]:
        request = AnswerRequest.of(prompt, request_id, {str(worker) for worker in avoid})
        response = self._decode.generate.remote(request)
        try:
            with losses("decode"):
                async for step in response:
                    if isinstance(step, Ended):
                        raise AttemptError(step.failure, step.replica or None, final=not step.replica)
                    yield step
                    if step.finish_reason is not None:
                        return
        finally:
            response.cancel()  # nobody wants the rest; no effect on what has ended
        message = "a decode replica ended its answer early"
        raise AttemptError(Failure(kind=FailureKind.WORKER_LOST, message=message))
