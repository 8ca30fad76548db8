"""Real NIXL between real processes, over shared memory and over tcp: the ordinary ways."""

from __future__ import annotations

import pytest

from tests.support.engine import BLOCK_BYTES, EngineSetup, small
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


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_a_draft_model_of_one_side_is_left_out(engines: Engines, side: str) -> None:
    shapes = {one: small(layers=4 + (one == side), drafts=int(one == side)) for one in ("producer", "consumer")}
    setups = [
        EngineSetup(engine_id=one, fill=fill, pool=shapes[one]) for one, fill in zip(shapes, (3.0, 5.0), strict=True)
    ]
    producer, consumer = engines.start(*setups)
    for name in ("first", "again"):
        ticket = producer.call("offer", request_id=name, block_ids=[7, 9])
        report = consumer.call("load", request_id=name, ticket=ticket, block_ids=[1, 2])
        assert report["bytes"] == 2 * BLOCK_BYTES
        assert producer.call("outcome", request_id=name) == "read"
    expected = {f"layers.{index}": [3.0] for index in range(4)}
    if side == "consumer":
        expected["draft.0"] = [5.0]
    assert consumer.call("layer_values", block=2) == expected
    assert {value for values in consumer.call("layer_values", block=3).values() for value in values} == {5.0}


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
