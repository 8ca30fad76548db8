"""Memory is given back: nothing that outlives a registration keeps the tensors of its cache alive.

An engine that sleeps unregisters its cache, and drops it. What it keeps of kvflow then must not have the cache's
memory: handles, errors with their tracebacks, reports, parts, the runtime itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from tests_support import PATIENT, WAIT_S, Records, limited, lose_errors, until

from kvflow import Config, Lease, LoadRequest, Runtime, ServeRequest, Ticket, blocking
from kvflow.errors import KVFlowError
from kvflow.prefix import Prefixes, PrefixRequest, prefix_keys
from kvflow.prefix.testing import FakePrefixCache
from kvflow.runtime.load.load import Load
from kvflow.runtime.world import World
from kvflow.stock import StockPeers
from kvflow.storage import RestoreRequest, SaveRequest, Storage
from kvflow.testing import CacheSize, block_by_block
from kvflow.transport.base import TransportError
from kvflow.transport.inproc import InprocNetwork, InprocTransport

BRIEF = limited(replace(PATIENT, cancel_grace_s=0.05, drain_timeout_s=0.05), seal_hold_s=0.01)
SIZE = CacheSize(num_blocks=16)
PROMPT = list(range(16))
Memory: TypeAlias = list[weakref.ref[Any]]


@dataclass(frozen=True)
class Scene:
    """A producer and a consumer with caches that only their runtimes reference."""

    producer: Runtime
    consumer: Runtime
    sharing: Prefixes
    """The producer's."""
    prefixes: Prefixes
    """The consumer's."""
    storage: Storage
    transports: list[InprocTransport]
    records: Records
    memory: Memory

    @property
    def transport(self) -> InprocTransport:
        return self.transports[1]

    def offer(self, request_id: str = "req", **options: Any) -> Lease:
        return self.producer.serve_blocks(ServeRequest(request_id, [3, 4], num_tokens=8, **options))

    def gone(self, request_id: str = "gone") -> Ticket:
        """A ticket of a lease that has ended."""
        lease = self.offer(request_id)
        lease.revoke()
        return lease.ticket

    def start(self, ticket: Any, request_id: str = "req", **options: Any) -> Load:
        return self.consumer.start_load(LoadRequest(request_id, ticket, [0, 1], **options))

    def load(self, ticket: Any, **options: Any) -> Coroutine[Any, Any, object]:
        return self.consumer.load_blocks(LoadRequest("req", ticket, [0, 1], **options))

    async def held(self) -> Load:
        """Return a load with held reads."""
        self.transport.faults.hold = True
        load = self.start(self.offer().ticket)
        await until(lambda: self.transport.held)
        return load


Scenario: TypeAlias = Callable[[Scene], Coroutine[Any, Any, object]]
"""Returns what an engine may keep."""
SCENARIOS: list[Scenario] = []


def keeps(scenario: Scenario) -> Scenario:
    SCENARIOS.append(scenario)
    return scenario


async def error_of(work: Awaitable[object]) -> BaseException:
    """The error of `work`, with its traceback."""
    try:
        await work
    except (KVFlowError, asyncio.CancelledError) as error:
        return error
    raise AssertionError("it must fail")


async def register(runtime: Runtime) -> Memory:
    """Register a cache without other references to it. Return its tensors, and those of its host buffers."""
    kv_caches, cache = SIZE.make(runtime.config.engine_id)
    await runtime.register_kv_caches(kv_caches, cache.layout)
    layers = [layers for one in runtime._supervisor.require_host().memory.staging for layers, _ in one.layers]
    return [weakref.ref(tensor) for tensors in (kv_caches, *layers) for tensor in tensors.values()]


@contextlib.asynccontextmanager
async def opened(folder: Path, config: Config) -> AsyncIterator[Scene]:
    network, transports, records = InprocNetwork(), list[InprocTransport](), Records()

    def make(_: Config, name: str) -> InprocTransport:
        transports.append(InprocTransport(name, network))
        return transports[-1]

    world = World(transport=make, logs_observer_errors=False)
    plain = block_by_block(replace(config, transport="inproc", listen="tcp://127.0.0.1:0"))
    sharing, prefixes, storage = Prefixes(), Prefixes(), Storage(folder)
    producer = Runtime(plain, observers=[records], world=world, parts=[sharing, StockPeers(hashes=("0" * 64,))])
    consumer = Runtime(replace(plain, engine_id="other"), observers=[records], world=world, parts=[prefixes, storage])
    async with producer, consumer:
        memory = [*await register(producer), *await register(consumer)]
        yield Scene(producer, consumer, sharing, prefixes, storage, transports, records, memory)


# --- leases and loads


@keeps
async def a_lease_and_a_load_of_it(one: Scene) -> object:
    lease = one.offer()
    load = one.start(lease.ticket)
    return lease, load, await load, await lease


@keeps
async def a_lease_that_is_open(one: Scene) -> object:
    return one.offer()


@keeps
async def a_lease_that_grows_and_its_load(one: Scene) -> object:
    lease = one.offer(computed_tokens=4)
    load = one.start(lease.ticket)
    return lease, load, await load.progressed(0)


@keeps
async def a_lease_that_grew_and_its_load(one: Scene) -> object:
    lease = one.offer(computed_tokens=4, payload=True)
    load = one.start(lease.ticket)
    await load.progressed(0)
    lease.complete(b"token")
    return lease, load, await load


@keeps
async def a_lease_that_failed_and_its_load(one: Scene) -> object:
    lease = one.offer(computed_tokens=4)
    load = one.start(lease.ticket)
    await load.progressed(0)
    return lease.fail("out of memory"), load, await error_of(load)


@keeps
async def leases_that_are_kept(one: Scene) -> object:
    kept = contextlib.ExitStack()
    kept.enter_context(one.consumer.keep_leases(one.offer().ticket))
    return kept


@keeps
async def a_load_that_was_refused(one: Scene) -> object:
    load = one.consumer.start_load(LoadRequest("req", one.offer().ticket, [99]))
    return load, await error_of(load)


@keeps
async def a_load_that_failed(one: Scene) -> object:
    load = one.start(one.gone())
    return load, await error_of(load)


@keeps
async def a_load_that_nobody_awaited(one: Scene) -> object:
    load = one.start(one.gone())
    await until(lambda: load.done)
    return load


@keeps
async def a_load_whose_read_failed(one: Scene) -> object:
    one.transport.faults.fail_next.append(TransportError("cut"))
    load = one.start(one.offer().ticket)
    return load, await error_of(load)


@keeps
async def a_load_that_was_cancelled(one: Scene) -> object:
    load = await one.held()
    load.cancel()
    one.transport.perform()
    return load, await error_of(load)


@keeps
async def a_load_that_was_late(one: Scene) -> object:
    one.transport.faults.hold = True
    load = one.start(one.offer().ticket, deadline_s=0.05)
    error, quarantines = await error_of(load), one.consumer.quarantines
    one.transport.perform()
    return load, error, quarantines, await load.settled()


@keeps
async def a_load_that_the_end_of_its_cache_ends(one: Scene) -> object:
    load = await one.held()
    asyncio.get_running_loop().call_later(0.1, one.transport.perform)
    return load


@keeps
async def a_load_that_waits_for_an_offer(one: Scene) -> object:
    load = one.start(Ticket.rendezvous(one.producer.introduce(), "later"), "later")
    await until(lambda: load.phase != "queued")
    return load


@keeps
async def a_load_that_was_declined(one: Scene) -> object:
    ticket = Ticket.rendezvous(one.producer.introduce(), "later")
    one.producer.decline("later", "no room")
    load = one.start(ticket, "later")
    return load, await error_of(load)


@keeps
async def loads_of_several_tickets(one: Scene) -> object:
    gone, lease = one.gone(), one.offer()
    load = one.start([gone, lease.ticket])
    await load
    return load, await error_of(one.load([gone, gone]))


@keeps
async def loads_that_are_verified(one: Scene) -> object:
    load = one.start(one.offer().ticket, verify=True)
    return load, await load, await error_of(one.load(one.gone(), verify=True))


@keeps
async def errors_of_loads(one: Scene) -> object:
    return await error_of(one.load(one.gone())), await error_of(one.load({"remote_port": "none"}))


# --- parts


@keeps
async def a_prefix_that_is_shared(one: Scene) -> object:
    shared = FakePrefixCache(4)
    shared.put(PROMPT, [3, 4, 5, 6])
    request = PrefixRequest("req", prefix_keys(PROMPT, 4), 4, range(4), [one.producer.address], answer_within_s=WAIT_S)
    sharing = one.sharing.share(shared)
    report, offers = await one.prefixes.pull(request), await one.prefixes.seek(request)
    assert report.num_tokens == 16
    return sharing, report, offers, await error_of(one.prefixes.pull(replace(request, block_ids=[99] * 4)))


@keeps
async def a_prefix_cache_that_nobody_else_has(one: Scene) -> object:
    shared = FakePrefixCache(4)
    one.memory.append(weakref.ref(shared))
    one.sharing.share(shared)
    return one.sharing


@keeps
async def blocks_that_are_stored(one: Scene) -> object:
    saved = await one.storage.save(SaveRequest("save", "key", [3, 4], 8))
    restored = await one.storage.restore(RestoreRequest("restore", "key", [5, 6], 8))
    missing = await error_of(one.storage.restore(RestoreRequest("restore", "other", [5, 6], 8)))
    return saved, restored, missing, await error_of(one.storage.save(SaveRequest("save", "key", [99], 4)))


@pytest.mark.parametrize("staging", ["never", "always"])
@pytest.mark.parametrize("verb", ["unregister", "aclose"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda made: made.__name__)
async def test_no_public_object_keeps_a_cache(scenario: Scenario, verb: str, staging: Any, tmp_path: Path) -> None:
    lose_errors()
    async with opened(tmp_path, replace(BRIEF, staging=staging)) as one:
        kept = await scenario(one)
        for runtime in (one.consumer, one.producer):
            await getattr(runtime, verb)()
        gc.collect()
        assert not [ref for ref in one.memory if ref() is not None], f"kept by the runtimes, parts or {kept}"
        assert one.prefixes.statistics == one.consumer.statistics().parts["prefix"]
        assert one.storage.statistics == one.consumer.statistics().parts["storage"]
        if verb == "unregister":
            assert await register(one.consumer), "another cache"


@pytest.mark.parametrize("verb", ["unregister", "close"])
def test_no_handle_of_a_blocking_runtime_keeps_a_cache(verb: str) -> None:
    network, config = InprocNetwork(), replace(BRIEF, transport="inproc", listen="tcp://127.0.0.1:0")
    world = World(transport=lambda _, name: InprocTransport(name, network))
    kv_caches, cache = SIZE.make("any")
    tensors = [weakref.ref(tensor) for tensor in kv_caches.values()]
    with blocking.Runtime(config, world=world) as runtime:
        runtime.register_kv_caches(kv_caches, cache.layout)
        del kv_caches, cache
        gone = runtime.serve_blocks(ServeRequest("gone", [3], 4)).revoke()
        open_lease = runtime.serve_blocks(ServeRequest("req", [3], 4))
        load = runtime.start_load(LoadRequest("gone", gone.ticket, [0]))
        with pytest.raises(KVFlowError) as caught:
            load.result(WAIT_S)
        getattr(runtime, verb)()
        gc.collect()
        assert not [ref for ref in tensors if ref() is not None], f"kept by {gone, open_lease, load, caught}"
