"""ReplicaRuntime: the runtime of one replica of Ray Serve.

Serve stops a replica in three steps: it waits until no request is under way, looking every wait loop; it awaits
`__del__`; it kills the process once `graceful_shutdown_timeout_s` have passed since the beginning. Serve does not see a
replica's open leases, so `__del__` drains them (`drain`), and its deadline has to leave time to close. Serve calls a
replica's methods in different tasks, so a replica keeps its ReplicaRuntime in a `Lifetime`:

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

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kvflow import checks
from kvflow.config import Config
from kvflow.core.plan.topology import Rank
from kvflow.errors import ConfigError, RuntimeBroken
from kvflow.extras import install_line
from kvflow.hosts import address_at
from kvflow.runtime.part import Part
from kvflow.runtime.records import Observer
from kvflow.runtime.runtime import Runtime
from kvflow.runtime.statistics import RuntimeState
from kvflow.runtime.world import World

_SHORTEST_S = 1e-3
SETTLE_S = 1.0
"""The default of Config.drain_timeout_s here: after its own deadline a drain only waits for what it has ended."""

DRAIN_LEAST_S = 1.0
"""Least time that a replica has to have for its leases, where nobody says how long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlace:
    """A replica, as Serve knows it. Times are seconds."""

    app: str
    deployment: str
    unique_id: str
    """Id of the replica's actor: one that is started again has another."""
    node_ip: str
    shutdown_timeout_s: float
    """The deployment's `graceful_shutdown_timeout_s`."""
    wait_loop_s: float
    """The deployment's `graceful_shutdown_wait_loop_s`."""

    @property
    def engine_id(self) -> str:
        """The engine id of the replica; one that is started again is another engine."""
        return f"{self.deployment}-{self.unique_id}"

    def config(self, settings: dict[str, Any]) -> Config:
        """Return the Config of the replica's runtime.

        Args:
            settings: fields of it, which go before what follows from the place.

        Returns:
            The Config.

        Raises:
            ConfigError: a setting cannot be right, or there is no such one.
        """
        own = {"engine_id": self.engine_id, "listen": address_at(self.node_ip, 0), "drain_timeout_s": SETTLE_S}
        return Config(**{**own, **settings})

    def drain_deadline_s(self, config: Config, wanted_s: float | None = None) -> float:
        """Return how long the replica's leases and loads may take to end.

        Args:
            config: its bounds on what follows the deadline.
            wanted_s: seconds; None is all that is left.

        Returns:
            As long as is wanted, or as there is time for.

        Raises:
            ConfigError: it does not fit: Serve would kill the replica while it drains or closes.
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
        """Return the time that the deployment's settings leave for a drain.

        Args:
            config: its bounds on what follows a drain.

        Returns:
            Seconds; less than 0 if they are too short even without a drain.
        """
        return self.shutdown_timeout_s - self.wait_loop_s - _closing_s(config)


def _closing_s(config: Config) -> float:
    """Longest time after a drain's deadline: leases and loads are ended, then the runtime is closed."""
    return config.ending_s + config.limits.goodbye_timeout_s + config.limits.transport_close_timeout_s


class ReplicaRuntime:
    """A runtime whose Config follows from its replica. An async context; its `runtime` is used as any other.

    Args:
        place: where the replica is; None asks Serve, which has to be asked in a replica.
        drain_deadline_s: how long leases and loads may take to end when the replica goes, in seconds; None is as long
            as the deployment's `graceful_shutdown_timeout_s` leaves.
        observers: are told how loads and leases have ended, as a Runtime's.
        world: for tests, as a Runtime's.
        parts: capabilities beside the core, as a Runtime's.
        settings: fields of `kvflow.Config`, such as `model` and ranks. By default `engine_id` is the deployment and the
            replica's unique id, and `listen` is any free port of the node's address.

    Raises:
        ConfigError: it is in no replica, a setting cannot be right, or the deadline does not fit.
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
        self._look = this_replica if place is None else lambda: place
        self.place = self._look()
        config = self.place.config(settings)
        self.drain_deadline_s = self.place.drain_deadline_s(config, drain_deadline_s)
        self.runtime = Runtime(config, observers=observers, world=world, parts=parts)

    def __repr__(self) -> str:
        return f"<kvflow.ReplicaRuntime {self.runtime!r} on {self.place.node_ip}>"

    async def __aenter__(self) -> Self:
        """Open the runtime. Raises ConfigError if it cannot be; cancelling leaves it closed."""
        await self.runtime.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the runtime: what was not drained gets Config.drain_timeout_s."""
        await self.runtime.aclose()

    async def drain(self) -> bool:
        """Take no new work, let leases and loads end, and end those that are left at the deadline.

        To be called by the replica that goes, before it ends the tasks that hold the leases' blocks. Bounded by
        `drain_deadline_s` and what `Runtime.drain` adds; by less if the deployment was given less time meanwhile, which
        Serve does without starting replicas again. Cancelling stops the waiting.

        Returns:
            True if everything ended before the deadline; False also if the runtime had ended before.
        """
        if self.runtime.state not in (RuntimeState.OPEN, RuntimeState.DRAINING):
            return False  # what was open has ended with it
        left_s = self._look().time_to_drain_s(self.runtime.config)
        return await self.runtime.drain(max(min(self.drain_deadline_s, left_s), _SHORTEST_S))

    def metadata(self) -> dict[str, Any]:
        """Address and name of the replica: for `record_replica_metadata`, and for who prewarms (`kvflow.ray.peers`).

        Returns:
            Engine, side channel's address, node and rank, in JSON types.

        Raises:
            RuntimeBroken, RuntimeClosed: as for `Runtime.address`.
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
        """Counts of what is open and what is free now: for `record_routing_stats`.

        Returns:
            The state, and counts of free blocks, open leases and open loads, in JSON types.
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
        """Raise if the runtime can do no more work, so that Serve replaces the replica: for `check_health`.

        Raises:
            RuntimeBroken: a service of the runtime died, it was closed though the replica was not told to go, or no new
                reader can connect to it, since open files ran out.
        """
        state = self.runtime.state
        if state not in (RuntimeState.OPEN, RuntimeState.DRAINING):
            raise RuntimeBroken(f"replica {self.place.unique_id} of {self.place.deployment!r}: its runtime is {state}")
        if self.runtime.statistics().transport.deaf:
            raise RuntimeBroken(f"replica {self.place.unique_id} of {self.place.deployment!r}: no reader can connect")


def this_replica() -> ReplicaPlace:
    """The replica that this process is.

    Raises:
        ConfigError: it is none, or Ray is not installed.
    """
    try:
        import ray
        from ray import serve
        from ray.serve.exceptions import RayServeException
    except ImportError as error:
        raise ConfigError(f"ReplicaRuntime needs Ray Serve: {install_line('ray')} ({error})") from error
    try:
        context = serve.get_replica_context()
    except RayServeException as error:
        raise ConfigError(f"ReplicaRuntime: this process is no replica of Ray Serve: {error}") from error
    deployment = context._deployment_config  # the one place that says how long a replica may take to go
    return ReplicaPlace(
        app=context.app_name,
        deployment=context.deployment,
        unique_id=context.replica_tag,
        node_ip=ray.util.get_node_ip_address(),
        shutdown_timeout_s=deployment.graceful_shutdown_timeout_s,
        wait_loop_s=deployment.graceful_shutdown_wait_loop_s,
    )
