"""Servers that die, restart, hang or come too late: an error or a recomputed prompt, never a wrong answer."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import httpx
import pytest

from tests.vllm.conftest import DECODE, PREFILL, Site
from tests.vllm.servers import NAME, HTTPFailed, Server, flow, hand_over, introduction_of, prefill, rendezvous

ALONE = {"cache_salt": "alone"}
ENDED = "vllm:kvflow_leases_total"
FAILED = "vllm:kvflow_load_failures_total"
LOADS = "vllm:kvflow_load_seconds_count"

SHORT_LEASES = replace(PREFILL, extra=(*PREFILL.extra, ("lease_ttl_s", 5.0)), blocks=24)
RECOMPUTING = replace(DECODE, policy="recompute")
IMPATIENT = replace(PREFILL, extra=(*PREFILL.extra, ("lease_ttl_s", 5.0)))
NARROW = replace(DECODE, blocks=18)


def assert_healthy(producer: Server, consumer: Server, prompt: list[int]) -> None:
    assert hand_over(producer, consumer, prompt) == producer.text(prompt, **ALONE)


def test_a_client_that_leaves_while_its_prompt_is_loaded(site: Site, story: list[int]) -> None:
    producer, consumer = site.have(PREFILL, DECODE)
    hand_over(producer, consumer, story[:10])
    abandoned = consumer.metric(FAILED, reason="Abandoned")
    params = prefill(producer, story[:700])
    worker = producer.worker()
    worker.send_signal(signal.SIGSTOP)  # the load cannot get on
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"http://127.0.0.1:{consumer.port}/v1/completions",
                json={"model": NAME, "prompt": story[:700], "max_tokens": 4, "kv_transfer_params": params},
                timeout=1.0,
            )
        consumer.wait_metric(FAILED, abandoned + 1, reason="Abandoned")
    finally:
        worker.send_signal(signal.SIGCONT)
    producer.wait_metric(ENDED, 1, outcome="read")  # it was told, and did not wait for its lease to run out
    assert_healthy(producer, consumer, story[:700])
    for server in (producer, consumer):
        until_free(server)


def test_a_producer_killed_after_its_prefill(site: Site, story: list[int]) -> None:
    producer, consumer = site.have(PREFILL, DECODE)
    hand_over(producer, consumer, story[:10])
    params = prefill(producer, story[100:500])
    producer.kill()
    began_s = time.monotonic()
    with pytest.raises(HTTPFailed) as caught:
        consumer.text(story[100:500], kv_transfer_params=params)
    assert caught.value.status == 500
    assert time.monotonic() - began_s < 6.0  # its port is refused: nobody is waited for
    expected = consumer.text(story[100:500])  # it goes on, and nothing of the failed load is in its cache
    producer, consumer = site.have(PREFILL, DECODE)
    assert producer.text(story[100:500], **ALONE) == expected
    assert_healthy(producer, consumer, story[600:900])


@pytest.mark.parametrize("decode", [DECODE, RECOMPUTING], ids=["fail", "recompute"])
def test_parameters_used_after_the_lease_has_run_out(site: Site, story: list[int], decode) -> None:
    """The blocks hold other prompts. That may cost an error or the time to compute, but no wrong text."""
    producer, consumer = site.have(SHORT_LEASES, decode)
    prompt = story[:417]
    expected = producer.text(prompt, **ALONE)
    expired = producer.metric(ENDED, outcome="expired")
    failures = consumer.metric(FAILED, reason="LeaseExpired")
    params = prefill(producer, prompt)
    producer.wait_metric(ENDED, expired + 1, outcome="expired")
    for start in range(500, 1300, 100):  # 8 prompts of 5 blocks through a cache of 24
        producer.text(story[start : start + 600], 1)
    if decode.policy == "fail":
        with pytest.raises(HTTPFailed) as caught:
            consumer.text(prompt, kv_transfer_params=params)
        assert caught.value.status == 500
    else:
        assert consumer.text(prompt, kv_transfer_params=params) == expected
    consumer.wait_metric(FAILED, failures + 1, reason="LeaseExpired")
    assert consumer.text(prompt) == expected, "the consumer's prefix cache is poisoned"
    until_free(consumer)


def test_parameters_of_another_prompt(site: Site, story: list[int]) -> None:
    """A router that mixes requests up: the prompt is computed, nothing of the other one gets into its answer."""
    producer, consumer = site.have(SHORT_LEASES, DECODE)
    params = prefill(producer, story[1000:1300])
    loads = consumer.metric(LOADS)
    assert consumer.text(story[1300:1600], kv_transfer_params=params) == producer.text(story[1300:1600], **ALONE)
    assert consumer.metric(LOADS) == loads
    assert "tokens of its prompt are not those that the ticket" in consumer.log.read_text()


@pytest.mark.parametrize("flows", [False, True], ids=["in turn", "both at once"])
def test_a_request_that_waits_for_blocks_keeps_its_prompt(site: Site, story: list[int], flows: bool) -> None:
    """The decode side has no room for longer than the lease's ttl; the prompt is read all the same.

    Where both sides are asked at once prefill has ended long before decode has room.
    """
    producer, consumer = site.have(IMPATIENT, NARROW)
    prompt = story[:600]  # 5 blocks
    expected = producer.text(prompt, **ALONE)
    expired = producer.metric(ENDED, outcome="expired")
    ask = partial(hand_over, producer, consumer, prompt)
    if flows:
        ask = partial(flow, producer, consumer, introduction_of(producer, story), prompt)
        expired += 1  # the introduction is a lease, too
        producer.wait_metric(ENDED, expired, outcome="expired")
    loads = consumer.metric(LOADS)
    with ThreadPoolExecutor(2) as clients:
        other = clients.submit(consumer.text, story[300:2000], 340, ignore_eos=True)  # 14 to 16 blocks
        consumer.wait_metric("vllm:num_requests_running", 1)
        waiting = clients.submit(ask)
        consumer.wait_metric("vllm:num_requests_waiting", 1)
        prefill(producer, story[1000:1100])  # a later lease, which nobody needs
        producer.wait_metric(ENDED, expired + 1, outcome="expired")
        assert not other.done(), "the decode side had room too early for this test to mean something"
        assert consumer.metric(LOADS) == loads
        assert waiting.result() == expected
    consumer.wait_metric(LOADS, loads + 1)
    assert producer.metric(ENDED, outcome="expired") == expired + 1


@pytest.mark.parametrize(("asked", "status"), [(500, 500), (400, 500), (2000, 500), (2100, 400)])
def test_what_decode_does_not_read_prefill_does_not_keep(site: Site, story: list[int], asked: int, status: int) -> None:
    """Another prompt, a longer prompt, a refused prompt: prefill's blocks are not taken for the rest of 30 s."""
    producer, consumer = site.have(PREFILL, DECODE)
    to_compute, to_receive = rendezvous(introduction_of(producer, story))
    read = producer.metric(ENDED, outcome="read")
    with ThreadPoolExecutor(1) as clients:
        computing = clients.submit(producer.complete, story[700:1200], 1, kv_transfer_params=to_compute)
        with pytest.raises(HTTPFailed) as caught:
            consumer.text((story + story)[:asked], 1, kv_transfer_params=to_receive, cache_salt=f"asked {asked}")
        computing.result()
    assert caught.value.status == status
    producer.wait_metric(ENDED, read + 1, outcome="read")
    assert_healthy(producer, consumer, story[:200])


def test_tickets_used_twice_at_once(site: Site, story: list[int]) -> None:
    """The second reader may come before or after the first has ended the lease: it gets the prompt, or it computes."""
    producer, consumer = site.have(SHORT_LEASES, RECOMPUTING)
    prompt = story[900:1300]
    expected = producer.text(prompt, **ALONE)
    params = prefill(producer, prompt)
    with ThreadPoolExecutor(2) as clients:
        twice = list(clients.map(lambda params: consumer.text(prompt, kv_transfer_params=params), [params, params]))
    assert twice == [expected, expected]


def test_a_consumer_that_restarted(site: Site, story: list[int]) -> None:
    producer, consumer = site.have(PREFILL, RECOMPUTING)
    hand_over(producer, consumer, story[:10])
    params = prefill(producer, story[:300])
    consumer.kill()
    _, consumer = site.have(PREFILL, RECOMPUTING)
    assert consumer.text(story[:300], kv_transfer_params=params) == producer.text(story[:300], **ALONE)
    assert_healthy(producer, consumer, story[400:900])


def test_servers_stop_when_they_are_told_to(site: Site, story: list[int]) -> None:
    servers = site.have(PREFILL, RECOMPUTING)
    hand_over(*servers, story[:200])
    prefill(servers[0], story[200:400])  # nobody will ever read this
    processes = [entry for server in servers for entry in server.processes()]
    assert [server.stop() for server in servers] == [0, 0]
    assert not [entry for entry in processes if entry.is_running() and entry.status() != "zombie"]


def until_free(server: Server) -> None:
    deadline_s = time.monotonic() + 30.0
    while server.metric("vllm:kv_cache_usage_perc") > 0.0:
        assert time.monotonic() < deadline_s, "blocks are still held"
        time.sleep(0.05)
