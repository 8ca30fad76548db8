"""A simulated engine: ranks with their caches and runtimes, and an allocator that reuses freed blocks at once.

It does what kvflow asks of a real engine and nothing kinder: a block that is given back is overwritten in the same
moment, and goes to the next request that needs one. Every promise that kvflow makes on the way is checked.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from kvflow.config import Config
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import (
    BlocksBusy,
    KVFlowError,
    LoadError,
    PeerError,
    RequestError,
    RuntimeBroken,
    RuntimeUnavailable,
)
from kvflow.runtime.consumer.load import LoadReport, LoadRequest
from kvflow.runtime.peers.prewarm import PeerAddress
from kvflow.runtime.producer.lease import LeaseOutcome, ServeRequest
from kvflow.runtime.runtime import Runtime
from kvflow.testing.clock import LoopClock
from kvflow.testing.simulator.cache import RankCache
from kvflow.testing.simulator.network import LOAD, Host
from kvflow.testing.simulator.settings import Shape
from kvflow.testing.simulator.work import Load, LoadPlan, Offer, Rank, RankLoad
from kvflow.testing.simulator.world import make_world
from kvflow.testing.virtual_loop import Life

if TYPE_CHECKING:
    from kvflow.testing.simulator.simulation import Simulation

_SLACK_S = 1e-6
_DRIFT = 1.01  # a little more than clocks are wrong by

Ending: TypeAlias = "LoadReport | BaseException"


class Engine:
    """One engine over all its lives."""

    def __init__(self, simulation: Simulation, shape: Shape, index: int) -> None:
        self.shape = shape
        self.name = shape.name
        self.running = False
        self.ranks: list[Rank] = []
        self.owners: list[Offer | Load | None] = [None] * shape.num_blocks
        self.offers: dict[Offer, None] = {}
        self.loads: dict[Load, None] = {}
        self._simulation = simulation
        self._network = simulation.network
        self._address = f"10.0.0.{index + 1}"
        self._lives = itertools.count(1)
        self._graves: list[tuple[Life, list[Rank]]] = []
        self.host = Host(self.name, f"tcp://{self._address}", self._new_life())
        self._caches = [
            RankCache(
                order=shape.order,
                num_blocks=shape.num_blocks,
                block_size=shape.block_size,
                tp_rank=rank,
                tp_size=shape.tp_size,
            )
            for rank in range(shape.tp_size)
        ]
        self._free = list(range(shape.num_blocks))

    def __repr__(self) -> str:
        return self.host.life.name

    @property
    def life(self) -> Life:
        return self.host.life

    @property
    def graves(self) -> list[tuple[Life, list[Rank]]]:
        """The processes that died, with what they left."""
        return self._graves

    # --- processes

    async def start(self) -> None:
        """Open all ranks; in a task of its life. The memory is that of the life before, overwritten."""
        ranks: list[Rank] = []
        clock = LoopClock(offset_s=self.shape.clock_offset_s, rate=self.shape.clock_rate)
        for rank, cache in enumerate(self._caches):
            settings = self._simulation.settings
            config: Config = replace(settings.base, **settings.config(self.shape, self._address, rank))  # type: ignore[arg-type]
            world = make_world(lambda: self._network, lambda _: self.host, lambda: clock)
            cache.poison_all(self._simulation.next_poison())
            runtime = Runtime(config, world=world)
            await runtime.__aenter__()
            copies = cache.copy_blocks if self.shape.own_copies else None
            await runtime.register_kv_caches(cache.tensors, cache.layout, copy_blocks=copies)
            ranks.append(Rank(rank, cache, runtime))
        self.ranks = ranks
        self.running = True
        self._note("started")

    def crash(self) -> None:
        """The process is killed: nothing of it runs any more, its memory goes to somebody else."""
        self._note("crashed")
        self._simulation.forget_tasks(self.life)
        self.life.kill()
        self._network.detach(self.host)
        self._bury()

    async def close(self) -> bool:
        """Close all ranks as an engine that shuts down; in a task of its life. Whether the memory may be reused."""
        self.running = False
        base = self._simulation.settings.base
        bound_s = self._drain_bound_s(base.drain_timeout_s) + base.limits.goodbye_timeout_s
        with self._simulation.bounded(self, "aclose", bound_s + base.limits.transport_close_timeout_s):
            endings = await asyncio.gather(*(rank.runtime.aclose() for rank in self.ranks), return_exceptions=True)
        for ending in endings:
            if isinstance(ending, RuntimeBroken):
                self._note("could not close", str(ending))
                return False
            if isinstance(ending, BaseException):
                raise ending
        self._note("closed")
        for rank in self.ranks:
            if not self.host.agent_lost:
                self._simulation.checks.closed(self, rank.runtime)
        return True

    async def drain(self, deadline_s: float) -> None:
        """Take no new work and let what is open end; in a task of its life."""
        await self._on_all_ranks("drain", self._drain_bound_s(deadline_s), lambda runtime: runtime.drain(deadline_s))

    async def forget(self, other: Engine) -> None:
        """Forget a peer; in a task of its life."""
        bound_s = 2 * self._simulation.settings.base.handshake_timeout_s
        await self._on_all_ranks("forget_peer", bound_s, lambda runtime: runtime.forget_peer(other.name))

    async def prewarm(self, other: Engine) -> None:
        """Connect to a peer; in a task of its life."""
        address = PeerAddress(engine_id=other.name, address=f"{other.host.address}:5600")
        bound_s = self._simulation.settings.base.handshake_timeout_s * (1 + other.shape.tp_size)
        await self._on_all_ranks("prewarm", bound_s, lambda runtime: runtime.prewarm([address]))

    async def _on_all_ranks(
        self, what: str, bound_s: float, call: Callable[[Runtime], Coroutine[Any, Any, object]]
    ) -> None:
        """Call something on each rank, and judge how it fails."""

        async def on_one(rank: Rank) -> None:
            try:
                with self._simulation.bounded(self, what, bound_s):
                    await call(rank.runtime)
            except KVFlowError as error:
                self._judge_refusal(what, error)

        await asyncio.gather(*map(on_one, self.ranks))

    def _drain_bound_s(self, deadline_s: float) -> float:
        base = self._simulation.settings.base
        ending_s = base.limits.seal_hold_s * _DRIFT + base.cancel_grace_s + base.drain_timeout_s
        return max(deadline_s + ending_s, base.limits.goodbye_timeout_s) + self._simulation.copy_bound_s

    def renew(self) -> None:
        """Make a new life for a process that starts after one that has ended."""
        self.host.agent_lost = False
        self.host.life = self._new_life()

    def retire(self) -> None:
        """The process has ended in good order."""
        self._simulation.forget_tasks(self.life)
        self.life.kill()
        self._network.detach(self.host)
        self._bury()

    def _bury(self) -> None:
        self.running = False
        self._graves.append((self.life, self.ranks))
        self.ranks = []
        now_s = self._simulation.loop.time()
        for offer in self.offers:
            offer.given_back_s = now_s
        self.offers, self.loads = {}, {}
        self.owners = [None] * self.shape.num_blocks
        self._free = list(range(self.shape.num_blocks))
        for cache in self._caches:
            cache.poison_all(self._simulation.next_poison())

    def _new_life(self) -> Life:
        return Life(self._simulation.loop, f"{self.name}.{next(self._lives)}")

    # --- blocks

    def take_blocks(self, count: int) -> list[int] | None:
        """Any free blocks, those freed last first."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, owner: Offer | Load) -> None:
        """Blocks come back: they are overwritten at once, and the next who needs some gets them."""
        for block in owner.block_ids:
            assert self.owners[block] is owner
            self.owners[block] = None
        self._free.extend(owner.block_ids)
        self._simulation.rng.shuffle(self._free)
        poison = self._simulation.next_poison()
        for rank in self.ranks:
            rank.cache.poison(poison, owner.block_ids)

    # --- offers

    async def offer(self, number: int, tokens: int, ttl_s: float, pause_s: float) -> Offer | None:
        """Compute a prompt, serve it on all ranks, and hand out its ticket; `finish_offer` is to follow."""
        if not self.running:
            return None
        size = self.shape.block_size
        block_ids = self.take_blocks(-(-tokens // size))
        if block_ids is None:
            self._simulation.count("offer: no room")
            return None
        offer = Offer(number, self, tokens, block_ids, ttl_s)
        for block in block_ids:
            self.owners[block] = offer
        for rank in self.ranks:
            rank.cache.write(number, block_ids)
        self.offers[offer] = None
        self._note("offers", offer.request_id, tokens, block_ids)
        for rank in list(self.ranks):
            try:
                lease = rank.runtime.serve_blocks(ServeRequest(offer.request_id, block_ids, tokens, ttl_s=ttl_s))
            except KVFlowError as error:
                self._judge_refusal(offer.request_id, error)
                for lease in offer.leases:
                    lease.revoke()
                self._simulation.count(f"offer: {type(error).__name__}")
                return offer
            rank.served += 1
            offer.leases.append(lease)
            if pause_s and rank is not self.ranks[-1]:
                await self._simulation.pass_time(pause_s)
        return offer

    async def finish_offer(self, offer: Offer) -> None:
        """Wait for the leases of all ranks, then take the blocks back."""
        base = self._simulation.settings.base
        longest_s = max(offer.ttl_s, base.lease_lifetime_s)  # readers renew it up to that
        bound_s = (longest_s + base.limits.seal_hold_s) * _DRIFT + self._simulation.copy_bound_s
        for lease in list(offer.leases):
            with self._simulation.bounded(self, f"lease of {offer.request_id}", bound_s):
                outcome = await lease
            self._simulation.count(f"lease: {outcome}")
            if not isinstance(outcome, LeaseOutcome):
                self._simulation.fail("I4", f"{offer.request_id}: a lease ended as {outcome!r}")
        offer.given_back_s = self._simulation.loop.time()
        self._note("has back", offer.request_id)
        self.offers.pop(offer)
        self.give_back(offer)

    # --- loads

    async def load(self, offer: Offer, ticket: Ticket, plan: LoadPlan) -> None:
        """Load an offered prompt, check what came, and use the blocks for a while."""
        if not self.running:
            return
        size = self.shape.block_size
        count = -(-offer.tokens // size)
        wanted = max(count - plan.cached_blocks, 0)
        block_ids = self.take_blocks(wanted)
        if block_ids is None:
            self._simulation.count("load: no room")
            return
        load = Load(offer, self, plan, block_ids)
        for block in block_ids:
            self.owners[block] = load
        self.loads[load] = None
        self._note("loads", offer.request_id, repr(offer.engine), block_ids)
        endings = await self._load_on_all_ranks(load, ticket)
        succeeded = self._judge(load, endings)
        offer.loaded = offer.loaded or succeeded
        if not succeeded:
            await self._safe(load, endings)
        self.loads.pop(load)
        if succeeded and plan.use_s:
            await self._simulation.pass_time(plan.use_s)
            self._check_bytes(load)
        self.give_back(load)

    async def wait_and_load(self, offer: Offer, ticket: Ticket, plan: LoadPlan, wait_s: float) -> None:
        """The same, but the request has to wait first."""
        with ExitStack() as kept:
            try:
                for rank in self.ranks:
                    kept.enter_context(rank.runtime.keep_leases(ticket.to_params()))
            except KVFlowError as error:
                self._judge_refusal(offer.request_id, error)
            await self._simulation.pass_time(wait_s)
            self._simulation.count("load: waited")
            await self.load(offer, ticket, plan)

    async def release(self, offer: Offer, ticket: Ticket) -> None:
        """Give an offer up unread, as for a request that was aborted before it was decoded."""
        if not self.running:
            return
        base = self._simulation.settings.base
        for rank in list(self.ranks):
            try:
                with self._simulation.bounded(self, f"release of {offer.request_id}", base.handshake_timeout_s):
                    told = await rank.runtime.release_blocks(ticket.to_params())
            except KVFlowError as error:
                self._judge_refusal(offer.request_id, error)
                self._simulation.count(f"release: {type(error).__name__}")
            else:
                self._simulation.count(f"release: {'told' if told else 'not told'}")

    async def _load_on_all_ranks(self, load: Load, ticket: Ticket) -> list[Ending]:
        plan = load.plan
        request = LoadRequest(load.offer.request_id, ticket.to_params(), load.block_ids, deadline_s=plan.deadline_s)
        tasks = [asyncio.create_task(self._load_on(rank, load, request)) for rank in self.ranks]
        timer = None
        if plan.cancel_after_s is not None:
            timer = self._simulation.loop.call_later(plan.cancel_after_s, self._cancel, load, tasks)
        await asyncio.wait(tasks)
        if timer is not None:
            timer.cancel()
        return [task.result() for task in tasks]

    async def _load_on(self, rank: Rank, load: Load, request: LoadRequest) -> Ending:
        """One rank's load: its report, or what it raised. Success is judged in the very moment it is reported."""
        base = self._simulation.settings.base
        deadline_s = base.load_deadline_s if request.deadline_s is None else request.deadline_s
        mine = RankLoad(load)
        LOAD.set(mine)
        try:
            with self._simulation.bounded(self, request.request_id, deadline_s + base.cancel_grace_s):
                report = await rank.runtime.load_blocks(request)
        except (KVFlowError, asyncio.CancelledError) as error:
            return error
        rank.loaded += 1
        wrong = self._wrong_token(load, rank)
        if wrong is not None:
            self._simulation.fail("I2", f"{self} reports {request.request_id} as loaded, but {wrong}")
        given_back_s = load.offer.given_back_s
        if given_back_s is not None and mine.last_landing_s > given_back_s:
            self._simulation.fail(
                "I3",
                f"{request.request_id} succeeded at {self} with bytes read at {mine.last_landing_s:.6f} s, but its "
                f"blocks were given back at {given_back_s:.6f} s",
            )
        return report

    def _cancel(self, load: Load, tasks: Sequence[asyncio.Task[Ending]]) -> None:
        load.cancelled = True
        self._note("cancels", load.offer.request_id)
        for task in tasks:
            task.cancel()

    def _judge(self, load: Load, endings: Sequence[Ending]) -> bool:
        """Count how a load has ended; whether all ranks have all."""
        for ending in endings:
            self._note("load ended", load.offer.request_id, _short(ending))
            self._simulation.count(f"load: {'ok' if isinstance(ending, LoadReport) else type(ending).__name__}")
            if isinstance(ending, asyncio.CancelledError) and not load.cancelled:
                self._simulation.fail("I4", f"{load.offer.request_id}: CancelledError without a cancel")
            if isinstance(ending, KVFlowError):
                self._judge_refusal(load.offer.request_id, ending)
        self._simulation.checks.conserved(self)
        return all(isinstance(ending, LoadReport) for ending in endings)

    async def _safe(self, load: Load, endings: Sequence[Ending]) -> None:
        """Wait until no rank's blocks can be written any more, where one says that they can."""
        for rank, ending in zip(list(self.ranks), endings, strict=False):
            quarantine = ending.quarantine if isinstance(ending, KVFlowError) else None
            if quarantine is None:
                mine = [one for one in rank.runtime.quarantines if one.request_id == load.offer.request_id]
                quarantine = next((one for one in mine if set(one.block_ids) <= set(load.block_ids)), None)
            if quarantine is None or quarantine.safe:
                continue
            self._simulation.count("load: quarantined")
            try:
                await quarantine.settled()
            except RuntimeBroken:
                self._note("lost blocks", load.block_ids)
                if self.running:
                    self._simulation.later_crash(self)
                await asyncio.get_running_loop().create_future()  # until the process ends
            self._note("safe", load.offer.request_id)

    def _judge_refusal(self, request_id: str, error: KVFlowError) -> None:
        """Whether an engine that did everything right may get this error."""
        expected = isinstance(error, LoadError | PeerError | RuntimeUnavailable)
        if isinstance(error, RequestError) and not isinstance(error, BlocksBusy):
            expected = "host_buffer_bytes_max" in str(error)
        if isinstance(error, RuntimeBroken):
            if not self.host.agent_lost:
                self._simulation.fail("I7", f"{self}, {request_id}: the runtime broke by itself: {error}")
            return
        if not expected:
            self._simulation.fail("I5", f"{self}, {request_id}: {type(error).__name__}: {error}")

    def _wrong_token(self, load: Load, rank: Rank) -> str | None:
        offer, size = load.offer, self.shape.block_size
        start = (-(-offer.tokens // size) - len(load.block_ids)) * size
        if not load.block_ids:
            return None
        return rank.cache.wrong_token(offer.number, start, offer.tokens, load.block_ids)

    def _check_bytes(self, load: Load) -> None:
        """After a load nothing may be written to its blocks."""
        for rank in self.ranks:
            wrong = self._wrong_token(load, rank)
            if wrong is not None:
                self._simulation.fail(
                    "I1", f"{self}: blocks of {load.offer.request_id} changed after the load: {wrong}"
                )

    # --- copies

    def landing_blocks(self, local: int, size_bytes: int) -> Iterator[int]:
        for cache in self._caches:
            yield from cache.blocks_of(local, size_bytes)

    def _note(self, *what: object) -> None:
        self._simulation.note(repr(self), *what)


def _short(ending: Ending) -> str:
    return "ok" if isinstance(ending, LoadReport) else f"{type(ending).__name__}: {ending}"
