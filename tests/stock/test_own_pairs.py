"""Two engines of our own with `stock_peers`, over real NIXL: a router may drop unknown fields."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from stock_engines import TOKENS

from kvflow.core.protocol.spare import SPARE_MARK
from kvflow.errors import LeaseExpired, PeerIncompatible, PromptMismatch
from kvflow.runtime.producer.lease import LeaseOutcome
from kvflow.stock.versions import line_of
from tests.stock.test_reading import Reader, reader
from tests.stock.test_serving import CONFIG, PEERS, Producer, engine, producer, wait_for

Params: TypeAlias = dict[str, Any]
FIRST, OTHER = list(range(TOKENS)), list(range(100, 100 + TOKENS))


def whole(params: Params) -> Params:
    return params


def known(params: Params) -> Params:
    """Return the parameters that a router keeps if it knows only stock vLLM's fields."""
    return {name: params[name] for name in line_of("0.32.0").params}


def bare(params: Params) -> Params:
    """The same of a router that takes the spare off the request's id."""
    return {**known(params), "remote_request_id": params["remote_request_id"].partition(SPARE_MARK)[0]}


ROUTERS: list[Callable[[Params], Params]] = [whole, known]
ORDERS = [*itertools.permutations(ROUTERS)]


def names_of(routers: Any) -> str:
    return "-".join(one.__name__ for one in (routers if isinstance(routers, tuple) else (routers,)))


@pytest.mark.parametrize("router", ROUTERS, ids=names_of)
async def test_what_is_late_is_refused_and_what_is_in_time_is_sealed(router: Callable[[Params], Params]) -> None:
    async with producer() as theirs, reader(PEERS, engine_id="second") as ours:
        lease, params = theirs.offer("in-time#secret", [3, 9], 2 * TOKENS)
        report = await ours.load(router(params), [7, 1])
        assert report.freshness == "seal"
        ours.assert_holds([7, 1], [3, 9])
        assert await lease is LeaseOutcome.READ
        lease, params = theirs.offer("late#secret", [4], TOKENS)
        lease.revoke()
        await lease
        for tensor in theirs.cache.values():
            tensor[4] = -1.0
        with pytest.raises(LeaseExpired):
            await ours.load(router(params), [0])


@pytest.mark.parametrize("routers", ORDERS, ids=names_of)
async def test_the_first_way_to_a_peer_is_in_no_others_way(routers: tuple[Callable[[Params], Params], ...]) -> None:
    async with producer() as theirs, reader(PEERS, engine_id="second") as ours:
        for turn, router in enumerate(routers * 2):
            lease, params = theirs.offer(f"turn-{turn}#secret", [turn], TOKENS)
            report = await ours.load(router(params), [turn])
            assert report.freshness == "seal", router
            ours.assert_holds([turn], [turn])
            assert await lease is LeaseOutcome.READ
        agents = {peer.connection for peer in known_peers(ours) if peer.connection is not None}
        assert len({one.agent for one in agents}) == 1, "one rank"


async def test_another_prompt_is_not_read() -> None:
    async with producer() as theirs, reader(PEERS, engine_id="second") as ours:
        lease, params = theirs.offer("mixed-up#secret", [3], TOKENS, prompt=FIRST)
        with pytest.raises(PromptMismatch):
            await ours.load(known(params), [0], prompt=OTHER)
        assert not any(torch.count_nonzero(one) for one in ours.cache.values())
        await ours.load(known(params), [0], prompt=FIRST)
        assert await lease is LeaseOutcome.READ


async def test_what_has_lost_its_spare_is_refused_and_what_has_it_is_read() -> None:
    async with producer() as theirs, reader(PEERS, engine_id="second") as ours:
        for turn in range(2):
            lease, params = theirs.offer(f"lost-{turn}#secret", [turn], TOKENS)
            with pytest.raises(PeerIncompatible, match=r"is a kvflow engine.*remote_request_id") as caught:
                await ours.load(bare(params), [turn])
            assert theirs.runtime.address in str(caught.value)
            assert not any(torch.count_nonzero(one[turn]) for one in ours.cache.values())
            await ours.load(known(params), [turn])
            assert await lease is LeaseOutcome.READ


@pytest.mark.parametrize("router", ROUTERS, ids=names_of)
async def test_who_waits_renews_and_who_needs_nothing_gives_back(router: Callable[[Params], Params]) -> None:
    async with producer(lease_ttl_s=3.0) as theirs, reader(PEERS, engine_id="second") as ours:
        lease, params = theirs.offer("waits#secret", [3], TOKENS)
        with ours.runtime.keep_leases(router(params)):
            await wait_for(lambda: serving(theirs).renewals > 0)
        await ours.load(router(params), [0])
        assert await lease is LeaseOutcome.READ
        lease, params = theirs.offer("hit#secret", [3], TOKENS)
        assert (await ours.load(router(params), [])).notified
        assert await lease is LeaseOutcome.READ
        lease, params = theirs.offer("aborted#secret", [3], TOKENS)
        assert await ours.runtime.release_blocks(router(params))
        assert await lease is LeaseOutcome.READ


async def test_where_the_last_token_is_left_nothing_else_is_read_for_it() -> None:
    """It begins a block: the parameters name another one in its place, which is of no offer."""
    async with producer() as theirs, reader(PEERS, engine_id="second") as ours:
        lease, _ = theirs.offer("last#secret", [3, 9], 2 * TOKENS)
        params = known(theirs.written(lease, left=1))
        assert params["remote_block_ids"] == [[3, 9, 9]]
        report = await ours.load(params, [7, 1])
        assert (report.freshness, report.tokens) == ("seal", 2 * TOKENS)
        ours.assert_holds([7, 1], [3, 9])
        assert await lease is LeaseOutcome.READ


async def test_an_engine_of_several_ranks_is_read_by_its_seals() -> None:
    async with engine(2) as theirs, reader(PEERS, engine_id="second") as ours:
        theirs.introduce()
        for turn, router in enumerate(ROUTERS):
            leases, params = theirs.offer(f"turn-{turn}#secret", [3, 9], 2 * TOKENS)
            assert (await ours.load(router(params), [7, 1])).freshness == "seal"
            ours.assert_holds([7, 1], [3, 9])
            for lease in leases:
                await lease


async def test_an_engine_that_restarts_is_read_again() -> None:
    async with reader(PEERS, engine_id="second") as ours:
        listen, lost = CONFIG.listen, None
        for life in range(2):
            async with producer(listen=listen) as theirs:
                listen = theirs.runtime.address
                if lost is not None:
                    with pytest.raises(LeaseExpired):
                        await ours.load(known(lost), [0])
                lease, params = theirs.offer(f"life-{life}#secret", [life], TOKENS)
                assert (await ours.load(known(params), [life])).freshness == "seal"
                ours.assert_holds([life], [life])
                assert await lease is LeaseOutcome.READ
                lease, lost = theirs.offer(f"lost-{life}#secret", [life], TOKENS)
                lease.revoke()
                await lease


def known_peers(ours: Reader) -> Any:
    return ours.runtime._supervisor.incarnation.peers.by_address.values()  # type: ignore[union-attr]


def serving(theirs: Producer) -> Any:
    return theirs.runtime.statistics().serving
