"""Readers that die before they have read, in processes of their own: their blocks come back long before their time."""

from __future__ import annotations

import pytest

from tests.nixl.hand_over import BLOCKS, assert_healthy, hand_over
from tests.support.engine import EngineSetup
from tests.support.engine_process import TIMEOUT_S, Engines

pytestmark = pytest.mark.nixl


THEIRS = [block + len(BLOCKS) for block in BLOCKS]
CONFIG = {"lease_ttl_s": 100 * TIMEOUT_S, "lease_lifetime_s": 200 * TIMEOUT_S}


def test_the_lease_of_a_killed_reader_is_given_back_and_that_of_a_stopped_one_is_not(engines: Engines) -> None:
    """Both wait for prompts of which nothing is computed."""
    producer, killed, stopped = engines.start(
        EngineSetup(engine_id="producer", fill=1.0, config=CONFIG),
        EngineSetup(engine_id="killed", fill=-1.0),
        EngineSetup(engine_id="stopped", fill=-1.0),
    )
    loads = {}
    for consumer, blocks in ((killed, BLOCKS), (stopped, THEIRS)):
        name = consumer.engine_id
        hand_over(producer, consumer, f"warm up {name}", blocks=blocks)
        ticket = producer.call("offer_growing", request_id=name, block_ids=blocks)
        before = consumer.call("statistics")["transport"]["reads"]
        loads[name] = consumer.start("load_growing", request_id=name, ticket=ticket, block_ids=blocks)
        # It asks for news before it looks at the seal, and again when it has an answer.
        producer.call("advance", request_id=name, blocks=1)
        consumer.wait_until(lambda seen, before=before: seen["transport"]["reads"] > before + 1)
    stopped.stop()
    killed.kill()
    assert producer.call("outcome", request_id="killed") == "expired"
    serving = producer.call("statistics")["serving"]
    assert (serving["open_leases"], serving["deserted"]) == (1, 1)
    stopped.resume()
    producer.call("advance", request_id="stopped", blocks=len(THEIRS))
    loads["stopped"].result()
    assert producer.call("outcome", request_id="stopped") == "read"
    assert_healthy(producer, stopped)
