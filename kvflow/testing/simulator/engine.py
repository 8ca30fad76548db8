"""A simulated engine: ranks with their caches and runtimes, and an allocator that reuses freed blocks at once.

It does what kvflow asks of a real engine and nothing kinder: a block that is given back is overwritten in the same
moment, and goes to the next request that needs one. Every promise that kvflow makes on the way is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from kvflow.core.plan.descriptors import given_block_ids
from kvflow.core.policy.states import LeaseState
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.core.protocol.ticket import Ticket, merge_tickets
from kvflow.errors import (
    BlocksBusy,
    ChecksumMismatch,
    KVFlowError,
    LoadError,
    PeerError,
    PrefillFailed,
    RequestError,
    RuntimeBroken,
    RuntimeUnavailable,
)
from kvflow.runtime.load.load import Load as Handle
from kvflow.runtime.load.requests import Again, LoadReport, LoadRequest, Verification
from kvflow.runtime.producer.lease import Lease, ServeRequest
from kvflow.runtime.records import Attempt
from kvflow.runtime.runtime import Runtime
from kvflow.testing.books import assert_closed
from kvflow.testing.clock import LoopClock
from kvflow.testing.simulator.cache import Content, RankCache
from kvflow.testing.simulator.checks import check_conserved, demand
from kvflow.testing.simulator.network import LOAD, SimHost
from kvflow.testing.simulator.settings import Shape
from kvflow.testing.simulator.shelf import Kept, SimShelf
from kvflow.testing.simulator.work import DeviceWork, LoadPlan, RankLoad, SimLoad, SimOffer, SimRank, all_over
from kvflow.testing.simulator.world import make_world
from kvflow.testing.virtual_loop import Life

if TYPE_CHECKING:
    from kvflow.testing.simulator.prefixes import SimPull
    from kvflow.testing.simulator.simulation import Simulation

_AT_ONCE_SHARE = 0.3  # of what a device is told to write
_DEVICE_S = 0.01  # mean time until it has written the rest
_GROWING_SHARE = 0.5  # of prompts on a device: offered before they are computed
_GROWING_STEPS = 2
_EXTENDED_SHARE = 0.4  # of those: their blocks follow while they are computed, and something comes with the end
_BROKEN_SHARE = 0.05  # of the steps in which a prompt is computed: it never will be
_FORGOTTEN_SHARE = 0.3  # of those: nobody is told
_TURNED_SHARE = 0.5  # of engines that wake with another layout
_FOLLOWED_EVERY = 4  # loads, by number: one whose progress somebody wants to know
_HASTY_EVERY = 3  # offers whose blocks follow, by number: one whose engine tells of tokens before it gives their blocks
_SLOW_SHARE = 0.2  # of tickets that are asked for when no source is left: a prompt is computed once more
_DRIFT = 1.01  # a little more than clocks are wrong by

Owner: TypeAlias = "SimOffer | SimLoad | SimPull | Kept"
Ending: TypeAlias = "LoadReport | BaseException"


class SimEngine:
    """An engine over all its lives."""

    ranks: list[SimRank]
    offers: dict[SimOffer, None]
    loads: dict[SimLoad | SimPull, None]
    owners: list[Owner | None]
    shelf: SimShelf
    """Shelf of the prompts that it keeps."""
    _naps: int

    def __init__(self, simulation: Simulation, shape: Shape, index: int) -> None:
        self.shape = shape
        self.name = shape.name
        self._simulation = simulation
        self._base = simulation.settings.base
        self._network = simulation.network
        self._address = f"10.0.0.{index + 1}"
        self._lives = itertools.count(1)
        self._graves: list[tuple[Life, list[SimRank]]] = []
        """The processes that have ended, with what they left: nothing of them is destroyed before the simulation is."""
        self.host = SimHost(self.name, f"tcp://{self._address}", self._new_life())
        model = simulation.settings.model
        self.facts = model.groups(shape)
        self._caches = [
            RankCache(model, shape, tp_rank, pp_rank)
            for pp_rank in range(shape.pp_size)
            for tp_rank in range(shape.tp_size)
        ]
        self._forget_all()

    def __repr__(self) -> str:
        return self.life.name

    @property
    def life(self) -> Life:
        return self.host.life

    def fail(self, invariant: str, what: str) -> None:
        """A promise to this engine was broken."""
        self._simulation.fail(invariant, f"{self}: {what}")

    def note(self, *what: object) -> None:
        self._simulation.note(repr(self), *what)

    # --- processes

    async def start(self) -> None:
        """Open all ranks; in a task of its life. The memory is that of the life before, overwritten."""
        ranks: list[SimRank] = []
        clock = LoopClock(offset_s=self.shape.clock_offset_s, rate=self.shape.clock_rate)
        world = make_world(lambda: self._network, lambda _: self.host, lambda: clock)
        for index, cache in enumerate(self._caches):
            cache.poison(self._simulation.next_poison(), None)
            runtime = Runtime(self._simulation.settings.config(self.shape, self._address, index), world=world)
            await runtime.__aenter__()
            await runtime.register_kv_caches(cache.groups)
            ranks.append(SimRank(index, cache, runtime, self._change))
        self.ranks = ranks
        self._share()
        self.running = True
        self.note("started")

    def _change(self, rank: SimRank) -> None:
        self._simulation.changed[rank] = self

    async def close(self) -> bool:
        """Close all ranks as an engine that shuts down; in a task of its life. Whether the memory may be reused."""
        self.running = False
        limits = self._base.limits
        bound_s = self._drain_bound_s(self._base.drain_timeout_s) + limits.goodbye_timeout_s
        with self.bounded("aclose", bound_s + limits.transport_close_timeout_s):
            endings = await asyncio.gather(*(rank.runtime.aclose() for rank in self.ranks), return_exceptions=True)
        for ending in endings:
            if isinstance(ending, RuntimeBroken):
                self.note("could not close", str(ending))
                return False
            if isinstance(ending, BaseException):
                raise ending
        for rank in self.ranks:
            self.shelf.check_left(rank)
        self.note("closed")
        for rank in self.ranks:
            if not self.host.agent_lost:
                demand(self, assert_closed, rank.runtime.statistics())
        return True

    async def nap(self, nap_s: float) -> None:
        """Give the cache back under whatever goes on, and register it again a while later, with other contents.

        In a task of its life. Now and then it comes back with another layout.
        """
        if not self.running:
            return
        self.running = False
        self.note("goes to sleep")
        self._naps += 1
        if not await self._unregister():
            return
        self.asleep = True
        self.note("sleeps")
        for offer in self.offers:
            offer.given_back_s = self._simulation.loop.time()
        while self.offers or self.loads or self.shelf.waits:
            await self._simulation.pass_time(0.01)
        await self._simulation.pass_time(0.01)
        self.shelf.clear()
        await self._simulation.pass_time(nap_s)
        turned = self._simulation.rng.random() < _TURNED_SHARE
        for rank in self.ranks:
            if turned:
                rank.cache.turn()
            rank.cache.poison(self._simulation.next_poison(), None)
        self.asleep = False
        if await self._register_again():
            self._share()
            self.running = True
            self.note("is awake")

    def _share(self) -> None:
        """Share what it will keep, with a shelf that is empty."""
        self.shelf = SimShelf(self._simulation, self)
        if self._simulation.settings.model.shares:
            self.shelf.share()

    async def _unregister(self) -> bool:
        """Give all ranks' memory away, each in the moment in which that may be; whether it may be everywhere."""
        limits, given = self._base.limits, 0
        bound_s = self._drain_bound_s(0.0) + limits.goodbye_timeout_s + 2 * limits.transport_close_timeout_s

        async def on_one(rank: SimRank) -> None:
            nonlocal given
            try:
                with self.bounded("unregister", bound_s):
                    await rank.runtime.unregister()
            except RuntimeUnavailable:
                self.note("closes instead")
            except RuntimeBroken as error:
                self.note("could not unregister", str(error))
                self.host.agent_lost = True
                self._simulation.later_crash(self)
            else:
                self.shelf.check_left(rank)
                given += 1
                rank.cache.poison(self._simulation.next_poison(), None)

        await asyncio.gather(*map(on_one, self.ranks))
        return given == len(self.ranks)

    async def _register_again(self) -> bool:
        for rank in self.ranks:
            try:
                await rank.runtime.register_kv_caches(rank.cache.groups)
            except KVFlowError as error:  # it drains, or closes
                self.judge_refusal("register_kv_caches", error)
                return False
            rank.look_up()
        return True

    async def drain(self, deadline_s: float) -> None:
        """Take no new work and let what is open end; in a task of its life."""
        await self._on_all_ranks("drain", self._drain_bound_s(deadline_s), lambda runtime: runtime.drain(deadline_s))

    async def forget(self, other: SimEngine) -> None:
        """Forget a peer; in a task of its life."""
        bound_s = 2 * self._base.handshake_timeout_s
        await self._on_all_ranks("forget_peer", bound_s, lambda runtime: runtime.forget_peer(other.name))

    async def prewarm(self, other: SimEngine) -> None:
        """Connect to a peer; in a task of its life."""
        address = PeerAddress(engine_id=other.name, address=f"{other.host.address}:5600")
        bound_s = self._base.handshake_timeout_s * (1 + other.shape.num_ranks)
        await self._on_all_ranks("prewarm", bound_s, lambda runtime: runtime.prewarm([address]))

    async def _on_all_ranks(
        self, what: str, bound_s: float, call: Callable[[Runtime], Coroutine[object, object, object]]
    ) -> None:
        """Call something on each rank, and judge how it fails."""

        async def on_one(rank: SimRank) -> None:
            try:
                with self.bounded(what, bound_s):
                    await call(rank.runtime)
            except KVFlowError as error:
                self.judge_refusal(what, error)

        await asyncio.gather(*map(on_one, self.ranks))

    def _drain_bound_s(self, deadline_s: float) -> float:
        base, limits = self._base, self._base.limits
        ending_s = limits.seal_hold_s * _DRIFT + base.cancel_grace_s + base.drain_timeout_s
        return max(deadline_s + ending_s, limits.goodbye_timeout_s) + self._simulation.copy_bound_s

    @contextlib.contextmanager
    def bounded(self, what: str, bound_s: float) -> Iterator[None]:
        """Bound what is awaited inside by `bound_s`, not counting the time that its process was frozen."""
        life, loop = self.life, self._simulation.loop
        begun_s, frozen_s = loop.time(), life.frozen_s
        cancelled = False
        try:
            yield
        except asyncio.CancelledError:
            cancelled = True  # who gives up may wait until its blocks are safe
            raise
        finally:
            took_s = loop.time() - begun_s - (life.frozen_s - frozen_s)
            if not cancelled and took_s > bound_s + self._simulation.settings.weather.poll_s + 1e-6:
                self.fail("I7", f"{what} took {took_s:.6f} s, its bound is {bound_s:.6f} s")

    def crash(self) -> None:
        """The process is killed."""
        self.note("crashed")
        self.end()

    def end(self) -> None:
        """End the process: nothing of it runs any more, its memory goes to somebody else."""
        self._simulation.forget_tasks(self.life)
        self.life.kill()
        self._network.detach(self.host)
        self._graves.append((self.life, self.ranks))
        for offer in self.offers:
            offer.given_back_s = self._simulation.loop.time()
        self._forget_all()
        for cache in self._caches:
            cache.poison(self._simulation.next_poison(), None)

    def renew(self) -> None:
        """Make a new life for a process that starts after one that has ended."""
        self.host.agent_lost = False
        self.host.life = self._new_life()

    def _new_life(self) -> Life:
        return Life(self._simulation.loop, f"{self.name}.{next(self._lives)}")

    def _forget_all(self) -> None:
        """Forget all, as a process that has not started."""
        self.running = False
        self.asleep = False
        """True while its memory is somebody else's."""
        self._naps = 0
        self.ranks = []
        self.offers = {}
        self.loads = {}
        self.shelf = SimShelf(self._simulation, self)
        self.owners = [None] * self.shape.num_blocks
        self._free = list(range(self.shape.num_blocks))

    # --- blocks

    def take_blocks(self, tokens: int, computed: int = 0) -> list[list[int]] | None:
        """Blocks of each group for what `tokens` tokens need of it beyond the computed ones, those freed last first."""
        counts = []
        for facts in self.facts:
            stop = -(-tokens // facts.block_size)
            first = max(facts.first_needed(tokens), computed) // facts.block_size if computed < tokens else stop
            counts.append(stop - first)
        return self.take_counts(counts)

    def take_counts(self, counts: Sequence[int]) -> list[list[int]] | None:
        """Take blocks of each group; what is kept of old prompts goes for them, however pinned for readers it is."""
        if (short := sum(counts) - len(self._free)) > 0:
            self.shelf.make_room(short)
        if sum(counts) > len(self._free):
            return None
        return [[self._free.pop() for _ in range(count)] for count in counts]

    def later(self, work: Callable[[], None]) -> DeviceWork | None:
        """Write to a rank's cache as its device does: some time after the command, or at once."""
        model, rng = self._simulation.settings.model, self._simulation.rng
        if not model.device or rng.random() < _AT_ONCE_SHARE:
            work()
            return None
        return DeviceWork(rng.expovariate(1 / _DEVICE_S), work)

    def own(self, owner: Owner) -> None:
        for block in owner.block_ids:
            self.owners[block] = owner

    def give_back(self, owner: Owner) -> None:
        """Blocks come back: they are overwritten at once, and the next who needs some gets them."""
        for block in owner.block_ids:
            assert self.owners[block] is owner
            self.owners[block] = None
        self._free.extend(owner.block_ids)
        self._simulation.rng.shuffle(self._free)
        poison = self._simulation.next_poison()
        for rank in self.ranks:
            rank.cache.poison(poison, owner.block_ids)

    def landing_blocks(self, local: int, size_bytes: int) -> Iterator[int]:
        """The blocks that so many bytes at an address are in."""
        for cache in self._caches:
            yield from cache.blocks_of(local, size_bytes)

    # --- offers

    async def offer(
        self,
        number: int,
        tokens: int,
        ttl_s: float,
        pause_s: float,
        early: Callable[[SimOffer], Awaitable[None]] | None,
        content: Content | None = None,
    ) -> SimOffer | None:
        """Compute a prompt, serve it on all ranks, and hand out its ticket; `finish_offer` is to follow.

        `early` hands a rendezvous out before it is served.
        """
        if not self.running:
            return None
        tables = self.take_blocks(tokens)
        if tables is None:
            self._simulation.count("offer: no room")
            return None
        offer = SimOffer(number, self, tokens, tables, ttl_s, number if content is None else content)
        self.own(offer)
        grows = self._simulation.settings.model.device and self._simulation.rng.random() < _GROWING_SHARE
        if not grows:
            for rank in self.ranks:
                offer.device.append(self.later(partial(rank.cache.write, offer.content, tokens, tables)))
        self.offers[offer] = None
        self.note("offers", offer.request_id, tokens, offer.block_ids)
        if grows and self._simulation.rng.random() < _EXTENDED_SHARE:
            offer.payload = offer.request_id.encode()
        if early is not None:
            offer.early = True
            await early(offer)
        for rank in list(self.ranks):
            try:
                lease = rank.runtime.serve_blocks(
                    ServeRequest(
                        offer.request_id,
                        given_block_ids(offer.tables_upto(0) if offer.payload else tables),
                        tokens,
                        ttl_s=ttl_s,
                        ready=None if grows else offer.device[rank.index],
                        computed_tokens=0 if grows else None,
                        extends=len(offer.payload) > 0,
                        payload=len(offer.payload) > 0,
                    )
                )
            except KVFlowError as error:
                self.judge_refusal(offer.request_id, error)
                for lease in offer.leases:
                    lease.revoke()
                self._decline(offer)
                self._simulation.count(f"offer: {type(error).__name__}")
                return offer
            rank.served += 1
            offer.leases.append(lease)
            if grows:
                offer.growing.append(asyncio.create_task(self._grow(offer, rank, lease)))
            if pause_s and rank is not self.ranks[-1]:
                await self._simulation.pass_time(pause_s)
        return offer

    async def _grow(self, offer: SimOffer, rank: SimRank, lease: Lease) -> None:
        """Compute the prompt on one rank in a few steps, until it is complete or nobody may read it any more."""
        rng = self._simulation.rng
        for upto in (*sorted(rng.randint(0, offer.tokens) for _ in range(_GROWING_STEPS)), offer.tokens):
            await self._simulation.pass_time(rng.expovariate(1 / _DEVICE_S))
            if lease.state is not LeaseState.OFFERED or offer.broken:
                return
            if rng.random() < _BROKEN_SHARE:
                self._break(offer)
                return
            work = self.later(partial(rank.cache.write, offer.content, offer.tokens, offer.tables, upto))
            offer.device.append(work)
            try:
                self._advance(offer, lease, upto, work)
            except RequestError as error:  # no host blocks for more
                self.judge_refusal(offer.request_id, error)
                self._fail(offer, str(error))
                return

    def _advance(self, offer: SimOffer, lease: Lease, upto: int, work: DeviceWork | None) -> None:
        """Say how far a prompt is; of one whose blocks follow, which ones these are."""
        if not offer.payload:
            lease.advance(upto, work)
            return
        known = lease.block_tables
        more = [table[len(had) :] for table, had in zip(offer.tables_upto(upto), known, strict=True)]
        tell = partial(lease.complete, offer.payload) if upto == offer.tokens else partial(lease.advance, upto)
        if any(more) and offer.number % _HASTY_EVERY == 0:
            self._forget_to_extend(offer, upto, lambda: tell(ready=work))
        lease.extend(given_block_ids(more))
        tell(ready=work)

    def _forget_to_extend(self, offer: SimOffer, upto: int, tell: Callable[[], None]) -> None:
        """Tell of tokens whose blocks the lease was never given: that is refused, and changes nothing."""
        try:
            tell()
        except RequestError:
            self._simulation.count("offer: told of tokens without blocks")
            return
        self.fail(
            "I8", f"{offer.request_id} is told to have {upto} tokens, and was not given the blocks that hold them"
        )

    def _decline(self, offer: SimOffer) -> None:
        """Tell who waits for an offer that there will be none."""
        for rank in self.ranks:
            with contextlib.suppress(KVFlowError):
                rank.runtime.decline(offer.request_id, "simulated")

    def introduce(self, number: int) -> Ticket | None:
        """The ticket of nothing by which its ranks introduce themselves; None if it cannot."""
        tickets = []
        for rank in self.ranks:
            request = ServeRequest(f"introduction-{number}", given_block_ids([[] for _ in self.facts]), 0)
            try:
                tickets.append(rank.runtime.serve_blocks(request).ticket)
            except KVFlowError as error:
                self.judge_refusal(request.request_id, error)
                return None
            rank.served += 1
        return merge_tickets(tickets)

    def _break(self, offer: SimOffer) -> None:
        """A prompt will never be computed: its leases fail, or nobody is told."""
        if self._simulation.rng.random() >= _FORGOTTEN_SHARE:
            self.note("cannot compute", offer.request_id)
            self._fail(offer, "simulated")
        else:
            self.note("cannot compute", offer.request_id, "and forgets to say so")
            self._simulation.count("offer: forgotten")
            offer.broken = True

    def _fail(self, offer: SimOffer, reason: str) -> None:
        """A prompt is given up on all ranks, whichever of them it could not go on on."""
        offer.broken = True
        for lease in offer.leases:
            lease.fail(reason)

    async def finish_offer(self, offer: SimOffer) -> None:
        """Wait for the leases of all ranks, then take the blocks back."""
        longest_s = max(offer.ttl_s, self._base.lease_lifetime_s)  # readers renew it up to that
        bound_s = (longest_s + self._base.limits.seal_hold_s) * _DRIFT + self._simulation.copy_bound_s
        for lease in list(offer.leases):
            with self.bounded(f"lease of {offer.request_id}", bound_s):
                outcome = await lease
            self._simulation.count(f"lease: {outcome}")
        if offer.growing:
            await asyncio.wait(offer.growing)
        await all_over(offer.device)
        offer.given_back_s = self._simulation.loop.time()
        self.note("has back", offer.request_id)
        self.offers.pop(offer)
        self.give_back(offer)

    # --- loads

    async def load(self, offer: SimOffer, ticket: Ticket, plan: LoadPlan) -> None:
        """Load an offered prompt, check what came, and use the blocks for a while."""
        if not self.running:
            return
        tables = self.take_blocks(offer.tokens, min(plan.cached_blocks * self.shape.block_size, offer.tokens))
        if tables is None:
            self._simulation.count("load: no room")
            return
        load = SimLoad(offer, self, tables, others=plan.more)
        self.own(load)
        self.loads[load] = None
        self.note("loads", offer.request_id, repr(offer.engine), load.block_ids)
        if self._simulation.settings.model.device:
            before = self._simulation.next_poison()
            load.device = [self.later(partial(rank.cache.poison, before, load.block_ids)) for rank in self.ranks]
        endings = await self._load_on_all_ranks(load, ticket, plan)
        succeeded = self._judge(load, endings)
        for ending in endings if succeeded else ():
            assert isinstance(ending, LoadReport), "it has succeeded"
            load.source(ending.attempts).loaded = True
        if not succeeded:
            await self._safe(load)
            await all_over(load.device)
        self.loads.pop(load)
        if succeeded and plan.use_s:
            naps = self._naps
            await self._simulation.pass_time(plan.use_s)
            for rank in self.ranks if naps == self._naps else ():  # else it has lost what it had
                if (wrong := self._wrong_token(load, rank)) and not load.corrupt:
                    self.fail("I1", f"blocks of {offer.request_id} changed after the load: {wrong}")
        self.give_back(load)

    async def wait_and_load(self, offer: SimOffer, ticket: Ticket, plan: LoadPlan, wait_s: float) -> None:
        """Load as an engine whose request has to wait first."""
        with contextlib.ExitStack() as kept:
            try:
                for rank in self.ranks:
                    kept.enter_context(rank.runtime.keep_leases(ticket.to_params()))
            except KVFlowError as error:
                self.judge_refusal(offer.request_id, error)
            await self._simulation.pass_time(wait_s)
            self._simulation.count("load: waited")
            await self.load(offer, ticket, plan)

    async def release(self, offer: SimOffer, ticket: Ticket) -> None:
        """Give an offer up unread, as for a request that was aborted before it was decoded."""
        opens_s = (
            min(ticket.ttl_s, self._base.lease_lifetime_s) if ticket.awaited else 0.0
        )  # a rendezvous is waited for
        for rank in list(self.ranks):
            try:
                with self.bounded(f"release of {offer.request_id}", self._base.handshake_timeout_s + opens_s):
                    told = await rank.runtime.release_blocks(ticket.to_params())
            except KVFlowError as error:
                self.judge_refusal(offer.request_id, error)
                self._simulation.count(f"release: {type(error).__name__}")
            else:
                self._simulation.count(f"release: {'told' if told else 'not told'}")

    async def _load_on_all_ranks(self, load: SimLoad, ticket: Ticket, plan: LoadPlan) -> list[Ending]:
        priority = load.offer.number % 3 if self._simulation.settings.model.priorities else 0
        request = LoadRequest(
            load.offer.request_id,
            self._tickets(ticket, plan),
            given_block_ids(load.tables),
            again=self._again(plan) if plan.more else None,
            deadline_s=plan.deadline_s,
            priority=priority,
            verify=True if self._simulation.settings.model.verifies and load.offer.number % 3 == 0 else None,
        )
        events = load.device or [None] * len(self.ranks)
        tasks = [
            asyncio.create_task(self._load_on(rank, load, replace(request, after=event)))
            for rank, event in zip(self.ranks, events, strict=True)
        ]
        timer = None
        if plan.cancel_after_s is not None:
            timer = self._simulation.loop.call_later(plan.cancel_after_s, self._cancel, load, tasks)
        await asyncio.wait(tasks)
        if timer is not None:
            timer.cancel()
        return [task.result() for task in tasks]

    def _tickets(self, ticket: Ticket, plan: LoadPlan) -> Any:
        """Tickets as the request names them: one as such, several as a list."""
        named = [ticket, *(one.ticket() for one in plan.more[: plan.named])]
        return [one.to_params() for one in named] if plan.more else ticket.to_params()

    def _again(self, plan: LoadPlan) -> Again:
        """Brings the tickets that the request does not name, one by one, some time later."""
        left = list(plan.more[plan.named :])
        simulation = self._simulation

        async def again(attempts: Sequence[Attempt]) -> Ticket | None:
            simulation.count("load: asks again")
            slow = simulation.rng.random() < _SLOW_SHARE
            await simulation.pass_time(simulation.rng.uniform(0.0, 5.0) if slow else simulation.network.delay_s())
            return left.pop().ticket() if left else None

        return again

    async def _load_on(self, rank: SimRank, load: SimLoad, request: LoadRequest) -> Ending:
        """Load on one rank: its report, or what it raised. Success is judged in the very moment it is reported."""
        deadline_s = self._base.load_deadline_s if request.deadline_s is None else request.deadline_s
        mine = RankLoad(load)
        LOAD.set(mine)
        try:
            with self.bounded(request.request_id, deadline_s + self._base.cancel_grace_s):
                if load.offer.number % _FOLLOWED_EVERY:
                    report = await rank.runtime.load_blocks(request)
                else:
                    report = await self._follow(rank, mine, load, rank.runtime.start_load(request))
        except (KVFlowError, asyncio.CancelledError) as error:
            if isinstance(error, ChecksumMismatch) and not mine.flipped:
                self.fail("I2", f"no byte of {request.request_id} was flipped, but {error}")
            if isinstance(error, PrefillFailed) and not (load.offer.broken or load.offer.early):
                self.fail("I4", f"{request.request_id} was computed, but {error}")
            return error
        rank.loaded += 1
        self._simulation.count(f"load: {report.verification}")
        for attempt in report.attempts:
            self._simulation.count(f"source: {attempt.outcome}")
        offer = load.source(report.attempts)
        if [one.outcome for one in report.attempts].count("loaded") != min(len(report.attempts), 1):
            self.fail("I4", f"{request.request_id} has one outcome, and attempts {report.attempts}")
        if report.verification is Verification.REPAIRED and not mine.flipped:
            self.fail("I2", f"no byte of {request.request_id} was flipped, but it was read twice")
        wrong = self._wrong_token(load, rank)
        if wrong and mine.flipped and not report.verified:
            load.corrupt = True
            self._simulation.count("load: flipped, and nobody looked")
        elif wrong:
            self.fail("I2", f"{request.request_id} is reported as loaded ({report.verification}), but {wrong}")
        if report.payload != offer.payload and offer.tokens:
            self.fail("I2", f"{request.request_id} came with {report.payload!r}, not {offer.payload!r}")
        given_back_s = offer.given_back_s
        if given_back_s is not None and mine.last_landing_s > given_back_s:
            self.fail(
                "I3",
                f"{request.request_id} succeeded with bytes read at {mine.last_landing_s:.6f} s, but its blocks were "
                f"given back at {given_back_s:.6f} s",
            )
        return report

    async def _follow(self, rank: SimRank, mine: RankLoad, load: SimLoad, handle: Handle) -> LoadReport:
        """A load whose parts are used as they come: they have to be right when they are told of."""
        tokens = -1
        try:
            async for progress in handle:
                if progress.tokens <= tokens:
                    self.fail("I4", f"{handle}: {progress} after {tokens} tokens")
                tokens = progress.tokens
                self._simulation.count("load: progress")
                wrong = rank.cache.wrong_token(load.offer.content, load.offer.tokens, load.tables, tokens)
                if wrong and not mine.flipped:
                    self.fail("I2", f"{handle}: {progress}, but {wrong}")
            return await handle
        except asyncio.CancelledError:
            handle.cancel()
            await asyncio.gather(handle.settled(), return_exceptions=True)  # what is never settled `_safe` finds
            raise

    def _cancel(self, load: SimLoad, tasks: Sequence[asyncio.Task[Ending]]) -> None:
        load.cancelled = True
        self.note("cancels", load.offer.request_id)
        for task in tasks:
            task.cancel()

    def _judge(self, load: SimLoad, endings: Sequence[Ending]) -> bool:
        """Count how a load has ended; whether all ranks have all."""
        for ending in endings:
            ok = isinstance(ending, LoadReport)
            self.note("load ended", load.offer.request_id, "ok" if ok else f"{type(ending).__name__}: {ending}")
            self._simulation.count(f"load: {'ok' if ok else type(ending).__name__}")
            if isinstance(ending, asyncio.CancelledError) and not load.cancelled:
                self.fail("I4", f"{load.offer.request_id}: CancelledError without a cancel")
            if isinstance(ending, KVFlowError):
                self.judge_refusal(load.offer.request_id, ending)
        check_conserved(self)
        return all(isinstance(ending, LoadReport) for ending in endings)

    async def _safe(self, load: SimLoad) -> None:
        """Wait until no rank's blocks can be written any more, where one says that they can."""
        for rank in list(self.ranks):
            mine = [one for one in rank.runtime.quarantines if one.request_id == load.offer.request_id]
            taken = set(load.block_ids)
            unsafe = [one for one in mine if {*itertools.chain(*one.block_tables)} <= taken and not one.safe]
            if not unsafe:
                continue
            self._simulation.count("load: quarantined")
            try:
                await unsafe[0].settled()
            except RuntimeBroken:
                self.note("lost blocks", load.block_ids)
                if self.running:
                    self._simulation.later_crash(self)
                await asyncio.get_running_loop().create_future()  # until the process ends
            self.note("safe", load.offer.request_id)

    def judge_refusal(self, request_id: str, error: KVFlowError) -> None:
        """Fail unless an engine that did everything right may get this error."""
        expected = isinstance(error, LoadError | PeerError | RuntimeUnavailable)
        if isinstance(error, RequestError) and not isinstance(error, BlocksBusy):
            expected = "host_buffer_bytes_max" in str(error)
        if isinstance(error, RuntimeBroken):
            if not self.host.agent_lost:
                self.fail("I7", f"{request_id}: the runtime broke by itself: {error}")
        elif not expected:
            self.fail("I5", f"{request_id}: {type(error).__name__}: {error}")

    def _wrong_token(self, load: SimLoad, rank: SimRank) -> str | None:
        """The fault in the bytes of a load on a rank; None if there is none."""
        return rank.cache.wrong_token(load.offer.content, load.offer.tokens, load.tables)
