"""Shared parts of both kinds of replicas: engine, runtime, and the answers to Serve (metadata, stats, health)."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disaggregated.background import StartTask, background_tasks
from disaggregated.groups import LayerGroups
from openai_server.worker import open_engine
from paged_engine import Engine
from paged_engine.weights import MODEL_NAME

from kvflow import Part
from kvflow.ray import Lifetime, RayMetrics, ReplicaRuntime

HandOn = Callable[[float], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaComponents:
    """The open components of a replica."""

    engine: Engine
    kvflow: ReplicaRuntime
    start_task: StartTask

    @property
    def name(self) -> str:
        """Unique name of the replica, by which requests avoid it."""
        return self.kvflow.place.unique_id


class Replica:
    """Engine and runtime of one replica, from `open` to `close`.

    `hand_on` is called before the replica drains, with the seconds that it may take.
    """

    def __init__(self, checkpoint: str, parts: Sequence[Part] = (), hand_on: HandOn | None = None) -> None:
        logging.getLogger("openai_server").setLevel(logging.INFO)
        self._lifetime = Lifetime(_open_components(Path(checkpoint), parts, hand_on), "replica")
        self._components: ReplicaComponents | None = None

    async def open(self) -> ReplicaComponents:
        self._components = await self._lifetime.start()
        return self._components

    async def close(self) -> None:
        """Drain and close. Allowed for a replica that was never opened: Serve ends those, too."""
        await self._lifetime.stop()

    def check(self) -> None:
        """Raise an error if the replica has to be replaced."""
        self._lifetime.check()
        self.components.kvflow.check()

    @property
    def components(self) -> ReplicaComponents:
        assert self._components is not None, "Serve asks only what has started"
        return self._components

    def metadata(self) -> dict[str, Any]:
        components = self.components
        return components.kvflow.metadata() | {"replica": components.name, "pid": os.getpid()}

    def routing_stats(self) -> dict[str, Any]:
        """Return the runtime's statistics for routing, with the engine's counts of blocks.

        The engine's counts include blocks that are being computed, which the runtime does not know.
        """
        statistics = self.components.engine.statistics()
        used = {"blocks_free": statistics.blocks_free, "blocks_used": statistics.blocks_used}
        return self.components.kvflow.routing_stats() | used


@asynccontextmanager
async def _open_components(
    checkpoint: Path, parts: Sequence[Part], hand_on: HandOn | None
) -> AsyncIterator[ReplicaComponents]:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    shown = RayMetrics()
    replica = ReplicaRuntime(model=MODEL_NAME, observers=[shown], parts=parts)
    async with (
        open_engine(replica.place.engine_id, checkpoint) as engine,
        replica,
        background_tasks() as start_task,
    ):
        await replica.runtime.register_kv_caches(LayerGroups(engine).caches)
        start_task(shown.watch(replica.runtime), "metrics")
        yield ReplicaComponents(engine=engine, kvflow=replica, start_task=start_task)
        await replica.drain(hand_on=hand_on)  # before the background tasks, which keep leased blocks, are ended
