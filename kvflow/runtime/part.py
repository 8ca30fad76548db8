"""Parts: capabilities that a runtime is given beside its core, in a list, in the order in which they are walked."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvflow.core.protocol import messages
    from kvflow.runtime.assembly import RegisteredCache
    from kvflow.runtime.channel.protocol import Answered
    from kvflow.runtime.supervisor import Supervisor


class Ending(enum.Enum):
    """Reason for which a part ends what it has under way."""

    CLOSED = enum.auto()
    """The runtime is closed, or has drained."""
    UNREGISTERED = enum.auto()
    """The cache is unregistered; another one may be registered later."""
    ABANDONED = enum.auto()
    """The event loop is gone, or Python ends: nothing can be awaited any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatistics:
    """Counts of a part. Parts have counts of their own beside."""

    open_requests: int
    """Requests that the part has under way."""


class Part:
    """A capability beside the core: `Runtime(config, parts=[...])`. It is used through its own object.

    A part belongs to one runtime at a time, which calls the methods below on its loop: `registered` first, and the
    others only if it has returned. The core calls nothing else of it, and parts do not know each other. What a part
    does not need it leaves as it is here.
    """

    name: str
    """Name in `RuntimeStatistics.parts`, in logs and in errors."""
    answers: Mapping[type[messages.ReaderRequest], Callable[[Any], Answered]] = {}
    """Answers to the requests of peers that are this part's, by type; they never wait. Only these types are decoded."""

    async def registered(self, runtime: Supervisor, cache: RegisteredCache) -> None:
        """Begin with a cache that is being registered. Cancelling leaves the part without one.

        Args:
            runtime: of the part.
            cache: with its memory and what loads and leases of it are made with.

        Raises:
            ConfigError: the cache cannot be registered with this part.
        """

    def end(self, why: Ending, wait_s: float = 0.0) -> None:
        """Take no more work, and have what is under way end soon.

        Args:
            why: the reason.
            wait_s: seconds that an abandoned part may wait for its threads.
        """

    async def drained(self) -> None:
        """Wait until nothing is under way. Cancelling stops the waiting."""

    async def closed(self, timeout_s: float) -> str:
        """Let go of the cache: no read is under way any more.

        Args:
            timeout_s: seconds that it may take.

        Returns:
            What went wrong, or "".
        """
        return ""

    @property
    def statistics(self) -> PartStatistics | None:
        """Counts now; None without a registered cache."""
        return None
