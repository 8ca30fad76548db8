"""Keeps a runtime connected to the replicas of a Ray Serve deployment, as replicas start and stop.

Loads work without this, since a ticket has the addresses of its ranks. But with open connections, the first load from
each replica needs no handshake.
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
"""Coroutine function that returns `ReplicaRuntime.metadata` of each replica to connect to, or raises LookupError."""


async def keep_prewarmed(runtime: Runtime, peers: DeploymentHandle | ListPeers, *, period_s: float = 10.0) -> None:
    """Keep `runtime` connected to all replicas of a deployment, until cancelled or until `runtime` drains or closes.

    Connections to stopped replicas are dropped. A failed connection or an invalid answer is logged and tried again.

    Args:
        runtime: the runtime that will load from the replicas.
        peers: the deployment's handle, if its replicas have a method `metadata` (`ReplicaRuntime.metadata`). Or a
            coroutine function that returns the metadata of all replicas, or raises LookupError.
        period_s: seconds between two listings of the replicas: the longest delay until a new replica is connected.
    """
    list_peers = peers if callable(peers) and not hasattr(peers, "broadcast") else partial(list_replicas, peers)
    known: frozenset[PeerAddress] = frozenset()
    while True:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                listed = await list_peers()
            known = await _update_connections(runtime, known, listed)
        except RuntimeUnavailable:
            return
        except (LookupError, RequestError, TimeoutError) as error:
            why = error or f"no answer in {ANSWER_TIMEOUT_S} s"
            logger.info(
                "engine %s: its peers could not be listed, and are listed again later: %s",
                runtime.config.engine_id,
                why,
            )
        await asyncio.sleep(period_s)


async def _update_connections(
    runtime: Runtime, known: frozenset[PeerAddress], listed: Sequence[Mapping[str, Any]]
) -> frozenset[PeerAddress]:
    """Drop connections to stopped replicas, connect to new replicas, and return all connected replicas.

    `known` are the connected replicas so far, `listed` the metadata of all running replicas.
    """
    now = frozenset(_address_of(entry) for entry in listed)
    for gone in known - now:
        await runtime.forget_peer(gone.engine_id)
    come = sorted(now - known, key=lambda peer: peer.engine_id)
    failed = {peer: error for peer, error in zip(come, await runtime.prewarm(come), strict=True) if error is not None}
    for peer, error in failed.items():
        logger.info("engine %s is not connected yet: %s", peer.engine_id, error)
    return now - failed.keys()


def _address_of(entry: Mapping[str, Any]) -> PeerAddress:
    return PeerAddress(**{name: entry[name] for name in _FIELDS if name in entry})


async def list_replicas(handle: Any) -> Sequence[Mapping[str, Any]]:
    """Ask all replicas of a deployment for their metadata. Leave out replicas that stop before they answer.

    Args:
        handle: handle of the deployment. Its replicas need a method `metadata`.

    Returns:
        The `metadata()` of each replica.

    Raises:
        LookupError: Ray cannot ask the replicas, for example because there are none.
    """
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        answers = await handle.broadcast("metadata").results_async(return_exceptions=True)
    except (RayError, RayServeException) as error:
        raise LookupError(f"{type(error).__name__}: {error}") from error
    return [answer for answer in answers if isinstance(answer, Mapping)]
