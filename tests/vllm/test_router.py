"""vLLM's own router (the package vllm-router) in front of real pairs: texts are those of one engine, and were received.

The router comes from vLLM. dev.py brings it, and KVFLOW_VLLM_ROUTER names another folder of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.running_router import running_router
from tests.vllm.conftest import DECODE, PREFILL, Site
from tests.vllm.servers import HOME, NAME, Server
from tests.vllm.test_hand_over import ENDED, FAILED, REFUSED, received_tokens

ROUTER = Path(os.environ.get("KVFLOW_VLLM_ROUTER", HOME / "vllm-router"))
ALONE = {"cache_salt": "alone"}
LENGTHS = (3, 127, 128, 129, 417, 1000)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"enum": ["Paris", "Rome"]}}, "required": ["town"]},
    },
}
MESSAGES = [{"role": "user", "content": "What is the capital of France, and how is the weather there? " * 20}]


def router(
    prefills: Sequence[Server], decodes: Sequence[Server], *options: str
) -> contextlib.AbstractContextManager[httpx.Client]:
    """A client of the router."""
    assert (ROUTER / "vllm_router").is_dir(), "vllm-router is missing: run these tests with `python3 dev.py vllm`"
    sides = [("--prefill", server) for server in prefills] + [("--decode", server) for server in decodes]
    places = [word for side, server in sides for word in (side, f"http://127.0.0.1:{server.port}")]
    kind = ("--vllm-pd-disaggregation", "--kv-connector", "nixl")
    words = (*kind, *places, *options)
    return running_router("vllm_router.launch_router", words, ready="/health", environment={"PYTHONPATH": str(ROUTER)})


@pytest.fixture(scope="module")
def sides(site: Site) -> tuple[Server, Server]:
    producer, consumer = site.have(PREFILL, DECODE)
    return producer, consumer


@pytest.fixture(scope="module")
def routed(sides: tuple[Server, Server]) -> Iterator[httpx.Client]:
    with router([sides[0]], [sides[1]]) as client:
        yield client


def completion(prompt: Any, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}


def chat(max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": MESSAGES, "max_tokens": max_tokens, "temperature": 0, **more}


def asked(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


@contextlib.contextmanager
def received(consumers: Sequence[Server], tokens: int | None = None) -> Iterator[None]:
    """Fail if decode servers have not received exactly `tokens` tokens meanwhile (None: any), or have refused a ticket.

    Texts alone would be equal if the decode side had computed all prompts.
    """
    before = [(received_tokens(one), one.metric(REFUSED), one.metric(FAILED)) for one in consumers]
    yield
    deadline_s = time.monotonic() + 60.0
    while True:
        after = [(received_tokens(one), one.metric(REFUSED), one.metric(FAILED)) for one in consumers]
        found = sum(now[0] - then[0] for now, then in zip(after, before, strict=True))
        if found >= (tokens or 1) or time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
    assert found > 0, "nothing was moved: the decode side has computed it all"
    assert tokens in (None, found), f"{tokens} tokens were to be received, not {found}"
    assert [now[1:] for now in after] == [then[1:] for then in before], "tickets were refused, or loads failed"


@pytest.mark.parametrize("length", LENGTHS)
def test_completions(sides: tuple[Server, Server], routed: httpx.Client, story: list[int], length: int) -> None:
    prompt = story[-length:]
    expected = sides[0].text(prompt, **ALONE)
    with received(sides[1:], length):
        assert texts(asked(routed, "/v1/completions", completion(prompt))) == [expected]


def test_a_stream_of_completions(sides: tuple[Server, Server], routed: httpx.Client, story: list[int]) -> None:
    prompt = story[300:500]
    expected = sides[0].text(prompt, 24, **ALONE)
    with received(sides[1:], len(prompt)):
        found = streamed(routed, "/v1/completions", completion(prompt, 24))
    assert "".join(event["choices"][0]["text"] for event in found if event["choices"]) == expected
    assert len(found) > 2, "it came at once"


def test_chat_and_a_stream_of_it(sides: tuple[Server, Server], routed: httpx.Client) -> None:
    alone = sides[0].post("/v1/chat/completions", chat(**ALONE))
    expected, tokens = alone["choices"][0]["message"]["content"], alone["usage"]["prompt_tokens"]
    with received(sides[1:], tokens):
        found = asked(routed, "/v1/chat/completions", chat())
    assert found["choices"][0]["message"]["content"] == expected
    sides[1].post("/reset_prefix_cache")
    with received(sides[1:], tokens):
        events = streamed(routed, "/v1/chat/completions", chat(stream_options={"include_usage": True}))
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]) == expected
    assert events[-1]["usage"]["prompt_tokens"] == tokens


def test_samples(sides: tuple[Server, Server], routed: httpx.Client, story: list[int]) -> None:
    prompt, sampled = story[600:900], {"n": 3, "seed": 7, "temperature": 0.8, "ignore_eos": True}
    expected = texts(sides[0].complete(prompt, 12, **sampled, **ALONE))
    with received(sides[1:]):
        found = texts(asked(routed, "/v1/completions", completion(prompt, 12, **sampled)))
    assert found == expected
    assert len(set(found)) > 1, "this has shown nothing"


def test_a_list_of_prompts(sides: tuple[Server, Server], routed: httpx.Client, story: list[int]) -> None:
    """vLLM answers with the parameters of the first one: the others are computed by the decode side."""
    prompts = [story[1000:1150], story[1200:1400], story[1500:1600]]
    expected = [sides[0].text(prompt, **ALONE) for prompt in prompts]
    before, refused = received_tokens(sides[1]), sides[1].metric(REFUSED)
    assert texts(asked(routed, "/v1/completions", completion(prompts))) == expected
    sides[1].wait_metric(REFUSED, refused + 2)
    assert received_tokens(sides[1]) == before + len(prompts[0])


def test_tools(sides: tuple[Server, Server], routed: httpx.Client) -> None:
    asks = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    alone = sides[0].post("/v1/chat/completions", chat(64, **asks, **ALONE))
    with received(sides[1:]):
        found = asked(routed, "/v1/chat/completions", chat(64, **asks))
    calls = [answer["choices"][0]["message"]["tool_calls"][0]["function"] for answer in (alone, found)]
    assert calls[0] == calls[1]
    assert calls[0]["name"] == "weather"


def test_clients_that_leave(sides: tuple[Server, Server], routed: httpx.Client, story: list[int]) -> None:
    """In the middle of a stream, and before the first token. Their offers are given back, and other clients go on."""
    prompts = [story[50 * number :][:400] for number in range(6)]
    for prompt in prompts[:3]:
        with routed.stream("POST", "/v1/completions", json=completion(prompt, 400, stream=True)) as answer:
            next(answer.iter_lines())
    for prompt in prompts[3:]:
        with pytest.raises(httpx.ReadTimeout):
            routed.post("/v1/completions", json=completion(prompt, 400), timeout=0.2)
    later = story[1600:1900]
    expected = sides[0].text(later, **ALONE)
    with received(sides[1:], len(later)):
        assert texts(asked(routed, "/v1/completions", completion(later))) == [expected]
    until(lambda: all(server.metric("vllm:num_requests_running") == 0 for server in sides), "requests go on")


def test_many_at_once(sides: tuple[Server, Server], routed: httpx.Client, story: list[int]) -> None:
    prompts = [story[70 * number :][: 100 + 9 * number] for number in range(20)]
    expected = [sides[0].text(prompt, 8, **ALONE) for prompt in prompts]
    sides[1].post("/reset_prefix_cache")
    with received(sides[1:]), ThreadPoolExecutor(8) as clients:
        found = clients.map(lambda prompt: asked(routed, "/v1/completions", completion(prompt, 8)), prompts)
        assert [texts(answer)[0] for answer in found] == expected


def test_every_offer_was_read_or_is_accounted_for(sides: tuple[Server, Server]) -> None:
    """Runs last: two prompts of the list and two samples were never read, and perhaps those of clients that left."""
    left = 6
    sides[0].wait_metric(ENDED, 4, outcome="expired")
    until(lambda: sides[0].metric("vllm:kv_cache_usage_perc") == 0, "blocks are still held")
    assert 4 <= sides[0].metric(ENDED, outcome="expired") <= 4 + left
    assert sides[0].metric(ENDED, outcome="read") >= len(LENGTHS) + 20
    assert sides[0].metric(ENDED, outcome="failed") == 0


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed answer."""
    found = []
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                found.append(json.loads(line.removeprefix("data: ")))
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)
