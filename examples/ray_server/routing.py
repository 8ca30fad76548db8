"""The request router for Serve, which chooses the replica for a request by the rule in `room`.

Serve loads this class into every process with a handle, so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from ray_server.ranking import ranked

PREFIX_TOKENS = 64


class FreeBlocksRouter(FIFOMixin, RequestRouter):
    """Orders replicas by `ranked`. Serve takes the first replica that accepts the request."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        free = {name: int(replica.routing_stats.get("blocks_free", 0)) for name, replica in by_name.items()}
        return [[by_name[name] for name in rank] for rank in ranked(free, **_facts(pending_request))]


def _facts(pending: PendingRequest | None) -> dict[str, Any]:
    """Return the arguments of `ranked`, from the request (an AnswerRequest or a PrefillRequest) and from `avoid`."""
    if pending is None or not pending.args:
        return {}
    prompt: Sequence[int] = getattr(pending.args[0], "prompt", ())
    tokens = len(prompt) + getattr(pending.args[0], "max_tokens", 0)
    return {"tokens": tokens, "prefix": _digest(prompt[:PREFIX_TOKENS]), "avoid": pending.kwargs.get("avoid", ())}


def _digest(prefix: Sequence[int]) -> str:
    return blake2b(repr(tuple(prefix)).encode(), digest_size=8, usedforsecurity=False).hexdigest() if prefix else ""
