"""Offers of a simulated engine: a prompt is computed and served on all ranks, and its blocks are freed in the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

from kvflow.core.plan.descriptors import given_block_ids
from kvflow.core.policy.states import LeaseState
from kvflow.core.protocol.ticket import Ticket, merge_tickets
from kvflow.errors import HostBlocksBusy, KVFlowError, RequestError
from kvflow.runtime.producer.lease import Lease, ServeRequest
from tests.simulator.engine import DEVICE_S, DRIFT, SimEngine
from tests.simulator.work import DeviceWork, SimOffer, SimRank, all_over

_GROWING_SHARE = 0.5  # share of a device's prompts that are offered before they are computed
_GROWING_STEPS = 2
_EXTENDED_SHARE = 0.4  # share of those prompts that get blocks while they are computed, and a payload at the end
_BROKEN_SHARE = 0.05  # share of steps at which the computation of a prompt fails
_FORGOTTEN_SHARE = 0.3  # share of failed prompts that the engine reports to nobody
_HASTY_EVERY = 3  # every n-th offer that gets blocks later first reports tokens before it has their blocks


async def offer(
    engine: SimEngine,
    number: int,
    tokens: int,
    ttl_s: float,
    hand_out: Callable[[SimOffer], None],
    *,
    pause_s: float = 0.0,
    early: Callable[[SimOffer], Awaitable[None]] | None = None,
) -> SimOffer | None:
    """Compute a prompt, serve it on all ranks, hand it out, and free its blocks when its leases have ended.

    `early` hands out a pending ticket before the prompt is served. `pause_s` passes between two ranks. Return None if
    there was no room.
    """
    if not engine.running:
        return None
    tables = engine.take_blocks(tokens)
    if tables is None:
        engine.simulation.count("offer: no room")
        return None
    offer = SimOffer(number, engine, tokens, tables, ttl_s, engine.weights)
    if await _serve(offer, pause_s, early):
        hand_out(offer)
    await _finish(offer)
    return offer


async def _serve(offer: SimOffer, pause_s: float, early: Callable[[SimOffer], Awaitable[None]] | None) -> bool:
    """Serve a prompt. Return True if all ranks have a lease."""
    engine, tokens, tables = offer.engine, offer.tokens, offer.tables
    engine.own(offer)
    grows = engine.simulation.settings.model.device and engine.simulation.rng.random() < _GROWING_SHARE
    if not grows:
        for rank in engine.ranks:
            offer.device.append(engine.later(partial(rank.cache.write, offer.number, tokens, tables)))
    engine.offers[offer] = None
    engine.note("offers", offer.request_id, tokens, offer.block_ids)
    if grows and engine.simulation.rng.random() < _EXTENDED_SHARE:
        offer.payload = offer.request_id.encode()
    if early is not None:
        offer.early = True
        await early(offer)
    for rank in list(engine.ranks):
        if engine.weights != offer.weights:  # what is left of the prompt is computed with other weights
            _fail(offer, "simulated")
            _decline(offer)
            engine.simulation.count("offer: retrained")
            return False
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
    """Compute the prompt on one rank in a few steps, until it is complete or its lease has ended."""
    engine, rng = offer.engine, offer.engine.simulation.rng
    for upto in (*sorted(rng.randint(0, offer.tokens) for _ in range(_GROWING_STEPS)), offer.tokens):
        await engine.simulation.pass_time(rng.expovariate(1 / DEVICE_S))
        if lease.state is not LeaseState.OFFERED or offer.broken:
            return
        if rng.random() < _BROKEN_SHARE:
            _break(offer)
            return
        work = engine.later(partial(rank.cache.write, offer.number, offer.tokens, offer.tables, upto))
        offer.device.append(work)
        try:
            _advance(offer, lease, upto, work)
        except HostBlocksBusy as error:
            engine.judge_refusal(offer.request_id, error)
            _fail(offer, str(error))
            return


def _advance(offer: SimOffer, lease: Lease, upto: int, work: DeviceWork | None) -> None:
    """Advance the lease to `upto` tokens. If blocks are added while the prompt is computed, extend the lease first."""
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
    """Report tokens before the lease has their blocks. kvflow has to refuse that, and change nothing."""
    try:
        tell()
    except RequestError:
        offer.engine.simulation.count("offer: told of tokens without blocks")
        return
    offer.engine.fail("I8", f"{offer.request_id} was told of {upto} tokens, not of the blocks that hold them")


def _decline(offer: SimOffer) -> None:
    """Notify readers that wait for the offer that it will not be made."""
    for rank in offer.engine.ranks:
        with contextlib.suppress(KVFlowError):
            rank.runtime.decline(offer.request_id, "simulated")


def introduce(engine: SimEngine, number: int) -> Ticket | None:
    """Return the introduction of an engine's ranks: a ticket without a lease. None if a rank has none."""
    tickets = []
    for rank in engine.ranks:
        try:
            tickets.append(rank.runtime.introduce())
        except KVFlowError as error:
            engine.judge_refusal(f"introduction-{number}", error)
            return None
    return merge_tickets(tickets)


def _break(offer: SimOffer) -> None:
    """Stop computing a prompt. Its leases fail, or the engine forgets to report it."""
    engine = offer.engine
    if engine.simulation.rng.random() >= _FORGOTTEN_SHARE:
        engine.note("cannot compute", offer.request_id)
        _fail(offer, "simulated")
    else:
        engine.note("cannot compute", offer.request_id, "and forgets to say so")
        engine.simulation.count("offer: forgotten")
        offer.broken = True


def _fail(offer: SimOffer, reason: str) -> None:
    """Fail the leases of a prompt on all ranks."""
    offer.broken = True
    for lease in offer.leases:
        lease.fail(reason)


async def _finish(offer: SimOffer) -> None:
    """Wait until the leases of all ranks have ended, then free the blocks."""
    engine = offer.engine
    longest_s = max(offer.ttl_s, engine.base.lease_lifetime_s)  # readers may renew a lease until then
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
