"""Fleets that have stock vLLM in them: vLLM's own NixlConnector on one side, kvflow with `stock_peers` on the other."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvflow.stock.versions import line_of
from tests.vllm.conftest import TEXT, Site
from tests.vllm.servers import NAME, VERSION, HTTPFailed, Server, Setup, hand_over, prefill, proxied
from tests.vllm.stock_late import late_round, late_setups

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


def known_as(setup: Setup, engine_id: str) -> Setup:
    """It has this id in each of its lives."""
    return replace(setup, connector=(*setup.connector, ("engine_id", engine_id)))


def assert_alive(producer: Server, consumer: Server, prompt: list[int]) -> None:
    """By an answer of each server, whichever is stock, and an answer of both together."""
    expected = producer.text(prompt, **ALONE)
    assert consumer.text(prompt, **ALONE) == expected
    assert hand_over(producer, consumer, prompt) == expected


def abandon(producer: Server, consumer: Server, story: list[int], times: int) -> None:
    """Send requests and drop their clients while their prompts are read, or shortly before or after."""
    for turn in range(times):
        prompt = story[100 * turn : 100 * turn + 1500]
        params = prefill(producer, prompt)
        body = {"model": NAME, "prompt": prompt, "max_tokens": 200, "kv_transfer_params": params}
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"http://127.0.0.1:{consumer.port}/v1/completions", json=body, timeout=0.03 * (turn + 1))


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
        abandon(producer, consumer, story, 4)
        assert_alive(producer, consumer, story[100:500])

    def test_behind_a_router_that_knows_nothing_of_us(self, pair: tuple[Server, Server], story: list[int]) -> None:
        producer, consumer = pair
        assert_routed(producer, consumer, story)

    def test_what_is_late_at_the_consumer_is_refused(self, site: Site, story: list[int]) -> None:
        """It was frozen while its requests waited, and the producer has given their blocks to others since."""
        setups = late_setups(ours("kv_consumer", 1), STOCK_LEASE_S)
        producer, consumer = site.have(*setups)
        found = late_round(producer, consumer, story, 0, STOCK_LEASE_S, at_once=4)
        assert found == {"refused": 4}
        assert_alive(producer, consumer, story[100:500])


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
        assert_alive(producer, consumer, prompts[0])

    def test_an_abort_while_it_loads_harms_nobody(self, pair: tuple[Server, Server], story: list[int]) -> None:
        producer, consumer = pair
        abandon(producer, consumer, story, 4)
        assert_alive(producer, consumer, story[100:500])

    def test_behind_a_router_that_knows_nothing_of_us(self, pair: tuple[Server, Server], story: list[int]) -> None:
        producer, consumer = pair
        assert_routed(producer, consumer, story)


class TestBothOurs:
    """P and D are ours, both with `stock_peers`: what a router leaves of the parameters changes nothing."""

    @pytest.fixture
    def pair(self, site: Site) -> tuple[Server, Server]:
        producer, consumer = site.have(ours("kv_producer", 0), ours("kv_consumer", 1))
        return producer, consumer

    def test_seals_prove_what_is_read_whatever_a_router_drops(
        self, pair: tuple[Server, Server], story: list[int]
    ) -> None:
        producer, consumer = pair
        for turn, keeps in enumerate((known, whole, known, whole)):
            prompt = story[100 * turn : 100 * turn + 417]
            expected = producer.text(prompt, **ALONE)
            before = consumer.metric(LOADS, freshness="seal")
            assert consumer.text(prompt, kv_transfer_params=keeps(prefill(producer, prompt))) == expected
            consumer.wait_metric(LOADS, before + 1, freshness="seal")
        assert consumer.metric(LOADS, freshness="deadline") == 0

    def test_parameters_of_another_prompt_are_not_read(self, pair: tuple[Server, Server], story: list[int]) -> None:
        producer, consumer = pair
        mine, other = story[1000:1300], story[1400:1700]
        expected = producer.text(mine, **ALONE)
        params = known(prefill(producer, other))
        refused = consumer.metric("vllm:kvflow_tickets_refused_total", reason="PromptMismatch")
        assert consumer.text(mine, kv_transfer_params=params, **ALONE) == expected
        consumer.wait_metric("vllm:kvflow_tickets_refused_total", refused + 1, reason="PromptMismatch")
        assert consumer.metric(LOADS, freshness="deadline") == 0


def whole(params: dict[str, Any]) -> dict[str, Any]:
    return params


def known(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that a router keeps if it knows stock vLLM's fields."""
    return {name: params[name] for name in line_of(VERSION).params}


def assert_routed(producer: Server, consumer: Server, story: list[int]) -> None:
    """Answers that come at once, and in a stream, through a router."""
    before, prompts = consumer.metric(SOURCES, source="external_kv_transfer"), [story[-length:] for length in LENGTHS]
    with proxied([producer], consumer) as router:
        for prompt in prompts:
            body = {"model": NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0, "min_tokens": 0}
            answer = router.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == producer.text(prompt, **ALONE)
        body |= {"prompt": story[:300], "stream": True, "stream_options": {"include_usage": True}}
        lines = router.post("/v1/completions", json=body).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    streamed = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert streamed == producer.text(story[:300], **ALONE)
    consumer.wait_metric(SOURCES, before + 1, source="external_kv_transfer")
    assert_alive(producer, consumer, story[400:600])


class TestALongLife:
    """Faults of engines, and of requests that wait."""

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
        setup = known_as(stock("kv_producer", 0, 26400), "the-same")
        producer, consumer = site.have(setup, ours("kv_consumer", 1))
        prompt = story[200:600]
        expected = producer.text(prompt, **ALONE)
        assert hand_over(producer, consumer, prompt) == expected
        lost, kept = prefill(producer, story[700:1000]), prefill(producer, story[1000:1300])
        producer.kill()
        with pytest.raises(HTTPFailed) as caught:
            consumer.text(story[700:1000], kv_transfer_params=lost)
        assert caught.value.status == 500
        producer, consumer = site.have(setup, ours("kv_consumer", 1))
        assert prefill(producer, prompt)["remote_engine_id"] == lost["remote_engine_id"]
        with pytest.raises(HTTPFailed) as caught:  # it meets the new life, and may be of the one before
            consumer.text(story[1000:1300], kv_transfer_params=kept)
        assert caught.value.status == 500
        found = ""
        for _ in range(200):  # what comes `router_s` later is of the new life, by the terms
            with contextlib.suppress(HTTPFailed):
                found = hand_over(producer, consumer, story[100:300])
                break
        assert found == producer.text(story[100:300], **ALONE)
        computed = consumer.text(story[700:1000], kv_transfer_params=lost)
        assert computed == producer.text(story[700:1000], **ALONE), "parameters are used once"
        assert_alive(producer, consumer, story[300:700])

    def test_a_consumer_that_died_and_came_again_reads_again(self, site: Site, story: list[int]) -> None:
        setups = stock("kv_producer", 0, 26100), ours("kv_consumer", 1)
        producer, consumer = site.have(*setups)
        consumer.kill()
        producer, consumer = site.have(*setups)
        assert_alive(producer, consumer, story[300:700])

    def test_a_producer_of_ours_that_died_and_came_again_is_unknown_to_stock(
        self, site: Site, story: list[int]
    ) -> None:
        """Under the same id, at the same address: stock holds on to the life that is over, and reads nothing more."""
        setup = known_as(ours("kv_producer", 0), "the-same")
        setup = replace(setup, extra=(*setup.extra, ("listen", "tcp://127.0.0.1:26500")))
        setups = setup, stock("kv_consumer", 1, 26200)
        producer, consumer = site.have(*setups)
        assert_alive(producer, consumer, story[200:600])
        lost = prefill(producer, story[700:1000])
        producer.kill()
        with pytest.raises(HTTPFailed) as caught:
            consumer.text(story[700:1000], kv_transfer_params=lost)
        assert caught.value.status == 500
        producer, consumer = site.have(*setups)
        assert prefill(producer, story[:200])["remote_engine_id"] == lost["remote_engine_id"]
        for start in (0, 300):
            with pytest.raises(HTTPFailed) as caught:
                hand_over(producer, consumer, story[start : start + 300])
            assert caught.value.status == 500
        for server in (producer, consumer):
            assert server.text(story[300:700], **ALONE) == server.text(story[300:700], **ALONE)

    def test_a_stock_consumer_that_died_and_came_again_reads_again(self, site: Site, story: list[int]) -> None:
        setups = ours("kv_producer", 0), stock("kv_consumer", 1, 26200)
        producer, consumer = site.have(*setups)
        assert_alive(producer, consumer, story[200:600])
        consumer.kill()
        producer, consumer = site.have(*setups)
        assert_alive(producer, consumer, story[300:700])
