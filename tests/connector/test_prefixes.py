"""Prefixes between two engines: asked for by one, read out of the other's blocks; and what can end that."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kvflow.connector.asking import Asking, source_in
from kvflow.connector.prefix_peers import PrefixOutcome, PrefixPeers
from kvflow.connector.scheduler import Matched, PagedGroup
from kvflow.connector.shelving import Shelving
from kvflow.connector.step import Found, Question, Shelved, Step
from kvflow.connector.worker import Answered, Happening, Loaded, LoadFailed
from kvflow.core.cache.groups import GroupFacts
from kvflow.core.policy.states import ProducerState
from kvflow.core.prefix.keys import prefix_keys
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import RequestError, UsageError
from kvflow.kv_events import BlockStored
from kvflow.runtime.prefix.requests import PrefixOffer, PrefixRequest
from kvflow.runtime.runtime import Runtime
from kvflow.transport.inproc import InprocNetwork
from tests.connector.test_worker import (
    BLOCK_SIZE,
    PREFILL,
    Engine,
    Pair,
    Request,
    load_ended,
    make,
    settled_afterwards,
    steps,
)
from tests.support.tests_support import any_ticket, each

PROMPT = list(range(50, 62))
KEYS = prefix_keys(PROMPT, BLOCK_SIZE)
OTHER = prefix_keys(range(12), BLOCK_SIZE)


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The first one has the prompt's first two blocks in blocks 1 and 2."""
    network = InprocNetwork()
    with settled_afterwards(Pair(make("holder", network, 1.0), make("reader", network, -1.0))) as both:
        holder = both.prefill
        holder.worker.share([PagedGroup(GroupFacts(name="kv", block_size=BLOCK_SIZE))], BLOCK_SIZE)
        shelved = Shelved(parent=b"", keys=tuple(KEYS[:2]), block_tables=((1, 2),))
        begin(holder, Step(shelved=[shelved]))
        both.decode.worker._courier.peers.wait_s = 60.0
        yield both


def begin(engine: Engine, step: Step) -> None:
    engine.worker.prepare(step)
    engine.worker.begin(step)


def question(*peers: Engine | str, request_id: str = "d", keys: Sequence[bytes] = KEYS, cached: int = 0) -> Question:
    at = tuple(peer if isinstance(peer, str) else peer.worker.introduction().address for peer in peers)
    return Question(request_id=request_id, keys=tuple(keys), key_tokens=BLOCK_SIZE, cached_tokens=cached, peers=at)


def is_answer(entry: Happening) -> bool:
    return isinstance(entry, Answered)


def ask(reader: Engine, *questions: Question) -> Answered:
    begin(reader, Step(questions=list(questions)))
    return cast(Answered, reader.until(is_answer))


def test_a_prefix_is_loaded_as_any_ticket_is(pair: Pair) -> None:
    holder, reader = pair.prefill, pair.decode
    answer = ask(reader, question(holder))
    assert answer.outcome is PrefixOutcome.FOUND
    assert answer.found.ticket is not None
    reader.scheduler.adopt("d", answer.found.ticket)
    assert reader.scheduler.num_new_matched_tokens("d", 0) == Matched(8, True)
    reader.scheduler.update_after_alloc("d", [5, 6, 7], 8)
    loaded = reader.until(load_ended)
    assert isinstance(loaded, Loaded)
    assert loaded.report.tokens == 8
    for layer in reader.kv_caches.values():
        assert (layer[:, [5, 6]] == 1.0).all()
        assert (layer[:, [0, 1, 2, 3, 4, 7]] == -1.0).all()
    reader.scheduler.request_finished("d", completed=True)
    assert list(holder.worker.shared()) == ["found"]
    assert list(holder.worker.shared()) == []


def test_only_what_is_not_cached_is_read(pair: Pair) -> None:
    reader = pair.decode
    answer = ask(reader, question(pair.prefill, cached=4))
    assert answer.found.ticket is not None
    reader.scheduler.adopt("d", answer.found.ticket)
    assert reader.scheduler.num_new_matched_tokens("d", 4) == Matched(4, True)
    reader.scheduler.update_after_alloc("d", [5, 6, 7], 4)
    assert isinstance(reader.until(load_ended), Loaded)
    for layer in reader.kv_caches.values():
        assert (layer[:, 6] == 1.0).all()
        assert (layer[:, [0, 1, 2, 3, 4, 5, 7]] == -1.0).all()
    reader.scheduler.request_finished("d", completed=True)


def test_what_is_reused_before_it_was_read_is_a_miss(pair: Pair) -> None:
    """The holder's step does not wait for its reader, and writes at once."""
    holder, reader = pair.prefill, pair.decode
    answer = ask(reader, question(holder))
    assert answer.found.ticket is not None
    holder.worker.prepare(Step(reused=(2,)))
    assert sorted(holder.worker.shared()) == ["found", "reclaimed"]
    for layer in holder.kv_caches.values():
        layer[:, 2] = 7.0
    reader.scheduler.adopt("d", answer.found.ticket)
    reader.scheduler.update_after_alloc("d", [5, 6, 7], 8)
    assert isinstance(reader.until(load_ended), LoadFailed)
    assert reader.scheduler.num_new_matched_tokens("d", 0) == Matched(0, False)
    reader.scheduler.request_finished("d", completed=True)
    again = ask(reader, question(holder, request_id="e"))
    assert again.found.ticket is not None
    assert again.found.ticket.num_tokens == 4, "the other block is there still"
    reader.scheduler.give_back("e", again.found.ticket)
    reader.step()


def test_nothing_and_nobody(pair: Pair) -> None:
    other = prefix_keys(range(9, 17), BLOCK_SIZE)
    assert ask(pair.decode, question(pair.prefill, keys=other)).outcome is PrefixOutcome.NOTHING
    assert ask(pair.decode, question()).outcome is PrefixOutcome.NOTHING
    assert ask(pair.decode, question(pair.prefill, cached=8)).outcome is PrefixOutcome.NOTHING, "it is cached here"


def test_what_is_offered_to_a_request_that_has_ended_is_given_back(pair: Pair) -> None:
    answer = ask(pair.decode, question(pair.prefill))
    assert answer.found.ticket is not None
    pair.decode.scheduler.give_back("d", answer.found.ticket)
    pair.decode.step()  # the fixture sees whether it was


def test_a_request_that_ends_before_it_has_blocks_gives_its_prefix_back(pair: Pair) -> None:
    answer = ask(pair.decode, question(pair.prefill))
    assert answer.found.ticket is not None
    pair.decode.scheduler.adopt("d", answer.found.ticket)
    pair.decode.step()
    with pytest.raises(UsageError, match="it has a ticket already"):
        pair.decode.scheduler.adopt("d", answer.found.ticket)
    assert not pair.decode.scheduler.request_finished("d", completed=False).hold_blocks
    pair.decode.step()


def test_a_prompt_that_is_computed_for_a_reader_may_begin_with_a_prefix(pair: Pair) -> None:
    reader = pair.decode
    reader.scheduler.add(Request("d", 12, PREFILL))
    answer = ask(reader, question(pair.prefill))
    assert answer.found.ticket is not None
    reader.scheduler.adopt("d", answer.found.ticket)
    reader.scheduler.update_after_alloc("d", [5, 6, 7], 8)
    assert isinstance(reader.until(load_ended), Loaded)
    reader.step(("d", 12), blocks=(5, 6, 7))
    finished = reader.scheduler.request_finished("d", completed=True)
    assert finished.params is not None
    assert finished.hold_blocks
    ticket = Ticket.from_params(finished.params)
    assert ticket.num_tokens == 12
    assert reader.scheduler.state_of("d") is ProducerState.SENDING
    pair.prefill.receive(finished.params, [3, 4, 5], tokens=12)
    assert isinstance(pair.prefill.until(load_ended), Loaded)
    pair.prefill.scheduler.request_finished("d", completed=True)


# --- whom a worker asks


@dataclass
class Peers:
    """What each peer offers, in tokens; None does not answer."""

    offers: dict[str, int | None]
    asked: list[str] = field(default_factory=list)

    async def seek_prefix(self, request: PrefixRequest) -> tuple[PrefixOffer, ...]:
        (peer,) = request.peers
        assert isinstance(peer, str)
        self.asked.append(peer)
        tokens = self.offers[peer]
        if tokens is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), request.answer_within_s)
        if not tokens:
            return ()
        ticket = any_ticket(engine_id=peer).without_leases(request_id="x", block_ids=(), num_tokens=tokens, ttl_s=1.0)
        return (PrefixOffer(peer=peer, ticket=ticket, num_tokens=tokens, queued_bytes=0, round_trip_s=0.01),)


async def asked(peers: PrefixPeers, runtime: Peers, *, cached: int = 0) -> tuple[PrefixOutcome, list[str]]:
    outcome, tickets = await peers.ask(cast(Runtime, runtime), question(*runtime.offers, cached=cached))
    return outcome, [ticket.engine_id for ticket in tickets]


async def test_the_longest_run_comes_first() -> None:
    runtime = Peers({"a": 4, "b": 12, "c": 0, "d": 8})
    assert await asked(PrefixPeers(), runtime) == (PrefixOutcome.FOUND, ["b", "d", "a"])


async def test_who_does_not_answer_is_left_out_for_longer_each_time() -> None:
    runtime, peers = Peers({"dead": None, "alive": 0}), PrefixPeers(wait_s=0.01)
    assert await asked(peers, runtime) == (PrefixOutcome.LATE, [])
    assert await asked(peers, runtime) == (PrefixOutcome.LATE, [])
    assert runtime.asked == ["dead", "alive", "alive"]
    pauses = []
    for _ in range(7):
        pauses.append(peers._late["dead"].pause_s)
        peers._late["dead"].until_s = 0.0  # it is over
        await asked(peers, runtime)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    runtime.offers["dead"] = 4
    peers._late["dead"].until_s = 0.0
    assert await asked(peers, runtime) == (PrefixOutcome.FOUND, ["dead"])
    assert not peers._late


def test_peers_that_are_known_are_connected_before_the_first_question(pair: Pair) -> None:
    """One that is not there changes nothing."""
    reader, holder = pair.decode, pair.prefill.worker.introduction()
    reader.worker._courier.peers.known = (holder.address, "tcp://127.0.0.1:1")
    reader.worker.meet(follows=True)
    for _ in steps():
        if reader.runtime.statistics().peers:
            break
    assert [peer.engine_id for peer in reader.runtime.statistics().peers] == ["holder"]
    assert ask(reader, question(pair.prefill, keys=OTHER)).outcome is PrefixOutcome.NOTHING


async def test_those_that_events_name_are_asked_too_unless_a_router_has_named_one() -> None:
    runtime = Peers({"a": 4, "hinted": 12, "less": 8, "nothing new": 0})
    peers = PrefixPeers()
    for holder, blocks in (("hinted", 3), ("less", 2), ("nothing new", 1)):
        event = BlockStored(block_hashes=range(blocks), token_ids=PROMPT[: blocks * BLOCK_SIZE], block_size=BLOCK_SIZE)
        peers._map.apply(holder, event)
    one = question("a", cached=4)
    outcome, tickets = await peers.ask(cast(Runtime, runtime), replace(one, hinted=True))
    assert outcome is PrefixOutcome.FOUND
    assert [ticket.engine_id for ticket in tickets] == ["hinted", "less", "a"]
    assert runtime.asked == ["a", "hinted", "less"]
    await peers.ask(cast(Runtime, runtime), one)
    assert runtime.asked[3:] == ["a"]


@pytest.mark.parametrize(
    ("total_s", "recompute_s_per_token", "expected"),
    [(8.0, None, "found"), (8.0, 0.5, "slower"), (8.0, 1.5, "found"), (None, 0.5, "found"), (0.4, 0.5, "found")],
)
async def test_what_is_computed_sooner_is_not_loaded(
    total_s: float | None, recompute_s_per_token: float | None, expected: str
) -> None:
    runtime, peers = Peers({"a": 12}), PrefixPeers(recompute_s_per_token=recompute_s_per_token)
    assert await asked(peers, runtime, cached=4) == (PrefixOutcome.FOUND, ["a"]), "nothing was measured yet"
    peers.loaded("d", "a", total_s)
    assert await asked(peers, runtime) == (PrefixOutcome(expected), ["a"])


# --- which requests ask


def asking(*peers: str, tokens_min: int = 8) -> Asking:
    return Asking(peers, block_tokens=BLOCK_SIZE, tokens_min=tokens_min)


def test_a_request_asks_once() -> None:
    made = asking("tcp://a:1")
    made.add("r", KEYS, None)
    assert made.waits("r", 4)
    assert made.waits("r", 4)
    (left,) = made.take()
    assert left == question("tcp://a:1", request_id="r", cached=4)
    assert made.take() == []
    assert made.waits("r", 4)
    assert made.answered("r", found=True)
    assert not made.answered("r", found=True)
    assert not made.waits("r", 0)


def test_of_prompts_that_begin_alike_one_asks_and_loads_at_a_time() -> None:
    """The others see then what is cached: of three, one has enough, and one asks for the rest."""
    made = asking("tcp://a:1")
    for name, keys in (("first", KEYS), ("same", KEYS), ("longer", [*KEYS, *OTHER]), ("other", OTHER)):
        made.add(name, keys, None)
        assert made.waits(name, 0)
    assert [one.request_id for one in made.take()] == ["first", "other"]
    assert made.answered("first", found=True)
    assert made.waits("same", 0)
    made.over("other")
    assert made.waits("longer", 0)
    assert made.take() == []
    made.over("first")
    assert not made.waits("same", 12)
    assert made.waits("longer", 12)
    (left,) = made.take()
    assert (left.request_id, left.cached_tokens) == ("longer", 12)


def test_what_nobody_has_is_asked_for_once() -> None:
    made = asking("tcp://a:1")
    for name in ("first", "same"):
        made.add(name, KEYS, None)
        assert made.waits(name, 0)
    made.add("named", KEYS, "tcp://b:2")
    assert made.waits("named", 0)
    assert made.answered("first", found=False)
    assert not made.waits("same", 0)
    assert made.waits("named", 0)
    assert [one.request_id for one in made.take()] == ["first", "named"]
    made.add("later", KEYS, None)
    assert made.waits("later", 0)
    made.finished("named")
    assert made.waits("later", 0)
    assert [one.request_id for one in made.take()] == ["later"]


@each(("computed", "waits"), [(0, True), (4, True), (8, False), (12, False)])
def test_what_is_nearly_all_cached_is_not_asked_for(computed: int, waits: bool) -> None:
    made = asking("tcp://a:1")
    made.add("r", KEYS, None)
    assert made.waits("r", computed) == waits
    assert len(made.take()) == waits


def test_where_events_are_followed_those_may_be_asked_that_they_name() -> None:
    made = Asking((), block_tokens=BLOCK_SIZE, tokens_min=8, hinted=True)
    made.add("r", KEYS, None)
    made.add("named", OTHER, "tcp://b:2")
    assert made.waits("r", 0)
    assert made.waits("named", 0)
    assert [(one.peers, one.hinted) for one in made.take()] == [((), True), (("tcp://b:2",), False)]


def test_nobody_is_asked_for_what_is_short_or_where_there_is_nobody() -> None:
    made = asking()
    made.add("r", KEYS, None)
    assert not made.waits("r", 0)
    made.add("named", KEYS, "tcp://b:2")
    assert made.waits("named", 0)
    assert made.take()[0].peers == ("tcp://b:2",)
    made = asking("tcp://a:1")
    made.add("r", KEYS[:1], None)
    assert not made.waits("r", 0)


def test_a_request_that_has_ended_asks_nothing_and_waits_for_nothing() -> None:
    made = asking("tcp://a:1")
    made.add("r", KEYS, None)
    assert made.waits("r", 0)
    made.finished("r")
    assert made.take() == []
    assert not made.answered("r", found=True)
    assert not made.answered("unknown", found=True)


SOURCE: dict[str, Any] = {"kv_request_id": "r", "remote_host": "10.0.0.7", "remote_port": 5600}


@each(
    ("params", "expected"),
    [
        (None, None),
        ({}, None),
        ({"remote_kv_source": SOURCE}, "tcp://10.0.0.7:5600"),
        ({"remote_kv_source": {**SOURCE, "remote_host": "::1"}}, "tcp://[::1]:5600"),
    ],
)
def test_a_source_that_a_router_names(params: dict[str, Any] | None, expected: str | None) -> None:
    assert source_in(params) == expected


@each(
    "given",
    [7, "tcp://a:1", {}, {**SOURCE, "remote_host": ""}, {**SOURCE, "remote_host": 3}, {**SOURCE, "remote_port": 0}],
)
def test_what_cannot_be_a_source(given: object) -> None:
    with pytest.raises(RequestError, match="remote_kv_source"):
        source_in({"remote_kv_source": given})


def test_what_is_said_of_them() -> None:
    assert repr(asking("tcp://a:1")) == "<Asking 0 requests>"
    assert repr(Shelving(BLOCK_SIZE, lambda _: None)) == "<Shelving 0 blocks of 0 requests and former ones>"
    assert Found(request_id="r", ticket=None).ticket is None
