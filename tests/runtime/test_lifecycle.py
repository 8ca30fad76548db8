"""Opening, closing and dying: all waiters are settled, nothing is left behind (I4, I5, I7)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
from hand_overs import free_ports
from pairs import EnginePair, load_request, open_pair, virtual_pair
from tests_support import PATIENT, WAIT_S, in_virtual_time, limited, small_cache, turns, until

from kvflow import CacheLayout, Config, LeaseOutcome, Runtime, RuntimeState, ServeRequest
from kvflow.errors import ConfigError, InvalidInput, KVFlowError, RuntimeBroken, RuntimeClosed, UsageError
from kvflow.runtime.world import World
from kvflow.testing import InprocCluster, InprocNetwork, InprocTransport, assert_closed, inproc_pair
from kvflow.transport.inproc import InprocRead

QUICK = replace(PATIENT, drain_timeout_s=0.05, cancel_grace_s=0.05)
DRAINING = replace(PATIENT, drain_timeout_s=WAIT_S)
PLAIN = Config(engine_id="engine", listen="tcp://127.0.0.1:0", transport="inproc")
OFFER = ServeRequest("r", block_ids=[], num_tokens=0)


async def test_a_runtime_that_did_nothing_leaves_nothing() -> None:
    """Also if its body fails. The body's error is raised."""
    before = asyncio.all_tasks()
    with pytest.raises(ZeroDivisionError):
        async with Runtime(PLAIN) as runtime:
            assert runtime.state is RuntimeState.OPEN
            raise ZeroDivisionError
    assert_closed(runtime.statistics())
    assert asyncio.all_tasks() == before
    await runtime.aclose()


async def test_opening_registering_and_closing_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvflow")
    async with Runtime(PLAIN) as runtime:
        address = runtime.address
        await runtime.register_kv_caches(*small_cache())
    opened, registered, *_, closed = caplog.messages
    assert opened.startswith(f"runtime 'engine' (dp 0 pp 0 tp 0) opened at {address}: kvflow ")
    assert "transport inproc, CURVE off" in opened
    assert "registered a KV cache of 2 layers, 8 blocks of 1024 bytes on cpu:0" in registered
    assert closed == "runtime 'engine' (dp 0 pp 0 tp 0) closed cleanly"


async def test_use_before_opening_before_registering_and_after_closing() -> None:
    runtime = Runtime(PLAIN)
    with pytest.raises(UsageError, match="not open yet"):
        runtime.serve_blocks(OFFER)
    async with runtime:
        with pytest.raises(UsageError, match="register_kv_caches first"):
            runtime.serve_blocks(OFFER)
        with pytest.raises(UsageError, match="opened once"):
            await runtime.__aenter__()
    with pytest.raises(RuntimeClosed, match=r"the runtime .* is closed"):
        runtime.serve_blocks(OFFER)
    with pytest.raises(UsageError):
        await runtime.__aenter__()
    unopened = Runtime(PLAIN)
    await unopened.aclose()
    assert unopened.state is RuntimeState.CLOSED


async def test_an_early_notification_is_counted() -> None:
    transport = InprocTransport("engine", InprocNetwork())
    async with Runtime(PLAIN, world=World(transport=lambda *_: transport)) as runtime:
        transport.deliver(b"too early")
        await until(lambda: runtime.statistics().early_notifications)


async def test_a_cache_is_registered_once_and_fits_its_layout() -> None:
    kv_caches, layout = small_cache()
    async with Runtime(PLAIN) as runtime:
        with pytest.raises(InvalidInput, match=r"num_blocks is 9, the layout says 8"):
            await runtime.register_kv_caches(small_cache(num_blocks=9)[0], layout)
        registering = (runtime.register_kv_caches(kv_caches, layout) for _ in range(2))
        results = await asyncio.gather(*registering, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), UsageError]
        with pytest.raises(UsageError, match="registered already"):
            await runtime.register_kv_caches(kv_caches, layout)


async def test_a_taken_port_is_a_config_error_and_leaves_nothing() -> None:
    async with Runtime(PLAIN) as first:
        taken = Runtime(replace(PLAIN, listen=first.address))
        with pytest.raises(ConfigError, match="cannot bind"):
            await taken.__aenter__()
        assert taken.state is RuntimeState.CLOSED
        assert_closed(taken.statistics())
        await taken.aclose()


async def test_closing_waits_for_leases_then_revokes_them_also_if_nobody_waits_for_it() -> None:
    async with open_pair(QUICK) as pair:
        lease = pair.offer([3])
        closing = asyncio.create_task(pair.writer.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert await lease is LeaseOutcome.REVOKED
        await pair.writer.aclose()
        assert pair.writer.state is RuntimeState.CLOSED


async def test_a_reader_that_comes_while_the_producer_closes_still_gets_its_blocks() -> None:
    async with open_pair(DRAINING) as pair:
        lease = pair.offer([3])
        closing = asyncio.create_task(pair.writer.aclose())
        await asyncio.sleep(0)
        assert pair.writer.state is RuntimeState.CLOSING
        await pair.load(lease)
        assert await lease is LeaseOutcome.READ
        await closing
        pair.assert_loaded([0], [3])


async def test_closing_lets_a_load_finish() -> None:
    async with open_pair(DRAINING) as pair:
        lease = pair.offer([3])
        load = await pair.hold(lease)
        closing = asyncio.create_task(pair.reader.aclose())
        await asyncio.sleep(0)
        await pair.fails(RuntimeClosed, lease, [1])
        assert (await pair.let_go(load)).blocks == 1
        await closing
        pair.assert_loaded([0], [3])
        assert await lease is LeaseOutcome.READ


async def test_closing_ends_a_load_that_does_not_finish() -> None:
    """The read never stops: the load gets RuntimeClosed, and closing says that the memory must stay."""
    with pytest.raises(RuntimeBroken, match=r"not stopped.*: 1 read;"):
        async with open_pair(QUICK) as pair:
            lease = pair.offer([3])
            load = await pair.hold(lease)
            lease.revoke()
            try:
                await pair.reader.aclose()
            finally:
                with pytest.raises(RuntimeClosed):
                    await load


@in_virtual_time
async def test_closing_while_a_load_is_past_its_deadline_and_waits_for_its_bytes() -> None:
    async with virtual_pair(replace(PATIENT, drain_timeout_s=0.05)) as pair:
        load = await pair.hold(pair.offer([3]), deadline_s=0.3)
        await asyncio.wait([load], timeout=1.0)
        closing = asyncio.create_task(pair.reader.aclose())
        await asyncio.wait([closing], timeout=1.0)
        assert not load.done(), "its bytes may still land"
        pair.transport.perform()
        with pytest.raises(RuntimeClosed):
            await load
        await closing


async def test_a_dying_transport_settles_everybody() -> None:
    """The consumer's transport dies under a read, the producer's under a lease: no task waits forever."""
    # Blocks that a dead transport may still write stay quarantined, so the pair's own checks must not run.
    with pytest.raises(_SkipChecks):
        async with inproc_pair(config=QUICK) as made:
            pair = EnginePair(producer=made.producer, consumer=made.consumer)
            lease = pair.offer([3])
            load = await pair.hold(lease)
            for engine in (pair.consumer, pair.producer):
                engine.transport.die(OSError("scripted"))
            with pytest.raises(RuntimeBroken):
                await load
            assert await lease is LeaseOutcome.REVOKED
            for runtime in (pair.reader, pair.writer):
                assert runtime.state is RuntimeState.BROKEN
                with pytest.raises(RuntimeBroken, match="scripted"):
                    runtime.serve_blocks(OFFER)
            (quarantine,) = pair.reader.quarantines
            assert quarantine.block_ids == (0,)
            with pytest.raises(RuntimeBroken):
                await quarantine.settled()
            pair.transport.held.clear()
            raise _SkipChecks
    assert pair.reader.statistics().tasks == pair.writer.statistics().tasks == 0


class _SkipChecks(Exception):
    pass


async def test_devices_and_transports_that_cannot_be_are_config_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="transport: expected 'nixl' or 'inproc', got 'pigeon'"):
        Runtime(replace(PLAIN, transport="pigeon"))
    kv_caches, _ = small_cache(device="meta")
    layout = CacheLayout.infer(kv_caches, order="HND", block_size=4)
    async with Runtime(replace(PLAIN, staging="never")) as runtime:
        with pytest.raises(ConfigError, match="device 'meta' is not supported: its tensors"):
            await runtime.register_kv_caches(kv_caches, layout)
        monkeypatch.setattr("kvflow.transport.base.DEVICES", {"cpu": False})
        with pytest.raises(ConfigError, match="staging: 'never', but the transport cannot reach a cache on 'cpu'"):
            await runtime.register_kv_caches(*small_cache())


@pytest.mark.parametrize("steps", range(1, 6))
async def test_opening_can_be_cancelled_anywhere(steps: int) -> None:
    """Then it is closed, and its port is free."""
    config = replace(PLAIN, listen=f"tcp://127.0.0.1:{free_ports(1)}")
    runtime = Runtime(config)
    opening = asyncio.create_task(runtime.__aenter__())
    await turns(steps)
    if opening.cancel():
        with pytest.raises(asyncio.CancelledError):
            await opening
    else:
        await runtime.aclose()
    assert runtime.state is RuntimeState.CLOSED
    assert_closed(runtime.statistics())
    async with Runtime(config):
        pass


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("verb", ["load_blocks", "prewarm"])
async def test_who_comes_while_a_runtime_breaks_is_told(verb: str, steps: int) -> None:
    """The services end over several turns of the loop; a handshake that is begun in between has nowhere to run, and a
    task that is cancelled before its first step cannot settle anything itself."""
    world = InprocCluster().world()
    async with open_pair(replace(QUICK, handshake_timeout_s=0.2), producer=world, consumer=world) as pair:
        pair.transport.die(OSError("scripted"))
        await turns(steps)
        lease = pair.offer([3])
        async with asyncio.timeout(WAIT_S):
            if verb == "load_blocks":
                await pair.fails(KVFlowError, lease)
                return
            with pytest.raises(KVFlowError):
                (result,) = await pair.reader.prewarm([lease.ticket])
                assert result is not None, "connected, to a transport that is dead"
                raise result


# --- bytes of an ended load that are still on their way


class LateBytes:
    """See `transport.inproc.SimulatedLink`: reads end when the test says so, and closing waits for that."""

    def __init__(self) -> None:
        self.reads: list[tuple[InprocTransport, InprocRead]] = []
        self.all_landed = asyncio.Event()

    def take_read(self, reader: InprocTransport, read: InprocRead) -> None:
        self.reads.append((reader, read))

    def send(self, target: InprocTransport, payload: bytes) -> None:
        target.deliver(payload)

    def report(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)

    async def wait_for_reads(self, reader: InprocTransport) -> None:
        await self.all_landed.wait()


@pytest.mark.parametrize("in_time", [True, False])
async def test_what_was_quarantined_is_safe_once_the_transport_has_closed_in_good_order(in_time: bool) -> None:
    """The poller ends before the transport and reports no end of the last read, but the transport has waited for it."""
    cluster, late = InprocCluster(), LateBytes()
    network = cluster.network

    async with cluster.engine("producer") as producer:
        world = replace(cluster.world(), transport=lambda _, name: InprocTransport(name, network, link=late))
        lease = producer.runtime.serve_blocks(ServeRequest("req", block_ids=[3], num_tokens=4))
        config = limited(replace(QUICK, engine_id="consumer"), transport_close_timeout_s=WAIT_S if in_time else 0.01)
        runtime = Runtime(config, world=world)
        await runtime.__aenter__()
        await runtime.register_kv_caches(producer.kv_caches, producer.layout)
        loading = asyncio.create_task(runtime.load_blocks(load_request(lease)))
        await until(lambda: late.reads)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        (quarantine,) = runtime.quarantines
        closing = asyncio.create_task(runtime.aclose())
        if in_time:
            with pytest.raises(RuntimeBroken, match="the transfer poller ended"):
                await quarantine.settled()
            late.all_landed.set()
            await closing
            assert quarantine.safe
            await quarantine.settled()
            assert_closed(runtime.statistics())
        else:
            with pytest.raises(RuntimeBroken, match="not stopped"):
                await closing
            assert not quarantine.safe
        await lease.revoke()
