"""DeadlineProof: computes the time until which a stock producer surely holds a prompt's blocks, since it has no seals.

A stock producer keeps a prompt's blocks for `lease_s` from the end of the request. It does not say when that was, and
frees the blocks without a message. The reader knows when the request's parameters arrived. If the router took less than
`router_s` to bring them, and no other engine has used them, the blocks are held until `arrival + lease_s - router_s`:
the first bound.

When a producer's worker takes a heartbeat, the lease lasts at least `lease_s * 2/3` from that moment. The worker takes
heartbeats before it looks for expired leases. Nothing confirms a heartbeat, and one that comes before the worker knows
the request is dropped. So a heartbeat moves the bound only if it was sent at least `settle_s` after the arrival, and at
least `allowance_s` before the bound at that time. After one gap between heartbeats, or one message that could not be
sent, the bound stays where it is for good.

A read that ends after the bound is refused, whatever has landed. This is weaker than a seal: kvflow cannot check
whether the router was fast enough and no other engine used the parameters, nor notice that a hypervisor has paused this
machine and all of its clocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvflow import checks
from kvflow.checks import Seconds
from kvflow.core.protocol.proof import ProofStep
from kvflow.errors import ConfigError


class Arrival(NamedTuple):
    """Time at which a request's parameters arrived at the engine, on the clock of one machine.

    `now_s` can be compared only with times of the same machine; `machine` is the machine's id.
    """

    machine: str
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Times that a deployment promises for its stock producers and routers. kvflow cannot check them.

    ConfigError if `router_s` and `allowance_s` leave nothing of `lease_s` for a read.
    """

    lease_s: Seconds = 30.0
    """Seconds for which a producer keeps a prompt's blocks after the request's end: vLLM's `kv_lease_duration`."""
    router_s: Seconds = 5.0
    """Seconds, at most, from the end of a prefill request until its parameters reach this engine."""
    settle_s: Seconds = 10.0
    """Seconds from the arrival of a request's parameters at this engine until the producer's worker surely knows the
    request."""
    allowance_s: Seconds = 1.0
    """Seconds that a notification takes to reach a producer, at most."""

    def __post_init__(self) -> None:
        checks.normalize_fields(self, ConfigError)
        if self.router_s + self.allowance_s >= self.lease_s:
            spent = f"router_s {self.router_s} and allowance_s {self.allowance_s}"
            raise ConfigError(f"stock: {spent} leave nothing of lease_s {self.lease_s}")

    @property
    def extension_s(self) -> float:
        """Seconds that a lease lasts after a heartbeat: two thirds of `lease_s`, a whole number as in vLLM."""
        return float(int(self.lease_s) * 2 // 3)

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats for a request."""
        return max(self.lease_s / 6, 0.05)


class DeadlineProof:
    """Proof, by computed times, that a stock rank still held a request's blocks while they were read.

    A load from stock ranks has this proof in place of `SealProof`, which is for kvflow's own producers.
    """

    kind = "deadline"
    grows = fetch_under_way = lease_ended = failed = False
    """Always False. `SealProof` needs these attributes for seals and growing leases; stock producers have neither."""

    def __init__(
        self,
        arrived_s: float,
        terms: Terms,
        now_s: Callable[[], float],
        unsent: Callable[[], int],
        replaced: Callable[[], bool] = lambda: False,
        *,
        request_id: str = "",
        incarnation: str = "",
    ) -> None:
        """Create the proof for a request with parameters that arrived at `arrived_s`, on the clock `now_s`.

        `unsent` returns the number of notifications that this engine could not send so far, to any producer.
        `replaced` returns whether the stock rank has meanwhile restarted, or registered its cache again: then it holds
        nothing. `incarnation` names the registration that the proof is for.
        """
        self.request_id, self.incarnation = request_id, incarnation
        self.fetch_posted = True
        """Always True, as if a seal had been fetched, so that loads fetch none: a stock producer has no seal."""
        self.last_open_s = -math.inf
        self.bound_s = arrived_s + terms.lease_s - terms.router_s
        """Time on this engine's clock until which the producer surely holds the blocks."""
        self._known_from_s = arrived_s + terms.settle_s
        self._terms = terms
        self._now_s = now_s
        self._unsent = unsent
        self._replaced = replaced
        self._unsent_before = unsent()
        self._heartbeats_s: list[float] = []

    def note_heartbeat(self) -> None:
        """Record that a heartbeat for the request is being sent to the stock rank now.

        A heartbeat does not count before the rank surely knows the request.
        """
        now_s = self._now_s()
        if now_s >= self._known_from_s:
            self._heartbeats_s.append(now_s)

    def held_until_s(self) -> float:
        """Return the time until which the producer surely holds the blocks.

        Heartbeats that have surely arrived by now extend that time.
        """
        now_s, terms = self._now_s(), self._terms
        if self._replaced():
            return -math.inf
        if self._unsent() != self._unsent_before:  # one of the unsent messages may be a heartbeat of this request
            self._heartbeats_s.clear()
            return self.bound_s
        while self._heartbeats_s and self._heartbeats_s[0] + terms.allowance_s <= now_s:
            sent_s = self._heartbeats_s.pop(0)
            if sent_s + terms.allowance_s < self.bound_s:
                self.bound_s = max(self.bound_s, sent_s + terms.extension_s - terms.allowance_s)
        return self.bound_s

    def readable_tokens(self, num_tokens: int) -> int:
        """Return `num_tokens`: a stock producer sends parameters only once all tokens are computed."""
        return num_tokens

    def judge_before_post(self) -> ProofStep:
        """Return POST if a read may begin, or STALE if the producer may have freed the blocks by now."""
        return ProofStep.POST if self._now_s() < self.held_until_s() else ProofStep.STALE

    def judge_after_read(self, read_s: float | None) -> ProofStep:
        """After a read's last byte has landed, return FRESH if the producer surely still holds the blocks, else STALE.

        `read_s` is not used.
        """
        return ProofStep.FRESH if self._now_s() < self.held_until_s() else ProofStep.STALE

    def fresh_copy(self) -> DeadlineProof:
        """Return this proof itself, since its bound also holds for another read of the same blocks."""
        return self

    def note_read_posted(self) -> None:
        """Do nothing: each read is judged by the time of its end."""

    def note_fetch_posted(self) -> None:
        """Raise AssertionError: a stock producer has no seal to fetch."""
        raise AssertionError("a stock producer has no seals")

    def note_fetched(self, tokens_missing: int | None, posted_s: float) -> None:
        """Raise AssertionError: a stock producer has no seal to fetch."""
        self.note_fetch_posted()
