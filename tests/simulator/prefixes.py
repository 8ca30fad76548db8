"""Pulls of prefixes by a simulated engine, with checks of their results.

Invariant I9: no block that a pull reports as filled ever differs from the block of its tokens and salt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from kvflow.core.cache.groups import GroupKind
from kvflow.core.plan.descriptors import given_block_ids
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.errors import KVFlowError, LoadError, PeerError, RuntimeBroken
from kvflow.prefix.prefix_requests import PrefixOffer, PrefixReport, PrefixRequest
from kvflow.runtime.load.requests import LoadReport, LoadRequest
from kvflow.testing.simulated_network import LOAD
from tests.simulator.cache import first_token
from tests.simulator.checks import check_conserved
from tests.simulator.prefix_cache import ends
from tests.simulator.prompts import SPAN
from tests.simulator.work import PullPlan, RankLoad, SimPull, SimRank, all_over

if TYPE_CHECKING:
    from tests.simulator.engine import SimEngine

_MOMENT_S = 1e-4  # time in which the load from each holder notices its deadline

Ending: TypeAlias = "PrefixReport | LoadReport | BaseException"
FillOn: TypeAlias = "Callable[[SimRank, SimPull], Coroutine[Any, Any, Ending]]"


async def pull(engine: SimEngine, plan: PullPlan) -> list[int] | None:
    """Carry out `plan`. Return the tokens that each rank has in the end; None if the pull has failed."""
    if not engine.running:
        return None
    if plan.seeks:
        return await _seek_and_load(engine, plan)
    tables = _take(engine, plan)
    if tables is None:
        engine.simulation.count("pull: no room")
        return None
    return await _fill(_sim_pull(engine, plan, tables, exact=False), _pull_on)


def _sim_pull(engine: SimEngine, plan: PullPlan, tables: list[list[int]], *, exact: bool) -> SimPull:
    content = engine.simulation.prompts.content(plan.prompt, engine.weights)
    return SimPull(plan, engine, content, tables, exact=exact, weights=engine.weights)


def _take(engine: SimEngine, plan: PullPlan) -> list[list[int]] | None:
    """Take blocks for all tokens that the pull may bring. None if there is no room."""
    counts = []
    for facts in engine.facts:
        places = -(-plan.most // facts.block_size) - plan.cached_tokens // facts.block_size
        counts.append(1 if facts.kind is GroupKind.STATE else places)
    return engine.take_counts(counts)


# --- asked, and then loaded


async def _seek_and_load(engine: SimEngine, plan: PullPlan) -> list[int] | None:
    simulation = engine.simulation
    request = replace(_request(engine, plan, given_block_ids([[] for _ in engine.facts])), every_rank=True)
    try:
        with engine.bounded("seek", plan.answer_within_s):
            offers = await engine.ranks[0].prefixes.seek(request)
    except KVFlowError as error:
        engine.judge_refusal(plan.request_id, error)
        return None
    simulation.count(f"seek: {'found' if offers else 'nothing'}")
    for offer in offers[1:]:
        await _release(engine, plan, offer)
    if not offers or not engine.running:
        return None
    if simulation.rng.random() < 0.3:
        await simulation.pass_time(simulation.rng.expovariate(1 / 0.05))
    best = offers[0]
    tables = engine.take_blocks(best.num_tokens, plan.cached_tokens) if engine.running else None
    if tables is None:
        await _release(engine, plan, best)
        return None
    return await _fill(_sim_pull(engine, plan, tables, exact=True), partial(_load_on, best))


async def _release(engine: SimEngine, plan: PullPlan, offer: PrefixOffer) -> None:
    """Release an offer. Sometimes forget to, so that its leases run out."""
    if engine.simulation.rng.random() < 0.2 or not engine.running:
        return
    try:
        bound_s = engine.base.handshake_timeout_s
        with engine.bounded(f"release of {offer.ticket.request_id}", bound_s):
            await engine.ranks[0].runtime.release_blocks(offer.ticket)
    except KVFlowError as error:
        engine.judge_refusal(plan.request_id, error)


# --- on all ranks


async def _fill(pull: SimPull, fill_on: FillOn) -> list[int] | None:
    engine, plan = pull.engine, pull.plan
    engine.own(pull)
    engine.loads[pull] = None
    engine.note("pulls", plan.request_id, [holder.name for holder in plan.holders], pull.block_ids)
    pull.device = engine.overwrite_later(pull.block_ids)
    bodies = [fill_on(rank, pull) for rank in engine.ranks]
    counts = _judge(pull, await engine.carry_out(pull, bodies, plan.cancel_after_s))
    if counts is None:
        await _safe(pull)
    await all_over(pull.device)
    engine.loads.pop(pull)
    if counts is not None and plan.use_s and await _use(pull, counts):
        _adopt(pull, counts)
    engine.give_back(pull)
    return counts


async def _pull_on(rank: SimRank, pull: SimPull) -> Ending:
    """Pull on one rank. Return its report, checked at once, or the error."""
    plan, engine = pull.plan, pull.engine
    request = replace(_request(engine, plan, given_block_ids(pull.tables)), after=pull.device[rank.index])
    LOAD.set(RankLoad(pull))
    try:
        with engine.bounded(plan.request_id, engine.load_bound_s(plan.deadline_s) + _MOMENT_S):
            report = await rank.prefixes.pull(request)
    except (KVFlowError, asyncio.CancelledError) as error:
        if isinstance(error, LoadError | PeerError) and error.quarantine is None:
            engine.fail("I4", f"{plan.request_id} raises, though its blocks are safe: {error}")
        if isinstance(error, KVFlowError) and error.quarantine is None and (unsafe := rank.unsafe(pull)):
            engine.fail("I1", f"{plan.request_id} says that its blocks are safe, not so {unsafe}: {error}")
        return error
    if unsafe := rank.unsafe(pull):
        engine.fail("I1", f"{plan.request_id} has ended well, but {unsafe} may write to its blocks still")
    rank.loaded += report.load is not None
    _check(rank, pull, report.num_tokens, report.source or "nobody")
    return report


async def _load_on(offer: PrefixOffer, rank: SimRank, pull: SimPull) -> Ending:
    """Load an offer on one rank. Return its report, checked at once, or the error."""
    plan, engine = pull.plan, pull.engine
    request = LoadRequest(
        plan.request_id,
        offer.ticket.to_params(),
        given_block_ids(pull.tables),
        deadline_s=plan.deadline_s,
        after=pull.device[rank.index],
        num_tokens=offer.num_tokens,
        cached_tokens=plan.cached_tokens,
    )
    LOAD.set(RankLoad(pull))
    try:
        with engine.bounded(plan.request_id, engine.load_bound_s(plan.deadline_s) + _MOMENT_S):
            report = await rank.runtime.load_blocks(request)
    except (KVFlowError, asyncio.CancelledError) as error:
        return error
    rank.loaded += 1
    _check(rank, pull, offer.num_tokens, offer.peer)
    return report


def _request(engine: SimEngine, plan: PullPlan, block_ids: Any) -> PrefixRequest:
    return PrefixRequest(
        plan.request_id,
        keys=plan.prompt.keys(plan.key_tokens),
        key_tokens=plan.key_tokens,
        block_ids=block_ids,
        peers=[_address(engine, holder) for holder in plan.holders],
        cached_tokens=plan.cached_tokens,
        deadline_s=plan.deadline_s,
        answer_within_s=plan.answer_within_s,
        recompute_s_per_token=plan.recompute_s_per_token,
    )


def _address(engine: SimEngine, holder: SimEngine) -> Any:
    """Return the address of `holder`, in one of the forms that a request may have."""
    first = f"{holder.host.address}:5600"
    match engine.simulation.rng.randrange(3):
        case 0:
            return first
        case 1:
            return PeerAddress(engine_id=holder.name, address=first)
    ports = [5600 + rank for rank in range(holder.shape.num_ranks)]
    return f"{holder.host.address}:{engine.simulation.rng.choice(ports)}".removeprefix("tcp://")


# --- judged


def _check(rank: SimRank, pull: SimPull, tokens: int, source: str) -> None:
    """Check that the blocks that a pull reports as filled hold the right tokens and salt."""
    plan, engine = pull.plan, pull.engine
    if tokens > plan.most or tokens < plan.cached_tokens:
        engine.fail("I9", f"{plan.request_id} is said to have {tokens} tokens from {source}, of {plan.most}")
    elif wrong := rank.cache.wrong_token(pull.content, tokens, pull.filled(tokens)):
        engine.fail("I9", f"{plan.request_id} is said to have {tokens} tokens from {source}, but {wrong}")
    elif tokens > plan.cached_tokens and pull.weights != engine.weights:
        engine.fail("I9", f"{plan.request_id} is of weights {pull.weights}, this engine has {engine.weights}")


def _judge(pull: SimPull, endings: Sequence[Ending]) -> list[int] | None:
    """Count how a pull has ended on each rank. Return the tokens of each rank; None if a rank has failed."""
    engine, plan, simulation = pull.engine, pull.plan, pull.engine.simulation
    counts, what = list[int](), "seek" if plan.seeks else "pull"
    for ending in endings:
        if isinstance(ending, BaseException):
            engine.note("pull ended", plan.request_id, f"{type(ending).__name__}: {ending}")
            simulation.count(f"{what}: {type(ending).__name__}")
            if isinstance(ending, asyncio.CancelledError) and not pull.cancelled:
                engine.fail("I4", f"{plan.request_id}: CancelledError without a cancel")
            if isinstance(ending, KVFlowError):
                engine.judge_refusal(plan.request_id, ending)
            continue
        told = ending.num_tokens if isinstance(ending, PrefixReport) else plan.cached_tokens + ending.tokens
        answers = ending.answers if isinstance(ending, PrefixReport) else ()
        engine.note("pull ended", plan.request_id, told, [answer.why for answer in answers])
        simulation.count(f"{what}: {'found' if told > plan.cached_tokens else 'nothing'}")
        if sum(answer.num_tokens > 0 for answer in answers) > 1:
            simulation.count("pull: several holders")
        if any(one.why and one.num_tokens and "another one" not in one.why for one in answers):
            simulation.count("pull: a source failed")
        counts.append(told)
    check_conserved(engine)
    return counts if len(counts) == len(endings) else None


async def _safe(pull: SimPull) -> None:
    """Wait until no byte can land in the pull's blocks on any rank."""
    engine = pull.engine
    for rank in list(engine.ranks):
        for one in rank.unsafe(pull):
            engine.simulation.count("pull: quarantined")
            try:
                await one.settled()
            except RuntimeBroken:
                await engine.lose(pull)


# --- used


async def _use(pull: SimPull, counts: Sequence[int]) -> bool:
    """Use the blocks for a while and check that they do not change. Return True if the engine may keep them."""
    engine, cache = pull.engine, pull.engine.prefix_cache
    await engine.simulation.pass_time(pull.plan.use_s)
    if engine.prefix_cache is not cache or not engine.running or engine.weights != pull.weights:
        return False  # the engine has lost its blocks
    for rank, tokens in zip(engine.ranks, counts, strict=True):
        if wrong := rank.cache.wrong_token(pull.content, tokens, pull.filled(tokens)):
            engine.fail("I9", f"blocks of {pull.request_id} have changed after the pull: {wrong}")
    return True


def _adopt(pull: SimPull, counts: Sequence[int]) -> None:
    """Move the blocks that the pull has filled to the engine's own prefix cache."""
    engine, tokens = pull.engine, min(counts)
    for group, (facts, table) in enumerate(zip(engine.facts, pull.filled(tokens), strict=True)):
        if not facts.whole and tokens < max(counts):
            continue  # on some ranks these blocks hold another end
        first, wanted = first_token(facts, tokens, table), ends(facts, tokens)
        for at, block in enumerate(list(table)):
            end = first + (at + 1) * facts.block_size
            path = pull.plan.prompt.path(end)
            if end in wanted and end % SPAN == 0 and not engine.prefix_cache.has(group, path):
                engine.prefix_cache.keep(group, path, block).written = True
                pull.tables[group].remove(block)
    engine.prefix_cache.learn(pull.plan.prompt)
