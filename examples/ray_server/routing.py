"""Which replica gets a request, as Serve asks it; the rule is in `room`.

Serve carries this class to whoever has a handle, so it imports nothing that is heavy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from ray_server.room import Candidate, Wanted, ranked

PREFIX_TOKENS = 64


class RoomRouter(FIFOMixin, RequestRouter):
    """Ranks replicas by `ranked`; Serve takes the first that accepts the request."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        candidates = [
            Candidate(name, int(replica.routing_stats.get("blocks_free", 0))) for name, replica in by_name.items()
        ]
        return [[by_name[name] for name in rank] for rank in ranked(candidates, _wanted(pending_request))]


def _wanted(pending: PendingRequest | None) -> Wanted:
    """What is known of a request: `choose_replica` is told by keywords, another call has it in its message."""
    if pending is None:
        return Wanted()
    told: dict[str, Any] = pending.kwargs
    if "needs_tokens" in told:
        return Wanted(told["needs_tokens"], _digest(told["prefix"]), frozenset(told["avoid"]))
    message = pending.args[0] if pending.args else None
    prompt: Sequence[int] = getattr(message, "prompt", ())
    avoid: Collection[str] = getattr(message, "avoid", ())
    return Wanted(len(prompt) + getattr(message, "max_tokens", 0), _digest(prompt[:PREFIX_TOKENS]), frozenset(avoid))


def _digest(prefix: Sequence[int]) -> str:
    return blake2b(repr(tuple(prefix)).encode(), digest_size=8).hexdigest() if prefix else ""
