"""Requests of a simulation: the engines that compute a prompt and decode it, and the way of its ticket."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvflow.core.protocol.ticket import Ticket
from kvflow.testing.simulator import offering
from kvflow.testing.simulator.actions import DELIVERIES, Delivery, pick, survive
from kvflow.testing.simulator.work import SimOffer

if TYPE_CHECKING:
    from kvflow.testing.simulator.engine import SimEngine
    from kvflow.testing.simulator.simulation import Simulation

_REVOKED_SHARE = 0.1
_EARLY_SHARE = 0.15  # of requests: their consumer hears of them before their producer
_EARLY_S = 0.05  # mean time until the producer does
_SEVERAL_SHARE = 0.7  # of requests, where several engines may hold a prompt


def request(simulation: Simulation, number: int) -> None:
    if simulation.settings.model.survives and simulation.rng.random() < _SEVERAL_SHARE:
        _several(simulation, number)
        return
    if producer := simulation.pick_running(lambda engine: engine.shape.serves):
        simulation.spawn(producer.life, _produce(simulation, producer, number), f"offer {number}")


def _several(simulation: Simulation, number: int) -> None:
    """Have several engines hold one prompt, and another decode it once their tickets had time to come."""
    rng, able = simulation.rng, [engine for engine in simulation.engines if engine.running and engine.shape.serves]
    producers = rng.sample(able, min(len(able), rng.randint(2, 3)))
    consumers = [one for one in simulation.engines if one.shape.loads and one not in producers]
    if not producers or not consumers:
        return
    room = min(one.shape.num_blocks * one.shape.block_size // 2 for one in producers)
    tokens, offers = rng.randint(1, min(room, 32)), list[SimOffer]()
    for producer in producers:
        simulation.spawn(
            producer.life, _hold(simulation, producer, number, tokens, offers), f"offer {number} of {producer}"
        )
    simulation.network.later(rng.uniform(0.0, 0.01), _deliver_several, simulation, rng.choice(consumers), offers)


async def _hold(simulation: Simulation, producer: SimEngine, number: int, tokens: int, offers: list[SimOffer]) -> None:
    """Offer the prompt in one of several producers, and wait for the end of its leases."""
    ttl_s = simulation.settings.base.lease_ttl_s * simulation.rng.uniform(0.2, 1.5)
    offer = await offering.begin(producer, number, tokens, ttl_s, 0.0, None)
    if offer is None:
        return
    if len(offer.leases) == producer.shape.num_ranks:
        offers.append(offer)
        if simulation.rng.random() < _REVOKED_SHARE:
            simulation.loop.call_later(simulation.rng.uniform(0.0, ttl_s), _revoke, simulation, offer)
    await offering.finish(offer)


def _deliver_several(simulation: Simulation, consumer: SimEngine, offers: Sequence[SimOffer]) -> None:
    if consumer.running and offers:
        simulation.count("offer: several")
        body = survive(simulation, consumer, list(offers))
        simulation.spawn(consumer.life, body, f"load of several {offers[0].number}")


async def _produce(simulation: Simulation, producer: SimEngine, number: int) -> None:
    """Offer a prompt in the producer, send the ticket to whoever decodes it, and wait for the end."""
    rng = simulation.rng
    tokens = rng.randint(0, min(producer.shape.num_blocks * producer.shape.block_size // 2, 32))
    ttl_s = simulation.settings.base.lease_ttl_s * rng.uniform(0.2, 1.5)
    pause_s = rng.uniform(0.0, 0.02) if rng.random() < 0.2 else 0.0
    early = partial(_meet, simulation) if rng.random() < _EARLY_SHARE else None
    offer = await offering.begin(producer, number, tokens, ttl_s, pause_s, early)
    if offer is None:
        return
    if len(offer.leases) == producer.shape.num_ranks:
        _hand_out(simulation, offer)
        if rng.random() < _REVOKED_SHARE:
            simulation.loop.call_later(rng.uniform(0.0, ttl_s), _revoke, simulation, offer)
    await offering.finish(offer)


async def _meet(simulation: Simulation, offer: SimOffer) -> None:
    """Route a request to both legs at once: the consumer's comes first by a while."""
    introduction = offering.introduce(offer.engine, offer.number)
    consumers = [one for one in simulation.engines if one.shape.loads and one is not offer.engine]
    if introduction is not None and consumers:
        simulation.count("offer: rendezvous")
        ticket = Ticket.rendezvous(introduction, offer.request_id, ttl_s=offer.ttl_s)
        deliver, consumer = pick(DELIVERIES, simulation.rng), simulation.rng.choice(consumers)
        simulation.network.later(simulation.network.delay_s(), _deliver, simulation, deliver, consumer, offer, ticket)
        await simulation.pass_time(simulation.rng.expovariate(1 / _EARLY_S))


def _revoke(simulation: Simulation, offer: SimOffer) -> None:
    """Abort the request at the producer."""
    simulation.note(repr(offer.engine), "revokes", offer.request_id)
    for lease in offer.leases:
        lease.revoke()


def _hand_out(simulation: Simulation, offer: SimOffer) -> None:
    """Route an offer: to one consumer, now and then to none, or to a second one that should not have it."""
    rng = simulation.rng
    for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 1, 2))):
        consumers = [one for one in simulation.engines if one.shape.loads and one is not offer.engine]
        if not consumers:
            return
        consumer = rng.choice(consumers)
        ticket = offer.ticket()
        if rng.random() < 0.3:
            ticket = offer.leases[rng.randrange(len(offer.leases))].ticket
        late_s = rng.uniform(0.0, offer.ttl_s * 1.2) if rng.random() < 0.15 else simulation.network.delay_s()
        simulation.network.later(late_s, _deliver, simulation, pick(DELIVERIES, rng), consumer, offer, ticket)


def _deliver(simulation: Simulation, deliver: Delivery, consumer: SimEngine, offer: SimOffer, ticket: Ticket) -> None:
    if consumer.running:
        body = deliver(simulation, consumer, offer, ticket)
        simulation.spawn(consumer.life, body, f"{deliver.__name__} {offer.number}")
