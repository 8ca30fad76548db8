"""Processes that die while a lease grows: the survivor keeps its promises, over shared memory and tcp."""

from __future__ import annotations

from enum import StrEnum

import pytest

from tests.nixl.hand_over import BLOCKS, assert_healthy, hand_over, how_it_ended
from tests.support.engine import LEASE_TTL_S, EngineSetup
from tests.support.engine_process import Call, EngineProcess, Engines

pytestmark = pytest.mark.nixl

HALF = len(BLOCKS) // 2
PRODUCER = EngineSetup(engine_id="producer", fill=1.0, steered=True)
CONSUMER = EngineSetup(engine_id="consumer", fill=-1.0)


class End(StrEnum):
    """The fault during a hand-over with one half landed."""

    COMPLETE = "complete"
    FAILED = "failed"
    PRODUCER_KILLED = "producer killed"
    CONSUMER_KILLED = "consumer killed"


def half_landed(producer: EngineProcess, consumer: EngineProcess) -> Call:
    """A load in the middle of its prompt: it waits for the rest."""
    ticket = producer.call("offer_growing", request_id="r", block_ids=BLOCKS)
    load = consumer.start("load_growing", request_id="r", ticket=ticket, block_ids=BLOCKS)
    for blocks in (1, HALF):
        producer.call("advance", request_id="r", blocks=blocks)
    consumer.call("until_landed", request_id="r", blocks=HALF)
    values = consumer.call("values", block_ids=BLOCKS)
    assert values == [1.0] * HALF + [-1.0] * (len(BLOCKS) - HALF)
    return load


@pytest.mark.parametrize(
    "end",
    [pytest.param(end, marks=() if end.endswith("killed") else pytest.mark.thorough) for end in End],
    ids=str,
)
def test_in_the_middle_of_a_prompt(engines: Engines, spare: EngineProcess, end: End) -> None:
    """The survivor has all its blocks back, and works with others; no load of a part is a success."""
    producer, consumer = engines.start(PRODUCER, CONSUMER)
    spare.call("fill", block_ids=BLOCKS, value=7.0)
    hand_over(spare, consumer, "warm up", value=7.0)
    consumer.call("fill", block_ids=BLOCKS, value=-1.0)
    load = half_landed(producer, consumer)
    match end:
        case End.COMPLETE:
            producer.call("advance", request_id="r", blocks=len(BLOCKS))
            assert how_it_ended(load) == "loaded"
            assert producer.call("outcome", request_id="r") == "read"
            assert consumer.call("values", block_ids=BLOCKS) == [1.0] * len(BLOCKS)
        case End.FAILED:
            producer.call("fail", request_id="r")
            assert how_it_ended(load) == "PrefillFailed"
            assert producer.call("outcome", request_id="r") == "failed"
        case End.PRODUCER_KILLED:
            producer.kill()
            assert how_it_ended(load) == "TransferFailed"
        case End.CONSUMER_KILLED:
            consumer.kill()
            producer.call("advance", request_id="r", blocks=len(BLOCKS))
            producer.call("pass_time", seconds=LEASE_TTL_S)
            assert producer.call("outcome", request_id="r") == "expired"
    for survivor in (engine for engine in (producer, consumer) if engine.running):
        assert_healthy(survivor, spare)
