"""Windows and state where there are hardly any blocks: preempted requests, and blocks that hold others by now."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.vllm.conftest import Site
from tests.vllm.servers import HTTPFailed, Server, hand_over_ids, prefill
from tests.vllm.test_failures import ENDED, FAILED, until_free
from tests.vllm.test_models import ALONE, ROWS, assert_same, is_exact, prompt_of

PREEMPTED = "vllm:num_preemptions_total"
BLOCKS = {"windows": 64, "all windows": 20, "state": 48}
PROMPT, ANSWER, AT_ONCE = 200, 250, 6


@pytest.fixture(scope="module", params=BLOCKS)
def narrow(request: pytest.FixtureRequest, site: Site) -> Iterator[tuple[Server, Server, bool]]:
    """Leases of five seconds, caches of few blocks, and whether tokens are exact."""
    blocks = BLOCKS[request.param]
    producer, consumer = (
        replace(setup, blocks=blocks, options=(*setup.options, "--max-model-len=512")) for setup in ROWS[request.param]
    )
    found = site.have(replace(producer, extra=(*producer.extra, ("lease_ttl_s", 5.0))), consumer)
    yield *found, is_exact(request.param)
    assert all(server.healthy() for server in found)


def test_preempted_requests_are_computed_again(narrow: tuple[Server, Server, bool]) -> None:
    producer, consumer, exact = narrow
    before = consumer.metric(PREEMPTED)
    prompts = [prompt_of(PROMPT + number, seed=31) for number in range(AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as clients:
        found = list(clients.map(lambda prompt: hand_over_ids(producer, consumer, prompt, ANSWER), prompts))
    assert consumer.metric(PREEMPTED) > before, "there was room for all: this test has shown nothing"
    for prompt, tokens in zip(prompts, found, strict=True):
        assert_same(producer, prompt, tokens, exact)
    until_free(consumer)


def test_parameters_used_after_the_lease_has_run_out(narrow: tuple[Server, Server, bool]) -> None:
    producer, consumer, exact = narrow
    prompt = prompt_of(300, seed=32)
    expired = producer.metric(ENDED, outcome="expired")
    failures = consumer.metric(FAILED, reason="LeaseExpired")
    params = prefill(producer, prompt)
    producer.wait_metric(ENDED, expired + 1, outcome="expired")
    for seed in range(8):
        producer.ids(prompt_of(320, seed=40 + seed), 1)
    with pytest.raises(HTTPFailed) as caught:
        consumer.ids(prompt, kv_transfer_params=params)
    assert caught.value.status == 500
    consumer.wait_metric(FAILED, failures + 1, reason="LeaseExpired")
    assert_same(producer, prompt, consumer.ids(prompt), exact)
    assert_same(producer, prompt, consumer.ids(prompt, **ALONE), exact)
    until_free(consumer)
