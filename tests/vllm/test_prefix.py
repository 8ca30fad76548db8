"""Three real servers: two pull prefixes out of the paged caches of the others, whatever becomes of these meanwhile."""

from __future__ import annotations

import itertools
import json
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from kvflow import Ticket
from tests.support.ports import free_port
from tests.vllm.conftest import Site
from tests.vllm.servers import MODELS, NAME, Server, Setup, prefill, rendezvous
from tests.vllm.test_models import OPTIONS, TP2, in_multi, prompt_of

EXTERNAL = {"source": "external_kv_transfer"}
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
QUESTIONS, RUNS = "vllm:kvflow_prefix_questions_total", "vllm:kvflow_prefix_runs_total"
HINTS = "vllm:kvflow_hints_ignored_total"
LOADS, FAILED = "vllm:kvflow_loads_total", "vllm:kvflow_load_failures_total"
PATIENT = (("prefix_wait_s", 20.0), ("handshake_timeout_s", 5.0), ("load_deadline_s", 10.0))
PORTS = {"holder": free_port(), "reader": free_port(), "both": free_port()}


def at(name: str) -> str:
    return f"tcp://127.0.0.1:{PORTS[name]}"


def extra_of(name: str, *peers: str, **more: Any) -> tuple[tuple[str, Any], ...]:
    """Nobody waits on a busy machine for less than a test would."""
    given = {"model": NAME, "listen": at(name), "share_prefixes": True, **dict(PATIENT), **more}
    if peers:
        given["prefix_peers"] = [at(peer) for peer in peers]
    return tuple(given.items())


_COMMON: dict[str, Any] = {"model": MODELS / "full", "options": OPTIONS, "policy": "recompute"}
HOLDER = Setup(role="kv_producer", core=0, extra=extra_of("holder"), **_COMMON)
READER = Setup(role="kv_consumer", core=1, extra=extra_of("reader", "holder"), **_COMMON)
BOTH = Setup(role="kv_both", core=1, extra=extra_of("both", "holder", "reader"), **_COMMON)


@pytest.fixture
def servers(site: Site) -> tuple[Server, Server, Server]:
    holder, reader, both = site.have(HOLDER, READER, BOTH)
    return holder, reader, both


class Counted:
    """A server's counters since it was looked at first."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        metric = self._server.metric
        return {
            "external": metric(BY_SOURCE, **EXTERNAL),
            "asked": metric(QUESTIONS),
            "found": metric(QUESTIONS, outcome="found"),
            "nothing": metric(QUESTIONS, outcome="nothing"),
            "late": metric(QUESTIONS, outcome="late"),
            "loads": metric(LOADS),
            "failed": metric(FAILED),
        }

    @property
    def all(self) -> dict[str, float]:
        return {name: value - self._before[name] for name, value in self._now().items()}

    def __getattr__(self, name: str) -> float:
        return self.all[name]


def until(server: Server, counted: Counted, name: str, value: float) -> None:
    """Wait until a counter has this value: vLLM shows the workers' counters some steps later."""
    for _ in range(200):
        if getattr(counted, name) >= value:
            return
        server.ids(prompt_of(3), 1)
    raise AssertionError(f"{name} is {getattr(counted, name)}, not {value}; all: {counted.all}")


def settle(*servers: Server) -> None:
    """Wait until no block is in use on either side."""
    for server in servers:
        for _ in range(200):
            server.ids(prompt_of(3), 1)
            if server.metric("vllm:kv_cache_usage_perc") == 0.0:
                break
        else:
            raise AssertionError(f"blocks are in use: {server.metric('vllm:kv_cache_usage_perc')} of them")
        assert server.post("/reset_prefix_cache") is not None


def alone(server: Server, prompt: list[int], **more: Any) -> list[int]:
    """The answer as this server computes it, without anything that is cached for others."""
    return server.ids(prompt, cache_salt="alone", **more)


_seeds = itertools.count(1000)


def family(length: int = 1000, *, members: int = 2) -> list[list[int]]:
    """Prompts with a common beginning that no test has had before."""
    seed = next(_seeds)
    return [[*prompt_of(length, seed), *prompt_of(20, seed + 7919 * (nth + 1))] for nth in range(members)]


def test_texts_are_equal_and_the_prefix_comes_from_the_warm_one(servers: tuple[Server, Server, Server]) -> None:
    """The holder is idle when it is asked; then a third server pulls from both."""
    holder, reader, both = servers
    first, second, third = family(1500, members=3)
    expected = {nth: alone(holder, prompt) for nth, prompt in enumerate((first, second, third))}
    assert holder.ids(first) == expected[0]
    answered = holder.metric(RUNS, outcome="found")
    counted = Counted(reader)
    assert reader.ids(second) == expected[1]
    until(reader, counted, "external", 1472)
    assert counted.external == 1472  # the whole blocks of 32 that both prompts have
    counted = Counted(both)
    assert both.ids(second) == expected[1]
    until(both, counted, "external", 1504)
    assert counted.external == 1504, "the reader has more of it than the holder by now, the last token left out"
    assert both.ids(third) == expected[2]
    assert (counted.found, counted.failed) == (1, 0), "what is cached here is not asked for"
    holder.ids(prompt_of(3), 1)
    holder.wait_metric(RUNS, answered + 2, outcome="found")
    settle(*servers)


def test_prompts_of_two_salts_share_nothing(servers: tuple[Server, Server, Server]) -> None:
    holder, reader, _ = servers
    first, second = family()
    expected = alone(holder, second)
    holder.ids(first, cache_salt="tenant")
    counted = Counted(reader)
    assert reader.ids(second) == expected
    assert reader.ids(second, cache_salt="other") == expected
    until(reader, counted, "nothing", 2)
    assert counted.external == 0
    assert reader.ids(second, cache_salt="tenant") == expected
    until(reader, counted, "external", 992)


def test_an_answer_is_part_of_the_next_turn_s_prefix(servers: tuple[Server, Server, Server]) -> None:
    holder, reader, _ = servers
    (prompt,) = family(members=1)
    answer = holder.ids(prompt, 100)
    turn = [*prompt, *answer, *prompt_of(10)]
    expected = alone(holder, turn)
    counted = Counted(reader)
    assert reader.ids(turn) == expected
    until(reader, counted, "external", 1088)  # of 1,119 tokens that the holder has computed


def test_a_router_may_name_the_source(site: Site) -> None:
    """On a server without peers. A prompt with an invalid address, or one without a listener, is computed."""
    holder, named = site.have(HOLDER, replace(BOTH, extra=(*extra_of("both"), ("prefix_peers", []))))
    first, second, third = family(members=3)
    source = {"kv_request_id": "r", "remote_host": "127.0.0.1", "remote_port": PORTS["holder"]}
    holder.ids(first)
    counted = Counted(named)
    for prompt, given, asked in (
        (third, {**source, "remote_port": 70000}, 0),
        (third, None, 0),
        (second, source, 1),
    ):
        params = {} if given is None else {"kv_transfer_params": {"remote_kv_source": given}}
        salt = {} if asked else {"cache_salt": f"{given}"}
        assert named.ids(prompt, **params, **salt) == alone(holder, prompt)
        until(named, counted, "found", asked)
        assert counted.found == asked
    assert counted.external == 992


def test_a_hint_names_the_source(site: Site) -> None:
    """Dynamo's, in the parameters. If kvflow does not know its version, it is counted, and the prompt is computed."""
    holder, named = site.have(HOLDER, replace(BOTH, extra=(*extra_of("both"), ("prefix_peers", []))))
    first, second = family()
    holder.ids(first)
    counted, ignored = Counted(named), named.metric(HINTS, reason="version")
    payload = {"source_control_endpoint": at("holder"), "block_hashes": [1, 2], "mode": "copy"}
    action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    for version, found in (("9.9", 0), ("0.1", 1)):
        hint = {"protocol_version": version, "message_id": "m", "actions": [action]}
        salt = {} if found else {"cache_salt": version}
        assert named.ids(second, kv_transfer_params={"kv_hint": hint}, **salt) == alone(holder, second)
        until(named, counted, "found", found)
        assert counted.found == found
    named.wait_metric(HINTS, ignored + 1, reason="version")
    assert counted.external == 992


def test_events_say_whom_to_ask(site: Site) -> None:
    """A server that knows only events of its peers asks for prefixes in these events, and for nothing else."""
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    publishes = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events.replace("127.0.0.1", "*")}
    publishes["replay_endpoint"] = replay
    follows = [{"holder": at("holder"), "endpoint": events, "replay_endpoint": replay}]
    holder, reader = site.have(
        replace(HOLDER, options=(*OPTIONS, "--kv-events-config", json.dumps(publishes))),
        replace(READER, extra=extra_of("reader", prefix_events=follows)),
    )
    first, second, third = family(members=3)
    expected = alone(holder, second)
    missed = holder.metric(RUNS, outcome="missed")
    holder.ids(first)
    counted = Counted(reader)
    for _ in range(100):
        reader.post("/reset_prefix_cache")
        assert reader.ids(second) == expected
        if counted.found:
            break
    assert counted.found
    assert counted.external == 992
    assert reader.ids(third, cache_salt="nobody has it") == alone(holder, third)
    holder.ids(prompt_of(3), 1)
    assert holder.metric(RUNS, outcome="missed") == missed


def test_a_prefill_engine_pulls_a_prefix_and_hands_the_prompt_over(servers: tuple[Server, Server, Server]) -> None:
    holder, reader, both = servers
    first, second = family()
    expected = alone(holder, second)
    holder.ids(first)
    counted = Counted(both)
    params = prefill(both, second)
    until(both, counted, "external", 992)
    before = Counted(reader)
    assert reader.ids(second, kv_transfer_params=params) == expected
    until(reader, before, "external", 1020)
    assert before.found == 0, "it has a ticket of the whole prompt"
    settle(*servers)


def test_a_cache_that_was_reset_is_shared_no_more(servers: tuple[Server, Server, Server]) -> None:
    """Also by an engine that computes nothing after it."""
    holder, reader, _ = servers
    first, second = family()
    expected = alone(holder, second)
    holder.ids(first)
    holder.post("/reset_prefix_cache")
    counted = Counted(reader)
    assert reader.ids(second) == expected
    until(reader, counted, "nothing", 1)
    assert counted.external == 0


def test_many_at_once(servers: tuple[Server, Server, Server]) -> None:
    """16 requests for prefixes that only one has, at two readers, while it computes others."""
    holder, reader, both = servers
    families = [family(600, members=3) for _ in range(8)]
    expected = [[alone(holder, prompt) for prompt in members[1:]] for members in families]
    for members in families:
        holder.ids(members[0], 1)
    counted = Counted(reader), Counted(both)
    with ThreadPoolExecutor(24) as pool:
        busy = [pool.submit(holder.ids, prompt_of(900, seed), 30) for seed in range(8)]
        answers = [
            [pool.submit(server.ids, prompt) for server, prompt in zip((reader, both), members[1:], strict=True)]
            for members in families
        ]
        assert [[answer.result() for answer in pair] for pair in answers] == expected
        for one in busy:
            one.result()
    for server, its in zip((reader, both), counted, strict=True):
        until(server, its, "found", 8)
        assert (its.found, its.failed) == (8, 0)
    settle(*servers)


def test_requests_that_begin_alike_pull_once(servers: tuple[Server, Server, Server]) -> None:
    holder, reader, _ = servers
    first, *others = family(1000, members=9)
    expected = [alone(holder, prompt) for prompt in others]
    holder.ids(first, 1)
    counted = Counted(reader)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(reader.ids, others)) == expected
    until(reader, counted, "loads", 1)
    assert (counted.found, counted.loads, counted.external) == (1, 1, 992)
    settle(holder, reader)


def test_a_holder_that_is_full_of_others_gives_its_blocks_to_them(site: Site) -> None:
    """A cache of 2,500 tokens: every prompt drives out another one, also while it is pulled."""
    holder, reader = site.have(replace(HOLDER, blocks=80), READER)
    families = [family(800) for _ in range(12)]
    expected = [alone(holder, second) for _, second in families]
    settle(holder)
    counted = Counted(reader)
    with ThreadPoolExecutor(8) as pool:
        computing = [pool.submit(holder.ids, first, 8) for first, _ in families]
        answers = [pool.submit(reader.ids, second) for _, second in families * 2]
        assert [answer.result() for answer in answers] == expected * 2
        for one in computing:
            one.result()
        for first, second in families[-2:]:
            pool.submit(holder.ids, first, 1).result()
            assert reader.ids(second) == alone(holder, second)
    until(reader, counted, "found", 1)
    settle(holder, reader)


class Conversation:
    """A conversation. Each turn goes to any of the servers and continues the answers of all."""

    def __init__(self, seed: int, reference: Server) -> None:
        self._rng = random.Random(seed)
        self._reference = reference
        self._prompts: list[list[int]] = []
        """The prompts so far, each with the whole conversation before it."""
        self._said = [*prompt_of(100, 9000), *prompt_of(60, 9001 + seed)]

    def ask(self, server: Server) -> None:
        """Ask the next turn, or repeat an earlier turn. Compare the answer with that of one server alone."""
        again = self._prompts and self._rng.random() < 0.25
        prompt = self._rng.choice(self._prompts) if again else self._said
        tokens, sure = _sure(server, prompt, self._rng.choice((8, 33, 70)))
        expected, as_sure = _sure(self._reference, prompt, len(tokens))
        assert tokens == expected, f"{server.setup.role}: another answer to a prompt of {len(prompt)} tokens"
        assert sure == pytest.approx(as_sure, abs=1e-3)
        if not again:
            self._prompts.append(prompt)
            self._said = [*prompt, *tokens, *prompt_of(self._rng.randrange(5, 30), self._rng.randrange(1 << 30))]


def _sure(server: Server, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
    """The tokens of an answer, and their logprobs."""
    more = {"return_token_ids": True, "ignore_eos": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    answer = server.complete(prompt, max_tokens, **more)["choices"][0]
    return answer["token_ids"], answer["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("caching", [False, True], ids=["no caching", "caching"])
def test_conversations_between_two_that_share_and_ask_each_other_are_those_of_one_alone(
    site: Site, caching: bool
) -> None:
    """300 answers with caches that are too small: each server asks the other for its answers, while blocks are reused,
    requests wait for free blocks, and requests are preempted.
    """
    options = OPTIONS if caching else (*OPTIONS, "--no-enable-prefix-caching")
    small: dict[str, Any] = {"options": options, "blocks": 72}
    one = replace(BOTH, extra=extra_of("both", "reader", prefix_tokens_min=64), **small)
    other = replace(READER, extra=extra_of("reader", "both", prefix_tokens_min=64), **small)
    alone_one = replace(HOLDER, extra=(("model", NAME),))
    servers = site.have(one, other, alone_one)[:2]
    reference = site.have(alone_one)[0]
    counted = [Counted(server) for server in servers]
    conversations = [Conversation(seed, reference) for seed in range(20)]

    def talk(nth: int) -> None:
        for turn in range(15):
            conversations[nth].ask(servers[(nth + turn) % 2])

    with ThreadPoolExecutor(7) as pool:
        for done in [pool.submit(talk, nth) for nth in range(len(conversations))]:
            done.result()
    for server, its in zip(servers, counted, strict=True):
        until(server, its, "found", 20)
        assert its.external > 20 * 64
    settle(*servers)


# --- what becomes of holders


def test_a_frozen_holder_is_waited_for_now_and_then_and_asked_again_when_it_goes_on(site: Site) -> None:
    holder, reader = site.have(HOLDER, replace(READER, extra=extra_of("reader", "holder", prefix_wait_s=2.0)))
    first, *others = family(members=6)
    expected = [alone(holder, prompt) for prompt in others]
    holder.ids(first)
    counted = Counted(reader)
    assert reader.ids(others[0], cache_salt=None) == expected[0]
    until(reader, counted, "found", 1)
    holder.signal(signal.SIGSTOP)
    try:
        for nth in (1, 2, 3):
            reader.post("/reset_prefix_cache")
            assert reader.ids(others[nth]) == expected[nth]
        until(reader, counted, "asked", 4)
        assert counted.found == 1
        assert counted.late >= 1
    finally:
        holder.signal(signal.SIGCONT)
    for _ in range(100):
        reader.post("/reset_prefix_cache")
        assert reader.ids(others[4]) == expected[4]
        if counted.found > 1:
            break
    assert counted.found > 1, "it is never asked again"
    settle(holder, reader)


def pulls_while(site: Site, happens: Callable[[Server], None]) -> tuple[Server, Server]:
    """Requests one after the other and side by side at a reader, while something happens to the holder."""
    holder, reader = site.have(HOLDER, replace(READER, extra=extra_of("reader", "holder", prefix_wait_s=2.0)))
    families = [family(1500) for _ in range(12)]
    expected = [alone(holder, second) for _, second in families]
    for first, _ in families:
        holder.ids(first, 1)
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(reader.ids, second) for _, second in families]
        happening = pool.submit(happens, holder)
        assert [answer.result() for answer in answers] == expected
        happening.result()
    return holder, reader


def test_holders_that_stop_and_go_in_the_middle_of_pulls(site: Site) -> None:
    def stop_and_go(holder: Server) -> None:
        for _ in range(20):
            holder.signal(signal.SIGSTOP)
            time.sleep(0.03)
            holder.signal(signal.SIGCONT)
            time.sleep(0.03)

    holder, reader = pulls_while(site, stop_and_go)
    settle(holder, reader)


def test_a_holder_that_dies_before_it_was_read_is_followed_by_the_next(site: Site) -> None:
    """Requests wait for blocks when it dies: the offers of both holders are kept, and half of the requests would read
    from it. The blocks belong to a prompt that is received from a server that starts to compute it only then.
    """
    extra = extra_of("reader", "holder", "both", prefix_wait_s=60.0, handshake_timeout_s=60.0)
    doomed, other, reader = site.have(HOLDER, BOTH, replace(READER, extra=extra, blocks=70))
    die_before_they_are_read(doomed, other, reader)


def die_before_they_are_read(doomed: Server, other: Server, reader: Server) -> None:
    families = [family() for _ in range(6)]
    expected = [alone(other, second) for _, second in families]
    for first, _ in families:
        for server in (doomed, other):
            server.ids(first, 1)
    reader.ids(prompt_of(1000, next(_seeds)), 1)  # nobody has it: it is connected to both now
    short, long = prompt_of(40, next(_seeds)), prompt_of(1500, next(_seeds))
    params = prefill(other, short)
    counted, found = Counted(reader), reader.metric(QUESTIONS, outcome="found")
    reader.ids(short, kv_transfer_params=params)
    to_compute, to_receive = rendezvous(Ticket.from_params(params), ttl_s=120.0)
    holders = doomed.worker(), other.worker()
    with ThreadPoolExecutor(7) as pool:
        hog = pool.submit(reader.ids, long, 1, kv_transfer_params=to_receive)
        reader.wait_metric("vllm:num_requests_waiting", 1)
        for holder in holders:  # no answer comes before all have asked: one that waits for blocks is in others' way
            holder.send_signal(signal.SIGSTOP)
        try:
            answers = [pool.submit(reader.ids, second) for _, second in families]
            reader.wait_metric("vllm:num_requests_waiting", 7)
        finally:
            for holder in holders:
                holder.send_signal(signal.SIGCONT)
        reader.wait_metric(QUESTIONS, found + 6, outcome="found")
        doomed.kill()
        assert not any(one.done() for one in (hog, *answers))
        other.complete(long, 1, kv_transfer_params=to_compute)
        assert [answer.result() for answer in answers] == expected
    until(reader, counted, "loads", 8)
    assert (counted.failed, counted.loads) == (0, 8)
    assert counted.external == len(short) + len(long) + 6 * 992
    settle(other, reader)


def test_a_holder_that_is_killed_in_the_middle_of_pulls_and_restarted_under_its_address(site: Site) -> None:
    _, reader = pulls_while(site, lambda holder: holder.kill())
    settle(reader)
    holder, same = site.have(HOLDER, reader.setup)
    assert same is reader
    first, second = family()
    expected = alone(holder, second)
    assert reader.ids(second) == expected
    holder.ids(first)
    counted = Counted(reader)
    for _ in range(100):
        reader.post("/reset_prefix_cache")
        assert reader.ids(second) == expected
        if counted.found:
            break
    assert counted.found, "the new one is never asked"
    settle(holder, reader)


# --- other caches, other cuts


def _of(setup: Setup, model: str, *options: str) -> Setup:
    core = "0|1" if TP2[0] in options else setup.core
    return replace(setup, model=MODELS / model, options=(*OPTIONS, *options), core=core)


ROWS = {
    "windows": (_of(HOLDER, "gemma3"), _of(READER, "gemma3")),
    "all windows": (_of(HOLDER, "all-sliding"), _of(READER, "all-sliding")),
    "TP 2 to 1": (_of(HOLDER, "full", *TP2), _of(READER, "full")),
    "TP 1 to 2": (_of(HOLDER, "gemma3"), _of(READER, "gemma3", *TP2)),
    "in MultiConnector": (in_multi(HOLDER), in_multi(READER)),
}


@pytest.mark.parametrize("row", ROWS)
def test_other_caches(site: Site, row: str) -> None:
    holder, reader = site.have(*ROWS[row])
    for length in (300, 1000):
        first, second = family(length)
        expected = alone(reader, second)
        holder.ids(first, 40)
        counted = Counted(reader)
        assert reader.ids(second) == expected
        until(reader, counted, "found", 1)
        assert counted.external >= length - 64
        assert counted.failed == 0
    settle(holder, reader)


def test_a_peer_whose_blocks_do_not_fit_is_of_no_use_and_does_no_harm(site: Site) -> None:
    """CPU kernels order the bytes of a block by its size."""
    holder, reader = site.have(HOLDER, replace(READER, options=("--skip-tokenizer-init", "--block-size", "64")))
    first, second = family()
    expected = alone(reader, second)
    holder.ids(first)
    counted = Counted(reader)
    assert reader.ids(second) == expected
    until(reader, counted, "nothing", 1)
    assert (counted.found, counted.failed, counted.external) == (0, 0, 0)
    settle(holder, reader)


def test_a_model_with_state_shares_nothing_and_says_so_once(site: Site) -> None:
    options = (*OPTIONS, "--no-enable-prefix-caching")
    holder, reader = (replace(_of(setup, "falcon-h1"), options=options) for setup in (HOLDER, READER))
    servers = site.have(holder, reader)
    first, second = family(300)
    for server in servers:
        server.ids(first)
        said = server.log.read_text(errors="replace")
        assert said.count("prefixes are neither shared nor pulled: the model has state per request") == 1
    assert servers[1].ids(second) == alone(servers[1], second)
    assert servers[1].metric(QUESTIONS) == 0
