"""The prefill deployment: `disaggregated.prefill` in a replica."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

import msgspec
from disaggregated.failures import EXPECTED_ERRORS
from disaggregated.messages import PrefillReply, PrefillRequest
from disaggregated.prefill import PrefillWorker
from disaggregated.told import reported
from openai_server.metrics import PrefillMetrics
from ray import serve

import kvflow
from kvflow.prefix import Prefixes
from kvflow.ray import keep_prewarmed, list_replicas
from ray_server.messages import Begun, Ended
from ray_server.replica import Replica


@serve.deployment
class Prefill:
    """Computes prompts and keeps their blocks until a decode replica has read them.

    With `share_prefixes` it loads what another replica has computed of a prompt, and computes the rest.
    """

    async def __init__(self, checkpoint: str, share_prefixes: bool = False) -> None:  # type: ignore[misc]  # Serve awaits it
        prefixes = Prefixes() if share_prefixes else None
        parts = [prefixes] if prefixes is not None else []
        self._replica = Replica(checkpoint, PrefillMetrics, parts)
        self._opened = opened = await self._replica.open()
        self._introduction = opened.kvflow.runtime.introduce()
        self._worker = PrefillWorker(
            opened.engine, opened.kvflow.runtime, opened.start_task, opened.metrics, prefixes=prefixes
        )
        self._others: Sequence[Mapping[str, Any]] = ()
        if share_prefixes:
            opened.start_task(keep_prewarmed(opened.kvflow.runtime, self._look_around), "others")

    async def prefill(
        self, request: PrefillRequest, avoid: Collection[str]
    ) -> AsyncIterator[Begun | PrefillReply | Ended]:
        """Compute the prompt, and end when its blocks were read, or will not be. Cancelling it withdraws the offer.

        What the reply says, a reader learns with the blocks: one that comes meanwhile is only in the way of the read.
        """
        ticket = kvflow.Ticket.rendezvous(self._introduction, request.request_id, ttl_s=request.deadline_s)
        yield Begun(replica=self._opened.name, ticket=ticket.to_params())
        addresses = [other["address"] for other in self._others]
        try:
            reply = await self._worker.prefill(msgspec.structs.replace(request, neighbours=addresses))
            await self._worker.released(request.request_id)
            yield reply
        except EXPECTED_ERRORS as error:
            yield Ended(failure=reported(error, self._opened.metrics), replica=self._opened.name)
        finally:
            self._worker.release(request.request_id)

    async def _look_around(self) -> Sequence[Mapping[str, Any]]:
        """The deployment's other replicas."""
        place = self._opened.kvflow.place
        listed = await list_replicas(serve.get_deployment_handle(place.deployment, place.app))
        self._others = [one for one in listed if one["engine_id"] != place.engine_id]
        return self._others

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
