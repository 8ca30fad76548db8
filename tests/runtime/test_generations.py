"""Unregistering and registering again: no bytes of an earlier registration are ever read as good.

The network of these tests leaves the memory of a closed agent readable, as shared memory is. Only wiped seals, and the
names of incarnations, keep a reader from taking what it finds there for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pairs import EnginePair, host_of, incarnation_of, known, load_request, virtual_pair
from tests_support import PATIENT, in_virtual_time, limited, small_cache, turns, until

from kvflow import CacheLayout, Config, LeaseOutcome, Runtime, RuntimeState, ServeRequest
from kvflow.core.cache.regions import Device, Span
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.core.protocol.notifications import ReadDone, Renew
from kvflow.errors import (
    CacheUnregistered,
    ConfigError,
    KVFlowError,
    LayoutError,
    LeaseExpired,
    PeerNotReady,
    RequestError,
    RuntimeBroken,
    RuntimeClosed,
    RuntimeDraining,
    TransportBroken,
    UsageError,
)
from kvflow.testing import (
    InprocCluster,
    TestEngine,
    assert_blocks_equal,
    assert_closed,
    assert_quiet,
    cancel_everywhere,
)
from kvflow.testing.caches import PatternCache
from kvflow.testing.pair import CacheSize
from kvflow.transport.base import MemoryUse, TransportError
from kvflow.transport.inproc import InprocNetwork, InprocTransport

BRIEF = limited(replace(PATIENT, cancel_grace_s=0.1, drain_timeout_s=0.2), transport_close_timeout_s=0.5)
OLD, NEW = 777.0, 888.0


@contextlib.asynccontextmanager
async def readable_pair(config: Config = BRIEF, *, warm: bool = True) -> AsyncIterator[EnginePair]:
    """If warm, the reader has a connection already."""
    async with virtual_pair(config) as pair:
        pair.transport._network.leaves_memory = True
        if warm:
            await pair.load(pair.offer([1], "warm"))
        yield pair


def fill(engine: TestEngine, value: float) -> None:
    for tensor in engine.kv_caches.values():
        tensor.fill_(value)


async def fall_asleep(engine: TestEngine, *, farewell: bool = True) -> None:
    """Unregister the cache and overwrite its memory. Without `farewell`, readers get no message."""
    if not farewell:
        incarnation_of(engine.runtime).goodbyes._readers.clear()
    await engine.runtime.unregister()
    fill(engine, OLD)


async def wake(engine: TestEngine) -> None:
    await engine.runtime.register_kv_caches(engine.kv_caches, engine.layout)
    fill(engine, NEW)


async def assert_new(pair: EnginePair, name: str) -> None:
    """Assert that a new offer is loaded."""
    lease = pair.offer([3, 4], name)
    await pair.load(lease, [0, 1])
    assert await lease is LeaseOutcome.READ
    assert_blocks_equal(pair.consumer.cache, [0, 1], pair.producer.cache, [3, 4])
    assert all((tensor[:, [0, 1]] == NEW).all() for tensor in pair.consumer.kv_caches.values())


# --- what readers have of before


@pytest.mark.parametrize("farewell", [True, False])
@in_virtual_time
async def test_a_ticket_of_before_is_over(farewell: bool) -> None:
    async with readable_pair() as pair:
        lease = pair.offer([3])
        await fall_asleep(pair.producer, farewell=farewell)
        assert await lease is LeaseOutcome.REVOKED
        read = pair.transport.statistics.bytes_read
        error = await pair.fails(KVFlowError, lease)
        if farewell:
            assert isinstance(error, PeerNotReady)
        else:  # the reader has found the bytes, and the seal wiped
            assert isinstance(error, LeaseExpired)
            assert pair.transport.statistics.bytes_read > read
        await wake(pair.producer)
        await pair.fails(LeaseExpired, lease)
        await assert_new(pair, "new")
        await pair.fails(LeaseExpired, lease)


@in_virtual_time
async def test_a_lease_that_lies_where_one_of_before_lay_does_not_vouch_for_it() -> None:
    """Same request, same blocks, same seal word, and a reader without a goodbye: the ticket decides."""
    async with readable_pair() as pair:
        before = pair.offer([3, 4]).ticket
        await fall_asleep(pair.producer, farewell=False)
        await wake(pair.producer)
        lease = pair.offer([3, 4])
        now = lease.ticket
        assert (now.first.seal_index, now.blocks_digest) == (before.first.seal_index, before.blocks_digest)
        assert now.first.incarnation != before.first.incarnation
        await pair.fails(LeaseExpired, before, [0, 1])
        await pair.load(lease, [0, 1])
        await pair.fails(LeaseExpired, before, [0, 1], match="restarted")


@in_virtual_time
async def test_a_read_under_way_is_not_reported_as_good() -> None:
    """Posted before, performed when the memory has another use; its seal is read at the same time."""
    async with readable_pair() as pair:
        load = await pair.hold(pair.offer([3, 4]), [0, 1])
        await fall_asleep(pair.producer, farewell=False)
        await wake(pair.producer)
        assert pair.transport.held, "the read outlived the registration"
        with pytest.raises(LeaseExpired):
            await pair.let_go(load)
        await assert_new(pair, "new")


@in_virtual_time
async def test_a_seal_that_was_seen_just_before_does_not_vouch_for_bytes_read_after() -> None:
    """The other half of the argument: memory is not given back before every quick read that saw the seal is over."""
    async with readable_pair() as pair:
        pair.offer([3, 4])
        begun_s = asyncio.get_running_loop().time()
        await pair.writer.unregister()
        assert asyncio.get_running_loop().time() - begun_s >= pair.writer.config.limits.seal_hold_s


@in_virtual_time
async def test_a_cache_of_another_layout_or_size_is_read_by_its_own() -> None:
    """A reader without a goodbye keeps a connection, and block maps, of other strides at the same addresses."""
    async with readable_pair() as pair:
        before = pair.offer([3, 4])
        await fall_asleep(pair.producer, farewell=False)
        turned = {name: one.view(2, 16, 4, 2, 8) for name, one in pair.producer.kv_caches.items()}
        cache = PatternCache("producer", turned, CacheLayout.infer(turned, order="NHD", block_size=4, style="kv_first"))
        cache.fill()
        caches = [(turned, cache), *(CacheSize(num_blocks=blocks).make("producer") for blocks in (4, 64))]
        for kv_caches, cache in caches:
            await pair.writer.unregister()
            await pair.writer.register_kv_caches(kv_caches, cache.layout)
            blocks = cache.layout.num_blocks
            assert pair.producer_blocks.total == blocks
            await pair.load(pair.offer([blocks - 1], f"of {blocks}"), [2])
            assert_blocks_equal(pair.consumer.cache, [2], cache, [blocks - 1])
            with pytest.raises(RequestError):
                pair.offer([blocks], "too far")
            await pair.fails(LeaseExpired, before, [0, 1])


@in_virtual_time
async def test_messages_of_before_change_nothing() -> None:
    async with readable_pair(warm=False) as pair:
        before = pair.offer([3]).ticket
        await fall_asleep(pair.producer)
        await wake(pair.producer)
        lease = pair.offer([3])
        reader, lease_id = "consumer", before.first.lease_id
        for message in (
            ReadDone(lease_ids=(lease_id,), reader=reader, numerator=1, denominator=1),
            Renew(lease_ids=(lease_id,), reader=reader),
        ):
            pair.producer.transport.deliver(codec.encode(message))
        await turns(5)
        assert (lease.readers_done, lease.done, pair.serving.late_notifications) == (0, False, 2)
        assert not await pair.reader.release_blocks(before), "there is no such lease any more"
        goodbye = messages.Goodbye(
            target=host_of(pair.reader).context.local.caller,
            sender=host_of(pair.writer).context.local.caller,
            incarnation=before.first.incarnation,
        )
        await pair.load(lease)
        host_of(pair.reader).peers.on_goodbye(goodbye)
        assert [peer.connection is not None for peer in host_of(pair.reader).peers.by_address.values()] == [True]


@in_virtual_time
async def test_leases_kept_and_engines_prewarmed() -> None:
    async with readable_pair() as pair:
        lease = pair.offer([3, 4])
        engine = PeerAddress(engine_id="producer", address=pair.writer.address)
        with pair.reader.keep_leases(lease.ticket):
            await until(lambda: host_of(pair.reader).leases._renewed)
            await fall_asleep(pair.producer)
            assert isinstance((await pair.reader.prewarm([engine]))[0], PeerNotReady)
            await wake(pair.producer)
            (warm,) = await pair.reader.prewarm([engine])
            assert warm is None
            await pair.fails(LeaseExpired, lease)
        await assert_new(pair, "new")


@in_virtual_time
async def test_a_reader_that_sleeps_forgets_its_peers_and_reads_again() -> None:
    async with readable_pair() as pair:
        lease = pair.offer([3, 4])
        with pair.reader.keep_leases(lease.ticket):
            await until(lambda: host_of(pair.reader).leases._renewed)
            await fall_asleep(pair.consumer)
            assert pair.reader.statistics().peers == ()
        await wake(pair.consumer)
        fill(pair.producer, NEW)
        await pair.load(lease, [0, 1])
        assert await lease is LeaseOutcome.READ
        await assert_new(pair, "new")


# --- loads of the engine that sleeps


@in_virtual_time
async def test_it_waits_for_reads_under_way() -> None:
    async with readable_pair(replace(BRIEF, cancel_grace_s=0.01), warm=False) as pair:
        load = pair.reader.start_load(load_request(pair.offer([3])))
        pair.transport.faults.hold = True
        await until(lambda: pair.transport.held)
        unregistering = asyncio.create_task(pair.reader.unregister())
        with pytest.raises(CacheUnregistered, match="was unregistered in phase 'wire'") as caught:
            await load
        assert caught.value.quarantine is load
        assert pair.reader.quarantines == (load,)
        await asyncio.wait([unregistering], timeout=0.1)
        assert not unregistering.done(), "a byte may land"
        pair.transport.perform()
        await unregistering
        assert load.safe
        await load.settled()
        assert pair.reader.quarantines == ()
        await wake(pair.consumer)
        fill(pair.producer, NEW)
        await assert_new(pair, "new")


async def test_reads_that_cannot_be_stopped_break_the_runtime_and_the_memory_stays() -> None:
    """The transport is closed in good order only after they have stopped."""
    cluster = InprocCluster()
    async with contextlib.AsyncExitStack() as stack:
        writer = await stack.enter_async_context(cluster.engine("writer", config=BRIEF))
        kv_caches, cache = CacheSize(layers=1).make("reader")
        reader = Runtime(replace(BRIEF, engine_id="reader", transport="inproc"), world=cluster.world())
        await reader.__aenter__()
        await reader.register_kv_caches(kv_caches, cache.layout)
        lease = writer.runtime.serve_blocks(ServeRequest("req", [3], 4))
        transport = cluster.transport("reader")
        transport.faults.hold = True
        load = reader.start_load(load_request(lease))
        await until(lambda: transport.held)
        with pytest.raises(RuntimeBroken, match=r"not stopped.*: 1 read;"):
            await reader.unregister()
        with pytest.raises(CacheUnregistered):
            await load
        assert (reader.state, load.safe) == (RuntimeState.BROKEN, False)
        for again in (reader.unregister(), reader.register_kv_caches(kv_caches, cache.layout)):
            with pytest.raises(RuntimeBroken, match="could not be unregistered"):
                await again
        transport.perform()
        await reader.aclose()
        assert_closed(reader.statistics())
        lease.revoke()


@in_virtual_time
async def test_a_transport_that_dies_meanwhile_is_not_taken_for_one_that_has_stopped() -> None:
    cluster = InprocCluster()
    async with cluster.engine("writer", config=BRIEF) as writer:
        kv_caches, cache = CacheSize(layers=1).make("reader")
        reader = Runtime(replace(BRIEF, engine_id="reader", transport="inproc"), world=cluster.world())
        await reader.__aenter__()
        await reader.register_kv_caches(kv_caches, cache.layout)
        transport = cluster.transport("reader")
        transport.faults.hold = True
        lease = writer.runtime.serve_blocks(ServeRequest("req", [3], 4))
        load = reader.start_load(load_request(lease))
        await until(lambda: transport.held)
        unregistering = asyncio.create_task(reader.unregister())
        await turns(2)
        transport.die(OSError("scripted"))
        with pytest.raises(RuntimeBroken):
            await unregistering
        with pytest.raises(KVFlowError):
            await load
        assert not load.safe
        transport.held.clear()
        await reader.aclose()
        lease.revoke()


# --- the verbs between


@in_virtual_time
async def test_what_is_refused_while_there_is_no_cache() -> None:
    async with readable_pair() as pair:
        lease = pair.offer([3])
        await pair.reader.unregister()
        request = load_request(lease)
        for call in (
            lambda: pair.reader.load_blocks(request),
            lambda: pair.reader.start_load(request),
            lambda: pair.reader.release_blocks(lease.ticket),
            lambda: pair.reader.prewarm([lease.ticket]),
        ):
            with pytest.raises(CacheUnregistered, match="await register_kv_caches first") as caught:
                await call()
            assert (caught.value.retryable, caught.value.memory_safe) == (True, True)
        with pytest.raises(CacheUnregistered):
            pair.reader.serve_blocks(ServeRequest("req", [3], 4))
        with pytest.raises(CacheUnregistered):
            pair.reader.keep_leases(lease.ticket)
        assert await pair.reader.forget_peer("producer")
        await pair.reader.unregister()  # once more: nothing to do
        await wake(pair.consumer)
        await pair.reader.load_blocks(request)


@in_virtual_time
async def test_in_other_states() -> None:
    cluster = InprocCluster()
    runtime = Runtime(replace(BRIEF, transport="inproc"), world=cluster.world())
    with pytest.raises(UsageError, match="not open yet"):
        await runtime.unregister()
    async with runtime:
        await register(runtime)
        lease = runtime.serve_blocks(ServeRequest("req", [3], 4))
        draining = asyncio.create_task(runtime.drain(60.0))
        await turns(2)
        await runtime.unregister()
        finished = await draining
        assert (finished, await lease) == (True, LeaseOutcome.REVOKED)
        with pytest.raises(RuntimeDraining):
            await register(runtime)
    with pytest.raises(RuntimeClosed):
        await runtime.unregister()
    assert_closed(runtime.statistics())
    broken = await opened(cluster, engine_id="broken")
    await register(broken)
    cluster.transport("broken").die(OSError("scripted"))
    await until(lambda: broken.state is RuntimeState.BROKEN)
    with pytest.raises(RuntimeBroken, match="scripted"):
        await broken.unregister()
    await broken.aclose()


# --- at once, and cancelled


async def opened(cluster: InprocCluster, engine_id: str = "any", staging: str = "auto") -> Runtime:
    config = replace(BRIEF, engine_id=engine_id, transport="inproc", staging=staging)
    return await Runtime(config, world=cluster.world()).__aenter__()


@in_virtual_time
async def test_who_calls_at_once_waits_for_the_same() -> None:
    runtime = await opened(InprocCluster())
    await register(runtime)
    lease = runtime.serve_blocks(ServeRequest("req", [3], 4))
    calls = [asyncio.create_task(runtime.unregister()) for _ in range(3)]
    await turns(1)
    again = asyncio.create_task(register(runtime))  # when that is over
    await turns(3)
    with pytest.raises(UsageError, match="being registered"):
        await runtime.unregister()
    for _ in range(2):
        with pytest.raises(UsageError, match="registered already"):
            await register(runtime)
        await asyncio.gather(*calls, again)
    assert lease.done
    runtime.serve_blocks(ServeRequest("req", [3], 4)).revoke()
    await runtime.aclose()
    assert_closed(runtime.statistics())


Step = Callable[[Runtime], Coroutine[Any, Any, None]]


async def unregister(runtime: Runtime) -> None:
    await runtime.unregister()


async def register(runtime: Runtime) -> None:
    await runtime.register_kv_caches(*small_cache())


async def restarted(runtime: Runtime) -> None:
    await runtime.unregister()
    await runtime.register_kv_caches(*small_cache())


@pytest.mark.parametrize("errand", [False, True])
@pytest.mark.parametrize("step", [unregister, register, restarted])
def test_cancelled_at_every_moment_it_is_carried_out_all_the_same(step: Step, errand: bool) -> None:
    """Also when the task that carries it out is cancelled, as hosts cancel every task when they end."""
    moments = cancel_everywhere(partial(a_life, step, errand))
    print(f"cancelled at {moments} moments")
    assert moments > 1


@contextlib.asynccontextmanager
async def a_life(step: Step, errand: bool) -> AsyncIterator[Coroutine[Any, Any, None]]:
    cluster = InprocCluster()
    runtime = await opened(cluster, staging="always")  # so that registering waits
    if step is not register:
        await runtime.register_kv_caches(*small_cache())
        runtime.serve_blocks(ServeRequest("req", [3], 4))
    yield cancelling_errands(step, runtime) if errand else step(runtime)
    await runtime.unregister()
    assert cluster.network.agents == {} or step is not restarted
    assert runtime.statistics().transport.open_spans == 0
    await runtime.register_kv_caches(*small_cache())
    runtime.serve_blocks(ServeRequest("again", [3], 4)).revoke()
    await runtime.aclose()
    assert_closed(runtime.statistics())
    assert cluster.network.agents == {}


async def cancelling_errands(step: Step, runtime: Runtime) -> None:
    """Where a step is cancelled, so is whoever carries something out for it, in the same moment."""
    task = asyncio.create_task(step(runtime))
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        for other in asyncio.all_tasks():
            if other is task or other.get_name() == "kvflow-unregister":
                other.cancel()
        await asyncio.wait([task])
        raise


@pytest.mark.parametrize("registers", [False, True])
@in_virtual_time
async def test_closing_meanwhile(registers: bool) -> None:
    """At every moment of unregistering, or of registering again."""
    for moment in range(12):
        cluster = InprocCluster()
        runtime = await opened(cluster)
        await register(runtime)
        lease = runtime.serve_blocks(ServeRequest("req", [3], 4))
        if registers:
            await runtime.unregister()
        step = asyncio.create_task(register(runtime) if registers else runtime.unregister())
        await turns(moment)
        await runtime.aclose()
        assert await lease is LeaseOutcome.REVOKED
        await asyncio.wait([step])
        error = step.exception()
        assert error is None or isinstance(error, RuntimeClosed | TransportBroken), error
        assert_closed(runtime.statistics())
        assert cluster.network.agents == {}


async def test_a_runtime_that_is_dropped_in_the_middle_is_closed() -> None:
    runtime = await opened(InprocCluster())
    await runtime.register_kv_caches(*small_cache())
    runtime.serve_blocks(ServeRequest("req", [3], 4))
    supervisor = runtime._supervisor
    unregistering = asyncio.create_task(runtime.unregister())
    await turns(2)
    unregistering.cancel()
    await asyncio.wait([unregistering])
    box = [unregistering, runtime]
    del unregistering, runtime
    with pytest.warns(ResourceWarning, match="dropped without being closed"):
        drop(box)
    await until(lambda: supervisor.state is RuntimeState.CLOSED)
    assert_closed(supervisor.statistics())


def drop(box: list[Any]) -> None:
    """Of a task that was cancelled there is a cycle through its frames."""
    box.clear()
    gc.collect()


# --- a registration that fails


class Refusing(InprocTransport):
    """Registers only the first `after` regions."""

    after = 0

    async def register(self, spans: Sequence[Span], device: Device, keepalive: object, use: MemoryUse) -> None:
        if len(self._keepalive) >= self.after:
            raise TransportError("no more memory can be pinned")
        await super().register(spans, device, keepalive, use)


@pytest.mark.parametrize("after", [0, 1, 2])
@in_virtual_time
async def test_a_third_registration_works_after_a_second_that_failed(after: int) -> None:
    cluster = InprocCluster()
    network, made = InprocNetwork(), list[InprocTransport]()

    def make(_: Config, name: str) -> InprocTransport:
        made.append(Refusing(name, network) if len(made) == 1 else InprocTransport(name, network))
        return made[-1]

    Refusing.after = after
    world = replace(cluster.world(), transport=make)
    async with Runtime(replace(BRIEF, transport="inproc"), world=world) as runtime:
        await runtime.register_kv_caches(*small_cache())
        await runtime.unregister()
        with pytest.raises(ConfigError, match="no more memory"):
            await runtime.register_kv_caches(*small_cache())
        assert network.agents == {}, "what was begun is ended"
        with pytest.raises(CacheUnregistered):
            runtime.serve_blocks(ServeRequest("req", [3], 4))
        with pytest.raises(LayoutError):
            await runtime.register_kv_caches(small_cache(num_blocks=9)[0], small_cache()[1])
        await runtime.register_kv_caches(*small_cache())
        runtime.serve_blocks(ServeRequest("req", [3], 4)).revoke()
        assert len(made) == 3
    assert_closed(runtime.statistics())


# --- over and over


@in_virtual_time
async def test_nothing_is_left_of_fifty_lives_and_all_of_them_are_counted() -> None:
    async with readable_pair(warm=False) as pair:
        pair.transport._network.leaves_memory = False  # it would keep all of it
        threads, tasks, seals = threading.active_count(), len(asyncio.all_tasks()), pair.writer._supervisor.seals
        tensors: list[weakref.ref[torch.Tensor]] = []
        incarnations: set[str] = set()
        for life in range(50):
            lease = pair.offer([3], f"request {life}")
            incarnations.add(lease.ticket.first.incarnation)
            await pair.load(lease)
            await lease
            revoked = pair.offer([3, 4], f"revoked {life}")
            await pair.writer.unregister()
            assert revoked.done
            assert_quiet(pair.writer.statistics())
            kv_caches, cache = CacheSize().make("producer")
            tensors += map(weakref.ref, kv_caches.values())
            await pair.writer.register_kv_caches(kv_caches, cache.layout)
            del kv_caches, cache
        assert len(incarnations) == 50
        served, moved = pair.serving, pair.writer.statistics().transport
        assert (served.read, served.revoked, pair.loading.succeeded) == (50, 50, 50)
        assert moved.notifications_received == pair.reader.statistics().transport.notifications_sent == 50
        assert seals.used == 0
        gc.collect()
        assert sum(ref() is not None for ref in tensors) == 2, "only the last ones are held"
        agents = len(pair.transport._network.agents)
        assert (threading.active_count(), len(asyncio.all_tasks()), agents) == (threads, tasks, 2)
        await pair.writer.unregister()
        gc.collect()
        assert [ref for ref in tensors if ref() is not None] == []
        between = pair.writer.statistics()
        assert (between.blocks, known(between.serving).read, known(between.loading).bytes) == (None, 50, 0)
        assert between.transport.open_spans == between.transport.open_peers == 0


@in_virtual_time
async def test_host_buffers_are_given_back_too() -> None:
    """A lease with blocks that are being copied to the host when its engine unregisters."""
    async with readable_pair(replace(BRIEF, staging="always"), warm=False) as pair:
        for life in range(3):
            copying = pair.offer([1, 2], f"copying {life}")
            await turns(life)
            await pair.writer.unregister()
            assert await copying is LeaseOutcome.REVOKED
            assert_quiet(pair.writer.statistics())
            await wake(pair.producer)
            await assert_new(pair, f"new {life}")
            await pair.fails(LeaseExpired, copying)
