"""300 answers under mixed traffic: each is that of one engine alone, and nothing is left behind."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from kvflow import Ticket
from tests.vllm.conftest import DECODE, PREFILL
from tests.vllm.servers import MODELS, NAME, Server, flow_ids, hand_over, hand_over_ids, introduction_of, prefill
from tests.vllm.test_failures import until_free
from tests.vllm.test_models import OPTIONS, prompt_of

ANSWERS, CLIENTS, TOKENS, SALTS, FLIP_EVERY = 300, 4, 8, 24, 25
ALONE = {"cache_salt": "alone"}
WAYS = {"one leg after the other": 6, "both legs at once": 2, "a client that hangs up, and asks again": 1, "turns": 1}
"""How many of ten conversations go each way."""


@dataclass(frozen=True)
class Conversation:
    way: str
    prompt: tuple[int, ...]
    salt: str
    """Requests of one salt share a prefix cache, so some of their tokens are not transferred."""


def conversations(story: list[int], seed: int) -> list[Conversation]:
    """Return `ANSWERS` prompts of 20 to 900 tokens. Those of one salt begin alike."""
    draw = random.Random(seed)
    ways = draw.choices(list(WAYS), weights=WAYS.values(), k=ANSWERS)
    drawn = []
    for way in ways:
        salt = draw.randrange(SALTS)
        shared = story[41 * salt : 41 * salt + draw.choice((0, 128, 300, 512))]
        start = draw.randrange(len(story) - 400)
        drawn.append(
            Conversation(way, (*shared, *story[start : start + draw.randrange(20, 400)]), f"conversation {salt}")
        )
    return drawn


@dataclass(frozen=True)
class Legs:
    """Who computes a prompt, who answers, and the introduction of the first."""

    producer: Server
    consumer: Server
    introduction: Ticket

    @classmethod
    def of(cls, producer: Server, consumer: Server, story: list[int]) -> Legs:
        return cls(producer, consumer, introduction_of(producer, story))

    def hand_over(self, prompt: list[int], salt: str) -> list[int]:
        return hand_over_ids(self.producer, self.consumer, prompt, TOKENS, cache_salt=salt)

    def hang_up(self, prompt: list[int], salt: str) -> None:
        params = prefill(self.producer, prompt, cache_salt=salt)
        body = {"model": NAME, "prompt": prompt, "max_tokens": 200, "stream": True, "kv_transfer_params": params}
        with httpx.stream("POST", f"{self.consumer.url}/v1/completions", json={**body, "cache_salt": salt}) as lines:
            assert lines.status_code == 200


class Router:
    """Two engines, asked in the way of a conversation. After `flip_every` requests the next legs are used."""

    def __init__(self, *legs: Legs, flip_every: int | None = None) -> None:
        self._legs = legs
        self._flip_every = flip_every
        self._begun = itertools.count()
        self.flips = 0

    def _next(self) -> Legs:
        """The legs of the next request; those of earlier requests, which may be under way, stay what they are."""
        if self._flip_every is None:
            return self._legs[0]
        self.flips = next(self._begun) // self._flip_every
        return self._legs[self.flips % len(self._legs)]

    def answer(self, conversation: Conversation) -> list[int]:
        prompt, salt = list(conversation.prompt), conversation.salt
        legs = self._next()
        match conversation.way:
            case "both legs at once":
                return flow_ids(legs.producer, legs.consumer, legs.introduction, prompt, TOKENS, cache_salt=salt)
            case "a client that hangs up, and asks again":
                legs.hang_up(prompt, salt)
            case "turns":
                prompt += legs.hand_over(prompt, salt)
        return self._next().hand_over(prompt, salt)


def expected_of(engine: Server, conversation: Conversation) -> list[int]:
    """The answer of one engine that computes all of the prompt itself."""
    prompt = list(conversation.prompt)
    if conversation.way == "turns":
        prompt += engine.ids(prompt, TOKENS, **ALONE)
    return engine.ids(prompt, TOKENS, **ALONE)


def assert_equal_answers(router: Router, engines: Sequence[Server], asked: Sequence[Conversation]) -> None:
    """Ask with several clients. Every answer has to be that of one engine alone; afterwards nothing is leased."""
    by_turns = itertools.cycle(engines)
    with ThreadPoolExecutor(CLIENTS) as clients:
        expected = list(clients.map(expected_of, by_turns, asked))
        answers = list(clients.map(router.answer, asked))
    different = [(nth, one.way, len(one.prompt)) for nth, one in enumerate(asked) if answers[nth] != expected[nth]]
    assert not different, f"{len(different)} of {len(asked)} answers differ: {different}"
    for server in engines:
        until_free(server)


@pytest.mark.timeout(3600)
def test_300_answers_are_those_of_one_engine(pair: tuple[Server, Server], story: list[int]) -> None:
    producer, consumer = pair
    hand_over(producer, consumer, story[:10])
    router = Router(Legs.of(producer, consumer, story))
    assert_equal_answers(router, pair, conversations(story, seed=58))


@pytest.mark.timeout(3600)
def test_roles_change_under_300_answers() -> None:
    """Two servers of role kv_both; the router has prefill and decode change places again and again.

    A tiny random model, since each of its tokens depends on all tokens before it.
    """
    tiny: dict[str, Any] = {"role": "kv_both", "model": MODELS / "full", "options": OPTIONS, "blocks": 256}
    servers = [Server.start(replace(setup, **tiny)) for setup in (PREFILL, DECODE)]
    story = prompt_of(4000)
    try:
        for server in servers:
            server.wait_up()
        first, second = servers
        legs = Legs.of(first, second, story), Legs.of(second, first, story)
        router = Router(*legs, flip_every=FLIP_EVERY)
        assert_equal_answers(router, servers, conversations(story, seed=61))
        assert router.flips >= ANSWERS // FLIP_EVERY
        for server in servers:
            assert server.metric("vllm:kvflow_loads_total") > 0, "it decoded"
            assert server.metric("vllm:kvflow_leases_total") > 0, "it prefilled"
    finally:
        for server in servers:
            server.stop()
