"""The workers' half of a connector, for any engine: carries out what `connector.scheduler` hands over each step.

An engine's step calls `begin` and `collect`, and neither ever waits: the work runs on the loop of a `blocking.Runtime`
and goes on between the steps. Reports are final. A request is received when no byte can land in its blocks any more,
also if its load has failed or was abandoned; it is sent when its lease has ended and the engine waits for that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

from kvflow.blocking import Runtime as BlockingRuntime
from kvflow.connector.paged_groups import PagedGroup
from kvflow.connector.parameters import name_of
from kvflow.connector.prefix_peers import PrefixOutcome, PrefixPeers
from kvflow.connector.shelf import PagedShelf
from kvflow.connector.step import BlockTables, Found, Grow, Keep, Question, Receive, Save, Step
from kvflow.core.plan.descriptors import given_block_ids
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import KVFlowError
from kvflow.logs import logger_of
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.requests import LoadReport, LoadRequest
from kvflow.runtime.prefix.sharing import SharedPrefixes
from kvflow.runtime.prefix.shelf import Run
from kvflow.runtime.producer.lease import Lease, ServeRequest
from kvflow.runtime.producer.open_lease import LeaseOutcome
from kvflow.runtime.runtime import Runtime

__all__ = ["Answered", "ConnectorWorker", "LoadFailed", "Loaded", "OfferEnded", "Results"]

logger = logger_of(__name__)


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

    found: Found
    outcome: PrefixOutcome
    total_s: float


Happening: TypeAlias = Loaded | LoadFailed | OfferEnded | Answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Loads and leases that have ended since the last call of `collect`."""

    received: frozenset[str]
    """Loads that have ended, those that failed included."""
    failed: Mapping[str, LoadFailed]
    sent: frozenset[str]
    found: tuple[Found, ...]
    """Answers of peers."""
    happenings: tuple[Happening, ...]
    """All that has happened, in order: for metrics and logs."""


class ConnectorWorker:
    """One rank's worker. Whoever made the runtime closes it.

    Args:
        runtime: the rank's, open.
        peers: how peers are asked for prefixes.
    """

    def __init__(self, runtime: BlockingRuntime, peers: PrefixPeers | None = None) -> None:
        self._runtime = runtime
        self._happened: deque[Happening] = deque()
        self._courier = _Courier(self._happened, peers or PrefixPeers())
        self._shelf: PagedShelf | None = None
        self._shared: dict[str, int] = {}
        """Counts that `shared` has told."""

    def introduction(self) -> Ticket:
        """Say who this rank is, for `ConnectorScheduler.introduce`.

        Returns:
            A ticket of nothing.

        Raises:
            RuntimeUnavailable: no cache is registered; or what `blocking.Runtime.serve_blocks` raises.
        """
        return self._runtime.serve_blocks(ServeRequest("introduction", block_ids={}, num_tokens=0)).ticket

    def share(self, groups: Sequence[PagedGroup], block_tokens: int) -> None:
        """Let peers read prefixes out of the cache that is registered, as `Step.shelved` tells of it.

        Args:
            groups: those of the cache.
            block_tokens: the engine's block size.

        Raises:
            UsageError: this registration is shared already.
            RuntimeUnavailable: no cache is registered.
        """
        shelf, self._shared = PagedShelf(groups, block_tokens), {}
        self._shelf = shelf
        self._runtime.start(lambda runtime: self._courier.share(runtime, shelf)).result(_RECALL_S)

    def meet(self, *, follows: bool) -> None:
        """Begin to connect to the known peers, once a cache is registered; returns at once.

        Args:
            follows: whether KV events are followed as well; one rank of an engine does, the one that asks.
        """
        self._runtime.start(lambda runtime: self._courier.meet(runtime, follows))

    def shared(self) -> Iterator[str]:
        """Tell the outcomes of peers' questions since the last call.

        Returns:
            A word for each: the name of a field of `SharingStatistics`.
        """
        if self._courier.sharing is not None:
            now = asdict(self._courier.sharing.statistics)
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
        runs = self._shelf.take(step.reused) if self._shelf is not None and step.reused else []
        if step.recall or runs:
            self._runtime.start(lambda _: self._courier.recall(step, runs)).result(_RECALL_S)
        if step.questions:
            self._runtime.start(lambda runtime: self._courier.ask(runtime, step.questions))

    def begin(self, step: Step, *, ready: DeviceEvent | None = None, after: DeviceEvent | None = None) -> None:
        """Start a step's work, once it has been prepared (`prepare`); returns at once.

        The events are for a device that computes after it was told to.

        Args:
            step: what `ConnectorScheduler.build_step` has given.
            ready: happens once what is saved, and what is shelved, is there. Without it that is there now.
            after: happens once what is received may be written; recorded before the step's own work.

        Raises:
            RuntimeClosed: the runtime is closed; RuntimeBroken if its loop has died.
        """
        if step.shelved and self._shelf is not None:
            self._shelf.add(step.shelved, ready)
        if step != _NOTHING:
            self._runtime.start(lambda runtime: self._courier.carry_out(runtime, step, ready, after))

    def collect(self) -> Results:
        """Take what has ended meanwhile; returns at once.

        Returns:
            Loads and leases that have ended since the last call, each once.

        Raises:
            BaseException: an error in kvflow itself, from then on with every call.
        """
        if self._courier.problem is not None:
            raise self._courier.problem
        happened = tuple(self._happened.popleft() for _ in range(len(self._happened)))
        failed = {entry.request_id: entry for entry in happened if isinstance(entry, LoadFailed)}
        loaded = {entry.request_id for entry in happened if isinstance(entry, Loaded)}
        sent = {entry.request_id for entry in happened if isinstance(entry, OfferEnded) and entry.sent}
        return Results(
            received=frozenset(loaded | failed.keys()),
            failed=failed,
            sent=frozenset(sent),
            found=tuple(entry.found for entry in happened if isinstance(entry, Answered)),
            happenings=happened,
        )


_NOTHING = Step()
_ANY_NUMBER = 1 << 31  # of blocks: nothing is pinned for a run
_RECALLED = "its prompt was preempted"
_BROKEN_OFF = "its request has ended"
_RECALL_S = 60.0  # it takes as long as the hold, and a copy that has begun


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


@dataclass(slots=True)
class _Courier:
    """The loads and leases of the engine's requests; lives on the loop."""

    happened: deque[Happening]
    peers: PrefixPeers
    sharing: SharedPrefixes | None = None
    shelf: PagedShelf | None = None
    """Blocks shared with peers."""
    kept: dict[str, ExitStack] = field(default_factory=dict)
    """Leases kept open for requests that wait for blocks, or load."""
    loads: dict[str, asyncio.Task[LoadReport]] = field(default_factory=dict)
    offers: dict[str, _Offered] = field(default_factory=dict)
    withdrawn: set[Lease] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    problem: BaseException | None = None

    async def carry_out(
        self, runtime: Runtime, step: Step, ready: DeviceEvent | None, after: DeviceEvent | None
    ) -> None:
        """Start everything, in the order in which it may touch the same blocks."""
        try:
            self._start(runtime, step, ready, after)
        except Exception as problem:  # noqa: BLE001 - a bug of ours; the engine gets it with its next step
            self.problem = problem

    def _start(self, runtime: Runtime, step: Step, ready: DeviceEvent | None, after: DeviceEvent | None) -> None:
        for send in step.send:
            self._send(send.request_id)
        for release in step.release:
            self._let_go(release.request_id)
            if release.last:
                self._release(runtime, release.tickets)
        for keep in step.keep:
            self._keep(runtime, keep)
        for request_id in step.withdraw:
            self._withdraw(request_id)
        for decline in step.decline:
            _decline(runtime, decline.serve_id, decline.reason)
        for receive in step.receive:
            self._receive(runtime, receive, after)
        for request_id in step.abandon:
            if request_id in self.loads:  # else its end is on its way to the engine
                self.loads[request_id].cancel()
        for save in step.save:
            self._save(runtime, save, ready)
        for grow in step.grow:
            self._grow(grow, ready)

    async def share(self, runtime: Runtime, shelf: PagedShelf) -> None:
        """Share a shelf; the one before has ended with its registration."""
        self.sharing, self.shelf = runtime.share(shelf, pinned_blocks_max=_ANY_NUMBER), shelf

    async def meet(self, runtime: Runtime, follows: bool) -> None:
        """Connect to peers, and follow their events, in the background."""
        self._spawn(self.peers.greet(runtime))
        if follows and self.peers.events:
            self._spawn(self.peers.follow())

    async def ask(self, runtime: Runtime, questions: Sequence[Question]) -> None:
        """Ask peers for prefixes, each question by itself."""
        for question in questions:
            self._spawn(self._ask(runtime, question))

    async def _ask(self, runtime: Runtime, question: Question) -> None:
        begun_s = asyncio.get_running_loop().time()
        outcome, tickets, others = await self.peers.ask(runtime, question)
        took_s = asyncio.get_running_loop().time() - begun_s
        self.happened.append(Answered(Found(request_id=question.request_id, tickets=tickets), outcome, took_s))
        self._release(runtime, others)

    async def recall(self, step: Step, runs: Sequence[Run]) -> None:
        """End leases that grow, and those of prefixes, and return when no read of them can succeed any more."""
        ended: list[Awaitable[object]] = []
        if self.sharing is not None and self.shelf is not None:
            for run in runs:
                self.sharing.end(run)
            ended += map(self.shelf.left, runs)
        sent = {send.request_id for send in step.send}
        for request_id in step.recall:
            offer = self.offers.get(request_id) if request_id in sent else self.offers.pop(request_id, None)
            if offer is not None and offer.lease is not None and offer.outcome is None:
                offer.let_run()
                offer.lease.fail(_RECALLED)
                ended.append(offer.lease.wait())
        await asyncio.gather(*ended)

    def _keep(self, runtime: Runtime, keep: Keep) -> None:
        kept = ExitStack()
        try:
            for ticket in keep.tickets:
                kept.enter_context(runtime.keep_leases(ticket))
        except KVFlowError as error:
            kept.close()
            logger.info("request %s: its leases are not kept: %s", keep.request_id, error)
        else:
            self.kept[keep.request_id] = kept

    def _let_go(self, request_id: str) -> None:
        if request_id in self.kept:
            self.kept.pop(request_id).close()

    def _receive(self, runtime: Runtime, receive: Receive, after: DeviceEvent | None) -> None:
        started: list[Load] = []
        body = self._load(runtime, receive, after, started)
        load = asyncio.create_task(body, name=f"kvflow-receive {receive.request_id}")
        self.loads[receive.request_id] = load
        self._spawn(self._follow(runtime, receive, load, started))

    async def _load(
        self, runtime: Runtime, receive: Receive, after: DeviceEvent | None, started: list[Load]
    ) -> LoadReport:
        for lease in tuple(self.withdrawn):
            await lease  # its blocks may be ours now, and are kept for a moment after its end
        request = LoadRequest(
            name_of(receive.request_id),
            ticket=receive.tickets,
            block_ids=given_block_ids(receive.block_tables),
            after=after,
            deadline_s=_deadline_s(runtime, receive),
            prompt=receive.prompt,
            num_tokens=receive.num_tokens,
            keep_offer=receive.shared,
        )
        started.append(runtime.start_load(request))
        return await started[0]

    async def _follow(
        self, runtime: Runtime, receive: Receive, load: asyncio.Task[LoadReport], started: list[Load]
    ) -> None:
        """Wait until a load has ended and its blocks are safe; then say so."""
        request_id = receive.request_id
        await asyncio.wait([load])
        self._let_go(request_id)
        for one in started:
            await one.settled()
        del self.loads[request_id]
        error = None if load.cancelled() else load.exception()
        if error is not None and not isinstance(error, KVFlowError):
            raise error
        if load.cancelled() or error is not None:
            self.happened.append(LoadFailed(request_id, receive.block_tables, error))
            logger.warning("request %s: its prompt was not received: %s", request_id, error or "abandoned")
        else:
            report = load.result()
            self.happened.append(Loaded(request_id, report))
            self.peers.learn(receive.tickets[0], report)
        nobody = load.cancelled() or (error is not None and receive.release_if_failed)  # will read it any more
        if nobody and not receive.shared:
            self._release(runtime, receive.tickets)

    def _save(self, runtime: Runtime, save: Save, ready: DeviceEvent | None) -> None:
        request = ServeRequest(
            save.serve_id,
            block_ids=given_block_ids(save.block_tables),
            num_tokens=save.num_tokens,
            ttl_s=save.ttl_s,
            ready=ready,
            computed_tokens=save.computed_tokens,
            prompt=save.prompt,
            extends=save.computed_tokens is not None,
        )
        offer = self.offers[save.request_id] = _Offered(save.request_id, save.ttl_s, flows=request.extends)
        try:
            lease = offer.lease = runtime.serve_blocks(request)
        except KVFlowError as error:
            logger.warning("request %s: its prompt is not offered: %s", save.request_id, error)
            offer.outcome = LeaseOutcome.REVOKED
            if offer.flows:
                _decline(runtime, save.serve_id, f"{type(error).__name__}: {error}")
            return
        self._keep_offer(offer, lease)
        self._spawn(self._watch(offer, lease))

    def _grow(self, grow: Grow, ready: DeviceEvent | None) -> None:
        offer = self.offers[grow.request_id]
        if offer.lease is None or offer.outcome is not None:
            return
        try:
            if any(grow.block_tables):
                offer.lease.extend(given_block_ids(grow.block_tables))
            offer.lease.advance(grow.num_tokens, ready)
        except KVFlowError as error:  # such as host buffers that are full
            logger.warning("request %s: its prompt is not offered any more: %s", grow.request_id, error)
            offer.lease.fail(f"{type(error).__name__}: {error}")

    def _keep_offer(self, offer: _Offered, lease: Lease) -> None:
        """Begin its time anew until its ticket is out: nobody can read it before."""
        lease.restart(offer.ttl_s)
        offer.restart = asyncio.get_running_loop().call_later(offer.ttl_s / 3, self._keep_offer, offer, lease)

    async def _watch(self, offer: _Offered, lease: Lease) -> None:
        try:
            offer.outcome = await lease
        finally:
            offer.let_run()
        self.withdrawn.discard(lease)
        self._report_if_over(offer)

    def _send(self, request_id: str) -> None:
        offer = self.offers[request_id]
        offer.sent = True
        if offer.lease is not None:
            offer.lease.restart(offer.ttl_s)
        offer.let_run()
        self._report_if_over(offer)

    def _withdraw(self, request_id: str) -> None:
        offer = self.offers.get(request_id)
        if offer is None:
            return  # its end is on its way to the engine
        if not offer.sent:
            del self.offers[request_id]
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
        current = self.offers.get(offer.request_id) is offer
        if offer.outcome is not None and (offer.sent or not current):
            self.happened.append(OfferEnded(offer.request_id, offer.outcome, offer.sent))
            if current:
                del self.offers[offer.request_id]

    def _release(self, runtime: Runtime, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._spawn(_release(runtime, ticket))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.problem = task.exception()


def _deadline_s(runtime: Runtime, receive: Receive) -> float | None:
    """Deadline of a load; None for the runtime's own.

    A prompt that is received while it is computed takes as long as that. It has to be begun within its ticket's ttl_s,
    and whatever goes wrong is told, so a producer's lease bounds it.
    """
    config = runtime.config
    return max(config.load_deadline_s, config.lease_lifetime_s) if receive.num_tokens is not None else None


def _decline(runtime: Runtime, serve_id: str, reason: str) -> None:
    """Tell those who wait for a prompt that it is not to be had."""
    try:
        runtime.decline(serve_id, reason)
    except KVFlowError as error:  # such as one of the same name that is
        logger.warning("request %s: %s", serve_id, error)


async def _release(runtime: Runtime, ticket: Ticket) -> None:
    """Tell a producer that nothing will be read for its ticket. Its lease would run out without us too."""
    try:
        await runtime.release_blocks(ticket)
    except KVFlowError as error:
        logger.info("request %s: its producer was not told: %s", ticket.request_id, error)
