"""Versions of weights on real servers: what vLLM is told, and what becomes of tickets and prefixes of other weights."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import safetensors.torch

from tests.vllm.conftest import Site
from tests.vllm.servers import MODELS, HTTPFailed, Server, flow, hand_over_ids, introduction_of, prefill
from tests.vllm.sharing import DECODE, PREFILL
from tests.vllm.test_models import ALONE, EXTERNAL, FAILED, prompt_of
from tests.vllm.test_prefix import Counted, alone, family, settle, until

REFUSED = "vllm:kvflow_tickets_refused_total"
MISMATCH = {"reason": "WeightsMismatch"}


def tell(server: Server, version: str) -> None:
    server.post("/update_weight_version", {"new_version": version})


def received(server: Server) -> float:
    return server.metric(EXTERNAL, source="external_kv_transfer")


@pytest.fixture
def servers(site: Site) -> tuple[Server, Server]:
    producer, consumer = site.have(PREFILL, DECODE)
    return producer, consumer


def test_a_ticket_of_other_weights_is_computed_here(servers: tuple[Server, Server]) -> None:
    producer, consumer = servers
    for server, version in ((producer, "step-1"), (consumer, "step-0")):
        tell(server, version)
    prompt = prompt_of(300, 1)
    expected, before = consumer.ids(prompt, **ALONE), consumer.metric(REFUSED, **MISMATCH)
    loaded = received(consumer)
    assert hand_over_ids(producer, consumer, prompt) == expected
    consumer.wait_metric(REFUSED, before + 1, **MISMATCH)
    assert received(consumer) == loaded
    tell(consumer, "step-1")
    prompt = prompt_of(300, 2)
    expected = consumer.ids(prompt, **ALONE)
    assert hand_over_ids(producer, consumer, prompt) == expected
    consumer.wait_metric(EXTERNAL, loaded + 300, source="external_kv_transfer")


def test_an_offer_of_the_old_weights_ends(servers: tuple[Server, Server]) -> None:
    """A decode server that was not told yet would read it."""
    producer, consumer = servers
    for server in servers:
        tell(server, "step-2")
    prompt = prompt_of(300, 3)
    params, revoked = prefill(producer, prompt), producer.metric("vllm:kvflow_leases_total", outcome="revoked")
    tell(producer, "step-3")
    producer.ids(prompt_of(3), 1)
    producer.wait_metric("vllm:kvflow_leases_total", revoked + 1, outcome="revoked")
    with pytest.raises(HTTPFailed) as caught:
        consumer.ids(prompt, kv_transfer_params=params)
    assert caught.value.status == 500
    tell(consumer, "step-3")
    assert hand_over_ids(producer, consumer, prompt) == consumer.ids(prompt, **ALONE)


def test_both_sides_at_once(servers: tuple[Server, Server]) -> None:
    """The ticket does not know the weights; the load compares them."""
    producer, consumer = servers
    introduction = introduction_of(producer, prompt_of(40, 4))
    tell(producer, "step-4")
    tell(consumer, "step-5")
    failed = consumer.metric(FAILED, **MISMATCH)
    with pytest.raises(HTTPFailed):
        flow(producer, consumer, introduction, prompt_of(300, 5))
    consumer.wait_metric(FAILED, failed + 1, **MISMATCH)
    tell(producer, "step-5")
    flow(producer, consumer, introduction, prompt_of(300, 6))


def test_a_version_that_is_no_name_changes_nothing(servers: tuple[Server, Server]) -> None:
    producer, consumer = servers
    for server in servers:
        tell(server, "step-6")
        for wrong in ("", "two words", "x" * 129):
            told = httpx.post(f"{server.url}/update_weight_version", json={"new_version": wrong}, timeout=60.0)
            assert told.status_code == 500
        assert httpx.get(f"{server.url}/weight_info").json() == {"weight_version": "step-6"}
    before, prompt = received(consumer), prompt_of(300, 7)
    hand_over_ids(producer, consumer, prompt)
    consumer.wait_metric(EXTERNAL, before + 300, source="external_kv_transfer")


def test_weights_that_are_really_replaced(servers: tuple[Server, Server], tmp_path: Path) -> None:
    """Prefill first, as in a rolling update: nobody waits, and no text is of blocks of the other weights."""
    weights = safetensors.torch.load_file(MODELS / "full" / "model.safetensors")
    values = {name: weight.flip(0).contiguous() for name, weight in weights.items() if "v_proj" in name}
    safetensors.torch.save_file(weights | values, tmp_path / "model.safetensors")
    producer, consumer = servers
    for server in servers:
        tell(server, "old")
    prompts = [prompt_of(300, seed) for seed in (11, 12, 13)]
    old = [consumer.ids(prompt, **ALONE) for prompt in prompts]
    assert hand_over_ids(producer, consumer, prompts[0]) == old[0]
    for number, server in enumerate(servers, 1):
        server.post("/reset_prefix_cache", reset_external="true")
        server.post("/pause")
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}})
        tell(server, "new")
        server.post("/resume")
        expected = old[number] if server is producer else consumer.ids(prompts[number], cache_salt="new and alone")
        assert hand_over_ids(producer, consumer, prompts[number]) == expected
        assert (expected == old[number]) is (server is producer)
    settle(*servers)


def test_a_prefix_of_other_weights_is_not_found(site: Site) -> None:
    holder, reader = site.have(DECODE, PREFILL)
    first, second = family()
    expected = alone(holder, second)
    holder.ids(first)
    tell(holder, "step-1")
    counted = Counted(reader)
    assert reader.ids(second) == expected
    until(reader, counted, "nothing", 1)
    tell(reader, "step-1")
    reader.post("/reset_prefix_cache")
    assert reader.ids(second) == expected
    until(reader, counted, "nothing", 2)
    holder.post("/reset_prefix_cache")
    holder.ids(first)
    reader.post("/reset_prefix_cache")
    assert reader.ids(second) == expected
    until(reader, counted, "found", 1)
    assert (counted.failed, counted.external) == (0, 992)
    settle(holder, reader)
