"""The tools for users' own tests: the cluster, the books, the fixtures."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvflow import Config, LeaseOutcome, Runtime, ServeRequest
from kvflow.errors import ConfigError, PeerUnreachable
from kvflow.testing import InprocCluster, InprocPair, NixlPair, Pair, assert_conserved, run_virtual


async def test_engines_of_a_cluster_reach_each_other() -> None:
    cluster = InprocCluster()
    async with cluster.engine("one") as one, cluster.engine("two") as two, cluster.engine("three") as three:
        one.kv_caches["layers.0"].fill_(1.0)
        lease = one.runtime.serve_blocks(ServeRequest("request", block_ids=[3], num_tokens=4, reader_count=2))
        for engine in (two, three):
            await engine.runtime.load_blocks(Pair(producer=one, consumer=engine).wanted(lease, [0]))
            Pair(producer=one, consumer=engine).assert_loaded([0], [3])
        assert await lease is LeaseOutcome.READ


def test_a_cluster_works_in_virtual_time_with_staging() -> None:
    async def main() -> None:
        cluster = InprocCluster()
        staged = Config(engine_id="any", staging="always", drain_timeout_s=1.0)
        async with (
            cluster.engine("producer", config=staged) as producer,
            cluster.engine("consumer", config=staged) as consumer,
        ):
            producer.kv_caches["layers.0"].fill_(1.0)
            pair = Pair(producer=producer, consumer=consumer)
            lease = pair.offer([3, 4])
            await consumer.runtime.load_blocks(pair.wanted(lease, [0, 1]))
            pair.assert_loaded([0, 1], [3, 4])
            assert await lease is LeaseOutcome.READ

    run_virtual(main())


def test_leases_run_out_in_virtual_time() -> None:
    async def main() -> float:
        cluster = InprocCluster()
        async with cluster.engine("producer") as producer, cluster.engine("consumer") as consumer:
            lease = Pair(producer=producer, consumer=consumer).offer([3], ttl_s=3600.0)
            assert await lease is LeaseOutcome.EXPIRED
            return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(3600.05)


async def test_addresses_of_a_cluster_are_taken_and_freed() -> None:
    cluster = InprocCluster()
    config = Config(engine_id="one", listen="tcp://10.0.0.1:5600")
    async with Runtime(config, world=cluster.world()):
        with pytest.raises(ConfigError, match="in use"):
            async with Runtime(config, world=cluster.world()):
                pass
    async with Runtime(config, world=cluster.world()) as again:
        assert again.address == "tcp://10.0.0.1:5600"


async def test_a_port_that_the_cluster_chooses_is_nobody_elses() -> None:
    first = int((await _address_of(InprocCluster(), 0)).rpartition(":")[2])
    cluster = InprocCluster()
    async with Runtime(Config(engine_id="one", listen=f"tcp://127.0.0.1:{first}"), world=cluster.world()):
        assert await _address_of(cluster, 0) == f"tcp://127.0.0.1:{first + 1}"


async def _address_of(cluster: InprocCluster, port: int) -> str:
    config = Config(engine_id="two", listen=f"tcp://127.0.0.1:{port}")
    async with Runtime(config, world=cluster.world()) as runtime:
        return runtime.address


async def test_an_engine_that_has_gone_is_refused() -> None:
    cluster = InprocCluster()
    async with cluster.engine("consumer") as consumer:
        async with cluster.engine("producer") as producer:
            lease = producer.runtime.serve_blocks(ServeRequest("request", block_ids=[3], num_tokens=4))
            wanted = Pair(producer=producer, consumer=consumer).wanted(lease, [0])
            lease.revoke()
        with pytest.raises(PeerUnreachable, match="refused"):
            await consumer.runtime.load_blocks(wanted)


# --- the books


async def test_books_are_conserved_at_every_moment(kvflow_pair: InprocPair) -> None:
    producer, consumer = kvflow_pair.producer.runtime, kvflow_pair.consumer.runtime
    lease = kvflow_pair.offer([3, 4])
    assert_conserved(producer, [lease])
    load = asyncio.create_task(consumer.load_blocks(kvflow_pair.wanted(lease, [0, 1])))
    while not load.done():
        await asyncio.sleep(0)
        assert_conserved(consumer, [])
        assert_conserved(producer, [lease])
    await load
    await lease
    assert_conserved(producer, [lease])


async def test_a_lease_that_nobody_knows_of_is_found(kvflow_pair: InprocPair) -> None:
    lease = kvflow_pair.offer([3, 4])
    with pytest.raises(AssertionError, match="leased: 2 blocks"):
        assert_conserved(kvflow_pair.producer.runtime, [])
    assert await lease.revoke() is LeaseOutcome.REVOKED


async def test_a_block_that_nobody_answers_for_is_found(kvflow_pair: InprocPair) -> None:
    incarnation = kvflow_pair.consumer.runtime._supervisor.incarnation
    assert incarnation is not None
    ledger = incarnation.host.resources.ledger
    ids = np.array([5])
    ledger.begin_load(ids)
    with pytest.raises(AssertionError, match="blocks in flight without a load"):
        assert_conserved(kvflow_pair.consumer.runtime, [])
    ledger.end_load(ids)


# --- NIXL


@pytest.mark.nixl
async def test_a_pair_over_nixl(kvflow_nixl_pair: NixlPair) -> None:
    pair = kvflow_nixl_pair
    lease = pair.offer([3, 4])
    await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0, 1]))
    pair.assert_loaded([0, 1], [3, 4])
    assert await lease is LeaseOutcome.READ
