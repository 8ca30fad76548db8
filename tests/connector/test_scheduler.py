"""The scheduler's half of a connector: what each call answers, and a whole engine's scheduler played against it."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvflow.connector.parameters import Dialect, params_of_several, producer_params
from kvflow.connector.prefix_questions import PrefixQuestions
from kvflow.connector.request_states import ConsumerState, ProducerState
from kvflow.connector.scheduler import (
    ConnectorScheduler,
    Finished,
    SchedulingConfig,
    Sharing,
)
from kvflow.connector.scheduler import EngineRequest as Request
from kvflow.connector.step import Grow, Save, Step
from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.protocol.prompts import MarkKeys, check_prompt, marked_by_keys, prompt_digest, with_marks
from kvflow.core.protocol.ticket import Ticket, with_weights
from kvflow.errors import ConfigError, PromptMismatch, RequestError, UsageError, WeightsMismatch
from tests.support.budgets import machine_test
from tests.support.tests_support import any_ticket, each

BLOCK_SIZE = 4


INTRODUCTION = any_ticket()


def ticket_of(num_tokens: int, *, block_ids: Sequence[int] | None = None, request_id: str = "remote") -> Ticket:
    ids = range(-(-num_tokens // BLOCK_SIZE)) if block_ids is None else block_ids
    return INTRODUCTION.without_leases(request_id=request_id, block_ids=ids, num_tokens=num_tokens, ttl_s=9.0)


def consumer(num_prompt_tokens: int, ticket: Ticket, request_id: str = "r") -> Request:
    return Request(request_id, num_prompt_tokens, ticket.to_params(), range(num_prompt_tokens))


PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def producer(num_prompt_tokens: int, request_id: str = "r") -> Request:
    return Request(request_id, num_prompt_tokens, PREFILL, range(num_prompt_tokens))


def flowing(num_prompt_tokens: int, request_id: str = "r", name: str = "name") -> Request:
    """Make a producer's request to which a router has given a name beforehand."""
    params = producer_params(Ticket.rendezvous(INTRODUCTION, name))
    return Request(request_id, num_prompt_tokens, params, range(num_prompt_tokens))


def scheduler(
    *, introduce: bool = True, questions: PrefixQuestions | None = None, **changes: Any
) -> ConnectorScheduler:
    config = SchedulingConfig(block_size=BLOCK_SIZE, lease_ttl_s=10.0, **changes)
    new_secret = map("secret{}".format, itertools.count()).__next__
    made = ConnectorScheduler(config, new_secret=new_secret, questions=questions)
    if introduce:
        made.introduce(grouped_ticket(changes.get("groups", ()), 0, "introduction"))
    return made


def step_of(
    connector: ConnectorScheduler,
    *scheduled: tuple[str, int],
    preempted: Sequence[str] = (),
    blocks: Sequence[int] = range(100),
) -> Step:
    entries = dict(scheduled)
    return connector.build_step(entries, preempted=preempted, block_ids=lambda _: blocks)


# --- introductions


def test_ranks_that_register_anew_are_introduced_anew() -> None:
    """Before the first introduction nothing is offered; afterwards tickets name the latest registration."""
    connector = scheduler(introduce=False)
    connector.add(producer(10))
    assert step_of(connector, ("r", 10)) == Step()
    assert connector.request_finished("r", completed=True) == Finished(False, None)
    connector.introduce(INTRODUCTION)
    now = msgspec.structs.replace(INTRODUCTION.first, incarnation="of-now")
    connector.introduce(msgspec.structs.replace(INTRODUCTION, ranks=(now,)))
    connector.add(producer(10, "after"))
    step_of(connector, ("after", 10))
    params = connector.request_finished("after", completed=True).params
    assert params is not None
    assert Ticket.from_params(params).first.incarnation == "of-now"


# --- consuming


@each(
    ("prompt", "offered", "computed", "least", "missing"),
    [
        (10, 10, 0, 1, (7, 8, 9)),
        (10, 10, 4, 1, (8, 9)),
        (10, 10, 8, 1, (9,)),
        (12, 12, 12, 1, ()),  # a full local hit
        (12, 8, 0, 1, (7, 8)),  # the producer has only part of it
        (12, 8, 4, 1, (8,)),
        (12, 8, 8, 1, ()),
        (12, 8, 12, 1, ()),
        (12, 12, 4, 5, (8, 9)),
        (12, 12, 8, 5, ()),  # few tokens are computed
        (8, 12, 0, 1, ()),  # not this prompt
        (3, 0, 0, 1, ()),  # an offer of nothing
    ],
)
def test_what_is_not_computed_comes_from_remote(
    prompt: int, offered: int, computed: int, least: int, missing: tuple[int, ...]
) -> None:
    """If nothing is read, the producer is notified."""
    connector = scheduler(fetch_tokens_min=least)
    ticket = ticket_of(offered)
    connector.add(consumer(prompt, ticket))
    expected = (offered - computed, True) if missing else (0, False)
    for _ in range(3):  # asking has no side effects
        assert connector.num_new_matched_tokens("r", computed) == expected
    assert connector.state_of("r") is ConsumerState.EXPECTED
    step = step_of(connector)
    assert step == Step(keep=step.keep)
    connector.update_after_alloc("r", [7, 8, 9], expected[0])
    step = step_of(connector)
    received = [(receive.request_id, receive.tickets, receive.block_tables) for receive in step.receive]
    assert received == [("r", (ticket,), (missing,))] * expected[1]
    assert len(step.release) == (offered > 0 and not missing)
    assert step_of(connector) == Step()


@each("full_blocks_only", [False, True])
def test_a_ticket_is_for_the_prompt_that_was_computed(full_blocks_only: bool) -> None:
    """Not for another prompt of the same length. A longer prompt with the same beginning may use it."""
    connector = scheduler(full_blocks_only=full_blocks_only)
    connector.add(producer(10))
    step_of(connector, ("r", 10))
    params = connector.request_finished("r", completed=True).params
    assert params is not None
    assert params["kvflow"]["prompt_digest"] != ""
    offered = 8 if full_blocks_only else 10
    for number, (tokens, fits) in enumerate(
        [(range(10), True), (range(12), True), (range(1, 11), False), ([*range(9), 99], full_blocks_only), (None, True)]
    ):
        request = Request(f"c{number}", 10 if tokens is None else len(tokens), params, tokens)
        connector = scheduler()
        if fits:
            connector.add(request)
            assert connector.num_new_matched_tokens(f"c{number}", 0) == (offered, True)
        else:
            with pytest.raises(PromptMismatch, match=f"'c{number}'.*{offered} tokens"):
                connector.add(request)
            assert connector.state_of(f"c{number}") is None


@each(("external", "blocks"), [(12, 3), (9, 3), (1, 3), (10, 2)])
def test_other_numbers_than_were_matched_are_refused(external: int, blocks: int) -> None:
    connector = scheduler()
    connector.add(consumer(10, ticket_of(10)))
    with pytest.raises(UsageError, match=f"'r': {external} of 10 offered tokens"):
        connector.update_after_alloc("r", range(blocks), external)
    assert connector.state_of("r") is ConsumerState.EXPECTED


def test_a_ticket_is_used_once() -> None:
    """After its load, failed or not, the request may be preempted: its prompt is computed then."""
    connector = scheduler()
    connector.add(consumer(10, ticket_of(10)))
    connector.update_after_alloc("r", [7, 8, 9], 10)
    assert connector.num_new_matched_tokens("r", 0) == (0, False)
    step_of(connector)
    connector.update_from_workers(received=["r"])
    assert connector.num_new_matched_tokens("r", 0) == (0, False)
    connector.update_after_alloc("r", [1, 2, 3], 0)
    assert step_of(connector, ("r", 10), preempted=["r"]) == Step()
    assert connector.request_finished("r", completed=True) == Finished(False, None)
    assert connector.open_requests == 0


def test_a_second_request_with_a_ticket_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another sample, or another try after the lease has ended well: it is computed, without an error."""
    monkeypatch.setattr("kvflow.connector.consumers._USED_TICKETS_MAX", 2)
    connector = scheduler()
    for request_id, ticket in [("a", "one"), ("b", "one"), ("c", "two"), ("d", "three"), ("e", "three"), ("f", "one")]:
        used = pytest.raises(RequestError, match=f"'{request_id}'.*used") if request_id in "be" else nullcontext()
        with used:
            connector.add(consumer(9, ticket_of(8, request_id=ticket), request_id))
    assert [connector.num_new_matched_tokens(one, 0)[0] for one in "abcdef"] == [8, 0, 8, 8, 0, 8]
    connector.update_after_alloc("b", [0, 1, 2], 0)
    connector.request_finished("b", completed=True)
    step = step_of(connector)
    assert [*step.keep] == ["a", "c", "d", "f"]
    assert step.release == []


@each("again", [False, True])
def test_a_ticket_of_another_prompt_is_left_to_whose_it_is(again: bool) -> None:
    """A list of prompts has one ticket: the others' requests may come before the right one, and after."""
    ticket = INTRODUCTION.without_leases(
        request_id="remote", block_ids=[0, 1], num_tokens=8, ttl_s=9.0, prompt_digest=prompt_digest("remote", range(8))
    )
    connector = scheduler(release_failed_loads=not again)
    with pytest.raises(PromptMismatch):
        connector.add(Request("r", 8, ticket.to_params(), range(1, 9)))
    assert step_of(connector) == Step()
    assert connector.open_requests == 0
    connector.add(Request("right", 8, ticket.to_params(), range(8)))
    connector.update_after_alloc("right", [7, 8], 8)
    with pytest.raises(PromptMismatch):
        connector.add(Request("other", 8, ticket.to_params(), range(1, 9)))
    step = step_of(connector)
    assert step.release == []
    assert [receive.release_if_failed for receive in step.receive] == [not again]


PICTURE = {2: [("mm", "red")]}


@each("ours", [{}, {2: [("mm", "blue")]}, {2: [("mm", "red")], 0: [("lora", "one", "/one")]}])
@each("cached", [0, 4, 8])
def test_a_request_that_has_lost_its_picture_is_neither_loaded_nor_computed(ours: MarkKeys, cached: int) -> None:
    """Whatever is cached here, its load fails. The ticket stays for the request with the picture."""
    digest = prompt_digest("remote", marked_by_keys(range(8), PICTURE))
    ticket = INTRODUCTION.without_leases(
        request_id="remote", block_ids=[0, 1], num_tokens=8, ttl_s=9.0, prompt_digest=digest
    )
    connector, prompt = scheduler(), marked_by_keys(range(9), ours)
    connector.add(Request("r", 9, ticket.to_params(), prompt))
    refusal = connector.refusal("r")
    assert refusal is not None
    assert refusal.parts == (("adapter",) if 0 in ours else ("pictures",))
    matched, _ = connector.num_new_matched_tokens("r", cached)
    assert (matched or 0) > 0, "it would be computed"
    connector.update_after_alloc("r", [7, 8, 9], matched or 0)
    connector.add(Request("right", 9, ticket.to_params(), marked_by_keys(range(9), PICTURE)))
    assert connector.refusal("right") is None
    step = step_of(connector)
    (receive,) = step.receive
    assert (receive.block_tables, receive.shared, receive.release_if_failed) == (((),), True, False)
    carried = with_marks(receive.prompt, receive.marks) or []
    assert list(carried) == prompt[:8]
    with pytest.raises(PromptMismatch):
        check_prompt(receive.tickets[0], carried, "load")
    assert [*step.keep] == ["right"]
    assert connector.request_finished("r", completed=False) == Finished(True, None)
    step = step_of(connector)
    assert (step.release, step.abandon) == ([], ["r"])
    connector.update_from_workers(received=["r"])
    assert connector.state_of("r") is None


def test_what_a_load_has_found_out_is_a_refusal_until_the_request_ends() -> None:
    """The ticket of a prompt that is to flow does not tell which it is of."""
    connector, error = scheduler(), PromptMismatch("without its pictures", parts=("pictures",))
    connector.add(consumer(8, Ticket.rendezvous(INTRODUCTION, "name")))
    connector.update_after_alloc("r", [1, 2], 8)
    assert connector.refusal("r") is None
    connector.update_from_workers(received=["r"])
    connector.refuse([("r", error), ("unknown", error)])
    assert connector.refusal("r") is error
    connector.request_finished("r", completed=False)
    assert (connector.refusal("r"), connector.refusal("unknown")) == (None, None)


def test_marks_of_a_prompt_that_flows_reach_the_workers() -> None:
    connector, prompt = scheduler(), marked_by_keys(range(8), PICTURE)
    params = producer_params(Ticket.rendezvous(INTRODUCTION, "name"))
    connector.add(Request("p", 8, params, prompt))
    ticket = Ticket.rendezvous(INTRODUCTION, "other")
    connector.add(Request("c", 8, ticket.to_params(), prompt))
    connector.update_after_alloc("c", [1, 2], 8)
    step = step_of(connector, ("p", 4))
    step = msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Step)
    for sent in (*step.save, *step.receive):
        assert prompt_digest("name", with_marks(sent.prompt, sent.marks) or []) == prompt_digest("name", prompt)


def test_only_readers_that_wait_elsewhere_are_sent_on() -> None:
    """An engine is known by its id, its DP rank and an address: two servers may have been given one id."""
    place = INTRODUCTION.first
    moved = msgspec.structs.replace(INTRODUCTION, ranks=(msgspec.structs.replace(place, port=place.port + 1),))
    restarted = msgspec.structs.replace(INTRODUCTION, ranks=(msgspec.structs.replace(place, incarnation="another"),))
    others = [
        msgspec.structs.replace(INTRODUCTION, **{name: value}) for name, value in (("engine_id", "e"), ("dp_rank", 3))
    ]
    for known, sent_on in (
        (INTRODUCTION, False),
        (restarted, False),
        (moved, True),
        (others[0], True),
        (others[1], True),
    ):
        connector, rendezvous = scheduler(), Ticket.rendezvous(known, "name", ttl_s=7.0)
        connector.add(Request("r", 10, producer_params(rendezvous), range(10)))
        step = step_of(connector, ("r", 4))
        assert [one.waiting_at for one in step.decline] == [rendezvous] * sent_on
        assert [one.instead for one in step.decline] == [Ticket.rendezvous(INTRODUCTION, "name", ttl_s=7.0)] * sent_on
        assert [save.serve_id for save in step.save] == ["name"]
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Step) == step


@each("awaited", [7, {}, [], Ticket.rendezvous(any_ticket(), "other").to_params(), any_ticket().to_params()])
def test_who_is_awaited_has_to_be_a_rendezvous_of_the_prompt(awaited: Any) -> None:
    params = producer_params(Ticket.rendezvous(INTRODUCTION, "name"))
    with pytest.raises(RequestError):
        scheduler().add(Request("r", 10, {**params, "kvflow": {**params["kvflow"], "awaited": awaited}}, range(10)))
    named = {**params, "kvflow": {"rendezvous": "name"}}
    connector = scheduler()
    connector.add(Request("r", 10, named, range(10)))
    assert step_of(connector, ("r", 10)).decline == []


WAIT, ALL, REST, NOTHING = (None, False), (10, True), (2, True), (0, False)


def samples(connector: ConnectorScheduler, names: str = "abc") -> None:
    """Requests that share a ticket."""
    for name in names:
        connector.add(consumer(10, ticket_of(10), name), sharing=Sharing.SAMPLES)


def matched(connector: ConnectorScheduler, names: str = "abc", computed: int = 0) -> list[tuple[int | None, bool]]:
    return [connector.num_new_matched_tokens(name, computed) for name in names]


def release_count(connector: ConnectorScheduler) -> int:
    """How often a step tells the producer that its blocks are free."""
    step = step_of(connector)
    assert all(release.tickets[0].request_id == "remote" for release in step.release)
    return sum(release.last for release in step.release)


@each("computed", [0, 8])
def test_samples_wait_for_the_first_load_and_read_what_it_has_left(computed: int) -> None:
    """With a prefix cache that is the last block, partly filled; without it is all."""
    connector = scheduler()
    samples(connector)
    for _ in range(2):
        assert matched(connector) == [ALL, WAIT, WAIT]
    connector.update_after_alloc("a", [1, 2, 3], 10)
    assert matched(connector) == [NOTHING, WAIT, WAIT]
    step = step_of(connector)
    assert [(receive.request_id, receive.shared) for receive in step.receive] == [("a", True)]
    assert [*step.keep] == ["b", "c"], "each keeps the lease until it has read"
    connector.update_from_workers(received=["a"])
    assert matched(connector, computed=computed) == [NOTHING, *[REST if computed else ALL] * 2]
    for name in "bc":
        connector.update_after_alloc(name, [1, 2, 4], 10 - computed)
    assert [len(receive.block_tables[0]) for receive in step_of(connector).receive] == [1 if computed else 3] * 2
    connector.update_from_workers(received=["c"])
    connector.request_finished("a", completed=True)
    assert release_count(connector) == 0
    connector.update_from_workers(received=["b"])
    assert release_count(connector) == 1
    with pytest.raises(RequestError, match="'d': another request has used its ticket"):
        samples(connector, "d")


@each("loading", [False, True])
def test_if_the_first_sample_is_aborted_the_next_one_is_the_first(loading: bool) -> None:
    connector = scheduler()
    samples(connector)
    if loading:
        connector.update_after_alloc("a", [1, 2, 3], 10)
        step_of(connector)
    assert connector.request_finished("a", completed=False).hold_blocks == loading
    assert matched(connector, "bc") == [ALL, WAIT]
    assert connector.request_finished("c", completed=False) == Finished(False, None)
    connector.update_after_alloc("b", [4, 5, 6], 10)
    step = step_of(connector)
    assert step.abandon == ["a"] * loading
    assert [(release.request_id, release.last) for release in step.release] == [
        *([] if loading else [("a", False)]),
        ("c", False),
    ], "what was kept for them is let go"
    connector.update_from_workers(received=["b"])
    assert release_count(connector) == (not loading), "the blocks of the abandoned one are still written"
    connector.update_from_workers(received=["a"])
    assert release_count(connector) == loading


@each("fails_its_request", [False, True])
def test_a_load_that_fails_sends_the_other_samples_to_try_for_themselves(fails_its_request: bool) -> None:
    """All samples try at once: a peer that does not answer costs one timeout, however many samples there are."""
    connector = scheduler()
    samples(connector)
    connector.update_after_alloc("a", [1, 2, 3], 10)
    step_of(connector)
    if fails_its_request:
        connector.request_finished("a", completed=False)
    connector.update_from_workers(received=["a"])
    assert matched(connector, "bc") == [ALL, ALL]
    for name in "bc":
        connector.update_after_alloc(name, [4, 5, 6], 10)
    connector.update_from_workers(received=["b", "c"])
    assert release_count(connector) == 1


def test_samples_that_vllm_has_spread_over_engines_do_not_use_the_ticket_twice() -> None:
    """Two engines cannot compare what they have read, so only the first sample has the ticket."""
    connector, other = scheduler(), scheduler()
    connector.add(consumer(10, ticket_of(10), "a"), sharing=Sharing.SAMPLES)
    connector.add(consumer(10, ticket_of(10), "c"), sharing=Sharing.SAMPLES_ELSEWHERE)
    assert matched(connector, "ac") == [ALL, WAIT]
    for name in "bd":
        with pytest.raises(RequestError, match=f"'{name}': another .* its ticket"):
            other.add(consumer(10, ticket_of(10), name), sharing=Sharing.SAMPLES_ELSEWHERE)


@each(("before", "notified"), [("", True), ("another ticket", True), ("its ticket", False)])
def test_a_rejected_request_gives_back_what_nobody_has_had(before: str, notified: bool) -> None:
    """It is no prompt of its own: nothing is compared, and nothing is left of it."""
    connector, ticket = scheduler(), ticket_of(1, request_id="its ticket")
    ticket = msgspec.structs.replace(ticket, prompt_digest=prompt_digest(ticket.request_id, [7]))
    if before:
        connector.add(Request("before", 2, ticket_of(1, request_id=before).to_params(), [7, 8]))
    connector.reject(Request("r", 1, ticket.to_params(), [0]))
    assert [release.request_id for release in step_of(connector).release] == ["r"] * notified
    assert connector.request_finished("r", completed=False) == Finished(False, None)
    assert connector.open_requests == bool(before)
    with pytest.raises(RequestError, match="another request has used"):
        connector.add(Request("again", 1, ticket.to_params(), [7]))


TEN = ticket_of(10).to_params()


@each(
    ("params", "problem"),
    [
        ({**TEN, "remote_block_ids": [["1", 2, 3]]}, "remote_block_ids"),
        (params_of_several([TEN, ticket_of(9).to_params()]), r"offers 10 tokens, .* 9"),
        *(({**TEN, "kvflow": {**TEN["kvflow"], "others": other}}, "others") for other in (7, [7], [{}] * 16)),
    ],
)
def test_a_ticket_that_cannot_be_right_is_refused_and_forgotten(params: dict[str, Any], problem: str) -> None:
    connector = scheduler()
    with pytest.raises(RequestError, match=problem):
        connector.add(Request("r", 10, params))
    assert connector.num_new_matched_tokens("r", 0) == (0, False)
    assert connector.request_finished("r", completed=True) == Finished(False, None)


def of_prompt(name: str, prompt: Sequence[int]) -> Ticket:
    return msgspec.structs.replace(ticket_of(10, request_id=name), prompt_digest=prompt_digest(name, prompt))


@each("wrong", range(3))
def test_each_ticket_of_a_request_is_compared_with_its_prompt(wrong: int) -> None:
    """If a source fails the next one is read: it has to be of this prompt, too."""
    connector, other = scheduler(), list(range(100, 110))
    tickets = [of_prompt(f"from {at}", other if at == wrong else range(10)) for at in range(3)]
    with pytest.raises(PromptMismatch, match=f"'from {wrong}'"):
        connector.add(Request("r", 11, params_of_several([one.to_params() for one in tickets]), range(11)))
    assert connector.num_new_matched_tokens("r", 0) == (0, False)


@each("count", [0, 17])
def test_parameters_of_no_engine_or_too_many_are_refused(count: int) -> None:
    with pytest.raises(RequestError, match=f"{count} tickets, expected 1 to 16"):
        params_of_several([TEN] * count)


@each(
    ("params", "roles"),
    [
        *((params, {}) for params in (None, {}, {"do_remote_prefill": False}, {"do_remote_decode": False})),
        (PREFILL, {"produces": False}),
        (ticket_of(10).to_params(), {"consumes": False}),
    ],
)
def test_requests_that_nothing_is_to_be_done_for_pass_by(params: dict[str, Any] | None, roles: dict[str, bool]) -> None:
    """Plain ones, and those in a role that the engine does not have."""
    connector = scheduler(**roles)
    connector.add(Request("r", 10, params))
    assert connector.open_requests == 0
    assert connector.num_new_matched_tokens("r", 0) == (0, False)
    connector.update_after_alloc("r", [1, 2, 3], 0)
    assert step_of(connector, ("r", 10)) == Step()
    assert connector.request_finished("r", completed=True) == Finished(False, None)


# --- producing


def test_a_prompt_is_saved_when_complete_and_sent_when_finished() -> None:
    connector = scheduler()
    for request_id in ("r", "other"):
        connector.add(producer(10, request_id))
    assert step_of(connector, ("r", 4)) == Step()
    (save,) = step_of(connector, ("r", 10), blocks=[4, 5, 6, 7]).save
    assert (save.request_id, save.block_tables, save.num_tokens, save.ttl_s) == ("r", ((4, 5, 6),), 10, 10.0)
    assert [one.request_id for one in step_of(connector, ("r", 11), ("other", 10)).save] == ["other"], "saved once"
    finished = connector.request_finished("r", completed=True)
    assert finished.hold_blocks
    assert finished.params is not None
    ticket = Ticket.from_params(finished.params)
    assert (ticket.request_id, ticket.block_ids, ticket.num_tokens) == (save.serve_id, (4, 5, 6), 10)
    assert (ticket.engine_id, ticket.ttl_s, ticket.first.lease_id) == ("prefill", 10.0, "")
    assert step_of(connector).send == ["r"]
    connector.withdraw_all()
    assert step_of(connector).withdraw == ["r"], "nobody has the other's ticket"
    assert connector.blocks_held("r")
    connector.update_from_workers(sent=["r"])
    assert (connector.open_requests, connector.state_of("other")) == (1, ProducerState.SAVED)


def test_a_prompt_with_a_lease_that_ended_before_its_request_gets_no_ticket() -> None:
    """For example since the engine has too many leases. Its blocks are free with the request, and it is not retried."""
    connector = scheduler()
    connector.add(producer(10))
    step_of(connector, ("r", 10))
    connector.update_from_workers(sent=["r"])
    assert step_of(connector, ("r", 11)) == Step(withdraw=["r"])
    assert connector.request_finished("r", completed=True) == Finished(False, None)
    connector.update_from_workers(sent=["r"])


def test_preempted_after_its_prompt_the_lease_is_withdrawn_and_the_next_has_a_secret_of_its_own() -> None:
    connector = scheduler()
    connector.add(producer(10))
    first = step_of(connector, ("r", 10)).save[0]
    assert step_of(connector, preempted=["r"]) == Step(withdraw=["r"])
    again = step_of(connector, ("r", 10)).save[0]
    assert (first.serve_id, again.serve_id) == ("r#secret0", "r#secret1")
    assert connector.request_finished("r", completed=False) == Finished(False, None)


def test_reports_that_nobody_waits_for_change_nothing() -> None:
    connector = scheduler()
    connector.add(producer(10))
    connector.add(consumer(10, ticket_of(10), "c"))
    connector.update_from_workers(received=["r", "c", "unknown"], sent=["r", "c", "unknown"])
    assert (connector.state_of("r"), connector.state_of("c")) == (ProducerState.COMPUTING, ConsumerState.EXPECTED)


def test_a_request_with_a_pending_ticket_waits_for_its_offer_without_blocks() -> None:
    """With `late_blocks`; one with another ticket gets its blocks at once."""
    connector = scheduler(late_blocks=True)
    connector.add(consumer(10, Ticket.rendezvous(INTRODUCTION, "pending"), "p"))
    connector.add(consumer(10, ticket_of(10), "t"))
    assert matched(connector, "pt") == [(None, False), (10, True)]
    step = step_of(connector)
    assert (set(step.keep), step.await_offers) == ({"p", "t"}, ["p"])
    assert step_of(connector).await_offers == []
    assert connector.num_new_matched_tokens("p", 4) == (None, False)
    assert connector.num_new_matched_tokens("p", 10) == (0, False), "all is cached: there is nothing to wait for"
    connector.update_from_workers(offered=["p", "unknown"])
    assert connector.num_new_matched_tokens("p", 4) == (6, True)
    usual = scheduler()
    usual.add(consumer(10, Ticket.rendezvous(INTRODUCTION, "pending"), "p"))
    assert matched(usual, "p") == [(10, True)]
    assert step_of(usual).await_offers == []


def test_an_id_is_used_once_at_a_time() -> None:
    connector = scheduler()
    connector.add(producer(10))
    with pytest.raises(UsageError, match="'r': a request with this id has not ended"):
        connector.add(producer(10))


def test_a_step_survives_its_way_to_the_workers() -> None:
    connector = scheduler()
    connector.add(producer(10))
    connector.add(consumer(10, ticket_of(10), "c"))
    connector.update_after_alloc("c", [7, 8, 9], 10)
    step = step_of(connector, ("r", 10))
    assert step.save
    assert step.receive
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Step) == step


# --- a whole engine


NULL = 0
"""The block that stands in front of a window in an engine's table."""
FULL = GroupFacts(name="full", block_size=4)
LOCAL = GroupFacts(name="local", block_size=2, kind=GroupKind.SLIDING, window=5)
CHUNKED = GroupFacts(name="chunked", block_size=4, kind=GroupKind.CHUNKED, window=6)
STATE = GroupFacts(name="state", block_size=1, kind=GroupKind.STATE)
MODELS = ((), (FULL, LOCAL), (FULL, STATE), (FULL, LOCAL, CHUNKED, STATE), (CHUNKED,))


def span_of(group: GroupFacts, tokens: int) -> range:
    """Return the blocks of a group that are needed after `tokens` computed tokens."""
    if group.kind is GroupKind.STATE:
        return range(min(tokens, 1))
    return range(group.first_needed(tokens) // group.block_size, -(-tokens // group.block_size))


def grouped_ticket(groups: Sequence[GroupFacts], num_tokens: int, request_id: str) -> Ticket:
    if not groups:
        return ticket_of(num_tokens, request_id=request_id)
    introduction = msgspec.structs.replace(INTRODUCTION, groups=tuple(groups), more_block_ids=((),) * (len(groups) - 1))
    ids = [[*span_of(group, num_tokens)] for group in groups]
    return introduction.without_leases(
        request_id=request_id, block_ids=ids if len(ids) > 1 else ids[0], num_tokens=num_tokens, ttl_s=9.0
    )


class JobState(enum.Enum):
    WAITING = enum.auto()
    PARKED = enum.auto()
    RUNNING = enum.auto()
    COMPUTED = enum.auto()
    FINISHED = enum.auto()


UNFINISHED = [state for state in JobState if state is not JobState.FINISHED]


@dataclass
class Job:
    """A request as the model's engine sees it."""

    request: Request
    ticket: Ticket | None
    shares: bool = False
    tables: list[list[int]] = field(default_factory=list)
    computed: int = 0
    running: bool = False
    parked: bool = False  # its load is under way
    finished: bool = False

    @property
    def state(self) -> JobState:
        if self.finished or self.parked:
            return JobState.FINISHED if self.finished else JobState.PARKED
        if self.running:
            return JobState.COMPUTED if self.computed >= self.request.num_prompt_tokens else JobState.RUNNING
        return JobState.WAITING

    @property
    def blocks(self) -> set[int]:
        return {block for table in self.tables for block in table} - {NULL}


class Engine(RuleBasedStateMachine):
    """An engine's scheduler with a pool of blocks, workers that end loads and leases at any time, and a connector.

    No load may write to a block that the engine has taken back, and no ticket may give access to it. A ticket leads to
    the prompt in its blocks, also if the request has gone on: windows move, and a state changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ids = itertools.count()
        self.holds: dict[int, object] = {}  # what each block holds
        self.alive: dict[str, Job] = {}
        self.preempted: list[str] = []
        # The workers.
        self.loads: dict[str, set[int]] = {}
        self.leases: dict[str, dict[int, tuple[Request, int, int]]] = {}  # each block, and what it has to hold
        self.tickets_out: set[str] = set()  # leases whose ticket the router has
        self.awaited: set[str] = set()  # requests that the workers know to be sent
        self.notified: dict[str, int] = {}  # how often each producer was told that its blocks are free
        self.offered: set[str] = set()  # tickets
        self.kept: set[str] = set()  # requests whose tickets' leases the workers keep
        self.flowing: set[str] = set()  # leases that grow, or have grown
        self.recalled: set[str] = set()  # those of them whose blocks the engine has taken: the next step says so
        self.names: set[str] = set()  # that readers wait for

    @initialize(num_blocks=st.integers(4, 20), groups=st.sampled_from(MODELS))
    def start(self, num_blocks: int, groups: tuple[GroupFacts, ...]) -> None:
        self.free = set(range(1, 1 + num_blocks))
        self.num_blocks = num_blocks
        self.connector = scheduler(groups=groups, fetch_tokens_min=3)
        self.given = groups
        self.groups = groups or (FULL,)

    # Requests come, and go.

    @rule(tokens=st.integers(1, 14))
    def a_prompt_to_produce(self, tokens: int) -> None:
        self.add_request(producer(tokens, f"p{next(self.ids)}"), None)

    @rule(tokens=st.integers(1, 14))
    def a_prompt_that_is_read_meanwhile(self, tokens: int) -> None:
        name = f"f{next(self.ids)}"
        self.names.add(name)
        self.add_request(flowing(tokens, name, name), None)

    @rule(tokens=st.integers(1, 14), offered=st.integers(0, 16), samples=st.integers(1, 3))
    def a_prompt_to_receive(self, tokens: int, offered: int, samples: int) -> None:
        ticket = grouped_ticket(self.given, offered, f"t{next(self.ids)}")
        if offered:
            self.offered.add(ticket.request_id)
        for _ in range(samples):
            request = consumer(tokens, ticket, f"c{next(self.ids)}")
            self.add_request(request, ticket, Sharing.SAMPLES if samples > 1 else Sharing.ALONE)

    @rule(tokens=st.integers(1, 14))
    def a_prompt_to_receive_while_it_is_computed(self, tokens: int) -> None:
        request_id = f"g{next(self.ids)}"
        ticket = Ticket.rendezvous(grouped_ticket(self.given, 0, "introduction"), request_id)
        self.offered.add(request_id)
        self.add_request(consumer(tokens, ticket, request_id), ticket)

    @precondition(lambda engine: engine.sharing())
    @rule(data=st.data())
    def another_sample(self, data: st.DataObject) -> None:
        """While an earlier sample needs the ticket, or too late."""
        job = self.alive[data.draw(st.sampled_from(self.sharing()))]
        assert job.ticket is not None
        request = consumer(job.request.num_prompt_tokens, job.ticket, f"c{next(self.ids)}")
        readers = [name for name, other in self.alive.items() if other.ticket is job.ticket]
        states = {self.connector.state_of(name) for name in readers}
        needed = states & {ConsumerState.EXPECTED, ConsumerState.RECEIVING, ConsumerState.ABANDONED}
        with nullcontext() if needed else pytest.raises(RequestError, match="has used its ticket"):
            self.add_request(request, job.ticket, Sharing.SAMPLES_ELSEWHERE)

    def sharing(self) -> list[str]:
        """Return the requests with a shared ticket that offers blocks, including requests that no longer need it."""
        return sorted(
            name for name, job in self.alive.items() if job.shares and job.ticket is not None and job.ticket.num_tokens
        )

    def add_request(self, request: Request, ticket: Ticket | None, sharing: Sharing = Sharing.ALONE) -> None:
        self.connector.add(request, sharing=sharing)
        self.alive[request.request_id] = Job(request, ticket, shares=sharing is not Sharing.ALONE)

    def requests_in(self, *states: JobState) -> list[str]:
        """Requests in one of these states."""
        return sorted(request_id for request_id, job in self.alive.items() if job.state in states)

    @precondition(lambda engine: engine.requests_in(JobState.COMPUTED))
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.requests_in(JobState.COMPUTED))), completed=True)

    @precondition(lambda engine: engine.requests_in(*UNFINISHED))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.requests_in(*UNFINISHED))), completed=False)

    def end(self, request_id: str, *, completed: bool) -> None:
        job = self.alive[request_id]
        tables = self.tables_of(request_id) if job.tables else None
        finished = self.connector.request_finished(request_id, completed=completed, block_ids=tables)
        assert finished.hold_blocks == self.connector.blocks_held(request_id)
        assert finished.hold_blocks >= job.parked, "a load may still write"
        job.finished, job.running = True, False
        if finished.params is not None:
            assert completed
            assert finished.hold_blocks
            self.tickets_out.add(request_id)
        assert finished.hold_blocks >= (request_id in self.tickets_out & self.leases.keys()), "it can be read"
        if not finished.hold_blocks:
            self.take_back(job)

    def take_back(self, job: Job) -> None:
        """Give the blocks back to the pool. From now on no load may write to them, and no ticket may lead to them."""
        self.give_back(job.blocks)
        job.tables = []
        if job.finished:
            del self.alive[job.request.request_id]

    def give_back(self, blocks: set[int]) -> None:
        for request_id, written in self.loads.items():
            assert not blocks & written, f"{request_id} is still being loaded"
        for request_id in self.tickets_out & self.leases.keys():
            if not blocks & self.leases[request_id].keys():
                continue
            assert request_id in self.flowing, f"{request_id} can still be read"
            assert not self.alive[request_id].finished
            self.recalled.add(request_id)
            self.tickets_out.remove(request_id)
        self.free |= blocks

    def tables_of(self, request_id: str) -> list[list[int]] | list[int]:
        """As an engine gives them."""
        tables = self.alive[request_id].tables
        return tables if len(self.given) > 1 else tables[0]

    def cover(self, job: Job, tokens: int) -> bool:
        """Take blocks for `tokens` tokens, without the blocks in front of windows. Return False if too few are free."""
        spans = [span_of(group, tokens) for group in self.groups]
        for table, span in zip(job.tables, spans, strict=True):
            behind = table[: span.start]
            self.give_back({*behind} - {NULL})
            table[: span.start] = [NULL] * len(behind)
        wanted = [
            (table, index >= span.start)
            for table, span in zip(job.tables, spans, strict=True)
            for index in range(len(table), span.stop)
        ]
        if sum(needed for _, needed in wanted) > len(self.free):
            return False
        for table, needed in wanted:
            table.append(self.free.pop() if needed else NULL)
        return True

    def compute(self, job: Job, tokens: int) -> None:
        """Note that the job's blocks hold the first `tokens` tokens."""
        for at, (group, table) in enumerate(zip(self.groups, job.tables, strict=True)):
            for index, block in enumerate(table):
                self.holds[block] = (job.request, at, tokens if group.kind is GroupKind.STATE else index)
        job.computed = tokens

    # The scheduler.

    @precondition(lambda engine: engine.requests_in(JobState.WAITING))
    @rule(data=st.data(), cached_blocks=st.integers(0, 3), use_remote=st.booleans())
    def schedule(self, data: st.DataObject, cached_blocks: int, use_remote: bool) -> None:
        self.begin(data.draw(st.sampled_from(self.requests_in(JobState.WAITING))), cached_blocks, use_remote)

    @rule(tokens=st.integers(5, 14), cached_blocks=st.integers(1, 3))
    def a_cached_prompt_that_is_read_meanwhile(self, tokens: int, cached_blocks: int) -> None:
        name = f"f{next(self.ids)}"
        self.names.add(name)
        self.add_request(flowing(tokens, name, name), None)
        self.begin(name, cached_blocks, use_remote=False)

    def begin(self, request_id: str, cached_blocks: int, use_remote: bool) -> None:
        job = self.alive[request_id]
        prompt = job.request.num_prompt_tokens
        computed = min(cached_blocks, (prompt - 1) // BLOCK_SIZE) * BLOCK_SIZE
        matched = self.connector.num_new_matched_tokens(request_id, computed)
        assert matched == self.connector.num_new_matched_tokens(request_id, computed)
        if matched[0] is None:
            self.another_one_goes_ahead(job)
            return
        assert matched[0] == 0 or matched[1]
        assert computed + matched[0] <= prompt
        external = matched[0] if use_remote else 0
        job.tables = [[] for _ in self.groups]
        if not self.cover(job, max(computed + external, 1)):
            job.tables = []
            return
        self.compute(job, computed + external)
        self.connector.update_after_alloc(request_id, self.tables_of(request_id), external)
        job.parked, job.running = external > 0, external == 0

    def another_one_goes_ahead(self, waits: Job) -> None:
        """A request that waits for another request's load waits for a load that is under way or will be started."""
        assert waits.shares
        others = [name for name, job in self.alive.items() if job.ticket is waits.ticket and job is not waits]
        asked = [self.connector.num_new_matched_tokens(name, 0)[0] for name in others]
        assert any(self.alive[name].parked or tokens for name, tokens in zip(others, asked, strict=True))

    @precondition(lambda engine: engine.requests_in(JobState.RUNNING, JobState.COMPUTED))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.requests_in(JobState.RUNNING, JobState.COMPUTED)))
        job = self.alive[request_id]
        job.running, job.computed = False, 0
        self.preempted.append(request_id)
        # The lease of a complete prompt may be open still, but nobody has its ticket.
        self.take_back(job)

    @rule(tokens=st.integers(1, 16), answer=st.integers(0, 5))
    def step(self, tokens: int, answer: int) -> None:
        """So many tokens are computed, of a prompt or of an answer."""
        scheduled: dict[str, int] = {}
        cached = {request_id: job.computed for request_id, job in self.alive.items()}
        for request_id, job in self.alive.items():
            left = job.request.num_prompt_tokens - job.computed
            more = min(tokens, left) if left > 0 else answer
            if job.running and more and self.cover(job, job.computed + more):
                self.compute(job, job.computed + more)
                scheduled[request_id] = job.computed
        step = self.connector.build_step(scheduled, preempted=self.preempted, block_ids=self.tables_of, cached=cached)
        self.preempted = []
        for save in step.save_cached:
            assert 0 < save.computed_tokens <= cached[save.request_id], "of earlier steps"  # type: ignore[operator]
        self.work(step)
        waiting = {
            request_id
            for request_id, job in self.alive.items()
            if self.connector.state_of(request_id) is ConsumerState.EXPECTED
            and job.ticket is not None
            and (
                job.ticket.awaited
                or 0 < job.ticket.num_tokens <= job.request.num_prompt_tokens - (STATE in self.groups)
            )
        }
        assert self.kept - self.loads.keys() == waiting

    # The workers.

    def work(self, step: Step) -> None:
        assert set(step.recall) >= self.recalled, "before anything is done with its blocks"
        self.recalled.clear()
        for request_id in step.recall:
            self.leases.pop(request_id, None)
            self.flowing.discard(request_id)
            self.tickets_out.discard(request_id)
        for save in step.save_cached:
            self.open_lease(save)
        self.names -= {decline.serve_id for decline in step.decline}
        self.kept -= {release.request_id for release in step.release}
        assert not step.keep.keys() & (self.kept | self.loads.keys())
        self.kept |= step.keep.keys()
        for request_id in step.withdraw:
            self.leases.pop(request_id, None)
        for receive in step.receive:
            assert receive.request_id not in self.loads
            blocks = {block for table in receive.block_tables for block in table}
            assert blocks <= self.alive[receive.request_id].blocks
            assert not any(blocks & self.leases[other].keys() for other in self.tickets_out & self.leases.keys())
            self.loads[receive.request_id] = blocks
            assert receive.shared == self.alive[receive.request_id].shares
            assert receive.tickets[0].request_id not in self.notified
            if not receive.shared:
                self.notify_producer(receive.tickets[0])
        for release in step.release:
            read = any(self.alive[name].ticket == release.tickets[0] for name in self.loads)
            assert not (read and release.last)
            if release.last:
                self.notify_producer(release.tickets[0])
        for request_id in step.abandon:
            assert request_id in self.loads
        for save in step.save:
            self.open_lease(save)
        for grow in step.grow:
            self.grow(grow)
        assert {*step.send} <= self.tickets_out | {*step.recall, *step.withdraw}
        self.awaited.update(step.send)

    def open_lease(self, save: Save) -> None:
        assert save.request_id not in self.leases
        request = self.alive[save.request_id].request
        assert save.num_tokens == request.num_prompt_tokens
        flows = save.computed_tokens is not None
        self.leases[save.request_id] = {
            block: (request, at, save.num_tokens if group.kind is GroupKind.STATE else index)
            for at, (group, table) in enumerate(zip(self.groups, save.block_tables, strict=True))
            for index, block in zip(span_of(group, save.num_tokens), table, strict=not flows)
        }
        if flows:
            self.names.remove(save.serve_id)
            self.flowing.add(save.request_id)
            self.tickets_out.add(save.request_id)

    def grow(self, grow: Grow) -> None:
        lease, request = self.leases.get(grow.request_id), self.alive[grow.request_id].request
        if lease is None:
            return  # it has ended before its prompt was complete
        prompt = request.num_prompt_tokens
        for at, (group, more) in enumerate(zip(self.groups, grow.block_tables, strict=True)):
            known, span = sum(its == at for _, its, _ in lease.values()), span_of(group, prompt)
            state, count = group.kind is GroupKind.STATE, known + len(more)
            for index, block in zip(span[known:count], more, strict=True):
                lease[block] = (request, at, prompt if state else index)
            # What a token that is there needs is there too.
            if grow.num_tokens == prompt:
                assert count == len(span)
            elif not state:
                assert count >= -(-grow.num_tokens // group.block_size) - span.start

    def notify_producer(self, ticket: Ticket) -> None:
        self.notified[ticket.request_id] = self.notified.get(ticket.request_id, 0) + 1

    @precondition(lambda engine: engine.loads)
    @rule(data=st.data(), recompute=st.booleans())
    def a_load_ends(self, data: st.DataObject, recompute: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.loads)))
        del self.loads[request_id]
        self.kept.discard(request_id)
        job = self.alive[request_id]
        job.parked = False
        self.connector.update_from_workers(received=[request_id])
        if job.finished:
            assert not self.connector.blocks_held(request_id)
            self.take_back(job)
        elif recompute:
            job.computed = 0
            self.take_back(job)  # waits for blocks again, and computes
        else:
            job.running = True

    @precondition(lambda engine: engine.tickets_out & engine.leases.keys())
    @rule(data=st.data())
    def a_lease_ends(self, data: st.DataObject) -> None:
        """A lease is read or runs out. Only leases with a known ticket end so; others end by `withdraw`."""
        del self.leases[data.draw(st.sampled_from(sorted(self.tickets_out & self.leases.keys())))]

    @rule()
    def report(self) -> None:
        """Report ended leases, once the workers know that a request waits for the report."""
        sent = sorted(self.awaited - self.leases.keys())
        self.connector.update_from_workers(sent=sent)
        for request_id in sent:
            self.awaited.discard(request_id)
            self.tickets_out.discard(request_id)
            self.take_back(self.alive[request_id])

    @rule()
    def withdraw_all(self) -> None:
        growing = {
            name for name in self.flowing & self.tickets_out & self.leases.keys() if not self.alive[name].finished
        }
        self.recalled |= growing  # the next step waits for their ends before it does anything
        self.tickets_out -= growing
        self.connector.withdraw_all()

    # What always holds.

    @invariant()
    def who_has_a_ticket_finds_the_prompt(self) -> None:
        for request_id in self.tickets_out & self.leases.keys():
            for block, expected in self.leases[request_id].items():
                assert self.holds[block] == expected, f"{request_id}: block {block}"

    @invariant()
    def no_block_is_lost_or_twice(self) -> None:
        owned = [block for job in self.alive.values() for block in job.blocks]
        assert len(owned) == len(set(owned))
        assert not set(owned) & self.free
        assert len(owned) + len(self.free) == self.num_blocks

    @invariant()
    def no_producer_is_notified_twice(self) -> None:
        assert all(count == 1 for count in self.notified.values())

    @invariant()
    def the_connector_knows_who_holds_blocks(self) -> None:
        for request_id, job in self.alive.items():
            if job.finished or job.parked:
                assert self.connector.blocks_held(request_id)
        assert self.connector.open_requests == len(self.alive)

    def teardown(self) -> None:
        """Everything ends, and nothing is left: all blocks are free, each producer of a ticket has been told."""
        for request_id in self.requests_in(*UNFINISHED):
            self.end(request_id, completed=False)
        self.step(tokens=1, answer=0)
        for request_id in list(self.loads):
            del self.loads[request_id]
            self.kept.discard(request_id)
            self.connector.update_from_workers(received=[request_id])
            self.take_back(self.alive[request_id])
        self.step(tokens=1, answer=0)
        for request_id in self.tickets_out:
            self.leases.pop(request_id, None)
        self.report()
        assert self.free == set(range(1, 1 + self.num_blocks))
        assert self.connector.open_requests == 0
        assert self.leases == {}
        assert self.names == set()
        assert self.kept == set()
        assert set(self.notified) == self.offered


TestEngine = machine_test(Engine, 60, 400, steps=40)


# --- several groups

GROUPS = (FULL, LOCAL, STATE)
GROUPED = msgspec.structs.replace(INTRODUCTION, groups=GROUPS, more_block_ids=((), ()))
OFFERED = GROUPED.without_leases(
    request_id="remote", block_ids=[[1, 2, 3, 4], [5, 6, 7], [8]], num_tokens=13, ttl_s=9.0
)


def grouped_scheduler(**changes: Any) -> ConnectorScheduler:
    made = scheduler(introduce=False, groups=GROUPS, **changes)
    made.introduce(GROUPED)
    return made


def tables_of(tokens: int) -> tuple[list[int], list[int], list[int]]:
    """The tables of a request as its engine has them: full, windowed with null blocks in front, one slot."""
    full, local = -(-tokens // 4), -(-tokens // 2)
    null = max(tokens - 5, 0) // 2
    return list(range(10, 10 + full)), [NULL] * null + list(range(30 + null, 30 + local)), [7]


def grouped_step(connector: ConnectorScheduler, tokens: int, tables: Sequence[Sequence[int]] | None = None) -> Step:
    """The prompt "r" is computed so far."""
    given = tables or tables_of(tokens)
    return connector.build_step({"r": tokens}, preempted=(), block_ids=lambda _: given)


SPLIT = msgspec.structs.replace(
    GROUPED, block_size=2, groups=(msgspec.structs.replace(FULL, block_size=2), LOCAL, STATE)
)
"""The groups of ranks with kernels that use half a block of the first group."""


BARE: dict[str, Any] = {}
WHOLE = {"full_blocks_only": True}
GROUPED_CONFIG = {"groups": GROUPS}
WITHHELD = {"groups": (FULL, LOCAL), "leave_last_token": True, "withhold_last_token": True}


@each(
    ("changes", "introduction", "tokens", "expected"),
    [
        (BARE, INTRODUCTION, 3, ((10,),)),
        (BARE, INTRODUCTION, 10, ((10, 11, 12),)),
        (WHOLE, INTRODUCTION, 3, ((),)),
        (WHOLE, INTRODUCTION, 4, ((10,),)),
        (WHOLE, INTRODUCTION, 10, ((10, 11),)),
        (GROUPED_CONFIG, GROUPED, 13, ((10, 11, 12, 13), (34, 35, 36), (7,))),  # the last five tokens are 8 to 12
        (GROUPED_CONFIG, GROUPED, 4, ((10,), (30, 31), (7,))),
        (GROUPED_CONFIG, GROUPED, 1, ((10,), (30,), (7,))),
        (GROUPED_CONFIG, SPLIT, 13, (tuple(range(20, 27)), (34, 35, 36), (7,))),  # of the last block what is filled
        (GROUPED_CONFIG, SPLIT, 4, ((20, 21), (30, 31), (7,))),
        (GROUPED_CONFIG, SPLIT, 1, ((20,), (30,), (7,))),
        (WITHHELD, grouped_ticket((FULL, LOCAL), 0, "introduction"), 13, ((10, 11, 12), (33, 34, 35))),
    ],
)
def test_a_prompt_is_offered_with_its_windows_and_its_state(
    changes: dict[str, Any], introduction: Ticket, tokens: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    """In the blocks that the ranks have registered; a last block, or token, may be the engine's own affair."""
    connector = scheduler(introduce=False, **changes)
    connector.introduce(introduction)
    connector.add(producer(tokens))
    withheld = int(changes is WITHHELD)
    tables = [[*table, *[99] * withheld] for table in tables_of(tokens - withheld)][: len(expected)]
    given = tables if len(expected) > 1 else tables[0]
    saved = connector.build_step({"r": tokens}, preempted=(), block_ids=lambda _: given).save
    finished = connector.request_finished("r", completed=True, block_ids=given)
    assert finished.hold_blocks == any(expected)
    assert finished.params is not None
    ticket = Ticket.from_params(finished.params)
    offered = tokens - tokens % BLOCK_SIZE if changes is WHOLE else tokens - withheld
    assert (ticket.block_tables, ticket.num_tokens) == (expected, offered)
    assert [(save.block_tables, save.num_tokens) for save in saved] == [(expected, offered)] * any(expected)


@each(
    ("introduction", "computed", "expected"),
    [
        (GROUPED, 0, ((10, 11, 12, 13), (34, 35, 36), (7,))),
        (GROUPED, 8, ((12, 13), (34, 35, 36), (7,))),  # what is cached ends in front of the window
        (GROUPED, 12, ((13,), (36,), (7,))),  # a part of the window is cached
        (SPLIT, 0, ((20, 21, 22, 23, 24, 25, 26), (34, 35, 36), (7,))),
        (SPLIT, 8, ((24, 25, 26), (34, 35, 36), (7,))),
        (SPLIT, 12, ((26,), (36,), (7,))),
    ],
)
def test_what_is_missing_of_each_group_is_received(
    introduction: Ticket, computed: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    connector = grouped_scheduler()
    connector.introduce(introduction)
    connector.add(consumer(14, OFFERED))
    assert connector.num_new_matched_tokens("r", computed) == (13 - computed, True)
    connector.update_after_alloc("r", tables_of(13), 13 - computed)
    (receive,) = step_of(connector).receive
    assert receive.block_tables == expected


@each(
    ("cached", "early", "grown"),
    [(0, [], []), (4, [4], [10]), (7, [7], [10]), (10, [10], []), (12, [10], [])],
)
def test_what_is_cached_of_a_prompt_that_readers_wait_for_is_offered_before_the_step(
    cached: int, early: list[int], grown: list[int]
) -> None:
    connector = scheduler()
    connector.add(flowing(10))
    step = connector.build_step({"r": 13}, preempted=(), block_ids=lambda _: range(100), cached={"r": cached})
    assert [save.computed_tokens for save in step.save_cached] == early
    assert [save.computed_tokens for save in step.save] == [10] * (not early)
    assert [grow.num_tokens for grow in step.grow] == grown
    assert not any(any(grow.block_tables) for grow in step.grow)
    assert connector.request_finished("r", completed=True).params is not None


@each("how", ["nobody waits", "a window may take blocks in this step"])
def test_what_is_cached_is_offered_with_the_step_where_it_must_be(how: str) -> None:
    groups = (CHUNKED,) if how.startswith("a window") else ()
    connector = scheduler(groups=groups)
    connector.add(flowing(8) if groups else producer(8))
    step = connector.build_step({"r": 8}, preempted=(), block_ids=lambda _: [NULL, 11], cached={"r": 4})
    assert (step.save_cached, step.grow, len(step.save)) == ([], [], 1)


@each("why", ["recalled", "introduced late", "saved in time", "introduced late, and all of it stays"])
def test_a_prompt_whose_window_has_moved_on_is_not_offered_late(why: str) -> None:
    """The request's blocks before the window have been replaced by null blocks."""
    late, stays = why.startswith("introduced late"), why.endswith("stays")
    groups, null = ((FULL,), 10) if stays else ((CHUNKED,), NULL)
    connector = scheduler(introduce=not late, groups=groups)
    connector.add(flowing(8) if why in ("recalled", "introduced late") else producer(8))
    step_of(connector, ("r", 8), blocks=[null, 11])
    if late:
        connector.introduce(grouped_ticket(groups, 0, "introduction"))
    else:
        connector.withdraw_all()
    now = [10, 11, 12, 13] if stays else [NULL, NULL, NULL, 14]
    saved = step_of(connector, ("r", 13), blocks=now).save
    assert [save.block_tables for save in saved] == [((10, 11),)] * stays
    finished = connector.request_finished("r", completed=True, block_ids=now)
    assert (finished.params is not None, finished.hold_blocks) == (stays, stays)


def test_a_prompt_that_was_preempted_and_is_computed_anew_is_offered() -> None:
    """Its window has moved on before, and is back then."""
    connector = scheduler(groups=(CHUNKED,))
    connector.add(producer(8))
    step_of(connector, ("r", 8), blocks=[NULL, 11])
    step_of(connector, ("r", 13), blocks=[NULL, NULL, NULL, 14])
    (save,) = step_of(connector, ("r", 8), preempted=["r"], blocks=[NULL, 12]).save
    assert save.block_tables == ((12,),)
    assert connector.request_finished("r", completed=True, block_ids=[NULL, 12]).params is not None


@each(
    ("tables", "problem"),
    [
        (([10, 11, 12, 13], [34, 35, 36]), "a table for each of 3 groups, got 2"),
        ([10, 11, 12], "a table for each of 3 groups"),
        (([10, 11, 12], [NULL] * 4 + [34, 35, 36], [7]), "into 3 blocks of 4 tokens"),
        (([10, 11, 12, 13], [34, 35, 36], [7]), "into 3 blocks of 2 tokens"),
        (([10, 11, 12, 13], [NULL] * 4 + [34, 35, 36], []), "into 0 blocks of 1 token"),
    ],
)
def test_tables_that_do_not_hold_what_is_needed_are_a_usage_error(tables: Any, problem: str) -> None:
    connector = grouped_scheduler()
    connector.add(consumer(14, OFFERED))
    with pytest.raises(UsageError, match=problem):
        connector.update_after_alloc("r", tables, 13)


@each(
    ("changes", "problem"),
    [
        *(({name: 0}, f"^{name}: expected .*, got 0") for name in ("block_size", "lease_ttl_s", "fetch_tokens_min")),
        ({"groups": (LOCAL,)}, "block_size is 4, but the first group's is 2"),
        ({"groups": (FULL, STATE), "full_blocks_only": True}, "a state belongs to the last token"),
        ({"groups": (FULL, STATE), "withhold_last_token": True}, "withhold_last_token"),
        ({"groups": "full"}, "groups: expected `array`, got 'full'"),
        (
            {"late_blocks": True, "consumes": False},
            "late_blocks: for engines that load prompts, but this one loads none",
        ),
        ({"late_blocks": "yes"}, "late_blocks: expected `bool`, got 'yes'"),
    ],
)
def test_settings_that_cannot_be_are_a_config_error(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        SchedulingConfig(**{"block_size": 4, "lease_ttl_s": 1.0, **changes})


@each(
    ("groups", "left", "expected"),
    [
        ((FULL, STATE), False, (0, False)),  # the state is after the last token, whose logits are wanted
        ((FULL, LOCAL), False, (13, True)),
        ((FULL, LOCAL), True, (0, False)),
    ],
)
def test_a_whole_prompt_is_of_use_where_its_last_token_can_be_computed_again(
    groups: tuple[GroupFacts, ...], left: bool, expected: tuple[int | None, bool]
) -> None:
    connector = scheduler(groups=groups, leave_last_token=left)
    ticket = grouped_ticket(groups, 13, "remote")
    connector.add(consumer(13, ticket))
    connector.add(consumer(14, msgspec.structs.replace(ticket, request_id="other"), "longer"))
    assert connector.num_new_matched_tokens("r", 0) == expected
    assert connector.num_new_matched_tokens("longer", 0) == (13, True)
    connector.update_after_alloc("r", tables_of(13)[:2], expected[0])
    step = step_of(connector)
    assert [*step.keep] == ["longer"]
    assert [release.request_id for release in step.release] == ([] if expected[0] else ["r"])


@each(
    ("groups", "left", "offered"),
    [
        (GROUPS, ([10, 11, 12, 13], [NULL] * 4 + [34, 35, 36], [7]), True),
        (GROUPS, ([10, 11, 12, 13, 14], [NULL] * 4 + [34, 35, 36, 37], [7]), True),  # of an answer of several tokens
        (GROUPS, ([10, 11, 12, 13], [NULL] * 5 + [35, 36], [7]), False),  # the window has moved on
        (GROUPS, ([10, 11, 12, 13], [NULL] * 4 + [34, 35, 36], [8]), False),
        (GROUPS, ([10, 11, 12, 13, 14], [NULL] * 5 + [35, 36, 34], [7]), False),  # come again, for the answer
        (GROUPS, None, False),  # the state has gone on
        (GROUPS[:2], None, True),
    ],
)
def test_a_prompt_that_is_there_no_more_is_not_offered(
    groups: tuple[GroupFacts, ...], left: tuple[list[int], ...] | None, offered: bool
) -> None:
    """A block of it has been taken back; or, with all `left` as it was, one more token has been computed."""
    connector = scheduler(groups=groups)
    connector.add(producer(13))
    tables = tables_of(13)[: len(groups)]
    grouped_step(connector, 13, tables)
    if left is None:
        grouped_step(connector, 14, tables)
    finished = connector.request_finished("r", completed=True, block_ids=left or tables)
    assert (finished.hold_blocks, finished.params is not None) == (offered, offered)
    assert step_of(connector).withdraw == ([] if offered else ["r"])


def test_blocks_that_ranks_cannot_have_split_are_a_config_error() -> None:
    connector = grouped_scheduler()
    facts = (msgspec.structs.replace(FULL, block_size=3), LOCAL, STATE)
    odd = msgspec.structs.replace(GROUPED, block_size=3, groups=facts)
    with pytest.raises(ConfigError, match="'full': blocks of 4 tokens, the ranks have registered blocks of 3"):
        connector.introduce(odd)
    with pytest.raises(ConfigError, match="groups: 3 here, the ranks have registered 1"):
        connector.introduce(INTRODUCTION)


def test_full_blocks_are_full_in_every_group_that_begins_the_prompt() -> None:
    facts = (FULL, GroupFacts(name="other", block_size=6), LOCAL)
    config = SchedulingConfig(block_size=4, lease_ttl_s=1.0, groups=facts, full_blocks_only=True)
    assert (config.full_block_tokens, SchedulingConfig(block_size=4, lease_ttl_s=1.0).full_block_tokens) == (12, 4)


# --- dialects


def test_parameters_are_read_and_written_as_the_dialect_has_them() -> None:
    """For example a dialect for engines of another make."""
    config = SchedulingConfig(block_size=BLOCK_SIZE, lease_ttl_s=10.0)
    theirs = ticket_of(10, request_id="theirs")

    def read_ticket(params: Mapping[str, Any]) -> Ticket:
        if "odd" in params:
            raise RequestError("odd parameters")
        return theirs

    dialect = Dialect(read_ticket, lambda ticket: {"notified": ticket.request_id}, lambda name: name.replace(",", "_"))
    connector = ConnectorScheduler(config, new_secret=lambda: "secret", dialect=dialect)
    connector.introduce(grouped_ticket((), 0, "introduction"))
    connector.add(Request("r", 10, {"do_remote_prefill": True}))
    assert step_of(connector).keep == {"r": (theirs,)}
    assert connector.num_new_matched_tokens("r", 0) == (10, True)
    with pytest.raises(RequestError, match="odd"):
        connector.add(Request("odd", 10, {"do_remote_prefill": True, "odd": 1}))
    connector.add(Request("a,b", 8, PREFILL))
    (save,) = step_of(connector, ("a,b", 8)).save
    assert save.serve_id == "a_b#secret"
    assert connector.request_finished("a,b", completed=True) == Finished(True, {"notified": "a_b#secret"})


def test_requests_that_are_computed_although_a_ticket_came_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """One log line a minute for each reason. A ticket that is too long is logged each time."""
    caplog.set_level("INFO", logger="kvflow")
    connector, used = scheduler(), ticket_of(8, request_id="used")
    connector.add(consumer(9, used, "first"))
    for name, ticket in (("a", used), ("b", used)):
        with pytest.raises(RequestError):
            connector.add(consumer(9, ticket, name))
    connector.add(consumer(5, ticket_of(8, request_id="long"), "c"))
    connector.note_computed_here("its load failed")
    step_of(connector)
    connector.note_computed_here("its load failed")
    step_of(connector)
    lines = [one.getMessage() for one in caplog.records if "computed here" in one.getMessage()]
    assert len(lines) == 2
    assert "'c': its prompt is computed here: the ticket of request 'long' has num_tokens 8" in lines[0]
    assert lines[1].startswith("computed here: 4 requests that came with a ticket: 2 because its ticket is used")


def test_tickets_whose_numbers_have_become_doubles_are_taken() -> None:
    """Gateways that keep JSON in protobuf have no other numbers."""

    def doubled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: doubled(one) for name, one in value.items()}
        if isinstance(value, list):
            return [doubled(one) for one in value]
        return float(value) if type(value) is int else value

    ticket = ticket_of(8)
    assert Ticket.from_params(doubled(ticket.to_params())) == ticket
    params = producer_params(Ticket.rendezvous(INTRODUCTION, "name"))
    connector = scheduler()
    connector.add(Request("r", 8, doubled(params), range(8)))
    assert step_of(connector, ("r", 8)).decline == []
    for wrong in (8.5, 2.0**60, float("nan"), float("inf")):
        with pytest.raises(RequestError):
            Ticket.from_params({**ticket.to_params(), "remote_port": wrong})


# --- weights


def test_a_ticket_of_other_weights_is_computed_here(caplog: pytest.LogCaptureFixture) -> None:
    """Of several tickets those with the engine's weights are used. What is not computed yet is compared by the load."""
    caplog.set_level("INFO", logger="kvflow")
    connector, old = scheduler(), ticket_of(8, request_id="old")
    new = with_weights(ticket_of(8, request_id="new"), "step-7")
    connector.add(consumer(9, old, "before"))
    connector.set_weights("step-7")
    with pytest.raises(WeightsMismatch, match=r"of request 'old' from .*ours 'step-7', theirs ''"):
        connector.add(consumer(9, msgspec.structs.replace(old, request_id="old"), "after"))
    with pytest.raises(WeightsMismatch):
        connector.add(consumer(9, ticket_of(8, request_id="useless"), "late"))
    connector.add(consumer(9, new, "told"))
    both = params_of_several([ticket_of(8, request_id="older").to_params(), new_ticket_params()])
    connector.add(Request("both", 9, both, range(9)))
    connector.add(Request("pending", 9, Ticket.rendezvous(old, "later").to_params(), range(9)))
    step = step_of(connector)
    released = [ticket.request_id for release in step.release for ticket in release.tickets]
    assert released == ["useless", "older"], "not the one that a request is using"
    keep = step.keep
    names = {name: [ticket.request_id for ticket in tickets] for name, tickets in keep.items()}
    assert names == {"before": ["old"], "told": ["new"], "both": ["newest"], "pending": ["later"]}
    assert "2 because its ticket is of other weights" in caplog.text


def new_ticket_params() -> dict[str, Any]:
    return with_weights(ticket_of(8, request_id="newest"), "step-7").to_params()


def test_prompts_of_the_old_weights_are_not_offered() -> None:
    """Whatever becomes of the requests, which may go on; those that come later are of the new ones."""
    connector = scheduler()
    for name in ("computing", "saved", "sending"):
        connector.add(producer(10, name))
    connector.add(flowing(10, "flowing"))
    connector.add(flowing(10, "waiting", "awaited"))
    step_of(connector, ("computing", 4), ("saved", 10), ("sending", 10), ("flowing", 4))
    sent = connector.request_finished("sending", completed=True)
    assert sent.hold_blocks
    connector.set_weights("step-7")
    step = step_of(connector, ("computing", 10), ("saved", 11), ("flowing", 10), ("waiting", 10))
    assert (step.save, step.grow, step.send) == ([], [], ["sending"])
    assert (step.withdraw, step.recall, [one.serve_id for one in step.decline]) == (["saved"], ["flowing"], ["awaited"])
    for name in ("computing", "saved", "flowing", "waiting"):
        assert connector.request_finished(name, completed=True) == Finished(False, None)
    connector.update_from_workers(sent=["saved", "flowing", "sending"])
    assert connector.open_requests == 0
    connector.add(producer(10, "later"))
    step_of(connector, ("later", 10))
    params = connector.request_finished("later", completed=True).params
    assert params is not None
    assert Ticket.from_params(params).first.weights == "step-7"
