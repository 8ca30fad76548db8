"""A simulation: the engines of a seed run through their workload and their faults, and everything is checked.

After the workload the network becomes calm. Then everything that is open has to end within its bound, every pair of
engines has to work again, and closing has to leave nothing behind.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvflow.logs import logger_of
from kvflow.runtime.producer.lease import LeaseOutcome
from kvflow.testing.network_conditions import CALM
from kvflow.testing.simulated_network import Network, SimFlight
from kvflow.testing.virtual_loop import Deadlock, SimProcess, SimProcessState, VirtualLoop, new_virtual_loop
from kvflow.transport.inproc import Row, flip_byte
from tests.simulator import handing_on, loading, offering, sharing
from tests.simulator.actions import FAULTS, nap, pause_machine, pick, retrain
from tests.simulator.checks import check_changed, check_quiet
from tests.simulator.engine import SimEngine
from tests.simulator.prompts import Prompts, SimPrompt
from tests.simulator.routing import request
from tests.simulator.settings import Settings, draw_settings
from tests.simulator.work import LoadPlan, RankLoad, SimOffer, SimRank

logger = logger_of(__name__)

_EVENTS_KEPT = 60
_SETTLE_S = 60.0
_TRIES = 10
_FLIPPED_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A broken promise."""

    invariant: str
    what: str
    time_s: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one seed."""

    settings: Settings
    violation: Violation | None
    counts: Counter[str]
    events: tuple[str, ...]
    """The last events, in order."""
    digest: int
    """Digest of all events and of the run's final state. Equal runs have equal digests."""
    steps: int
    time_s: float


class Simulation:
    """The state of one run, which all parts of the simulator share."""

    def __init__(self, loop: VirtualLoop, settings: Settings, rng: random.Random) -> None:
        self.loop = loop
        self.settings = settings
        self.rng = rng
        self.network = Network(loop, rng, self.note, self._landing, self._landed)
        self.engines = [SimEngine(self, shape, index) for index, shape in enumerate(settings.shapes)]
        self.prompts = Prompts()
        self.prompt_of_key: dict[bytes, SimPrompt] = {}
        """The prefix that each key of an engine's prefix cache stands for."""
        self.handed_on = 0
        """Number of prefixes that engines were offered by engines that leave."""
        self.weights = 0
        """Number of the newest weights that an engine has."""
        self.on_pin: Callable[[SimEngine], None] = lambda _: None
        """Called with an engine when the engine pins a prefix for a reader."""
        self.changed: dict[SimRank, SimEngine] = {}
        """Ranks with ledgers that have changed since the last check."""
        self.violation: Violation | None = None
        self.counts: Counter[str] = Counter()
        copies = settings.model.verifies or any(shape.staged for shape in settings.shapes)
        self.copy_bound_s = 10.0 if copies else 0.0
        self._flipped_share = _FLIPPED_SHARE if settings.model.flips else 0.0
        self._events: deque[tuple[float, tuple[object, ...]]] = deque(maxlen=_EVENTS_KEPT)
        self._digest = 0
        self._poison = itertools.count(1)
        self._tasks: dict[asyncio.Task[Any], SimProcess] = {}
        self._over = False
        self._threads = threading.active_count()

    # --- what parts ask for

    def note(self, *what: object) -> None:
        """Record an event for the report and the digest."""
        self._events.append((self.loop.time(), what))
        self._digest = zlib.crc32(repr(self._events[-1]).encode(), self._digest)

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def fail(self, invariant: str, what: str) -> None:
        """Record a broken promise, and stop the run. Only the first is recorded."""
        if self.violation is None and not self._over:
            self.violation = Violation(invariant=invariant, what=what, time_s=self.loop.time(), step=self.loop.steps)
            self.note("VIOLATION", invariant, what)
            if self.loop.is_running():
                self.loop.stop()

    def next_poison(self) -> int:
        return next(self._poison)

    def spawn(self, life: SimProcess, body: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a task in a process. The task has to end before the simulation does, unless the process dies."""
        task = life.task(body, name=name)
        self._tasks[task] = life
        task.add_done_callback(self._ended)
        return task

    def forget_tasks(self, life: SimProcess) -> None:
        """Forget the tasks of a process that has died: they never end."""
        self._tasks = {task: whose for task, whose in self._tasks.items() if whose is not life}

    async def pass_time(self, delay_s: float) -> None:
        """Let virtual time pass."""
        await asyncio.wait([self.loop.create_future()], timeout=delay_s)

    def pick_running(self, may: Callable[[SimEngine], bool] = lambda _: True) -> SimEngine | None:
        """Return a random running engine for which `may` is true; None if there is none."""
        engines = [engine for engine in self.engines if engine.running and may(engine)]
        return self.rng.choice(engines) if engines else None

    # --- the course

    async def run(self) -> None:
        """Run from the first start to the last close."""
        self.loop.set_exception_handler(self._unhandled)
        await asyncio.gather(*(engine.life.task(engine.start()) for engine in self.engines))
        self.loop.after_step = partial(check_changed, self.changed)
        self.network.conditions = self.settings.conditions
        for number in range(1, self.settings.requests + 1):
            self.some_time(request, self, number)
        for _ in range(self.settings.faults):
            self.some_time(self.strike, pick(FAULTS, self.rng))
        for _ in range(self.settings.naps):
            self.some_time(self.strike, nap)
        for _ in range(self.settings.pauses):
            self.some_time(self.strike, pause_machine)
        for _ in range(self.settings.retrains):
            self.some_time(self.strike, retrain)
        if self.settings.model.shares:
            sharing.begin(self)
        await self.pass_time(self.settings.span_s)
        self._clear_up()
        await self._settle()
        loading_pairs = [pair for pair in self._pairs() if pair[0].shape.serves and pair[1].shape.loads]
        await self._check_pairs(loading_pairs, self._works, self.settings.requests + 1, "load")
        if self.settings.model.shares:
            await self._check_pairs(self._pairs(), self._shares, sharing.FIRST_NUMBER << 1, "pull")
        await self._settle()
        for engine in self.engines:
            engine.prefix_cache.clear()
            check_quiet(engine)
        await self._close()
        self.loop.after_step = None

    def some_time(self, happen: Callable[..., None], *what: object) -> None:
        """Call `happen` at a random moment of the run."""
        self.network.later(self.rng.uniform(0.0, self.settings.span_s), happen, *what)

    def strike(self, fault: Callable[[SimEngine], None]) -> None:
        """Let `fault` strike a random running engine."""
        if engine := self.pick_running():
            self.count(f"fault: {fault.__name__.replace('_', ' ')}")
            fault(engine)

    def strike_later(self, delay_s: float, fault: Callable[..., None], engine: SimEngine, *what: object) -> None:
        """Let `fault` strike `engine` after `delay_s`, if the engine is then running."""

        def happen() -> None:
            if engine.running:
                fault(engine, *what)

        self.network.later(delay_s, happen)

    def _clear_up(self) -> None:
        """End bad network conditions, flipped bytes, partitions, stopped engines and machines, and stalled pollers."""
        self.note("clearing up")
        self.network.conditions = CALM
        self._flipped_share = 0.0
        self.network.heal()
        for engine in self.engines:
            engine.go_on()
            engine.host.poller_stalled_until_s = 0.0
            if engine.weights != self.weights:
                engine.retrain(self.weights)

    async def _settle(self) -> None:
        """Wait until all tasks have ended and nothing is pinned. Fail if that takes longer than `_SETTLE_S`."""
        give_up_s = self.loop.time() + _SETTLE_S
        while self._tasks or any(engine.prefix_cache.busy for engine in self.engines):
            if self.loop.time() > give_up_s and not self._tasks:
                self.fail("I9", f"prefix caches have pins {_SETTLE_S} s after all trouble")
                return
            if self.loop.time() > give_up_s:
                self.fail("I7", f"not over {_SETTLE_S} s after all faults: {[t.get_name() for t in self._tasks]}")
                return
            await self.pass_time(0.05)

    def _pairs(self) -> list[tuple[SimEngine, SimEngine]]:
        return list(itertools.permutations(self.engines, 2))

    async def _check_pairs(
        self,
        pairs: Iterable[tuple[SimEngine, SimEngine]],
        works: Callable[[SimEngine, SimEngine, int], Coroutine[Any, Any, bool]],
        first_number: int,
        verb: str,
    ) -> None:
        """Check that `works` succeeds for each pair within a few tries. Each try is a request with a new number."""
        numbers = itertools.count(first_number)
        for source, reader in pairs:
            for number in itertools.islice(numbers, _TRIES):
                if await works(source, reader, number):
                    break
                await self.pass_time(0.5)
            else:
                self.fail("I7", f"{reader} cannot {verb} from {source} any more")

    async def _works(self, producer: SimEngine, consumer: SimEngine, number: int) -> bool:
        """Return True if `consumer` can load from `producer`."""
        if not producer.running or not consumer.running:
            return False

        def hand_out(offer: SimOffer) -> None:
            load = loading.load(consumer, offer, offer.ticket(), LoadPlan(deadline_s=5.0))
            self.spawn(consumer.life, load, f"load {number}")

        async def produce() -> bool:
            offer = await offering.offer(producer, number, producer.shape.block_size + 1, 10.0, hand_out)
            if offer is None:
                return False
            unread = [lease for lease in offer.leases if await lease is not LeaseOutcome.READ]
            if unread and offer.loaded and not offer.broken:  # it may break after all tokens were offered and read
                self.fail("I4", f"request-{number} was loaded, and nothing was lost, but its leases ended as {unread}")
            return offer.loaded

        producing = self.spawn(producer.life, produce(), f"offer {number}")
        await self._settle()
        return producing.done() and producing.result()  # else its process has died

    async def _shares(self, holder: SimEngine, reader: SimEngine, number: int) -> bool:
        """Return True if all ranks of `reader` can pull from `holder`; any rank, if the holder may lack host blocks."""
        pulling = sharing.pull_one(number, holder, reader)
        await self._settle()
        counts = pulling.result() if pulling is not None and pulling.done() else None
        return counts is not None and (any if holder.shape.staged else all)(counts)

    async def _close(self) -> None:
        for engine in self.engines:
            if not await engine.life.task(engine.close()):
                self.fail("I7", f"{engine} could not be closed, though nothing was under way")
            engine.end()
        if threading.active_count() != self._threads:
            self.fail("I6", f"threads: {threading.active_count()}, {self._threads} before")

    # --- what happens

    def _landing(self, flight: SimFlight, rows: list[Row]) -> None:
        """Check, just before bytes land, that they land in blocks of their own load."""
        mine = flight.load
        if not isinstance(mine, RankLoad):
            self._looked(rows)
            return
        load, engine = mine.load, mine.load.engine
        if engine.asleep:
            engine.fail("I1", f"bytes of {load} land in memory that was given back")
        for local, _, size in rows:
            for block in engine.landing_blocks(local, size):
                mine.last_landing_s = self.loop.time()
                if after := mine.came_late(flight.hosts[1]):
                    engine.fail("I1", f"bytes of {flight.hosts[1].name} land for {load} after some of {after.name}")
                owner = engine.owners[block]
                if owner is not load:
                    engine.fail("I1", f"bytes of {load} land in block {block}, which is for {owner or 'nobody'} now")

    def _looked(self, rows: list[Row]) -> None:
        """Check that bytes of a read of seals, which belongs to no load, land in no block."""
        for engine in self.engines:
            for local, _, size in rows:
                for block in engine.landing_blocks(local, size):
                    engine.fail("I1", f"bytes of no load land in block {block}")

    def _landed(self, flight: SimFlight, rows: list[Row]) -> None:
        """With some probability flip one of the bytes that have landed in the cache."""
        mine = flight.load
        if not isinstance(mine, RankLoad) or not self.network.chance(self._flipped_share):
            return
        in_cache = [row for row in rows if any(True for _ in mine.load.engine.landing_blocks(row[0], row[2]))]
        if in_cache:
            local, _, size = self.rng.choice(in_cache)
            flip_byte(local + self.rng.randrange(size))
            mine.flipped = True
            self.note("flipped", repr(mine.load.engine), str(mine.load))

    def crash_and_restart(self, engine: SimEngine, down_s: float) -> None:
        engine.crash()
        self.network.later(down_s, self._restart, engine)

    def later_crash(self, engine: SimEngine) -> None:
        """Soon crash the process of an engine that cannot continue safely. The engine starts again."""
        life = engine.life

        def crash() -> None:
            if engine.life is life and life.state is not SimProcessState.DEAD:
                self.crash_and_restart(engine, 0.01)

        self.network.later(self.rng.uniform(0.0, 0.05), crash)

    async def reopen(self, engine: SimEngine, drain_s: float | None) -> None:
        """Close an engine and start its next process. If memory may still be written, the old process crashes."""
        if drain_s is not None:
            successor = await handing_on.hand_on(engine) if self.settings.model.shares else None
            await engine.drain(drain_s, successor)
        closed, life = await engine.close(), engine.life

        def end() -> None:
            if engine.life is life and life.state is not SimProcessState.DEAD:
                engine.end() if closed else engine.crash()
                self._restart(engine)

        self.network.later(0.0, end)

    def _restart(self, engine: SimEngine) -> None:
        engine.renew()
        self.spawn(engine.life, engine.start(), f"start {engine}")

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.report(f"task {task.get_name()}", error)

    def _unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.report(str(context.get("message")), context.get("exception"))

    def report(self, where: str, error: BaseException | None) -> None:
        """Report an unexpected error as a broken promise."""
        self.fail("I4", f"{where}: unhandled {type(error).__name__}: {error}")
        logger.debug("unhandled", exc_info=error)

    def result(self) -> Result:
        """Return the result. Call this once: later events are not part of the run."""
        self._over = True
        return Result(
            settings=self.settings,
            violation=self.violation,
            counts=self.counts,
            events=tuple(f"{time_s:10.6f} {' '.join(map(str, what))}" for time_s, what in self._events),
            digest=zlib.crc32(repr((self.loop.steps, self.loop.time(), self.rng.random())).encode(), self._digest),
            steps=self.loop.steps,
            time_s=self.loop.time(),
        )


def simulate(seed: int) -> Result:
    """Run the simulation of one seed."""
    settings, rng = draw_settings(seed)
    loop = new_virtual_loop()
    simulation = Simulation(loop, settings, rng)
    ours = logging.getLogger("kvflow")
    level = ours.level
    ours.setLevel(logging.CRITICAL + 1)
    try:
        try:
            loop.run_until_complete(loop.create_task(simulation.run(), name="simulation"))
        except Deadlock as error:
            simulation.fail("I7", str(error))
        except Exception as error:  # noqa: BLE001 - of the simulation itself, or because it was stopped by a violation
            simulation.report("the simulation", error)
        result = simulation.result()
        loop.end_all()
        return result
    finally:
        ours.setLevel(level)
        loop.close()


def describe(result: Result) -> str:
    """Return a text that describes the result of a seed, and how to replay it."""
    settings, violation = result.settings, result.violation
    lines = [f"seed {settings.seed}: {'no promise' if violation is None else violation.invariant} is broken"]
    lines += [f"  {what}" for what in (*settings.shapes, settings.conditions, settings.base, *result.events)]
    if violation is not None:
        lines.append(f"{violation.time_s:.6f} s, step {violation.step}: {violation.what}")
    lines.append(f"replay: python3 dev.py simulate --seeds 1 --start {settings.seed}")
    return "\n".join(lines)
