"""Prefixes between two engines: asked for by one, read out of the other's blocks; and what can end that."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import pytest
from msgspec.structs import replace

from kvflow.connector.cached_prompts import CachedPrompts
from kvflow.connector.prefix_peers import PrefixPeers
from kvflow.connector.prefix_questions import PrefixOutcome, PrefixQuestions, source_in
from kvflow.connector.request_states import ProducerState
from kvflow.connector.scheduler import PagedGroup
from kvflow.connector.step import CachedBlocks, Question, Step
from kvflow.connector.worker import FailedLoad
from kvflow.core.cache.groups import GroupFacts
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import CacheUnregistered, RequestError, UsageError
from kvflow.prefix.keys import prefix_keys
from kvflow.prefix.kv_events import BlockStored
from kvflow.prefix.prefix_requests import PrefixOffer, PrefixRequest
from kvflow.prefix.prefixes import Prefixes
from kvflow.prefix.seek_request import REQUEST_ID_PREFIX
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.records import Attempt
from kvflow.runtime.runtime import Runtime
from kvflow.transport.base import TransportError
from kvflow.transport.inproc import InprocNetwork
from tests.connector.test_scheduler import BLOCK_SIZE, PREFILL, Request, scheduler, step_of, ticket_of
from tests.connector.test_worker import Engine, Pair, load_ended, make, settled_afterwards, steps, until_blocking
from tests.support.tests_support import any_ticket, each, small_cache

PROMPT = list(range(50, 62))
KEYS = prefix_keys(PROMPT, BLOCK_SIZE)
OTHER = prefix_keys(range(12), BLOCK_SIZE)


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The first one has the prompt's first two blocks in blocks 1 and 2."""
    network = InprocNetwork()
    with settled_afterwards(make("holder", network, 1.0), make("reader", network, -1.0)) as (holder, reader):
        share(holder, (1, 2))
        peers_of(reader).wait_s = 60.0
        yield Pair(holder, reader)


def share(holder: Engine, blocks: tuple[int, ...]) -> None:
    """Let peers read the prompt's beginning in these blocks."""
    holder.worker.share([PagedGroup(GroupFacts(name="kv", block_size=BLOCK_SIZE))], BLOCK_SIZE)
    begin(holder, Step(cached_blocks=[CachedBlocks(parent=b"", keys=tuple(KEYS[:2]), block_tables=(blocks,))]))


def peers_of(engine: Engine) -> PrefixPeers:
    peers = engine.worker._peers
    assert peers is not None
    return peers


def begin(engine: Engine, step: Step) -> None:
    engine.worker.prepare(step)
    engine.worker.begin(step)


def question(*peers: Engine | str, request_id: str = "d", keys: Sequence[bytes] = KEYS, cached: int = 0) -> Question:
    at = tuple(peer if isinstance(peer, str) else peer.worker.introduction().address for peer in peers)
    return Question(request_id=request_id, keys=tuple(keys), key_tokens=BLOCK_SIZE, cached_tokens=cached, peers=at)


class Answer(NamedTuple):
    outcome: PrefixOutcome
    tickets: tuple[Ticket, ...]


def ask(reader: Engine, *questions: Question) -> Answer:
    begin(reader, Step(questions=list(questions)))
    next(None for _ in steps() if reader.step() and reader.answers)
    return Answer(*reader.answers.pop(0))


def adopted(reader: Engine, *holders: Engine, cached: int = 0) -> tuple[Ticket, ...]:
    """Let request "d" ask `holders` for 8 tokens, and adopt their offers."""
    answer = ask(reader, question(*holders, cached=cached))
    assert answer.outcome is PrefixOutcome.FOUND
    assert answer.tickets
    reader.scheduler.adopt("d", answer.tickets)
    return answer.tickets


@pytest.mark.parametrize("cached", [0, 4])
def test_a_prefix_is_loaded_as_any_ticket_is(pair: Pair, cached: int) -> None:
    """Its blocks that are cached here are not read."""
    holder, reader = pair.prefill, pair.decode
    adopted(reader, holder, cached=cached)
    assert reader.scheduler.num_new_matched_tokens("d", cached) == (8 - cached, True)
    reader.scheduler.update_after_alloc("d", [5, 6, 7], 8 - cached)
    assert reader.until_loaded().tokens == 8 - cached
    reader.assert_filled(*([6] if cached else [5, 6]))
    reader.assert_filled(*([5] * bool(cached)), 0, 1, 2, 3, 4, 7, fill=-1.0)
    assert list(holder.worker.shared_outcomes()) == ["found"]
    assert list(holder.worker.shared_outcomes()) == []


def test_what_is_reused_before_it_was_read_is_a_miss(pair: Pair) -> None:
    """The holder's step does not wait for its reader, and writes at once."""
    holder, reader = pair.prefill, pair.decode
    adopted(reader, holder)
    holder.worker.prepare(Step(reused=(2,)))
    assert sorted(holder.worker.shared_outcomes()) == ["found", "reclaimed"]
    for layer in holder.kv_caches.values():
        layer[:, 2] = 7.0
    reader.scheduler.update_after_alloc("d", [5, 6, 7], 8)
    assert isinstance(reader.until(load_ended)[1], FailedLoad)
    assert reader.scheduler.num_new_matched_tokens("d", 0) == (0, False)
    reader.scheduler.request_finished("d", completed=True)
    again = ask(reader, question(holder, request_id="e"))
    assert again.tickets
    assert again.tickets[0].num_tokens == 4, "the other block is there still"
    reader.scheduler.give_back("e", again.tickets)
    reader.step()


def test_nothing_and_nobody(pair: Pair) -> None:
    assert ask(pair.decode, question(pair.prefill, keys=OTHER)).outcome is PrefixOutcome.NOTHING
    assert ask(pair.decode, question()).outcome is PrefixOutcome.NOTHING
    assert ask(pair.decode, question(pair.prefill, cached=8)).outcome is PrefixOutcome.NOTHING, "it is cached here"


def test_a_request_that_ends_before_it_has_blocks_gives_its_prefix_back(pair: Pair) -> None:
    tickets = adopted(pair.decode, pair.prefill)
    pair.decode.step()
    with pytest.raises(UsageError, match="it has a ticket already"):
        pair.decode.scheduler.adopt("d", tickets)
    assert not pair.decode.scheduler.request_finished("d", completed=False).hold_blocks
    pair.decode.step()


def test_a_prompt_that_is_computed_for_a_reader_may_begin_with_a_prefix(pair: Pair) -> None:
    reader = pair.decode
    reader.scheduler.add(Request("d", 12, PREFILL))
    adopted(reader, pair.prefill)
    reader.scheduler.update_after_alloc("d", [5, 6, 7], 8)
    assert isinstance(reader.until(load_ended)[1], LoadReport)
    reader.step(("d", 12), blocks=(5, 6, 7))
    finished = reader.scheduler.request_finished("d", completed=True)
    assert finished.params is not None
    assert finished.hold_blocks
    ticket = Ticket.from_params(finished.params)
    assert ticket.num_tokens == 12
    assert reader.scheduler.state_of("d") is ProducerState.SENDING
    pair.prefill.receive(finished.params, [3, 4, 5], tokens=12)
    pair.prefill.until_loaded()


# --- more than one holder


@pytest.fixture
def trio(pair: Pair) -> Iterator[tuple[Pair, Engine]]:
    """One more engine has the same two blocks, in blocks 3 and 4."""
    with settled_afterwards(make("spare", pair.decode.transport._network, 2.0)) as (spare,):
        share(spare, (3, 4))
        yield pair, spare


def holders_of(trio: tuple[Pair, Engine], tickets: Sequence[Ticket]) -> list[Engine]:
    """In the order of their tickets."""
    by_id = {engine.runtime.config.engine_id: engine for engine in (trio[0].prefill, trio[1])}
    return [by_id[ticket.engine_id] for ticket in tickets]


@pytest.mark.parametrize("outcome", ["TransferFailed", "LeaseExpired"])
def test_a_holder_that_fails_is_followed_by_the_next(trio: tuple[Pair, Engine], outcome: str) -> None:
    """For example because it has reused its blocks when the load begins."""
    reader = trio[0].decode
    first, second = holders_of(trio, adopted(reader, trio[0].prefill, trio[1]))
    if outcome == "TransferFailed":
        reader.transport.faults.fail_next.append(TransportError("scripted"))
    else:
        first.worker.prepare(Step(reused=(2, 4)))
    reader.scheduler.update_after_alloc("d", [5, 6, 7], 8)
    assert [(one.engine_id, one.outcome) for one in reader.until_loaded().attempts] == [
        (first.runtime.config.engine_id, outcome),
        (second.runtime.config.engine_id, "loaded"),
    ]
    fill = float(next(iter(second.kv_caches.values())).flatten()[0])
    reader.assert_filled(5, 6, fill=fill)
    reader.assert_filled(0, 1, 2, 3, 4, 7, fill=-1.0)


def test_a_request_that_waits_for_blocks_keeps_what_every_holder_offers(trio: tuple[Pair, Engine]) -> None:
    reader = trio[0].decode
    holders = holders_of(trio, adopted(reader, trio[0].prefill, trio[1]))
    reader.step()
    for holder in holders:
        until_blocking(lambda holder=holder: holder.runtime.statistics().serving.renewals)  # type: ignore[misc]
    assert not reader.scheduler.request_finished("d", completed=False).hold_blocks
    reader.step()  # the fixtures see that both have their blocks again


def test_who_has_less_than_another_gives_nothing(trio: tuple[Pair, Engine]) -> None:
    pair, spare = trio
    spare.worker.prepare(Step(reused=(4,)))
    (ticket,) = adopted(pair.decode, pair.prefill, spare)
    assert (ticket.engine_id, ticket.num_tokens) == ("holder", 8)
    pair.decode.scheduler.request_finished("d", completed=False)
    pair.decode.step()
    spare.until_settled()  # it was given back


# --- whom a worker asks


class Peers(Prefixes):
    """The number of tokens that each peer offers; None does not answer."""

    def __init__(self, offers: dict[str, int | None]) -> None:
        super().__init__()
        self.offers = offers
        self.asked: list[tuple[str, ...]] = []

    async def seek(self, request: PrefixRequest) -> tuple[PrefixOffer, ...]:
        peers = cast("tuple[str, ...]", request.peers)
        self.asked.append(peers)
        if None in (self.offers[peer] for peer in peers):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), request.answer_within_s)
        found = [(self.offers[peer] or 0, peer) for peer in peers if self.offers[peer]]
        return tuple(self._offer(peer, tokens, request) for tokens, peer in sorted(found, key=lambda one: -one[0]))

    def _offer(self, peer: str, tokens: int, request: PrefixRequest | None = None) -> PrefixOffer:
        ticket = any_ticket(engine_id=peer).without_leases(
            request_id=f"{REQUEST_ID_PREFIX}x", block_ids=(), num_tokens=tokens, ttl_s=1.0
        )
        left = tokens - (request.cached_tokens if request is not None else 0)
        s_per_token = request.recompute_s_per_token if request is not None else None
        return PrefixOffer(
            peer=peer,
            ticket=ticket,
            num_tokens=tokens,
            queued_bytes=0,
            round_trip_s=0.01,
            pull_s=self._rates.expected_s(peer, left, 0.0),
            compute_s=None if s_per_token is None else left * s_per_token,
        )


def named(tickets: Sequence[Ticket]) -> list[str]:
    return [ticket.engine_id for ticket in tickets]


async def asked(
    prefixes: Peers, *, cached: int = 0, **settings: float | None
) -> tuple[PrefixOutcome, list[str], list[str]]:
    peers = PrefixPeers(prefixes=prefixes, **settings)  # type: ignore[arg-type]
    outcome, tickets, others = await peers.ask(question(*prefixes.offers, cached=cached))
    return outcome, named(tickets), named(others)


async def test_of_those_with_the_longest_run_all_are_sources() -> None:
    prefixes = Peers({"a": 4, "b": 12, "c": 0, "d": 8, "e": 12})
    assert await asked(prefixes) == (PrefixOutcome.FOUND, ["b", "e"], ["d", "a"])
    _, tickets, others = await asked(Peers({f"tcp://a:{at}": 4 for at in range(1, 70)}))
    assert (len(tickets), len(others)) == (16, 48), "of a load's sources, and of a question's peers, there are so many"


async def test_nothing_is_late_if_somebody_was_waited_for_in_vain() -> None:
    assert await asked(Peers({"a": 0}), wait_s=60.0) == (PrefixOutcome.NOTHING, [], [])
    assert await asked(Peers({"a": 0, "dead": None}), wait_s=0.01) == (PrefixOutcome.LATE, [], [])
    assert await asked(Peers({"a": 4, "dead": None}), wait_s=0.01) == (PrefixOutcome.FOUND, ["a"], [])


def test_who_has_not_answered_yet_is_not_waited_for_again(pair: Pair) -> None:
    """Until an answer arrives, a frozen peer costs one question."""
    reader, holder = pair.decode, pair.prefill
    frozen, released = threading.Event(), threading.Event()
    peers = peers_of(reader)
    assert ask(reader, question(holder, keys=OTHER)).outcome is PrefixOutcome.NOTHING, "it is connected now"
    peers.wait_s = 0.2
    at = question(holder)

    async def freeze(_: Runtime) -> None:
        """Keep a runtime's loop from running, as a process that is stopped."""
        frozen.set()
        released.wait()

    holder.runtime.start(freeze)
    try:
        assert frozen.wait(60.0)
        assert ask(reader, at).outcome is PrefixOutcome.LATE
        assert ask(reader, at).outcome is PrefixOutcome.NOTHING
    finally:
        released.set()
    peers.wait_s = 60.0
    answers = (ask(reader, at) for _ in steps())
    answer = next(answer for answer in answers if answer.outcome is PrefixOutcome.FOUND)
    reader.scheduler.give_back("d", answer.tickets)
    reader.step()


def test_peers_that_are_known_are_connected_before_the_first_question(pair: Pair) -> None:
    """An unreachable peer changes nothing."""
    reader, holder = pair.decode, pair.prefill.worker.introduction()
    peers_of(reader).known_peers = (holder.address, "tcp://127.0.0.1:1")
    reader.worker.connect_peers(follow_events=True)
    until_blocking(lambda: bool(reader.runtime.statistics().peers))
    assert [peer.engine_id for peer in reader.runtime.statistics().peers] == ["holder"]
    assert ask(reader, question(pair.prefill, keys=OTHER)).outcome is PrefixOutcome.NOTHING


async def test_those_that_events_name_are_asked_first_unless_a_router_has_named_one() -> None:
    prefixes = Peers({"a": 4, "hinted": 12, "less": 8, "nothing new": 0})
    peers = PrefixPeers(prefixes=prefixes)
    for holder, blocks in (("hinted", 3), ("less", 2), ("nothing new", 1)):
        event = BlockStored(block_hashes=range(blocks), token_ids=PROMPT[: blocks * BLOCK_SIZE], block_size=BLOCK_SIZE)
        peers._map.apply(holder, event)
    one = question("a", cached=4)
    outcome, tickets, others = await peers.ask(replace(one, use_events=True))
    assert (outcome, named(tickets), named(others)) == (PrefixOutcome.FOUND, ["hinted"], ["less", "a"])
    await peers.ask(one)
    assert prefixes.asked == [("hinted", "less", "a"), ("a",)]


def report_of(total_s: float, tokens: int = 8, *, attempts: Sequence[Attempt] = ()) -> LoadReport:
    counts = {"bytes": 1, "blocks": 1, "descriptors": 1}
    return LoadReport(
        **counts, request_id="d", tokens=tokens, sources=(), notified=True, seconds={"wire": total_s}, attempts=attempts
    )


@pytest.mark.parametrize(
    ("total_s", "recompute_s_per_token", "expected"),
    [(8.0, None, "found"), (8.0, 0.5, "slower"), (8.0, 1.5, "found"), (None, 0.5, "found"), (0.4, 0.5, "found")],
)
async def test_what_is_computed_sooner_is_not_loaded(
    total_s: float | None, recompute_s_per_token: float | None, expected: str
) -> None:
    prefixes, computing = Peers({"a": 12}), {"recompute_s_per_token": recompute_s_per_token}
    assert await asked(prefixes, cached=4, **computing) == (PrefixOutcome.FOUND, ["a"], []), "nothing was measured yet"
    if total_s is not None:
        prefixes.learn(prefixes._offer("a", 12).ticket, report_of(total_s))
    found = (["a"], []) if expected == "found" else ([], ["a"])
    assert await asked(prefixes, **computing) == (PrefixOutcome(expected), *found)


async def test_what_loads_take_is_learned_of_prefixes_and_by_who_has_given_them() -> None:
    prefixes = Peers({"a": 12})
    ticket = prefixes._offer("a", 12).ticket
    prefixes.learn(any_ticket(engine_id="a"), report_of(99.0))  # a hand-over, maybe of a few tokens
    prefixes.learn(ticket, report_of(99.0, tokens=0))
    left = Attempt(engine_id="a", address="", outcome="LeaseExpired", error="", bytes=0, seconds=1.0)
    gave = Attempt(engine_id="b", address="", outcome="loaded", error="", bytes=1, seconds=80.0)
    prefixes.learn(ticket, report_of(99.0, attempts=[left, gave]))
    assert (await asked(prefixes, recompute_s_per_token=0.5))[0] is PrefixOutcome.FOUND
    prefixes.offers = {"b": 12}
    assert (await asked(prefixes, recompute_s_per_token=0.5))[0] is PrefixOutcome.SLOWER


# --- which requests ask


@pytest.fixture
def made() -> PrefixQuestions:
    return PrefixQuestions(("tcp://a:1",), block_tokens=BLOCK_SIZE, tokens_min=8)


def test_a_request_asks_once(made: PrefixQuestions) -> None:
    made.add("r", KEYS, None)
    assert made.ask_or_wait("r", 4)
    assert made.ask_or_wait("r", 4)
    (left,) = made.take_questions()
    assert left == question("tcp://a:1", request_id="r", cached=4)
    assert made.take_questions() == []
    assert made.ask_or_wait("r", 4)
    assert made.note_answer("r", found=True)
    assert not made.note_answer("r", found=True)
    assert not made.ask_or_wait("r", 0)


def test_of_prompts_that_begin_alike_one_asks_and_loads_at_a_time(made: PrefixQuestions) -> None:
    """The others use the cached prefix: of three, one has enough, and one asks for the rest."""
    for name, keys in (("first", KEYS), ("same", KEYS), ("longer", [*KEYS, *OTHER]), ("other", OTHER)):
        made.add(name, keys, None)
        assert made.ask_or_wait(name, 0)
    assert [one.request_id for one in made.take_questions()] == ["first", "other"]
    assert made.note_answer("first", found=True)
    assert made.ask_or_wait("same", 0)
    made.resume_waiters("other")
    assert made.ask_or_wait("longer", 0)
    assert made.take_questions() == []
    made.resume_waiters("first")
    assert not made.ask_or_wait("same", 12)
    assert made.ask_or_wait("longer", 12)
    (left,) = made.take_questions()
    assert (left.request_id, left.cached_tokens) == ("longer", 12)


def test_a_scheduler_asks_and_takes_what_is_found(made: PrefixQuestions) -> None:
    """If no request waits for an answer any longer, its offers are given back."""
    connector = scheduler(questions=made)
    for name in ("r", "gone"):
        made.add(name, prefix_keys(range(100 * len(name), 100 * len(name) + 12), BLOCK_SIZE), None)
        assert connector.num_new_matched_tokens(name, 0) == (None, False)
    assert [one.request_id for one in step_of(connector).questions] == ["r", "gone"]
    assert not connector.request_finished("gone", completed=False).hold_blocks
    tickets = {name: (ticket_of(8, request_id=name),) for name in ("r", "gone")}
    connector.update_from_workers(found=tickets)
    assert connector.num_new_matched_tokens("r", 0) == (8, True)
    step = step_of(connector)
    assert (step.keep, step.questions) == ({"r": tickets["r"]}, [])
    assert [(one.request_id, one.tickets) for one in step.release] == [("gone", tickets["gone"])]
    made.add("behind", prefix_keys(range(100, 112), BLOCK_SIZE), None)
    assert connector.num_new_matched_tokens("behind", 0) == (None, False), "it waits for that load"
    connector.update_after_alloc("r", [1, 2], 8)
    connector.update_from_workers(received=["r"])
    assert connector.num_new_matched_tokens("behind", 8) == (0, False)


def test_what_nobody_has_is_asked_for_once(made: PrefixQuestions) -> None:
    for name in ("first", "same"):
        made.add(name, KEYS, None)
        assert made.ask_or_wait(name, 0)
    made.add("named", KEYS, "tcp://b:2")
    assert made.ask_or_wait("named", 0)
    assert made.note_answer("first", found=False)
    assert not made.ask_or_wait("same", 0)
    assert made.ask_or_wait("named", 0)
    assert [one.request_id for one in made.take_questions()] == ["first", "named"]
    made.add("later", KEYS, None)
    assert made.ask_or_wait("later", 0)
    made.finish("named")
    assert made.ask_or_wait("later", 0)
    assert [one.request_id for one in made.take_questions()] == ["later"]


def chat(at: int, blocks: int = 8) -> list[bytes]:
    """Return the keys of a conversation of `blocks` blocks, after a system prompt of one block."""
    return prefix_keys([*PROMPT[:BLOCK_SIZE], *[at] * blocks * BLOCK_SIZE], BLOCK_SIZE)


def asked_now(made: PrefixQuestions, computed: int, *names: str) -> list[str]:
    """Return the requests that the scheduler would ask for in its next step, if it asked about all waiting requests."""
    waits = {name: made.ask_or_wait(name, computed) for name in names}
    questions = [one.request_id for one in made.take_questions()]
    assert all(waits[name] for name in questions)
    return questions


@pytest.mark.parametrize("found", [True, False])
@pytest.mark.parametrize("cached", [0, BLOCK_SIZE])
def test_those_with_one_system_prompt_ask_in_turn_and_load_side_by_side(
    made: PrefixQuestions, cached: int, found: bool
) -> None:
    """A prompt without an answer does not keep the others from asking. No request waits for another request's load."""
    names = [f"r{nth}" for nth in range(5)]
    for nth, name in enumerate(names):
        made.add(name, chat(nth), None)
    assert asked_now(made, cached, *names) == ["r0"]
    assert made.note_answer("r0", found=found)
    assert asked_now(made, cached, *names[1:]) == names[1:], "one answer was waited for, and no more"
    for name in names[1:]:
        assert made.note_answer(name, found=True)
        assert not made.ask_or_wait(name, cached)


def test_a_load_is_waited_for_if_it_brings_more_than_is_left(made: PrefixQuestions) -> None:
    long = chat(1)
    for name, keys in (
        ("first", long),
        ("same", long),
        ("tail", [*long, *OTHER]),
        ("fork", [*long[:3], *OTHER, *KEYS]),
    ):
        made.add(name, keys, None)
        made.ask_or_wait(name, 0)
    assert [one.request_id for one in made.take_questions()] == ["first"]
    assert made.note_answer("first", found=True)
    assert asked_now(made, 0, "same", "tail", "fork") == ["fork"], "it has three blocks of what is loaded, and six more"
    made.resume_waiters("first")
    assert not made.ask_or_wait("same", 9 * BLOCK_SIZE)
    assert asked_now(made, 9 * BLOCK_SIZE, "tail") == ["tail"]


def test_a_load_that_fails_is_not_waited_for_by_one_after_the_other(made: PrefixQuestions) -> None:
    names = [f"r{nth}" for nth in range(4)]
    for name in names:
        made.add(name, chat(1), None)
    assert asked_now(made, 0, *names) == ["r0"]
    assert made.note_answer("r0", found=True)
    assert asked_now(made, 0, *names[1:]) == []
    made.resume_waiters("r0")
    assert asked_now(made, 0, *names[1:]) == names[1:]


def test_a_miss_answers_for_those_that_ask_for_nothing_else_of_the_same_peers(made: PrefixQuestions) -> None:
    made.add("first", chat(1), None)
    made.add("shorter", chat(1, 4), None)
    made.add("longer", chat(1, 9), None)
    made.add("elsewhere", chat(1, 4), "tcp://b:2")
    assert asked_now(made, 0, "first", "shorter", "longer", "elsewhere") == ["first"]
    assert made.note_answer("first", found=False)
    assert asked_now(made, 0, "shorter", "longer", "elsewhere") == ["longer", "elsewhere"]
    assert not made.ask_or_wait("shorter", 0)


def test_one_that_is_waited_for_may_end_at_any_time(made: PrefixQuestions) -> None:
    for answered in (None, True):
        for name in ("first", "second"):
            made.add(name, chat(1), None)
        assert asked_now(made, 0, "first", "second") == ["first"]
        if answered:
            assert made.note_answer("first", found=True)
        made.finish("first")
        assert asked_now(made, 0, "second") == ["second"]
        made.finish("second")
        assert not made._active_by_first_key


@each(
    ("peers", "followed", "keys", "named", "computed", "asks"),
    [
        (("tcp://a:1",), False, KEYS, None, 0, True),
        (("tcp://a:1",), False, KEYS, None, 4, True),
        (("tcp://a:1",), False, KEYS, None, 8, False),  # nearly all is cached
        (("tcp://a:1",), False, KEYS, None, 12, False),
        (("tcp://a:1",), False, KEYS[:1], None, 0, False),  # short
        ((), False, KEYS, None, 0, False),  # there is nobody
        ((), False, KEYS, "tcp://b:2", 0, True),
        ((), True, KEYS, "tcp://b:2", 0, True),
        ((), True, KEYS, None, 0, True),  # those that events name
    ],
)
def test_who_is_asked_for_what(
    peers: tuple[str, ...], followed: bool, keys: Sequence[bytes], named: str | None, computed: int, asks: bool
) -> None:
    made = PrefixQuestions(peers, block_tokens=BLOCK_SIZE, tokens_min=8, use_events=followed)
    made.add("r", keys, named)
    assert made.ask_or_wait("r", computed) == asks
    whom = (named,) if named else peers
    assert [(one.peers, one.use_events) for one in made.take_questions()] == [(whom, followed and named is None)] * asks


def test_a_request_that_has_ended_asks_nothing_and_waits_for_nothing(made: PrefixQuestions) -> None:
    made.add("r", KEYS, None)
    assert made.ask_or_wait("r", 0)
    made.finish("r")
    assert made.take_questions() == []
    assert not made.note_answer("r", found=True)
    assert not made.note_answer("unknown", found=True)


SOURCE: dict[str, Any] = {"kv_request_id": "r", "remote_host": "10.0.0.7", "remote_port": 5600}


@each(
    ("params", "expected"),
    [
        (None, None),
        ({}, None),
        ({"remote_kv_source": SOURCE}, "tcp://10.0.0.7:5600"),
        ({"remote_kv_source": {**SOURCE, "remote_host": "::1"}}, "tcp://[::1]:5600"),
        ({"remote_kv_source": {**SOURCE, "remote_port": 5600.0}}, "tcp://10.0.0.7:5600"),
    ],
)
def test_a_source_that_a_router_names(params: dict[str, Any] | None, expected: str | None) -> None:
    assert source_in(params) == expected


@each(
    "given",
    [
        7,
        "tcp://a:1",
        {},
        {**SOURCE, "remote_host": ""},
        {**SOURCE, "remote_host": 3},
        {**SOURCE, "remote_port": 0},
        {**SOURCE, "remote_port": 5600.5},
    ],
)
def test_what_cannot_be_a_source(given: object) -> None:
    with pytest.raises(RequestError, match="remote_kv_source"):
        source_in({"remote_kv_source": given})


def test_what_is_said_of_them(made: PrefixQuestions) -> None:
    assert repr(made) == "<PrefixQuestions 0 requests>"
    assert repr(CachedPrompts(BLOCK_SIZE, lambda _: None)) == "<CachedPrompts 0 blocks of 0 requests and former ones>"


def test_an_engine_may_step_while_its_cache_is_unregistered(pair: Pair) -> None:
    """As vLLM does in its sleep: the work of the step fails, and the engine goes on after the sleep."""
    holder, engine = pair.prefill, pair.decode
    share(engine, (1, 2))
    engine.prefill("sent", (3, 4))
    engine.flow("flows")
    engine.step(("flows", 4), blocks=(7,))
    engine.scheduler.add(Request("kept", 7, holder.prefill("kept")))
    engine.step()
    engine.scheduler.withdraw_all()
    engine.runtime.unregister()

    engine.receive(holder.prefill("asleep", (3, 4)), (5, 6), request_id="asleep")
    engine.scheduler.add(Request("new", 7, holder.prefill("new", (5, 6))))
    engine.scheduler.add(Request("given-back", 7, holder.prefill("given-back", (5, 6))))
    engine.scheduler.request_finished("given-back", completed=False)
    begin(engine, Step(reused=(1, 2), questions=[question(holder)]))
    engine.compute("prompt", preempted=["flows"])
    begin(engine, Step(cached_blocks=[CachedBlocks(parent=b"", keys=tuple(KEYS[:1]), block_tables=((0,),))]))
    engine.until_failed(CacheUnregistered)
    for request_id in ("kept", "new", "prompt", "flows"):
        assert engine.scheduler.request_finished(request_id, completed=True).params is None
    next(None for _ in steps() if engine.step() and engine.answers)
    assert Answer(*engine.answers.pop()) == (PrefixOutcome.NOTHING, ())

    engine.runtime.register_kv_caches(*small_cache(fill=-1.0))
    engine.scheduler.introduce(engine.worker.introduction())
    share(engine, (1, 2))
    holder.receive(engine.prefill("after", (3, 4)), (0, 7), request_id="after")
    assert holder.until_loaded("after").tokens == 7
    found = ask(holder, question(engine))
    assert found.outcome is PrefixOutcome.FOUND
    holder.scheduler.give_back("d", found.tickets)
    holder.scheduler.withdraw_all()  # what was asked for during the sleep
