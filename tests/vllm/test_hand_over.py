"""Prompts go from one vLLM to another and the answers are those of one vLLM alone."""

from __future__ import annotations

import asyncio
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.vllm.conftest import DECODE, PREFILL, Site
from tests.vllm.servers import NAME, NEWER, ROOT, VERSION, HTTPFailed, Server, hand_over, prefill

EXTERNAL = "vllm:prompt_tokens_by_source_total"
SOURCES = ("external_kv_transfer", "local_cache_hit", "local_compute")
ENDED = "vllm:kvflow_leases_total"
LOADS = "vllm:kvflow_load_seconds_count"
REFUSED = "vllm:kvflow_tickets_refused_total"
FAILED = "vllm:kvflow_load_failures_total"
LENGTHS = [3, 100, 127, 128, 129, 417, 1000, 1900]  # a block has 128 tokens
ALONE = {"cache_salt": "alone"}  # a prefix cache of its own


def received_tokens(server: Server) -> float:
    return server.metric(EXTERNAL, source="external_kv_transfer")


@pytest.mark.parametrize("length", LENGTHS)
def test_the_text_is_that_of_a_single_instance(pair: tuple[Server, Server], story: list[int], length: int) -> None:
    producer, consumer = pair
    prompt = story[-length:]
    expected = producer.text(prompt, **ALONE)
    before = received_tokens(consumer)
    assert hand_over(producer, consumer, prompt) == expected
    consumer.wait_metric(EXTERNAL, before + length, source="external_kv_transfer")
    assert received_tokens(consumer) == before + length, "the prompt was computed, not received"


def test_the_pages_router(pair: tuple[Server, Server], story: list[int]) -> None:
    """As it stands on its page, which starts servers as these are started, with HTTP clients for its two names."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "vllm.md").read_text(), re.DOTALL)[0]
    prompt, names = story[200:500], dict[str, Any]()
    exec(code, names)

    async def answer() -> str:
        urls = [f"http://127.0.0.1:{server.port}" for server in pair]
        timeout = httpx.Timeout(120.0)
        async with (
            httpx.AsyncClient(base_url=urls[0], timeout=timeout) as names["prefill"],
            httpx.AsyncClient(base_url=urls[1], timeout=timeout) as names["decode"],
        ):
            asked = {"model": NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0}
            found: str = (await names["complete"](asked)).json()["choices"][0]["text"]
            return found

    before = received_tokens(pair[1])
    assert asyncio.run(answer()) == pair[0].text(prompt, 16, **ALONE)
    pair[1].wait_metric(EXTERNAL, before + len(prompt), source="external_kv_transfer")


def test_a_cached_prefix_is_not_received_again(pair: tuple[Server, Server], story: list[int]) -> None:
    producer, consumer = pair
    prompt = story[50:650]
    expected = producer.text(prompt, **ALONE)
    consumer.text(prompt[:256], 1)
    before = received_tokens(consumer)
    assert hand_over(producer, consumer, prompt) == expected
    consumer.wait_metric(EXTERNAL, before + 600 - 256, source="external_kv_transfer")
    assert received_tokens(consumer) == before + 600 - 256


def test_what_was_received_is_a_prefix_for_later_prompts(pair: tuple[Server, Server], story: list[int]) -> None:
    producer, consumer = pair
    prompt = story[700:1100]
    hand_over(producer, consumer, prompt)
    assert consumer.text(prompt + story[:20]) == producer.text(prompt + story[:20], **ALONE)


def test_samples_of_a_prompt_share_one_load(pair: tuple[Server, Server], story: list[int]) -> None:
    """The first reads the prompt, the others find it cached, but for the last block, which is partly filled."""
    producer, consumer = pair
    prompt, sampled = story[1700:2000], {"n": 4, "seed": 7, "temperature": 0.8, "ignore_eos": True}
    expected = texts_of(producer.complete(prompt, 12, **sampled, **ALONE))
    ended = producer.metric(ENDED, outcome="read")
    before = {source: consumer.metric(EXTERNAL, source=source) for source in SOURCES}
    refused, loads = consumer.metric(REFUSED), consumer.metric(LOADS)
    found = texts_of(consumer.complete(prompt, 12, **sampled, kv_transfer_params=prefill(producer, prompt)))
    assert found == expected
    assert len(set(found)) > 1, "this has shown nothing"
    consumer.wait_metric(LOADS, loads + 4)
    received = {source: consumer.metric(EXTERNAL, source=source) - before[source] for source in SOURCES}
    assert received == {"external_kv_transfer": 300 + 3 * 44, "local_cache_hit": 3 * 256, "local_compute": 0}
    assert consumer.metric(REFUSED) == refused
    producer.wait_metric(ENDED, ended + 1, outcome="read")


def texts_of(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_ids_of_any_length(pair: tuple[Server, Server], story: list[int]) -> None:
    producer, consumer = pair
    prompt = story[40:240]
    expected = producer.text(prompt, **ALONE)
    before = received_tokens(consumer)
    for server in pair:
        server.client.headers["X-Request-Id"] = "x" * 3000
    try:
        assert hand_over(producer, consumer, prompt) == expected
    finally:
        for server in pair:
            del server.client.headers["X-Request-Id"]
    consumer.wait_metric(EXTERNAL, before + 200, source="external_kv_transfer")


def test_a_prompt_of_another_salt_fails(pair: tuple[Server, Server], story: list[int]) -> None:
    """As in vLLM's own prefix cache. A router may also have removed a picture."""
    producer, consumer = pair
    prompt = story[240:440]
    expected = producer.text(prompt, **ALONE)
    for theirs, ours in (("one", "one"), ("one", "two"), (None, "one"), ("one", None)):
        before, failed = received_tokens(consumer), consumer.metric(FAILED, reason="PromptMismatch")
        params = prefill(producer, prompt, cache_salt=theirs)
        salt = {"cache_salt": ours, "kv_transfer_params": params}
        if theirs == ours:
            assert consumer.text(prompt, **salt) == expected
            consumer.wait_metric(EXTERNAL, before + 200, source="external_kv_transfer")
        else:
            told = refusal_of(consumer, prompt, **salt)
            assert told == ((400, INVALID) if VERSION >= NEWER else (500, INTERNAL))
            consumer.wait_metric(FAILED, failed + 1, reason="PromptMismatch")
            assert received_tokens(consumer) == before
    assert consumer.text(prompt, cache_salt="two") == expected


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_client_is_told_of_each_failure(pair: tuple[Server, Server], story: list[int], stream: bool) -> None:
    """The table of the page about routers: a stream has begun with HTTP 200 when the request fails."""
    producer, consumer = pair
    mismatch, ended = (prefill(producer, story[part : part + 200], cache_salt="told") for part in (240, 640))
    producer.post("/reset_prefix_cache", reset_external="true")
    wrong = {"cache_salt": "other", "kv_transfer_params": mismatch, "stream": stream}
    late = {"cache_salt": "told", "kv_transfer_params": ended, "stream": stream}
    assert refusal_of(consumer, story[240:440], **wrong) == ((400, INVALID) if VERSION >= NEWER else (500, INTERNAL))
    assert refusal_of(consumer, story[640:840], **late) == (500, INTERNAL)


INTERNAL = "Internal server error"
INVALID = "Invalid structured outputs: this prompt is not the one that was prefilled: request 'cmpl-...'"


def refusal_of(server: Server, prompt: list[int], **more: Any) -> tuple[int, str]:
    """The status and the message of the error that the client of a request gets, without its request's id."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 8, **more}
    response = server.client.post(f"{server.url}/v1/completions", json=body)
    if more.get("stream"):
        assert response.status_code == 200
        text = response.text.removeprefix("data: ").partition("\n\n")[0]
    else:
        text = response.text
    error = json.loads(text)["error"]
    assert response.status_code in (200, error["code"])
    return error["code"], re.sub(r"'cmpl-[^']*'", "'cmpl-...'", error["message"])


def test_a_request_that_is_refused_or_has_failed_is_no_second_one(site: Site, story: list[int]) -> None:
    """vLLM tells its connector so by a request that is aborted at once."""
    producer, consumer = site.have(PREFILL, DECODE)
    refused, read = consumer.metric(REFUSED), producer.metric(ENDED, outcome="read")
    params = prefill(producer, story[440:640])
    for _ in range(2):  # the first one gives the ticket back, the second one finds it used
        with pytest.raises(HTTPFailed) as caught:
            consumer.complete(story[440:640], -1, kv_transfer_params=params)
        assert caught.value.status == 400
    producer.wait_metric(ENDED, read + 1, outcome="read")
    assert consumer.text(story[440:460]) == producer.text(story[440:460], **ALONE)
    assert consumer.metric(REFUSED) == refused


def test_a_sampled_token_at_the_end_is_no_part_of_it(pair: tuple[Server, Server], story: list[int]) -> None:
    """Routers that let the prefill side generate more than one token: its prompt is offered, and nothing else."""
    producer, consumer = pair
    prompt = story[1100:1300]
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    params = producer.complete(prompt, 5, kv_transfer_params=wanted)["kv_transfer_params"]
    assert consumer.text(prompt, kv_transfer_params=params) == producer.text(prompt, **ALONE)


def test_many_at_once(pair: tuple[Server, Server], story: list[int]) -> None:
    """32 requests through servers that run 8 at a time, with caches of 64 blocks."""
    producer, consumer = pair
    prompts = [story[start : start + 60 + 9 * start // 40] for start in range(13, 13 + 32 * 40, 40)]  # new to both
    expected = [producer.text(prompt, 8, **ALONE) for prompt in prompts]
    before = received_tokens(consumer)
    with ThreadPoolExecutor(32) as clients:
        assert list(clients.map(lambda prompt: hand_over(producer, consumer, prompt, 8), prompts)) == expected
    consumer.wait_metric(EXTERNAL, before + sum(map(len, prompts)), source="external_kv_transfer")


def test_many_that_were_computed_before_at_once(pair: tuple[Server, Server], story: list[int]) -> None:
    """All their loads begin together, and each asks the prefill side for its lease."""
    producer, consumer = pair
    prompts = [story[start : start + 40] for start in range(7, 32 * 40, 40)]
    expected = [producer.text(prompt, 8, **ALONE) for prompt in prompts]
    with ThreadPoolExecutor(32) as clients:
        params = list(clients.map(lambda prompt: prefill(producer, prompt), prompts))
        texts = clients.map(lambda prompt, asked: consumer.text(prompt, 8, kv_transfer_params=asked), prompts, params)
        assert list(texts) == expected


def test_the_lines_of_the_runtime_are_among_those_of_vllm(pair: tuple[Server, Server]) -> None:
    for server in pair:
        assert re.search(r"INFO .*runtime .* opened at tcp:", server.log.read_text())


def test_all_blocks_come_back(pair: tuple[Server, Server], story: list[int]) -> None:
    producer, consumer = pair
    hand_over(producer, consumer, story[:300])
    for server in pair:
        until(lambda server=server: server.metric("vllm:kv_cache_usage_perc") == 0.0)


def test_metrics_of_both_sides(pair: tuple[Server, Server], story: list[int]) -> None:
    producer, consumer = pair
    loads, leases = "vllm:kvflow_load_seconds_count", "vllm:kvflow_leases_total"
    before = consumer.metric(loads), producer.metric(leases, outcome="read")
    hand_over(producer, consumer, story[1300:1500])
    consumer.wait_metric(loads, before[0] + 1)
    producer.wait_metric(leases, before[1] + 1, outcome="read")
    assert consumer.metric("vllm:kvflow_load_bytes_sum") > 0


def test_parameters_of_another_connector_are_computed_locally(pair: tuple[Server, Server], story: list[int]) -> None:
    _, consumer = pair
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "other",
        "remote_block_ids": [[1, 2]],
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
    }
    prompt = story[1500:1600]
    assert consumer.text(prompt, kv_transfer_params=params) == consumer.text(prompt, **ALONE)


def test_a_reset_of_the_cache_withdraws_what_is_offered(site: Site, story: list[int]) -> None:
    """As after new weights: the old contents of the blocks must not be read."""
    producer, consumer = site.have(PREFILL, DECODE)
    salted = {"cache_salt": "after a reset"}
    params = prefill(producer, story[:300], **salted)
    producer.post("/reset_prefix_cache", reset_external="true")
    producer.wait_metric("vllm:kvflow_leases_total", 1, outcome="revoked")
    with pytest.raises(HTTPFailed) as caught:
        consumer.text(story[:300], kv_transfer_params=params, **salted)
    assert caught.value.status == 500


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_waits_for_offers_which_can_be_read(pair: tuple[Server, Server], story: list[int], mode: str) -> None:
    """A reset meanwhile changes nothing, and says so."""
    producer, consumer = pair
    salted = {"cache_salt": f"paused by {mode}"}
    alone = consumer.text(story[:300], cache_salt="alone")
    params = prefill(producer, story[:300], **salted)
    with ThreadPoolExecutor() as pool:
        paused = pool.submit(producer.post, "/pause", mode=mode)
        assert producer.post("/reset_prefix_cache") == {"success": False}
        assert consumer.text(story[:300], kv_transfer_params=params, **salted) == alone
        assert paused.result() == {"status": "paused"}
    producer.wait_metric("vllm:kvflow_leases_total", 1, outcome="read")
    producer.post("/resume")
    assert producer.text(story[:300], cache_salt="alone") == alone


def test_a_server_that_slept_goes_on(pair: tuple[Server, Server], story: list[int]) -> None:
    producer, consumer = pair
    for server in pair:
        server.post("/sleep", level=0)
        server.post("/wake_up")
    prompt = story[300:500]
    assert hand_over(producer, consumer, prompt) == producer.text(prompt, **ALONE)


def test_idle_servers_leave_the_cpu_alone(pair: tuple[Server, Server], story: list[int]) -> None:
    """Every thread of a worker but its main one: kvflow's, NIXL's and UCX's, and vLLM's own."""
    producer, consumer = pair
    hand_over(producer, consumer, story[:300])
    used = {}
    for server in pair:
        worker = server.worker()
        before = {thread.id: thread.user_time + thread.system_time for thread in worker.threads()}
        time.sleep(10.0)
        after = {thread.id: thread.user_time + thread.system_time for thread in worker.threads()}
        used[server.setup.role] = max(
            spent - before.get(thread, 0.0) for thread, spent in after.items() if thread != worker.pid
        )
    assert all(seconds / 10.0 < 0.01 for seconds in used.values()), f"seconds of CPU in 10 s, busiest thread: {used}"


def until(condition) -> None:
    deadline_s = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
