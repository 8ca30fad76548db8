"""ReplicaRuntime: the runtime of one replica of Ray Serve.

Serve stops a replica in three steps. It waits until the replica has no running request, checking every
`graceful_shutdown_wait_loop_s`; then it awaits `__del__`; and `graceful_shutdown_timeout_s` after it began, it kills
the process. Serve does not know a replica's open leases, so `__del__` has to drain them (`drain`), with a deadline that
leaves time to close. Serve calls a replica's methods in different tasks, so a replica keeps its ReplicaRuntime in a
`Lifetime`:

    @asynccontextmanager
    async def opened():
        async with ReplicaRuntime(model="llama") as replica:
            await replica.runtime.register_kv_caches(kv_caches, layout)
            yield replica
            await replica.drain()

    class Decode:
        async def __init__(self):
            self._lifetime = Lifetime(opened())
            self._replica = await self._lifetime.start()

        async def __del__(self):
            await self._lifetime.stop()

        async def check_health(self):
            self._lifetime.check()
            self._replica.check()
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kvflow import checks
from kvflow.config import Config
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import ConfigError, KVFlowError, RuntimeBroken
from kvflow.extras import install_command
from kvflow.hosts import address_at
from kvflow.logs import logger_of
from kvflow.runtime.part import Part
from kvflow.runtime.records import Observer
from kvflow.runtime.runtime import Runtime
from kvflow.runtime.statistics import RuntimeState
from kvflow.runtime.world import World

logger = logger_of(__name__)

_SHORTEST_S = 1e-3
SETTLE_S = 1.0
"""Default of Config.drain_timeout_s in a replica, in seconds.

It is short because a replica calls `ReplicaRuntime.drain` first, which ends all leases and loads."""

DRAIN_LEAST_S = 1.0
"""Minimum number of seconds that a deployment's settings must leave for a drain if no `drain_deadline_s` is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlace:
    """Names, address and time limits of a replica, as Ray Serve has them."""

    app: str
    deployment: str
    unique_id: str
    """Id of the replica's Ray actor. A restarted replica has another id."""
    node_ip: str
    shutdown_timeout_s: float
    """The deployment's `graceful_shutdown_timeout_s`."""
    wait_loop_s: float
    """The deployment's `graceful_shutdown_wait_loop_s`."""

    @property
    def engine_id(self) -> str:
        """Engine id for the replica's runtime. A restarted replica counts as another engine."""
        return f"{self.deployment}-{self.unique_id}"

    def config(self, settings: dict[str, Any]) -> Config:
        """Return the Config of the replica's runtime.

        Args:
            settings: fields of Config, which override those derived from the replica.

        Returns:
            The Config.

        Raises:
            ConfigError: a setting is unknown or invalid.
        """
        own = {"engine_id": self.engine_id, "listen": address_at(self.node_ip, 0), "drain_timeout_s": SETTLE_S}
        return Config(**{**own, **settings})

    def drain_deadline_s(self, config: Config, wanted_s: float | None = None) -> float:
        """Return how many seconds leases and loads may take to end when the replica stops.

        Args:
            config: the runtime's Config, with the timeouts that limit how long it takes to close after the drain.
            wanted_s: seconds for the drain; None for all that the deployment's settings leave.

        Returns:
            `wanted_s`, or `time_to_drain_s(config)` if it is None.

        Raises:
            ConfigError: the deployment leaves too little time: Serve would kill the replica while it drains or closes.
        """
        left_s = self.time_to_drain_s(config)
        least_s = DRAIN_LEAST_S if wanted_s is None else checks.seconds(wanted_s, "drain_deadline_s", error=ConfigError)
        if left_s < least_s:
            needed_s = least_s + self.shutdown_timeout_s - left_s
            raise ConfigError(
                f"deployment {self.deployment!r}: graceful_shutdown_timeout_s: {self.shutdown_timeout_s:g}, but "
                f"{needed_s:g} are needed: {self.wait_loop_s:g} for graceful_shutdown_wait_loop_s, {least_s:g} to "
                f"drain, {_closing_s(config):g} to end and close"
            )
        return left_s if wanted_s is None else wanted_s

    def time_to_drain_s(self, config: Config) -> float:
        """Return how many seconds the deployment's settings leave for a drain when the replica stops.

        Args:
            config: the runtime's Config, with the timeouts that limit how long it takes to close after the drain.

        Returns:
            Seconds; less than 0 if there is too little time even without a drain.
        """
        return self.shutdown_timeout_s - self.wait_loop_s - _closing_s(config)


def _closing_s(config: Config) -> float:
    """Return how many seconds the runtime may take to close after a drain's deadline."""
    return config.ending_s + config.limits.goodbye_timeout_s + config.limits.transport_close_timeout_s


class ReplicaRuntime:
    """A `kvflow.Runtime` configured from its Ray Serve replica.

    Use it as `async with`; `runtime` is the `kvflow.Runtime`. The module docstring has an example.

    Args:
        place: names and limits of the replica. If None, Serve is asked for them, which works only inside a replica.
        drain_deadline_s: seconds that leases and loads may take to end when the replica stops; None for all that the
            deployment's `graceful_shutdown_timeout_s` leaves.
        observers: receive the records of ended loads and leases, as for Runtime.
        world: replaces transport, clock and the like in tests, as for Runtime.
        parts: optional features, as for Runtime.
        settings: fields of `kvflow.Config`, such as `model` and ranks. By default `engine_id` is made of the deployment
            and the replica's unique id, and `listen` is a free port at the node's address.

    Raises:
        ConfigError: this process is no replica, a setting is invalid, or `drain_deadline_s` is too long.
    """

    def __init__(
        self,
        *,
        place: ReplicaPlace | None = None,
        drain_deadline_s: float | None = None,
        observers: Sequence[Observer] = (),
        world: World | None = None,
        parts: Sequence[Part] = (),
        **settings: Any,
    ) -> None:
        self._find_place = this_replica if place is None else lambda: place
        self.place = self._find_place()
        config = self.place.config(settings)
        self.drain_deadline_s = self.place.drain_deadline_s(config, drain_deadline_s)
        self.runtime = Runtime(config, observers=observers, world=world, parts=parts)

    def __repr__(self) -> str:
        return f"<kvflow.ReplicaRuntime {self.runtime!r} on {self.place.node_ip}>"

    async def __aenter__(self) -> Self:
        """Open the runtime. ConfigError if it cannot be opened. If cancelled, the runtime stays closed."""
        await self.runtime.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the runtime. Leases and loads that are still open get Config.drain_timeout_s to end."""
        await self.runtime.aclose()

    async def drain(
        self,
        *,
        successor: Ticket | Mapping[str, Any] | None = None,
        hand_on: Callable[[float], Awaitable[object]] | None = None,
    ) -> bool:
        """Refuse new work and wait until all leases and loads have ended. At the deadline, end those that are left.

        Call this when the replica stops, before it ends tasks that hold leased blocks. The deadline is
        `drain_deadline_s`, or less if Serve has meanwhile shortened the deployment's time. `Runtime.drain` says how
        long ending may take after the deadline. If cancelled, stop waiting: the runtime stays draining, and no lease is
        revoked.

        Args:
            successor: any ticket of the replica that takes this one's place, as for `Runtime.drain`.
            hand_on: function that hands the replica's cached prefixes on (`Prefixes.hand_on`) before new work is
                refused. It is given the seconds that it may take: half of those until the deadline. If it raises a
                KVFlowError or takes longer, a warning is logged, and the replica drains all the same.

        Returns:
            True if all leases and loads ended before the deadline. False if not, or if the runtime was not open.

        Raises:
            RequestError: `successor` is no ticket, or a ticket of this replica.
        """
        if self.runtime.state not in (RuntimeState.OPEN, RuntimeState.DRAINING):
            return False  # its leases and loads have ended with it
        loop = asyncio.get_running_loop()
        left_s = max(min(self.drain_deadline_s, self._find_place().time_to_drain_s(self.runtime.config)), _SHORTEST_S)
        until_s = loop.time() + left_s
        if hand_on is not None:
            try:
                async with asyncio.timeout(left_s / 2):
                    await hand_on(left_s / 2)
            except (KVFlowError, TimeoutError) as error:
                why = str(error) or f"not done within {left_s / 2:.3g} s"
                logger.warning("%r: its cached prefixes are not handed on: %s", self, why)
        return await self.runtime.drain(max(until_s - loop.time(), _SHORTEST_S), successor=successor)

    def metadata(self) -> dict[str, Any]:
        """Return the replica's engine id and address, for `record_replica_metadata` and `kvflow.ray.keep_prewarmed`.

        Returns:
            Engine id, address of the side channel, node and rank, in JSON types.

        Raises:
            RuntimeBroken, RuntimeClosed: the runtime has broken, or is not open.
        """
        rank = Rank.of(self.runtime.config)
        return {
            "engine_id": self.runtime.config.engine_id,
            "address": self.runtime.address,
            "node_ip": self.place.node_ip,
            "dp_rank": rank.dp,
            "pp_rank": rank.pp,
            "tp_rank": rank.tp,
        }

    def routing_stats(self) -> dict[str, Any]:
        """Return how busy the runtime is now, for `record_routing_stats`.

        Returns:
            The runtime's state, and the counts of free blocks, open leases and open loads, in JSON types.
        """
        now = self.runtime.statistics()
        blocks = now.blocks
        return {
            "state": str(now.state),
            "blocks_free": 0 if blocks is None else blocks.free,
            "open_leases": 0 if now.serving is None else now.serving.open_leases,
            "open_loads": 0 if now.loading is None else now.loading.open_loads,
        }

    def check(self) -> None:
        """Raise RuntimeBroken if the runtime can no longer work, so that Serve replaces the replica.

        Call this in the deployment's `check_health`.

        Raises:
            RuntimeBroken: a service of the runtime died, the runtime was closed although the replica goes on, or no new
                reader can connect because the process has no free file descriptors.
        """
        state = self.runtime.state
        if state not in (RuntimeState.OPEN, RuntimeState.DRAINING):
            raise RuntimeBroken(f"replica {self.place.unique_id} of {self.place.deployment!r}: its runtime is {state}")
        if self.runtime.statistics().transport.unreachable:
            raise RuntimeBroken(f"replica {self.place.unique_id} of {self.place.deployment!r}: no reader can connect")


def this_replica() -> ReplicaPlace:
    """Return names, address and time limits of the replica in which this process runs.

    Raises:
        ConfigError: this process is no replica, or Ray is not installed.
    """
    try:
        import ray
        from ray import serve
        from ray.serve.exceptions import RayServeException
    except ImportError as error:
        raise ConfigError(f"ReplicaRuntime needs Ray Serve: {install_command('ray')} ({error})") from error
    try:
        context = serve.get_replica_context()
    except RayServeException as error:
        raise ConfigError(f"ReplicaRuntime: this process is not a replica of Ray Serve: {error}") from error
    deployment = context._deployment_config  # only this has the replica's shutdown timeout
    return ReplicaPlace(
        app=context.app_name,
        deployment=context.deployment,
        unique_id=context.replica_tag,
        node_ip=ray.util.get_node_ip_address(),
        shutdown_timeout_s=deployment.graceful_shutdown_timeout_s,
        wait_loop_s=deployment.graceful_shutdown_wait_loop_s,
    )
