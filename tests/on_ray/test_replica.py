"""A replica's runtime without Ray: its Config, its time to drain, its status."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from tests_support import each, small_cache, until

from kvflow import LeaseOutcome, RuntimeState, ServeRequest
from kvflow.errors import (
    ConfigError,
    PeerUnreachable,
    RequestError,
    RuntimeBroken,
    RuntimeClosed,
    RuntimeDraining,
)
from kvflow.ray import ReplicaPlace, ReplicaRuntime
from kvflow.ray.replica import this_replica
from kvflow.testing import InprocCluster

PLACE = ReplicaPlace(
    app="app",
    deployment="Decode",
    unique_id="x7k2",
    node_ip="127.0.0.3",
    shutdown_timeout_s=30.0,
    wait_loop_s=2.0,
)
QUICK: dict[str, Any] = {"transport": "inproc", "cancel_grace_s": 1.0, "drain_timeout_s": 1.0}


def replica(**options: Any) -> ReplicaRuntime:
    given: dict[str, Any] = {"place": PLACE, "world": InprocCluster().world(), **QUICK, **options}
    return ReplicaRuntime(**given)


def test_a_config_follows_from_the_replica() -> None:
    config = PLACE.config({"model": "llama", "tp_rank": 1, "tp_size": 2})
    assert (config.engine_id, config.listen, config.model) == ("Decode-x7k2", "tcp://127.0.0.3:0", "llama")
    assert (config.tp_rank, config.tp_size, config.drain_timeout_s) == (1, 2, 1.0)
    assert replace(PLACE, node_ip="fd00::7").config({}).listen == "tcp://[fd00::7]:0"
    assert PLACE.config({"listen": "tcp://0.0.0.0:0", "advertise_host": "auto"}).advertise_toward == ""


def test_a_setting_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="Config: unknown: lease_ttl, tp"):
        PLACE.config({"lease_ttl": 3, "tp": 2})


@each(
    ("timeout_s", "wanted_s", "expected_s"),
    [(30.0, None, 14.95), (30.0, 5.0, 5.0), (30.0, 14.95, 14.95), (16.05, None, 1.0)],
)
def test_a_drain_leaves_time_to_close(timeout_s: float, wanted_s: float | None, expected_s: float) -> None:
    """2 s for the wait loop, 1 s each to end loads, to settle and to say goodbye, 0.05 s to hold, 10 s to close."""
    place = replace(PLACE, shutdown_timeout_s=timeout_s)
    assert place.drain_deadline_s(place.config(QUICK), wanted_s) == pytest.approx(expected_s)


@each(
    ("timeout_s", "wanted_s", "needed"),
    [(30.0, 15.0, "30.05"), (5.0, None, "16.05"), (20.0, 10.0, "25.05")],
)
def test_a_drain_that_does_not_fit_is_refused(timeout_s: float, wanted_s: float | None, needed: str) -> None:
    place = replace(PLACE, shutdown_timeout_s=timeout_s)
    why = rf"'Decode': graceful_shutdown_timeout_s: {timeout_s:g}, but {needed} are needed"
    with pytest.raises(ConfigError, match=why):
        ReplicaRuntime(place=place, drain_deadline_s=wanted_s, **QUICK)


def test_out_of_a_replica_it_says_so() -> None:
    with pytest.raises(ConfigError, match="ReplicaRuntime"):
        this_replica()


async def test_it_says_who_it_is_and_how_it_is() -> None:
    async with replica(tp_rank=1, tp_size=2) as opened:
        runtime = opened.runtime
        assert json.loads(json.dumps(opened.metadata())) == {
            "engine_id": "Decode-x7k2",
            "address": runtime.address,
            "node_ip": "127.0.0.3",
            "dp_rank": 0,
            "pp_rank": 0,
            "tp_rank": 1,
        }
        assert opened.routing_stats() == {"state": "open", "blocks_free": 0, "open_leases": 0, "open_loads": 0}
        await runtime.register_kv_caches(*small_cache())
        lease = runtime.serve_blocks(ServeRequest("r", block_ids=[1, 2], num_tokens=8))
        assert opened.routing_stats() == {"state": "open", "blocks_free": 6, "open_leases": 1, "open_loads": 0}
        opened.check()
        lease.revoke()
    with pytest.raises(RuntimeBroken, match="replica x7k2 of 'Decode': its runtime is closed"):
        opened.check()
    with pytest.raises(RuntimeClosed):
        opened.metadata()


async def test_it_drains_and_then_closes() -> None:
    async with replica(drain_deadline_s=1e-3) as opened:
        await opened.runtime.register_kv_caches(*small_cache())
        lease = opened.runtime.serve_blocks(ServeRequest("r", block_ids=[1], num_tokens=4))
        assert (await opened.drain(), await lease) == (False, LeaseOutcome.REVOKED)
        opened.check()  # Serve is waiting for it: nothing is to be replaced
        with pytest.raises(RuntimeDraining):
            opened.runtime.serve_blocks(ServeRequest("r", block_ids=[1], num_tokens=4))
    assert opened.runtime.state is RuntimeState.CLOSED
    assert await opened.drain() is False


async def test_it_hands_on_before_it_drains_and_drains_whatever_comes_of_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = list[float]()

    async def hand_on(within_s: float) -> None:
        assert opened.runtime.state is RuntimeState.OPEN
        given.append(within_s)

    async def fail(_: float) -> None:
        raise PeerUnreachable("nobody is there", peer="tcp://10.0.0.7:5600")

    async def last(_: float) -> None:
        await asyncio.get_running_loop().create_future()

    async with replica(drain_deadline_s=8.0) as opened:
        assert await opened.drain(hand_on=hand_on)
        assert given == [4.0]
    for wrong, says in ((fail, "nobody is there"), (last, "not done within 0.001 s")):
        async with replica(drain_deadline_s=2e-3) as opened:
            assert await opened.drain(hand_on=wrong)
        assert says in caplog.text
    async with replica() as opened:
        with pytest.raises(RequestError):
            await opened.drain(successor={})


async def test_a_drain_keeps_to_the_time_that_is_left_now() -> None:
    """Serve changes a deployment's times without starting its replicas again."""
    async with replica() as opened:
        assert opened.drain_deadline_s == pytest.approx(14.95)
        await opened.runtime.register_kv_caches(*small_cache())
        opened._find_place = lambda: replace(PLACE, shutdown_timeout_s=1.0)
        lease = opened.runtime.serve_blocks(ServeRequest("r", block_ids=[1], num_tokens=4))
        assert not await opened.drain()
        assert await lease is LeaseOutcome.REVOKED


async def test_one_whose_service_died_is_found_by_the_check() -> None:
    async with replica() as opened:
        (poller,) = [task for task in asyncio.all_tasks() if task.get_name() == "kvflow-poller"]
        poller.cancel()
        await until(lambda: opened.runtime.state is RuntimeState.BROKEN)
        with pytest.raises(RuntimeBroken, match="its runtime is broken"):
            opened.check()
        assert await opened.drain() is False
