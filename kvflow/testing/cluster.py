"""Several engines in one process, without NIXL, sockets or threads: on any event loop, in real or in virtual time.

Give your own engine a world of the cluster, `Runtime(config, world=cluster.world())`, or take a ready one from
`cluster.engine`. Faults are those of the in-process transport, one set per rank (`cluster.transport`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from kvflow.config import Config
from kvflow.core.plan.topology import Rank
from kvflow.runtime.world import Clock, World
from kvflow.testing.clock import LoopClock
from kvflow.testing.copier import InlineCopier
from kvflow.testing.pair import CacheSize, TestEngine, open_engine
from kvflow.testing.side_channel import Exchange, InprocSideChannel
from kvflow.transport.inproc import InprocNetwork, InprocTransport

_FIRST_RANK = Rank(0, 0, 0)
_SMALL = CacheSize(layers=1)


class InprocCluster:
    """The network and the side channel that runtimes of one process share."""

    def __init__(self) -> None:
        self.network = InprocNetwork()
        self._exchange = Exchange()
        self._transports: dict[tuple[str, Rank], InprocTransport] = {}

    def world(self, *, clock: Callable[[], Clock] = LoopClock) -> World:
        """What a runtime needs to be part of the cluster. Copies run on the event loop: keep caches small."""
        return World(
            transport=self._make,
            side_channel=lambda config: InprocSideChannel(self._exchange, config),
            clock=clock,
            copier=InlineCopier,
        )

    def transport(self, engine_id: str, rank: Rank = _FIRST_RANK) -> InprocTransport:
        """The transport of a rank's latest runtime: hold its reads, perform them, and script its `faults`."""
        return self._transports[engine_id, rank]

    @contextlib.asynccontextmanager
    async def engine(
        self, engine_id: str, *, config: Config | None = None, size: CacheSize = _SMALL
    ) -> AsyncIterator[TestEngine]:
        """An open runtime with a small registered cache, filled with its pattern (`TestEngine.cache`).

        `config` gives limits and timeouts. After a clean exit nothing may be left (`assert_closed`).
        """
        base = config or Config(engine_id=engine_id, drain_timeout_s=1.0)
        async with open_engine(engine_id, base, self._make, world=self.world(), size=size) as engine:
            yield engine

    def _make(self, config: Config, agent_name: str) -> InprocTransport:
        made = InprocTransport(agent_name, self.network)
        self._transports[config.engine_id, Rank.of(config)] = made
        return made
