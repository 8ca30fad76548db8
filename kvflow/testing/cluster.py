"""Several engines in one process, without NIXL, sockets or threads: on any event loop, in real or in virtual time.

Give your own engine a world of the cluster, `Runtime(config, world=cluster.world())`, or take a ready one from
`cluster.engine`. Faults are those of the in-process transport, one set per rank (`cluster.transport`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import torch

from kvflow.config import Config
from kvflow.core.layout import CacheLayout
from kvflow.core.topology import Rank
from kvflow.runtime.runtime import Runtime
from kvflow.runtime.world import Clock, World
from kvflow.testing.books import assert_closed
from kvflow.testing.clock import LoopClock
from kvflow.testing.copier import InlineCopier
from kvflow.testing.pair import InprocPair, TestEngine
from kvflow.testing.side_channel import Exchange, InprocSideChannel
from kvflow.transport.inproc import InprocNetwork, InprocTransport

_FIRST_RANK = Rank(0, 0, 0)


class InprocCluster:
    """The network and the side channel that runtimes of one process share."""

    def __init__(self) -> None:
        self._network = InprocNetwork()
        self._exchange = Exchange()
        self._transports: dict[tuple[str, Rank], InprocTransport] = {}

    def world(self, *, clock: Callable[[], Clock] = LoopClock) -> World:
        """What a runtime needs to be part of the cluster. Copies run on the event loop: keep caches small."""

        def transport(config: Config, agent_name: str) -> InprocTransport:
            made = InprocTransport(agent_name, self._network)
            self._transports[config.engine_id, Rank.of(config)] = made
            return made

        return World(
            transport=transport,
            side_channel=lambda config: InprocSideChannel(self._exchange, config),
            clock=clock,
            copier=InlineCopier,
        )

    def transport(self, engine_id: str, rank: Rank = _FIRST_RANK) -> InprocTransport:
        """The transport of a rank's latest runtime: hold its reads, perform them, and script its `faults`."""
        return self._transports[engine_id, rank]

    @contextlib.asynccontextmanager
    async def engine(
        self,
        engine_id: str,
        *,
        config: Config | None = None,
        num_blocks: int = 16,
        block_size: int = 4,
        fill: float = -1.0,
    ) -> AsyncIterator[TestEngine]:
        """An open runtime with a small registered cache, all of whose elements are `fill`.

        `config` gives limits and timeouts. After a clean exit nothing may be left (`assert_closed`).
        """
        base = config or Config(engine_id=engine_id, drain_timeout_s=1.0)
        kv_caches = {"layers.0": torch.full((2, num_blocks, 2, block_size, 8), fill)}
        layout = CacheLayout.infer(kv_caches, order="HND", block_size=block_size)
        config = replace(base, engine_id=engine_id, listen="tcp://127.0.0.1:0")
        async with Runtime(config, world=self.world()) as runtime:
            await runtime.register_kv_caches(kv_caches, layout)
            yield TestEngine(runtime=runtime, transport=self.transport(engine_id), kv_caches=kv_caches, layout=layout)
        assert_closed(runtime.statistics())

    @staticmethod
    def pair(producer: TestEngine, consumer: TestEngine) -> InprocPair:
        """Two engines of the cluster with what is usually done between a producer and a consumer."""
        return InprocPair(producer=producer, consumer=consumer)
