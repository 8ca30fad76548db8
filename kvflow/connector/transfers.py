"""A connector worker's transfers on the loop: loads, leases of saved prompts and questions to peers.

The engine's thread hands steps over (`connector.worker`) and takes what has happened; everything between runs here, in
tasks of one loop. Whatever ends is told once, and a task that dies is the `problem`.

The engine waits for the end of a lease whose ticket is out (`Step.send`); one that is withdrawn before is not its
affair any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from kvflow.connector.parameters import name_of
from kvflow.connector.prefix_questions import PrefixOutcome
from kvflow.connector.step import BlockTables, Decline, Grow, Question, Receive, Save, Step
from kvflow.core.plan.descriptors import given_block_ids
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.protocol.prompts import with_marks
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import KVFlowError
from kvflow.logs import logger_of
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.requests import LoadReport, LoadRequest
from kvflow.runtime.producer.lease import Lease, LeaseOutcome, ServeRequest
from kvflow.runtime.runtime import Runtime

if TYPE_CHECKING:
    from kvflow.connector.paged_prefix_cache import PagedPrefixCache
    from kvflow.connector.prefix_peers import PrefixPeers
    from kvflow.prefix import PinnedPrefix, SharedPrefixes

logger = logger_of(__name__)

_ANY_NUMBER = 1 << 31  # of blocks: nothing is pinned for a reader


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load has succeeded."""

    request_id: str
    report: LoadReport


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A load has failed, or was abandoned (`error` is None); its blocks are safe and hold nothing of use."""

    request_id: str
    block_tables: BlockTables
    error: KVFlowError | None


@dataclass(frozen=True, slots=True)
class OfferEnded:
    """A lease has ended. `sent` if the engine waits for that."""

    request_id: str
    outcome: LeaseOutcome
    sent: bool


@dataclass(frozen=True, slots=True)
class Answered:
    """Peers have been asked for a prefix."""

    request_id: str
    tickets: tuple[Ticket, ...]
    """Leased offers of peers, as much by each, the best first; none if nobody has anything that is worth its load."""
    outcome: PrefixOutcome
    total_s: float


Happening: TypeAlias = Loaded | LoadFailed | OfferEnded | Answered


@dataclass(slots=True, eq=False)
class _Reading:
    """A request that waits for blocks, or loads."""

    kept: ExitStack = field(default_factory=ExitStack)
    """Leases that are kept open for it."""
    load: Load | None = None
    abandoned: bool = False


@dataclass(slots=True, eq=False)
class SavedPrompt:
    """A saved prompt: its lease, if there is one, and whether the engine waits for its end."""

    save: Save
    restart: asyncio.TimerHandle | None = None
    """Timer that begins the lease's time anew, as long as its ticket is not out."""
    lease: Lease | None = None
    outcome: LeaseOutcome | None = None
    sent: bool = False

    @property
    def flows(self) -> bool:
        """True if it is read while its prompt is computed."""
        return self.save.computed_tokens is not None

    @property
    def open_lease(self) -> Lease | None:
        return self.lease if self.outcome is None else None

    def keep(self, lease: Lease) -> None:
        """Begin the lease's time anew until its ticket is out: nobody can read it before."""
        lease.restart(self.save.ttl_s)
        self.restart = asyncio.get_running_loop().call_later(self.save.ttl_s / 3, self.keep, lease)

    def let_run(self) -> None:
        """Let the lease's time run out from now on."""
        if self.restart is not None:
            self.restart.cancel()
            self.restart = None


class WorkerTransfers:
    """Loads, offers and questions of the engine's requests; lives on the loop."""

    def __init__(self, peers: PrefixPeers | None) -> None:
        self.peers = peers
        """Peers that prefixes are shared with, and asked for; None without `kvflow.prefix.Prefixes`."""
        self.happened: deque[Happening] = deque()
        """What has ended, until the engine's thread takes it."""
        self.problem: BaseException | None = None
        self.prefix_cache: PagedPrefixCache | None = None
        """Blocks shared with peers."""
        self.sharing: SharedPrefixes | None = None
        self.saved: dict[str, SavedPrompt] = {}
        """The prompt of each request that has an offer, until its end is told."""
        self._readings: dict[str, _Reading] = {}
        self._withdrawn: set[Lease] = set()
        """Leases that were ended here, and whose blocks are still held for a moment."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def carry_out(
        self, runtime: Runtime, step: Step, ready: DeviceEvent | None, after: DeviceEvent | None
    ) -> None:
        """Start everything, in the order in which it may touch the same blocks."""
        try:
            self._start(runtime, step, ready, after)
        except Exception as problem:  # noqa: BLE001 - a bug of ours; the engine gets it with its next step
            self.problem = problem

    def _start(self, runtime: Runtime, step: Step, ready: DeviceEvent | None, after: DeviceEvent | None) -> None:
        for request_id in step.send:
            self._send(self.saved[request_id])
        for release in step.release:
            self._forget(release.request_id)
            if release.last:
                self._release(runtime, release.tickets)
        for request_id, tickets in step.keep.items():
            self._keep(runtime, request_id, tickets)
        for request_id in step.withdraw:
            if request_id in self.saved:  # else its end is on its way to the engine
                self._withdraw(self.saved[request_id])
        for declined in step.decline:
            _decline(runtime, declined)
        for receive in step.receive:
            reading = self._readings.setdefault(receive.request_id, _Reading())
            self._spawn(self._receive(runtime, receive, reading, after), f"kvflow-receive {receive.request_id}")
        for request_id in step.abandon:
            if request_id in self._readings:  # else its end is on its way to the engine
                self._abandon(self._readings[request_id])
        for save in step.save:
            self._save(runtime, save, ready)
        for grow in step.grow:
            self._grow(self.saved[grow.request_id], grow, ready)

    # --- loads

    def _keep(self, runtime: Runtime, request_id: str, tickets: Sequence[Ticket]) -> None:
        reading = _Reading()
        try:
            for ticket in tickets:
                reading.kept.enter_context(runtime.keep_leases(ticket))
        except KVFlowError as error:
            reading.kept.close()
            logger.info("request %s: its leases are not kept: %s", request_id, error)
        else:
            self._readings[request_id] = reading

    def _forget(self, request_id: str) -> None:
        """Forget a request that reads nothing more: its leases are not kept any longer."""
        if request_id in self._readings:
            self._readings.pop(request_id).kept.close()

    def _abandon(self, reading: _Reading) -> None:
        reading.abandoned = True
        if reading.load is not None:
            reading.load.cancel()

    async def _receive(self, runtime: Runtime, receive: Receive, reading: _Reading, after: DeviceEvent | None) -> None:
        """Load the blocks of a request, and tell how that has ended once no byte can land in them any more.

        Task `kvflow-receive <request>`: one for each load of a connector's worker. Ends once its blocks are safe. The
        request of one that fails is reported as failed.
        """
        for lease in tuple(self._withdrawn):
            await lease  # its blocks may be ours now, and are kept for a moment after its end
        outcome: LoadReport | BaseException | None = None
        if not reading.abandoned:
            reading.load = runtime.start_load(_load_request(runtime, receive, after))
            (outcome,) = await asyncio.gather(reading.load, return_exceptions=True)
            reading.kept.close()
            await reading.load.settled()
        self._forget(receive.request_id)
        self._note_end(runtime, receive, outcome)

    def _note_end(self, runtime: Runtime, receive: Receive, outcome: LoadReport | BaseException | None) -> None:
        request_id = receive.request_id
        if isinstance(outcome, LoadReport):
            self.happened.append(Loaded(request_id, outcome))
            if self.peers is not None:
                self.peers.prefixes.learn(receive.tickets[0], outcome)
            return
        if outcome is not None and not isinstance(outcome, KVFlowError | asyncio.CancelledError):
            raise outcome
        error = outcome if isinstance(outcome, KVFlowError) else None
        self.happened.append(LoadFailed(request_id, receive.block_tables, error))
        logger.warning("request %s: its prompt was not received: %s", request_id, error or "abandoned")
        if (error is None or receive.release_if_failed) and not receive.shared:  # nobody will read it any more
            self._release(runtime, receive.tickets)

    def _release(self, runtime: Runtime, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._spawn(_release(runtime, ticket))

    # --- saved prompts

    def _save(self, runtime: Runtime, save: Save, ready: DeviceEvent | None) -> None:
        """Open the lease of a prompt that the step has computed, or begins to."""
        offer = self.saved[save.request_id] = SavedPrompt(save)
        request = ServeRequest(
            save.serve_id,
            block_ids=given_block_ids(save.block_tables),
            num_tokens=save.num_tokens,
            ttl_s=save.ttl_s,
            ready=ready,
            computed_tokens=save.computed_tokens,
            prompt=with_marks(save.prompt, save.marks),
            extends=offer.flows,
        )
        try:
            lease = offer.lease = runtime.serve_blocks(request)
        except KVFlowError as error:
            logger.warning("request %s: its prompt is not offered: %s", save.request_id, error)
            offer.outcome = LeaseOutcome.REVOKED
            if offer.flows:
                _decline(runtime, Decline(serve_id=save.serve_id, reason=f"{type(error).__name__}: {error}"))
            return
        offer.keep(lease)
        self._spawn(self._watch(offer, lease))

    async def _watch(self, offer: SavedPrompt, lease: Lease) -> None:
        try:
            offer.outcome = await lease
        finally:
            offer.let_run()
        self._withdrawn.discard(lease)
        self._report_if_over(offer)

    def _grow(self, offer: SavedPrompt, grow: Grow, ready: DeviceEvent | None) -> None:
        """Offer more of a prompt."""
        if (lease := offer.open_lease) is None:
            return
        try:
            if any(grow.block_tables):
                lease.extend(given_block_ids(grow.block_tables))
            lease.advance(grow.num_tokens, ready)
        except KVFlowError as error:  # such as host buffers that are full
            logger.warning("request %s: its prompt is not offered any more: %s", grow.request_id, error)
            lease.fail(f"{type(error).__name__}: {error}")

    def _send(self, offer: SavedPrompt) -> None:
        """Begin the time of a lease whose ticket is out: the engine waits for its end."""
        offer.sent = True
        if offer.lease is not None:
            offer.lease.restart(offer.save.ttl_s)
        offer.let_run()
        self._report_if_over(offer)

    def _withdraw(self, offer: SavedPrompt) -> None:
        """End a lease that is not to be read any more."""
        if not offer.sent:
            del self.saved[offer.save.request_id]
        offer.let_run()
        if (lease := offer.open_lease) is not None:
            self._withdrawn.add(lease.fail("its request has ended") if offer.flows else lease.revoke())
        self._report_if_over(offer)

    def _report_if_over(self, offer: SavedPrompt) -> None:
        """Report a lease that has ended, once the engine waits for that, or has let it go."""
        request_id = offer.save.request_id
        current = self.saved.get(request_id) is offer
        if offer.outcome is not None and (offer.sent or not current):
            self.happened.append(OfferEnded(request_id, offer.outcome, offer.sent))
            if current:
                del self.saved[request_id]

    async def recall(self, step: Step, read: Sequence[PinnedPrefix]) -> None:
        """End leases that grow, and those of prefixes, and return when no read of them can succeed any more."""
        ended: list[Awaitable[object]] = []
        if self.sharing is not None and self.prefix_cache is not None:
            for pinned in read:
                self.sharing.end(pinned)
            ended += map(self.prefix_cache.left, read)
        for request_id in step.recall:
            offer = self.saved.get(request_id) if request_id in step.send else self.saved.pop(request_id, None)
            if offer is not None and offer.open_lease is not None:
                offer.let_run()
                ended.append(offer.open_lease.fail("its prompt was preempted").wait())
        await asyncio.gather(*ended)

    # --- prefixes

    async def share(self, peers: PrefixPeers, cache: PagedPrefixCache) -> None:
        """Share a prefix cache; the one before has ended with its registration."""
        self.sharing, self.prefix_cache = peers.prefixes.share(cache, pinned_blocks_max=_ANY_NUMBER), cache

    async def meet(self, runtime: Runtime, follows: bool) -> None:
        """Connect to peers, and follow their events, in the background."""
        if self.peers is None:
            return
        self._spawn(self.peers.greet(runtime.config.handshake_timeout_s))
        if follows and self.peers.events:
            self._spawn(self.peers.follow())

    async def ask(self, runtime: Runtime, questions: Sequence[Question]) -> None:
        """Ask peers for prefixes, each question by itself."""
        assert self.peers is not None, "who asks has peers"
        for question in questions:
            self._spawn(self._ask(runtime, self.peers, question))

    async def _ask(self, runtime: Runtime, peers: PrefixPeers, question: Question) -> None:
        begun_s = asyncio.get_running_loop().time()
        outcome, tickets, others = await peers.ask(question)
        took_s = asyncio.get_running_loop().time() - begun_s
        self.happened.append(Answered(question.request_id, tickets, outcome, took_s))
        self._release(runtime, others)

    # --- tasks

    def _spawn(self, work: Coroutine[None, None, None], name: str | None = None) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.problem = task.exception()


def _load_request(runtime: Runtime, receive: Receive, after: DeviceEvent | None) -> LoadRequest:
    """Return the request of a load.

    A prompt that is received while it is computed takes as long as that. It has to be begun within its ticket's ttl_s,
    and whatever goes wrong is told, so a producer's lease bounds it.
    """
    config = runtime.config
    awaited = any(ticket.awaited for ticket in receive.tickets)
    return LoadRequest(
        name_of(receive.request_id),
        ticket=receive.tickets,
        block_ids=given_block_ids(receive.block_tables),
        after=after,
        deadline_s=max(config.load_deadline_s, config.lease_lifetime_s) if awaited else None,
        prompt=with_marks(receive.prompt, receive.marks),
        num_tokens=receive.num_tokens,
        keep_offer=receive.shared,
        cached_tokens=receive.cached_tokens,
    )


async def _release(runtime: Runtime, ticket: Ticket) -> None:
    """Tell a producer that nothing will be read for its ticket. Its lease would run out without us too."""
    try:
        await runtime.release_blocks(ticket)
    except KVFlowError as error:
        logger.info("request %s: its producer was not told: %s", ticket.request_id, error)


def _decline(runtime: Runtime, declined: Decline) -> None:
    """Tell readers that wait for a prompt that it is not to be had here; one rank tells those of another engine."""
    if declined.at is not None and (runtime.config.tp_rank, runtime.config.pp_rank) != (0, 0):
        return
    try:
        runtime.decline(declined.serve_id, declined.reason, at=declined.at, instead=declined.instead)
    except KVFlowError as error:  # such as one of the same name that is, or a runtime that is about to close
        logger.warning("request %s: its readers are not told: %s", declined.serve_id, error)
