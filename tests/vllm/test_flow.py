"""Prompts that are received while they are computed: both engines get their requests at once, and meet by a name."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.vllm.conftest import DECODE, PREFILL, Site
from tests.vllm.servers import HTTPFailed, Server, flow, introduction_of, rendezvous
from tests.vllm.test_failures import until_free
from tests.vllm.test_hand_over import ALONE, EXTERNAL, received_tokens

CHUNKED = replace(PREFILL, options=("--max-num-batched-tokens", "256"))


@pytest.fixture(scope="module")
def chunked(site: Site) -> Iterator[tuple[Server, Server]]:
    """The prefill side computes a prompt in steps of 256 tokens."""
    producer, consumer = site.have(CHUNKED, DECODE)
    yield producer, consumer
    assert all(server.healthy() for server in site.have(CHUNKED, DECODE))


@pytest.mark.parametrize("length", [3, 128, 257, 417, 1000, 1900])
def test_the_text_is_that_of_a_single_instance(chunked: tuple[Server, Server], story: list[int], length: int) -> None:
    producer, consumer = chunked
    prompt = story[-length:]
    expected = producer.text(prompt, **ALONE)
    before, introduction = received_tokens(consumer), introduction_of(producer, story)
    assert flow(producer, consumer, introduction, prompt, cache_salt=f"flow {length}") == expected
    consumer.wait_metric(EXTERNAL, before + length, source="external_kv_transfer")
    assert received_tokens(consumer) == before + length, "the prompt was computed, not received"


def test_many_at_once(chunked: tuple[Server, Server], story: list[int]) -> None:
    """Twice as many as run at a time: requests that wait at one side are waited for by the other."""
    producer, consumer = chunked
    prompts = [story[start : start + 200 + 9 * start // 40] for start in range(0, 16 * 40, 40)]
    expected = [producer.text(prompt, 8, **ALONE) for prompt in prompts]
    introduction = introduction_of(producer, story)
    with ThreadPoolExecutor(16) as clients:
        found = clients.map(lambda prompt: flow(producer, consumer, introduction, prompt, 8), prompts)
        assert list(found) == expected
    for server in chunked:
        until_free(server)


def test_a_prefix_that_is_cached_is_not_received_again(chunked: tuple[Server, Server], story: list[int]) -> None:
    producer, consumer = chunked
    prompt = story[300:1000]
    expected = producer.text(prompt, **ALONE)
    consumer.text(prompt[:384], 1)
    before = received_tokens(consumer)
    assert flow(producer, consumer, introduction_of(producer, story), prompt) == expected
    consumer.wait_metric(EXTERNAL, before + 700 - 384, source="external_kv_transfer")


@pytest.mark.parametrize("cached", [128, 640, 700])
def test_what_prefill_has_cached_is_read_before_it_computes_the_rest(
    chunked: tuple[Server, Server], story: list[int], cached: int
) -> None:
    """That it is read before is measured by `compare.py --only cached`; here, that it is right."""
    producer, consumer = chunked
    prompt, salt = story[600:1300], f"cached {cached}"
    expected = producer.text(prompt, **ALONE)
    before, introduction = received_tokens(consumer), introduction_of(producer, story)
    producer.text(prompt[:cached], 1, cache_salt=salt)
    assert flow(producer, consumer, introduction, prompt, cache_salt=salt) == expected
    consumer.wait_metric(EXTERNAL, before + 700, source="external_kv_transfer")
    assert received_tokens(consumer) == before + 700, "the prompt was computed, not received"


def test_a_reader_whose_prefill_never_comes(chunked: tuple[Server, Server], story: list[int]) -> None:
    producer, consumer = chunked
    _, params = rendezvous(introduction_of(producer, story), ttl_s=2.0)
    with pytest.raises(HTTPFailed) as caught:
        consumer.text(story[:500], kv_transfer_params=params, cache_salt="never")
    assert caught.value.status == 500
    until_free(consumer)


def test_a_prefill_whose_reader_never_comes(chunked: tuple[Server, Server], story: list[int]) -> None:
    """Its answer has the ticket: another reader may use it."""
    producer, consumer = chunked
    params, _ = rendezvous(introduction_of(producer, story))
    answer = producer.complete(story[:500], 1, kv_transfer_params=params, cache_salt="late")
    expected = producer.text(story[:500], **ALONE)
    assert consumer.text(story[:500], kv_transfer_params=answer["kv_transfer_params"], cache_salt="late") == expected


def test_a_name_of_an_engine_that_has_restarted_fails_and_the_next_one_does_not(
    site: Site, chunked: tuple[Server, Server], story: list[int]
) -> None:
    producer, consumer = chunked
    stale = introduction_of(producer, story)
    producer.kill()
    producer, consumer = site.have(CHUNKED, DECODE)
    with pytest.raises(HTTPFailed):
        flow(producer, consumer, stale, story[:600])
    expected = producer.text(story[:600], **ALONE)
    assert flow(producer, consumer, introduction_of(producer, story), story[:600]) == expected
