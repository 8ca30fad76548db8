"""The request router for Serve, which chooses the replica for a request by the rule in `room`.

Serve loads this class into every process with a handle, so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from ray_server.ranking import Candidate, RoutedRequest, ranked

PREFIX_TOKENS = 64


class FreeBlocksRouter(FIFOMixin, RequestRouter):
    """Orders replicas by `ranked`. Serve takes the first replica that accepts the request."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        candidates = [
            Candidate(name, int(replica.routing_stats.get("blocks_free", 0))) for name, replica in by_name.items()
        ]
        return [[by_name[name] for name in rank] for rank in ranked(candidates, _routed_request(pending_request))]


def _routed_request(pending: PendingRequest | None) -> RoutedRequest:
    """Return the facts of a pending request: of its first argument, a PrefillRequest, and of `avoid`."""
    if pending is None or not pending.args:
        return RoutedRequest()
    prompt: Sequence[int] = getattr(pending.args[0], "prompt", ())
    tokens = len(prompt) + getattr(pending.args[0], "max_tokens", 0)
    return RoutedRequest(tokens, _digest(prompt[:PREFIX_TOKENS]), frozenset(pending.kwargs.get("avoid", ())))


def _digest(prefix: Sequence[int]) -> str:
    return blake2b(repr(tuple(prefix)).encode(), digest_size=8, usedforsecurity=False).hexdigest() if prefix else ""
