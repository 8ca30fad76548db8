"""`KVFLOW_AS_NIXL=1`: servers with a launcher that gives only the name "NixlConnector", alone and beside stock vLLM."""

from __future__ import annotations

import pytest

from tests.support.ports import free_port
from tests.vllm.conftest import TEXT, Site
from tests.vllm.servers import Setup, hand_over, prefill
from tests.vllm.test_stock import ALONE, LOADS, SOURCES, STOCK, assert_routed

LENGTHS = [3, 128, 1000]
SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL_PORT"


def named(role: str, core: int, *, switch: str = "1") -> Setup:
    """With a side channel for each, as Dynamo and llm-d set one. Without the switch it is stock."""
    environment = (("KVFLOW_AS_NIXL", switch), (SIDE_CHANNEL, str(free_port())))
    return Setup(role=role, core=core, connector=STOCK, extra=(), blocks=64, environment=environment)


PREFILL = named("kv_both", 0)
PAIRS = {
    "both have the switch": (PREFILL, named("kv_consumer", 1), "seal"),
    "the decode side is stock": (PREFILL, named("kv_consumer", 1, switch="0"), None),
    "the prefill side is stock": (named("kv_producer", 0, switch="0"), named("kv_both", 1), "deadline"),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("which", PAIRS)
def test_the_answer_is_that_of_the_decode_side_alone(site: Site, which: str, length: int) -> None:
    *setups, freshness = PAIRS[which]
    producer, consumer = site.have(*setups)
    prompt = consumer.tokens(TEXT.read_text())[-length:]
    expected = consumer.text(prompt, **ALONE)
    before = consumer.metric(SOURCES, source="external_kv_transfer")
    assert hand_over(producer, consumer, prompt) == expected
    consumer.wait_metric(SOURCES, before + length, source="external_kv_transfer")
    if freshness is not None:
        assert consumer.metric(LOADS, freshness=freshness) > 0
    for server in (producer, consumer):
        lines = server.log.read_text(errors="replace").splitlines()
        says = [line for line in lines if "KVFLOW_AS_NIXL=1: NixlConnector is kvflow's connector" in line]
        assert len(says) == (dict(server.setup.environment)["KVFLOW_AS_NIXL"] == "1")
        assert all("WARNING" in line for line in says)


def test_routers_find_it_where_the_variables_say(site: Site) -> None:
    producer, consumer = site.have(*PAIRS["both have the switch"][:2])
    story = consumer.tokens(TEXT.read_text())
    params = prefill(producer, story[:300])
    assert params["remote_host"] == "127.0.0.1"
    assert str(params["remote_port"]) == dict(producer.setup.environment)[SIDE_CHANNEL]
    assert params["do_remote_prefill"]
    assert not params["do_remote_decode"]
    assert params["remote_engine_id"]
    assert params["remote_block_ids"]
    assert_routed(producer, consumer, story)
