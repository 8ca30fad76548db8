"""Offers of a simulated engine: a prompt is computed, served on all ranks, and its blocks come back in the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

from kvflow.core.plan.descriptors import given_block_ids
from kvflow.core.policy.states import LeaseState
from kvflow.core.protocol.ticket import Ticket, merge_tickets
from kvflow.errors import KVFlowError, RequestError
from kvflow.runtime.producer.lease import Lease, ServeRequest
from tests.simulator.cache import Content
from tests.simulator.engine import DEVICE_S, DRIFT, SimEngine
from tests.simulator.work import DeviceWork, SimOffer, SimRank, all_over

_GROWING_SHARE = 0.5  # of prompts on a device: offered before they are computed
_GROWING_STEPS = 2
_EXTENDED_SHARE = 0.4  # of those: their blocks follow while they are computed, and something comes with the end
_BROKEN_SHARE = 0.05  # of the steps in which a prompt is computed: it never will be
_FORGOTTEN_SHARE = 0.3  # of those: nobody is told
_HASTY_EVERY = 3  # offers whose blocks follow, by number: one whose engine tells of tokens before it gives their blocks


async def offer(
    engine: SimEngine,
    number: int,
    tokens: int,
    ttl_s: float,
    hand_out: Callable[[SimOffer], None],
    *,
    content: Content | None = None,
    pause_s: float = 0.0,
    early: Callable[[SimOffer], Awaitable[None]] | None = None,
) -> SimOffer | None:
    """Compute a prompt, serve it on all ranks, hand it out, and take its blocks back when its leases have ended.

    `early` hands a rendezvous out before it is served, `pause_s` passes between two ranks. None if there was no room.
    """
    if not engine.running:
        return None
    tables = engine.take_blocks(tokens)
    if tables is None:
        engine.simulation.count("offer: no room")
        return None
    offer = SimOffer(number, engine, tokens, tables, ttl_s, number if content is None else content)
    if await _serve(offer, pause_s, early):
        hand_out(offer)
    await _finish(offer)
    return offer


async def _serve(offer: SimOffer, pause_s: float, early: Callable[[SimOffer], Awaitable[None]] | None) -> bool:
    """Serve a prompt. True if all ranks have a lease of it."""
    engine, tokens, tables = offer.engine, offer.tokens, offer.tables
    engine.own(offer)
    grows = engine.simulation.settings.model.device and engine.simulation.rng.random() < _GROWING_SHARE
    if not grows:
        for rank in engine.ranks:
            offer.device.append(engine.later(partial(rank.cache.write, offer.content, tokens, tables)))
    engine.offers[offer] = None
    engine.note("offers", offer.request_id, tokens, offer.block_ids)
    if grows and engine.simulation.rng.random() < _EXTENDED_SHARE:
        offer.payload = offer.request_id.encode()
    if early is not None:
        offer.early = True
        await early(offer)
    for rank in list(engine.ranks):
        try:
            lease = rank.runtime.serve_blocks(
                ServeRequest(
                    offer.request_id,
                    given_block_ids(offer.tables_upto(0) if offer.payload else tables),
                    tokens,
                    ttl_s=offer.ttl_s,
                    ready=None if grows else offer.device[rank.index],
                    computed_tokens=0 if grows else None,
                    extends=len(offer.payload) > 0,
                    payload=len(offer.payload) > 0,
                )
            )
        except KVFlowError as error:
            engine.judge_refusal(offer.request_id, error)
            for lease in offer.leases:
                lease.revoke()
            _decline(offer)
            engine.simulation.count(f"offer: {type(error).__name__}")
            return False
        rank.served += 1
        offer.leases.append(lease)
        if grows:
            offer.growing.append(asyncio.create_task(_grow(offer, rank, lease)))
        if pause_s and rank is not engine.ranks[-1]:
            await engine.simulation.pass_time(pause_s)
    return True


async def _grow(offer: SimOffer, rank: SimRank, lease: Lease) -> None:
    """Compute the prompt on one rank in a few steps, until it is complete or nobody may read it any more."""
    engine, rng = offer.engine, offer.engine.simulation.rng
    for upto in (*sorted(rng.randint(0, offer.tokens) for _ in range(_GROWING_STEPS)), offer.tokens):
        await engine.simulation.pass_time(rng.expovariate(1 / DEVICE_S))
        if lease.state is not LeaseState.OFFERED or offer.broken:
            return
        if rng.random() < _BROKEN_SHARE:
            _break(offer)
            return
        work = engine.later(partial(rank.cache.write, offer.content, offer.tokens, offer.tables, upto))
        offer.device.append(work)
        try:
            _advance(offer, lease, upto, work)
        except RequestError as error:  # no host blocks for more
            engine.judge_refusal(offer.request_id, error)
            _fail(offer, str(error))
            return


def _advance(offer: SimOffer, lease: Lease, upto: int, work: DeviceWork | None) -> None:
    """Tell how far a prompt is, and its further blocks where they follow."""
    if not offer.payload:
        lease.advance(upto, work)
        return
    known = lease.block_tables
    more = [table[len(had) :] for table, had in zip(offer.tables_upto(upto), known, strict=True)]
    tell = partial(lease.complete, offer.payload) if upto == offer.tokens else partial(lease.advance, upto)
    if any(more) and offer.number % _HASTY_EVERY == 0:
        _forget_to_extend(offer, upto, lambda: tell(ready=work))
    lease.extend(given_block_ids(more))
    tell(ready=work)


def _forget_to_extend(offer: SimOffer, upto: int, tell: Callable[[], None]) -> None:
    """Tell of tokens whose blocks the lease was never given: that is refused, and changes nothing."""
    try:
        tell()
    except RequestError:
        offer.engine.simulation.count("offer: told of tokens without blocks")
        return
    offer.engine.fail("I8", f"{offer.request_id} was told of {upto} tokens, not of the blocks that hold them")


def _decline(offer: SimOffer) -> None:
    """Tell who waits for an offer that there will be none."""
    for rank in offer.engine.ranks:
        with contextlib.suppress(KVFlowError):
            rank.runtime.decline(offer.request_id, "simulated")


def introduce(engine: SimEngine, number: int) -> Ticket | None:
    """Ticket of nothing, by which the ranks of an engine introduce themselves; None if it cannot."""
    tickets = []
    for rank in engine.ranks:
        try:
            tickets.append(rank.runtime.introduce())
        except KVFlowError as error:
            engine.judge_refusal(f"introduction-{number}", error)
            return None
    return merge_tickets(tickets)


def _break(offer: SimOffer) -> None:
    """Give a prompt up that will never be computed: its leases fail, or nobody is told."""
    engine = offer.engine
    if engine.simulation.rng.random() >= _FORGOTTEN_SHARE:
        engine.note("cannot compute", offer.request_id)
        _fail(offer, "simulated")
    else:
        engine.note("cannot compute", offer.request_id, "and forgets to say so")
        engine.simulation.count("offer: forgotten")
        offer.broken = True


def _fail(offer: SimOffer, reason: str) -> None:
    """Give a prompt up on all ranks, whichever of them could not go on."""
    offer.broken = True
    for lease in offer.leases:
        lease.fail(reason)


async def _finish(offer: SimOffer) -> None:
    """Wait for the leases of all ranks, then take the blocks back."""
    engine = offer.engine
    longest_s = max(offer.ttl_s, engine.base.lease_lifetime_s)  # readers renew it up to that
    bound_s = (longest_s + engine.base.limits.seal_hold_s) * DRIFT + engine.simulation.copy_bound_s
    for lease in list(offer.leases):
        with engine.bounded(f"lease of {offer.request_id}", bound_s):
            outcome = await lease
        engine.simulation.count(f"lease: {outcome}")
    if offer.growing:
        await asyncio.wait(offer.growing)
    await all_over(offer.device)
    offer.given_back_s = engine.simulation.loop.time()
    engine.note("has back", offer.request_id)
    engine.offers.pop(offer)
    engine.give_back(offer)
