"""The prefill deployment: `disaggregated.prefill` in a replica."""

from __future__ import annotations

from typing import Any

from disaggregated.failures import EXPECTED_ERRORS
from disaggregated.messages import Failure, PrefillReply, PrefillRequest
from disaggregated.prefill import PrefillWorker
from disaggregated.told import reported
from openai_server.metrics import PrefillMetrics
from ray import serve

from ray_server.replica import Replica


@serve.deployment
class Prefill:
    """Computes prompts and keeps their blocks until a decode replica has read them."""

    async def __init__(self, checkpoint: str) -> None:
        self._replica = Replica(checkpoint, PrefillMetrics)
        opened = await self._replica.open()
        self._metrics = opened.metrics
        self._worker = PrefillWorker(opened.engine, opened.kvflow.runtime, opened.start_task, opened.metrics)

    async def prefill(self, request: PrefillRequest) -> PrefillReply | Failure:
        """Compute the prompt, and answer when its blocks were read, or will not be. Cancelling it withdraws the offer.

        What an answer says, a reader learns with the blocks: one that comes meanwhile is only in the way of the read.
        """
        try:
            reply = await self._worker.prefill(request)
        except EXPECTED_ERRORS as error:
            return reported(error, self._metrics)
        await self._worker.released(request.request_id)
        return reply

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
