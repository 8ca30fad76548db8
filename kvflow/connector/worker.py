"""The workers' half of a connector, for any engine: carries out the steps that `connector.scheduler` makes.

In each step the engine calls `prepare`, `begin` and `collect`. `begin` never waits, and `collect` only if it is asked
to: loads, leases and questions to peers run as tasks on the loop of a `blocking.Runtime`. Each result is reported once
and is final. A request is reported as received when its load has ended, well or not, and no byte can land in its
blocks. It is reported as sent when its lease has ended, but only if the router got its ticket (`Step.send`), since only
then does the engine wait for the lease. An engine's only rank also reports a lease that ended, or could not be opened,
before that (`Results.not_offered`). If a task dies, `collect` raises the task's error.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvflow import checks
from kvflow.blocking import Runtime as BlockingRuntime
from kvflow.connector.paged_groups import PagedGroup
from kvflow.connector.parameters import runtime_id_of
from kvflow.connector.prefix_questions import PrefixOutcome
from kvflow.connector.step import BlockTables, Decline, Grow, Question, Receive, Save, Step
from kvflow.core.plan.descriptors import given_block_ids
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.protocol.prompts import with_marks
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import TOKENS, KVFlowError, PromptMismatch, UsageError
from kvflow.logs import logger_of
from kvflow.parts import preload
from kvflow.runtime.load.leases import KeptLeases
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

_EMPTY_STEP = Step()
_RECALL_TIMEOUT_S = 60.0  # a recall takes the seal hold (50 ms) and the rest of a copy that has begun
_PINNED_BLOCKS_MAX = 1 << 31  # no bound: a pinned prefix keeps no block from being reused


class FailedLoad(NamedTuple):
    """A load that has failed or was abandoned. If it was abandoned, `error` is None.

    No further byte can land in the blocks. Their contents are undefined.
    """

    block_tables: BlockTables
    error: KVFlowError | None


@dataclass(slots=True)
class Results:
    """Loads, leases and questions to peers that have ended since the last call of `collect`, by request id."""

    loaded: dict[str, LoadReport] = field(default_factory=dict)
    failed: dict[str, FailedLoad] = field(default_factory=dict)
    leases: list[tuple[str, LeaseOutcome]] = field(default_factory=list)
    """Request id and outcome of each ended lease, also of those that no router got a ticket for."""
    sent: set[str] = field(default_factory=set)
    not_offered: set[str] = field(default_factory=set)
    """Ids in `sent` of requests that go on: their prompts can no longer be offered, for example because this engine has
    too many leases. `ConnectorScheduler` then gives them no ticket. Empty if the engine has several ranks, since the
    others may have open leases: readers get the reason from this rank."""
    found: dict[str, tuple[Ticket, ...]] = field(default_factory=dict)
    """By request id, the tickets in the answers to the request's question: all for the same number of tokens, the best
    peer first. Empty if no peer has a prefix that is worth a load."""
    answers: list[PrefixOutcome] = field(default_factory=list)
    """Outcome of the question of each request in `found`, in the same order."""
    offered: dict[str, float] = field(default_factory=dict)
    """By request id, for the requests in `Step.await_offers`: seconds until the prompt was offered, or until it was
    clear that it never will be. The request's load then fails."""

    @property
    def received(self) -> Set[str]:
        """Ids of requests with loads that have ended: those in `loaded` and in `failed`."""
        return self.loaded.keys() | self.failed.keys()

    @property
    def refused(self) -> tuple[tuple[str, PromptMismatch], ...]:
        """Request id and error of each load that found a prompt with the same tokens but, for example, other pictures.

        `ConnectorScheduler.refuse` takes this value.
        """
        errors = ((request_id, load.error) for request_id, load in self.failed.items())
        return tuple(
            (request_id, error)
            for request_id, error in errors
            if isinstance(error, PromptMismatch) and error.parts != TOKENS
        )


@dataclass(slots=True, eq=False)
class _ReceivingRequest:
    """A request that waits for blocks from the engine, or that is loading."""

    kept_leases: ExitStack = field(default_factory=ExitStack)
    """Contexts that renew the leases of the request's tickets. After this stack is closed, the leases may expire."""
    offer: asyncio.Task[None] | None = None
    """Task that waits for the offer of the first ticket. None if the request got blocks without waiting for it."""
    offer_error: KVFlowError | None = None
    """Error because of which the prompt will not be offered with the first ticket."""
    load: Load | None = None
    abandoned: bool = False


@dataclass(slots=True, eq=False)
class _SavedPrompt:
    """A prompt that this rank offers. `sent`: the router has the ticket, so the engine waits for the lease's end."""

    save: Save
    restart_timer: asyncio.TimerHandle | None = None
    """Timer that periodically restarts the lease's time to live until the router gets the ticket; then None."""
    lease: Lease | None = None
    outcome: LeaseOutcome | None = None
    sent: bool = False

    @property
    def flows(self) -> bool:
        """True if readers may read the prompt while it is computed."""
        return self.save.computed_tokens is not None

    @property
    def open_lease(self) -> Lease | None:
        return self.lease if self.outcome is None else None

    def keep_restarting(self, lease: Lease) -> None:
        """Restart the time to live of `lease` now, and periodically until `stop_restarting` is called.

        So the lease cannot expire before the router gets the ticket.
        """
        lease.restart(self.save.ttl_s)
        self.restart_timer = asyncio.get_running_loop().call_later(self.save.ttl_s / 3, self.keep_restarting, lease)

    def stop_restarting(self) -> None:
        if self.restart_timer is not None:
            self.restart_timer.cancel()
            self.restart_timer = None


_NO_RESULTS = Results()


class ConnectorWorker:
    """The workers' half of a connector, on one rank: loads and offers prompts as the scheduler's half decides.

    Args:
        runtime: the rank's open runtime. The worker never closes it.
        peers: the peers to ask for prefixes and to share prefixes with; None to do neither.
    """

    def __init__(self, runtime: BlockingRuntime, peers: PrefixPeers | None = None) -> None:
        preload("growing", "staging", "verify")  # on the engine's thread, not on the loop
        self._runtime = runtime
        self._is_only_rank = runtime.config.tp_size * runtime.config.pp_size == 1
        self._peers = peers
        self._counts_yielded: dict[str, int] = {}
        """Numbers of peers' questions up to the last call of `shared_outcomes`, by field of `SharingStatistics`."""
        self._prefix_cache: PagedPrefixCache | None = None
        """The prefix cache that is shared with peers; None until `share` is called."""
        self._sharing: SharedPrefixes | None = None
        self._reported = threading.Condition()
        """Guards `_results`, `_loading` and `_awaiting`, which two threads use: the engine's and the loop's. `collect`
        may wait for the loop's."""
        self._results = Results()
        self._loading: set[str] = set()
        """Requests whose load was given to `begin`, and has no result yet."""
        self._awaiting: set[str] = set()
        """Requests of which the offer is awaited, and no result of that is reported yet."""
        self._internal_error: BaseException | None = None
        self._saved: dict[str, _SavedPrompt] = {}
        """Prompts that this rank offers, by request id, until the end of their leases is reported. The loop's thread
        writes it; `collect` only looks whether there are any, so a moment late is soon enough."""
        self._receiving: dict[str, _ReceivingRequest] = {}
        self._withdrawn: set[Lease] = set()
        """Leases that this worker has ended, and that hold their blocks until no read can succeed."""
        self._tasks: set[asyncio.Task[None]] = set()

    def introduction(self) -> Ticket:
        """Return a ticket that names this rank. `ConnectorScheduler.introduce` takes all ranks' tickets, merged.

        Returns:
            A ticket without blocks.

        Raises:
            RuntimeUnavailable: no cache is registered.
        """
        return self._runtime.introduce()

    def share(self, groups: Sequence[PagedGroup], block_tokens: int) -> None:
        """Let peers read prefixes of prompts from the registered cache. `Step.cached_blocks` names the blocks.

        Args:
            groups: the groups of layers of the cache, as registered.
            block_tokens: the engine's block size in tokens.

        Raises:
            UsageError: the registered cache is shared already, or the worker was created without `peers`.
            RuntimeUnavailable: no cache is registered.
        """
        peers = self._peers
        if peers is None:
            raise UsageError("share: the worker was given no peers (PrefixPeers)")
        from kvflow.connector.paged_prefix_cache import PagedPrefixCache

        cache, self._counts_yielded = PagedPrefixCache(groups, block_tokens), {}

        async def share(_: Runtime) -> None:
            self._sharing = peers.prefixes.share(cache, pinned_blocks_max=_PINNED_BLOCKS_MAX)
            self._prefix_cache = cache  # an earlier cache has ended with its registration

        self._runtime.start(share).result(_RECALL_TIMEOUT_S)

    def connect_peers(self, *, follow_events: bool) -> None:
        """Begin to connect to `PrefixPeers.known_peers`, and return at once. Call this once a cache is registered.

        Args:
            follow_events: True to receive KV events, too. Only the rank that asks peers does so.
        """
        if self._peers is not None:
            peers = self._peers
            self._runtime.start(lambda runtime: self._connect_peers(runtime, peers, follow_events))

    def set_weights(self, version: str) -> None:
        """Announce that the engine has other weights than before, as `kvflow.Runtime.set_weights` does.

        All leases end, and `collect` reports them. Tell all workers, then `ConnectorScheduler.set_weights`.

        Args:
            version: name of the weights.

        Raises:
            RequestError: `version` is no such name.
            RuntimeUnavailable: the runtime is closed.
        """
        self._runtime.set_weights(version)

    def shared_outcomes(self) -> Iterator[str]:
        """Yield the outcome of each question for a prefix that peers have asked this rank since the last call.

        Returns:
            Names of fields of `SharingStatistics`, for example "found", one for each question.
        """
        if self._sharing is not None:
            now = asdict(self._sharing.statistics)
            for outcome in ("found", "missed", "busy", "failed", "reclaimed"):
                yield from [outcome] * (now[outcome] - self._counts_yielded.get(outcome, 0))
            self._counts_yielded = now

    def prepare(self, step: Step, *, ready: DeviceEvent | None = None) -> None:
        """Before a step computes, end all reads of blocks that it will write, and send the step's questions to peers.

        Also open the leases of prompts whose beginning is cached (`Step.save_cached`). If peers may be reading blocks
        that the step will write, wait until none of these reads can succeed; otherwise return at once. The wait takes
        one turn of the runtime's loop for shared prefixes, and about `Limits.seal_hold_s` for a prompt that is read
        while it is computed (`Step.recall`).

        Args:
            step: result of `ConnectorScheduler.build_step`.
            ready: device event that happens when the work of earlier steps is done. None if it is already.

        Raises:
            RuntimeClosed: the runtime is closed; RuntimeBroken if its loop has died.
            TimeoutError: a lease has not ended within 60 s.
        """
        cache = self._prefix_cache
        read = cache.remove_reused(step.reused) if cache is not None and step.reused else []
        if step.recall or read:
            self._runtime.start(lambda _: self._recall(step, read)).result(_RECALL_TIMEOUT_S)
        if step.save_cached:
            self._runtime.start(lambda runtime: self._carry_out(runtime, Step(save=step.save_cached), ready, None))
        if step.questions and (peers := self._peers) is not None:
            self._runtime.start(lambda runtime: self._ask_all(runtime, peers, step.questions))

    def begin(self, step: Step, *, ready: DeviceEvent | None = None, after: DeviceEvent | None = None) -> None:
        """Start the loads and leases of a step, after `prepare`. Return at once.

        `ready` and `after` are events of a device that computes asynchronously, for example `torch.cuda.Event`.

        Args:
            step: result of `ConnectorScheduler.build_step`.
            ready: device event that happens when this step's prompts are computed. None if they are already.
            after: device event before which the loads must not write to their blocks, since earlier work may still read
                these; recorded before the step's own work. None if the loads may write at once.

        Raises:
            RuntimeClosed: the runtime is closed; RuntimeBroken if its loop has died.
        """
        if step.cached_blocks and self._prefix_cache is not None:
            self._prefix_cache.add(step.cached_blocks, ready)
        if step != _EMPTY_STEP:
            with self._reported:  # here, since the loop may begin the loads after the next call of `collect`
                self._loading.update(receive.request_id for receive in step.receive)
                self._awaiting.update(step.await_offers)
            self._runtime.start(lambda runtime: self._carry_out(runtime, step, ready, after))

    def collect(self, wait_s: float = 0.0) -> Results:
        """Return the loads, leases and questions to peers that have ended since the last call.

        Args:
            wait_s: maximum seconds to wait for a result if there is none yet, and a load is under way or a prompt is
                offered. An engine that has nothing to compute leaves the processor to others while it waits here.

        Returns:
            The results; none is returned twice.

        Raises:
            RequestError: `wait_s` is not a number of seconds.
            BaseException: a task has failed because of a bug in kvflow. Every later call raises the same error.
        """
        with self._reported:
            if wait_s != 0.0:
                self._reported.wait_for(self._must_not_wait, checks.checked(wait_s, "collect: wait_s", checks.Timeout))
            if self._internal_error is not None:
                raise self._internal_error
            taken, self._results = self._results, Results()
        return taken

    def _must_not_wait(self) -> bool:
        expects_results = self._loading or self._awaiting or self._saved
        return not expects_results or self._results != _NO_RESULTS or self._internal_error is not None

    @contextmanager
    def _reporting(self) -> Iterator[Results]:
        """Context in which the loop's thread adds to the results; afterwards `collect` waits no longer."""
        with self._reported:
            yield self._results
            self._reported.notify()

    # --- on the loop

    async def _carry_out(
        self, runtime: Runtime, step: Step, ready: DeviceEvent | None, after: DeviceEvent | None
    ) -> None:
        """Start all work of a step, in an order that is safe for work on the same blocks.

        If this fails, which is a bug in kvflow, `collect` raises the error.
        """
        try:
            self._start(runtime, step, ready, after)
        except Exception as problem:  # noqa: BLE001 - a bug in kvflow, which `collect` raises
            self._note_internal_error(problem)

    def _start(self, runtime: Runtime, step: Step, ready: DeviceEvent | None, after: DeviceEvent | None) -> None:
        for request_id in step.send:
            self._send(self._saved[request_id])
        for release in step.release:
            self._stop_keeping(release.request_id)
            if release.last:
                self._release(runtime, release.tickets)
        for request_id, tickets in step.keep.items():
            self._keep_leases(runtime, request_id, tickets, awaits_offer=request_id in step.await_offers)
        for request_id in step.withdraw:
            if request_id in self._saved:  # else its end is reported already
                self._withdraw(self._saved[request_id])
        for declined in step.decline:
            _notify_declined(runtime, declined)
        for receive in step.receive:
            request = self._receiving.setdefault(receive.request_id, _ReceivingRequest())
            self._spawn(self._receive(runtime, receive, request, after), f"kvflow-receive {receive.request_id}")
        for request_id in step.abandon:
            if request_id in self._receiving:  # else its end is reported already
                self._abandon(self._receiving[request_id])
        for save in step.save:
            self._save(runtime, save, ready)
        for grow in step.grow:
            self._grow(self._saved[grow.request_id], grow, ready)

    # --- loads

    def _keep_leases(self, runtime: Runtime, request_id: str, tickets: Sequence[Ticket], *, awaits_offer: bool) -> None:
        request = _ReceivingRequest()
        try:
            kept = [request.kept_leases.enter_context(runtime.keep_leases(ticket)) for ticket in tickets]
        except KVFlowError as error:
            request.kept_leases.close()
            logger.info("request %s: its leases are not kept: %s", request_id, error)
            if awaits_offer:
                self._report_offered(request_id, 0.0)  # its load will say why
        else:
            self._receiving[request_id] = request
            if awaits_offer:
                request.offer = self._spawn(
                    self._await_offer(request_id, request, kept[0]), f"kvflow-offer {request_id}"
                )

    async def _await_offer(self, request_id: str, request: _ReceivingRequest, kept: KeptLeases) -> None:
        """Wait until the producer offers a request's prompt, and report that, so that the request gets blocks.

        Task `kvflow-offer <request>`: begun by `ConnectorWorker.begin`, for each request of `Step.await_offers`. It
        ends when the prompt is offered, when it is clear that it will not be, or when the request has ended. If the
        task itself fails, `collect` raises the task's error.
        """
        begun_s = asyncio.get_running_loop().time()
        try:
            await kept.opened()
        except KVFlowError as error:
            request.offer_error = error
        self._report_offered(request_id, asyncio.get_running_loop().time() - begun_s)

    def _report_offered(self, request_id: str, waited_s: float) -> None:
        with self._reporting() as results:
            self._awaiting.discard(request_id)
            results.offered[request_id] = waited_s

    def _stop_keeping(self, request_id: str) -> None:
        """Forget a request that will not load again, and stop renewing the leases of its tickets."""
        if request_id in self._receiving:
            request = self._receiving.pop(request_id)
            if request.offer is not None:
                request.offer.cancel()
                with self._reported:
                    self._awaiting.discard(request_id)
            request.kept_leases.close()

    def _abandon(self, request: _ReceivingRequest) -> None:
        request.abandoned = True
        if request.offer is not None:
            request.offer.cancel()
        if request.load is not None:
            request.load.cancel()

    async def _receive(
        self, runtime: Runtime, receive: Receive, request: _ReceivingRequest, after: DeviceEvent | None
    ) -> None:
        """Load a request's blocks, and report the outcome once no further byte can land in these blocks.

        Task `kvflow-receive <request>`: begun by `ConnectorWorker.begin`, for each load. It ends when the load's
        outcome, success or failure, is reported. If the task itself fails, `collect` raises the task's error.
        """
        for lease in tuple(self._withdrawn):
            await lease  # this request may have the lease's blocks now; reads of them may go on until the lease ends
        outcome: LoadReport | BaseException | None = None
        if request.offer is not None:
            await asyncio.wait([request.offer])  # another rank may have reported its offer first
        tickets = receive.tickets if request.offer_error is None else receive.tickets[1:]
        if not request.abandoned and not tickets:
            outcome = request.offer_error
        elif not request.abandoned:
            request.load = runtime.start_load(_load_request(runtime, receive, tickets, after))
            (outcome,) = await asyncio.gather(request.load, return_exceptions=True)
            request.kept_leases.close()
            await request.load.settled()
        self._stop_keeping(receive.request_id)
        self._report_load(runtime, receive, outcome)

    def _report_load(self, runtime: Runtime, receive: Receive, outcome: LoadReport | BaseException | None) -> None:
        request_id = receive.request_id
        if isinstance(outcome, LoadReport):
            with self._reporting() as results:
                self._loading.discard(request_id)
                results.loaded[request_id] = outcome
            if self._peers is not None:
                self._peers.prefixes.learn(receive.tickets[0], outcome)
            return
        if outcome is not None and not isinstance(outcome, KVFlowError | asyncio.CancelledError):
            raise outcome
        error = outcome if isinstance(outcome, KVFlowError) else None
        with self._reporting() as results:
            self._loading.discard(request_id)
            results.failed[request_id] = FailedLoad(receive.block_tables, error)
        logger.warning("request %s: its prompt was not received: %s", request_id, error or "abandoned")
        if (error is None or receive.release_if_failed) and not receive.shared:  # no request will read the offer
            self._release(runtime, receive.tickets)

    def _release(self, runtime: Runtime, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._spawn(_release_ticket(runtime, ticket))

    # --- saved prompts

    def _save(self, runtime: Runtime, save: Save, ready: DeviceEvent | None) -> None:
        """Open the lease of a prompt that the step completes, or that readers may read while it is computed.

        The device event `ready` happens when the step is computed. If no lease can be opened, readers that ask for it
        get the reason: those that wait, and those that will have the ticket.
        """
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
            _notify_declined(runtime, Decline(serve_id=save.serve_id, reason=f"{type(error).__name__}: {error}"))
            self._report_if_ended(offer)
            return
        offer.keep_restarting(lease)
        self._spawn(self._await_end(offer, lease))

    async def _await_end(self, offer: _SavedPrompt, lease: Lease) -> None:
        try:
            offer.outcome = await lease
        finally:
            offer.stop_restarting()
        self._withdrawn.discard(lease)
        self._report_if_ended(offer)

    def _grow(self, offer: _SavedPrompt, grow: Grow, ready: DeviceEvent | None) -> None:
        """Add newly computed tokens and their blocks to a lease that readers may read while its prompt is computed.

        If the lease has ended, do nothing. The device event `ready` happens when the tokens are computed.
        """
        if (lease := offer.open_lease) is None:
            return
        try:
            if any(grow.block_tables):
                lease.extend(given_block_ids(grow.block_tables))
            lease.advance(grow.num_tokens, ready)
        except KVFlowError as error:  # for example full host buffers
            logger.warning("request %s: its prompt is no longer offered: %s", grow.request_id, error)
            lease.fail(f"{type(error).__name__}: {error}")

    def _send(self, offer: _SavedPrompt) -> None:
        """Start the lease's time to live: the router gets the ticket now, and the engine waits for the lease's end."""
        offer.sent = True
        if offer.lease is not None:
            offer.lease.restart(offer.save.ttl_s)
        offer.stop_restarting()
        self._report_if_ended(offer)

    def _withdraw(self, offer: _SavedPrompt) -> None:
        """End the lease of `offer` early, because its blocks will be reused."""
        if not offer.sent:
            del self._saved[offer.save.request_id]
        offer.stop_restarting()
        if (lease := offer.open_lease) is not None:
            self._withdrawn.add(lease.fail("its request has ended") if offer.flows else lease.revoke())
        self._report_if_ended(offer)

    def _report_if_ended(self, offer: _SavedPrompt) -> None:
        """If the lease of `offer` has ended, add its outcome to the results.

        While the request runs and the router has no ticket, at most report that the prompt is not offered: `_send` or
        `_withdraw` calls this later.
        """
        request_id = offer.save.request_id
        if offer.outcome is None:
            return
        current = self._saved.get(request_id) is offer
        with self._reporting() as results:
            if offer.sent:
                results.sent.add(request_id)
                results.not_offered.discard(request_id)
            elif current and self._is_only_rank and not offer.flows:
                results.sent.add(request_id)
                results.not_offered.add(request_id)
            if offer.sent or not current:
                results.leases.append((request_id, offer.outcome))
        if offer.sent and current:
            del self._saved[request_id]

    async def _recall(self, step: Step, read: Sequence[PinnedPrefix]) -> None:
        """End the leases of the requests in `step.recall`, and the leases of the pinned prefixes in `read`.

        Return once no read of their blocks can succeed.
        """
        ended: list[Awaitable[object]] = []
        if self._sharing is not None and self._prefix_cache is not None:
            for pinned in read:
                self._sharing.end(pinned)
            ended += map(self._prefix_cache.wait_unread, read)
        for request_id in step.recall:
            offer = self._saved.get(request_id) if request_id in step.send else self._saved.pop(request_id, None)
            if offer is not None and offer.open_lease is not None:
                offer.stop_restarting()
                ended.append(offer.open_lease.fail("its prompt was preempted").wait())
        await asyncio.gather(*ended)

    # --- prefixes

    async def _connect_peers(self, runtime: Runtime, peers: PrefixPeers, follow_events: bool) -> None:
        self._spawn(peers.connect_peers())
        if follow_events and peers.events:
            self._spawn(peers.follow_events())

    async def _ask_all(self, runtime: Runtime, peers: PrefixPeers, questions: Sequence[Question]) -> None:
        for question in questions:
            self._spawn(self._ask_peers(runtime, peers, question))

    async def _ask_peers(self, runtime: Runtime, peers: PrefixPeers, question: Question) -> None:
        outcome, tickets, others = await peers.ask(question)
        with self._reporting() as results:
            results.found[question.request_id] = tickets
            results.answers.append(outcome)
        self._release(runtime, others)

    # --- tasks

    def _spawn(self, work: Coroutine[None, None, None], name: str | None = None) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            self._note_internal_error(problem)

    def _note_internal_error(self, problem: BaseException) -> None:
        """Have `collect` raise `problem`, which is a bug in kvflow, from now on."""
        with self._reporting():
            self._internal_error = problem


def _load_request(
    runtime: Runtime, receive: Receive, tickets: Sequence[Ticket], after: DeviceEvent | None
) -> LoadRequest:
    """Return the `LoadRequest` for `receive`, with its `tickets` or the last of them.

    The load writes no block before the device event `after`.

    With a pending ticket, the deadline is the longest lifetime of a lease, since the prompt is still being computed.
    The load fails earlier if no offer comes within the ticket's `ttl_s`, or if the producer reports a failure.
    """
    config = runtime.config
    pending = any(ticket.awaited for ticket in tickets)
    return LoadRequest(
        runtime_id_of(receive.request_id),
        ticket=tickets,
        block_ids=given_block_ids(receive.block_tables),
        after=after,
        deadline_s=max(config.load_deadline_s, config.lease_lifetime_s) if pending else None,
        prompt=with_marks(receive.prompt, receive.marks),
        num_tokens=receive.num_tokens,
        keep_offer=receive.shared,
        cached_tokens=receive.cached_tokens,
    )


async def _release_ticket(runtime: Runtime, ticket: Ticket) -> None:
    """Notify the producer of `ticket` that no request here will read the blocks.

    If that fails, log the error: the lease then expires by itself.
    """
    try:
        await runtime.release_blocks(ticket)
    except KVFlowError as error:
        logger.info("request %s: its producer was not notified: %s", ticket.request_id, error)


def _notify_declined(runtime: Runtime, declined: Decline) -> None:
    """Notify readers waiting for a prompt that the prompt will not be offered here.

    If the readers wait at another engine, only the rank with `tp_rank` 0 and `pp_rank` 0 notifies that engine.
    """
    if declined.waiting_at is not None and (runtime.config.tp_rank, runtime.config.pp_rank) != (0, 0):
        return
    try:
        runtime.decline(declined.serve_id, declined.reason, at=declined.waiting_at, instead=declined.instead)
    except KVFlowError as error:  # for example, a lease of that name is open, or the runtime is about to close
        logger.warning("request %s: its readers are not notified: %s", declined.serve_id, error)
