"""Hand-overs between caches on the stand-in: nothing is sealed, and no load reported, before its copies have run.

A test holds the device until everything else has happened. So either the host waits for the device, or a report of
bytes that are not in memory is found.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvflow import CacheGroup, CacheLayout, Lease, LeaseOutcome, LoadRequest, Runtime, ServeRequest
from kvflow.core.cache.state import Segment, StateLayout, StateTensor
from kvflow.errors import (
    ConfigError,
    PrefillFailed,
    RequestError,
    TransferFailed,
)
from kvflow.runtime.load.requests import LoadingStatistics
from kvflow.runtime.world import World
from kvflow.testing import assert_loaded, assert_quiet
from kvflow.transport.device import cache_device
from kvflow.transport.device.accelerator import AcceleratorDevice
from tests.accelerator.sides import (
    BLOCK_SIZE,
    HEAD_SIZE,
    HEADS,
    HERE,
    OURS,
    THEIRS,
    THERE,
    TOKENS,
    TRANSPORTS,
    Engine,
    EngineCopier,
    Side,
    Site,
    assert_right,
    finish,
)
from tests.accelerator.standin import Refused, StandIn
from tests.support.tests_support import PATIENT, turns, until

pytestmark = pytest.mark.usefixtures("no_blocking_calls")

ON_HOST, FAR, NEAR = Side(), Side(device=THERE), Side(device=HERE)
BY_ENGINE = replace(FAR, engine_copies=True)
PAIRS = {
    "device to host": (FAR, ON_HOST),
    "host to device": (ON_HOST, FAR),
    "device to device": (NEAR, FAR),
    "engine to host": (BY_ENGINE, ON_HOST),
    "host to engine": (ON_HOST, BY_ENGINE),
}
LATER = 1 << 20  # copies: all
STAGED = ("inproc", pytest.param("nixl", marks=pytest.mark.nixl))


def known(engine: Engine) -> LoadingStatistics:
    found = engine.runtime.statistics().loading
    assert found is not None
    return found


def is_over(awaited: asyncio.Future[Any] | Lease) -> bool:
    return awaited.done if isinstance(awaited, Lease) else awaited.done()


async def until_host_waits(standin: StandIn, *ended: Any) -> None:
    """Until the host waits for the device; AssertionError if one of these has ended before."""
    await until(lambda: standin.waiting() or any(map(is_over, ended)))
    assert not any(map(is_over, ended)), f"reported while {standin.queued()} operations are queued"


@pytest.mark.parametrize("way", PAIRS)
@pytest.mark.parametrize("transport", STAGED)
async def test_a_staged_load_is_reported_when_its_copies_have_run(standin: StandIn, transport: str, way: str) -> None:
    async with Site(transport) as site:
        producer, consumer = await site.pair(*PAIRS[way])
        with standin.held():
            lease = producer.serve()
            load = asyncio.ensure_future(consumer.load(lease))
            await until_host_waits(standin, load, lease)
        report = await load
        assert_right(producer, consumer)
        assert report.tokens == TOKENS
        assert await lease is LeaseOutcome.READ


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_lease_is_read_once_its_blocks_are_computed(standin: StandIn, transport: str) -> None:
    async with Site(transport) as site:
        producer, consumer = await site.pair(FAR, ON_HOST)
        compute, computed = torch.Stream(THERE), torch.Event(THERE)
        with standin.held():
            with compute:
                for tensor in producer.kv_caches.values():
                    tensor.mul_(3.0)
            computed.record(compute)
            lease = producer.serve(ready=computed)
            load = asyncio.ensure_future(consumer.load(lease))
            await until(lambda: known(consumer).open_loads and known(consumer).peers)
            assert not load.done()
        await load
        assert_right(producer, consumer)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_no_byte_lands_before_the_blocks_last_owner_has_written(standin: StandIn, transport: str) -> None:
    async with Site(transport) as site:
        producer, consumer = await site.pair(ON_HOST, FAR)
        compute, done = torch.Stream(THERE), torch.Event(THERE)
        ids = torch.tensor(OURS).to(THERE)
        with standin.held():
            with compute:
                for tensor in consumer.kv_caches.values():
                    tensor.index_fill_(1, ids, 0.0)
            done.record(compute)
            load = asyncio.ensure_future(consumer.load(producer.serve(), after=done))
            await until(lambda: known(consumer).open_loads)
            assert not load.done()
        await load
        assert_right(producer, consumer)


@pytest.mark.parametrize("way", ["device to host", "engine to host"])
@pytest.mark.parametrize("transport", STAGED)
async def test_a_copy_that_fails_at_the_producer_is_its_leases_error(
    standin: StandIn, transport: str, way: str
) -> None:
    async with Site(transport) as site:
        producer, consumer = await site.pair(*PAIRS[way])
        standin.fail_copies(LATER)
        lease = producer.serve()
        with pytest.raises(PrefillFailed):
            await consumer.load(lease)
        standin.fail_copies(0)
        assert await lease is LeaseOutcome.FAILED
        consumer.seen().assert_untouched()


@pytest.mark.parametrize("way", ["host to device", "host to engine"])
@pytest.mark.parametrize("transport", STAGED)
async def test_a_copy_that_fails_at_the_consumer_is_its_loads_error(standin: StandIn, transport: str, way: str) -> None:
    async with Site(transport) as site:
        producer, consumer = await site.pair(*PAIRS[way])
        standin.fail_copies(LATER)
        lease = producer.serve()
        with pytest.raises(TransferFailed, match="a copy is to fail"):
            await consumer.load(lease)
        standin.fail_copies(0)
        await consumer.load(lease)  # its blocks are free, and nobody was blamed
        assert_right(producer, consumer)


async def test_a_kernel_that_fails_before_the_event_fails_the_lease(standin: StandIn) -> None:
    async with Site("inproc") as site:
        producer, consumer = await site.pair(FAR, ON_HOST)
        there, computed = producer.kv_caches["layers.0"], torch.Event(THERE)
        wrong, values = torch.tensor([99], device=THERE), there[:, :1].clone()
        with standin.held():
            there.index_copy_(1, wrong, values)
            computed.record(torch.accelerator.current_stream(THERE))
            lease = producer.serve(ready=computed)
        with pytest.raises(PrefillFailed):
            await consumer.load(lease)
        assert await lease is LeaseOutcome.FAILED
        consumer.seen().assert_untouched()


@pytest.mark.parametrize("scratch", ["always", "never"])
async def test_the_order_of_heads_changes_on_the_device(standin: StandIn, scratch: str) -> None:
    """Through scratch memory there the bytes are right when the device has permuted them."""
    async with Site("direct") as site:
        settings = {"scratch": scratch}
        producer, consumer = await site.pair(NEAR, replace(FAR, order="NHD", settings=settings))
        with standin.held():
            load = asyncio.ensure_future(consumer.load(producer.serve()))
            if scratch == "always":
                await until_host_waits(standin, load)
        await load
        assert_right(producer, consumer)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS - 3, 1])
async def test_what_lies_behind_the_tokens_stays(standin: StandIn, transport: str, tokens: int) -> None:
    count = -(-tokens // BLOCK_SIZE)
    async with Site(transport) as site:
        producer, consumer = await site.pair(NEAR, FAR)
        await consumer.load(producer.serve(THEIRS[:count], num_tokens=tokens), OURS[:count])
        found = consumer.seen()
        finish()
        assert_loaded(found, OURS[:count], producer.seen(), THEIRS[:count], num_tokens=tokens)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_digests_are_of_what_the_device_holds(standin: StandIn, transport: str) -> None:
    async with Site(transport) as site:
        producer, consumer = await site.pair(NEAR, FAR)
        report = await consumer.load(producer.serve(), verify=True)
        assert report.verified
        assert_right(producer, consumer)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_lease_grows_by_events(standin: StandIn, transport: str) -> None:
    """Blocks are computed one by one; each is read, and right, only when its event has happened."""
    async with Site(transport) as site:
        slices = {"slice_bytes_max": 64 if transport == "mapped" else 1}  # a batch is a turn of a thread, however small
        producer, consumer = await site.pair(NEAR, replace(FAR, limits=slices))
        compute = torch.Stream(HERE)
        lease = producer.serve(computed_tokens=0)
        load = consumer.runtime.start_load(LoadRequest("req", lease.ticket.to_params(), OURS))
        ids = torch.tensor(THEIRS).to(HERE)
        for count in range(1, len(THEIRS) + 1):
            with standin.held():
                event = torch.Event(HERE)
                with compute:
                    for tensor in producer.kv_caches.values():
                        tensor.index_fill_(1, ids[count - 1 : count], float(count))
                    event.record(compute)
                lease.advance(count * BLOCK_SIZE, ready=event)
            await until(event.query)
        report = await load
        assert report.tokens == TOKENS
        assert_right(producer, consumer)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("style", ["kv_first", "blocks_first", "apart", "fused", "mla"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
async def test_every_style_and_dtype(standin: StandIn, transport: str, style: str, dtype: torch.dtype) -> None:
    async with Site(transport) as site:
        producer, consumer = await site.pair(*(replace(side, style=style, dtype=dtype) for side in (NEAR, FAR)))
        await consumer.load(producer.serve(), verify=True)
        assert_right(producer, consumer)


LACKS = [Refused.COMPLEX, Refused.COMPLEX | Refused.INT64, Refused.COMPLEX | Refused.INDEXING, Refused.PINNED]


@pytest.mark.parametrize("lacks", LACKS, ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_device_without_some_kernels(standin: StandIn, transport: str, lacks: Refused) -> None:
    """Rows, chunks and digests go in the cache's own dtype, or as bytes, or block by block."""
    standin.refuse(lacks)
    scratch = {"scratch": "always"}
    async with Site(transport) as site:
        producer, consumer = await site.pair(NEAR, replace(FAR, order="NHD", settings=scratch))
        await consumer.load(producer.serve(), verify=True)
        standin.refuse(Refused.NOTHING)
        assert_right(producer, consumer)


@pytest.mark.parametrize("lacks", [Refused.NOTHING, Refused.INDEXING], ids=str)
async def test_memory_to_gather_in_is_kept(standin: StandIn, lacks: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks at a time, by the same memory."""
    monkeypatch.setattr(cache_device, "_GATHER_BUFFER_BYTES", 2 * BLOCK_SIZE * HEADS * HEAD_SIZE * 4)
    allocated: list[int] = []
    allocate = AcceleratorDevice.allocate

    def noted(device: AcceleratorDevice, size_bytes: int) -> torch.Tensor:
        allocated.append(size_bytes)
        return allocate(device, size_bytes)

    monkeypatch.setattr(AcceleratorDevice, "allocate", noted)
    standin.refuse(lacks)
    async with Site("inproc") as site:
        producer, consumer = await site.pair(NEAR, FAR)
        for _ in range(3):
            lease = producer.serve()
            await consumer.load(lease)
            await lease
        standin.refuse(Refused.NOTHING)
        assert_right(producer, consumer)
    assert allocated == [2 * BLOCK_SIZE * HEADS * HEAD_SIZE * 4] * 2, "at registration, once for each engine"


async def test_a_load_that_is_cancelled_while_the_device_is_held(standin: StandIn) -> None:
    """Its blocks are quarantined, and safe when the device has gone on: nothing lands in them then."""
    async with Site("inproc") as site:
        producer, consumer = await site.pair(ON_HOST, replace(FAR, settings={"cancel_grace_s": 0.01}))
        lease = producer.serve()
        with standin.held():
            load = consumer.runtime.start_load(LoadRequest("req", lease.ticket.to_params(), OURS))
            await until(standin.waiting)
            load.cancel()
            with pytest.raises(asyncio.CancelledError):
                await load
            (quarantined,) = consumer.runtime.quarantines
            with pytest.raises(RequestError, match="quarantined"):
                consumer.serve(OURS)
        await quarantined.settled()
        assert_right(producer, consumer)  # every byte has landed
        await consumer.load(lease)
        assert_right(producer, consumer)


@pytest.mark.parametrize("steps", range(1, 40, 3))
@pytest.mark.parametrize("way", ["device to host", "host to device"])
async def test_a_load_that_is_cancelled_anywhere_leaves_nothing(standin: StandIn, way: str, steps: int) -> None:
    async with Site("inproc") as site:
        producer, consumer = await site.pair(*PAIRS[way])
        lease = producer.serve()
        load = asyncio.ensure_future(consumer.load(lease))
        await turns(steps)
        load.cancel()
        await asyncio.wait([load])
        if load.cancelled():
            await until(lambda: not known(consumer).open_loads)
            assert not consumer.runtime.quarantines
            await lease.revoke()
        else:
            assert_right(producer, consumer)
        await lease
        for engine in (producer, consumer):
            await until(lambda engine=engine: not engine.runtime.statistics().serving.open_leases)
            assert_quiet(engine.runtime.statistics())


async def test_a_lease_that_is_revoked_while_the_device_is_held_keeps_its_blocks(standin: StandIn) -> None:
    """Until the copy that reads them has run."""
    async with Site("inproc") as site:
        producer = await site.engine("producer", FAR)
        with standin.held():
            lease = producer.serve()
            await until(standin.waiting)
            revoked = asyncio.ensure_future(lease.revoke())
            await turns(50)
            assert producer.runtime.statistics().blocks.leased == len(THEIRS)
        await revoked
        assert await lease is LeaseOutcome.REVOKED
        assert producer.runtime.statistics().blocks.leased == 0


async def test_groups_windows_and_state(standin: StandIn) -> None:
    def groups(seed: int) -> list[CacheGroup]:
        generator = torch.Generator().manual_seed(seed)
        full, window = (
            {f"layers.{number}": torch.rand(2, 16, 4, 4, 8, generator=generator).to(THERE)} for number in (0, 1)
        )
        state = {"layers.2": (torch.rand(8, 6, 2, generator=generator).to(THERE),)}
        described = (StateTensor(name="conv", segments=(Segment(name="x", size=6, units=2, model_units=2),)),)
        layouts = [CacheLayout.infer(layers, order="HND", block_size=4) for layers in (full, window)]
        return [
            CacheGroup("full", full, layouts[0]),
            CacheGroup("window", window, layouts[1], window=6),
            CacheGroup("state", state, StateLayout.infer(state, described)),
        ]

    async with Site("inproc") as site:
        caches, runtimes = [groups(1), groups(2)], []
        async with contextlib.AsyncExitStack() as stack:
            for name, cache in zip(("producer", "consumer"), caches, strict=True):
                config = replace(PATIENT, engine_id=name, listen="tcp://127.0.0.1:0", transport="inproc")
                world = World(transport=site.make_transport)
                runtimes.append(await stack.enter_async_context(Runtime(config, world=world)))
                await runtimes[-1].register_kv_caches(cache)
            theirs = {"full": THEIRS, "window": [4, 6], "state": [5]}
            ours = {"full": OURS, "window": [1, 2], "state": [3]}
            with standin.held():
                lease = runtimes[0].serve_blocks(ServeRequest("req", theirs, num_tokens=TOKENS))
                request = LoadRequest("req", lease.ticket.to_params(), ours, verify=True)
                load = asyncio.ensure_future(runtimes[1].load_blocks(request))
                await until_host_waits(standin, load)
            assert (await load).verified
            for mine, other in zip(*caches, strict=True):
                there, here = (next(iter(group.layers.values())) for group in (mine, other))
                if mine.name == "state":
                    assert torch.equal(there[0].cpu()[theirs["state"]], here[0].cpu()[ours["state"]])
                else:
                    assert torch.equal(there.cpu()[:, theirs[mine.name]], here.cpu()[:, ours[mine.name]])


# --- kinds of devices that torch knows otherwise


class Opaque:
    """A tensor of a device that has no addresses, as XLA's are: only the engine's function knows its bytes."""

    def __init__(self, inside: torch.Tensor) -> None:
        self.inside = inside
        self.shape, self.dtype, self.device = inside.shape, inside.dtype, torch.device("xla", 0)

    def stride(self) -> tuple[int, ...]:
        return self.inside.stride()

    def element_size(self) -> int:
        return self.inside.element_size()


@pytest.mark.parametrize("transport", STAGED)
async def test_tensors_without_addresses_are_copied_by_the_engine(standin: StandIn, transport: str) -> None:
    async with Site(transport) as site:
        producer = await site.engine("producer", FAR)
        inside, layout = ON_HOST.make("consumer")
        config = replace(PATIENT, engine_id="consumer", listen="tcp://127.0.0.1:0", transport="inproc")
        async with Runtime(config, world=World(transport=site.make_transport)) as runtime:
            outside: Any = {name: Opaque(tensor) for name, tensor in inside.items()}
            assert CacheLayout.infer(outside, order="HND", block_size=BLOCK_SIZE, style="kv_first") == layout
            await runtime.register_kv_caches(outside, layout, copy_blocks=EngineCopier(inside, "kv_first"))
            consumer = Engine(engine_id="consumer", runtime=runtime, kv_caches=inside, layout=layout, device="cpu")
            await consumer.load(producer.serve())
            assert_right(producer, consumer)


class Unaddressed(torch.Tensor):
    """A tensor of a device with streams that does not say where it lies."""

    def data_ptr(self) -> int:
        return 0


@pytest.mark.parametrize("way", ["producer", "consumer"])
async def test_a_device_with_streams_needs_no_addresses(standin: StandIn, way: str) -> None:
    async with Site("inproc") as site:
        plain = await site.engine("consumer" if way == "producer" else "producer", ON_HOST)
        host, layout = FAR.make(way)
        kv_caches: Any = {name: tensor.to(THERE).as_subclass(Unaddressed) for name, tensor in host.items()}
        config = replace(PATIENT, engine_id=way, listen="tcp://127.0.0.1:0", transport="inproc")
        async with Runtime(config, world=World(transport=site.make_transport)) as runtime:
            await runtime.register_kv_caches(kv_caches, layout)
            inside = {name: tensor.as_subclass(torch.Tensor) for name, tensor in kv_caches.items()}
            other = Engine(engine_id=way, runtime=runtime, kv_caches=inside, layout=layout, device=THERE)
            producer, consumer = (other, plain) if way == "producer" else (plain, other)
            await consumer.load(producer.serve())
            assert_right(producer, consumer)


async def test_a_kind_without_streams_is_refused_without_a_function_of_the_engines(standin: StandIn) -> None:
    inside, layout = ON_HOST.make("any")
    outside: Any = {name: Opaque(tensor) for name, tensor in inside.items()}
    config = replace(PATIENT, engine_id="any", listen="tcp://127.0.0.1:0", transport="inproc")
    async with Runtime(config) as runtime:
        with pytest.raises(
            ConfigError, match=r"a cache on xla:0: .* no streams and events for 'xla'.* Pass copy_blocks"
        ):
            await runtime.register_kv_caches(outside, layout)
    async with Runtime(replace(config, staging="never")) as runtime:
        with pytest.raises(ConfigError, match="staging: 'never', but the transport cannot reach a cache on 'xla'"):
            await runtime.register_kv_caches(outside, layout, copy_blocks=lambda *_: None)
