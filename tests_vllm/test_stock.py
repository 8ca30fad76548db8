"""Fleets that have stock vLLM in them: vLLM's own NixlConnector on one side, kvflow with `stock_peers` on the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from tests_vllm.conftest import TEXT, Site
from tests_vllm.servers import HTTPFailed, Server, Setup, hand_over, prefill

LENGTHS = [3, 100, 127, 128, 129, 417, 1000, 1900]
ALONE = {"cache_salt": "alone"}
SOURCES = "vllm:prompt_tokens_by_source_total"
LOADS = "vllm:kvflow_loads_total"
FREED = "vllm:kvflow_leases_total"

STOCK = (("kv_connector", "NixlConnector"),)
STOCK_LEASE_S = 20
OURS = (("model", "smollm2"), ("stock_peers", True), ("stock", {"lease_s": STOCK_LEASE_S, "router_s": 3}))


def stock(role: str, core: int, port: int, *, policy: str = "fail", blocks: int = 64) -> Setup:
    side_channel = (("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port)), ("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1"))
    extra = (("kv_lease_duration", STOCK_LEASE_S),)
    return Setup(
        role=role, core=core, connector=STOCK, extra=extra, policy=policy, blocks=blocks, environment=side_channel
    )


def ours(role: str, core: int, *, policy: str = "fail", blocks: int = 64) -> Setup:
    return Setup(role=role, core=core, extra=OURS, policy=policy, blocks=blocks)


@pytest.fixture(scope="module")
def story(site: Site) -> list[int]:
    found = site.have(stock("kv_producer", 0, 26100), ours("kv_consumer", 1))[1].tokens(TEXT.read_text())
    assert len(found) > 2000
    return found


class TestReadingFromStock:
    """P is stock, D is ours."""

    @pytest.fixture
    def pair(self, site: Site) -> tuple[Server, Server]:
        producer, consumer = site.have(stock("kv_producer", 0, 26100), ours("kv_consumer", 1))
        return producer, consumer

    @pytest.mark.parametrize("length", LENGTHS)
    def test_the_text_is_that_of_a_single_instance(
        self, pair: tuple[Server, Server], story: list[int], length: int
    ) -> None:
        producer, consumer = pair
        prompt = story[-length:]
        expected = producer.text(prompt, **ALONE)
        before = consumer.metric(SOURCES, source="external_kv_transfer")
        assert hand_over(producer, consumer, prompt) == expected
        consumer.wait_metric(SOURCES, before + length, source="external_kv_transfer")
        assert consumer.metric(LOADS, freshness="deadline") > 0

    def test_many_at_once(self, pair: tuple[Server, Server], story: list[int]) -> None:
        producer, consumer = pair
        prompts = [story[start : start + 60 + 9 * start // 40] for start in range(0, 32 * 40, 40)]
        expected = [producer.text(prompt, 8, **ALONE) for prompt in prompts]
        with ThreadPoolExecutor(32) as clients:
            found = list(clients.map(lambda prompt: hand_over(producer, consumer, prompt, 8), prompts))
        assert found == expected

    def test_params_are_used_once(self, pair: tuple[Server, Server], story: list[int]) -> None:
        """The second request computes its prompt: no blocks that may be another prompt's by now."""
        producer, consumer = pair
        prompt = story[300:700]
        expected = producer.text(prompt, **ALONE)
        params = prefill(producer, prompt)
        assert consumer.text(prompt, kv_transfer_params=params) == expected
        assert consumer.text(prompt, kv_transfer_params=params, **ALONE) == expected

    def test_the_stock_side_lives_and_has_its_blocks_back(self, pair: tuple[Server, Server], story: list[int]) -> None:
        producer, consumer = pair
        prompt = story[900:1200]
        assert hand_over(producer, consumer, prompt) == producer.text(prompt, **ALONE)
        assert producer.healthy()
        assert producer.metric("vllm:nixl_num_notifications_after_expiry_total") == 0

    def test_an_abort_while_it_loads_harms_nobody(self, pair: tuple[Server, Server], story: list[int]) -> None:
        producer, consumer = pair
        for start in range(0, 400, 100):
            prompt = story[start : start + 1500]
            params = prefill(producer, prompt)
            body = {"model": "smollm2", "prompt": prompt, "max_tokens": 200, "kv_transfer_params": params}
            with pytest.raises(httpx.TimeoutException):
                httpx.post(f"http://127.0.0.1:{consumer.port}/v1/completions", json=body, timeout=0.05)
        prompt = story[100:500]
        assert hand_over(producer, consumer, prompt) == producer.text(prompt, **ALONE)


class TestBeingReadByStock:
    """P is ours, D is stock."""

    @pytest.fixture
    def pair(self, site: Site) -> tuple[Server, Server]:
        producer, consumer = site.have(ours("kv_producer", 0), stock("kv_consumer", 1, 26200))
        return producer, consumer

    @pytest.mark.parametrize("length", LENGTHS)
    def test_the_text_is_that_of_a_single_instance(
        self, pair: tuple[Server, Server], story: list[int], length: int
    ) -> None:
        producer, consumer = pair
        prompt = story[-length:]
        expected = producer.text(prompt, **ALONE)
        before = consumer.metric(SOURCES, source="external_kv_transfer")
        freed = producer.metric(FREED, outcome="read")
        assert hand_over(producer, consumer, prompt) == expected
        consumer.wait_metric(SOURCES, before + length, source="external_kv_transfer")
        producer.wait_metric(FREED, freed + 1, outcome="read")

    def test_many_at_once(self, pair: tuple[Server, Server], story: list[int]) -> None:
        producer, consumer = pair
        prompts = [story[start : start + 60 + 9 * start // 40] for start in range(0, 32 * 40, 40)]
        expected = [producer.text(prompt, 8, **ALONE) for prompt in prompts]
        with ThreadPoolExecutor(32) as clients:
            found = list(clients.map(lambda prompt: hand_over(producer, consumer, prompt, 8), prompts))
        assert found == expected
        assert consumer.healthy()


class TestALongLife:
    """What happens to engines, and to requests that wait."""

    def test_a_request_that_waits_longer_than_the_lease_is_held_by_heartbeats(
        self, site: Site, story: list[int]
    ) -> None:
        """In the queue of D, which runs eight at a time, while other prompts come to the producer."""
        producer, consumer = site.have(stock("kv_producer", 0, 26100), ours("kv_consumer", 1))
        prompt = story[:417]
        expected = producer.text(prompt, **ALONE)
        with ThreadPoolExecutor(9) as clients:
            busy = [
                clients.submit(consumer.text, story[start : start + 64], 120, ignore_eos=True)
                for start in range(1000, 1008)
            ]
            consumer.wait_metric("vllm:num_requests_running", 8)
            params = prefill(producer, prompt)
            waiting = clients.submit(consumer.text, prompt, kv_transfer_params=params)
            others = 0
            while not waiting.done():
                producer.text(story[500 + others : 900 + others], 1)
                others += 1
            assert waiting.result() == expected
            for one in busy:
                one.result()
        assert others > 0
        assert consumer.metric(LOADS, freshness="deadline") > 0

    def test_a_producer_that_died_and_came_again_is_another_one(self, site: Site, story: list[int]) -> None:
        setup = stock("kv_producer", 0, 26400)
        setup = replace(setup, connector=(*STOCK, ("engine_id", "the-same")))
        producer, consumer = site.have(setup, ours("kv_consumer", 1))
        prompt = story[200:600]
        expected = producer.text(prompt, **ALONE)
        assert hand_over(producer, consumer, prompt) == expected
        lost = prefill(producer, story[700:1000])
        producer.kill()
        with pytest.raises(HTTPFailed) as caught:
            consumer.text(story[700:1000], kv_transfer_params=lost)
        assert caught.value.status == 500
        producer, consumer = site.have(setup, ours("kv_consumer", 1))
        assert prefill(producer, prompt)["remote_engine_id"] == lost["remote_engine_id"]
        assert hand_over(producer, consumer, story[100:300]) == producer.text(story[100:300], **ALONE)
        assert consumer.healthy()

    def test_a_consumer_that_died_and_came_again_reads_again(self, site: Site, story: list[int]) -> None:
        producer, consumer = site.have(stock("kv_producer", 0, 26100), ours("kv_consumer", 1))
        consumer.kill()
        producer, consumer = site.have(stock("kv_producer", 0, 26100), ours("kv_consumer", 1))
        assert hand_over(producer, consumer, story[300:700]) == producer.text(story[300:700], **ALONE)
        assert producer.healthy()
