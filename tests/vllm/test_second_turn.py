"""Conversations over two real servers: prefill reads the answers' blocks from decode, and computes only what is new."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from tests.vllm.conftest import Site
from tests.vllm.servers import MODEL, NAME, ROOT, Server
from tests.vllm.sharing import DECODE, PORT, PREFILL, sharing_pair
from tests.vllm.test_failures import FAILED, until_free
from tests.vllm.test_models import BLOCK_SIZE, NO_CACHE, TP2, prompt_of
from tests.vllm.test_prefix import BY_SOURCE
from tests.vllm.tiny import WINDOW

ANSWER, LONG, NEW = 70, WINDOW + 50, 45
"""Tokens of an answer, of one that is longer than any window, and of the words that follow an answer."""
Turn = Callable[..., Awaitable[httpx.Response]]
DENSE = ("--prefix-cache-retention-interval", str(BLOCK_SIZE))
"""Option of vLLM 0.32 and later by which its own prefix cache keeps all blocks of windows."""
ROWS = {
    "full attention": (PREFILL, DECODE),
    "windows": sharing_pair("gemma3"),
    "windows, dense": sharing_pair("gemma3", DENSE, DENSE),
    "all windows, dense": sharing_pair("all-sliding", DENSE, DENSE),
    "gpt-oss, dense": sharing_pair("gpt-oss", DENSE, DENSE),
    "TP 2 to 1": sharing_pair("full", decode=TP2),
    "TP 1 to 2": sharing_pair("full", prefill=TP2),
    "windows, dense, TP 2 to 1": sharing_pair("gemma3", DENSE, (*DENSE, *TP2)),
    "windows, dense, TP 1 to 2": sharing_pair("gemma3", (*DENSE, *TP2), DENSE),
}
"""Of each kind of cache. "TP 2 to 1": answers are read from a decode server of two ranks by a prefill server of one."""
SPARSE = ("windows",)
"""Rows in which vLLM keeps a prompt's last window only: a history that was rewritten further back is computed."""


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

    def turn(self, prompt: Sequence[int], *, first: bool = False, tokens: int = ANSWER) -> Answer:
        """Have the router answer a prompt, the first of a conversation or a later one."""
        before = self._counted()
        answer = self.answer(prompt, first=first, tokens=tokens)
        counted = [int(after - count) for after, count in zip(self._counted(), before, strict=True)]
        return Answer(*answer, *counted)

    def answer(self, prompt: Sequence[int], *, first: bool = False, tokens: int) -> tuple[list[int], list[float]]:
        """The same, without counters, for conversations side by side."""
        holder = None if first else ("127.0.0.1", PORT)
        return _read(asyncio.run(self._through_the_router(self._asked(prompt, tokens), holder)))

    def alone(self, prompt: Sequence[int], tokens: int = ANSWER) -> tuple[list[int], list[float]]:
        """Return the answer to a prompt as one server computes it, and its log probabilities."""
        return _read(self._decode.post("/v1/completions", {**self._asked(prompt, tokens), "cache_salt": "alone"}))

    def _asked(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        return {
            "model": NAME,
            "prompt": list(prompt),
            "max_tokens": tokens,
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


@pytest.fixture(scope="module", params=ROWS)
def row(request: pytest.FixtureRequest) -> str:
    """For a module, so that tests of one row follow each other, and servers go on."""
    name: str = request.param
    return name


@pytest.fixture
def talk(row: str, site: Site) -> Conversations:
    return Conversations(*site.have(*ROWS[row]))


def test_each_turn_computes_what_is_new(talk: Conversations) -> None:
    history, before = prompt_of(300, seed=31), 0
    for number, tokens in enumerate((ANSWER, LONG, LONG + 13, ANSWER, 3)):
        answer = talk.turn(history, first=number == 0, tokens=tokens)
        assert answer.ids == talk.alone(history, tokens)[0], f"turn {number}"
        if number:
            assert_computes_the_new(answer, NEW)
            assert before - BLOCK_SIZE <= answer.read_at_prefill <= before + BLOCK_SIZE, answer
        history, before = [*history, *answer.ids, *prompt_of(NEW, 8000 + number)], tokens


def test_a_history_that_the_client_has_rewritten(talk: Conversations, row: str) -> None:
    """Nothing stale is read: what follows the change is computed, what precedes it is not."""
    history = prompt_of(320, seed=4711)
    answer = talk.turn(history, first=True, tokens=LONG)
    said = [*history, *answer.ids]
    for changed in (len(history) + LONG - 10, len(history) + 40, 200, 5):  # the answer, the prompt, the first block
        other = [*said, *prompt_of(NEW, 9000 + changed)]
        other[changed] = other[changed] % 100 + 1 if other[changed] != other[changed] % 100 + 1 else other[changed] + 1
        found = talk.turn(other)
        assert found.ids == talk.alone(other)[0], f"token {changed} is another one"
        if row not in SPARSE:
            assert_computes_the_new(found, len(other) - changed)


def test_a_history_that_the_client_has_cut(talk: Conversations, row: str) -> None:
    """Decode has all of the new prompt but its last token. With windows, prefill's prompt ends with decode's blocks."""
    answer = talk.turn(prompt_of(310, seed=5), first=True, tokens=LONG)
    for blocks in (13, 12):
        cut = [*prompt_of(310, seed=5), *answer.ids][: blocks * BLOCK_SIZE + 1]
        found = talk.turn(cut)
        assert found.ids == talk.alone(cut)[0]
        if row not in SPARSE:
            assert found.computed_at_prefill - SHOWN <= BLOCK_SIZE, found


def test_a_model_with_state_computes_each_turn(site: Site) -> None:
    """The state behind the answer is in no block: texts are right, and prefill computes the whole prompt."""
    talk = Conversations(*site.have(*sharing_pair("falcon-h1", NO_CACHE, NO_CACHE)))
    history = prompt_of(200, seed=77)
    for number in range(3):
        answer = talk.turn(history, first=number == 0)
        assert answer.ids == talk.alone(history)[0], f"turn {number}"
        computed = answer.computed_at_prefill - SHOWN, answer.computed_at_decode - SHOWN
        assert computed == (len(history) - 1, 1), "the last token of a prompt is computed at decode"
        assert answer.read_at_prefill == 0
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


# --- many conversations at once

ANSWERS, TURNS, CLIENTS, LENGTH_MAX = 300, 10, 4, 1500


@dataclass
class Talk:
    """A conversation of which some turns are asked again, and the history of some is rewritten."""

    seed: int
    answers: int = 0
    wrong: int = 0

    def go_on(self, router: Conversations) -> None:
        rng = random.Random(self.seed)
        prompt = prompt_of(rng.randrange(40, 300), 100 + self.seed)
        for turn in range(TURNS):
            tokens = rng.choice((3, 33, ANSWER, LONG))
            found = router.answer(prompt, first=turn == 0, tokens=tokens)[0]
            self.wrong += found != router.alone(prompt, tokens)[0]
            self.answers += 1
            new = prompt_of(rng.randrange(2, 60), 10_000 + 100 * self.seed + turn)
            match rng.randrange(8):
                case _ if len(prompt) > LENGTH_MAX:
                    prompt = prompt[:300]
                case 0:
                    pass  # the same turn again
                case 1:
                    prompt = [*[*prompt, *found][: rng.randrange(20, len(prompt) + len(found))], *new]
                case _:
                    prompt = [*prompt, *found, *new]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "blocks"), [("full attention", 140), ("windows", 500), ("windows, dense", 500)])
def test_300_answers_are_those_of_one_engine(site: Site, kind: str, blocks: int) -> None:
    """140 blocks hold a few conversations only: blocks are reused before they are asked for, and while."""
    prefill, decode = site.have(*(replace(setup, blocks=blocks) for setup in ROWS[kind]))
    router = Conversations(prefill, decode)
    talks = [Talk(seed) for seed in range(ANSWERS // TURNS)]
    before = router._counted()
    with ThreadPoolExecutor(CLIENTS) as clients:
        for ended in [clients.submit(talk.go_on, router) for talk in talks]:
            ended.result()
    computed, read, _ = (int(after - count) for after, count in zip(router._counted(), before, strict=True))
    failed = [int(server.metric(FAILED)) for server in (prefill, decode)]
    wrong = sum(talk.wrong for talk in talks)
    print(f"{kind}: {wrong} wrong; prefill computed {computed} tokens and read {read}; failed loads {failed}")
    assert sum(talk.answers for talk in talks) == ANSWERS
    assert wrong == 0
    assert read > 100 * BLOCK_SIZE, "hardly anything was read: this test has shown nothing"
    for server in (prefill, decode):
        until_free(server)
