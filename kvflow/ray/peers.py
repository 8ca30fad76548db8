"""The replicas behind a deployment's handle, connected before the first load from them, and again as they come and go.

A ticket names where its blocks are, so loads need none of this; it saves the first one from each replica the handshake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvflow.core.protocol.addresses import PeerAddress
from kvflow.errors import RequestError, RuntimeUnavailable
from kvflow.logs import logger_of
from kvflow.runtime.runtime import Runtime

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logger_of(__name__)

ANSWER_TIMEOUT_S = 10.0

_FIELDS = ("engine_id", "address", "dp_rank", "pp_rank", "tp_rank")


ListPeers = Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]


async def keep_prewarmed(runtime: Runtime, peers: DeploymentHandle | ListPeers, *, period_s: float = 10.0) -> None:
    """Connect to the replicas of a deployment, and to those that come later, until this is cancelled or drained.

    Args:
        runtime: whose loads are to find connections.
        peers: the deployment's handle, whose replicas have a method `metadata` (`ReplicaRuntime.metadata`), or a
            coroutine function that lists as much and raises LookupError where it cannot.
        period_s: seconds between two looks; a replica that comes is connected at most so much later.

    Replicas that have gone are forgotten. One that cannot be connected, or an answer that cannot be right, is logged,
    and tried again.
    """
    list_peers = peers if callable(peers) and not hasattr(peers, "broadcast") else partial(list_replicas, peers)
    known: frozenset[PeerAddress] = frozenset()
    while True:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                listed = await list_peers()
            known = await _renewed(runtime, known, listed)
        except RuntimeUnavailable:
            return
        except (LookupError, RequestError, TimeoutError) as error:
            why = error or f"no answer in {ANSWER_TIMEOUT_S} s"
            logger.info("engine %s: looks for its peers again: %s", runtime.config.engine_id, why)
        await asyncio.sleep(period_s)


async def _renewed(
    runtime: Runtime, known: frozenset[PeerAddress], listed: Sequence[Mapping[str, Any]]
) -> frozenset[PeerAddress]:
    """Forget replicas that have gone and connect those that have come; all that are connected now."""
    now = frozenset(_peer(entry) for entry in listed)
    for gone in known - now:
        await runtime.forget_peer(gone.engine_id)
    come = sorted(now - known, key=lambda peer: peer.engine_id)
    failed = {peer: error for peer, error in zip(come, await runtime.prewarm(come), strict=True) if error is not None}
    for peer, error in failed.items():
        logger.info("engine %s is not connected yet: %s", peer.engine_id, error)
    return now - failed.keys()


def _peer(entry: Mapping[str, Any]) -> PeerAddress:
    return PeerAddress(**{name: entry[name] for name in _FIELDS if name in entry})


async def list_replicas(handle: Any) -> Sequence[Mapping[str, Any]]:
    """Ask the replicas of a deployment who they are; one that goes meanwhile is left out.

    Args:
        handle: the deployment's.

    Returns:
        `metadata()` of each.

    Raises:
        LookupError: Ray cannot ask them, such as while there is none.
    """
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        answers = await handle.broadcast("metadata").results_async(return_exceptions=True)
    except (RayError, RayServeException) as error:
        raise LookupError(f"{type(error).__name__}: {error}") from error
    return [answer for answer in answers if isinstance(answer, Mapping)]
