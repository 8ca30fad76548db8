"""Pulls of prefixes by engines of one topology from engines of another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from kvflow import LoadRequest
from kvflow.prefix import PinnedPrefix, Prefixes, PrefixRequest, prefix_keys
from kvflow.runtime.world import World
from kvflow.testing import InprocCluster, run_virtual
from tests.runtime.test_topologies import hand_overs
from tests.support.budgets import examples
from tests.support.hand_overs import HandOver, both, serve, ticket_of
from tests.support.pairs import part_of
from tests.support.tests_support import WAIT_S


@examples(12, 95, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
@given(case=hand_overs(tp_sizes=(1, 2, 4), pp_sizes=(1, 2)), every_rank=st.booleans())
def test_a_prefix_is_pulled_by_every_topology_from_every_other(case: HandOver, every_rank: bool) -> None:
    """Keys for each token: so neither block size is that of the other, and the last block may be partly filled."""
    assume(case.parts[0].offered and case.parts[0].wanted)
    run_virtual(pull(case, InprocCluster().world(), every_rank=every_rank))


async def pull(case: HandOver, world: World, *, every_rank: bool = False) -> None:
    """Do a hand-over as a pull of a prefix: each consumer rank asks the producer's ranks, or one rank asks for all.

    Without windows. A prefix of tokens is offered, with a key for each token.
    """
    tokens = case.parts[0].tokens(case.num_tokens)
    offered = min(case.num_tokens, len(case.parts[0].offered) * case.parts[0].producer.block_size)
    case = replace(case, num_tokens=offered)
    block_tokens = min(part.consumer.block_size for part in case.parts)
    keys = prefix_keys(range(min(offered + 3, -(-offered // block_tokens) * block_tokens)), 1)  # and more than is there
    async with both(case, world, lambda: [Prefixes()]) as (producers, consumers):
        prefix_caches = [OnePrefix(case, keys[offered - 1]) for _ in producers]
        for rank, prefix_cache in zip(producers, prefix_caches, strict=True):
            part_of(rank.runtime, Prefixes).share(prefix_cache, pinned_blocks_max=1 << 20)
        leases = serve(case, producers)
        introduction = ticket_of(replace(case, named=()), leases)
        for lease in leases:
            await lease.revoke()  # it is only to say who they are
        request = PrefixRequest(
            request_id="request",
            keys=keys,
            key_tokens=1,
            block_ids=case.request_ids(1),
            peers=[introduction],
            cached_tokens=tokens.start if case.parts[0].wanted else offered,
            answer_within_s=WAIT_S,
        )
        if every_rank:
            (offer,) = await part_of(consumers[0].runtime, Prefixes).seek(replace(request, every_rank=True))
            load = LoadRequest("request", offer.ticket, case.request_ids(1), cached_tokens=request.cached_tokens)
            loads = await asyncio.gather(*(rank.runtime.load_blocks(load) for rank in consumers))
            reports = [one.tokens for one in loads]
        else:
            pulls = await asyncio.gather(*(part_of(rank.runtime, Prefixes).pull(request) for rank in consumers))
            assert {one.num_tokens for one in pulls} == {offered}, pulls
            reports = [one.pulled_tokens for one in pulls]
        for rank, pulled in zip(consumers, reports, strict=True):
            assert pulled == len(tokens), f"{rank}{pulled} tokens"
        for rank in producers:
            incarnation = rank.runtime._supervisor.incarnation
            assert incarnation is not None
            async with asyncio.timeout(WAIT_S):
                await incarnation.serving.drained()
            assert incarnation.serving.statistics.expired == 0
        await asyncio.sleep(0)  # a lease tells who waits for its end in the next turn
        assert not any(prefix_cache.pinned for prefix_cache in prefix_caches)


class OnePrefix:
    """One prefix, by the key of its last token."""

    def __init__(self, case: HandOver, key: bytes) -> None:
        self._pinned = PinnedPrefix(case.request_ids(0), case.num_tokens)
        self._key = key
        self.pinned = 0

    def match(self, keys: Sequence[bytes], key_tokens: int) -> PinnedPrefix | None:
        if self._key not in keys:
            return None
        self.pinned += 1
        return self._pinned

    def unpin(self, pinned: PinnedPrefix) -> None:
        assert pinned is self._pinned
        self.pinned -= 1
