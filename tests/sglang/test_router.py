"""SGLang's own router in front of two prefill and two decode servers: answers are those of one server, and were sent.

The router comes from SGLang. Its model's tokenizer has a token for each character, and its answers make no sense: the
tests compare whether they are the same.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: python3 dev.py sglang")

import httpx

from tests.sglang.servers import PAGE, Server, Setup, prompt_of
from tests.sglang.test_pair import settle
from tests.sglang.tiny import tokenizer
from tests.support.running_router import running_router
from tests.support.traffic import Traffic

PAGE_MB = 4 * 2 * PAGE * 2 * 32 * 4 / 2**20
"""Of four layers, K and V, two heads of 32 floats."""
OFTEN = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1")
TOOLS = ("--tool-call-parser", "pythonic", "--constrained-json-disable-any-whitespace")
FOR_LOST_DECODES = (
    ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "15"),
    ("KVFLOW_SGLANG_CONFIG", json.dumps({"lease_ttl_s": 10.0})),
)
"""This router waits for both servers. A prefill server does not know which decode server is to come: it waits for one
that has died for the first time, and for the second one if it had come already (300 s and 30 s by default)."""
UP_WITHIN_S, SENT_WITHIN_S = 120.0, 60.0
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Paris", "Rome"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}
STORY = "".join(f"The {number}. sentence of a story that has no end. " for number in range(40))
PAUSE = threading.Event()
_seeds = itertools.count(1000)


@dataclass
class Fleet:
    prefills: list[Server] = field(default_factory=list)
    decodes: list[Server] = field(default_factory=list)
    alone: Server | None = None
    """One server that does both. Its answers are the right ones."""

    @property
    def pairs(self) -> list[Server]:
        return [*self.prefills, *self.decodes]

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of one server."""
        assert self.alone is not None
        return asked(self.alone.client, f"{self.alone.url}{path}", body)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    with contextlib.ExitStack() as stack:

        def start(mode: str, *options: str) -> Server:
            setup = Setup(mode=mode, text=True, options=(*TOOLS, *options), environment=FOR_LOST_DECODES)
            server = Server.start(setup)
            stack.callback(server.stop)
            return server

        made.prefills += [start("prefill", "--enable-metrics") for _ in range(2)]
        made.decodes += [start("decode") for _ in range(2)]
        made.alone = start("null")
        for server in (*made.pairs, made.alone):
            server.wait_up()
        yield made


def router(fleet: Fleet, *options: str) -> contextlib.AbstractContextManager[httpx.Client]:
    """A client of SGLang's router."""
    places = [word for one in fleet.prefills for word in ("--prefill", one.url, str(one.bootstrap_port))]
    places += [word for one in fleet.decodes for word in ("--decode", one.url)]
    words = ("--pd-disaggregation", *places, *options)
    return running_router("sglang_router.launch_router", words, ready="/readiness")


@pytest.fixture(scope="module")
def routed(fleet: Fleet) -> Iterator[httpx.Client]:
    with router(fleet) as client:
        yield client


def asked(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def completion(prompt: Any, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


def chat(message: str, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": message}]}
    return {"model": "tiny", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **said, **more}


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def events_of(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed answer."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def sent_pages(server: Server) -> float:
    """Return the number of pages that the prefill server has sent, by SGLang's own metric."""
    lines = server.client.get(f"{server.url}/metrics").text.splitlines()
    name = "sglang:kv_transfer_total_mb_sum"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)) / PAGE_MB


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


@contextlib.contextmanager
def sent(fleet: Fleet, count: int) -> Iterator[None]:
    """Fail unless prefill servers hand over exactly that many pages meanwhile. Decode servers here keep nothing."""
    before = sum(map(sent_pages, fleet.prefills))
    yield
    deadline_s = time.monotonic() + SENT_WITHIN_S
    while (found := sum(map(sent_pages, fleet.prefills)) - before) < count and time.monotonic() < deadline_s:
        PAUSE.wait(0.1)
    assert found == pytest.approx(count), f"{count} pages were to be sent, not {found}"


def generate(client: httpx.Client, url: str, prompt: Any, max_tokens: int = 16) -> tuple[int, Any]:
    """Status and tokens of an answer."""
    sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = client.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling})
    if answer.status_code != 200:
        return answer.status_code, []
    said = answer.json()
    return 200, [one["output_ids"] for one in said] if isinstance(said, list) else said["output_ids"]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 129, 900])
def test_tokens(fleet: Fleet, routed: httpx.Client, length: int) -> None:
    prompt = prompt_of(length, seed=70)
    with sent(fleet, pages(length)):
        found = generate(routed, "", prompt)
    assert found == (200, fleet.alone.generate(prompt))


def test_a_list_of_tokens(fleet: Fleet, routed: httpx.Client) -> None:
    several = [prompt_of(30 + 40 * at, seed=71) for at in range(3)]
    with sent(fleet, sum(pages(len(prompt)) for prompt in several)):
        found = generate(routed, "", several)
    assert found == (200, [fleet.alone.generate(prompt) for prompt in several])


def test_completions_and_a_stream_of_them(fleet: Fleet, routed: httpx.Client) -> None:
    body = completion(STORY[:300], 24)
    expected = texts(fleet.post("/v1/completions", body))
    with sent(fleet, 2 * pages(300)):
        assert texts(asked(routed, "/v1/completions", body)) == expected
        events = events_of(routed, "/v1/completions", body)
    assert ["".join(event["choices"][0]["text"] for event in events if event["choices"])] == expected
    assert len(events) > 2, "it came at once"


def test_a_list_of_prompts(fleet: Fleet, routed: httpx.Client) -> None:
    several = [STORY[at : at + 100 + at] for at in (10, 20, 30)]
    expected = [texts(fleet.post("/v1/completions", completion(prompt)))[0] for prompt in several]
    with sent(fleet, sum(pages(len(prompt)) for prompt in several)):
        assert texts(asked(routed, "/v1/completions", completion(several))) == expected


def test_chat_and_a_stream_of_it(fleet: Fleet, routed: httpx.Client) -> None:
    body = chat(STORY[400:600])
    alone = fleet.post("/v1/chat/completions", body)
    expected, tokens = alone["choices"][0]["message"]["content"], alone["usage"]["prompt_tokens"]
    with sent(fleet, 2 * pages(tokens)):
        found = asked(routed, "/v1/chat/completions", body)
        events = events_of(routed, "/v1/chat/completions", body)
    assert found["choices"][0]["message"]["content"] == expected
    said = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert "".join(said) == expected
    assert found["usage"]["prompt_tokens"] == tokens


@pytest.mark.parametrize("count", [2, 4])
def test_samples(fleet: Fleet, routed: httpx.Client, count: int) -> None:
    """All samples have one room, and so has the request that fills SGLang's prefix cache before them."""
    body = completion(STORY[700:860], n=count)
    expected = texts(fleet.post("/v1/completions", body))
    assert len(expected) == count
    before = sum(map(sent_pages, fleet.prefills))
    assert texts(asked(routed, "/v1/completions", body)) == expected
    settle_all(fleet)
    assert sum(map(sent_pages, fleet.prefills)) - before >= count * pages(160) - 0.01


def test_tools(fleet: Fleet, routed: httpx.Client) -> None:
    """Calls that have to be made, by a grammar that the prefill server's token has to follow, too.

    SGLang's grammar lets a call go on for ever, and a model without sense does: it is made to like brackets that close.
    """
    ends = {str(tokenizer().convert_tokens_to_ids(character)): 100 for character in "}]"}
    how = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "ignore_eos": False}
    for at in range(3):
        body = chat(STORY[900 + at : 960], 100, logit_bias=ends, **how)
        alone = fleet.post("/v1/chat/completions", body)
        with sent(fleet, pages(alone["usage"]["prompt_tokens"])):
            found = asked(routed, "/v1/chat/completions", body)
        calls = [answer["choices"][0]["message"]["tool_calls"][0]["function"] for answer in (alone, found)]
        assert calls[0] == calls[1]
        assert json.loads(calls[1]["arguments"])["town"] in ("Paris", "Rome")


def test_clients_that_leave(fleet: Fleet, routed: httpx.Client) -> None:
    """In the middle of a stream, and before anything has come."""
    for at in range(3):
        with routed.stream("POST", "/v1/completions", json=completion(STORY[at:700], 600, stream=True)) as answer:
            next(answer.iter_lines())
    for at in range(3):
        with pytest.raises(httpx.ReadTimeout):
            routed.post("/v1/completions", json=completion(STORY[at + 50 : 700], 600), timeout=0.2)
    settle_all(fleet)
    later = prompt_of(200, seed=72)
    with sent(fleet, pages(200)):
        assert generate(routed, "", later) == (200, fleet.alone.generate(later))


def test_many_at_once(fleet: Fleet, routed: httpx.Client) -> None:
    several = [prompt_of(30 + 17 * at, seed=73) for at in range(20)]
    before = [sent_pages(server) for server in fleet.prefills]
    with sent(fleet, sum(pages(len(prompt)) for prompt in several)), ThreadPoolExecutor(8) as clients:
        found = list(clients.map(lambda prompt: generate(routed, "", prompt, 8), several))
    assert found == [(200, fleet.alone.generate(prompt, 8)) for prompt in several]
    assert all(sent_pages(server) > then for server, then in zip(fleet.prefills, before, strict=True))


def settle_all(fleet: Fleet) -> None:
    """All servers that are left live, are idle, and have all of their pages."""
    for server in fleet.pairs:
        assert server.process.poll() is None, server.said()[-3000:]
        settle(server, 120.0)
        assert server.healthy(), server.said()[-3000:]
        assert "leak" not in server.said()


def endless() -> Iterator[list[int]]:
    for seed in _seeds:
        yield prompt_of(40 + 30 * (seed % 12), seed=seed)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_of_two_is_killed_under_traffic(fleet: Fleet, role: str) -> None:
    """The router tries again: every answer is right, and the remaining servers serve all requests after a while."""
    side = fleet.prefills if role == "prefill" else fleet.decodes
    with router(fleet, *OFTEN) as client:
        with Traffic(lambda prompt: generate(client, "", prompt, 24), endless()) as traffic:
            traffic.until_answered(8)
            victim = side.pop(0)
            killed_s = time.monotonic()
            victim.kill()
            traffic.until_answered(12, killed_s)
        traffic.check(role, killed_s, lambda prompt: fleet.alone.generate(prompt, 24))
        settle_all(fleet)
        several: Sequence[list[int]] = [next(endless()) for _ in range(8)]
        with sent(fleet, sum(pages(len(prompt)) for prompt in several)), ThreadPoolExecutor(4) as clients:
            found = list(clients.map(lambda prompt: generate(client, "", prompt), several))
        assert found == [(200, fleet.alone.generate(prompt)) for prompt in several]
    settle_all(fleet)
