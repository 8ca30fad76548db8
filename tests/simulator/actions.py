"""Tables of actions in a simulation. To add an action, write a function, and add a row with its weight."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvflow.core.protocol.ticket import Ticket
from tests.simulator import loading
from tests.simulator.settings import extends
from tests.simulator.work import LoadPlan, SimOffer

if TYPE_CHECKING:
    from tests.simulator.engine import SimEngine

ActionT = TypeVar("ActionT")


def pick(table: Sequence[tuple[int, ActionT]], rng: random.Random) -> ActionT:
    """Draw an action from `table`, by weight."""
    return rng.choices([action for _, action in table], [weight for weight, _ in table])[0]


_NEWER_SHARE = 0.3  # share of an old engine's new weights that are newer than all others
_WAITING_SHARE = 0.7  # share of pauses in which reads that have not begun wait for the machine


# --- fault: faults of a running engine


def crash(engine: SimEngine) -> None:
    """Kill the process of an engine. It starts again under the same name."""
    engine.simulation.crash_and_restart(engine, engine.simulation.rng.uniform(0.0, 0.2))


def freeze(engine: SimEngine) -> None:
    """Stop a process for a while (SIGSTOP, SIGCONT); its memory can be read meanwhile."""
    engine.note("freezes")
    engine.life.freeze()
    engine.simulation.network.later(_duration_s(engine), engine.go_on)


def pause_machine(engine: SimEngine) -> None:
    """Pause the machine of an engine for a while, as its hypervisor does: its clocks stand still, those of others not.

    A read that the network has begun ends by itself, as do reads that were posted before it. Others end, too, or wait
    for the machine. So reads go in order: if a pause cuts a post in two, with its seal before its bytes, nothing proves
    the bytes (docs/decisions/0003-seals.md).
    """
    engine.note("is paused")
    engine.simulation.count("pause")
    network, rng = engine.simulation.network, engine.simulation.rng
    network.pause(engine.host, waits=rng.random() < _WAITING_SHARE)
    engine.pause()
    network.later(_duration_s(engine), engine.go_on)


def partition(engine: SimEngine) -> None:
    """Cut two hosts off from each other for a while; reads between them stand still."""
    other = _other(engine)
    engine.note("is cut off from", repr(other))
    engine.simulation.network.cut(engine.host, other.host)
    engine.simulation.network.later(_duration_s(engine), engine.simulation.network.heal)


def stall_poller(engine: SimEngine) -> None:
    """Keep the poller of an engine from looking for ended reads and notifications, for a while."""
    engine.host.poller_stalled_until_s = engine.simulation.loop.time() + _duration_s(engine)


def lose_agent(engine: SimEngine) -> None:
    """Let the transport agent of a rank die. The engine notices, closes and starts again."""
    engine.note("loses an agent")
    engine.host.agent_lost = True
    engine.simulation.rng.choice(engine.host.agents).die(OSError("simulated death of the agent"))
    engine.simulation.later_crash(engine)


def reopen(engine: SimEngine) -> None:
    """Close an engine in good order. It starts again."""
    engine.simulation.spawn(engine.life, engine.simulation.reopen(engine, None), f"reopen {engine}")


def drain(engine: SimEngine) -> None:
    """Drain an engine, then close it in good order. It starts again."""
    engine.simulation.spawn(engine.life, engine.simulation.reopen(engine, _duration_s(engine)), f"drain {engine}")


def forget(engine: SimEngine) -> None:
    """Make an engine forget a peer, whatever the two are doing with each other."""
    engine.simulation.spawn(engine.life, engine.forget(_other(engine)), f"forget at {engine}")


def prewarm(engine: SimEngine) -> None:
    """Connect an engine to another one before a load needs it."""
    engine.simulation.spawn(engine.life, engine.prewarm(_other(engine)), f"prewarm at {engine}")


def nap(engine: SimEngine) -> None:
    """Make an engine unregister its cache for a while."""
    engine.simulation.spawn(engine.life, engine.nap(_duration_s(engine)), f"nap of {engine}")


def retrain(engine: SimEngine) -> None:
    """Give an engine the newest weights of its fleet, or weights that no other engine has yet."""
    simulation = engine.simulation
    if engine.weights == simulation.weights or simulation.rng.random() < _NEWER_SHARE:
        simulation.weights += 1
    engine.retrain(simulation.weights)


FAULTS: Sequence[tuple[int, Callable[[SimEngine], None]]] = (
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


def cut_off(engine: SimEngine, consumer: SimEngine) -> None:
    """Cut a consumer off from this engine for a while; reads between them stand still."""
    engine.simulation.network.cut(engine.host, consumer.host)
    engine.simulation.network.later(engine.simulation.rng.uniform(*_CUT_OFF_S), engine.simulation.network.heal)


STRIKES: Sequence[tuple[int, Callable[[SimEngine, SimEngine], None]]] = (
    (3, lambda engine, _: crash(engine)),
    (1, lambda engine, _: freeze(engine)),
    (1, cut_off),
)
_CUT_OFF_S = (0.3, 1.5)
_STRUCK_SHARE = 0.5  # share of loads, with several sources or beside pauses, during which a fault strikes
_STRUCK_AFTER_S = 0.001  # mean time from the start of the load to the fault


# --- deliveries: what a consumer does with a ticket from a router

Delivery = Callable[["SimEngine", SimOffer, Ticket], Coroutine[Any, Any, None]]


def load(consumer: SimEngine, offer: SimOffer, ticket: Ticket) -> Coroutine[Any, Any, None]:
    """Load the offered prompt. If machines are paused in this run, the consumer's may be paused meanwhile."""
    simulation = consumer.simulation
    if simulation.settings.pauses and simulation.rng.random() < _STRUCK_SHARE:
        simulation.strike_later(simulation.rng.expovariate(1 / _STRUCK_AFTER_S), pause_machine, consumer)
    return loading.load(consumer, offer, ticket, _plan_load(consumer, offer))


def wait_and_load(consumer: SimEngine, offer: SimOffer, ticket: Ticket) -> Coroutine[Any, Any, None]:
    """Load the offered prompt some time later, once the engine has room."""
    plan = _plan_load(consumer, offer)
    wait_s = consumer.simulation.rng.expovariate(1 / (0.5 * offer.ttl_s))
    return loading.wait_and_load(consumer, offer, ticket, plan, wait_s)


def release(consumer: SimEngine, offer: SimOffer, ticket: Ticket) -> Coroutine[Any, Any, None]:
    """Abort the request before it is decoded."""
    return loading.release(consumer, offer, ticket)


def survive(consumer: SimEngine, offers: Sequence[SimOffer]) -> Coroutine[Any, Any, None]:
    """Load a prompt that several engines offer, or will offer."""
    rng, plan = consumer.simulation.rng, _plan_load(consumer, offers[0])
    plan = replace(plan, extends=False, more=offers[1:], named=rng.randint(0, len(offers) - 1))
    if rng.random() < _STRUCK_SHARE:
        strike, after_s = pick(STRIKES, rng), rng.expovariate(1 / _STRUCK_AFTER_S)
        consumer.simulation.strike_later(after_s, strike, offers[0].engine, consumer)
    return loading.load(consumer, offers[0], offers[0].ticket(), plan)


DELIVERIES: Sequence[tuple[int, Delivery]] = (
    (17, load),
    (2, wait_and_load),
    (1, release),
)


def _plan_load(consumer: SimEngine, offer: SimOffer) -> LoadPlan:
    rng, longest_s = consumer.simulation.rng, consumer.base.load_deadline_s
    blocks = -(-offer.tokens // consumer.shape.block_size)
    settings = consumer.simulation.settings
    return LoadPlan(
        extends=extends(settings.seed) and offer.number % 4 > 0,
        cached_blocks=rng.randint(0, blocks) if rng.random() < 0.3 else 0,
        deadline_s=rng.uniform(0.0005, longest_s) if rng.random() < 0.2 else None,
        cancel_after_s=rng.expovariate(1 / 0.005) if rng.random() < 0.2 else None,
        use_s=rng.expovariate(1 / 0.05),
    )


def _other(engine: SimEngine) -> SimEngine:
    return engine.simulation.rng.choice([other for other in engine.simulation.engines if other is not engine])


def _duration_s(engine: SimEngine) -> float:
    """Draw how long a fault lasts: mostly short, sometimes longer than any limit."""
    return engine.simulation.rng.choice((0.002, 0.02, 0.1, 0.5)) * (0.5 + engine.simulation.rng.random())
