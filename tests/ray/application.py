"""The example's application with replicas that tests control: leases without readers, prompts that halt."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from ray import serve
from ray.serve import Application
from ray_server.decode import Decode
from ray_server.ingress import Ingress
from ray_server.prefill import Prefill

import kvflow

BLOCKS = 2
TOKENS = 32


@serve.deployment(name="Prefill")
class TestPrefill(Prefill.func_or_class):  # type: ignore[misc, name-defined]
    """Offers blocks on demand, and halts at a prompt if it is asked to."""

    async def halt(self, path: str) -> None:
        """Have the next prompt halt, if there is such a file then."""
        engine = self._replica.components.engine
        prefill = engine.prefill

        async def halting(*arguments: Any, **options: Any) -> int:
            if os.path.exists(path):
                os.rename(path, f"{path}-{os.getpid()}")
                await asyncio.Event().wait()
            token: int = await prefill(*arguments, **options)
            return token

        engine.prefill = halting

    async def hold(self, request_id: str) -> dict[str, Any]:
        """A ticket of a lease that stays open until it is read, or revoked."""
        components = self._replica.components
        name = f"{request_id}-{components.name}"
        held: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        components.start_task(_hold(components.engine, components.kvflow.runtime, name, held), f"hold {name}")
        return await held

    async def counts(self) -> dict[str, Any]:
        """By replica: leases by outcome, tokens computed here, other replicas known, prefixes found by them, and tokens
        that replicas which have left have handed on."""
        components = self._replica.components
        now = components.kvflow.runtime.statistics()
        prefix = now.parts.get("prefix")
        return {
            "replica": components.name,
            "read": now.serving.read,
            "computed": components.engine.statistics().tokens_prefilled,
            "others": len(self._others),
            "found": prefix.sharing.found if prefix else 0,
            "taken": prefix.taken_over_tokens if prefix else 0,
        }


@serve.deployment(name="Decode")
class TestDecode(Decode.func_or_class):  # type: ignore[misc, name-defined]
    """Loads what tests have had offered."""

    async def load(self, ticket: dict[str, Any]) -> str:
        """Return the outcome: "read", or the name of the error."""
        components = self._replica.components
        try:
            async with components.engine.reserve(TOKENS) as block_ids:
                request = kvflow.LoadRequest("load", ticket=ticket, block_ids=block_ids, deadline_s=20.0)
                await components.kvflow.runtime.load_blocks(request)
        except kvflow.errors.KVFlowError as error:
            return type(error).__name__
        return "read"

    async def steps(self) -> int:
        """How many steps the model has taken."""
        steps: int = self._replica.components.engine.statistics().steps
        return steps

    async def sources_left(self) -> int:
        """How often a load has gone on with another prefill replica."""
        sources_left: int = self._replica.components.kvflow.runtime.statistics().loading.sources_left
        return sources_left

    async def break_runtime(self) -> None:
        """A service dies."""
        for task in asyncio.all_tasks():
            if task.get_name() == "kvflow-poller":
                task.cancel()


async def _hold(engine: Any, runtime: kvflow.Runtime, name: str, held: asyncio.Future[dict[str, Any]]) -> None:
    async with engine.reserve(TOKENS) as block_ids:
        lease = runtime.serve_blocks(kvflow.ServeRequest(name, block_ids=block_ids, num_tokens=TOKENS, ttl_s=120.0))
        held.set_result(lease.ticket.to_params())
        await lease


def build(arguments: dict[str, Any]) -> Application:
    checkpoint = arguments["checkpoint"]
    prefill = TestPrefill.bind(checkpoint, arguments.get("share_prefixes", False))
    return Ingress.bind(TestDecode.bind(prefill, checkpoint), checkpoint, arguments["deadline_s"])
