"""A cable is pulled out: every wait keeps its bound. Side channels that fail are in `runtime/test_side_channel.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.nixl.hand_over import (
    BLOCKS,
    CONSUMER,
    PRODUCER,
    assert_healthy,
    hand_over,
    how_it_ended,
    pass_deadline,
    pass_handshake,
    start_load,
)
from tests.nixl.networks import Cable, cable
from tests.support.engine_process import EngineProcess, Engines

pytestmark = pytest.mark.nixl


@pytest.fixture
def hosts() -> Iterator[Cable]:
    with cable() as made:
        yield made


@pytest.fixture
def transport() -> str:
    """Shared memory works across network namespaces, so only tcp tests a network."""
    return "tcp"


@pytest.fixture
def apart(engines: Engines, hosts: Cable) -> list[EngineProcess]:
    """A producer on one host; a consumer and a spare on the other."""
    there = {"host": hosts.producer_host, "namespace": hosts.producer_side}
    here = {"host": hosts.consumer_host, "namespace": hosts.consumer_side}
    producer = replace(PRODUCER, steered=False)
    spare = replace(producer, engine_id="spare", fill=7.0)
    return engines.start(replace(producer, **there), replace(CONSUMER, **here), replace(spare, **here))


@pytest.mark.parametrize("posted_before", [0, 8], ids=["before a read", "during a read"])
def test_a_link_goes_down_and_up(apart: list[EngineProcess], hosts: Cable, posted_before: int) -> None:
    """The load ends at its deadline; its posted reads end when the link is back. Other loads are not affected."""
    producer, consumer, spare = apart
    hand_over(producer, consumer, "warm up")
    ticket = producer.call("offer", request_id="r", block_ids=BLOCKS)
    consumer.stall(after_reads=posted_before)
    if posted_before == 0:
        consumer.wait_until_stalled()
    load = start_load(consumer, "r", ticket)
    if posted_before > 0:
        consumer.wait_until_stalled()
    hosts.unplug()
    consumer.go_on()
    pass_deadline(consumer, "r")
    assert how_it_ended(load) == "DeadlineExceeded"
    assert consumer.call("statistics")["blocks"]["quarantined"] == len(BLOCKS)
    hand_over(spare, consumer, "from the same host", blocks=[40, 41], value=7.0)

    hosts.plug_in()
    consumer.call("safe")
    producer.call("revoke", request_id="r")
    assert_healthy(producer, consumer)


def test_a_handshake_over_a_link_that_is_down(apart: list[EngineProcess], hosts: Cable) -> None:
    producer, consumer, _ = apart
    ticket = producer.call("offer", request_id="r", block_ids=BLOCKS)
    hosts.unplug()
    load = start_load(consumer, "r", ticket)
    pass_handshake(consumer)
    assert how_it_ended(load) == "PeerUnreachable"
    hosts.plug_in()
    assert how_it_ended(start_load(consumer, "r", ticket)) == "loaded"
