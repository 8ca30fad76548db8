"""Turn 2: the decode engine keeps a finished request's blocks under a lease, and the prefill engine of the next turn
loads the answer's blocks instead of computing them. Both are producer and consumer; who frees what, and when, is on the
books.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from kvflow import LeaseOutcome, LoadRequest, Runtime, ServeRequest, Ticket
from kvflow.core.policy.ledger import BlockCounts
from kvflow.errors import BlocksBusy, LeaseExpired, PromptMismatch
from kvflow.testing import CacheSize, assert_blocks_equal, assert_quiet, nixl_pair
from kvflow.testing.accounting import assert_conserved
from tests.support.growing_pairs import CONFIG, pair_of
from tests.support.pairs import known
from tests.support.tests_support import PATIENT, in_virtual_time

PROMPT, ANSWER = list(range(100, 108)), list(range(200, 209))
CONVERSATION = PROMPT + ANSWER[:-1]  # the last token of an answer was sampled, and never computed
THEIRS, OURS = [3, 5], [7, 2, 9, 4]
"""Blocks of the prompt where it was computed; of prompt and answer where it was decoded."""
AGAIN = [1, 8]
"""Blocks of the answer where the next turn is computed."""


def counts(runtime: Runtime) -> tuple[int, int, int]:
    """How many blocks are leased, in flight and free."""
    blocks: BlockCounts = known(runtime.statistics().blocks)
    return blocks.leased, blocks.in_flight, blocks.free


async def both_turns(pair: Any) -> None:
    prefill, decode = pair.producer.runtime, pair.consumer.runtime
    total = counts(prefill)[2]

    # Turn 1: the prompt goes to the decode engine.
    pair.producer.cache.fill(THEIRS)
    lease = prefill.serve_blocks(ServeRequest("turn 1", THEIRS, num_tokens=8, prompt=PROMPT))
    assert_conserved(prefill, [lease])
    ticket = lease.ticket.to_params()
    await decode.load_blocks(LoadRequest("turn 1", ticket, OURS[:2], prompt=CONVERSATION))
    assert_blocks_equal(pair.consumer.cache, OURS[:2], pair.producer.cache, THEIRS)
    assert await lease is LeaseOutcome.READ
    assert counts(prefill) == counts(decode) == (0, 0, total)

    # It decodes the answer, and keeps all of it under a lease. While that is open nobody writes there.
    pair.consumer.cache.fill(OURS[2:])
    kept = decode.serve_blocks(
        ServeRequest("turn 1 of decode", OURS, len(CONVERSATION), prompt=CONVERSATION, ttl_s=60.0)
    )
    assert_conserved(decode, [kept])
    assert counts(decode) == (4, 0, total - 4)
    back: dict[str, Any] = json.loads(json.dumps(kept.ticket.to_params()))
    with pytest.raises(BlocksBusy):
        await decode.load_blocks(LoadRequest("other", back, [OURS[0]], cached_tokens=12))
    with pytest.raises(PromptMismatch):
        await prefill.load_blocks(LoadRequest("turn 2", back, AGAIN, prompt=PROMPT[::-1] + ANSWER, cached_tokens=8))

    # Turn 2: the prompt is cached there still; the answer's blocks are read, and no prompt is computed twice.
    wanted = LoadRequest("turn 2", back, AGAIN, prompt=[*CONVERSATION, 300, 301], cached_tokens=8)
    load = prefill.start_load(wanted)
    assert (await load).tokens == 8
    assert_blocks_equal(pair.producer.cache, AGAIN, pair.consumer.cache, OURS[2:])
    assert await kept is LeaseOutcome.READ
    assert counts(prefill) == counts(decode) == (0, 0, total)

    # All of turn 2's prompt is offered again, the blocks of both engines among it.
    turn = prefill.serve_blocks(ServeRequest("turn 2", THEIRS + AGAIN, num_tokens=16, prompt=CONVERSATION))
    await decode.load_blocks(LoadRequest("turn 2", turn.ticket.to_params(), [0, 1, 6, 10], prompt=CONVERSATION))
    assert_blocks_equal(pair.consumer.cache, [0, 1, 6, 10], pair.producer.cache, THEIRS + AGAIN)
    assert await turn is LeaseOutcome.READ
    for runtime in (prefill, decode):
        assert_conserved(runtime, [])
        assert_quiet(runtime.statistics())


@in_virtual_time
async def test_both_turns_of_a_conversation() -> None:
    async with pair_of() as pair:
        await both_turns(pair)


@pytest.mark.nixl
async def test_both_turns_over_real_nixl() -> None:
    async with nixl_pair(config=replace(PATIENT, listen="tcp://127.0.0.1:0"), size=CacheSize(num_blocks=16)) as pair:
        await both_turns(pair)


@in_virtual_time
async def test_a_next_turn_that_never_comes_costs_the_decode_engine_a_ttl() -> None:
    async with pair_of() as pair:
        decode = pair.consumer.runtime
        total = counts(decode)[2]
        kept = decode.serve_blocks(ServeRequest("kept", OURS, 16, ttl_s=5.0))
        await asyncio.wait([asyncio.ensure_future(kept.wait())], timeout=4.9)
        assert counts(decode) == (4, 0, total - 4)
        assert await kept is LeaseOutcome.EXPIRED
        assert counts(decode) == (0, 0, total)
        with pytest.raises(LeaseExpired):
            await pair.producer.runtime.load_blocks(LoadRequest("turn 2", kept.ticket, AGAIN, cached_tokens=8))


@in_virtual_time
async def test_the_next_turn_may_be_on_its_way_before_the_answer_is_complete() -> None:
    """The same rendezvous the other way round: the prefill engine asks for an answer that is still being decoded."""
    async with pair_of() as pair:
        prefill, decode = pair.producer.runtime, pair.consumer.runtime
        hello = decode.introduce()
        load = prefill.start_load(LoadRequest("turn 2", Ticket.rendezvous(hello, "answer"), AGAIN, cached_tokens=8))
        pair.consumer.cache.fill(OURS)
        request = ServeRequest("answer", OURS[:2], num_tokens=16, computed_tokens=8, payload=True)
        kept = decode.serve_blocks(request)
        kept.extend(OURS[2:])
        kept.complete(json.dumps({"tokens": ANSWER}).encode())
        assert json.loads((await load).payload) == {"tokens": ANSWER}
        assert_blocks_equal(pair.producer.cache, AGAIN, pair.consumer.cache, OURS[2:])
        assert await kept is LeaseOutcome.READ
        assert CONFIG.role == "both"
