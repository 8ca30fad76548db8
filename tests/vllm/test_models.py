"""Every kind of KV cache: the tokens of prefill and decode are those of one instance, with tiny random models."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import split
from tests.vllm.conftest import Site
from tests.vllm.servers import KVFLOW, MODELS, NAME, NEWER, VERSION, Server, Setup, hand_over_ids, prefill
from tests.vllm.tiny import VOCABULARY, WINDOW

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
NO_CACHE = ("--no-enable-prefix-caching",)  # vLLM 0.32 computes Mamba on the CPU without it only
BF16 = ("--dtype", "bfloat16")  # vLLM 0.32 computes linear attention on the CPU in it only
CHUNKED = ("--max-num-batched-tokens", "64")
FP8, SKIP = ("--kv-cache-dtype", "fp8"), ("--kv-cache-dtype-skip-layers", "1")
TP2 = ("--tensor-parallel-size", "2")
DP2 = ("--data-parallel-size", "2")
DRAFT = (
    "--speculative-config",
    json.dumps({"method": "draft_model", "model": str(MODELS / "full"), "num_speculative_tokens": 2}),
)
SPLIT = ("--block-size=96",)
"""Of kernels with blocks of 32. No row has a hybrid with state: vLLM's CPU backend answers it otherwise each time."""


def pair_of(
    model: str, prefill_options: tuple[str, ...] = (), decode_options: tuple[str, ...] = ()
) -> tuple[Setup, Setup]:
    folder = MODELS / model
    return _with(PREFILL, folder, prefill_options), _with(DECODE, folder, decode_options)


def _with(setup: Setup, folder: Path, options: tuple[str, ...]) -> Setup:
    environment = ((split.VARIABLE, "32"),) if SPLIT[0] in options else ()
    core = "0|1" if {TP2[0], DP2[0]} & {*options} else setup.core
    return replace(setup, model=folder, options=OPTIONS + options, core=core, environment=environment)


def in_multi(setup: Setup) -> Setup:
    """As a child of vLLM's MultiConnector; its others do not run on a CPU."""
    ours = {**dict(KVFLOW), "kv_role": setup.role, "kv_connector_extra_config": dict(setup.extra)}
    ours["kv_load_failure_policy"] = setup.policy
    return replace(setup, connector=(("kv_connector", "MultiConnector"),), extra=(("connectors", [ours]),))


def as_nixl(pair: tuple[Setup, Setup]) -> tuple[Setup, Setup]:
    """Under the name that Dynamo looks for, by which vLLM decides some things, too."""
    name = (("kv_connector", "NixlConnector"), ("kv_connector_module_path", "kvflow.vllm.named_nixl"))
    return replace(pair[0], connector=name), replace(pair[1], connector=name)


ROWS = {
    "full attention": pair_of("full"),
    "full attention, a draft model at decode": pair_of("full", (), DRAFT),
    "fp8": pair_of("full", FP8, FP8),
    "fp8, a layer that is not quantized": pair_of("full", (*FP8, *SKIP), (*FP8, *SKIP)),
    "windows": pair_of("gemma3"),
    "windows, hybrid manager off": pair_of("gemma3", NO_HYBRID, NO_HYBRID),
    "windows, chunked prefill": pair_of("gemma3", CHUNKED, CHUNKED),
    "all windows": pair_of("all-sliding"),
    "gpt-oss": pair_of("gpt-oss"),
    "MLA": pair_of("mla"),
    "state": pair_of("falcon-h1", NO_CACHE, NO_CACHE),
    "linear attention": pair_of("qwen3-next", BF16, BF16),
    "TP 1 to 2": pair_of("gemma3", (), TP2),
    "TP 2 to 1": pair_of("gemma3", TP2, ()),
    "TP 2 to 2": pair_of("full", TP2, TP2),
    "DP 2 to 2": pair_of("full", DP2, DP2),
    "state, TP 1 to 2": pair_of("falcon-h1", NO_CACHE, (*NO_CACHE, *TP2)),
    "state, TP 2 to 1": pair_of("falcon-h1", (*NO_CACHE, *TP2), NO_CACHE),
    "linear attention, TP 2 to 1": pair_of("qwen3-next", (*BF16, *TP2), BF16),
    "windows, blocks split by kernels": pair_of("gemma3", SPLIT, ()),
    "windows, blocks split at decode": pair_of("gemma3", (), SPLIT),
    "named NixlConnector": as_nixl(pair_of("gemma3")),
    "state, named NixlConnector": as_nixl(pair_of("falcon-h1", NO_CACHE, NO_CACHE)),
    "in MultiConnector": (in_multi(pair_of("full")[0]), in_multi(pair_of("full")[1])),
}


INEXACT = ("MLA", "linear attention")
"""A token computed in decode is not bit by bit one computed in prefill, also without any transfer."""


UNSTEADY = ("MLA",)
"""vLLM's answer depends on the batch, also in a server without any connector (its first logprob by up to 0.7). So tests
of several prompts at once check only that all were answered.
"""


DRAFTED = ("full attention, a draft model at decode",)
"""With a draft model vLLM draws other random numbers, also without a ticket: a seed gives other tokens."""


def prompt_of(length: int, seed: int = 1) -> list[int]:
    source = random.Random(f"{length} {seed}")
    return [source.randrange(5, VOCABULARY) for _ in range(length)]


def first_logprobs(answer: dict[str, Any]) -> list[list[float]]:
    """The five highest logprobs of each choice's first token."""
    return [sorted(one["logprobs"]["top_logprobs"][0].values())[-5:] for one in answer["choices"]]


def is_exact(row: str) -> bool:
    return not row.startswith(INEXACT)


def is_steady(row: str) -> bool:
    return not row.startswith(UNSTEADY)


MEMORY_NODES = [*Path("/sys/devices/system/node").glob("node[0-9]*")]


@pytest.fixture
def exact(request: pytest.FixtureRequest) -> bool:
    return is_exact(request.node.name.partition("[")[2])


@pytest.fixture
def steady(request: pytest.FixtureRequest) -> bool:
    return is_steady(request.node.name.partition("[")[2])


@pytest.fixture(scope="module", params=ROWS)
def pair(request: pytest.FixtureRequest, site: Site) -> Iterator[tuple[Server, Server]]:
    if request.param == "DP 2 to 2" and VERSION == NEWER and len(MEMORY_NODES) < 2:
        pytest.skip("vLLM 0.33 on a CPU needs a memory node for each data-parallel engine")
    producer, consumer = site.have(*ROWS[request.param])
    yield producer, consumer
    assert producer.healthy()
    assert consumer.healthy()


def tokens_of(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


CLOSE = 0.5
"""How much less likely, in nats, the other token may be where vLLM computes prefill and decode otherwise."""


def assert_same(server: Server, prompt: list[int], found: list[int], exact: bool) -> None:
    """Whether these are the tokens of one instance, at least up to where two are nearly as likely."""
    as_ids = {"return_tokens_as_token_ids": True, **ALONE}
    answer = server.complete(prompt, len(found), return_token_ids=True, ignore_eos=True, logprobs=20, **as_ids)
    (expected,) = tokens_of(answer)
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours == theirs:
            continue
        assert not exact, f"{len(prompt)} tokens: {found}, alone {expected}"
        likely = answer["choices"][0]["logprobs"]["top_logprobs"][index]
        gap = likely[f"token_id:{theirs}"] - likely.get(f"token_id:{ours}", -1e9)
        assert gap < CLOSE, f"{len(prompt)} tokens: {found}, alone {expected}: token {index} is {gap} less likely"
        return


def received(server: Server) -> float:
    return server.metric(EXTERNAL, source="external_kv_transfer")


def test_the_tokens_are_those_of_a_single_instance(pair: tuple[Server, Server], exact: bool) -> None:
    producer, consumer = pair
    for length in LENGTHS:
        prompt = prompt_of(length)
        before = received(consumer)
        found = hand_over_ids(producer, consumer, prompt)
        assert_same(producer, prompt, found, exact)
        with pytest.raises(AssertionError):
            assert_same(producer, prompt_of(length, seed=9), found, exact)
        consumer.wait_metric(EXTERNAL, before + length - 1, source="external_kv_transfer")
    assert consumer.metric(FAILED) == 0


def test_a_cached_prefix_and_what_was_received_are_of_use(pair: tuple[Server, Server], exact: bool) -> None:
    producer, consumer = pair
    prompt = prompt_of(400, seed=2)
    for length in (300, 400):
        part = prompt[:length]
        assert_same(producer, part, hand_over_ids(producer, consumer, part), exact)
    assert_same(producer, prompt + prompt[:20], consumer.ids(prompt + prompt[:20]), exact)


def test_samples_and_lists_of_prompts(
    pair: tuple[Server, Server], exact: bool, steady: bool, request: pytest.FixtureRequest
) -> None:
    """One ticket for several requests: samples share its blocks, other prompts are computed."""
    producer, consumer = pair
    prompts = [prompt_of(150, seed=3), prompt_of(170, seed=4)]
    params = prefill(producer, prompts[0])
    both = {"prompt": prompts, "return_token_ids": True, "ignore_eos": True, "kv_transfer_params": params}
    found = consumer.post("/v1/completions", {"model": NAME, "max_tokens": 16, "temperature": 0, **both})
    for prompt, tokens in zip(prompts, tokens_of(found), strict=True):
        assert len(tokens) == 16
        if steady:
            assert_same(producer, prompt, tokens, exact)
    if not exact:
        return
    sampled = {"n": 2, "seed": 7, "temperature": 0.5, "return_token_ids": True, "ignore_eos": True}
    sampled |= {"logprobs": 5, "return_tokens_as_token_ids": True}  # as there is no tokenizer
    alone = producer.complete(prompts[1], 16, **sampled, **ALONE)
    samples = consumer.complete(prompts[1], 16, **sampled, kv_transfer_params=prefill(producer, prompts[1]))
    if request.node.callspec.params["pair"] in DRAFTED:
        assert first_logprobs(samples) == first_logprobs(alone)
    else:
        assert tokens_of(samples) == tokens_of(alone)


def test_many_at_once(pair: tuple[Server, Server], exact: bool, steady: bool) -> None:
    producer, consumer = pair
    prompts = [prompt_of(20 + 15 * number, seed=5) for number in range(24)]
    with ThreadPoolExecutor(24) as clients:
        found = list(clients.map(lambda prompt: hand_over_ids(producer, consumer, prompt, 8), prompts))
    assert consumer.metric(FAILED) == 0
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == 8
        if steady:
            assert_same(producer, prompt, tokens, exact)
