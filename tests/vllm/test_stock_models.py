"""Fleets that have stock vLLM in them, with models of every kind of cache that is exchanged, and several ranks.

No row has a pipeline: vLLM 0.32 computes none on the CPU, an assertion of its own ends the second stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.vllm.conftest import Site
from tests.vllm.servers import MODELS, Server, Setup, hand_over_ids, prefill
from tests.vllm.test_models import BF16, OPTIONS, TP2, assert_same, prompt_of
from tests.vllm.test_stock import FREED, LOADS, SOURCES, ours, stock
from tests.vllm.tiny import WINDOW

LENGTHS = (2, 33, WINDOW - 1, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, 2 * WINDOW + 2, 321, 510)
"""Of 2 * WINDOW + 1 and 321 the last token begins a block."""
FREED_EARLY = 511
"""Computing its last token needs a block of the window that vLLM frees once it is computed."""


def of_model(setup: Setup, model: str, *options: str) -> Setup:
    core = "0|1" if TP2[0] in options else setup.core
    return replace(setup, model=MODELS / model, options=OPTIONS + options, core=core, blocks=None)


def reading(model: str, theirs: tuple[str, ...] = (), here: tuple[str, ...] = ()) -> tuple[Setup, Setup]:
    """P is stock, D is ours."""
    return (
        of_model(stock("kv_producer", 0, 26500), model, *theirs),
        of_model(ours("kv_consumer", 1), model, *here),
    )


def serving(model: str, here: tuple[str, ...] = (), theirs: tuple[str, ...] = ()) -> tuple[Setup, Setup]:
    """P is ours, D is stock."""
    return (
        of_model(ours("kv_producer", 0), model, *here),
        of_model(stock("kv_consumer", 1, 26600), model, *theirs),
    )


ROWS = {
    "serving windows, TP 2 to 1": serving("gemma3", TP2, ()),
    "reading windows, TP 2 to 1": reading("gemma3", TP2, ()),
    "serving MLA, TP 2 to 1": serving("mla", TP2 + BF16, BF16),
    "serving full attention, TP 1 to 2": serving("full", (), TP2),
}


@pytest.fixture(scope="module", params=ROWS)
def pair(request: pytest.FixtureRequest, site: Site) -> Iterator[tuple[Server, Server]]:
    producer, consumer = site.have(*ROWS[request.param])
    yield producer, consumer
    assert producer.healthy()
    assert consumer.healthy()


@pytest.fixture
def exact(request: pytest.FixtureRequest) -> bool:
    return "MLA" not in request.node.name


def test_the_tokens_are_those_of_a_single_instance(pair: tuple[Server, Server], exact: bool) -> None:
    producer, consumer = pair
    ours_reads = consumer.setup.connector != stock("kv_consumer", 1, 0).connector
    for length in LENGTHS:
        prompt = prompt_of(length)
        before = consumer.metric(SOURCES, source="external_kv_transfer")
        freed = producer.metric(FREED, outcome="read")
        assert_same(producer, prompt, hand_over_ids(producer, consumer, prompt), exact)
        consumer.wait_metric(SOURCES, before + length - 1, source="external_kv_transfer")
        if not ours_reads:
            producer.wait_metric(FREED, freed + 1, outcome="read")
    if ours_reads:
        consumer.wait_metric(LOADS, len(LENGTHS), freshness="deadline")
        assert producer.metric("vllm:nixl_num_notifications_after_expiry_total") == 0


def test_a_window_that_has_moved_on_is_computed_once_more(pair: tuple[Server, Server], exact: bool) -> None:
    """Decode computes the last token itself: what that needs and prefill has lost is neither offered nor read."""
    prompt = prompt_of(FREED_EARLY, seed=4)
    assert_same(pair[0], prompt, hand_over_ids(*pair, prompt), exact)


def test_of_a_cached_prefix_the_rest_is_read(pair: tuple[Server, Server], exact: bool) -> None:
    producer, consumer = pair
    prompt = prompt_of(400, seed=2)
    for length in (300, 400):
        part = prompt[:length]
        assert_same(producer, part, hand_over_ids(producer, consumer, part), exact)


def test_what_is_not_read_is_given_back(pair: tuple[Server, Server], exact: bool) -> None:
    """All of it is cached at decode; then the parameters come once more."""
    producer, consumer = pair
    prompt = prompt_of(320, seed=3)
    assert_same(producer, prompt, hand_over_ids(producer, consumer, prompt), exact)
    params = prefill(producer, prompt)
    assert_same(producer, prompt, consumer.ids(prompt, kv_transfer_params=params), exact)
    assert producer.healthy()
