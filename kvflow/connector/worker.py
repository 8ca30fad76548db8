"""The workers' half of a connector, for any engine: carries out what `connector.scheduler` hands over each step.

An engine's step calls `begin` and `collect`, and neither ever waits: loads, leases and questions are tasks on the loop
of a `blocking.Runtime`, and go on between the steps. Reports are final. A request is received when no byte can land in
its blocks any more, also if its load has failed or was abandoned; it is sent when its lease has ended and the engine
waits for that, as it does once the lease's ticket is out (`Step.send`). A task that dies is raised by `collect`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvflow.blocking import Runtime as BlockingRuntime
from kvflow.connector.paged_groups import PagedGroup
from kvflow.connector.parameters import name_of
from kvflow.connector.prefix_questions import PrefixOutcome
from kvflow.connector.step import BlockTables, Decline, Grow, Question, Receive, Save, Step
from kvflow.core.plan.descriptors import given_block_ids
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.protocol.prompts import with_marks
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import TOKENS, KVFlowError, PromptMismatch, UsageError
from kvflow.logs import logger_of
from kvflow.parts import preload
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.requests import LoadReport, LoadRequest
from kvflow.runtime.producer.lease import Lease, LeaseOutcome, ServeRequest
from kvflow.runtime.runtime import Runtime

if TYPE_CHECKING:
    from kvflow.connector.paged_prefix_cache import PagedPrefixCache
    from kvflow.connector.prefix_peers import PrefixPeers
    from kvflow.prefix import PinnedPrefix, SharedPrefixes

__all__ = ["ConnectorWorker", "FailedLoad", "Results"]

logger = logger_of(__name__)

_NOTHING = Step()
_RECALL_S = 60.0  # it takes as long as the hold, and a copy that has begun
_ANY_NUMBER = 1 << 31  # of blocks: nothing is pinned for a reader


class FailedLoad(NamedTuple):
    """A load that has failed, or was abandoned (`error` is None); its blocks are safe and hold nothing of use."""

    block_tables: BlockTables
    error: KVFlowError | None


@dataclass(slots=True)
class Results:
    """Loads, leases and questions that have ended since the last call of `collect`, by request."""

    loaded: dict[str, LoadReport] = field(default_factory=dict)
    failed: dict[str, FailedLoad] = field(default_factory=dict)
    leases: list[tuple[str, LeaseOutcome]] = field(default_factory=list)
    """Every lease that has ended, also of requests that the engine does not wait for."""
    sent: set[str] = field(default_factory=set)
    found: dict[str, tuple[Ticket, ...]] = field(default_factory=dict)
    """Leased offers of peers for each request that waits for them, as much by each, the best first; none if nobody has
    anything that is worth its load."""
    answers: list[PrefixOutcome] = field(default_factory=list)
    """Outcomes of the questions that were answered by `found`."""

    @property
    def received(self) -> Set[str]:
        """Requests whose loads have ended, well or not."""
        return self.loaded.keys() | self.failed.keys()

    @property
    def refused(self) -> tuple[tuple[str, PromptMismatch], ...]:
        """Requests whose loads have found another prompt of the same tokens: see `ConnectorScheduler.refuse`."""
        errors = ((request_id, one.error) for request_id, one in self.failed.items())
        return tuple(
            (request_id, error)
            for request_id, error in errors
            if isinstance(error, PromptMismatch) and error.parts != TOKENS
        )


@dataclass(slots=True, eq=False)
class _Reading:
    """A request that waits for blocks, or loads."""

    kept: ExitStack = field(default_factory=ExitStack)
    """Leases that are kept open for it."""
    load: Load | None = None
    abandoned: bool = False


@dataclass(slots=True, eq=False)
class _SavedPrompt:
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


class ConnectorWorker:
    """One rank's worker. Whoever made the runtime closes it.

    Args:
        runtime: the rank's, open.
        peers: engines that prefixes are shared with, and asked for; without it neither is done.
    """

    def __init__(self, runtime: BlockingRuntime, peers: PrefixPeers | None = None) -> None:
        preload("growing", "staging", "verify")  # on the engine's thread, not on the loop
        self._runtime = runtime
        self._peers = peers
        self._shared: dict[str, int] = {}
        """Counts that `shared` has told."""
        self._prefix_cache: PagedPrefixCache | None = None
        """Blocks shared with peers."""
        self._sharing: SharedPrefixes | None = None
        self._lock = threading.Lock()
        """Held, by either thread, to touch `_results`."""
        self._results = Results()
        self._problem: BaseException | None = None
        self._saved: dict[str, _SavedPrompt] = {}
        """The prompt of each request that has an offer, until its end is told."""
        self._readings: dict[str, _Reading] = {}
        self._withdrawn: set[Lease] = set()
        """Leases that were ended here, and whose blocks are still held for a moment."""
        self._tasks: set[asyncio.Task[None]] = set()

    def introduction(self) -> Ticket:
        """Say who this rank is, for `ConnectorScheduler.introduce`.

        Returns:
            A ticket of nothing.

        Raises:
            RuntimeUnavailable: no cache is registered.
        """
        return self._runtime.introduce()

    def share(self, groups: Sequence[PagedGroup], block_tokens: int) -> None:
        """Let peers read prefixes out of the cache that is registered, as `Step.cached_blocks` tells of it.

        Args:
            groups: those of the cache.
            block_tokens: the engine's block size.

        Raises:
            UsageError: this registration is shared already, or the worker was given no `peers`.
            RuntimeUnavailable: no cache is registered.
        """
        peers = self._peers
        if peers is None:
            raise UsageError("share: the worker was given no peers (PrefixPeers)")
        from kvflow.connector.paged_prefix_cache import PagedPrefixCache

        cache, self._shared = PagedPrefixCache(groups, block_tokens), {}

        async def share(_: Runtime) -> None:
            self._sharing = peers.prefixes.share(cache, pinned_blocks_max=_ANY_NUMBER)
            self._prefix_cache = cache  # the one before has ended with its registration

        self._runtime.start(share).result(_RECALL_S)

    def meet(self, *, follows: bool) -> None:
        """Begin to connect to the known peers, once a cache is registered; returns at once.

        Args:
            follows: whether KV events are followed as well; one rank of an engine does, the one that asks.
        """
        if self._peers is not None:
            peers = self._peers
            self._runtime.start(lambda runtime: self._meet(runtime, peers, follows))

    def shared(self) -> Iterator[str]:
        """Tell the outcomes of peers' questions since the last call.

        Returns:
            A word for each: the name of a field of `SharingStatistics`.
        """
        if self._sharing is not None:
            now = asdict(self._sharing.statistics)
            for what in ("found", "missed", "busy", "failed", "reclaimed"):
                yield from [what] * (now[what] - self._shared.get(what, 0))
            self._shared = now

    def prepare(self, step: Step) -> None:
        """End the reads of blocks that a step is about to write, and ask its questions; before it computes anything.

        Returns at once, unless somebody may be reading what the step will write. Leases of prefixes end within a turn
        of the loop. A step that recalls a prompt that flows (`Step.recall`) waits here until no read of it can succeed
        any more: some Limits.seal_hold_s.

        Args:
            step: what `ConnectorScheduler.build_step` has given.

        Raises:
            RuntimeClosed: the runtime is closed; RuntimeBroken if its loop has died.
            TimeoutError: a lease has not ended within 60 s.
        """
        cache = self._prefix_cache
        read = cache.take(step.reused) if cache is not None and step.reused else []
        if step.recall or read:
            self._runtime.start(lambda _: self._recall(step, read)).result(_RECALL_S)
        if step.questions and (peers := self._peers) is not None:
            self._runtime.start(lambda runtime: self._ask(runtime, peers, step.questions))

    def begin(self, step: Step, *, ready: DeviceEvent | None = None, after: DeviceEvent | None = None) -> None:
        """Start a step's work, once it has been prepared (`prepare`); returns at once.

        The events are for a device that computes after it was told to.

        Args:
            step: what `ConnectorScheduler.build_step` has given.
            ready: happens once what is saved, and what its cached blocks hold, is there. Without it that is there now.
            after: happens once what is received may be written; recorded before the step's own work.

        Raises:
            RuntimeClosed: the runtime is closed; RuntimeBroken if its loop has died.
        """
        if step.cached_blocks and self._prefix_cache is not None:
            self._prefix_cache.add(step.cached_blocks, ready)
        if step != _NOTHING:
            self._runtime.start(lambda runtime: self._carry_out(runtime, step, ready, after))

    def collect(self) -> Results:
        """Take what has ended meanwhile; returns at once.

        Returns:
            Loads and leases that have ended since the last call, each once.

        Raises:
            BaseException: an error in kvflow itself, from then on with every call.
        """
        if self._problem is not None:
            raise self._problem
        with self._lock:
            taken, self._results = self._results, Results()
        return taken

    # --- on the loop

    async def _carry_out(
        self, runtime: Runtime, step: Step, ready: DeviceEvent | None, after: DeviceEvent | None
    ) -> None:
        """Start everything, in the order in which it may touch the same blocks."""
        try:
            self._start(runtime, step, ready, after)
        except Exception as problem:  # noqa: BLE001 - a bug of ours; the engine gets it with its next step
            self._problem = problem

    def _start(self, runtime: Runtime, step: Step, ready: DeviceEvent | None, after: DeviceEvent | None) -> None:
        for request_id in step.send:
            self._send(self._saved[request_id])
        for release in step.release:
            self._forget(release.request_id)
            if release.last:
                self._release(runtime, release.tickets)
        for request_id, tickets in step.keep.items():
            self._keep(runtime, request_id, tickets)
        for request_id in step.withdraw:
            if request_id in self._saved:  # else its end is on its way to the engine
                self._withdraw(self._saved[request_id])
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
            self._grow(self._saved[grow.request_id], grow, ready)

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
            with self._lock:
                self._results.loaded[request_id] = outcome
            if self._peers is not None:
                self._peers.prefixes.learn(receive.tickets[0], outcome)
            return
        if outcome is not None and not isinstance(outcome, KVFlowError | asyncio.CancelledError):
            raise outcome
        error = outcome if isinstance(outcome, KVFlowError) else None
        with self._lock:
            self._results.failed[request_id] = FailedLoad(receive.block_tables, error)
        logger.warning("request %s: its prompt was not received: %s", request_id, error or "abandoned")
        if (error is None or receive.release_if_failed) and not receive.shared:  # nobody will read it any more
            self._release(runtime, receive.tickets)

    def _release(self, runtime: Runtime, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._spawn(_release(runtime, ticket))

    # --- saved prompts

    def _save(self, runtime: Runtime, save: Save, ready: DeviceEvent | None) -> None:
        """Open the lease of a prompt that the step has computed, or begins to."""
        offer = self._saved[save.request_id] = _SavedPrompt(save)
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

    async def _watch(self, offer: _SavedPrompt, lease: Lease) -> None:
        try:
            offer.outcome = await lease
        finally:
            offer.let_run()
        self._withdrawn.discard(lease)
        self._report_if_over(offer)

    def _grow(self, offer: _SavedPrompt, grow: Grow, ready: DeviceEvent | None) -> None:
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

    def _send(self, offer: _SavedPrompt) -> None:
        """Begin the time of a lease whose ticket is out: the engine waits for its end."""
        offer.sent = True
        if offer.lease is not None:
            offer.lease.restart(offer.save.ttl_s)
        offer.let_run()
        self._report_if_over(offer)

    def _withdraw(self, offer: _SavedPrompt) -> None:
        """End a lease that is not to be read any more."""
        if not offer.sent:
            del self._saved[offer.save.request_id]
        offer.let_run()
        if (lease := offer.open_lease) is not None:
            self._withdrawn.add(lease.fail("its request has ended") if offer.flows else lease.revoke())
        self._report_if_over(offer)

    def _report_if_over(self, offer: _SavedPrompt) -> None:
        """Report a lease that has ended, once the engine waits for that, or has let it go."""
        request_id = offer.save.request_id
        current = self._saved.get(request_id) is offer
        if offer.outcome is not None and (offer.sent or not current):
            with self._lock:
                self._results.leases.append((request_id, offer.outcome))
                if offer.sent:
                    self._results.sent.add(request_id)
            if current:
                del self._saved[request_id]

    async def _recall(self, step: Step, read: Sequence[PinnedPrefix]) -> None:
        """End leases that grow, and those of prefixes, and return when no read of them can succeed any more."""
        ended: list[Awaitable[object]] = []
        if self._sharing is not None and self._prefix_cache is not None:
            for pinned in read:
                self._sharing.end(pinned)
            ended += map(self._prefix_cache.left, read)
        for request_id in step.recall:
            offer = self._saved.get(request_id) if request_id in step.send else self._saved.pop(request_id, None)
            if offer is not None and offer.open_lease is not None:
                offer.let_run()
                ended.append(offer.open_lease.fail("its prompt was preempted").wait())
        await asyncio.gather(*ended)

    # --- prefixes

    async def _meet(self, runtime: Runtime, peers: PrefixPeers, follows: bool) -> None:
        self._spawn(peers.greet(runtime.config.handshake_timeout_s))
        if follows and peers.events:
            self._spawn(peers.follow())

    async def _ask(self, runtime: Runtime, peers: PrefixPeers, questions: Sequence[Question]) -> None:
        for question in questions:
            self._spawn(self._ask_one(runtime, peers, question))

    async def _ask_one(self, runtime: Runtime, peers: PrefixPeers, question: Question) -> None:
        outcome, tickets, others = await peers.ask(question)
        with self._lock:
            self._results.found[question.request_id] = tickets
            self._results.answers.append(outcome)
        self._release(runtime, others)

    # --- tasks

    def _spawn(self, work: Coroutine[None, None, None], name: str | None = None) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._problem = task.exception()


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
