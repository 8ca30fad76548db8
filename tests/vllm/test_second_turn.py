"""Conversations over two real servers: prefill reads the answers' blocks from decode, and computes only what is new."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from tests.vllm.conftest import Site
from tests.vllm.servers import MODEL, NAME, ROOT, Server
from tests.vllm.sharing import DECODE, PORT, PREFILL
from tests.vllm.test_models import BLOCK_SIZE, prompt_of
from tests.vllm.test_prefix import BY_SOURCE

ANSWER, NEW = 70, 45
"""Tokens of an answer, and of the words that follow it."""
Turn = Callable[..., Awaitable[httpx.Response]]


@dataclass(frozen=True)
class Answer:
    """An answer of the decode side, and how many tokens of its turn each side has computed or read."""

    ids: list[int]
    logprobs: list[float]
    computed_at_prefill: int
    read_at_prefill: int
    computed_at_decode: int


class Conversations:
    """The page's router between two servers."""

    def __init__(self, prefill: Server, decode: Server, *, logprobs: bool = False) -> None:
        self._prefill, self._decode = prefill, decode
        self._more = {"logprobs": 1} if logprobs else {}
        page = (ROOT / "docs" / "vllm.md").read_text()
        self._code = next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def turn(" in code)

    def turn(self, prompt: Sequence[int], *, first: bool = False) -> Answer:
        """Have the router answer a prompt, the first of a conversation or a later one."""
        before = self._counted()
        asked = self._asked(prompt)
        answer = asyncio.run(self._through_the_router(asked, None if first else ("127.0.0.1", PORT)))
        counted = [int(after - count) for after, count in zip(self._counted(), before, strict=True)]
        return Answer(*_read(answer), *counted)

    def alone(self, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
        """Return the answer to a prompt as one server computes it, and its log probabilities."""
        return _read(self._decode.post("/v1/completions", {**self._asked(prompt), "cache_salt": "alone"}))

    def _asked(self, prompt: Sequence[int]) -> dict[str, Any]:
        return {
            "model": NAME,
            "prompt": list(prompt),
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **self._more,
        }

    async def _through_the_router(self, asked: dict[str, Any], holder: tuple[str, int] | None) -> Any:
        names: dict[str, Any] = {}
        exec(self._code, names)
        timeout = httpx.Timeout(120.0)
        async with (
            httpx.AsyncClient(base_url=self._prefill.url, timeout=timeout) as names["prefill"],
            httpx.AsyncClient(base_url=self._decode.url, timeout=timeout) as names["decode"],
        ):
            turn: Turn = names["turn"]
            return (await turn(asked, holder)).raise_for_status().json()

    def _counted(self) -> tuple[float, float, float]:
        """Return counters of both servers, which they show some steps later."""
        for server in (self._prefill, self._decode):
            for _ in range(2):
                server.ids(prompt_of(3), 1, cache_salt="so that counters are shown")
        of_prefill, of_decode = (server.metric(BY_SOURCE, source="local_compute") for server in self._servers)
        return of_prefill, self._prefill.metric(BY_SOURCE, source="external_kv_transfer"), of_decode

    @property
    def _servers(self) -> tuple[Server, Server]:
        return self._prefill, self._decode


SHOWN = 2 * 3
"""Tokens that each server computes so that its counters are shown."""


def _read(answer: Any) -> tuple[list[int], list[float]]:
    (choice,) = answer["choices"]
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
    return choice["token_ids"], logprobs


def assert_computes_the_new(answer: Answer, new: int) -> None:
    """Check that prefill has computed the new tokens, and less than a block beside."""
    computed = answer.computed_at_prefill - SHOWN
    assert new <= computed <= new + BLOCK_SIZE, answer
    assert answer.computed_at_decode - SHOWN <= 1, f"decode computes no prompt: {answer}"


def test_each_turn_computes_what_is_new(site: Site) -> None:
    prefill, decode = site.have(PREFILL, DECODE)
    talk = Conversations(prefill, decode)
    history = prompt_of(300, seed=31)
    for number in range(4):
        answer = talk.turn(history, first=number == 0)
        assert answer.ids == talk.alone(history)[0], f"turn {number}"
        if number:
            assert_computes_the_new(answer, NEW)
            assert ANSWER - BLOCK_SIZE <= answer.read_at_prefill <= ANSWER + BLOCK_SIZE, answer
        history = [*history, *answer.ids, *prompt_of(NEW, 8000 + number)]


def test_texts_and_logprobs_are_those_of_one_server(site: Site) -> None:
    """With a real model, and words."""
    options = ("--block-size", str(BLOCK_SIZE))
    prefill, decode = site.have(*(replace(side, model=MODEL, options=options) for side in (PREFILL, DECODE)))
    talk = Conversations(prefill, decode, logprobs=True)
    history, new = decode.tokens((ROOT / "README.md").read_text())[:400], list[int]()
    for number, words in enumerate((" Why is that so?", " Say it in other words.", " And then?")):
        answer = talk.turn(history, first=number == 0)
        ids, logprobs = talk.alone(history)
        assert answer.ids == ids
        assert len(logprobs) == ANSWER
        assert answer.logprobs == pytest.approx(logprobs, abs=1e-3)
        if number:
            assert_computes_the_new(answer, len(new))
        new = decode.tokens(words)
        history = [*history, *answer.ids, *new]


def test_a_history_that_the_client_has_rewritten(site: Site) -> None:
    """Nothing stale is read: what follows the change is computed, what precedes it is not."""
    prefill, decode = site.have(PREFILL, DECODE)
    talk = Conversations(prefill, decode)
    history = prompt_of(320, seed=4711)
    answer = talk.turn(history, first=True)
    said = [*history, *answer.ids]
    for changed in (len(history) + 40, 200, 5):  # in the answer, in the prompt, in the first block
        other = [*said, *prompt_of(NEW, 9000 + changed)]
        other[changed] = other[changed] % 100 + 1 if other[changed] != other[changed] % 100 + 1 else other[changed] + 1
        found = talk.turn(other)
        assert found.ids == talk.alone(other)[0], f"token {changed} is another one"
        assert_computes_the_new(found, len(other) - changed)
