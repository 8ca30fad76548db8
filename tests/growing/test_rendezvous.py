"""Rendezvous: a ticket is made before either engine has begun. Either leg comes first, fails, or never comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvflow import Lease, LeaseOutcome, LoadRequest, ServeRequest, Ticket, blocking, merge_tickets
from kvflow.core.protocol import messages
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.errors import (
    DeadlineExceeded,
    KVFlowError,
    LeaseExpired,
    PeerNotReady,
    PeerUnreachable,
    PrefillFailed,
    PromptMismatch,
    ProtocolError,
    RequestError,
    RuntimeUnavailable,
    WeightsMismatch,
)
from kvflow.runtime.load.load import Load
from kvflow.runtime.producer import lease_answers
from kvflow.runtime.producer.lease import OpenLease
from kvflow.runtime.records import LoadRecord
from kvflow.testing import (
    CacheSize,
    InprocCluster,
    InprocPair,
    ManualClock,
    TestEngine,
    assert_quiet,
    inproc_pair,
    nixl_pair,
)
from kvflow.testing.pair import Pair
from tests.growing.test_growing import landed
from tests.runtime.test_ranks import Engines, engines
from tests.support.growing_pairs import BLOCKS, CONFIG, TAKEN, pair_of
from tests.support.pairs import host_of, known
from tests.support.scripted import scripted_pair
from tests.support.tests_support import PATIENT, WAIT_S, any_ticket, each, in_virtual_time, turns, unchecked, until

SECRET = "secret-0f2a"
PROMPT = list(range(100, 116))


def rendezvous(pair: Any, request_id: str = SECRET, **more: Any) -> dict[str, Any]:
    """Return the ticket that a router makes of the producer's introduction, as JSON has it."""
    hello = pair.producer.runtime.introduce().to_params()
    made = Ticket.rendezvous(json.loads(json.dumps(hello)), request_id, **more)
    params: dict[str, Any] = json.loads(json.dumps(made.to_params()))
    return params


def start(pair: Any, ticket: dict[str, Any], **more: Any) -> Load:
    request = LoadRequest("local", ticket, more.pop("block_ids", TAKEN), **more)
    load: Load = pair.consumer.runtime.start_load(request)
    return load


def offer(pair: Any, **more: Any) -> Lease:
    pair.producer.cache.fill(BLOCKS)
    name, block_ids = more.pop("request_id", SECRET), more.pop("block_ids", BLOCKS)
    request = ServeRequest(name, block_ids, num_tokens=more.pop("num_tokens", 16), **more)
    lease: Lease = pair.producer.runtime.serve_blocks(request)
    return lease


def ask(pair: InprocPair, reader: str = "r/0.0.0#1", request_id: str = "x", wait_s: float = 9.0) -> Any:
    """Return the producer's answer to a question for an offer, or a future of the answer."""
    host = host_of(pair.producer.runtime)
    target = host.context.local.caller
    return host.serving.lease_answers.answer(
        messages.LeaseRequest(reader=reader, target=target, request_id=request_id, wait_s=wait_s)
    )


def assert_nothing_left(pair: InprocPair) -> None:
    for engine in (pair.producer, pair.consumer):
        assert_quiet(engine.runtime.statistics())
        assert host_of(engine.runtime).serving.lease_answers.waiting == 0
    assert not [task for task in asyncio.all_tasks() if "kvflow-news" in task.get_name()]


@each("first", ["load", "lease"])
@each("grows", [False, True])
@each("staging", ["never", "always"])
@in_virtual_time
async def test_either_leg_may_come_first(first: str, grows: bool, staging: str) -> None:
    async with pair_of(staging) as pair:
        ticket, load = rendezvous(pair), None
        if first == "load":
            load = start(pair, ticket, prompt=PROMPT)
            await asyncio.sleep(15.0)
            assert not load.done
        more = {"block_ids": BLOCKS[:1], "computed_tokens": 0, "payload": True} if grows else {}
        lease = offer(pair, prompt=PROMPT, **more)
        load = load or start(pair, ticket, prompt=PROMPT)
        if grows:
            await asyncio.sleep(0.1)
            lease.extend(BLOCKS[1:])
            lease.advance(9)
            await asyncio.sleep(0.1)
            lease.complete(b"token")
        opened_s = asyncio.get_running_loop().time()
        report = await load
        assert grows or asyncio.get_running_loop().time() - opened_s < 0.001, "it is known at once"
        assert (report.tokens, report.payload) == (16, b"token" if grows else b"")
        pair.assert_loaded(TAKEN, BLOCKS)
        assert await lease is LeaseOutcome.READ
        assert_nothing_left(pair)


@each(
    ("blocks", "offered", "tokens"),
    [([7, 6], {}, 8), ([], {}, 0), ([], {"block_ids": [], "num_tokens": 3}, 0)],  # cached, a full hit, and nothing
)
@each("late", [False, True])
@in_virtual_time
async def test_as_much_is_read_as_is_offered_and_not_cached(
    blocks: list[int], offered: dict[str, Any], tokens: int, late: bool
) -> None:
    async with pair_of() as pair:
        lease, ticket = None if late else offer(pair, **offered), rendezvous(pair)
        load = start(pair, ticket, block_ids=blocks, cached_tokens=8 if len(blocks) == 2 else 0)
        if lease is None:
            await asyncio.sleep(1.0)
            lease = offer(pair, **offered)
        report = await load
        assert (report.tokens, report.blocks) == (tokens, tokens // 4)
        pair.assert_loaded(blocks[: tokens // 4], BLOCKS[len(BLOCKS) - tokens // 4 :])
        assert await lease is LeaseOutcome.READ
        assert_nothing_left(pair)


@each("late", [False, True])
@in_virtual_time
async def test_blocks_that_the_offer_leaves_empty_are_refused(late: bool) -> None:
    async with pair_of() as pair:
        nothing = {"block_ids": [], "num_tokens": 3}
        lease, load = None if late else offer(pair, **nothing), start(pair, rendezvous(pair), block_ids=TAKEN)
        if lease is None:
            await asyncio.sleep(1.0)
            lease = offer(pair, **nothing)
        with pytest.raises(RequestError, match=r"4 local blocks of 4 tokens.* but the 0 tokens that 'producer' at"):
            await load
        assert await lease is LeaseOutcome.READ
        assert_nothing_left(pair)


@in_virtual_time
async def test_a_payload_without_blocks() -> None:
    """The payload arrives with the end although no blocks do: all are cached, or the prompt is shorter than a block."""
    async with pair_of() as pair:
        for given in ({"block_ids": BLOCKS}, {"block_ids": [], "num_tokens": 3}):
            name = str(given)
            load = start(pair, rendezvous(pair, name), block_ids=[])
            lease = offer(pair, request_id=name, payload=True, **given)
            await asyncio.sleep(1.0)
            assert not load.done
            assert not lease.done
            lease.complete(b"token")
            assert (await load).payload == b"token"
            assert await lease is LeaseOutcome.READ
        assert_nothing_left(pair)


@in_virtual_time
async def test_the_producer_never_opens_it() -> None:
    async with pair_of() as pair:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        with pytest.raises(
            PrefillFailed, match=f"'{SECRET}' .*it opened no lease for the request in time, 3 s"
        ) as caught:
            await start(pair, rendezvous(pair, ttl_s=3.0))
        assert caught.value.retryable
        assert loop.time() - begun_s == pytest.approx(3.0, abs=0.1)
        with pytest.raises(DeadlineExceeded, match=r"'local' .*in phase 'compute': its lease is not opened yet"):
            await start(pair, rendezvous(pair), deadline_s=2.0)
        assert loop.time() - begun_s == pytest.approx(5.0, abs=0.1)
        await asyncio.sleep(10.0)
        assert_nothing_left(pair)


@in_virtual_time
async def test_the_consumer_never_comes() -> None:
    async with pair_of(lease_lifetime_s=1.0) as pair:
        lease = offer(pair, ttl_s=1.0, block_ids=BLOCKS[:1], computed_tokens=0, payload=True)
        lease.extend(BLOCKS[1:])
        assert await lease is LeaseOutcome.EXPIRED
        with pytest.raises(LeaseExpired, match="its lease has ended"):
            await start(pair, rendezvous(pair))
        assert_nothing_left(pair)


@in_virtual_time
async def test_a_producer_that_declines() -> None:
    async with pair_of() as pair:
        loads = [start(pair, rendezvous(pair)) for _ in range(2)]
        await asyncio.sleep(1.0)
        pair.producer.runtime.decline(SECRET, "the prompt is too long")
        loads.append(start(pair, rendezvous(pair)))
        for load in loads:
            with pytest.raises(PrefillFailed, match="it will not serve the request: the prompt is too long"):
                await load
        lease = offer(pair)
        with pytest.raises(RequestError, match=f"'{SECRET}': decline: it is being served already"):
            pair.producer.runtime.decline(SECRET)
        await start(pair, rendezvous(pair))
        await lease
        for wrong in ("", 7, "x" * 2000):
            with pytest.raises(RequestError):
                pair.producer.runtime.decline(wrong)  # type: ignore[arg-type]
        assert_nothing_left(pair)


@asynccontextmanager
async def with_a_sibling(**settings: Any) -> AsyncIterator[tuple[InprocPair, TestEngine]]:
    """A pair, and another engine that a router takes the pair's producer for."""
    cluster, config = InprocCluster(), replace(CONFIG, **settings)
    async with (
        cluster.engine("sibling", config=config, size=CacheSize()) as sibling,
        cluster.engine("producer", config=config, size=CacheSize()) as producer,
        cluster.engine("consumer", config=config, size=CacheSize()) as consumer,
    ):
        yield Pair(producer=producer, consumer=consumer), sibling


def awaited_at(sibling: TestEngine) -> Ticket:
    hello = sibling.runtime.introduce()
    return Ticket.rendezvous(hello, SECRET)


@each("first", ["reader", "word"])
@each("grows", [False, True])
@in_virtual_time
async def test_readers_are_sent_on_to_the_engine_that_the_prompt_has_come_to(first: str, grows: bool) -> None:
    """For example to another DP rank of the same server. Later readers are redirected, too."""
    async with with_a_sibling() as (pair, sibling):
        there, here = awaited_at(sibling), Ticket.from_params(rendezvous(pair))
        load = start(pair, there.to_params(), prompt=PROMPT) if first == "reader" else None
        if load is not None:
            await asyncio.sleep(1.0)
        pair.producer.runtime.decline(SECRET, "it came to us", at=there, instead=here)
        await asyncio.sleep(0.1)
        load = load or start(pair, there.to_params(), prompt=PROMPT)
        begun_s = asyncio.get_running_loop().time()
        lease = offer(pair, prompt=PROMPT, computed_tokens=5 if grows else None)
        if grows:
            await asyncio.sleep(0.2)
            lease.advance(16)
        report = await load
        assert asyncio.get_running_loop().time() - begun_s < 0.5
        assert report.tokens == 16
        assert all("producer" in source for source in report.sources)
        pair.assert_loaded(TAKEN, BLOCKS)
        assert await lease is LeaseOutcome.READ
        with pytest.raises(LeaseExpired):
            await start(pair, there.to_params())
        assert_nothing_left(pair)


@each("first", ["reader", "drain"])
@in_virtual_time
async def test_readers_go_on_at_the_engine_that_takes_a_draining_ones_place(first: str) -> None:
    """Those that wait, and those that are connected and ask later. Without a successor they are refused."""
    async with with_a_sibling() as (pair, sibling):
        there, consumer = awaited_at(sibling), pair.consumer.runtime
        other = start(pair, Ticket.rendezvous(there, "other").to_params(), block_ids=[8, 9, 10, 11], deadline_s=20.0)
        await asyncio.sleep(1.0)
        load = start(pair, there.to_params(), prompt=PROMPT) if first == "reader" else None
        await asyncio.sleep(1.0)
        draining = asyncio.ensure_future(sibling.runtime.drain(60.0, successor=pair.producer.runtime.introduce()))
        await asyncio.sleep(0.1)
        load = load or start(pair, there.to_params(), prompt=PROMPT)
        lease = offer(pair, prompt=PROMPT)
        report = await load
        assert report.tokens == 16
        assert all("producer" in source for source in report.sources)
        assert await lease is LeaseOutcome.READ
        pair.producer.runtime.decline("other", "nobody computes it")
        with pytest.raises(PrefillFailed, match=r"from producer .*: nobody computes it"):
            await other
        assert await draining
        assert consumer.statistics().loading is not None
        await sibling.runtime.aclose()
        successors = host_of(consumer).peers.successors
        assert [(gone[0], found.engine_id) for gone, found in successors.items()] == [("sibling", "producer")]
        assert_nothing_left(pair)


@in_virtual_time
async def test_a_successor_is_another_engine() -> None:
    async with with_a_sibling() as (_, sibling):
        with pytest.raises(RequestError, match="drain: successor: a ticket of engine 'sibling', which is this one"):
            await sibling.runtime.drain(1.0, successor=sibling.runtime.introduce().to_params())
        for wrong in ({}, "tcp://127.0.0.1:1", 7):
            with pytest.raises(RequestError):
                await sibling.runtime.drain(1.0, successor=wrong)  # type: ignore[arg-type]
        await sibling.runtime.prewarm([])


@in_virtual_time
async def test_readers_that_nobody_can_send_on_end_at_once() -> None:
    async with with_a_sibling() as (pair, sibling):
        there = awaited_at(sibling)
        load = start(pair, there.to_params())
        kept = pair.consumer.runtime.keep_leases(there)
        with kept:
            await asyncio.sleep(1.0)
            begun_s = asyncio.get_running_loop().time()
            pair.producer.runtime.decline(SECRET, "it came to us", at=there)
            with pytest.raises(PrefillFailed, match=r"from sibling .*: it came to us"):
                await load
        assert not await pair.consumer.runtime.release_blocks(there)
        assert asyncio.get_running_loop().time() - begun_s < 0.5
        assert_nothing_left(pair)


@in_virtual_time
async def test_an_engine_that_serves_a_request_sends_nobody_on() -> None:
    """A peer that knows the name of a request may redirect it, but a request that the engine serves stays."""
    async with with_a_sibling() as (pair, sibling):
        there = awaited_at(sibling)
        blocks = [1, 2, 3, 5]
        lease = sibling.runtime.serve_blocks(ServeRequest(SECRET, blocks, num_tokens=16))
        pair.producer.runtime.decline(SECRET, "it came to us", at=there)
        await asyncio.sleep(0.1)
        assert (await start(pair, there.to_params())).tokens == 16
        assert await lease is LeaseOutcome.READ
        pair.producer.runtime.decline("late", "it came to us", at=Ticket.rendezvous(there, "late"))
        await asyncio.sleep(0.1)
        late = sibling.runtime.serve_blocks(ServeRequest("late", blocks, num_tokens=16))
        assert (await start(pair, Ticket.rendezvous(there, "late").to_params())).tokens == 16
        assert await late is LeaseOutcome.READ
        assert_nothing_left(pair)


@in_virtual_time
async def test_readers_are_sent_on_once() -> None:
    """Two engines that send readers to each other: neither has the prompt."""
    async with with_a_sibling() as (pair, sibling):
        there, here = awaited_at(sibling), Ticket.from_params(rendezvous(pair))
        pair.producer.runtime.decline(SECRET, "it came to the producer", at=there, instead=here)
        sibling.runtime.decline(SECRET, "it came to the sibling", at=here, instead=there)
        await asyncio.sleep(0.1)
        with pytest.raises(PrefillFailed, match=r"from producer .*: it came to the sibling") as caught:
            await start(pair, there.to_params())
        assert type(caught.value) is PrefillFailed
        assert_nothing_left(pair)


@each("instead", [b"junk", b"\x80", b"another"])
@in_virtual_time
async def test_readers_are_sent_on_to_nothing_but_their_own_request(instead: bytes) -> None:
    async with scripted_pair(CONFIG) as (pair, channel):
        if instead == b"another":
            instead = msgspec.msgpack.encode(rendezvous(pair, "other"))
        lease = offer(pair)
        await pair.consumer.runtime.prewarm([lease.ticket])
        channel.script.append(
            messages.LeaseAnswer(state=messages.LeaseAnswerState.FAILED, reason="elsewhere", instead=instead)
        )
        with pytest.raises(ProtocolError, match=r"it redirects readers to|its redirect is not"):
            await start(pair, rendezvous(pair))
        lease.revoke()


@in_virtual_time
async def test_what_is_told_of_an_engine_has_to_be_a_rendezvous_of_the_request() -> None:
    async with with_a_sibling() as (pair, sibling):
        there, lease = awaited_at(sibling), offer(pair, request_id="another")
        decline = pair.producer.runtime.decline
        for wrong in (lease.ticket, Ticket.rendezvous(there, "other"), {}, 7):
            with pytest.raises(RequestError):
                decline(SECRET, at=wrong)  # type: ignore[arg-type]
            with pytest.raises(RequestError):
                decline(SECRET, at=there, instead=wrong)  # type: ignore[arg-type]
        await sibling.runtime.aclose()
        decline(SECRET, at=there)  # nobody is there: that is told to nobody
        await asyncio.sleep(15.0)
        await lease.revoke()
        assert_nothing_left(pair)


@each("grows", [False, True])
@each(
    ("prompt", "blocks", "expected", "problem"),
    [
        # 16 tokens are offered, in four blocks of 4; of three local blocks the prompt's first 4 tokens are cached.
        (None, TAKEN, 16, ""),
        (16, TAKEN, None, ""),
        (18, TAKEN[:3], 16, ""),
        (18, TAKEN[:3], None, ""),
        (None, TAKEN, 12, "expected 12 tokens, 'producer' .* offers 16"),
        (13, TAKEN[:2], None, "its prompt has 13 tokens, .* offers 16"),
        (
            18,
            TAKEN,
            None,
            "4 local blocks of 4 tokens, for tokens 4 to 20 .* the 16 tokens that 'producer' at .* offers fill 4",
        ),
        (18, TAKEN[:3], 18, "expected 18 tokens, .* offers 16"),
    ],
)
@in_virtual_time
async def test_an_offer_of_another_length(
    grows: bool, prompt: int | None, blocks: list[int], expected: int | None, problem: str
) -> None:
    """The reader has made room before it could know: what does not fit that is found out before a byte lands.

    Of the last blocks of a longer prompt each would get the tokens of another one.
    """
    async with pair_of() as pair:
        given = {"block_ids": blocks, "prompt": prompt and range(100, 100 + prompt), "num_tokens": expected}
        given["cached_tokens"] = {4: 0, 3: 4, 2: 8}[len(blocks)] if not problem.startswith("4 local") else 4
        load = start(pair, rendezvous(pair), **given)
        lease = offer(pair, computed_tokens=16 if grows else None)  # whose engine does not say which prompt it is of
        if problem:
            by_ticket = [] if prompt else [start(pair, lease.ticket.to_params(), **given)]
            for one in load, *by_ticket:
                with pytest.raises(PromptMismatch, match=f"^request 'local': .*{problem}"):
                    await one
            assert landed(pair) == []
            lease.revoke()
        else:
            await load
            pair.assert_loaded(blocks, BLOCKS[4 - len(blocks) :])
        await lease


@each("known", [True, False])
@in_virtual_time
async def test_more_blocks_than_there_are_tokens_for(known: bool) -> None:
    """Of a prompt that the request gives that is plain before anybody is asked."""
    async with pair_of() as pair:
        said = {"prompt": range(12)} if known else {"num_tokens": 12}
        load = start(pair, rendezvous(pair), block_ids=TAKEN, **said)
        assert load.done == known
        whose = "of its prompt" if known else "that 'producer' at .* offers"
        lease = offer(pair, block_ids=BLOCKS[:3], num_tokens=12)
        with pytest.raises(
            RequestError, match=f"^request 'local': 4 local .* of 4 tokens, .* but the 12 tokens {whose} fill 3"
        ):
            await load
        assert landed(pair) == []
        await lease.revoke()


@each("end", ["drain", "unregister", "close", "revoke"])
@in_virtual_time
async def test_what_waits_is_told_when_the_producer_goes(end: str) -> None:
    async with pair_of() as pair:
        unknown = start(pair, rendezvous(pair, "unknown"))
        ticket = rendezvous(pair)
        lease = offer(pair, block_ids=BLOCKS[:1], computed_tokens=0)
        growing = start(pair, ticket)
        await asyncio.sleep(1.0)
        begun_s = asyncio.get_running_loop().time()
        runtime = pair.producer.runtime
        gone: list[Any] = [None]
        match end:
            case "drain":
                gone = [asyncio.ensure_future(runtime.drain(0.5))]
            case "unregister":
                gone = [asyncio.ensure_future(runtime.unregister())]
            case "close":
                gone = [asyncio.ensure_future(runtime.aclose())]
            case "revoke":
                lease.revoke()
        with pytest.raises(LeaseExpired):
            await growing
        if end == "revoke":
            unknown.cancel()
            await unknown.settled()
        else:
            with pytest.raises((PeerNotReady, PeerUnreachable)):
                await unknown
            assert asyncio.get_running_loop().time() - begun_s < 3.0
            await asyncio.wait(gone)


@in_virtual_time
async def test_a_load_that_is_cancelled_leaves_the_request_to_the_next() -> None:
    async with pair_of() as pair:
        for waits in (True, False):
            load = start(pair, rendezvous(pair))
            lease = None if waits else offer(pair, computed_tokens=0)
            await asyncio.sleep(0.5)
            load.cancel()
            await load.settled()
            lease = lease or offer(pair)
            if not waits:
                lease.advance(16)
            await start(pair, rendezvous(pair))
            assert await lease is LeaseOutcome.READ
        await asyncio.sleep(12.0)
        assert_nothing_left(pair)


@each("late", [False, True])
@in_virtual_time
async def test_an_offer_is_kept_for_its_reader_whenever_it_comes(late: bool) -> None:
    """A request waits for blocks, and so does its prompt at the other engine: for longer than a load may take."""
    async with pair_of() as pair:
        ticket = rendezvous(pair, ttl_s=CONFIG.load_deadline_s + 40.0)
        with pair.consumer.runtime.keep_leases(ticket):
            await asyncio.sleep(CONFIG.load_deadline_s + 20.0 if late else 0.5)
            lease = offer(pair, ttl_s=0.3)
            await asyncio.sleep(3.0)
            assert not lease.done
        await start(pair, ticket)
        assert await lease is LeaseOutcome.READ
        with pair.consumer.runtime.keep_leases(ticket):
            await asyncio.sleep(0.5)
        await asyncio.sleep(12.0)
        assert_nothing_left(pair)


@in_virtual_time
async def test_what_is_given_back_need_not_have_been_offered() -> None:
    async with pair_of() as pair:
        assert not await pair.consumer.runtime.release_blocks(rendezvous(pair, "never", ttl_s=0.1))
        lease = offer(pair)
        assert await pair.consumer.runtime.release_blocks(rendezvous(pair))
        assert await lease is LeaseOutcome.READ
        assert_nothing_left(pair)


@in_virtual_time
async def test_an_offer_that_comes_after_its_reader_has_gone_is_given_back() -> None:
    """A prompt may wait in the prefill engine's queue for longer than anything but its rendezvous says."""
    async with pair_of() as pair:
        ticket = rendezvous(pair, ttl_s=60.0)
        load = start(pair, ticket)
        await asyncio.sleep(0.5)
        load.cancel()
        giving_back = asyncio.create_task(pair.consumer.runtime.release_blocks(ticket))
        await asyncio.sleep(40.0)
        begun_s = asyncio.get_running_loop().time()
        lease = offer(pair, computed_tokens=0, ttl_s=30.0)
        assert await lease is LeaseOutcome.READ
        assert asyncio.get_running_loop().time() - begun_s < 1.0
        assert await giving_back
        await asyncio.sleep(12.0)
        assert_nothing_left(pair)


@each("closes", ["producer", "consumer"])
@in_virtual_time
async def test_giving_up_what_is_not_offered_ends_with_either_engine(closes: str) -> None:
    async with pair_of() as pair:
        ticket = rendezvous(pair, ttl_s=60.0)
        giving_back = asyncio.create_task(pair.consumer.runtime.release_blocks(ticket))
        await asyncio.sleep(0.5)
        await getattr(pair, closes).runtime.aclose()
        begun_s = asyncio.get_running_loop().time()
        await asyncio.wait([giving_back])
        assert asyncio.get_running_loop().time() - begun_s < 20.0
        assert not giving_back.result()


@in_virtual_time
async def test_questions_of_strangers_keep_no_honest_one_from_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    world = InprocCluster().world()
    for name, most in (("WAITING_MAX", 8), ("WAITING_OF_REQUEST_MAX", 2), ("WAITING_OF_READER_MAX", 4)):
        monkeypatch.setattr(lease_answers, name, most)
    async with inproc_pair(config=CONFIG, producer_world=world, consumer_world=world) as pair:
        waits = [isinstance(ask(pair, "evil/0.0.0#1", f"x{at}"), asyncio.Future) for at in range(6)]
        assert waits == [True] * 4 + [False] * 2, "of one reader"
        assert [isinstance(ask(pair, "other/0.0.0#1", "x0"), asyncio.Future) for _ in range(3)] == [True, False, False]
        for at in range(20):
            ask(pair, f"evil{at}/0.0.0#1", f"y{at}")
        assert host_of(pair.producer.runtime).serving.lease_answers.waiting == 8
        load = start(pair, rendezvous(pair))
        await asyncio.sleep(1.0)
        lease = offer(pair)
        await load
        await lease
        await asyncio.sleep(10.0)
        assert_nothing_left(pair)


@in_virtual_time
async def test_how_long_a_question_waits() -> None:
    async with pair_of() as pair:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        short, long = ask(pair, wait_s=1.0), ask(pair, wait_s=99.0)
        assert await short == messages.NOTHING_YET
        assert loop.time() - begun_s == pytest.approx(1.0)
        assert await long == messages.NOTHING_YET
        assert loop.time() - begun_s == pytest.approx(10.0)
        assert ask(pair, wait_s=0.0) == messages.NOTHING_YET


@in_virtual_time
async def test_offers_that_cannot_be() -> None:
    async def fails(change: Any, error: type[KVFlowError], match: str) -> None:
        async with scripted_pair(CONFIG) as (pair, channel):
            lease = offer(pair)
            await pair.consumer.runtime.prewarm([lease.ticket])
            channel.script.append(change)
            with pytest.raises(error, match=match):
                await start(pair, rendezvous(pair))
            lease.revoke()

    def changed(**changes: Any) -> Any:
        def lie(reply: messages.Reply) -> messages.Reply:
            assert isinstance(reply, messages.LeaseAnswer)
            assert reply.offer is not None
            return msgspec.structs.replace(reply, offer=msgspec.structs.replace(reply.offer, **changes))

        return lie

    def of_lease(**changes: Any) -> Any:
        def lie(reply: messages.Reply) -> messages.Reply:
            assert isinstance(reply, messages.LeaseAnswer)
            assert reply.lease is not None
            return msgspec.structs.replace(reply, lease=unchecked(reply.lease, **changes))

        return lie

    await fails(messages.Ack(incarnation="i"), ProtocolError, "expected LeaseAnswer, got Ack")
    await fails(
        messages.LeaseAnswer(state=messages.LeaseAnswerState.OPEN),
        ProtocolError,
        "a lease that is open, without its offer",
    )
    await fails(lambda reply: msgspec.structs.replace(reply, lease=None), ProtocolError, "an offer of blocks without")
    await fails(changed(num_tokens=-1), ProtocolError, "is impossible")
    await fails(changed(num_tokens=1 << 60, extends=True), RequestError, r"at most 262144 \(limits.block_ids_max\)")
    await fails(changed(block_ids=(tuple(range((1 << 18) + 1)),)), RequestError, r"at most 262144 \(limits.block_ids")
    await fails(changed(ttl_s=float("nan")), ProtocolError, "is impossible")
    await fails(changed(block_ids=((1 << 70,),)), ProtocolError, "is impossible")
    await fails(changed(block_ids=((99, 98, 97, 96),)), ProtocolError, "block id 99")
    await fails(changed(block_ids=((1, 2, 2, 3),)), ProtocolError, "is impossible")
    await fails(changed(block_ids=((1,), (2,))), ProtocolError, "of 2 groups, it has 1")
    await fails(
        changed(num_tokens=1 << 12, extends=True),
        ProtocolError,
        r"offers in the end: \(1024,\), but there are \(16,\)",
    )
    await fails(of_lease(seal_index=1 << 20), ProtocolError, "seal_index 1048576")
    await fails(of_lease(block_ids=(99, 98, 97, 96)), ProtocolError, "block id 99")
    await fails(of_lease(block_ids=(1,)), ProtocolError, "is impossible")
    await fails(of_lease(block_ids=(1, 2, 3, 5), more_block_ids=((1,),)), ProtocolError, "of 2 groups, it has 1")
    await fails(of_lease(lease_id=""), ProtocolError, "lease_id")
    failed = messages.LeaseAnswer(state=messages.LeaseAnswerState.FAILED, reason="no\nroom" + "x" * 9999)
    await fails(failed, PrefillFailed, r"no\\nroom")


@each("incarnation", ["", "x" * 1_000_000, "a\n2026-01-01 ERROR kvflow.forged", "\x1b[2J", "a b", "\u202e"])
@each("met", [False, True])
@in_virtual_time
async def test_an_incarnation_that_is_no_name_is_refused_unread(incarnation: str, met: bool) -> None:
    """Whether an offer names it, or the answer of a rank that is asked for a lease."""
    lease_of, records = OpenLease.rank_lease, list[LoadRecord]()

    def lie(self: OpenLease) -> RankLease:
        return unchecked(lease_of(self), incarnation=incarnation)

    observer = SimpleNamespace(load_ended=records.append, lease_ended=lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenLease, "rank_lease", lie)
        async with pair_of() as pair:
            lease = offer(pair)
            ticket = rendezvous(pair) if met else asked(lease.ticket)
            with (
                pair.consumer.runtime._observers.adding(observer),
                pytest.raises(ProtocolError, match=r"incarnation") as raised,
            ):
                await start(pair, ticket)
            lease.revoke()
    assert (raised.value.engine_id, len(records)) == ("producer", 1)
    for text in (str(raised.value), records[0].error):
        assert text.isprintable()
        assert len(text) < 500


def asked(ticket: Ticket) -> dict[str, Any]:
    """Return a ticket without a lease, so that its rank has to be asked for the lease."""
    offer = {"block_ids": ticket.block_ids, "num_tokens": ticket.num_tokens, "ttl_s": ticket.ttl_s}
    return ticket.without_leases(request_id=ticket.request_id, **offer).to_params()


def of_ranks(both: Engines, **more: Any) -> dict[str, Any]:
    """A rendezvous with an engine of two ranks that have introduced themselves."""
    hello = [rank.introduce() for rank in both.ranks]
    return Ticket.rendezvous(merge_tickets(hello).to_params(), SECRET, **more).to_params()


def waiting(both: Engines, rank: int) -> int:
    count: int = host_of(both.ranks[rank]).serving.lease_answers.waiting
    return count


@pytest.mark.parametrize("fixed_ports", [True, False])
@pytest.mark.parametrize("late", [0, 1])
async def test_every_rank_is_asked_and_may_be_late(fixed_ports: bool, late: int) -> None:
    async with engines(fixed_ports=fixed_ports) as both:
        params = of_ranks(both)
        if fixed_ports:
            del params["kvflow"]["ranks"][1]
        load = both.reader.start_load(LoadRequest("req", params, [5, 6]))
        await until(lambda: waiting(both, 0))
        request = ServeRequest(SECRET, [1], num_tokens=8, computed_tokens=0, payload=True)
        leases = {1 - late: both.ranks[1 - late].serve_blocks(request)}
        await until(lambda: waiting(both, late))
        leases[late] = both.ranks[late].serve_blocks(request)
        leases[0].extend([2])
        leases[0].complete(b"token")
        await until(lambda: waiting(both, 1))
        assert not load.done
        leases[1].advance(4)
        leases[1].extend([2])
        leases[1].complete(b"token")
        assert (await load).payload == b"token"
        await both.assert_loaded(leases[0], leases[1])


async def test_the_lease_of_a_rank_is_renewed_while_another_is_waited_for() -> None:
    clock = ManualClock()
    async with engines(clock=lambda: clock, lease_ttl_s=30.0) as both:
        load = both.reader.start_load(LoadRequest("req", of_ranks(both), [5, 6]))
        first = both.offer(0, name=SECRET)
        await until(lambda: waiting(both, 1))
        for _ in range(20):
            clock.advance(5.0)
            await turns(5)
        assert (first.done, load.done) == (False, False)
        second = both.offer(1, name=SECRET)
        await load
        clock.advance(1.0)
        await both.assert_loaded(first, second)


async def test_ranks_that_differ_or_decline() -> None:
    async with engines() as both:
        for blocks, tokens, what in ([1, 3], 8, "block_ids"), ([1, 2], 7, "num_tokens"):
            leases = [both.offer(0, name=SECRET), both.offer(1, blocks, tokens, name=SECRET)]
            with pytest.raises(ProtocolError, match=f"its ranks offer different things: {what}"):
                await both.reader.load_blocks(LoadRequest("req", of_ranks(both), [5, 6]))
            for lease in leases:
                await lease.revoke()
        leases = [both.offer(0, name=SECRET)]
        load = both.reader.start_load(LoadRequest("req", of_ranks(both), [5, 6]))
        both.ranks[1].decline(SECRET, "no room")
        with pytest.raises(PrefillFailed, match=r"tp 1\) at .*no room"):
            await load
        leases[0].revoke()


@in_virtual_time
async def test_a_prefill_that_breaks() -> None:
    async with pair_of() as pair:
        ticket = rendezvous(pair)
        for block_ids in (BLOCKS[:1], BLOCKS):
            load = start(pair, ticket)
            lease = offer(pair, block_ids=block_ids, computed_tokens=0, payload=True)
            await asyncio.sleep(0.5)
            lease.fail("out of memory")
            with pytest.raises(PrefillFailed, match="could not compute the prompt: out of memory"):
                await load
            with pytest.raises(PrefillFailed, match="out of memory"):
                await start(pair, ticket)
            assert await lease is LeaseOutcome.FAILED
        full = start(pair, rendezvous(pair, "full"), block_ids=[])
        lease = offer(pair, request_id="full", payload=True)
        await asyncio.sleep(0.5)
        lease.fail("out of memory")
        with pytest.raises(PrefillFailed, match="out of memory"):
            await full
        await lease
        assert_nothing_left(pair)


def test_what_a_router_makes() -> None:
    known_ticket = any_ticket()
    made = Ticket.rendezvous(known_ticket.to_params(), SECRET, ttl_s=4.0)
    assert Ticket.from_params(json.loads(json.dumps(made.to_params()))) == made
    assert (made.request_id, made.ttl_s, made.awaited) == (SECRET, 4.0, True)
    assert (made.num_tokens, any(made.block_tables), made.lease_id) == (0, False, "")
    for wrong, problem in (
        ({"request_id": ""}, "request_id"),
        ({"request_id": 7}, "request_id"),
        ({"request_id": SECRET, "ttl_s": 0.0}, "ttl_s"),
    ):
        with pytest.raises(RequestError, match=problem):
            Ticket.rendezvous(known_ticket, **wrong)  # type: ignore[arg-type]
    params = made.to_params()
    params["kvflow"]["num_tokens"] = 4
    with pytest.raises(RequestError, match="a pending ticket has no blocks"):
        Ticket.from_params(params)


@pytest.mark.nixl
async def test_both_legs_at_once_over_real_nixl() -> None:
    async with nixl_pair(config=replace(PATIENT, listen="tcp://127.0.0.1:0"), size=CacheSize(num_blocks=8)) as pair:
        load = start(pair, rendezvous(pair), prompt=PROMPT)
        await until(lambda: host_of(pair.producer.runtime).serving.lease_answers.waiting)
        lease = offer(pair, prompt=PROMPT, block_ids=BLOCKS[:2], computed_tokens=0, payload=True)
        lease.advance(8)
        lease.extend(BLOCKS[2:])
        lease.complete(b"token")
        assert (await load).payload == b"token"
        pair.assert_loaded(TAKEN, BLOCKS)
        assert await lease is LeaseOutcome.READ


@pytest.mark.nixl
def test_both_legs_in_callers_threads() -> None:
    engines = []
    for name in ("prefill", "decode"):
        kv_caches, cache = CacheSize().make(name)
        engines.append((blocking.Runtime(replace(CONFIG, engine_id=name)), kv_caches, cache))
    (producer, theirs, offered), (consumer, ours, _) = engines
    with producer, consumer:
        producer.register_kv_caches(theirs, offered.layout)
        consumer.register_kv_caches(ours, offered.layout)
        hello = producer.introduce()
        load = consumer.start_load(LoadRequest("local", Ticket.rendezvous(hello, SECRET), TAKEN))
        declined = consumer.start_load(LoadRequest("other", Ticket.rendezvous(hello, "other"), [1]))
        offered.fill(BLOCKS)
        lease = producer.serve_blocks(ServeRequest(SECRET, BLOCKS, 16, computed_tokens=0, payload=True))
        producer.decline("other", "no room")
        lease.complete(b"token")
        assert load.result(WAIT_S).payload == b"token"
        with pytest.raises(PrefillFailed, match="no room"):
            declined.result(WAIT_S)
        assert lease.wait(WAIT_S) is LeaseOutcome.READ
    assert known(producer.statistics().serving).read == 1


@in_virtual_time
async def test_a_pending_ticket_is_compared_by_the_weights_of_its_offer() -> None:
    """The router's introduction may be older than the weights; the offer is computed with the new ones."""
    async with pair_of() as pair:
        ticket = rendezvous(pair)
        pair.producer.runtime.set_weights("step-7")
        lease = offer(pair)
        blocks = f"request 'local' from 'producer': the blocks of request '{SECRET}' from 'producer' at tcp://"
        with pytest.raises(WeightsMismatch, match=rf"^{blocks}.*: ours '', theirs 'step-7'$"):
            await start(pair, ticket)
        pair.consumer.runtime.set_weights("step-7")
        await start(pair, ticket)
        assert await lease is LeaseOutcome.READ


@in_virtual_time
async def test_new_weights_end_a_lease_that_grows() -> None:
    async with pair_of() as pair:
        lease = offer(pair, computed_tokens=4)
        load = start(pair, rendezvous(pair))
        await asyncio.sleep(0.1)
        pair.producer.runtime.set_weights("step-7")
        with pytest.raises(LeaseExpired):
            await load
        lease.complete()
        assert await lease is LeaseOutcome.REVOKED


@in_virtual_time
async def test_an_introduction_names_the_rank_and_opens_no_lease() -> None:
    async with pair_of() as pair:
        runtime = pair.producer.runtime
        before, ticket = runtime.statistics(), runtime.introduce()
        assert (ticket.offers_nothing, ticket.has_blocks, ticket.address) == (True, False, runtime.address)
        assert Ticket.from_params(ticket.to_params()) == ticket
        assert runtime.statistics() == before
        await runtime.drain()
        with pytest.raises(RuntimeUnavailable):
            runtime.introduce()
