"""Every kind of KV cache: the tokens of prefill and decode are those of one instance, with tiny random models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests_vllm.conftest import Site
from tests_vllm.servers import KVFLOW, MODELS, NAME, Server, Setup, hand_over_ids, prefill
from tests_vllm.tiny import VOCABULARY, WINDOW

ALONE = {"cache_salt": "alone"}
EXTERNAL = "vllm:prompt_tokens_by_source_total"
LOADS = "vllm:kvflow_load_seconds_count"
FAILED = "vllm:kvflow_load_failures_total"
BLOCK_SIZE = 32
OPTIONS = ("--skip-tokenizer-init", "--block-size", str(BLOCK_SIZE))
LENGTHS = (2, 31, 33, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW - 1, 2 * WINDOW, 2 * WINDOW + 1, 511)

PREFILL = Setup(role="kv_producer", core=0, options=OPTIONS)
DECODE = Setup(role="kv_consumer", core=1, options=OPTIONS)
NO_HYBRID = ("--disable-hybrid-kv-cache-manager",)
CHUNKED = ("--max-num-batched-tokens", "64")


def pair_of(
    model: str, prefill_options: tuple[str, ...] = (), decode_options: tuple[str, ...] = ()
) -> tuple[Setup, Setup]:
    folder = MODELS / model
    return (
        replace(PREFILL, model=folder, options=OPTIONS + prefill_options),
        replace(DECODE, model=folder, options=OPTIONS + decode_options),
    )


def in_multi(setup: Setup) -> Setup:
    """With another connector behind it, which keeps blocks that were evicted in the host's memory."""
    ours = {**dict(KVFLOW), "kv_role": setup.role, "kv_connector_extra_config": dict(setup.extra)}
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 26},
    }
    return replace(setup, connector=(("kv_connector", "MultiConnector"),), extra=(("connectors", [ours, offloading]),))


ROWS = {
    "full attention": pair_of("full"),
    "windows": pair_of("gemma3"),
    "windows, hybrid manager off": pair_of("gemma3", NO_HYBRID, NO_HYBRID),
    "windows, chunked prefill": pair_of("gemma3", CHUNKED, CHUNKED),
    "all windows": pair_of("all-sliding"),
    "gpt-oss": pair_of("gpt-oss"),
    "MLA": pair_of("mla"),
    "state": pair_of("falcon-h1"),
    "linear attention": pair_of("qwen3-next"),
}


def prompt_of(length: int, seed: int = 1) -> list[int]:
    source = random.Random(f"{length} {seed}")
    return [source.randrange(5, VOCABULARY) for _ in range(length)]


@pytest.fixture(scope="module", params=ROWS)
def pair(request: pytest.FixtureRequest, site: Site) -> Iterator[tuple[Server, Server]]:
    producer, consumer = site.have(*ROWS[request.param])
    yield producer, consumer
    assert producer.healthy()
    assert consumer.healthy()


def received(server: Server) -> float:
    return server.metric(EXTERNAL, source="external_kv_transfer")


def test_the_tokens_are_those_of_a_single_instance(pair: tuple[Server, Server]) -> None:
    producer, consumer = pair
    for length in LENGTHS:
        prompt = prompt_of(length)
        before = received(consumer)
        assert hand_over_ids(producer, consumer, prompt) == producer.ids(prompt, **ALONE), length
        consumer.wait_metric(EXTERNAL, before + length - 1, source="external_kv_transfer")
    assert consumer.metric(FAILED) == 0


def test_a_cached_prefix_and_what_was_received_are_of_use(pair: tuple[Server, Server]) -> None:
    producer, consumer = pair
    prompt = prompt_of(400, seed=2)
    for length in (300, 400):
        part = prompt[:length]
        assert hand_over_ids(producer, consumer, part) == producer.ids(part, **ALONE)
    assert consumer.ids(prompt + prompt[:20]) == producer.ids(prompt + prompt[:20], **ALONE)


def test_samples_and_lists_of_prompts(pair: tuple[Server, Server]) -> None:
    """One ticket for several requests: the first reads, the others compute."""
    producer, consumer = pair
    prompts = [prompt_of(150, seed=3), prompt_of(170, seed=4)]
    expected = [producer.ids(prompt, **ALONE) for prompt in prompts]
    params = prefill(producer, prompts[0])
    both = {"prompt": prompts, "return_token_ids": True, "ignore_eos": True, "kv_transfer_params": params}
    found = consumer.post("/v1/completions", {"model": NAME, "max_tokens": 16, "temperature": 0, **both})
    assert [choice["token_ids"] for choice in found["choices"]] == expected
    samples = consumer.complete(
        prompts[1], 16, n=2, return_token_ids=True, ignore_eos=True, kv_transfer_params=prefill(producer, prompts[1])
    )
    assert [choice["token_ids"] for choice in samples["choices"]] == [expected[1], expected[1]]


def test_many_at_once(pair: tuple[Server, Server]) -> None:
    producer, consumer = pair
    prompts = [prompt_of(20 + 15 * number, seed=5) for number in range(24)]
    expected = [producer.ids(prompt, 8, **ALONE) for prompt in prompts]
    with ThreadPoolExecutor(24) as clients:
        found = list(clients.map(lambda prompt: hand_over_ids(producer, consumer, prompt, 8), prompts))
    assert found == expected
