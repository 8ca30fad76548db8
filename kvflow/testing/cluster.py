"""Several engines in one process, without NIXL, sockets or threads: on any event loop, in real or in virtual time.

Give your own engine a world of the cluster, `Runtime(config, world=cluster.world())`, or take a ready one from
`cluster.engine`. Faults are those of the in-process transport, one set per rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from kvflow.config import Config
from kvflow.core.topology import Rank
from kvflow.runtime.runtime import Runtime
from kvflow.runtime.world import Clock, SystemClock, World
from kvflow.testing.books import assert_closed
from kvflow.testing.copier import InlineCopier
from kvflow.testing.engine import TestEngine, small_cache
from kvflow.testing.side_channel import Exchange, InprocSideChannel
from kvflow.transport.inproc import InprocNetwork, InprocTransport


class InprocCluster:
    """The network and the side channel that runtimes of one process share."""

    def __init__(self) -> None:
        self._network = InprocNetwork()
        self._exchange = Exchange()
        self._transports: dict[tuple[str, Rank], InprocTransport] = {}

    def world(self, *, clock: Callable[[], Clock] = SystemClock) -> World:
        """What a runtime needs to be part of the cluster. Copies run on the event loop: keep caches small."""

        def transport(config: Config, agent_name: str) -> InprocTransport:
            made = InprocTransport(agent_name, self._network)
            rank = Rank(config.dp_rank, config.pp_rank, config.tp_rank)
            self._transports[config.engine_id, rank] = made
            return made

        return World(
            transport=transport,
            side_channel=lambda config: InprocSideChannel(self._exchange, config),
            clock=clock,
            copier=InlineCopier,
        )

    def transport(self, engine_id: str, rank: Rank = Rank(0, 0, 0)) -> InprocTransport:  # noqa: B008 - a value
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
        layers: int = 2,
        clock: Callable[[], Clock] = SystemClock,
    ) -> AsyncIterator[TestEngine]:
        """An open runtime with a small registered cache, every element of which is -1.

        `config` gives limits and timeouts. On a clean exit nothing may be left behind (`assert_closed`).
        """
        base = config or Config(engine_id=engine_id, drain_timeout_s=1.0)
        kv_caches, layout = small_cache(num_blocks=num_blocks, block_size=block_size, layers=layers)
        config = replace(base, engine_id=engine_id, listen="tcp://127.0.0.1:0")
        async with Runtime(config, world=self.world(clock=clock)) as runtime:
            await runtime.register_kv_caches(kv_caches, layout)
            rank = Rank(config.dp_rank, config.pp_rank, config.tp_rank)
            yield TestEngine(
                runtime=runtime, transport=self.transport(engine_id, rank), kv_caches=kv_caches, layout=layout
            )
        assert_closed(runtime.statistics())
