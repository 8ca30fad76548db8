"""Leases that get their blocks later: readers ask for the block ids, and read no block before they know its id."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow import (
    CacheGroup,
    CacheLayout,
    Lease,
    LeaseOutcome,
    Load,
    LoadRequest,
    Runtime,
    ServeRequest,
    StateLayout,
    StateTensor,
    Ticket,
)
from kvflow.core.protocol import messages
from kvflow.errors import BlocksBusy, HostBlocksBusy, PeerError, ProtocolError, RequestError
from kvflow.testing import InprocCluster, InprocPair, assert_quiet, inproc_pair, run_virtual
from tests.growing.test_growing import Cleared, landed
from tests.runtime.test_events import Event
from tests.runtime.test_groups import FAMILIES, split_groups
from tests.support.budgets import examples
from tests.support.growing_pairs import BLOCKS, CONFIG, TAKEN, pair_of
from tests.support.hand_overs import HandOver, LayerPart, run
from tests.support.pairs import known
from tests.support.scripted import ScriptedSideChannel, scripted_pair
from tests.support.tests_support import PATIENT, each, in_virtual_time, limited, until

BLOCK_BYTES = 2 * 2 * 2 * 4 * 8 * 4  # of layers, K and V, heads, tokens, and values of so many bytes


def opened(pair: InprocPair, block_ids: Sequence[int] = (), tokens: int = 16, **more: Any) -> Lease:
    """A lease with few blocks, before its prompt is computed."""
    for tensor in pair.producer.kv_caches.values():
        tensor[:, BLOCKS] = 0.0
    request = ServeRequest("req", block_ids, num_tokens=tokens, computed_tokens=0, **more)
    return pair.producer.runtime.serve_blocks(request)


def wanted(lease: Lease, block_ids: Sequence[int] = TAKEN, **more: Any) -> LoadRequest:
    ticket = Ticket.from_params(msgspec.json.decode(msgspec.json.encode(lease.ticket.to_params())))
    return LoadRequest("req", ticket, block_ids, **more)


def leased(pair: InprocPair) -> int:
    return known(pair.producer.runtime.statistics().blocks).leased


def asked_of(channel: ScriptedSideChannel) -> list[messages.LeaseRequest]:
    return [one for one in channel.asked if isinstance(one, messages.LeaseRequest)]


@each("staging", ["never", "always"])
@each("first", [0, 1, 2])
@in_virtual_time
async def test_blocks_come_with_the_chunks(staging: str, first: int) -> None:
    async with pair_of(staging) as pair:
        lease = opened(pair, BLOCKS[:first])
        before = lease.ticket
        load = pair.consumer.runtime.start_load(wanted(lease))
        for count in range(first + 1, 5):
            lease.extend(BLOCKS[count - 1 : count])
            assert leased(pair) == count
            pair.producer.cache.fill(BLOCKS[:count])
            lease.advance(4 * count)
            await asyncio.sleep(0.1)
            if count < 4:
                assert landed(pair) == TAKEN[:count]
        assert (await load).tokens == 16
        pair.assert_loaded(TAKEN, BLOCKS)
        assert lease.ticket == before
        assert lease.block_ids == tuple(BLOCKS)
        assert await lease is LeaseOutcome.READ
        for runtime in (pair.producer.runtime, pair.consumer.runtime):
            assert_quiet(runtime.statistics())


@in_virtual_time
async def test_one_question_for_each_extend_and_each_advance_at_most() -> None:
    async with scripted_pair(CONFIG) as (pair, channel):
        lease = opened(pair)
        load = pair.consumer.runtime.start_load(wanted(lease))
        await asyncio.sleep(0.5)
        assert [one.known for one in asked_of(channel)] == [(0,)]
        for count in (1, 2, 3):
            lease.extend(BLOCKS[count - 1 : count])
            for tokens in range(4 * count - 3, 4 * count + 1):
                lease.advance(tokens)
                await asyncio.sleep(0.02)
        lease.extend(BLOCKS[3:])
        pair.producer.cache.fill(BLOCKS)
        lease.advance(16)
        await load
        known = [one.known for one in asked_of(channel)]
        assert known == sorted(known)
        assert list(dict.fromkeys(known)) == [(count,) for count in range(5)]
        assert len(known) <= 1 + 4 + 12
        assert channel.asked[-1] is asked_of(channel)[-1]


@examples(20, 250)
@given(data=st.data(), family=st.sampled_from(list(FAMILIES)), extends=st.booleans())
def test_whatever_the_groups_ranks_and_buffers_are(data: st.DataObject, family: str, extends: bool) -> None:
    """Each rank gets its blocks at once or some at a time, and reads no token before its advance.

    Progress never goes back, and never exceeds the tokens that have landed in the end.
    """
    case: HandOver = data.draw(FAMILIES[family])
    case = in_the_end(case) if extends else case
    steps = st.lists(st.integers(0, case.num_tokens), max_size=3)

    async def compute(producers: Sequence[Any], leases: Sequence[Lease]) -> None:
        cleared = [Cleared(case, rank) for rank in producers]
        given_blocks = [[0] * len(case.parts) for _ in producers]
        plans = [[*sorted(data.draw(steps)), case.num_tokens] for _ in producers]
        while any(plans):
            at = data.draw(st.sampled_from([at for at, plan in enumerate(plans) if plan]))
            tokens = plans[at].pop(0)
            if extends:
                before, more = given_blocks[at], [blocks_upto(case, part, tokens) for part in case.parts]
                given_blocks[at] = more = [max(one, two) for one, two in zip(before, more, strict=True)]
                leases[at].extend(case.request_ids(0, list(map(slice, before, more))))
                await asyncio.sleep(data.draw(st.sampled_from([0.0, 0.01])))
            cleared[at].fill(tokens)
            leases[at].advance(tokens)
            await asyncio.sleep(data.draw(st.sampled_from([0.0, 0.05])))

    told: dict[Load, list[int]] = {}
    real = Load.note_progress

    def note(self: Load, tokens: int, tokens_in_all: int) -> None:
        assert tokens <= tokens_in_all <= case.num_tokens
        told.setdefault(self, []).append(tokens)
        real(self, tokens, tokens_in_all)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Load, "note_progress", note)
        run_virtual(run(case, InprocCluster().world(), compute, extends=extends))
    for tokens in told.values():
        assert tokens == sorted(set(tokens)), "it grows"


def in_the_end(case: HandOver) -> HandOver:
    """Without blocks of windows before the window: a lease that is extended has no room for them."""
    if case.merged[0]:
        return case
    parts = []
    for part in case.parts:
        size = part.producer.block_size
        needed = -(-case.num_tokens // size) - part.attention.first_block(case.num_tokens, size)
        parts.append(replace(part, offered=part.offered[len(part.offered) - needed :]))
    return replace(case, parts=tuple(parts))


def blocks_upto(case: HandOver, part: LayerPart, tokens: int) -> int:
    """How many of a part's offered blocks hold tokens before that one."""
    size = part.producer.block_size
    first = -(-case.num_tokens // size) - len(part.offered)
    return min(max(-(-tokens // size) - first, 0), len(part.offered))


@in_virtual_time
async def test_advance_before_extend_is_refused() -> None:
    async with pair_of() as pair:
        lease = opened(pair, BLOCKS[:2])
        for tokens in (9, 16):
            problem = rf"'req': advance\(\) to {tokens} tokens: its blocks hold 8, extend"
            with pytest.raises(RequestError, match=problem):
                lease.advance(tokens)
        with pytest.raises(RequestError, match="'req': advance"):
            lease.complete()
        lease.advance(8)
        lease.extend(BLOCKS[2:])
        lease.advance(16)
        await lease.revoke()
        with pytest.raises(RequestError, match="'early': computed_tokens is 5, its blocks hold 4"):
            pair.producer.runtime.serve_blocks(ServeRequest("early", [1], num_tokens=16, computed_tokens=5))
        assert leased(pair) == 0
        lease = opened(pair, BLOCKS, tokens=18, extends=True)  # without `extends` it would be full blocks only
        assert lease.ticket.extends
        with pytest.raises(RequestError, match="its blocks hold 16"):
            lease.advance(17)
        lease.extend([8])
        lease.advance(18)
        await lease.revoke()


@in_virtual_time
async def test_extensions_that_cannot_be() -> None:
    async with pair_of() as pair:
        lease = opened(pair, BLOCKS[:2])
        pair.producer.transport.faults.hold = True
        other = pair.consumer.runtime.serve_blocks(ServeRequest("other", [3], num_tokens=4))
        into = pair.producer.runtime.start_load(LoadRequest("other", other.ticket, [7]))
        await until(lambda: pair.producer.transport.held)
        for ids, error, problem in (
            ([1], RequestError, "block id 1 is given twice"),
            ([99], RequestError, "block id 99 is not in"),
            ([4, 6, 8], RequestError, r"'req': extend\(\): 5 block ids in all, expected at most 4 of 4 for 16 tokens"),
            ([6, 6], RequestError, "block id 6 is given twice"),
            ("no", RequestError, "block_ids"),
            ([7], BlocksBusy, "7"),
        ):
            with pytest.raises(error, match=problem):
                lease.extend(ids)
        assert (lease.block_ids, leased(pair)) == ((1, 2), 2)
        pair.producer.transport.faults.hold = False
        pair.producer.transport.perform()
        await into
        lease.extend([7])
        serve = pair.producer.runtime.serve_blocks
        with pytest.raises(RequestError, match="'x': extends: needs computed_tokens"):
            serve(ServeRequest("x", [8], num_tokens=16, extends=True))
        whole = serve(ServeRequest("whole", [8], num_tokens=4))
        with pytest.raises(RequestError, match="2 block ids in all, expected at most 1 of 4 for 4 tokens"):
            whole.extend([9])
        await lease.revoke()
        lease.extend([3])
        assert lease.block_ids == (1, 2, 7)
        whole.revoke()


@each(
    ("tokens", "block_ids", "more", "problem"),
    [
        (1 << 31, [], {}, "num_tokens 2147483648 needs 536870912 blocks, there are 16"),
        (65, [], {}, "num_tokens 65 needs 17 blocks, there are 16"),
        (65, BLOCKS, {"extends": True}, "num_tokens 65 needs 17 blocks, there are 16"),
        (65, range(16), {"extends": True}, "num_tokens 65 needs 17 blocks, there are 16"),
        (64, [], {"ready": Event()}, None),
        (67, range(16), {}, None),  # full blocks only
        (1 << 31, [], {"computed_tokens": None}, None),  # nothing is offered
    ],
)
@in_virtual_time
async def test_an_offer_that_can_never_be_complete(
    tokens: int, block_ids: Sequence[int], more: dict[str, Any], problem: str | None
) -> None:
    """Nobody could extend it to its end, nor read it."""
    async with pair_of() as pair:
        serve = pair.producer.runtime.serve_blocks
        request = ServeRequest("n", block_ids, **{"num_tokens": tokens, "computed_tokens": 0, **more})
        if problem is None:
            await serve(request).revoke()
            return
        with pytest.raises(RequestError, match=f"^request 'n': {problem}$"):
            serve(request)
        for engine in (pair.producer, pair.consumer):
            assert_quiet(engine.runtime.statistics())
        await serve(replace(request, num_tokens=8, block_ids=BLOCKS[:2], extends=False)).revoke()


@in_virtual_time
async def test_an_offer_of_more_than_the_host_buffers_or_a_ticket_can_take() -> None:
    world = InprocCluster().world()
    for made, problem in (
        (pair_of("always", host_buffer_bytes_max=3 * BLOCK_BYTES), "num_tokens 16 needs 4 host blocks, there are 3 "),
        (
            inproc_pair(config=limited(CONFIG, block_ids_max=3), producer_world=world, consumer_world=world),
            r"num_tokens 16 needs 4 blocks, at most 3 \(limits.block_ids_max\)$",
        ),
    ):
        async with made as pair:
            with pytest.raises(RequestError, match=f"^request 'req': {problem}"):
                opened(pair)
            assert_quiet(pair.producer.runtime.statistics())
            await opened(pair, tokens=12).revoke()


@in_virtual_time
async def test_blocks_that_find_no_host_buffers_are_not_leased() -> None:
    async with pair_of("always", host_buffer_bytes_max=4 * BLOCK_BYTES) as pair:
        serve = pair.producer.runtime.serve_blocks
        lease, other = opened(pair, BLOCKS[:1]), serve(ServeRequest("other", [0, 4], num_tokens=8))
        with pytest.raises(HostBlocksBusy, match="'req': needed: 2 host blocks, 1 of 4 are free"):
            lease.extend(BLOCKS[1:3])
        assert (leased(pair), lease.block_ids) == (3, tuple(BLOCKS[:1]))
        await other.revoke()
        lease.extend(BLOCKS[1:])
        assert leased(pair) == 4
        await lease.revoke()
        assert_quiet(pair.producer.runtime.statistics())


@in_virtual_time
async def test_groups_that_share_a_pool_have_room_for_all_of_them_together() -> None:
    """8 pages: of a window of 4 tokens one or two, and of the full group one for four tokens."""
    async with producer_of(split_groups(torch.zeros(8, 64))) as producer:
        for tokens, pages in ((29, "10"), (1 << 31, r"\d+")):
            problem = rf"^request 'req': num_tokens {tokens} needs {pages} blocks of pool 'pages', there are 8$"
            with pytest.raises(RequestError, match=problem):
                producer.serve_blocks(ServeRequest("req", {}, num_tokens=tokens, computed_tokens=0))
            assert_quiet(producer.statistics())
        await producer.serve_blocks(ServeRequest("req", {}, num_tokens=28, computed_tokens=0)).revoke()


@contextlib.asynccontextmanager
async def producer_of(groups: Sequence[CacheGroup]) -> AsyncIterator[Runtime]:
    config = replace(PATIENT, engine_id="prefill", listen="tcp://127.0.0.1:0")
    async with Runtime(config, world=InprocCluster().world()) as producer:
        await producer.register_kv_caches(groups)
        yield producer


@in_virtual_time
async def test_a_window_and_a_state_need_no_more_blocks_of_a_longer_prompt() -> None:
    """A group with its own pool needs only its blocks of the end: a state's slot, the window's blocks."""
    config = replace(PATIENT, engine_id="prefill", listen="tcp://127.0.0.1:0")
    window, slots = {"layers.0": torch.zeros(2, 3, 4, 1, 8)}, {"layers.1": torch.zeros(1, 8)}
    groups = [
        CacheGroup("local", window, CacheLayout.infer(window, order="NHD", block_size=4), window=8),
        CacheGroup("state", slots, StateLayout.infer(slots, [StateTensor(name="conv")])),
    ]
    async with Runtime(config, world=InprocCluster().world()) as producer:
        await producer.register_kv_caches(groups)
        for tokens in (8, 1 << 31):
            request = ServeRequest("req", {}, num_tokens=tokens, computed_tokens=0, extends=True)
            lease = producer.serve_blocks(request)
            lease.extend({"local": [0, 1], "state": [0]})
            lease.advance(tokens)
            await lease.revoke()


@in_virtual_time
async def test_a_producer_that_tells_wrong_blocks() -> None:
    async def fails(told: object, error: type[Exception], match: str) -> None:
        async with scripted_pair(CONFIG) as (pair, channel):
            await pair.consumer.runtime.prewarm([pair.offer([6], "warm").ticket])
            lease = opened(pair)
            channel.script.append(told)  # type: ignore[arg-type]
            with pytest.raises(error, match=match):
                await pair.consumer.runtime.load_blocks(wanted(lease, deadline_s=5.0))
            for one in ("req", "warm"):
                serving = pair.producer.runtime._supervisor.incarnation.serving
                serving.revoke(serving.open_lease(one).entry)

    def news(*ids: tuple[int, ...], payload: bytes = b"") -> messages.LeaseAnswer:
        return messages.LeaseAnswer(state=messages.LeaseAnswerState.OPEN, more_block_ids=ids, payload=payload)

    await fails(news((1, 99)), ProtocolError, "block id 99")
    await fails(news((1, 1)), ProtocolError, "given twice")
    await fails(news((1, -1)), ProtocolError, "block id -1")
    await fails(news((1, 2, 3, 4, 5)), ProtocolError, "5 blocks of a lease that has 4")
    await fails(news((1,), (2,)), ProtocolError, "more blocks of 2 groups")
    await fails(news(payload=bytes(1 << 13)), ProtocolError, "8192 bytes, at most 4096")
    await fails(
        messages.LeaseAnswer(state=messages.LeaseAnswerState.COMPLETE), ProtocolError, "blocks hold 0 of 16 tokens"
    )
    await fails(messages.Ack(incarnation="i"), ProtocolError, "expected LeaseAnswer, got Ack")


@in_virtual_time
async def test_blocks_that_nobody_tells() -> None:
    """Without an answer a load that has all its blocks succeeds; a load that needs more fails, typed and soon."""
    channel = ScriptedSideChannel()
    world = InprocCluster().world()
    channel.beneath, channel.mute = world.side_channel, (messages.LeaseRequest,)
    reader = replace(world, side_channel=channel)
    async with inproc_pair(config=CONFIG, producer_world=world, consumer_world=reader) as pair:
        lease = opened(pair, BLOCKS)
        load = pair.consumer.runtime.start_load(wanted(lease))
        await asyncio.sleep(5.0)
        pair.producer.cache.fill(BLOCKS)
        lease.advance(16)
        await load
        pair.assert_loaded(TAKEN, BLOCKS)
        await lease
        pair.consumer.cache.fill()
        lease = opened(pair, BLOCKS[:1])
        lease.extend(BLOCKS[1:])
        lease.advance(16)
        with pytest.raises(PeerError, match="'req'"):
            await pair.consumer.runtime.load_blocks(wanted(lease, deadline_s=30.0))
        assert landed(pair) == TAKEN[:1], "what it has no blocks of is not read, whatever the seal says"
        lease.revoke()
