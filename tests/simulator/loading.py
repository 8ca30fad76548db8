"""Loads of a simulated engine: a prompt is loaded, checked byte by byte, and used for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvflow.core.plan.descriptors import given_block_ids
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import ChecksumMismatch, KVFlowError, PrefillFailed, RequestError, RuntimeBroken
from kvflow.runtime.load.load import Load as Handle
from kvflow.runtime.load.requests import Again, LoadReport, LoadRequest, Verification
from kvflow.runtime.records import Attempt
from kvflow.testing.simulated_network import LOAD
from tests.simulator.checks import check_conserved
from tests.simulator.engine import SimEngine
from tests.simulator.work import Ending, LoadPlan, RankLoad, SimLoad, SimOffer, SimRank, all_over

if TYPE_CHECKING:
    from tests.simulator.simulation import Simulation

_FOLLOWED_EVERY = 4  # every n-th load follows its progress
_MISPLACED_EVERY = 5  # every n-th load is first tried with a wrong place of its blocks
_GIVE_AFTER_S = 0.002  # mean time until a load gets blocks for tokens that are computed
_WAIT_FOR_BLOCKS_S = 0.05  # mean time until a load that was given back begins again
_SLOW_SHARE = 0.2  # share of further tickets that take long, as if the prompt were computed again


async def load(engine: SimEngine, offer: SimOffer, ticket: Ticket, plan: LoadPlan) -> None:
    """Load an offered prompt, again after a while if the engine has run out of blocks for it and gave it back."""
    for _ in range(plan.tries):
        if not await _load_once(engine, offer, ticket, plan):
            return
        await engine.simulation.pass_time(engine.simulation.rng.expovariate(1 / _WAIT_FOR_BLOCKS_S))


async def _load_once(engine: SimEngine, offer: SimOffer, ticket: Ticket, plan: LoadPlan) -> bool:
    """Load an offered prompt, check its bytes, and use the blocks for a while. Return True if it was given back."""
    if not engine.running:
        return False
    cached_tokens = min(plan.cached_blocks * engine.shape.block_size, offer.tokens)
    tables = [[] for _ in engine.facts] if plan.extends else engine.take_blocks(offer.tokens, cached_tokens)
    if tables is None:
        engine.simulation.count("load: no room")
        return False
    naps = engine.naps
    load = SimLoad(offer, engine, tables, cached_tokens, others=plan.more)
    engine.own(load)
    engine.loads[load] = None
    engine.note("loads", offer.request_id, repr(offer.engine), load.block_ids)
    load.device = engine.overwrite_later(load.block_ids)
    endings = await _load_on_all_ranks(load, ticket, plan)
    succeeded = _judge(load, endings)
    for ending in endings if succeeded else ():
        assert isinstance(ending, LoadReport), "it has succeeded"
        load.source(ending.attempts).loaded = True
    if not succeeded:
        await _safe(load)
        await all_over(load.device)
    engine.loads.pop(load)
    if succeeded and plan.use_s:
        await engine.simulation.pass_time(plan.use_s)
        for rank in engine.ranks if naps == engine.naps else ():  # after a nap the blocks are lost
            if (
                wrong := rank.cache.wrong_token(load.offer.number, load.offer.tokens, load.tables)
            ) and not load.corrupt:
                engine.fail("I1", f"blocks of {offer.request_id} changed after the load: {wrong}")
    engine.give_back(load)
    return load.given_back and not succeeded and naps == engine.naps


async def wait_and_load(engine: SimEngine, offer: SimOffer, ticket: Ticket, plan: LoadPlan, wait_s: float) -> None:
    """Keep the ticket's leases for `wait_s`, as for a request that has to wait for room, then load."""
    with contextlib.ExitStack() as kept:
        try:
            for rank in engine.ranks:
                kept.enter_context(rank.runtime.keep_leases(ticket.to_params()))
        except KVFlowError as error:
            engine.judge_refusal(offer.request_id, error)
        await engine.simulation.pass_time(wait_s)
        engine.simulation.count("load: waited")
        await load(engine, offer, ticket, plan)


async def release(engine: SimEngine, offer: SimOffer, ticket: Ticket) -> None:
    """Release an offer unread, as for a request that was aborted before it was decoded."""
    # The release of a pending ticket waits for its offer.
    opens_s = min(ticket.ttl_s, engine.base.lease_lifetime_s) if ticket.awaited else 0.0
    for rank in list(engine.ranks):
        try:
            with engine.bounded(f"release of {offer.request_id}", engine.base.handshake_timeout_s + opens_s):
                told = await rank.runtime.release_blocks(ticket.to_params())
        except KVFlowError as error:
            engine.judge_refusal(offer.request_id, error)
            engine.simulation.count(f"release: {type(error).__name__}")
        else:
            engine.simulation.count(f"release: {'told' if told else 'not told'}")


async def _load_on_all_ranks(load: SimLoad, ticket: Ticket, plan: LoadPlan) -> list[Ending]:
    engine = load.engine
    priority = load.offer.number % 3 if engine.simulation.settings.model.priorities else 0
    request = LoadRequest(
        load.request_id,
        _tickets(ticket, plan),
        given_block_ids(load.tables),
        again=_again(engine.simulation, plan) if plan.more else None,
        deadline_s=plan.deadline_s,
        priority=priority,
        verify=True if engine.simulation.settings.model.verifies and load.offer.number % 3 == 0 else None,
        num_tokens=load.offer.tokens if any(load.tables) or plan.extends else None,
        cached_tokens=load.cached_tokens,
        extends=plan.extends,
    )
    bodies = [_load_on(rank, load, replace(request, after=load.device[rank.index])) for rank in engine.ranks]
    giving = asyncio.create_task(_give_blocks(load)) if plan.extends else None
    endings = await engine.carry_out(load, bodies, plan.cancel_after_s)
    if giving is not None:
        await giving
    return endings


async def _give_blocks(load: SimLoad) -> None:
    """Take blocks for the tokens that are computed, and give them to the load. Cancel the load if none are left."""
    engine, tokens = load.engine, load.cached_tokens
    simulation, counts = engine.simulation, engine.counts_needed(load.offer.tokens, load.cached_tokens)
    await simulation.pass_time(simulation.rng.expovariate(1 / _GIVE_AFTER_S))
    while load.handles and [len(table) for table in load.tables] != counts:
        computed = await load.handles[0].computed(tokens)
        if computed is None:
            return
        tokens = computed
        await simulation.pass_time(simulation.rng.expovariate(1 / _GIVE_AFTER_S))
        if all(handle.done for handle in load.handles):
            return
        more = engine.take_counts(
            [
                max(min(-(-tokens // facts.block_size) - -(-load.offer.tokens // facts.block_size) + count, count), 0)
                - len(table)
                for facts, count, table in zip(engine.facts, counts, load.tables, strict=True)
            ]
        )
        if more is None:
            simulation.count("load: given back")
            load.cancelled = load.given_back = True
            for handle in load.handles:
                handle.cancel()
            return
        for table, added in zip(load.tables, more, strict=True):
            table.extend(added)
        engine.own(load)
        device = engine.overwrite_later([block for added in more for block in added])
        load.device += device
        simulation.count("load: extended")
        for handle, after in zip(load.handles, device, strict=True):
            handle.extend(given_block_ids(more), after)


def _tickets(ticket: Ticket, plan: LoadPlan) -> Any:
    """Return the tickets for LoadRequest, as parameters; if the plan has several sources, as a list."""
    named = [ticket, *(one.ticket() for one in plan.more[: plan.named])]
    return [one.to_params() for one in named] if plan.more else ticket.to_params()


def _again(simulation: Simulation, plan: LoadPlan) -> Again:
    """Return a callback that returns a ticket which the request does not name, after a delay; None if none is left."""
    left = list(plan.more[plan.named :])

    async def again(attempts: Sequence[Attempt]) -> Ticket | None:
        simulation.count("load: asks again")
        slow = simulation.rng.random() < _SLOW_SHARE
        await simulation.pass_time(simulation.rng.uniform(0.0, 5.0) if slow else simulation.network.delay_s())
        return left.pop().ticket() if left else None

    return again


async def _load_on(rank: SimRank, load: SimLoad, request: LoadRequest) -> Ending:
    """Load on one rank. Return the report, checked at the moment of success, or the error."""
    engine = load.engine
    mine = RankLoad(load)
    LOAD.set(mine)
    try:
        if request.extends:
            load.handles.append(rank.runtime.start_load(request))
        elif load.offer.number % _MISPLACED_EVERY == 0 and rank is engine.ranks[0] and load.tables[0]:
            await _misplaced(rank, load, request)
        with engine.bounded(request.request_id, engine.load_bound_s(request.deadline_s)):
            if request.extends:
                report = await _follow(rank, mine, load, load.handles[rank.index])
            elif load.offer.number % _FOLLOWED_EVERY:
                report = await rank.runtime.load_blocks(request)
            else:
                report = await _follow(rank, mine, load, rank.runtime.start_load(request))
    except (KVFlowError, asyncio.CancelledError) as error:
        if isinstance(error, ChecksumMismatch) and not mine.flipped:
            engine.fail("I2", f"no byte of {request.request_id} was flipped, but {error}")
        if isinstance(error, PrefillFailed) and not (load.offer.broken or load.offer.early):
            engine.fail("I4", f"{request.request_id} was computed, but {error}")
        rank.unsure += load.cancelled  # it may have succeeded in the turn in which it was cancelled
        return error
    rank.loaded += 1
    engine.simulation.count(f"load: {report.verification}")
    for attempt in report.attempts:
        engine.simulation.count(f"source: {attempt.outcome}")
    offer = load.source(report.attempts)
    if [one.outcome for one in report.attempts].count("loaded") != min(len(report.attempts), 1):
        engine.fail("I4", f"{request.request_id} has one outcome, and attempts {report.attempts}")
    if report.verification is Verification.REPAIRED and not mine.flipped:
        engine.fail("I2", f"no byte of {request.request_id} was flipped, but it was read twice")
    wrong = rank.cache.wrong_token(load.offer.number, load.offer.tokens, load.tables)
    if wrong and mine.flipped and not report.verified:
        load.corrupt = True
        engine.simulation.count("load: flipped, and nobody looked")
    elif wrong:
        engine.fail("I2", f"{request.request_id} is reported as loaded ({report.verification}), but {wrong}")
    if offer.weights != engine.weights and any(load.tables):
        engine.fail("I2", f"{request.request_id} is of weights {offer.weights}, this engine has {engine.weights}")
    if report.payload != offer.payload and offer.tokens:
        engine.fail("I2", f"{request.request_id} came with {report.payload!r}, not {offer.payload!r}")
    given_back_s = offer.given_back_s
    if given_back_s is not None and mine.last_landing_s > given_back_s:
        engine.fail(
            "I3",
            f"{request.request_id} succeeded with bytes read at {mine.last_landing_s:.6f} s, but its blocks were "
            f"given back at {given_back_s:.6f} s",
        )
    return report


async def _misplaced(rank: SimRank, load: SimLoad, request: LoadRequest) -> None:
    """Try the load with one cached block too many. The runtime has to refuse that."""
    engine = load.engine
    cached = request.cached_tokens + engine.shape.block_size
    wrong = replace(request, cached_tokens=cached, num_tokens=None, again=None, verify=None, keep_offer=True)
    try:
        with engine.bounded(request.request_id, engine.load_bound_s(request.deadline_s)):
            report = await rank.runtime.load_blocks(wrong)
    except RequestError as error:
        engine.simulation.count(f"load: misplaced, {type(error).__name__}")
    except KVFlowError:
        pass  # the load that follows is judged
    else:
        engine.fail("I2", f"{request.request_id}: blocks from {cached} on are reported as filled with what is {report}")


async def _follow(rank: SimRank, mine: RankLoad, load: SimLoad, handle: Handle) -> LoadReport:
    """Load with progress. Check at each progress that the reported tokens are right."""
    engine, tokens = load.engine, -1
    try:
        async for progress in handle:
            if progress.tokens <= tokens:
                engine.fail("I4", f"{handle}: {progress} after {tokens} tokens")
            tokens = progress.tokens
            engine.simulation.count("load: progress")
            counts = engine.counts_needed(load.offer.tokens, load.cached_tokens)
            tables = [table + [0] * (count - len(table)) for table, count in zip(load.tables, counts, strict=True)]
            wrong = rank.cache.wrong_token(load.offer.number, load.offer.tokens, tables, tokens)
            if wrong and not mine.flipped:
                engine.fail("I2", f"{handle}: {progress}, but {wrong}")
        return await handle
    except asyncio.CancelledError:
        handle.cancel()
        await asyncio.gather(handle.settled(), return_exceptions=True)  # `_safe` finds a load that never settles
        raise


def _judge(load: SimLoad, endings: Sequence[Ending]) -> bool:
    """Count how a load has ended on each rank. Return True if all ranks have succeeded."""
    engine = load.engine
    for ending in endings:
        ok = isinstance(ending, LoadReport)
        engine.note("load ended", load.request_id, "ok" if ok else f"{type(ending).__name__}: {ending}")
        engine.simulation.count(f"load: {'ok' if ok else type(ending).__name__}")
        if isinstance(ending, asyncio.CancelledError) and not load.cancelled:
            engine.fail("I4", f"{load.request_id}: CancelledError without a cancel")
        if isinstance(ending, KVFlowError):
            engine.judge_refusal(load.request_id, ending)
    check_conserved(engine)
    return all(isinstance(ending, LoadReport) for ending in endings)


async def _safe(load: SimLoad) -> None:
    """Wait until no byte can land in the load's blocks on any rank."""
    engine = load.engine
    for rank in list(engine.ranks):
        for one in rank.unsafe(load):
            engine.simulation.count("load: quarantined")
            try:
                await one.settled()
            except RuntimeBroken:
                await engine.lose(load)
            engine.note("safe", load.request_id)
