"""`LoadRequest.cached_tokens` says where the blocks of a load begin: counts do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvflow import Config, LeaseOutcome, LoadRequest, ServeRequest, Ticket
from kvflow.errors import RequestError
from kvflow.testing import InprocPair, assert_blocks_equal
from tests.support.growing_pairs import CONFIG
from tests.support.pairs import known, virtual_pair
from tests.support.tests_support import each, in_virtual_time

PROMPT = list(range(100, 111))
"""11 tokens in blocks of 4: three blocks, or two if full ones only are offered."""
FULL_ONLY = [3, 7]

STRAIGHT, BUFFERED = CONFIG, replace(CONFIG, staging="always")
VERIFIED = replace(CONFIG, verify_share=1.0)


async def fails(pair: InprocPair, request: LoadRequest, *numbers: int, kind: type[RequestError] = RequestError) -> str:
    """It is refused with these numbers, and nothing has landed, and no block is in use."""
    with pytest.raises(kind, match=f"^request '{request.request_id}': ") as caught:
        await pair.consumer.runtime.load_blocks(request)
    pair.consumer.cache.assert_untouched(range(16))
    assert known(pair.consumer.runtime.statistics().blocks).in_flight == 0
    message = str(caught.value)
    assert all(str(number) in message for number in numbers), message
    return message


def serve(pair: InprocPair, name: str = "req", block_ids: Sequence[int] = FULL_ONLY, **more: Any) -> Any:
    return pair.producer.runtime.serve_blocks(ServeRequest(name, block_ids, num_tokens=len(PROMPT), **more))


@each("config", [STRAIGHT, BUFFERED, VERIFIED])
@each("prompt", [None, PROMPT])
@each("late", [False, True])
@in_virtual_time
async def test_an_offer_that_ends_before_the_blocks(config: Config, prompt: list[int] | None, late: bool) -> None:
    """Only full blocks are offered, and the first is cached: the reader has two blocks for one offered block."""
    async with virtual_pair(config) as pair:
        introduction = pair.producer.runtime.serve_blocks(ServeRequest("hello", [], 0)).ticket
        lease = serve(pair, prompt=prompt)
        ticket = Ticket.rendezvous(introduction, "req") if late else lease.ticket
        wanted = LoadRequest("r", ticket.to_params(), [1, 2], prompt=prompt, cached_tokens=4)
        await fails(pair, wanted, 2, 4, 12, 8)
        await fails(pair, replace(wanted, cached_tokens=0, block_ids=[1]), 1, 0, 4, 8)  # it covers more than the block
        await fails(pair, replace(wanted, cached_tokens=3), 3, 4)
        report = await pair.consumer.runtime.load_blocks(replace(wanted, block_ids=[1]))
        assert (report.tokens, report.blocks) == (4, 1)
        pair.assert_loaded([1], [7])
        assert await lease is LeaseOutcome.READ


@each("computed", [None, 0, 4])
@each("cached", range(4))
@in_virtual_time
async def test_the_blocks_from_the_place_that_is_said(computed: int | None, cached: int) -> None:
    """Three blocks, the last one partly filled; also of a lease that grows."""
    async with virtual_pair(CONFIG) as pair:
        block_ids = [3, 7, 9]
        lease = serve(pair, block_ids=block_ids if computed is None else [3], computed_tokens=computed)
        for count in range(4):
            if count != 3 - cached and count:
                wrong = LoadRequest("r", lease.ticket, list(range(count)), cached_tokens=4 * cached)
                await fails(pair, wrong, count, 4 * cached, 11)
        request = LoadRequest("r", lease.ticket, list(range(3 - cached)), cached_tokens=4 * cached)
        load = pair.consumer.runtime.start_load(request)
        if computed is not None:
            lease.extend([7, 9])
            lease.advance(11)
        tokens = max(11 - 4 * cached, 0)
        assert (await load).tokens == tokens
        ours, theirs = pair.consumer.cache, pair.producer.cache
        assert_blocks_equal(ours, range(3 - cached), theirs, block_ids[cached:], num_tokens=tokens)
        ours.assert_untouched(range(3 - cached, 16))
        assert await lease is LeaseOutcome.READ


@in_virtual_time
async def test_a_number_that_is_none() -> None:
    async with virtual_pair(CONFIG) as pair:
        lease = serve(pair)
        for value in (-1, 1.5, "4", None, True):
            wanted = LoadRequest("r", lease.ticket, [1], cached_tokens=value)  # type: ignore[arg-type]
            assert "cached_tokens" in await fails(pair, wanted)
        assert "18446744073709551616" in await fails(pair, LoadRequest("r", lease.ticket, [1], cached_tokens=1 << 64))
        lease.revoke()
