"""Tables of what may happen in a simulation: to add something, write a function and give it a row and a weight."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvflow.core.protocol.ticket import Ticket
from kvflow.testing.simulator import loading
from kvflow.testing.simulator.work import LoadPlan, SimOffer

if TYPE_CHECKING:
    from kvflow.testing.simulator.engine import SimEngine
    from kvflow.testing.simulator.simulation import Simulation

ActionT = TypeVar("ActionT")


def pick(table: Sequence[tuple[int, ActionT]], rng: random.Random) -> ActionT:
    """Draw an action, by weight."""
    return rng.choices([action for _, action in table], [weight for weight, _ in table])[0]


# --- trouble: what befalls an engine that runs


def crash(simulation: Simulation, engine: SimEngine) -> None:
    """Kill a process, which starts again under the same name."""
    simulation.crash_and_restart(engine, simulation.rng.uniform(0.0, 0.2))


def freeze(simulation: Simulation, engine: SimEngine) -> None:
    """Stop a process for a while (SIGSTOP, SIGCONT); its memory can be read meanwhile."""
    simulation.note(repr(engine), "freezes")
    engine.life.freeze()
    simulation.network.later(_duration_s(simulation), engine.life.thaw)


def partition(simulation: Simulation, engine: SimEngine) -> None:
    """Cut two hosts off from each other for a while; reads between them stand still."""
    other = _other(simulation, engine)
    simulation.note(repr(engine), "is cut off from", repr(other))
    simulation.network.cut(engine.host, other.host)
    simulation.network.later(_duration_s(simulation), simulation.network.heal)


def stall_poller(simulation: Simulation, engine: SimEngine) -> None:
    """Keep an engine from looking what has ended or arrived."""
    engine.host.poller_stalled_until_s = simulation.loop.time() + _duration_s(simulation)


def lose_agent(simulation: Simulation, engine: SimEngine) -> None:
    """Let the transport of a rank die under it. The engine notices, closes and starts again."""
    simulation.note(repr(engine), "loses an agent")
    engine.host.agent_lost = True
    simulation.rng.choice(engine.host.agents).die(OSError("simulated death of the agent"))
    simulation.later_crash(engine)


def reopen(simulation: Simulation, engine: SimEngine) -> None:
    """Shut an engine down in good order; it comes back."""
    simulation.spawn(engine.life, simulation.reopen(engine, None), f"reopen {engine}")


def drain(simulation: Simulation, engine: SimEngine) -> None:
    """Drain an engine before it shuts down and comes back."""
    simulation.spawn(engine.life, simulation.reopen(engine, _duration_s(simulation)), f"drain {engine}")


def forget(simulation: Simulation, engine: SimEngine) -> None:
    """Have an engine forget a peer, in the middle of whatever it does with it."""
    simulation.spawn(engine.life, engine.forget(_other(simulation, engine)), f"forget at {engine}")


def prewarm(simulation: Simulation, engine: SimEngine) -> None:
    """Connect an engine to another before it needs to."""
    simulation.spawn(engine.life, engine.prewarm(_other(simulation, engine)), f"prewarm at {engine}")


def nap(simulation: Simulation, engine: SimEngine) -> None:
    """Have an engine give its cache back for a while."""
    simulation.spawn(engine.life, engine.nap(_duration_s(simulation)), f"nap of {engine}")


TROUBLE: Sequence[tuple[int, Callable[[Simulation, SimEngine], None]]] = (
    (3, crash),
    (3, freeze),
    (3, partition),
    (2, stall_poller),
    (1, lose_agent),
    (1, reopen),
    (2, drain),
    (1, forget),
    (1, prewarm),
)


def cut_off(simulation: Simulation, engine: SimEngine, consumer: SimEngine) -> None:
    """Cut a consumer off from this engine, for so long that reads of it are late."""
    simulation.network.cut(engine.host, consumer.host)
    simulation.network.later(simulation.rng.uniform(*_CUT_OFF_S), simulation.network.heal)


STRIKES: Sequence[tuple[int, Callable[[Simulation, SimEngine, SimEngine], None]]] = (
    (1, lambda simulation, engine, _: crash(simulation, engine)),
    (1, lambda simulation, engine, _: freeze(simulation, engine)),
    (3, cut_off),
)
_CUT_OFF_S = (0.3, 1.5)
_STRUCK_SHARE = 0.5  # of loads that have several sources: something befalls the first one while they are read
_STRUCK_AFTER_S = 0.001  # mean time until then


# --- deliveries: what a consumer does with a ticket that a router gives it

Delivery = Callable[["Simulation", "SimEngine", SimOffer, Ticket], Coroutine[Any, Any, None]]


def load(simulation: Simulation, consumer: SimEngine, offer: SimOffer, ticket: Ticket) -> Coroutine[Any, Any, None]:
    """Decode the request."""
    return loading.load(consumer, offer, ticket, _plan_load(simulation, consumer, offer))


def wait_and_load(
    simulation: Simulation, consumer: SimEngine, offer: SimOffer, ticket: Ticket
) -> Coroutine[Any, Any, None]:
    """Decode the request once the engine has room for it, some time later."""
    plan = _plan_load(simulation, consumer, offer)
    return loading.wait_and_load(consumer, offer, ticket, plan, simulation.rng.expovariate(1 / (0.5 * offer.ttl_s)))


def release(_: Simulation, consumer: SimEngine, offer: SimOffer, ticket: Ticket) -> Coroutine[Any, Any, None]:
    """Abort the request before it is decoded."""
    return loading.release(consumer, offer, ticket)


def survive(simulation: Simulation, consumer: SimEngine, offers: Sequence[SimOffer]) -> Coroutine[Any, Any, None]:
    """Decode a request whose router knows several engines that hold the prompt, or will."""
    rng, plan = simulation.rng, _plan_load(simulation, consumer, offers[0])
    plan = replace(plan, more=offers[1:], named=rng.randint(0, len(offers) - 1))
    if rng.random() < _STRUCK_SHARE:
        strike, after_s = pick(STRIKES, rng), rng.expovariate(1 / _STRUCK_AFTER_S)
        simulation.network.later(after_s, simulation.strike, strike, offers[0].engine, consumer)
    return loading.load(consumer, offers[0], offers[0].ticket(), plan)


DELIVERIES: Sequence[tuple[int, Delivery]] = (
    (17, load),
    (2, wait_and_load),
    (1, release),
)


def _plan_load(simulation: Simulation, consumer: SimEngine, offer: SimOffer) -> LoadPlan:
    rng, longest_s = simulation.rng, simulation.settings.base.load_deadline_s
    blocks = -(-offer.tokens // consumer.shape.block_size)
    return LoadPlan(
        cached_blocks=rng.randint(0, blocks) if rng.random() < 0.3 else 0,
        deadline_s=rng.uniform(0.0005, longest_s) if rng.random() < 0.2 else None,
        cancel_after_s=rng.expovariate(1 / 0.005) if rng.random() < 0.2 else None,
        use_s=rng.expovariate(1 / 0.05),
    )


def _other(simulation: Simulation, engine: SimEngine) -> SimEngine:
    return simulation.rng.choice([other for other in simulation.engines if other is not engine])


def _duration_s(simulation: Simulation) -> float:
    """Length of a trouble: mostly short, now and then longer than any limit."""
    return simulation.rng.choice((0.002, 0.02, 0.1, 0.5)) * (0.5 + simulation.rng.random())
