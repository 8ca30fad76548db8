"""What may happen in a simulation, as tables: to add something, write a function and give it a row and a weight."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from kvflow.core.protocol.ticket import Ticket

if TYPE_CHECKING:
    from kvflow.testing.simulator.engine import Engine
    from kvflow.testing.simulator.simulation import Simulation
    from kvflow.testing.simulator.work import Offer

ActionT = TypeVar("ActionT")


def pick(table: Sequence[tuple[int, ActionT]], rng: random.Random) -> ActionT:
    """One row's action, by weight."""
    return rng.choices([action for _, action in table], [weight for weight, _ in table])[0]


# --- trouble: what befalls engines and links


def crash(simulation: Simulation) -> None:
    """A process is killed and starts again under the same name."""
    engine = _running(simulation)
    if engine is not None:
        simulation.count("trouble: crash")
        simulation.crash_and_restart(engine, simulation.rng.uniform(0.0, 0.2))


def freeze(simulation: Simulation) -> None:
    """A process stands still for a while (SIGSTOP, SIGCONT); its memory can be read meanwhile."""
    engine = _running(simulation)
    if engine is not None:
        simulation.count("trouble: freeze")
        simulation.note(repr(engine), "freezes")
        engine.life.freeze()
        simulation.network.later(_duration_s(simulation), engine.life.thaw)


def partition(simulation: Simulation) -> None:
    """Two hosts cannot reach each other for a while; reads between them stand still."""
    one, other = simulation.rng.sample(simulation.engines, 2)
    simulation.count("trouble: partition")
    simulation.note(repr(one), "is cut off from", repr(other))
    simulation.network.cut(one.host, other.host)
    simulation.network.later(_duration_s(simulation), simulation.network.heal)


def stall_poller(simulation: Simulation) -> None:
    """An engine does not get round to looking what has ended or arrived."""
    engine = _running(simulation)
    if engine is not None:
        simulation.count("trouble: stall poller")
        engine.host.poller_stalled_until_s = simulation.loop.time() + _duration_s(simulation)


def lose_agent(simulation: Simulation) -> None:
    """The transport of a rank dies under it. The engine notices, closes and starts again."""
    engine = _running(simulation)
    if engine is not None and engine.host.agents:
        simulation.count("trouble: lose agent")
        simulation.note(repr(engine), "loses an agent")
        engine.host.agent_lost = True
        simulation.rng.choice(engine.host.agents).die(OSError("simulated death of the agent"))
        simulation.later_crash(engine)


def reopen(simulation: Simulation) -> None:
    """An engine shuts down in good order and comes back."""
    engine = _running(simulation)
    if engine is not None:
        simulation.count("trouble: reopen")
        simulation.spawn(engine.life, simulation.reopen(engine, None), f"reopen {engine}")


def drain(simulation: Simulation) -> None:
    """An engine drains before it shuts down and comes back."""
    engine = _running(simulation)
    if engine is not None:
        simulation.count("trouble: drain")
        simulation.spawn(engine.life, simulation.reopen(engine, _duration_s(simulation)), f"drain {engine}")


def forget(simulation: Simulation) -> None:
    """An engine forgets a peer, in the middle of whatever it does with it."""
    engine, other = _running(simulation), _running(simulation)
    if engine is not None and other is not None and other is not engine:
        simulation.count("trouble: forget")
        simulation.spawn(engine.life, engine.forget(other), f"forget {other}")


def prewarm(simulation: Simulation) -> None:
    """An engine connects to another before it needs to."""
    engine, other = _running(simulation), _running(simulation)
    if engine is not None and other is not None and other is not engine:
        simulation.count("trouble: prewarm")
        simulation.spawn(engine.life, engine.prewarm(other), f"prewarm {other}")


TROUBLE: Sequence[tuple[int, Callable[[Simulation], None]]] = (
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


# --- calling off: what a producer does about an offer of its own


def revoke(simulation: Simulation, offer: Offer) -> None:
    """The request was aborted."""
    simulation.note(repr(offer.engine), "revokes", offer.request_id)
    for lease in offer.leases:
        lease.revoke()


CALL_OFF: Sequence[tuple[int, Callable[[Simulation, Offer], None] | None]] = (
    (9, None),
    (1, revoke),
)


# --- deliveries: what a consumer does with a ticket that a router gives it


def load(simulation: Simulation, consumer: Engine, offer: Offer, ticket: Ticket) -> None:
    """The request is decoded."""
    if consumer.running:
        plan = simulation.plan_load(consumer, offer)
        simulation.spawn(consumer.life, consumer.load(offer, ticket, plan), f"load {offer.number}")


def wait_and_load(simulation: Simulation, consumer: Engine, offer: Offer, ticket: Ticket) -> None:
    """The request is decoded, but the engine has no room for it yet."""
    if consumer.running:
        plan = simulation.plan_load(consumer, offer)
        wait_s = simulation.rng.expovariate(1 / (0.5 * offer.ttl_s))
        simulation.spawn(consumer.life, consumer.wait_and_load(offer, ticket, plan, wait_s), f"wait {offer.number}")


def release(simulation: Simulation, consumer: Engine, offer: Offer, ticket: Ticket) -> None:
    """The request was aborted before it was decoded."""
    if consumer.running:
        simulation.spawn(consumer.life, consumer.release(offer, ticket), f"release {offer.number}")


DELIVERIES: Sequence[tuple[int, Callable[[Simulation, Engine, Offer, Ticket], None]]] = (
    (17, load),
    (2, wait_and_load),
    (1, release),
)


def _running(simulation: Simulation) -> Engine | None:
    return simulation.pick([engine for engine in simulation.engines if engine.running])


def _duration_s(simulation: Simulation) -> float:
    """Mostly short; now and then longer than any limit."""
    return simulation.rng.choice((0.002, 0.02, 0.1, 0.5)) * (0.5 + simulation.rng.random())
