"""The prefill deployment: `disaggregated.prefill` in a replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from disaggregated.failures import EXPECTED_ERRORS, failure_of
from disaggregated.messages import PrefillRequest
from disaggregated.prefill import PrefillWorker
from ray import serve

import kvflow
from kvflow.prefix import Prefixes
from kvflow.ray import keep_prewarmed, list_replicas
from ray_server.messages import Begun, Ended
from ray_server.replica import Replica

KNOWN_MAX = 64


@serve.deployment
class Prefill:
    """Computes prompts and keeps their blocks until a decode replica has read them.

    With `share_prefixes` a replica loads the beginning of a prompt from another replica, and computes the rest. A
    replica that leaves hands its prompts on to another one.
    """

    async def __init__(self, checkpoint: str, share_prefixes: bool = False) -> None:  # type: ignore[misc]  # Serve awaits it
        self._others: Sequence[Mapping[str, Any]] = ()
        self._known: dict[str, None] = {}
        """Addresses of replicas, also of those that are leaving, which Serve no longer lists."""
        prefixes = Prefixes() if share_prefixes else None
        parts = [prefixes] if prefixes is not None else []
        self._replica = Replica(checkpoint, parts, self._hand_on if share_prefixes else None)
        self._components = components = await self._replica.open()
        self._worker = PrefillWorker(
            components.engine, components.kvflow.runtime, components.start_task, prefixes=prefixes
        )
        if share_prefixes:
            components.start_task(keep_prewarmed(components.kvflow.runtime, self._find_other_replicas), "others")

    async def prefill(self, request: PrefillRequest, avoid: Collection[str]) -> AsyncIterator[Begun | Ended]:
        """Offer the prompt's blocks, and end when their lease has. Cancelling withdraws the offer."""
        addresses = [other["address"] for other in self._others]
        try:
            lease = await self._worker.prefill(msgspec.structs.replace(request, neighbours=addresses))
            yield Begun(replica=self._components.name, ticket=lease.ticket.to_params())
            await self._worker.wait_released(request.request_id)
        except EXPECTED_ERRORS as error:
            yield Ended(failure=failure_of(error), replica=self._components.name)
        finally:
            self._worker.release(request.request_id)

    async def _find_other_replicas(self) -> Sequence[Mapping[str, Any]]:
        """Update and return the list of the deployment's other replicas."""
        place = self._components.kvflow.place
        listed = await list_replicas(serve.get_deployment_handle(place.deployment, place.app))
        self._others = [one for one in listed if one["engine_id"] != place.engine_id]
        self._known.update(dict.fromkeys(str(one["address"]) for one in self._others))
        while len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]
        if self._worker.neighbours is not None:
            self._worker.neighbours.accept(self._known)
        return self._others

    async def _hand_on(self, within_s: float) -> None:
        """Hand this replica's prompts on to the first other replica that takes them."""
        neighbours = self._worker.neighbours
        assert neighbours is not None, "it shares prefixes"
        with suppress(LookupError, TimeoutError):  # then those that were listed last
            async with asyncio.timeout(within_s / 4):
                await self._find_other_replicas()
        for place, other in enumerate(self._others, 1):
            try:
                await neighbours.hand_on(str(other["address"]), within_s)
                return
            except kvflow.errors.PeerError:
                if place == len(self._others):
                    raise

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
