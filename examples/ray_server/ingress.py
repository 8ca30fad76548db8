"""The ingress: `openai_server.front` in a replica, with decode replicas to give the answers.

A new attempt is made if a decode replica dies or fails. If a prefill replica does, the decode replica's load replaces
it within the same attempt.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Hashable
from pathlib import Path

from disaggregated.messages import AnswerRequest, Step
from fastapi import FastAPI
from openai_server.front import Front, front_app
from openai_server.metrics import FrontMetrics
from paged_engine.tokenizer import ChatTokenizer
from ray import serve
from ray.serve.handle import DeploymentHandle

from ray_server.errors import next_message


@serve.deployment
@serve.ingress()
class Ingress:
    """The deployment with OpenAI's endpoints."""

    def __init__(self, decode: DeploymentHandle, checkpoint: str, deadline_s: float) -> None:
        logging.getLogger("openai_server").setLevel(logging.INFO)
        self._decode = decode.options(stream=True)
        self._front = Front(
            attempt=self._attempt,
            tokenizer=ChatTokenizer(Path(checkpoint)),
            metrics=FrontMetrics(),
            deadline_s=deadline_s,
            health=lambda: {"status": "ok"},  # `serve status` knows the replicas
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return front_app(self._front)

    async def _attempt(self, request: AnswerRequest, avoid: set[Hashable]) -> AsyncGenerator[Step, None]:
        response = self._decode.generate.remote(request, avoid=tuple(avoid))
        try:
            while True:
                step: Step = await next_message(response, "decode")
                yield step
                if step.finish_reason is not None:
                    return
        finally:
            response.cancel()  # the rest is not needed; no effect if the stream has ended
