"""Offers of a connector's worker: the leases of the prompts that its engine has saved, from save to end.

The engine waits for the end of a lease whose ticket is out (`send`); one that is withdrawn before is not its affair any
more. All of it runs on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass

from kvflow.connector.step import Grow, Save, SendOn, Step
from kvflow.core.plan.descriptors import given_block_ids
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.protocol.prompts import with_marks
from kvflow.errors import KVFlowError
from kvflow.logs import logger_of
from kvflow.runtime.producer.lease import Lease, ServeRequest
from kvflow.runtime.producer.open_lease import LeaseOutcome
from kvflow.runtime.runtime import Runtime

logger = logger_of(__name__)

_RECALLED = "its prompt was preempted"
_BROKEN_OFF = "its request has ended"


@dataclass(frozen=True, slots=True)
class OfferEnded:
    """A lease has ended. `sent` if the engine waits for that."""

    request_id: str
    outcome: LeaseOutcome
    sent: bool


@dataclass(slots=True, eq=False)
class _Offered:
    """A saved prompt: its lease, if there is one, and whether the engine waits for its end."""

    request_id: str
    ttl_s: float
    flows: bool
    """True if it is read while its prompt is computed."""
    restart: asyncio.TimerHandle | None = None
    """Timer that begins its time anew, as long as its ticket is not out."""
    lease: Lease | None = None
    outcome: LeaseOutcome | None = None
    sent: bool = False

    def let_run(self) -> None:
        """Let its time run out from now on."""
        if self.restart is not None:
            self.restart.cancel()
            self.restart = None


class Offers:
    """All saved prompts of a worker. `tell` is called with each end that the engine has to know."""

    def __init__(
        self, tell: Callable[[OfferEnded], None], spawn: Callable[[Coroutine[None, None, None]], None]
    ) -> None:
        self._tell = tell
        self._spawn = spawn
        self._open: dict[str, _Offered] = {}
        self.withdrawn: set[Lease] = set()
        """Leases that were ended here, and whose blocks are still held for a moment."""

    def get(self, request_id: str) -> _Offered | None:
        """The offer of a request, until its end is told."""
        return self._open.get(request_id)

    def recall(self, step: Step) -> list[Awaitable[object]]:
        """End leases that may be being read; no read of them can succeed once all of these have been awaited."""
        sent, ended = {send.request_id for send in step.send}, list[Awaitable[object]]()
        for request_id in step.recall:
            offer = self._open.get(request_id) if request_id in sent else self._open.pop(request_id, None)
            if offer is not None and offer.lease is not None and offer.outcome is None:
                offer.let_run()
                offer.lease.fail(_RECALLED)
                ended.append(offer.lease.wait())
        return ended

    def save(self, runtime: Runtime, save: Save, ready: DeviceEvent | None) -> None:
        """Open the lease of a prompt that the step has computed, or begins to."""
        request = ServeRequest(
            save.serve_id,
            block_ids=given_block_ids(save.block_tables),
            num_tokens=save.num_tokens,
            ttl_s=save.ttl_s,
            ready=ready,
            computed_tokens=save.computed_tokens,
            prompt=with_marks(save.prompt, save.marks),
            extends=save.computed_tokens is not None,
        )
        offer = self._open[save.request_id] = _Offered(save.request_id, save.ttl_s, flows=request.extends)
        try:
            lease = offer.lease = runtime.serve_blocks(request)
        except KVFlowError as error:
            logger.warning("request %s: its prompt is not offered: %s", save.request_id, error)
            offer.outcome = LeaseOutcome.REVOKED
            if offer.flows:
                decline(runtime, save.serve_id, f"{type(error).__name__}: {error}")
            return
        self._keep(offer, lease)
        self._spawn(self._watch(offer, lease))

    def grow(self, grow: Grow, ready: DeviceEvent | None) -> None:
        """Offer more of a prompt."""
        offer = self._open[grow.request_id]
        if offer.lease is None or offer.outcome is not None:
            return
        try:
            if any(grow.block_tables):
                offer.lease.extend(given_block_ids(grow.block_tables))
            offer.lease.advance(grow.num_tokens, ready)
        except KVFlowError as error:  # such as host buffers that are full
            logger.warning("request %s: its prompt is not offered any more: %s", grow.request_id, error)
            offer.lease.fail(f"{type(error).__name__}: {error}")

    def _keep(self, offer: _Offered, lease: Lease) -> None:
        """Begin its time anew until its ticket is out: nobody can read it before."""
        lease.restart(offer.ttl_s)
        offer.restart = asyncio.get_running_loop().call_later(offer.ttl_s / 3, self._keep, offer, lease)

    async def _watch(self, offer: _Offered, lease: Lease) -> None:
        try:
            offer.outcome = await lease
        finally:
            offer.let_run()
        self.withdrawn.discard(lease)
        self._report_if_over(offer)

    def send(self, request_id: str) -> None:
        """Begin the time of a lease whose ticket is out: the engine waits for its end."""
        offer = self._open[request_id]
        offer.sent = True
        if offer.lease is not None:
            offer.lease.restart(offer.ttl_s)
        offer.let_run()
        self._report_if_over(offer)

    def withdraw(self, request_id: str) -> None:
        """End a lease that is not to be read any more."""
        offer = self._open.get(request_id)
        if offer is None:
            return  # its end is on its way to the engine
        if not offer.sent:
            del self._open[request_id]
        offer.let_run()
        if offer.lease is not None and offer.outcome is None:
            if offer.flows:
                offer.lease.fail(_BROKEN_OFF)
            else:
                offer.lease.revoke()
            self.withdrawn.add(offer.lease)
        self._report_if_over(offer)

    def _report_if_over(self, offer: _Offered) -> None:
        """Report a lease that has ended, once the engine waits for that, or has let it go."""
        current = self._open.get(offer.request_id) is offer
        if offer.outcome is not None and (offer.sent or not current):
            self._tell(OfferEnded(offer.request_id, offer.outcome, offer.sent))
            if current:
                del self._open[offer.request_id]


def send_on(runtime: Runtime, sent_on: SendOn) -> None:
    """Send readers on that wait for a prompt at another engine."""
    name = sent_on.awaited.request_id
    try:
        runtime.decline(name, sent_on.reason, at=sent_on.awaited, instead=sent_on.instead)
    except KVFlowError as error:  # such as a runtime that is about to close
        logger.warning("request %s: its readers are not sent on: %s", name, error)


def decline(runtime: Runtime, serve_id: str, reason: str) -> None:
    """Tell those who wait for a prompt that it is not to be had."""
    try:
        runtime.decline(serve_id, reason)
    except KVFlowError as error:  # such as one of the same name that is
        logger.warning("request %s: %s", serve_id, error)
