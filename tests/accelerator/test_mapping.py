"""Device memory that is mapped: its order with seals, its lifetime, and what happens where it cannot be mapped.

A batch of the stand-in is late: nothing of it is copied while the device is held, nor before its event is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvflow import LeaseOutcome, LoadRequest
from kvflow.config import Config
from kvflow.core.cache.regions import HOST, Device, Span
from kvflow.core.plan.descriptors import Descriptors
from kvflow.errors import LeaseExpired, TransferFailed
from kvflow.limits import Limits
from kvflow.testing import assert_quiet
from kvflow.transport.base import AgentName, Event, MemoryUse, PeerGone, PostedRead, ReadEnded, TransportError
from kvflow.transport.device.cuda import DriverError
from kvflow.transport.device.mapper import Addresses
from kvflow.transport.mapped import shared_memory
from kvflow.transport.mapped.shared_memory import decode, encode, own_process
from kvflow.transport.nixl.loop import NixlTransport
from tests.accelerator.mapping import StandInMapper, mapping
from tests.accelerator.sides import HERE, LAYERS, OURS, THERE, TOKENS, Engine, Side, Site, assert_right, finish
from tests.accelerator.standin import StandIn
from tests.support.tests_support import WAIT_S, turns, until

pytestmark = [pytest.mark.nixl, pytest.mark.usefixtures("standin")]

SIZE = 1 << 12
BOTH = MemoryUse.SERVED | MemoryUse.READ_INTO


# --- one transport beside another


@dataclass(frozen=True, slots=True, eq=False)
class Rank:
    """A transport with memory on a device and in the host's memory."""

    transport: Any
    memory: torch.Tensor
    host: np.ndarray
    ended: list[ReadEnded]

    def metadata(self) -> Any:
        return asyncio.gather(self.transport.metadata(), self.transport.device_memory())

    def read(self, peer: AgentName, writer: Rank, *, from_host: bool = False, size: int = 64) -> PostedRead:
        """Post a read of the first bytes of the writer's memory."""
        if from_host:
            local, remote, devices = self.host.ctypes.data, writer.host.ctypes.data, (HOST, HOST)
        else:
            local, remote = self.memory.data_ptr(), writer.memory.data_ptr()
            devices = (device_of(self.memory), device_of(writer.memory))
        descriptors = Descriptors.of(
            local=[local], remote=[remote], sizes=[size], local_device=devices[0], remote_device=devices[1]
        )
        read: PostedRead = self.transport.post_read(peer, descriptors)
        return read

    async def steps(self, count: int = 30) -> None:
        """Have the agents' thread do what it can."""
        thread, _ = self.transport._require_open()
        for _ in range(count):
            await thread.call(lambda: None)


def device_of(tensor: torch.Tensor) -> Device:
    return Device(tensor.device.type, tensor.device.index or 0)


@contextlib.asynccontextmanager
async def rank(name: str, where: str, value: int, *, maps: bool = True) -> AsyncIterator[Rank]:
    limits = Limits(notification_poll_interval_s=0.001)
    transport = NixlTransport(Config(engine_id="any", cuda_ipc=maps, limits=limits), name)
    memory, host = torch.full((SIZE,), value, dtype=torch.uint8, device=where), np.full(SIZE, value, dtype=np.uint8)
    finish()
    await transport.open()
    for address, device, owner in ((memory.data_ptr(), device_of(memory), memory), (host.ctypes.data, HOST, host)):
        await transport.register([Span(address=int(address), size_bytes=SIZE)], device, owner, BOTH)
    ended: list[ReadEnded] = []

    def deliver(event: Event) -> None:
        assert isinstance(event, ReadEnded)
        ended.append(event)

    running = asyncio.create_task(transport.run(deliver))
    try:
        yield Rank(transport, memory, host, ended)
        await transport.aclose(WAIT_S)
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert transport.statistics.mapped_peers == 0


@contextlib.asynccontextmanager
async def ranks(**mapped: Any) -> AsyncIterator[tuple[Rank, Rank, AgentName]]:
    """A reader, a writer, and the writer's name at the reader."""
    with mapping(**mapped):
        async with rank("writer", HERE, 7) as writer, rank("reader", THERE, 1) as reader:
            yield reader, writer, await reader.transport.add_peer(*await writer.metadata())


def bytes_of(tensor: torch.Tensor, count: int = 64) -> list[int]:
    """What a kernel sees that is launched now, on a stream of its own."""
    with torch.Stream(tensor.device):
        found: list[int] = tensor[:count].cpu().unique().tolist()
    return found


async def test_host_memory_is_read_once_the_batches_before_have_ended(standin: StandIn) -> None:
    """Else a seal would vouch for bytes that are still to be read."""
    async with ranks() as (reader, writer, peer):
        with standin.held():
            reads = [reader.read(peer, writer), reader.read(peer, writer), reader.read(peer, writer, from_host=True)]
            await reader.steps()
            assert (reader.ended, reader.transport.statistics.open_reads) == ([], 3)
            writer.host[:] = 9
        await until(lambda: len(reader.ended) == 3)
        assert [event.read for event in reader.ended] == reads
        assert [event.error for event in reader.ended] == [None] * 3
        assert (bytes_of(reader.memory), set(reader.host[:64])) == ([7], {9})


async def test_host_memory_of_other_peers_is_read_at_once(standin: StandIn) -> None:
    async with ranks() as (reader, writer, peer), rank("other", HERE, 5) as other:
        another = await reader.transport.add_peer(*await other.metadata())
        assert reader.transport.statistics.mapped_peers == 2
        with standin.held():
            late, early = reader.read(peer, writer), reader.read(another, other, from_host=True)
            await until(lambda: reader.ended)
            assert [event.read for event in reader.ended] == [early]
        await until(lambda: len(reader.ended) == 2)
        assert reader.ended[1].read is late


async def test_memory_is_mapped_as_long_as_the_peer_is_added(standin: StandIn) -> None:
    async with ranks() as (reader, writer, peer):
        assert standin.mapped() == 1
        await reader.transport.remove_peer(peer)
        assert standin.mapped() == 0
        assert await reader.transport.add_peer(*await writer.metadata()) == peer
        assert standin.mapped() == 1
    assert standin.mapped() == 0, "closing unmaps"


async def test_nixl_knows_nothing_of_memory_that_is_mapped(standin: StandIn) -> None:
    """It would map the memory itself, and keep it until the process ends."""
    async with ranks() as (reader, writer, peer):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(reader.transport, "_readers", reader.transport._agents)
            reader.read(peer, writer)
            await until(lambda: reader.ended)
        assert isinstance(reader.ended[0].error, TransportError)


async def test_a_batch_that_fails_is_the_reads_error(standin: StandIn) -> None:
    async with ranks() as (reader, writer, peer):
        standin.fail_copies(1)
        reader.read(peer, writer)
        await until(lambda: reader.ended)
        assert "a copy is to fail" in str(reader.ended[0].error)
        assert bytes_of(reader.memory) == [1]
        reader.read(peer, writer)
        await until(lambda: len(reader.ended) == 2)
        assert (reader.ended[1].error, bytes_of(reader.memory)) == (None, [7])


async def test_a_batch_that_is_refused_ends_when_what_was_queued_of_it_has(
    standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = StandInMapper.copy

    def refuse(mapper: StandInMapper, *tables: Addresses) -> None:
        queue(mapper, *tables)
        raise DriverError("the rest is refused")

    monkeypatch.setattr(StandInMapper, "copy", refuse)
    async with ranks() as (reader, writer, peer):
        with standin.held():
            reader.read(peer, writer)
            await reader.steps()
            assert reader.ended == []
        await until(lambda: reader.ended)
        assert "the rest is refused" in str(reader.ended[0].error)


async def test_a_device_that_refuses_ends_reads_in_their_order(
    standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise DriverError("no batches")

    async with ranks() as (reader, writer, peer):
        with standin.held():
            first = reader.read(peer, writer)
            await reader.steps()
            monkeypatch.setattr(StandInMapper, "copy", refuse)
            second = reader.read(peer, writer)
            await reader.steps()
            assert reader.ended == []
        await until(lambda: len(reader.ended) == 2)
        assert [one.read for one in reader.ended] == [first, second]
        assert (reader.ended[0].error, "no batches" in str(reader.ended[1].error)) == (None, True)


async def test_copies_without_an_event_are_waited_for(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> int:
        raise DriverError("no event")

    monkeypatch.setattr(StandInMapper, "record", refuse)
    async with ranks() as (reader, writer, peer):
        with standin.held():
            reader.read(peer, writer)
            await until(standin.waiting)
            assert reader.ended == []
        await until(lambda: reader.ended)
        assert ("no event" in str(reader.ended[0].error), bytes_of(reader.memory)) == (True, [7])


async def test_a_process_that_has_ended_is_an_error_and_never_a_byte(
    standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory stays mapped, as a device's does."""
    async with ranks() as (reader, writer, peer):
        with standin.held():
            reader.read(peer, writer)
            await reader.steps()
            monkeypatch.setattr(shared_memory.WatchedProcess, "has_ended", True)
        await until(lambda: reader.ended)
        assert isinstance(reader.ended[0].error, PeerGone)
        reader.memory.zero_()
        finish()
        reader.read(peer, writer)
        await until(lambda: len(reader.ended) == 2)
        assert isinstance(reader.ended[1].error, PeerGone)
        assert bytes_of(reader.memory) == [0]


# --- what is refused


def changed(blob: bytes, **values: Any) -> bytes:
    return encode(msgspec.structs.replace(decode(blob), **values))


def elsewhere(**values: Any) -> Callable[[bytes], bytes]:
    return lambda blob: changed(blob, process=msgspec.structs.replace(own_process(), **values))


def larger(blob: bytes) -> bytes:
    (one,) = decode(blob).allocations
    return changed(blob, allocations=(msgspec.structs.replace(one, size_bytes=one.size_bytes + 1),))


def outside(blob: bytes) -> bytes:
    (one,) = decode(blob).ranges
    return changed(blob, ranges=(msgspec.structs.replace(one, address=one.address + SIZE),))


def closed(blob: bytes) -> bytes:
    """A handle of a file that is not open."""
    (one,) = decode(blob).allocations
    handle = np.frombuffer(one.handle, dtype=np.int64).copy()
    handle[1] = 1 << 20
    return changed(blob, allocations=(msgspec.structs.replace(one, handle=handle.tobytes()),))


REFUSED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "nothing": (lambda _: b"", ""),
    "another machine": (elsewhere(machine="another"), ""),
    "another container": (elsewhere(namespace="pid:[1]"), "another container: process namespace pid:[1], ours pid"),
    "a process that is over": (elsewhere(started=1), "has ended"),
    "no process": (elsewhere(pid=(1 << 31) - 1), "cannot be watched"),
    "no number of a process": (elsewhere(pid=1 << 31), "does not decode"),
    "another kind of device": (lambda blob: changed(blob, kind="cuda"), "kind of device: ours standin, theirs cuda"),
    "no message": (lambda _: b"\xc1", "does not decode"),
    "part of a message": (lambda blob: blob[:-1], "does not decode"),
    "an allocation that is smaller": (larger, f"the peer says {SIZE + 1}, opened {SIZE}"),
    "a range outside of it": (outside, "is in none of the peer's allocations"),
    "a handle of nothing": (closed, "the process of the memory has ended"),
}
"""Changes of what a peer says about its device memory, and the reason in the log; "" if nothing is logged."""


@pytest.mark.parametrize("change", REFUSED)
async def test_memory_that_cannot_be_mapped_is_read_by_nixl(
    standin: StandIn, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    alter, reason = REFUSED[change]
    with mapping(), caplog.at_level(logging.INFO, "kvflow"):
        async with rank("writer", HERE, 7) as writer, rank("reader", THERE, 1) as reader:
            metadata, blob = await writer.metadata()
            peer = await reader.transport.add_peer(metadata, alter(blob))
            assert (reader.transport.statistics.mapped_peers, standin.mapped()) == (0, 0)
            reader.read(peer, writer)
            await until(lambda: reader.ended)
            assert (reader.ended[0].error, bytes_of(reader.memory)) == (None, [7])
    told = [record.getMessage() for record in caplog.records if "is not mapped" in record.getMessage()]
    assert len(told) == bool(reason)
    assert reason in reader.transport.statistics.mapping_problem
    assert reason in "".join(told)


async def test_a_device_without_mapping_is_said_once_and_read_by_nixl(
    standin: StandIn, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Any:
        raise DriverError("it has no handles")

    monkeypatch.setattr(StandInMapper, "export", refuse)
    with caplog.at_level(logging.INFO, "kvflow"):
        async with ranks() as (reader, writer, peer):
            assert reader.transport.statistics.mapped_peers == 0
            reader.read(peer, writer)
            await until(lambda: reader.ended)
            assert (reader.ended[0].error, bytes_of(reader.memory)) == (None, [7])
    (told,) = {record.getMessage() for record in caplog.records if "writer" in record.getMessage()}
    assert told.endswith("peers cannot map its device memory, NIXL reads it: it has no handles")


async def test_either_side_may_not_map(standin: StandIn) -> None:
    for maps in ((True, False), (False, True)):
        with mapping():
            async with (
                rank("writer", HERE, 7, maps=maps[0]) as writer,
                rank("reader", THERE, 1, maps=maps[1]) as reader,
            ):
                peer = await reader.transport.add_peer(*await writer.metadata())
                reader.read(peer, writer)
                await until(lambda ended=reader.ended: ended)
                assert (reader.ended[0].error, bytes_of(reader.memory)) == (None, [7])
                assert reader.transport.statistics.mapped_peers == 0


# --- engines


NEAR, FAR = Side(device=HERE), Side(device=THERE)


@contextlib.asynccontextmanager
async def engines(producer: Side = NEAR, consumer: Side = FAR) -> AsyncIterator[tuple[Engine, Engine]]:
    async with Site("mapped") as site:
        yield await site.pair(producer, consumer)


def mapped_peers(engine: Engine) -> int:
    return engine.runtime.statistics().transport.mapped_peers


async def under_way(engine: Engine) -> None:
    """Until a read of the engine has been posted."""
    await until(lambda: engine.runtime.statistics().transport.open_reads)


async def test_a_load_is_reported_when_its_batch_has_run(standin: StandIn) -> None:
    async with engines() as (producer, consumer):
        with standin.held():
            lease = producer.serve()
            load = asyncio.ensure_future(consumer.load(lease))
            await under_way(consumer)
            assert not load.done()
        report = await load
        assert_right(producer, consumer)
        assert (report.tokens, report.freshness, mapped_peers(consumer)) == (TOKENS, "seal", 1)
        assert await lease is LeaseOutcome.READ


async def test_a_lease_that_ends_before_the_batch_has_run_is_no_success(standin: StandIn) -> None:
    """The seal is read after the event: then it is wiped."""
    async with engines() as (producer, consumer):
        lease = producer.serve()
        with standin.held():
            load = asyncio.ensure_future(consumer.load(lease))
            await under_way(consumer)
            lease.revoke()
            assert await lease is LeaseOutcome.REVOKED
        with pytest.raises(LeaseExpired):
            await load


async def test_a_cancelled_load_ends_when_its_event_has(standin: StandIn) -> None:
    side = replace(FAR, settings={"cancel_grace_s": 0.01})
    async with engines(consumer=side) as (producer, consumer):
        lease = producer.serve()
        with standin.held():
            request = LoadRequest("req", lease.ticket.to_params(), OURS)
            load = consumer.runtime.start_load(request)
            await under_way(consumer)
            load.cancel()
            await asyncio.wait([asyncio.ensure_future(_outcome(load))])
            settled = asyncio.ensure_future(load.settled())
            assert len(consumer.runtime.quarantines) == 1
            assert not settled.done()
        await settled
        assert consumer.runtime.quarantines == ()
        lease.revoke()


@pytest.mark.parametrize("steps", range(1, 60, 7))
async def test_a_load_that_is_cancelled_anywhere_leaves_nothing(standin: StandIn, steps: int) -> None:
    async with engines() as (producer, consumer):
        await consumer.load(first := producer.serve())
        await first
        lease = producer.serve()
        load = asyncio.ensure_future(consumer.load(lease))
        await turns(steps)
        load.cancel()
        await asyncio.wait([load])
        if load.cancelled():
            await until(lambda: not consumer.runtime.statistics().transport.open_reads)
            lease.revoke()
        await lease
        for engine in (producer, consumer):
            await until(lambda engine=engine: not engine.runtime.statistics().serving.open_leases)
            assert_quiet(engine.runtime.statistics())


async def _outcome(load: Any) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await load


async def test_a_forgotten_peers_memory_is_free(standin: StandIn) -> None:
    async with engines() as (producer, consumer):
        lease = producer.serve()
        await consumer.load(lease)
        await lease
        assert standin.mapped() == LAYERS
        assert await consumer.runtime.forget_peer("producer")
        assert (standin.mapped(), mapped_peers(consumer)) == (0, 0)
        await consumer.load(producer.serve())
        assert standin.mapped() == LAYERS


async def test_unregistering_waits_until_readers_have_unmapped(standin: StandIn) -> None:
    async with engines() as (producer, consumer):
        lease = producer.serve()
        with standin.held():
            load = asyncio.ensure_future(consumer.load(lease))
            await under_way(consumer)
            leaving = asyncio.ensure_future(producer.runtime.unregister())
            assert await lease is LeaseOutcome.REVOKED
            for _ in range(1000):
                await asyncio.sleep(0)
            assert (leaving.done(), standin.mapped()) == (False, LAYERS)
        await leaving
        assert standin.mapped() == 0
        with pytest.raises((LeaseExpired, TransferFailed)):
            await load


async def test_a_reader_that_does_not_let_go_holds_unregistering_up_for_a_bound(standin: StandIn) -> None:
    producing = replace(NEAR, limits={"goodbye_timeout_s": 0.05})
    async with engines(producing) as (producer, consumer):
        with standin.held():
            load = asyncio.ensure_future(consumer.load(producer.serve()))
            await under_way(consumer)
            await producer.runtime.unregister()
            assert not load.done()
        with pytest.raises((LeaseExpired, TransferFailed)):
            await load


@pytest.mark.parametrize("maps", [(True, False), (False, True)], ids=["producer", "consumer"])
async def test_engines_with_and_without_the_setting_work_together(standin: StandIn, maps: tuple[bool, bool]) -> None:
    sides = [replace(side, settings={"cuda_ipc": does}) for side, does in zip((NEAR, FAR), maps, strict=True)]
    async with engines(*sides) as (producer, consumer):
        await consumer.load(producer.serve())
        assert_right(producer, consumer)
        assert mapped_peers(consumer) == 0


async def test_a_producer_on_the_host_and_a_reader_on_a_device(standin: StandIn) -> None:
    async with engines(Side(), FAR) as (producer, consumer):
        await consumer.load(producer.serve())
        assert_right(producer, consumer)


async def test_a_reader_on_the_host(standin: StandIn) -> None:
    async with engines(NEAR, Side()) as (producer, consumer):
        await consumer.load(producer.serve())
        assert_right(producer, consumer)
        assert mapped_peers(consumer) == 0
