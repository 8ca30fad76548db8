"""Real NIXL between real processes, over shared memory and over tcp."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from engine_process import EngineProcess

TRANSPORTS = {"shm": {}, "tcp": {"UCX_TLS": "tcp"}}
NUM_BLOCKS = 64
BLOCK_BYTES = 4 * 2 * 4 * 16 * 64 * 2  # layers, K and V, heads, tokens, head size, float16

pytestmark = pytest.mark.nixl


@dataclass(frozen=True)
class Cluster:
    producer: EngineProcess
    consumer: EngineProcess
    environment: dict[str, str]


@pytest.fixture(params=TRANSPORTS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    environment: dict[str, str] = TRANSPORTS[request.param]
    engines = [
        EngineProcess("producer", environment, NUM_BLOCKS, 1.0),
        EngineProcess("consumer", environment, NUM_BLOCKS, -1.0),
    ]
    try:
        assert [engine.receive() for engine in engines] == ["ready", "ready"]
        yield Cluster(*engines, environment)
        assert [engine.quit() for engine in engines if engine.process.is_alive()] in ([0], [0, 0])
    finally:
        for engine in engines:
            engine.kill()


def test_blocks_arrive_and_leases_end(cluster: Cluster) -> None:
    producer, consumer = cluster.producer, cluster.consumer
    for round_ in range(20):
        remote = [(round_ * 7 + index * 13) % NUM_BLOCKS for index in range(4)]
        local = [(round_ * 5 + index * 3) % NUM_BLOCKS for index in range(4)]
        producer.call("fill", remote, float(round_ + 2))
        ticket = producer.call("offer", f"r{round_}", remote)
        size_bytes, descriptors = consumer.call("load", f"r{round_}", ticket, local)
        assert size_bytes == 4 * BLOCK_BYTES
        assert 1 <= descriptors <= 4 * 8
        assert producer.call("outcome", f"r{round_}") == "read"
        assert consumer.call("values", local) == [float(round_ + 2)] * 4
    statistics = consumer.call("statistics")
    assert statistics.loading.succeeded == 20
    assert statistics.blocks.free == NUM_BLOCKS


def test_blocks_nobody_asked_for_stay_untouched(cluster: Cluster) -> None:
    ticket = cluster.producer.call("offer", "r", [5, 6, 7, 20])
    cluster.consumer.call("load", "r", ticket, [10, 11, 40, 12])
    expected = [1.0 if block in (10, 11, 12, 40) else -1.0 for block in range(NUM_BLOCKS)]
    assert cluster.consumer.call("values", list(range(NUM_BLOCKS))) == expected


def test_a_load_goes_on_while_the_producers_loop_is_blocked(cluster: Cluster) -> None:
    """Progress of a transfer depends on neither side's loop (I6): the connection exists, the producer is stuck."""
    producer, consumer = cluster.producer, cluster.consumer
    consumer.call("load", "first", producer.call("offer", "first", [1]), [1])
    assert producer.call("outcome", "first") == "read"
    ticket = producer.call("offer", "second", list(range(32)))
    assert producer.call("block_the_loop") == "blocked"
    assert consumer.call("load", "second", ticket, list(range(32)))[0] == 32 * BLOCK_BYTES
    producer.send("go on")
    assert producer.receive() == "back"
    assert producer.call("outcome", "second") == "read"


def test_an_expired_lease_is_never_a_success(cluster: Cluster) -> None:
    producer, consumer = cluster.producer, cluster.consumer
    ticket = producer.call("offer", "r", [1, 2], 0.05)
    assert producer.call("outcome", "r") == "expired"
    producer.call("fill", [1, 2], 99.0)
    with pytest.raises(RuntimeError, match="LeaseExpired"):
        consumer.call("load", "r", ticket, [1, 2])


def test_a_killed_producer_fails_its_loads_and_nobody_else(cluster: Cluster) -> None:
    producer, consumer = cluster.producer, cluster.consumer
    ticket = producer.call("offer", "before", [1])
    consumer.call("load", "before", ticket, [1])
    ticket = producer.call("offer", "after", [2])
    producer.kill()
    with pytest.raises(RuntimeError, match=r"TransferFailed|PeerUnreachable"):
        consumer.call("load", "after", ticket, [2])
    with pytest.raises(RuntimeError, match="PeerUnreachable"):
        consumer.call("load", "after", ticket, [2])
    other = EngineProcess("other", cluster.environment, NUM_BLOCKS, 7.0)
    try:
        assert other.receive() == "ready"
        consumer.call("load", "healthy", other.call("offer", "healthy", [3]), [3])
        assert other.call("outcome", "healthy") == "read"
        assert consumer.call("values", [1, 2, 3])[::2] == [1.0, 7.0]
        assert other.quit() == 0
    finally:
        other.kill()


def test_a_killed_consumer_costs_the_producer_a_lease_and_nothing_else(cluster: Cluster) -> None:
    producer = cluster.producer
    cluster.consumer.call("load", "first", producer.call("offer", "first", [1]), [1])
    producer.call("offer", "orphan", [2], 0.1)
    cluster.consumer.kill()
    assert producer.call("outcome", "orphan") == "expired"
    other = EngineProcess("consumer", cluster.environment, NUM_BLOCKS, -1.0)
    try:
        assert other.receive() == "ready"
        other.call("load", "again", producer.call("offer", "again", [2]), [5])
        assert producer.call("outcome", "again") == "read"
        values = other.call("values", [4, 5])
        assert values == [-1.0, 1.0]
        assert not any(math.isnan(value) for value in values)
        assert other.quit() == 0
    finally:
        other.kill()
