"""300 answers under mixed traffic: each is that of one engine alone, and nothing is left behind."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest

from tests.vllm.servers import NAME, Server, flow, hand_over, introduction_of, prefill
from tests.vllm.test_failures import until_free

ANSWERS, CLIENTS, TOKENS, SALTS = 300, 4, 8, 24
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


class Router:
    """Both engines, asked in the way of a conversation."""

    def __init__(self, producer: Server, consumer: Server, story: list[int]) -> None:
        self._producer, self._consumer = producer, consumer
        self._introduction = introduction_of(producer, story)

    def answer(self, conversation: Conversation) -> str:
        prompt, salt = list(conversation.prompt), conversation.salt
        match conversation.way:
            case "both legs at once":
                return flow(self._producer, self._consumer, self._introduction, prompt, TOKENS, cache_salt=salt)
            case "a client that hangs up, and asks again":
                self._hang_up(prompt, salt)
            case "turns":
                first = self._hand_over(prompt, salt)
                prompt += self._consumer.tokens(first)
        return self._hand_over(prompt, salt)

    def expected(self, nth: int, conversation: Conversation) -> str:
        """The answer of one engine, of the two by turns, that computes all of the prompt itself."""
        engine, prompt = (self._producer, self._consumer)[nth % 2], list(conversation.prompt)
        if conversation.way == "turns":
            prompt += engine.tokens(engine.text(prompt, TOKENS, **ALONE))
        return engine.text(prompt, TOKENS, **ALONE)

    def _hand_over(self, prompt: list[int], salt: str) -> str:
        params = prefill(self._producer, prompt, cache_salt=salt)
        return self._consumer.text(prompt, TOKENS, kv_transfer_params=params, cache_salt=salt)

    def _hang_up(self, prompt: list[int], salt: str) -> None:
        params = prefill(self._producer, prompt, cache_salt=salt)
        body = {"model": NAME, "prompt": prompt, "max_tokens": 200, "stream": True, "kv_transfer_params": params}
        with httpx.stream("POST", f"{self._consumer.url}/v1/completions", json={**body, "cache_salt": salt}) as lines:
            assert lines.status_code == 200


@pytest.mark.timeout(3600)
def test_300_answers_are_those_of_one_engine(pair: tuple[Server, Server], story: list[int]) -> None:
    producer, consumer = pair
    hand_over(producer, consumer, story[:10])
    router, asked = Router(producer, consumer, story), conversations(story, seed=58)
    with ThreadPoolExecutor(CLIENTS) as clients:
        expected = list(clients.map(router.expected, range(ANSWERS), asked))
        answers = list(clients.map(router.answer, asked))
    different = [(nth, one.way, len(one.prompt)) for nth, one in enumerate(asked) if answers[nth] != expected[nth]]
    assert not different, f"{len(different)} of {ANSWERS} answers differ: {different}"
    for server in pair:
        until_free(server)
