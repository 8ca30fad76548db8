"""A simulated engine: ranks with their caches and runtimes, and an allocator that reuses freed blocks at once.

It does only what kvflow requires of an engine: a freed block is overwritten at once, and goes to the next request that
needs a block. It checks every promise that kvflow makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from kvflow.core.protocol.addresses import PeerAddress
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import (
    KVFlowError,
    LoadError,
    PeerError,
    RuntimeBroken,
    RuntimeUnavailable,
    WeightsMismatch,
)
from kvflow.prefix import Prefixes
from kvflow.runtime.runtime import Runtime
from kvflow.testing.accounting import assert_closed
from kvflow.testing.simulated_network import SimHost
from kvflow.testing.simulated_world import make_world
from kvflow.testing.virtual_loop import SimProcess
from tests.simulator import handing_on
from tests.simulator.cache import RankCache
from tests.simulator.checks import demand
from tests.simulator.clock import SkewedClock
from tests.simulator.prefix_cache import Kept, SimPrefixCache
from tests.simulator.settings import Shape
from tests.simulator.work import DeviceWork, SimLoad, SimOffer, SimPull, SimRank

if TYPE_CHECKING:
    from tests.simulator.simulation import Simulation

_AT_ONCE_SHARE = 0.3  # share of device writes that happen at once
DEVICE_S = 0.01  # mean delay of the other device writes
_TURNED_SHARE = 0.5  # share of naps after which the cache has another layout
DRIFT = 1.01  # above the largest error of a simulated clock

EndT = TypeVar("EndT")
Owner: TypeAlias = "SimOffer | SimLoad | SimPull | Kept"


class SimEngine:
    """An engine. Each of its processes is a life."""

    ranks: list[SimRank]
    offers: dict[SimOffer, None]
    loads: dict[SimLoad | SimPull, None]
    owners: list[Owner | None]
    prefix_cache: SimPrefixCache
    """Blocks of earlier prompts that the engine keeps."""
    naps: int
    """Number of naps in this life."""
    clock: SkewedClock

    def __init__(self, simulation: Simulation, shape: Shape, index: int) -> None:
        self.shape = shape
        self.name = shape.name
        self.simulation = simulation
        self.weights = 0
        """Number of the engine's weights, which all its lives have."""
        self.base = simulation.settings.base
        self._network = simulation.network
        self._address = f"10.0.0.{index + 1}"
        self._lives = itertools.count(1)
        self._ended_lives: list[tuple[SimProcess, list[SimRank]]] = []
        """Ended processes with their ranks: their objects are kept until the simulation itself is destroyed."""
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
    def life(self) -> SimProcess:
        return self.host.process

    def fail(self, invariant: str, what: str) -> None:
        """Report that a promise to this engine is broken."""
        self.simulation.fail(invariant, f"{self}: {what}")

    def note(self, *what: object) -> None:
        self.simulation.note(repr(self), *what)

    # --- processes

    async def start(self) -> None:
        """Open all ranks, in a task of this life. Their memory comes from the previous life and is overwritten."""
        ranks: list[SimRank] = []
        self.clock = clock = SkewedClock(self.shape.clock_offset_s, self.shape.clock_rate)
        world = make_world(lambda: self._network, lambda _: self.host, lambda: clock)
        for index, cache in enumerate(self._caches):
            cache.poison(self.simulation.next_poison(), None)
            config = self.simulation.settings.config(self.shape, self._address, index)
            prefixes = Prefixes(follow_successors=True)
            runtime = Runtime(config, world=world, parts=[] if self.shape.sharded else [prefixes])
            await runtime.__aenter__()
            await runtime.register_kv_caches(cache.groups)
            ranks.append(SimRank(index, cache, runtime, prefixes, self._change))
        self.ranks = ranks
        self._tell_weights()
        self._share()
        self.running = True
        self.note("started")

    def _change(self, rank: SimRank) -> None:
        self.simulation.changed[rank] = self

    def retrain(self, weights: int) -> None:
        """Give the engine other weights. From now on its prefix cache finds none of its blocks."""
        self.note("gets weights", weights)
        self.weights = weights
        self._tell_weights()

    def _tell_weights(self) -> None:
        """Tell all ranks of the engine's weights, unless it still has its first ones, or its ranks are closing."""
        for rank in self.ranks if self.weights else ():
            with contextlib.suppress(RuntimeUnavailable, RuntimeBroken):
                rank.runtime.set_weights(f"step-{self.weights}")

    async def close(self) -> bool:
        """Close all ranks, in a task of this life. Return True if the memory may be reused."""
        self.running = False
        limits = self.base.limits
        bound_s = self._drain_bound_s(self.base.drain_timeout_s) + limits.goodbye_timeout_s
        with self.bounded("aclose", bound_s + limits.transport_close_timeout_s):
            endings = await asyncio.gather(*(rank.runtime.aclose() for rank in self.ranks), return_exceptions=True)
        for ending in endings:
            if isinstance(ending, RuntimeBroken):
                self.note("could not close", str(ending))
                return False
            if isinstance(ending, BaseException):
                raise ending
        for rank in self.ranks:
            self.prefix_cache.check_left(rank)
        self.note("closed")
        for rank in self.ranks:
            if not self.host.agent_lost:
                demand(self, assert_closed, rank.runtime.statistics())
        return True

    async def nap(self, nap_s: float) -> None:
        """Unregister the cache, whatever is open, and register it again a while later with other contents.

        Runs in a task of this life. Sometimes the cache has another layout afterwards.
        """
        if not self.running:
            return
        self.running = False
        self.note("goes to sleep")
        self.naps += 1
        if not await self._unregister():
            return
        self.asleep = True
        self.note("sleeps")
        for offer in self.offers:
            offer.given_back_s = self.simulation.loop.time()
        while self.offers or self.loads or self.prefix_cache.waits:
            await self.simulation.pass_time(0.01)
        await self.simulation.pass_time(0.01)
        self.prefix_cache.clear()
        await self.simulation.pass_time(nap_s)
        turned = self.simulation.rng.random() < _TURNED_SHARE
        for rank in self.ranks:
            if turned:
                rank.cache.turn()
            rank.cache.poison(self.simulation.next_poison(), None)
        self.asleep = False
        if await self._register_again():
            self._share()
            self.running = True
            self.note("is awake")

    def _share(self) -> None:
        """Start with an empty prefix cache, and share it if the model shares prefixes."""
        self.prefix_cache = SimPrefixCache(self)
        if self.simulation.settings.model.shares:
            self.prefix_cache.share()
            handing_on.accept(self)

    async def _unregister(self) -> bool:
        """Unregister each rank's cache, then overwrite its memory. Return True if that was safe on all ranks."""
        limits, given = self.base.limits, 0
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
                self.simulation.later_crash(self)
            else:
                self.prefix_cache.check_left(rank)
                given += 1
                rank.cache.poison(self.simulation.next_poison(), None)

        await asyncio.gather(*map(on_one, self.ranks))
        return given == len(self.ranks)

    async def _register_again(self) -> bool:
        for rank in self.ranks:
            try:
                await rank.runtime.register_kv_caches(rank.cache.groups)
            except KVFlowError as error:  # the runtime drains or closes
                self.judge_refusal("register_kv_caches", error)
                return False
            rank.look_up()
        return True

    async def drain(self, deadline_s: float, successor: Ticket | None = None) -> None:
        """Drain all ranks, in a task of this life. `successor`: a ticket of the engine that takes this one's place."""
        bound_s = self._drain_bound_s(deadline_s)
        await self._on_all_ranks("drain", bound_s, lambda runtime: runtime.drain(deadline_s, successor=successor))

    async def forget(self, other: SimEngine) -> None:
        """Forget a peer on all ranks, in a task of this life."""
        bound_s = 2 * self.base.handshake_timeout_s
        await self._on_all_ranks("forget_peer", bound_s, lambda runtime: runtime.forget_peer(other.name))

    async def prewarm(self, other: SimEngine) -> None:
        """Connect all ranks to a peer, in a task of this life."""
        address = PeerAddress(engine_id=other.name, address=f"{other.host.address}:5600")
        bound_s = self.base.handshake_timeout_s * (1 + other.shape.num_ranks)
        await self._on_all_ranks("prewarm", bound_s, lambda runtime: runtime.prewarm([address]))

    async def _on_all_ranks(
        self, what: str, bound_s: float, call: Callable[[Runtime], Coroutine[object, object, object]]
    ) -> None:
        """Await `call` on each rank within `bound_s`. Pass errors to `judge_refusal`."""

        async def on_one(rank: SimRank) -> None:
            try:
                with self.bounded(what, bound_s):
                    await call(rank.runtime)
            except KVFlowError as error:
                self.judge_refusal(what, error)

        await asyncio.gather(*map(on_one, self.ranks))

    def _drain_bound_s(self, deadline_s: float) -> float:
        base, limits = self.base, self.base.limits
        ending_s = limits.seal_hold_s * DRIFT + base.cancel_grace_s + base.drain_timeout_s
        return max(deadline_s + ending_s, limits.goodbye_timeout_s) + self.simulation.copy_bound_s

    def load_bound_s(self, deadline_s: float | None) -> float:
        """Return how long a load or pull with `deadline_s` may take. None: the deadline of the runtime's Config."""
        return (self.base.load_deadline_s if deadline_s is None else deadline_s) + self.base.cancel_grace_s

    @contextlib.contextmanager
    def bounded(self, what: str, bound_s: float) -> Iterator[None]:
        """Fail if the body takes longer than `bound_s`, not counting time during which its process was frozen."""
        life, loop = self.life, self.simulation.loop
        begun_s, frozen_s = loop.time(), life.frozen_s
        cancelled = False
        try:
            yield
        except asyncio.CancelledError:
            cancelled = True  # a cancelled load may wait until its blocks are safe
            raise
        finally:
            took_s = loop.time() - begun_s - (life.frozen_s - frozen_s)
            if not cancelled and took_s > bound_s + self.simulation.settings.conditions.poll_s + 1e-6:
                self.fail("I7", f"{what} took {took_s:.6f} s, its bound is {bound_s:.6f} s")

    def pause(self) -> None:
        """Stop the machine: its processes and its clocks stand still until `go_on`."""
        self.life.freeze()
        self.clock.stop()

    def go_on(self) -> None:
        """End a pause of the machine, and let a frozen process run again."""
        self.clock.go_on()
        if self.host.stands_still:
            self.host.stands_still = False
            self._network.resume()
        self.life.thaw()

    def crash(self) -> None:
        """Kill the process."""
        self.note("crashed")
        self.end()

    def end(self) -> None:
        """End the process. Its tasks stop, and its memory goes to another owner."""
        self.simulation.forget_tasks(self.life)
        self.life.kill()
        self._network.detach(self.host)
        self._ended_lives.append((self.life, self.ranks))
        for offer in self.offers:
            offer.given_back_s = self.simulation.loop.time()
        self._forget_all()
        for cache in self._caches:
            cache.poison(self.simulation.next_poison(), None)

    def renew(self) -> None:
        """Make a new life, for a process that starts after the last one has ended."""
        self.host.agent_lost = False
        self.host.process = self._new_life()

    def _new_life(self) -> SimProcess:
        return SimProcess(self.simulation.loop, f"{self.name}.{next(self._lives)}")

    def _forget_all(self) -> None:
        """Empty the engine's books, as in a process that has not started."""
        self.running = False
        self.asleep = False
        """True while the cache is unregistered and its memory has another owner."""
        self.hands_on = False
        """True once this life has handed its prefixes on."""
        self.naps = 0
        self.ranks = []
        self.offers = {}
        self.loads = {}
        self.prefix_cache = SimPrefixCache(self)
        self.owners = [None] * self.shape.num_blocks
        self._free = list(range(self.shape.num_blocks))

    # --- blocks

    def take_blocks(self, tokens: int, computed: int = 0) -> list[list[int]] | None:
        """Take each group's blocks for `tokens` tokens beyond the `computed` tokens. None if there is no room."""
        return self.take_counts(self.counts_needed(tokens, computed))

    def counts_needed(self, tokens: int, computed: int) -> list[int]:
        """Return how many blocks of each group a prompt of `tokens` tokens needs beyond the `computed` tokens."""
        counts = []
        for facts in self.facts:
            stop = -(-tokens // facts.block_size)
            first = max(facts.first_needed(tokens), computed) // facts.block_size if computed < tokens else stop
            counts.append(stop - first)
        return counts

    def take_counts(self, counts: Sequence[int]) -> list[list[int]] | None:
        """Take `counts` blocks of each group; None without room. Kept blocks make room, even if pinned for readers."""
        if (short := sum(counts) - len(self._free)) > 0:
            self.prefix_cache.make_room(short)
        if sum(counts) > len(self._free):
            return None
        return [[self._free.pop() for _ in range(count)] for count in counts]

    def later(self, work: Callable[[], None]) -> DeviceWork | None:
        """Do `work`, a write to a rank's cache, at once or after a device's delay. Return it if delayed, else None."""
        model, rng = self.simulation.settings.model, self.simulation.rng
        if not model.device or rng.random() < _AT_ONCE_SHARE:
            work()
            return None
        return DeviceWork(rng.expovariate(1 / DEVICE_S), work)

    def overwrite_later(self, block_ids: Sequence[int]) -> list[DeviceWork | None]:
        """If devices are late, start writes by the blocks' former owner. Return the delayed work of each rank."""
        if not self.simulation.settings.model.device:
            return [None] * len(self.ranks)
        before = self.simulation.next_poison()
        return [self.later(partial(rank.cache.poison, before, block_ids)) for rank in self.ranks]

    def own(self, owner: Owner) -> None:
        for block in owner.block_ids:
            self.owners[block] = owner

    def give_back(self, owner: Owner) -> None:
        """Free the blocks of `owner`. They are overwritten at once, and may be taken again."""
        for block in owner.block_ids:
            assert self.owners[block] is owner
            self.owners[block] = None
        self._free.extend(owner.block_ids)
        self.simulation.rng.shuffle(self._free)
        poison = self.simulation.next_poison()
        for rank in self.ranks:
            rank.cache.poison(poison, owner.block_ids)

    def landing_blocks(self, local: int, size_bytes: int) -> Iterator[int]:
        """Yield the blocks that `size_bytes` bytes at the address `local` touch."""
        for cache in self._caches:
            yield from cache.blocks_of(local, size_bytes)

    # --- loads and pulls

    async def carry_out(
        self, load: SimLoad | SimPull, bodies: Sequence[Coroutine[Any, Any, EndT]], cancel_after_s: float | None
    ) -> list[EndT]:
        """Run each rank's part of a load or pull; with `cancel_after_s`, cancel all parts after that time."""
        tasks = [asyncio.create_task(body) for body in bodies]

        def cancel() -> None:
            load.cancelled = True
            self.note("cancels", load.request_id)
            for task in tasks:
                task.cancel()

        timer = None if cancel_after_s is None else self.simulation.loop.call_later(cancel_after_s, cancel)
        await asyncio.wait(tasks)
        if timer is not None:
            timer.cancel()
        return [task.result() for task in tasks]

    async def lose(self, load: SimLoad | SimPull) -> None:
        """Wait for the end of the process: a load's blocks will never be safe, so the engine crashes soon."""
        self.note("lost blocks", load.block_ids)
        if self.running:
            self.simulation.later_crash(self)
        await asyncio.get_running_loop().create_future()

    def judge_refusal(self, request_id: str, error: KVFlowError) -> None:
        """Fail unless `error` is one that an engine without faults of its own may get."""
        expected = isinstance(error, LoadError | PeerError | RuntimeUnavailable)
        if isinstance(error, RuntimeBroken):
            if not self.host.agent_lost:
                self.fail("I7", f"{request_id}: the runtime broke by itself: {error}")
        elif isinstance(error, WeightsMismatch) and self.simulation.weights:
            pass
        elif not expected:
            self.fail("I5", f"{request_id}: {type(error).__name__}: {error}")
