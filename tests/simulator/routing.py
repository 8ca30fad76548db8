"""Requests of a simulation: which engines compute and load a prompt, and how its ticket gets from one to the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvflow.core.protocol.ticket import Ticket
from tests.simulator import offering
from tests.simulator.actions import DELIVERIES, Delivery, pick, survive
from tests.simulator.work import SimOffer

if TYPE_CHECKING:
    from tests.simulator.engine import SimEngine
    from tests.simulator.simulation import Simulation

_REVOKED_SHARE = 0.1
_EARLY_SHARE = 0.15  # share of requests that reach their consumer before their producer
_EARLY_S = 0.05  # mean time until they reach their producer
_SEVERAL_SHARE = 0.7  # share of requests with several producers, if the model allows that


def request(simulation: Simulation, number: int) -> None:
    if simulation.settings.model.survives and simulation.rng.random() < _SEVERAL_SHARE:
        _several(simulation, number)
        return
    if producer := simulation.pick_running(lambda engine: engine.shape.serves):
        simulation.spawn(producer.life, _produce(producer, number), f"offer {number}")


def _several(simulation: Simulation, number: int) -> None:
    """Make several engines offer one prompt, and another engine load it a little later."""
    rng, able = simulation.rng, [engine for engine in simulation.engines if engine.running and engine.shape.serves]
    producers = rng.sample(able, min(len(able), rng.randint(2, 3)))
    consumers = [one for one in simulation.engines if one.shape.loads and one not in producers]
    if not producers or not consumers:
        return
    room = min(one.shape.num_blocks * one.shape.block_size // 2 for one in producers)
    tokens, offers = rng.randint(1, min(room, 32)), list[SimOffer]()
    for producer in producers:
        simulation.spawn(producer.life, _hold(producer, number, tokens, offers), f"offer {number} of {producer}")
    simulation.network.later(rng.uniform(0.0, 0.01), _deliver_several, rng.choice(consumers), offers)


async def _hold(producer: SimEngine, number: int, tokens: int, offers: list[SimOffer]) -> None:
    """Offer the prompt at one of several producers, and wait until its leases have ended."""

    def hand_out(offer: SimOffer) -> None:
        offers.append(offer)
        _perhaps_revoke(offer)

    ttl_s = producer.base.lease_ttl_s * producer.simulation.rng.uniform(0.2, 1.5)
    await offering.offer(producer, number, tokens, ttl_s, hand_out)


def _deliver_several(consumer: SimEngine, offers: Sequence[SimOffer]) -> None:
    if consumer.running and offers:
        consumer.simulation.count("offer: several")
        body = survive(consumer, list(offers))
        consumer.simulation.spawn(consumer.life, body, f"load of several {offers[0].number}")


async def _produce(producer: SimEngine, number: int) -> None:
    """Offer a prompt at the producer, send the ticket to a consumer, and wait until the leases have ended."""

    def hand_out(offer: SimOffer) -> None:
        _hand_out(offer)
        _perhaps_revoke(offer)

    rng = producer.simulation.rng
    tokens = rng.randint(0, min(producer.shape.num_blocks * producer.shape.block_size // 2, 32))
    ttl_s = producer.base.lease_ttl_s * rng.uniform(0.2, 1.5)
    pause_s = rng.uniform(0.0, 0.02) if rng.random() < 0.2 else 0.0
    early = _send_pending_ticket if rng.random() < _EARLY_SHARE else None
    await offering.offer(producer, number, tokens, ttl_s, hand_out, pause_s=pause_s, early=early)


async def _send_pending_ticket(offer: SimOffer) -> None:
    """Send a pending ticket to a consumer, some time before the producer serves the prompt."""
    simulation = offer.engine.simulation
    introduction = offering.introduce(offer.engine, offer.number)
    consumers = _consumers(offer)
    if introduction is not None and consumers:
        simulation.count("offer: rendezvous")
        ticket = Ticket.rendezvous(introduction, offer.request_id, ttl_s=offer.ttl_s)
        deliver, consumer = pick(DELIVERIES, simulation.rng), simulation.rng.choice(consumers)
        simulation.network.later(simulation.network.delay_s(), _deliver, deliver, consumer, offer, ticket)
        await simulation.pass_time(simulation.rng.expovariate(1 / _EARLY_S))


def _perhaps_revoke(offer: SimOffer) -> None:
    """With some probability abort the request at the producer, while consumers may read it."""
    simulation = offer.engine.simulation
    if simulation.rng.random() < _REVOKED_SHARE:
        simulation.loop.call_later(simulation.rng.uniform(0.0, offer.ttl_s), _revoke, offer)


def _revoke(offer: SimOffer) -> None:
    offer.engine.note("revokes", offer.request_id)
    for lease in offer.leases:
        lease.revoke()


def _consumers(offer: SimOffer) -> list[SimEngine]:
    return [one for one in offer.engine.simulation.engines if one.shape.loads and one is not offer.engine]


def _hand_out(offer: SimOffer) -> None:
    """Send the ticket of an offer to a consumer; sometimes to none, or also to a second that should not have it."""
    network, rng, consumers = offer.engine.simulation.network, offer.engine.simulation.rng, _consumers(offer)
    times = rng.choice((0, 1, 1, 1, 1, 1, 1, 2))
    for _ in range(times if consumers else 0):
        consumer = rng.choice(consumers)
        ticket = offer.ticket()
        if rng.random() < 0.3:
            ticket = offer.leases[rng.randrange(len(offer.leases))].ticket
        late_s = rng.uniform(0.0, offer.ttl_s * 1.2) if rng.random() < 0.15 else network.delay_s()
        network.later(late_s, _deliver, pick(DELIVERIES, rng), consumer, offer, ticket)


def _deliver(deliver: Delivery, consumer: SimEngine, offer: SimOffer, ticket: Ticket) -> None:
    if consumer.running:
        body = deliver(consumer, offer, ticket)
        consumer.simulation.spawn(consumer.life, body, f"{deliver.__name__} {offer.number}")
