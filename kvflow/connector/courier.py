"""The courier: a connector worker's loads, leases and questions on the loop, from a step to their ends.

The engine's thread hands steps over (`connector.worker`) and takes what has happened; everything between runs here, in
tasks of one loop. Whatever ends is told once, and a task that dies is the courier's `problem`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvflow.connector.offers import OfferEnded, Offers, decline, send_on
from kvflow.connector.parameters import name_of
from kvflow.connector.prefix_questions import PrefixOutcome
from kvflow.connector.step import BlockTables, Found, Keep, Question, Receive, Step
from kvflow.core.plan.descriptors import given_block_ids
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.protocol.prompts import with_marks
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import KVFlowError
from kvflow.logs import logger_of
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.requests import LoadReport, LoadRequest
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
class Answered:
    """Peers have been asked for a prefix."""

    found: Found
    outcome: PrefixOutcome
    total_s: float


Happening: TypeAlias = Loaded | LoadFailed | OfferEnded | Answered


class Courier:
    """The loads, offers and questions of the engine's requests; lives on the loop."""

    def __init__(self, peers: PrefixPeers | None) -> None:
        self.peers = peers
        """Peers that prefixes are shared with, and asked for; None without `kvflow.prefix.Prefixes`."""
        self.happened: deque[Happening] = deque()
        """What has ended, until the engine's thread takes it."""
        self.offers = Offers(self.happened.append, self._spawn)
        self.problem: BaseException | None = None
        self.prefix_cache: PagedPrefixCache | None = None
        """Blocks shared with peers."""
        self.sharing: SharedPrefixes | None = None
        self._kept: dict[str, ExitStack] = {}
        """Leases kept open for requests that wait for blocks, or load."""
        self._loads: dict[str, asyncio.Task[LoadReport]] = {}
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
        for send in step.send:
            self.offers.send(send.request_id)
        for release in step.release:
            self._let_go(release.request_id)
            if release.last:
                self._release(runtime, release.tickets)
        for keep in step.keep:
            self._keep(runtime, keep)
        for request_id in step.withdraw:
            self.offers.withdraw(request_id)
        for declined in step.decline:
            decline(runtime, declined.serve_id, declined.reason)
        if (runtime.config.tp_rank, runtime.config.pp_rank) == (0, 0):  # one rank tells for all
            for sent_on in step.send_on:
                send_on(runtime, sent_on)
        for receive in step.receive:
            self._receive(runtime, receive, after)
        for request_id in step.abandon:
            if request_id in self._loads:  # else its end is on its way to the engine
                self._loads[request_id].cancel()
        for save in step.save:
            self.offers.save(runtime, save, ready)
        for grow in step.grow:
            self.offers.grow(grow, ready)

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
        self.happened.append(Answered(Found(request_id=question.request_id, tickets=tickets), outcome, took_s))
        self._release(runtime, others)

    async def recall(self, step: Step, read: Sequence[PinnedPrefix]) -> None:
        """End leases that grow, and those of prefixes, and return when no read of them can succeed any more."""
        ended: list[Awaitable[object]] = []
        if self.sharing is not None and self.prefix_cache is not None:
            for pinned in read:
                self.sharing.end(pinned)
            ended += map(self.prefix_cache.left, read)
        ended += self.offers.recall(step)
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
            self._kept[keep.request_id] = kept

    def _let_go(self, request_id: str) -> None:
        if request_id in self._kept:
            self._kept.pop(request_id).close()

    def _receive(self, runtime: Runtime, receive: Receive, after: DeviceEvent | None) -> None:
        started: list[Load] = []
        body = self._load(runtime, receive, after, started)
        load = asyncio.create_task(body, name=f"kvflow-receive {receive.request_id}")
        self._loads[receive.request_id] = load
        self._spawn(self._follow(runtime, receive, load, started))

    async def _load(
        self, runtime: Runtime, receive: Receive, after: DeviceEvent | None, started: list[Load]
    ) -> LoadReport:
        """Load the blocks of a request that the scheduler has asked for.

        Task `kvflow-receive <request>`: one for each load of a connector's worker. Ends with its outcome. The
        request of one that fails is reported as failed.
        """
        for lease in tuple(self.offers.withdrawn):
            await lease  # its blocks may be ours now, and are kept for a moment after its end
        request = LoadRequest(
            name_of(receive.request_id),
            ticket=receive.tickets,
            block_ids=given_block_ids(receive.block_tables),
            after=after,
            deadline_s=_deadline_s(runtime, receive),
            prompt=with_marks(receive.prompt, receive.marks),
            num_tokens=receive.num_tokens,
            keep_offer=receive.shared,
            cached_tokens=receive.cached_tokens,
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
        del self._loads[request_id]
        error = None if load.cancelled() else load.exception()
        if error is not None and not isinstance(error, KVFlowError):
            raise error
        if load.cancelled() or error is not None:
            self.happened.append(LoadFailed(request_id, receive.block_tables, error))
            logger.warning("request %s: its prompt was not received: %s", request_id, error or "abandoned")
        else:
            report = load.result()
            self.happened.append(Loaded(request_id, report))
            if self.peers is not None:
                self.peers.prefixes.learn(receive.tickets[0], report)
        nobody = load.cancelled() or (error is not None and receive.release_if_failed)  # will read it any more
        if nobody and not receive.shared:
            self._release(runtime, receive.tickets)

    def _release(self, runtime: Runtime, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._spawn(_release(runtime, ticket))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.problem = task.exception()


def _deadline_s(runtime: Runtime, receive: Receive) -> float | None:
    """Deadline of a load; None for the runtime's own.

    A prompt that is received while it is computed takes as long as that. It has to be begun within its ticket's ttl_s,
    and whatever goes wrong is told, so a producer's lease bounds it.
    """
    config = runtime.config
    awaited = any(ticket.awaited for ticket in receive.tickets)
    return max(config.load_deadline_s, config.lease_lifetime_s) if awaited else None


async def _release(runtime: Runtime, ticket: Ticket) -> None:
    """Tell a producer that nothing will be read for its ticket. Its lease would run out without us too."""
    try:
        await runtime.release_blocks(ticket)
    except KVFlowError as error:
        logger.info("request %s: its producer was not told: %s", ticket.request_id, error)
