"""Place of a replica of Ray Serve: its address and name, the Config that follows, and how long it may drain. Pure.

Serve stops a replica in three steps: it waits until no request is under way, looking every wait loop; it awaits
`__del__`; it kills the process once `graceful_shutdown_timeout_s` have passed since the beginning. A lease that is open
is nobody's request, so leases are what `__del__` waits for, and its deadline has to leave time to close.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvflow import checks
from kvflow.config import Config
from kvflow.errors import ConfigError
from kvflow.hosts import address_at

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


def config_of(place: ReplicaPlace, settings: dict[str, Any]) -> Config:
    """The Config of a replica's runtime. `settings` are fields of it, and go before what follows from the place.

    Raises:
        ConfigError: a setting cannot be right, or there is no such one.
    """
    own = {"engine_id": place.engine_id, "listen": address_at(place.node_ip, 0), "drain_timeout_s": SETTLE_S}
    return Config(**{**own, **settings})


def drain_deadline_s(place: ReplicaPlace, config: Config, wanted_s: float | None = None) -> float:
    """Time a replica's leases and loads may take to end: as long as is wanted, or as there is time for.

    Args:
        place: with the deployment's times.
        config: its bounds on what follows the deadline.
        wanted_s: seconds; None is all that is left.

    Raises:
        ConfigError: it does not fit: Serve would kill the replica while it drains or closes.
    """
    left_s = time_to_drain_s(place, config)
    least_s = DRAIN_LEAST_S if wanted_s is None else checks.seconds(wanted_s, "drain_deadline_s", error=ConfigError)
    if left_s < least_s:
        needed_s = least_s + place.shutdown_timeout_s - left_s
        raise ConfigError(
            f"deployment {place.deployment!r}: graceful_shutdown_timeout_s: {place.shutdown_timeout_s:g}, but "
            f"{needed_s:g} are needed: {place.wait_loop_s:g} for graceful_shutdown_wait_loop_s, {least_s:g} to drain, "
            f"{_closing_s(config):g} to end and close"
        )
    return left_s if wanted_s is None else wanted_s


def time_to_drain_s(place: ReplicaPlace, config: Config) -> float:
    """Time that the deployment's settings leave for a drain; less than 0 if they are too short even without one."""
    return place.shutdown_timeout_s - place.wait_loop_s - _closing_s(config)


def _closing_s(config: Config) -> float:
    """Longest time after a drain's deadline: leases and loads are ended, then the runtime is closed."""
    return config.ending_s + config.limits.goodbye_timeout_s + config.limits.transport_close_timeout_s
