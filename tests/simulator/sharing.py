"""Episodes of engines that share prefixes: they compute, pull and evict prompts, while faults strike holders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvflow.testing.network_conditions import CALM
from tests.simulator import prefixes
from tests.simulator.actions import crash, drain, freeze, lose_agent, nap, partition, pick
from tests.simulator.prompts import PROMPT_MAX, SPAN, SimPrompt, draw_prompt
from tests.simulator.work import PullPlan

if TYPE_CHECKING:
    from tests.simulator.engine import SimEngine
    from tests.simulator.simulation import Simulation

_PULLS = (20, 40)
_PROMPTS = (8, 16)
_LATER_S = 0.02  # mean time from the first engine that computes a prompt to each other engine
_EVICTIONS = (0, 10)
_STRUCK_SHARE = 0.5  # share of found prefixes soon after which a fault strikes the holder
_SEEK_SHARE = 0.2
FIRST_NUMBER = 1 << 10  # other requests have lower numbers


# --- faults of a holder


def squeeze(engine: SimEngine) -> None:
    """Make an engine need all its blocks at once, even if they are read, and write other prompts to them."""
    engine.note("is short of blocks")
    engine.prefix_cache.make_room(engine.shape.num_blocks)
    for _ in range(2):
        compute(engine)


def evict(engine: SimEngine) -> None:
    """Make an engine evict some kept blocks that are not pinned."""
    engine.note("evicts")
    engine.prefix_cache.evict(engine.simulation.rng.random())


def compute(engine: SimEngine, prompt: SimPrompt | None = None) -> None:
    """Make an engine compute a prompt and keep its blocks."""
    prompt = (prompt or draw_prompt(engine.simulation.rng, PROMPT_MAX)).cut(room(engine))
    engine.simulation.spawn(engine.life, engine.prefix_cache.compute(prompt), f"compute at {engine}")


STRIKES: Sequence[tuple[int, Callable[[SimEngine], None]]] = (
    (10, squeeze),
    (4, evict),
    (2, crash),
    (2, freeze),
    (2, partition),
    (1, nap),
    (1, drain),
    (1, lose_agent),
)


def room(engine: SimEngine) -> int:
    """Return the number of tokens of the longest prompt that an engine is given."""
    shape = engine.shape
    return shape.num_blocks * shape.block_size // 2


# --- the course


def begin(simulation: Simulation) -> None:
    """Schedule all episodes of a run."""
    rng, span_s = simulation.rng, simulation.settings.span_s
    simulation.on_pin = perhaps_strike
    for _ in range(rng.randint(*_PROMPTS)):
        prompt, first_s = draw_prompt(rng, PROMPT_MAX), rng.uniform(0.0, span_s)
        for engine in rng.sample(simulation.engines, rng.randint(1, len(simulation.engines))):
            simulation.strike_later(first_s + rng.expovariate(1 / _LATER_S), compute, engine, prompt)
    for _ in range(rng.randint(*_EVICTIONS)):
        simulation.some_time(simulation.strike, rng.choice((evict, evict, evict, squeeze)))
    for number in range(rng.randint(*_PULLS)):
        simulation.some_time(pull, simulation, FIRST_NUMBER + number)


def pull(simulation: Simulation, number: int) -> None:
    """Make an engine pull the prefix of a prompt from other engines."""
    rng = simulation.rng
    reader = simulation.pick_running()
    if reader is None:
        return
    others = [engine for engine in simulation.engines if engine is not reader]
    holders = rng.sample(others, rng.randint(1, len(others)))
    start(reader, draw_plan(number, reader, holders))


def draw_plan(number: int, reader: SimEngine, holders: Sequence[SimEngine]) -> PullPlan:
    rng, size = reader.simulation.rng, reader.shape.block_size
    prompt = draw_prompt(rng, room(reader))
    key_tokens = min(rng.choice((size, size, size, SPAN)), len(prompt.tokens))
    cached = rng.randint(0, len(prompt.tokens) // size) * size if rng.random() < 0.25 else 0
    return PullPlan(
        number=number,
        prompt=prompt,
        key_tokens=key_tokens,
        holders=holders,
        cached_tokens=cached // key_tokens * key_tokens,
        seeks=rng.random() < _SEEK_SHARE,
        deadline_s=rng.uniform(0.0005, reader.base.load_deadline_s) if rng.random() < 0.2 else None,
        answer_within_s=rng.choice((0.005, 0.1, 0.25)),
        recompute_s_per_token=rng.choice((1e-6, 1e-3)) if rng.random() < 0.2 else None,
        cancel_after_s=rng.expovariate(1 / 0.005) if rng.random() < 0.15 else None,
        use_s=rng.expovariate(1 / 0.02) + 1e-3,
    )


def start(reader: SimEngine, plan: PullPlan) -> None:
    if reader.running:
        reader.simulation.spawn(reader.life, prefixes.pull(reader, plan), plan.request_id)


def perhaps_strike(holder: SimEngine) -> None:
    """With some probability let a fault strike a holder that has answered and is about to be read."""
    simulation, rng, conditions = holder.simulation, holder.simulation.rng, holder.simulation.network.conditions
    if conditions is not CALM and rng.random() < _STRUCK_SHARE:
        strike, after_s = pick(STRIKES, rng), rng.expovariate(1 / (3 * conditions.latency_s + conditions.read_s))
        simulation.count(f"strike: {strike.__name__.replace('_', ' ')}")
        simulation.strike_later(after_s, strike, holder)


def pull_one(number: int, holder: SimEngine, reader: SimEngine) -> asyncio.Task[list[int] | None] | None:
    """Start a task in which `holder` computes a short prompt and `reader` pulls it. None if either does not run."""
    if not holder.running or not reader.running:
        return None
    simulation, tokens = reader.simulation, max(holder.shape.block_size, reader.shape.block_size)
    prompt = SimPrompt(b"", tuple(range(number, number + tokens)))
    plan = PullPlan(number=number, prompt=prompt, key_tokens=tokens, holders=[holder], deadline_s=5.0)

    async def compute_and_pull() -> list[int] | None:
        await simulation.spawn(holder.life, holder.prefix_cache.compute(prompt), f"compute {number}")
        return await prefixes.pull(reader, plan)

    return simulation.spawn(reader.life, compute_and_pull(), plan.request_id)
