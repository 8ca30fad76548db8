"""Both legs at once with `late_blocks`: a request of the decode side holds no blocks before its prefill has begun."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from tests.vllm.conftest import DECODE, PREFILL, Site
from tests.vllm.servers import NAME, HTTPFailed, Server, flow, introduction_of, rendezvous
from tests.vllm.test_failures import ENDED, FAILED, until_free
from tests.vllm.test_hand_over import ALONE

SHORT = "--max-model-len=896"
CHUNKED = replace(PREFILL, options=("--max-num-batched-tokens", "256", SHORT))
NARROW = replace(DECODE, blocks=8, options=(SHORT,), extra=(*DECODE.extra, ("late_blocks", True)))
"""With room for one prompt of 700 tokens: seven blocks of 128 tokens, and the one that vLLM keeps for itself."""
USAGE, WAITING = "vllm:kv_cache_usage_perc", "vllm:num_requests_waiting"
OFFER_WAITS = "vllm:kvflow_offer_wait_seconds_count"


@pytest.fixture(scope="module")
def narrow(site: Site) -> Iterator[tuple[Server, Server]]:
    producer, consumer = site.have(CHUNKED, NARROW)
    yield producer, consumer
    assert all(server.healthy() for server in site.have(CHUNKED, NARROW))


def test_blocks_are_free_for_others_until_the_prefill_begins(narrow: tuple[Server, Server], story: list[int]) -> None:
    producer, consumer = narrow
    prompt, other = story[:700], story[700:1300]
    expected, expected_other = producer.text(prompt, **ALONE), producer.text(other, **ALONE)
    waits = consumer.metric(OFFER_WAITS)
    to_compute, to_receive = rendezvous(introduction_of(producer, story))
    with ThreadPoolExecutor(1) as client:
        receiving = client.submit(consumer.text, prompt, kv_transfer_params=to_receive, cache_salt="late")
        consumer.wait_metric(WAITING, 1)
        assert consumer.text(other) == expected_other, "with blocks for the first request it would wait"
        assert not receiving.done()
        producer.complete(prompt, 1, kv_transfer_params=to_compute, cache_salt="late")
        assert receiving.result() == expected
    consumer.wait_metric(OFFER_WAITS, waits + 1)
    until_free(consumer)


def test_more_prompts_at_once_than_there_are_blocks_for(narrow: tuple[Server, Server], story: list[int]) -> None:
    """Each gets its blocks in turn; the others hold none meanwhile, and the producer keeps their leases."""
    producer, consumer = narrow
    prompts = [story[start : start + 500 + start] for start in range(0, 8 * 25, 25)]
    expected = [producer.text(prompt, 8, **ALONE) for prompt in prompts]
    introduction = introduction_of(producer, story)
    with ThreadPoolExecutor(len(prompts)) as clients:
        found = clients.map(
            lambda prompt: flow(producer, consumer, introduction, prompt, 8, cache_salt="at once"), prompts
        )
        assert list(found) == expected
    for server in narrow:
        until_free(server)


def test_a_prefill_that_never_comes(narrow: tuple[Server, Server], story: list[int]) -> None:
    """The request fails once, within the ticket's time, as without `late_blocks`."""
    producer, consumer = narrow
    failures = consumer.metric(FAILED, reason="PrefillFailed")
    _, params = rendezvous(introduction_of(producer, story), ttl_s=2.0)
    with pytest.raises(HTTPFailed) as caught:
        consumer.text(story[:500], kv_transfer_params=params, cache_salt="never")
    assert caught.value.status == 500
    consumer.wait_metric(FAILED, failures + 1, reason="PrefillFailed")
    until_free(consumer)


def test_a_client_that_disconnects_while_its_request_waits(narrow: tuple[Server, Server], story: list[int]) -> None:
    """The offer that comes later is given back."""
    producer, consumer = narrow
    read = producer.metric(ENDED, outcome="read")
    to_compute, to_receive = rendezvous(introduction_of(producer, story))
    body = {"model": NAME, "prompt": story[:500], "max_tokens": 4, "kv_transfer_params": to_receive}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{consumer.url}/v1/completions", json={**body, "cache_salt": "gone"}, timeout=2.0)
    until_free(consumer)
    producer.complete(story[:500], 1, kv_transfer_params=to_compute, cache_salt="gone")
    producer.wait_metric(ENDED, read + 1, outcome="read")
    until_free(producer)
