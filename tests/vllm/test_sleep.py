"""Servers that sleep under traffic and with new weights, as vLLM 0.33 lets them; the plugin `sleeping` is their GPU."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from tests.vllm.conftest import TEXT, Site
from tests.vllm.servers import MODELS, VERSION, HTTPFailed, Server, Setup, hand_over_ids, prefill
from tests.vllm.sleeping import VARIABLE
from tests.vllm.test_hand_over import until
from tests.vllm.test_models import OPTIONS, prompt_of
from tests.vllm.test_prefix import extra_of
from tests.vllm.test_stock import LENGTHS, ours, stock

pytestmark = pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "unregister_kv_caches"),
    reason=f"vLLM {VERSION} does not notify connectors of a sleep",
)
SLEEPS = 24
CLIENTS = 3
EXTERNAL = "vllm:prompt_tokens_by_source_total"
_COMMON: dict[str, Any] = {
    "model": MODELS / "full",
    "options": (*OPTIONS, "--enable-sleep-mode"),
    "environment": ((VARIABLE, "1"),),
}
PLAIN = (Setup(role="kv_producer", core=0, **_COMMON), Setup(role="kv_consumer", core=1, **_COMMON))
SHARING = (
    replace(PLAIN[0], extra=extra_of("holder"), policy="recompute"),
    replace(PLAIN[1], extra=extra_of("reader", "holder"), policy="recompute"),
)
PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((65, 200, 333, 500))]


def received_tokens(server: Server) -> float:
    return server.metric(EXTERNAL, source="external_kv_transfer")


def test_memory_that_is_released_while_a_server_is_paused_is_registered_again(site: Site) -> None:
    producer, consumer = site.have(*PLAIN)
    expected = consumer.ids(PROMPTS[1], cache_salt="alone")
    for server in (producer, consumer):
        server.post("/pause")
        server.post("/release_kv_cache_memory")
        server.post("/wake_up", tags="kv_cache")
        received = received_tokens(consumer)
        assert hand_over_ids(producer, consumer, PROMPTS[1]) == expected
        consumer.wait_metric(EXTERNAL, received + 1, source="external_kv_transfer")


class Traffic:
    """Clients of both servers, which send requests until `stop`."""

    def __init__(self, producer: Server, consumer: Server, expected: list[list[int]], *, shares: bool) -> None:
        self._servers, self._expected, self._shares = (producer, consumer), expected, shares
        self._salts = itertools.count()
        self.stop = threading.Event()
        self.answers = Counter[str]()

    def run(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self.stop.is_set():
            number = draw.randrange(len(PROMPTS))
            try:
                self.answers[self._ask(number, pulls=self._shares and draw.random() < 0.5)] += 1
            except HTTPFailed as error:
                self.answers[str(error)] += 1

    def _ask(self, number: int, *, pulls: bool) -> str:
        """A request of both servers: the second one reads the prompt with a ticket, or pulls it as a prefix."""
        (producer, consumer), prompt, expected = self._servers, PROMPTS[number], self._expected[number]
        salt: dict[str, Any] = {"cache_salt": f"traffic {next(self._salts)}"}
        if pulls:
            producer.complete(prompt, 1, **salt)
        else:
            salt["kv_transfer_params"] = prefill(producer, prompt, **salt)  # none, if the request is aborted
        choice = consumer.complete(prompt, return_token_ids=True, ignore_eos=True, **salt)["choices"][0]
        found = choice["token_ids"] or []
        if choice["finish_reason"] == "abort":
            return "aborted" if found == expected[: len(found)] else "wrong"
        return "right" if found == expected else "wrong"


@pytest.mark.parametrize("setups", [PLAIN, SHARING], ids=["hand-overs", "prefixes, too"])
def test_servers_sleep_and_wake_under_traffic(site: Site, setups: tuple[Setup, Setup]) -> None:
    """By turns, at levels 1 and 2. No answer is wrong; requests that come meanwhile are answered after the sleep."""
    producer, consumer = servers = site.have(*setups)
    expected = [consumer.ids(prompt, cache_salt="alone") for prompt in PROMPTS]
    traffic = Traffic(producer, consumer, expected, shares=setups is SHARING)
    with ThreadPoolExecutor(CLIENTS + 1) as clients:
        running = [clients.submit(traffic.run, seed) for seed in range(CLIENTS)]
        try:
            for number in range(SLEEPS):
                sleeper, received = servers[number % 2], received_tokens(consumer)
                sleeper.post("/sleep", level=1 + number // 2 % 2, mode=("abort", "wait")[number // 4 % 2])
                meanwhile = clients.submit(hand_over_ids, *servers, PROMPTS[number % len(PROMPTS)])
                sleeper.post("/wake_up")
                assert meanwhile.result() == expected[number % len(PROMPTS)]
                consumer.wait_metric(EXTERNAL, received + 1, source="external_kv_transfer")
        finally:
            traffic.stop.set()
        for client in running:
            client.result()
    assert traffic.answers.keys() <= {"right", "aborted"}, traffic.answers
    assert traffic.answers["right"] > SLEEPS
    for server in servers:
        until(lambda server=server: server.metric("vllm:kv_cache_usage_perc") == 0.0)


def test_a_sleep_and_new_weights_and_a_hand_over(site: Site, tmp_path: Path) -> None:
    """As in training loops: blocks of the old weights are not read."""
    weights = safetensors.torch.load_file(MODELS / "full" / "model.safetensors")
    values = {name: weight.flip(0).contiguous() for name, weight in weights.items() if "v_proj" in name}
    safetensors.torch.save_file(weights | values, tmp_path / "model.safetensors")
    producer, consumer = servers = site.have(*SHARING)
    before = consumer.ids(PROMPTS[2], cache_salt="alone")
    for server in servers:
        server.post("/sleep", level=2)
        server.post("/wake_up", tags="weights")
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}})
        server.post("/wake_up", tags="kv_cache")
    received = received_tokens(consumer)
    now = hand_over_ids(producer, consumer, PROMPTS[2])
    consumer.wait_metric(EXTERNAL, received + 1, source="external_kv_transfer")
    assert now == consumer.ids(PROMPTS[2], cache_salt="with new weights") == producer.ids(PROMPTS[2], cache_salt="new")
    assert now != before


def asleep(setup: Setup) -> Setup:
    """The set-up of a server that can sleep."""
    environment = (*setup.environment, (VARIABLE, "1"))
    return replace(setup, options=(*setup.options, "--enable-sleep-mode"), environment=environment)


STOCK_READS = (asleep(ours("kv_producer", 0)), stock("kv_consumer", 1, 26200))
STOCK_SLEEPS = (asleep(stock("kv_producer", 0, 26100)), ours("kv_consumer", 1))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setups", [STOCK_READS, STOCK_SLEEPS], ids=["stock reads", "stock sleeps"])
def test_a_peer_of_the_other_connector_reads_again_after_a_sleep(site: Site, setups: tuple[Setup, Setup]) -> None:
    """The producer registers its cache again at each wake, and its reader connects to the new registration."""
    producer, consumer = site.have(*setups)
    story = consumer.tokens(TEXT.read_text())
    for wakes in range(3):
        if wakes:
            producer.post("/sleep", level=wakes)
            producer.post("/wake_up")
        for length in LENGTHS:
            prompt, salt = story[wakes:][:length], f"{length} tokens after {wakes} wakes"
            received = received_tokens(consumer)
            expected = producer.ids(prompt, cache_salt="alone")
            params = prefill(producer, prompt, cache_salt=salt)
            assert consumer.ids(prompt, kv_transfer_params=params, cache_salt=salt) == expected
            consumer.wait_metric(EXTERNAL, received + length, source="external_kv_transfer")
