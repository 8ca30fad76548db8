"""The runtime that a part belongs to, as the part knows it: for parts that are used through verbs of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvflow.errors import ConfigError, UsageError
from kvflow.runtime.statistics import RuntimeState

if TYPE_CHECKING:
    from kvflow.runtime.assembly import RegisteredCache
    from kvflow.runtime.part import Part
    from kvflow.runtime.supervisor import Supervisor


class PartOwner:
    """The runtime of a part. It may be another one once the runtime is closed."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._runtime: Supervisor | None = None

    @property
    def registered(self) -> bool:
        """True while the runtime has a registered cache, also one that is being unregistered."""
        return self._runtime is not None and self._runtime.held is not None

    @property
    def open(self) -> bool:
        """True while the runtime takes new work."""
        return self._runtime is not None and self._runtime.state is RuntimeState.OPEN

    def begin(self, runtime: Supervisor) -> None:
        """Take the runtime whose cache is registered. Raises ConfigError if the part is at work for another one."""
        before = self._runtime
        if before not in (None, runtime) and before.state is not RuntimeState.CLOSED:
            raise ConfigError(f"{self._part!r}: it is a part of another runtime, {before}")
        self._runtime = runtime

    def require(self, what: str, *, new_work: bool = True) -> RegisteredCache:
        """Return the registered cache for a verb.

        Args:
            what: the verb, for the error.
            new_work: True if the verb begins something, which a runtime that drains refuses.

        Raises:
            UsageError: the part has no runtime with a registered cache, or this is not the runtime's loop.
            RuntimeUnavailable, RuntimeBroken: as for loads.
        """
        if self._runtime is None:
            raise UsageError(f"{what}: {self._part!r} is a part of no runtime whose KV cache was registered")
        self._runtime.require(what, new_work=new_work)
        return self._runtime.require_cache()
