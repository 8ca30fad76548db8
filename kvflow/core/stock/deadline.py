"""Deadlines of what a stock producer offers: by arithmetic, since nothing there can be looked at.

A stock producer keeps a prompt's blocks for `lease_s` from the end of its request, tells nobody when that was, and
frees them without a word. A reader knows when the parameters came to it. So if the router took less than `router_s`
from the producer's last token to this engine, and if nobody else has used the parameters, the blocks are held until
`arrival + lease_s - router_s`; that is the first bound.

A heartbeat gives them `lease_s * 2/3` anew from the moment at which the producer's worker takes it, and it takes those
that have come before it looks for leases that are over. Nothing confirms one, and those that come before the worker
knows of the request are dropped. So a heartbeat moves the bound only if it was sent `settle_s` after the arrival or
later, and if the bound that stood then left it `allowance_s` to get there. One gap, or one message that could not be
sent, ends that for good: the bound stays where it was.

What ends later than the bound is refused, whatever has landed. That is weaker than a seal: both premises are others'.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvflow import checks
from kvflow.core.protocol.proof import Step
from kvflow.errors import ConfigError


class Arrival(NamedTuple):
    """Time at which parameters came, on the clock of a machine; other machines' clocks say nothing about it."""

    machine: str
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Assumptions about stock producers and routers, in seconds. ConfigError for terms under which nothing lasts."""

    lease_s: float = 30.0
    """Time for which a producer keeps what it has offered: its `kv_lease_duration`."""
    router_s: float = 5.0
    """Parameters reach this engine within so much of the end of their request."""
    settle_s: float = 10.0
    """A producer's worker knows of a request so much after its parameters have come here."""
    allowance_s: float = 1.0
    """A message gets to a producer within so much."""

    def __post_init__(self) -> None:
        checks.settle_fields(self, {"float": lambda value, name: checks.seconds(value, name, error=ConfigError)})
        if self.router_s + self.allowance_s >= self.lease_s:
            left = (
                f"router_s {self.router_s} and allowance_s {self.allowance_s} leave nothing of lease_s {self.lease_s}"
            )
            raise ConfigError(f"stock: {left}")

    @property
    def extension_s(self) -> float:
        """Seconds that a heartbeat gives; vLLM counts in whole seconds."""
        return float(int(self.lease_s) * 2 // 3)

    @property
    def heartbeat_s(self) -> float:
        """Seconds from one heartbeat to the next."""
        return max(self.lease_s / 6, 0.05)


class DeadlineProof:
    """Proof of one load's read from a stock producer: it stands where `SealProof` stands for one with a seal.

    `unsent` tells how many messages could not be sent so far.
    """

    kind = "deadline"
    """See `SealProof.kind`."""
    __slots__ = (
        "_beats",
        "_now_s",
        "_settled_s",
        "_terms",
        "_unsent",
        "_unsent_before",
        "asked",
        "bound_s",
        "grows",
        "seen_s",
    )

    def __init__(self, arrived_s: float, terms: Terms, now_s: Callable[[], float], unsent: Callable[[], int]) -> None:
        self.asked = True
        """True: there is no seal to fetch."""
        self.grows = False
        self.seen_s = -math.inf
        self.bound_s = arrived_s + terms.lease_s - terms.router_s
        """Time on our clock until which the blocks are held, as far as is known."""
        self._settled_s = arrived_s + terms.settle_s
        self._terms = terms
        self._now_s = now_s
        self._unsent = unsent
        self._unsent_before = unsent()
        self._beats: list[float] = []

    def beat(self) -> None:
        """A heartbeat is being sent, to every rank of the producer that we read from."""
        now_s = self._now_s()
        if now_s >= self._settled_s:
            self._beats.append(now_s)

    def surely_until_s(self) -> float:
        """The bound, with the heartbeats that have got there by now."""
        now_s, terms = self._now_s(), self._terms
        if self._unsent() != self._unsent_before:  # one of them may be ours
            self._beats.clear()
            return self.bound_s
        while self._beats and self._beats[0] + terms.allowance_s <= now_s:
            sent_s = self._beats.pop(0)
            if sent_s + terms.allowance_s < self.bound_s:
                self.bound_s = max(self.bound_s, sent_s + terms.extension_s - terms.allowance_s)
        return self.bound_s

    @property
    def looking(self) -> bool:
        """False, ever: there is nothing to look at."""
        return False

    @property
    def over(self) -> bool:
        """False, ever: nothing tells of it before the end."""
        return False

    @property
    def failed(self) -> bool:
        """See `over`."""
        return False

    def there(self, num_tokens: int) -> int:
        """All was computed before its parameters left."""
        return num_tokens

    def before(self, now_s: float) -> Step:
        """See `SealProof.before`."""
        return Step.POST if now_s < self.surely_until_s() else Step.STALE

    def after(self, read_s: float | None) -> Step:
        """See `SealProof.after`: right after the last byte."""
        return Step.FRESH if self._now_s() < self.surely_until_s() else Step.STALE

    def anew(self) -> DeadlineProof:
        """A fresh proof for another read under the same lease."""
        return self

    def fetching(self) -> None:
        """Never called: no seal is ever fetched."""
        raise AssertionError("a stock producer has no seals")

    def heard(self, tokens_missing: int | None, posted_s: float) -> None:
        """See `fetching`."""
        self.fetching()
