"""From one vLLM version to the next: stock engines that refuse each other hand over to kvflow, and from it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvflow.stock import ask_rank
from tests.vllm.conftest import TEXT, Site
from tests.vllm.servers import OLDER, HTTPFailed, Server, Setup, hand_over, prefill
from tests.vllm.test_stock import ALONE, FREED, LENGTHS, OURS, SOURCES, STOCK_LEASE_S, assert_alive, ours, stock

OLD_PREFILL = replace(stock("kv_producer", 0, 26100), version=OLDER)
OLD_DECODE = replace(stock("kv_consumer", 1, 26200), version=OLDER)


@pytest.fixture(scope="module")
def shown(site: Site) -> str:
    """The hash of the older engines, as `kvflow doctor --stock` says it."""
    site.have(OLD_PREFILL)
    found = asyncio.run(ask_rank("tcp://127.0.0.1:26100", timeout_s=60))
    assert "block_strides" not in found.fields, "it is of an older line than the one that is installed"
    return found.compatibility_hash


@pytest.fixture(scope="module")
def story(site: Site) -> list[int]:
    return site.have(OLD_PREFILL)[0].tokens(TEXT.read_text())


def upgraded(role: str, core: int, shown: str) -> Setup:
    """A new engine that reads from the older ones, and is read by them."""
    terms = {"lease_s": STOCK_LEASE_S, "router_s": 3, "hashes": [shown], "serve_hash": shown, "serve_version": OLDER}
    return replace(ours(role, core), extra=(*(pair for pair in OURS if pair[0] != "stock"), ("stock", terms)))


def assert_same(producer: Server, consumer: Server, story: list[int]) -> None:
    for length in LENGTHS:
        prompt = story[-length:]
        before = consumer.metric(SOURCES, source="external_kv_transfer")
        assert hand_over(producer, consumer, prompt) == producer.text(prompt, **ALONE)
        consumer.wait_metric(SOURCES, before + length, source="external_kv_transfer")
    assert_alive(producer, consumer, story[500:800])


def test_new_decode_engines_read_from_old_prefill_engines(site: Site, shown: str, story: list[int]) -> None:
    assert_same(*site.have(OLD_PREFILL, upgraded("kv_consumer", 1, shown)), story)


def test_stock_alone_refuses_what_is_not_of_its_version(site: Site, story: list[int]) -> None:
    producer, consumer = site.have(OLD_PREFILL, stock("kv_consumer", 1, 26200))
    with pytest.raises(HTTPFailed) as caught:
        consumer.text(story[:300], kv_transfer_params=prefill(producer, story[:300]))
    assert caught.value.status == 500


def test_old_decode_engines_read_from_new_prefill_engines(site: Site, shown: str, story: list[int]) -> None:
    producer, consumer = site.have(upgraded("kv_producer", 0, shown), OLD_DECODE)
    freed = producer.metric(FREED, outcome="read")
    assert_same(producer, consumer, story)
    producer.wait_metric(FREED, freed + len(LENGTHS) + 1, outcome="read")
