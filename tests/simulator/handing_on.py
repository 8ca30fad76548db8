"""Engines that hand their prefixes on before they leave, and engines that take prefixes over.

The successor pulls each prefix like any other one, so all checks of pulls hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from functools import partial
from typing import TYPE_CHECKING

from kvflow.core.protocol.ticket import Ticket, merge_tickets
from kvflow.errors import KVFlowError, RuntimeBroken, RuntimeUnavailable
from kvflow.prefix import HandedOnPrefix
from tests.simulator import prefixes
from tests.simulator.prompts import SPAN
from tests.simulator.work import PullPlan

if TYPE_CHECKING:
    from tests.simulator.engine import SimEngine

_WITHIN_S = (0.01, 0.5)
_BYTES_MAX = (1 << 10, 1 << 30)
_SLACK_S = 1.0
_FIRST_NUMBER = 1 << 16  # of pulls of prefixes that are handed on; other pulls have lower numbers


def accept(engine: SimEngine) -> None:
    """Let an engine take prefixes over from all other engines of the run."""
    others = [other for other in engine.simulation.engines if other is not engine]
    ports = range(5600, 5600 + max(other.shape.num_ranks for other in others))
    addresses = [f"{other.host.address}:{port}" for other in others for port in ports]
    try:
        engine.ranks[0].prefixes.accept(partial(_take, engine), predecessors=addresses)
    except RuntimeUnavailable:
        return


async def _take(engine: SimEngine, offered: HandedOnPrefix) -> int | None:
    """Pull an offered prefix on all ranks. None if there is no room."""
    simulation = engine.simulation
    prompt = simulation.prompt_of_key.get(offered.keys[-1])
    holder = next(other for other in simulation.engines if other.name == offered.holder.engine_id)
    if prompt is None or not engine.running:
        return None
    simulation.handed_on += 1
    plan = PullPlan(
        number=_FIRST_NUMBER + simulation.handed_on,
        prompt=prompt,
        key_tokens=offered.key_tokens,
        holders=[holder],
        deadline_s=offered.within_s,
        use_s=1e-3,
    )
    # The engine owns the blocks, whether kvflow still waits for them or not.
    pulling = simulation.spawn(engine.life, prefixes.pull(engine, plan), plan.request_id)
    counts: list[int] | None = await asyncio.shield(pulling)
    if not counts:
        return None
    simulation.count(f"hand on: {'taken' if min(counts) else 'nothing'}")
    return min(counts)


async def hand_on(engine: SimEngine) -> Ticket | None:
    """Hand the prefixes of a running engine on to another one, within a bound. Return a ticket of that engine."""
    simulation = engine.simulation
    rng = random.Random(simulation.settings.seed * 1000 + simulation.handed_on)  # other draws stay as they were
    others = [other for other in simulation.engines if other is not engine]
    if not engine.running or engine.hands_on:
        return None
    engine.hands_on = True
    successor, within_s = rng.choice(others), rng.choice(_WITHIN_S)
    offered = [prompt.keys(SPAN) for prompt in reversed(engine.prefix_cache.prompts)]
    bound_s = within_s + engine.base.cancel_grace_s + engine.base.handshake_timeout_s + _SLACK_S
    try:
        with engine.bounded("hand_on", bound_s):
            await engine.ranks[0].prefixes.hand_on(
                f"{successor.host.address}:5600",
                offered,
                key_tokens=SPAN,
                bytes_max=rng.choice(_BYTES_MAX),
                within_s=within_s,
            )
    except KVFlowError as error:
        simulation.count("hand on: refused")
        engine.judge_refusal("hand_on", error)
    if successor.running:
        with contextlib.suppress(RuntimeUnavailable, RuntimeBroken):
            return merge_tickets([rank.runtime.introduce() for rank in successor.ranks])
    return None
