"""Servers that are replaced: their successors are warmed with their most recent prompts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.cli.hand_on import HandedOnPrompts, hand_on, send_json
from kvflow.vllm.recent_prompts import RecentPrompts
from kvflow.vllm.succession import Succession
from tests.support.tests_support import any_ticket
from tests.vllm.conftest import Site
from tests.vllm.servers import MODELS, Server, Setup
from tests.vllm.test_models import BLOCK_SIZE, OPTIONS, prompt_of
from tests.vllm.test_prefix import BY_SOURCE, Counted, at, extra_of, until

_MORE: dict[str, Any] = {"prefix_peers": [], "prefix_tokens_min": BLOCK_SIZE, "recent_tokens_max": 1 << 16}
_COUNTED, _NEW, _ANSWER = 3, 20, 16


def setup_of(role: str, name: str, core: int) -> Setup:
    extra = tuple({**dict(extra_of(name)), **_MORE}.items())
    return Setup(role=role, core=core, model=MODELS / "full", options=OPTIONS, policy="recompute", extra=extra)


ONE, OTHER = setup_of("kv_both", "both", 0), setup_of("kv_consumer", "reader", 1)


class Talks:
    """Conversations of several turns, each with one server at a time."""

    def __init__(self, *numbers: int) -> None:
        self.prompts = [prompt_of(400 + 7 * number, number) for number in numbers]
        self.kept = [0 for _ in numbers]
        """Number of tokens of each that the server of the last turn has in full blocks."""

    def turn(self, server: Server) -> int:
        """Have the server answer the next turn of each. Return how many tokens of earlier turns it has computed."""
        before, new = computed(server), 0
        for number, prompt in enumerate(self.prompts):
            new += len(prompt) - self.kept[number]
            answer = server.ids(prompt, _ANSWER)
            self.kept[number] = (len(prompt) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
            self.prompts[number] = [*prompt, *answer, *prompt_of(_NEW, len(prompt))]
        return int(computed(server) - before) - _COUNTED - new


def computed(server: Server) -> float:
    """Return the number of prompt tokens that a server has computed."""
    server.ids(prompt_of(_COUNTED), 1, cache_salt="so that counters are shown")
    return server.metric(BY_SOURCE, source="local_compute")


def move(old: Server, new: Server, *talks: Talks) -> HandedOnPrompts:
    """Hand on what the old server has of these talks, which were its last ones, and no more."""
    recent = recent_of(old)
    most = sum(sum(one.kept) + len(one.kept) for one in talks) * recent["token_bytes"]
    return hand_on(old.url, new.url, bytes_max=most, within_s=120.0, send=send_json)


def recent_of(server: Server) -> dict[str, Any]:
    answer = server.complete([1], 1, kv_transfer_params={"kvflow": {"recent": 1 << 40}})
    recent: dict[str, Any] = answer["kv_transfer_params"]["kvflow"]["recent"]
    return recent


def test_a_rolling_restart_recomputes_a_tenth_of_what_it_did(site: Site) -> None:
    """Two servers are replaced, one after the other; their conversations go to the other one meanwhile."""
    one, other = site.have(ONE, OTHER)
    left_behind, moved, stayed = Talks(1, 2, 3), Talks(4, 5, 6), Talks(7, 8)
    for talks, server in ((left_behind, one), (moved, one), (stayed, other)):
        talks.turn(server)
        assert talks.turn(server) == 0, "a server that goes on computes nothing twice"
    handed_on = move(one, other, moved)
    assert handed_on.outcomes == {"loaded": 3}
    assert "bytes_max" in handed_on.stopped
    one.stop()
    warm, cold = moved.turn(other), left_behind.turn(other)
    assert cold == 3 * 448, "every history, in full blocks"
    assert warm <= cold / 10
    stayed.turn(other)
    (again,) = site.have(ONE)
    handed_on = move(other, again, moved, left_behind, stayed)
    assert handed_on.outcomes == {"loaded": 8}
    other.stop()
    for talks in (moved, left_behind, stayed):
        assert talks.turn(again) == 0
    print(f"recomputed of 3 histories: {warm} tokens with a hand-on, {cold} without")


def leaving(role: str, name: str, core: int, *peers: str, **more: Any) -> Setup:
    extra = tuple({**dict(extra_of(name)), **_MORE, "prefix_peers": [at(peer) for peer in peers], **more}.items())
    return Setup(role=role, core=core, model=MODELS / "full", options=OPTIONS, policy="recompute", extra=extra)


def test_readers_follow_a_server_that_leaves_to_its_successor(site: Site) -> None:
    """The reader knows the address of the old server only; the goodbye of the old server names the new one."""
    reader_setup = leaving("kv_consumer", "reader", 1, "holder", follow_successors=True)
    producer = leaving("kv_both", "holder", 0)
    patient = replace(producer, options=(*OPTIONS, "--shutdown-timeout", "30"))  # else vLLM kills its workers at once
    old, reader = site.have(patient, reader_setup)
    new = Server.start(leaving("kv_both", "both", 0))
    try:
        new.wait_up()
        history, known = prompt_of(500, 51), prompt_of(300, 52)
        expected = old.ids(history, 16, cache_salt="alone")
        for prompt in (known, history):
            old.ids(prompt, 16)
        counted = Counted(reader)
        reader.ids(known, 1)
        until(reader, counted, "external", 288)
        handed_on = hand_on(old.url, new.url, bytes_max=None, within_s=120.0, send=send_json)
        assert handed_on.named
        assert handed_on.outcomes["loaded"] >= 2
        old.stop()
        counted = Counted(reader)
        assert reader.ids(history, 16) == expected
        until(reader, counted, "external", 480)
        assert counted.found == 1
    finally:
        new.stop()


# --- without a server


def asks(name: str, **extra: Any) -> Any:
    return request_of(7, 1, request_id=name, kv_transfer_params={"kvflow": extra})


def test_a_server_introduces_itself_and_learns_of_its_successor() -> None:
    new, old = Succession(), Succession()
    new.introduction = any_ticket(engine_id="new")
    request = asks("r", introduce=True)
    new.add(request)
    assert request.max_tokens == 1
    answer = new.finish(request)
    assert answer is not None
    naming = asks("s", successor=answer["kvflow"]["introduction"])
    old.add(naming)
    assert old.finish(naming) == {"kvflow": {"successor": {"engine_id": "new"}}}
    named = old.take_named()
    assert named is not None
    assert (named.engine_id, named.address) == ("new", new.introduction.address)
    assert old.take_named() is None, "the workers learn of it once"
    assert (new.finish(request), new.take_named()) == (None, None)


@pytest.mark.parametrize("given", [None, 7, {}, "tcp://10.0.0.8:5600", {"remote_engine_id": 3}])
def test_what_is_no_server_is_refused_in_the_answer(given: Any) -> None:
    old = Succession()
    naming = asks("s", successor=given)
    old.add(naming)
    answer = old.finish(naming)
    assert answer is not None
    assert "kvflow.successor" in answer["kvflow"]["successor"]["reason"]
    assert old.take_named() is None


def test_a_server_is_not_its_own_successor() -> None:
    old = Succession()
    early = asks("early", introduce=True)
    assert old.finish(early) is None
    old.add(early)
    assert old.finish(early) == {"kvflow": {"introduction": None}}
    old.introduction = any_ticket(engine_id="old")
    old.add(asks("s", successor=old.introduction.to_params()))
    assert old.take_named() is None


def request_of(number: int, length: int, turn: int = 0, **more: Any) -> Any:
    """Return an ended request whose hashes are those of a conversation `number` with `turn` earlier turns."""
    tokens = [number] * length
    fields = {
        "request_id": f"r-{number}-{turn}",
        "kv_transfer_params": None,
        "prompt_token_ids": tokens,
        "all_token_ids": tokens,
        "block_hashes": [b"%d-%d" % (number, at) for at in range(length // 32)],
        "num_computed_tokens": length - 1,
        "num_tokens": length,
        "mm_features": [],
        "prompt_embeds": None,
        "cache_salt": None,
        "lora_request": None,
        "max_tokens": 16,
    }
    return SimpleNamespace(**{**fields, **more})


def asked_of(prompts: RecentPrompts, most: Any) -> Any:
    asking = request_of(0, 1, request_id="asks", kv_transfer_params={"kvflow": {"recent": most}})
    prompts.add(asking)
    assert asking.max_tokens == 1
    answer = prompts.finish(asking)
    assert answer is not None
    return answer["kvflow"]["recent"]


def firsts(prompts: RecentPrompts, most: int = 1 << 40) -> list[tuple[int, int]]:
    """Return the first token of each prompt, and its length."""
    return [(one["prompt"][0], len(one["prompt"])) for one in asked_of(prompts, most)["requests"]]


@pytest.fixture
def prompts() -> RecentPrompts:
    """Of three requests."""
    made = RecentPrompts(1000, 32, 7)
    for number in (1, 2, 3):
        assert made.finish(request_of(number, 100)) is None
    return made


def test_the_latest_comes_first_in_full_blocks_and_one_token(prompts: RecentPrompts) -> None:
    assert firsts(prompts) == [(3, 97), (2, 97), (1, 97)]
    assert firsts(prompts, 2 * 97) == [(3, 97), (2, 97)]
    prompts.holder = "tcp://10.0.0.7:5600"
    told = asked_of(prompts, 97)
    assert (told["holder"], told["token_bytes"]) == ("tcp://10.0.0.7:5600", 7)


def test_a_turn_takes_the_place_of_the_turn_before(prompts: RecentPrompts) -> None:
    prompts.finish(request_of(1, 200, turn=1))
    assert firsts(prompts) == [(1, 193), (3, 97), (2, 97)]
    prompts.finish(request_of(3, 100))
    assert firsts(prompts) == [(3, 97), (1, 193), (2, 97)]


def test_what_does_not_fit_is_forgotten_the_oldest_first(prompts: RecentPrompts) -> None:
    prompts.finish(request_of(4, 800))
    assert firsts(prompts) == [(4, 769), (3, 97), (2, 97)]
    prompts.finish(request_of(5, 2000))
    assert firsts(prompts) == [(4, 769), (3, 97), (2, 97)], "longer than everything that may be remembered"
    prompts.forget_all()
    assert firsts(prompts) == []


def test_what_tells_blocks_apart_goes_with_the_prompt(prompts: RecentPrompts) -> None:
    lora = SimpleNamespace(lora_name="adapter")
    prompts.finish(request_of(4, 100, cache_salt="tenant", lora_request=lora))
    (found,) = asked_of(prompts, 97)["requests"]
    assert (found["cache_salt"], found["model"]) == ("tenant", "adapter")


def test_prompts_that_tokens_do_not_describe_are_left_out(prompts: RecentPrompts) -> None:
    for more in ({"mm_features": ["picture"]}, {"prompt_embeds": "embeddings"}, {"prompt_token_ids": None}):
        prompts.finish(request_of(4, 100, **more))
    prompts.finish(request_of(5, 20))
    assert [number for number, _ in firsts(prompts)] == [3, 2, 1]


def test_bad_input_is_refused_in_the_answer(prompts: RecentPrompts) -> None:
    for most in (0, -1, True, "all", None, 1.5):
        assert "kv_transfer_params: kvflow.recent" in asked_of(prompts, most)["reason"]


def test_a_server_that_remembers_nothing_says_so() -> None:
    prompts = RecentPrompts(0, 32, 7)
    assert prompts.finish(request_of(1, 100)) is None
    assert asked_of(prompts, 1000) == {"reason": "this server remembers no prompts: set recent_tokens_max"}


@pytest.mark.parametrize("params", [None, {}, {"kvflow": None}, {"kvflow": {"warm": True}}, {"kvflow": {"ranks": []}}])
def test_other_requests_are_left_alone(prompts: RecentPrompts, params: Any) -> None:
    request = request_of(9, 20, kv_transfer_params=params)
    prompts.add(request)
    assert (request.max_tokens, prompts.finish(request)) == (16, None)
