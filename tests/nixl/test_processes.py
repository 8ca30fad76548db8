"""Real NIXL between real processes, over shared memory and over tcp: the ordinary ways."""

from __future__ import annotations

import pytest

from tests.support.engine import BLOCK_BYTES
from tests.support.engine_process import Engines

NUM_BLOCKS = 64

pytestmark = pytest.mark.nixl


def test_blocks_arrive_and_leases_end(engines: Engines) -> None:
    producer, consumer = engines.pair()
    for round_ in range(20):
        name, value = f"r{round_}", float(round_ + 2)
        remote = [(round_ * 7 + index * 13) % NUM_BLOCKS for index in range(4)]
        local = [(round_ * 5 + index * 3) % NUM_BLOCKS for index in range(4)]
        producer.call("fill", block_ids=remote, value=value)
        ticket = producer.call("offer", request_id=name, block_ids=remote)
        report = consumer.call("load", request_id=name, ticket=ticket, block_ids=local)
        assert report["bytes"] == 4 * BLOCK_BYTES
        assert 1 <= report["descriptors"] <= 4 * 8
        assert producer.call("outcome", request_id=name) == "read"
        assert consumer.call("values", block_ids=local) == [value] * 4
    statistics = consumer.call("statistics")
    assert statistics["loading"]["succeeded"] == 20
    assert statistics["blocks"]["free"] == NUM_BLOCKS


@pytest.mark.parametrize(
    "hold_gil", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["loop", "interpreter"]
)
def test_a_load_goes_on_while_the_producer_is_busy(engines: Engines, hold_gil: bool) -> None:
    """Progress of a transfer depends on neither the producer's loop nor its GIL (I6), once a connection exists."""
    producer, consumer = engines.pair()
    blocks = list(range(32))
    ticket = producer.call("offer", request_id="first", block_ids=[1])
    consumer.call("load", request_id="first", ticket=ticket, block_ids=[1])
    assert producer.call("outcome", request_id="first") == "read"
    ticket = producer.call("offer", request_id="second", block_ids=blocks)
    stall = producer.stall(hold_gil=hold_gil)
    producer.wait_until_stalled()
    report = consumer.call("load", request_id="second", ticket=ticket, block_ids=blocks)
    assert report["bytes"] == 32 * BLOCK_BYTES
    producer.go_on()
    stall.result()
    assert producer.call("outcome", request_id="second") == "read"
