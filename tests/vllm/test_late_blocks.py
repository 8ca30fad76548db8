"""Both legs at once with `late_blocks`: a request of the decode side holds no blocks before its prefill has begun."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from tests.vllm.conftest import Site
from tests.vllm.servers import NAME, HTTPFailed, Server, flow_ids, introduction_of, rendezvous
from tests.vllm.test_failures import ENDED, FAILED, until_free
from tests.vllm.test_models import TP2, pair_of, prompt_of

_SHORT = ("--max-model-len=896", "--block-size=128")
_CHUNKED = ("--max-num-batched-tokens", "256")
LATE = ("late_blocks", True)
ALONE = {"cache_salt": "alone"}
USAGE, WAITING = "vllm:kv_cache_usage_perc", "vllm:num_requests_waiting"
OFFER_WAITS = "vllm:kvflow_offer_wait_seconds_count"
story = prompt_of(2000)
"""Two prompts of 700 tokens and more: of a tiny random model, since prompts are compared, and time does not count."""
RANKS = {"one rank": (), "two ranks": TP2}
"""Options of the decode side. With several ranks the first report that a lease is open counts."""


@pytest.fixture(scope="module", params=RANKS)
def options(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """For a module, so that tests of one row follow each other, and servers go on."""
    found: tuple[str, ...] = RANKS[request.param]
    return found


def with_room_for_one_prompt(site: Site, options: tuple[str, ...], *, late: bool) -> tuple[Server, Server]:
    """Return servers of which decode has seven blocks of 128 tokens, and the one that vLLM keeps for itself."""
    producer, consumer = pair_of("full", (*_SHORT, *_CHUNKED), (*_SHORT, *options))
    extra = (*consumer.extra, LATE) if late else consumer.extra
    first, second = site.have(producer, replace(consumer, blocks=8, extra=extra))
    return first, second


@pytest.fixture
def narrow(site: Site, options: tuple[str, ...]) -> Iterator[tuple[Server, Server]]:
    servers = with_room_for_one_prompt(site, options, late=True)
    yield servers
    assert all(server.healthy() for server in servers)


def test_blocks_are_free_for_others_until_the_prefill_begins(narrow: tuple[Server, Server]) -> None:
    producer, consumer = narrow
    prompt, other = story[:700], story[700:1300]
    expected, expected_other = producer.ids(prompt, **ALONE), producer.ids(other, **ALONE)
    waits = consumer.metric(OFFER_WAITS)
    to_compute, to_receive = rendezvous(introduction_of(producer, story))
    with ThreadPoolExecutor(1) as client:
        receiving = client.submit(consumer.ids, prompt, kv_transfer_params=to_receive, cache_salt="late")
        consumer.wait_metric(WAITING, 1)
        assert consumer.metric(USAGE) == 0.0
        assert consumer.ids(other) == expected_other, "with blocks for the first request it would wait"
        assert not receiving.done()
        producer.complete(prompt, 1, kv_transfer_params=to_compute, cache_salt="late")
        assert receiving.result() == expected
    consumer.wait_metric(OFFER_WAITS, waits + 1)
    until_free(consumer)


def test_without_the_setting_another_prompt_waits_for_the_prefill(site: Site) -> None:
    """In the same pool: what the test above shows is the setting's doing."""
    producer, consumer = with_room_for_one_prompt(site, (), late=False)
    prompt, other = story[:700], story[700:1300]
    expected, expected_other = producer.ids(prompt, **ALONE), producer.ids(other, **ALONE)
    to_compute, to_receive = rendezvous(introduction_of(producer, story))
    with ThreadPoolExecutor(2) as clients:
        receiving = clients.submit(consumer.ids, prompt, kv_transfer_params=to_receive, cache_salt="at once")
        consumer.wait_metric(USAGE, 0.7)  # six of seven blocks, and nothing is written to them
        blocked = clients.submit(consumer.ids, other)
        consumer.wait_metric(WAITING, 2)
        with pytest.raises(httpx.ReadTimeout):  # a third one, which needs two blocks, is not answered either
            httpx.post(f"{consumer.url}/v1/completions", json=_asked(story[1300:1500]), timeout=2.0)
        assert not blocked.done()
        assert not receiving.done()
        producer.complete(prompt, 1, kv_transfer_params=to_compute, cache_salt="at once")
        assert receiving.result() == expected
        assert blocked.result() == expected_other
    assert consumer.metric(OFFER_WAITS) == 0
    until_free(consumer)


def _asked(prompt: list[int]) -> dict[str, object]:
    return {"model": NAME, "prompt": prompt, "max_tokens": 4, "return_token_ids": True}


def test_more_prompts_at_once_than_there_are_blocks_for(narrow: tuple[Server, Server]) -> None:
    """Each gets its blocks in turn; the others hold none meanwhile, and the producer keeps their leases."""
    producer, consumer = narrow
    prompts = [story[start : start + 500 + start] for start in range(0, 8 * 25, 25)]
    expected = [producer.ids(prompt, 8, **ALONE) for prompt in prompts]
    introduction = introduction_of(producer, story)
    with ThreadPoolExecutor(len(prompts)) as clients:
        found = clients.map(
            lambda prompt: flow_ids(producer, consumer, introduction, prompt, 8, cache_salt="at once"), prompts
        )
        assert list(found) == expected
    for server in narrow:
        until_free(server)


def test_a_prefill_that_never_comes(narrow: tuple[Server, Server]) -> None:
    """The request fails once, within the ticket's time, as without `late_blocks`."""
    producer, consumer = narrow
    failures = consumer.metric(FAILED, reason="PrefillFailed")
    _, params = rendezvous(introduction_of(producer, story), ttl_s=2.0)
    with pytest.raises(HTTPFailed) as caught:
        consumer.ids(story[:500], kv_transfer_params=params, cache_salt="never")
    assert caught.value.status == 500
    consumer.wait_metric(FAILED, failures + 1, reason="PrefillFailed")
    until_free(consumer)


def test_a_client_that_disconnects_while_its_request_waits(narrow: tuple[Server, Server]) -> None:
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
