"""DeadlineProof: how long a stock producer's blocks can be trusted, computed from times, since it has no seals.

A stock producer keeps a prompt's blocks for `lease_s` from the end of the request. It does not say when that was, and
frees the blocks without a message. The reader knows when the parameters arrived. If the router took less than
`router_s` to bring them, and no other engine has used them, the blocks are held until `arrival + lease_s - router_s`.
This is the first bound.

A heartbeat extends the lease to `lease_s * 2/3` from the moment at which the producer's worker takes the heartbeat. The
worker takes heartbeats before it looks for expired leases. Nothing confirms a heartbeat, and a heartbeat is dropped if
it comes before the worker knows the request. So a heartbeat moves the bound only if it was sent at least `settle_s`
after the arrival, and at least `allowance_s` before the bound at that time. After one gap, or one message that could
not be sent, the bound stays where it is for good.

A read that ends after the bound is refused, whatever has landed. This is weaker than a seal: whether the two conditions
hold depends on the router and on other engines, and kvflow cannot check it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvflow import checks
from kvflow.checks import Seconds
from kvflow.core.protocol.proof import Step
from kvflow.errors import ConfigError


class Arrival(NamedTuple):
    """Time at which parameters arrived, on the clock of `machine`. It says nothing about other machines' clocks."""

    machine: str
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Assumptions about stock producers and routers, in seconds. ConfigError if they leave no time of a lease."""

    lease_s: Seconds = 30.0
    """Seconds that a producer keeps the blocks of an offer: its `kv_lease_duration`."""
    router_s: Seconds = 5.0
    """Longest time from the end of a request until its parameters reach this engine."""
    settle_s: Seconds = 10.0
    """Seconds after the parameters' arrival by which the producer's worker knows the request."""
    allowance_s: Seconds = 1.0
    """Longest time that a message takes to a producer."""

    def __post_init__(self) -> None:
        checks.settle(self, ConfigError)
        if self.router_s + self.allowance_s >= self.lease_s:
            spent = f"router_s {self.router_s} and allowance_s {self.allowance_s}"
            raise ConfigError(f"stock: {spent} leave nothing of lease_s {self.lease_s}")

    @property
    def extension_s(self) -> float:
        """Seconds that a lease lasts after a heartbeat; vLLM counts whole seconds."""
        return float(int(self.lease_s) * 2 // 3)

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats."""
        return max(self.lease_s / 6, 0.05)


class DeadlineProof:
    """Proof of what is read from one rank of a stock producer for one request; the counterpart of `SealProof`."""

    kind = "deadline"
    grows = looking = over = failed = False
    """Always False: there is nothing to look at, and nothing is reported before the end."""

    def __init__(
        self,
        arrived_s: float,
        terms: Terms,
        now_s: Callable[[], float],
        unsent: Callable[[], int],
        *,
        request_id: str = "",
        agent: str = "",
    ) -> None:
        """`unsent` returns how many messages could not be sent so far; `agent` is the rank's present agent."""
        self.request_id, self.agent = request_id, agent
        self.asked = True
        """Always True: there is no seal to fetch."""
        self.seen_s = -math.inf
        self.bound_s = arrived_s + terms.lease_s - terms.router_s
        """Time on this engine's clock until which the blocks are held, as far as is known."""
        self._settled_s = arrived_s + terms.settle_s
        self._terms = terms
        self._now_s = now_s
        self._unsent = unsent
        self._unsent_before = unsent()
        self._beats: list[float] = []

    def beat(self) -> None:
        """Note that a heartbeat is being sent to every rank of the producer that is read from."""
        now_s = self._now_s()
        if now_s >= self._settled_s:
            self._beats.append(now_s)

    def surely_until_s(self) -> float:
        """Return the bound, moved by the heartbeats that have arrived by now."""
        now_s, terms = self._now_s(), self._terms
        if self._unsent() != self._unsent_before:  # one of the unsent messages may be a heartbeat of this request
            self._beats.clear()
            return self.bound_s
        while self._beats and self._beats[0] + terms.allowance_s <= now_s:
            sent_s = self._beats.pop(0)
            if sent_s + terms.allowance_s < self.bound_s:
                self.bound_s = max(self.bound_s, sent_s + terms.extension_s - terms.allowance_s)
        return self.bound_s

    def there(self, num_tokens: int) -> int:
        """Return `num_tokens`: all tokens were computed before the parameters left."""
        return num_tokens

    def before(self) -> Step:
        """Return POST if the bound has not passed, else STALE; see `SealProof.before`."""
        return Step.POST if self._now_s() < self.surely_until_s() else Step.STALE

    def after(self, read_s: float | None) -> Step:
        """Return FRESH if the bound has not passed right after the last byte, else STALE; see `SealProof.after`."""
        return Step.FRESH if self._now_s() < self.surely_until_s() else Step.STALE

    def anew(self) -> DeadlineProof:
        """Return the proof for another read under the same lease: the same proof."""
        return self

    def fetching(self) -> None:
        """Never called: no seal is ever fetched."""
        raise AssertionError("a stock producer has no seals")

    def heard(self, tokens_missing: int | None, posted_s: float) -> None:
        """Never called; see `fetching`."""
        self.fetching()
