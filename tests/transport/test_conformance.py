"""The promises of every transport (`kvflow.transport.base.Transport`), checked on the in-process and the real one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tests_support import WAIT_S

from kvflow.config import Config
from kvflow.core.cache.regions import Device, Span, UInt64Array
from kvflow.core.plan.descriptors import Descriptors
from kvflow.errors import ConfigError, TransportBroken
from kvflow.limits import Limits
from kvflow.transport.base import AgentName, CaughtUp, Event, MemoryUse, Notified, ReadEnded, Transport, TransportError
from kvflow.transport.inproc import InprocNetwork, InprocTransport
from kvflow.transport.nixl.loop import NixlTransport
from tests.accelerator.mapping import mapping
from tests.accelerator.standin import KIND, NotBuilt, load

CPU = Device("cpu", 0)
ON_STANDIN = Device(KIND, 1)
BOTH = MemoryUse.SERVED | MemoryUse.READ_INTO
SIZE = 1 << 20


@dataclass(frozen=True)
class Maker:
    """Makes transports that can reach each other, and memory for them to read and write."""

    transport: Callable[[str], Transport]
    device: Device = CPU
    mapped_peers: int = 0
    """How many of a reader's peers are mapped, if it has one."""

    def buffer(self, content: UInt64Array) -> tuple[np.ndarray, int, object]:
        """Return memory with this content as the host sees it, its address as the transport knows it, and its owner."""
        buffer = content.astype(np.uint8)
        return buffer, int(buffer.ctypes.data), buffer


@dataclass(frozen=True)
class Side:
    """One transport with one registered buffer."""

    transport: Transport
    device: Device
    buffer: np.ndarray
    start: int

    def address(self, offset: int = 0) -> int:
        return self.start + offset


@dataclass(frozen=True)
class Ends:
    """A reader that knows a writer as `peer`."""

    reader: Side
    writer: Side
    peer: AgentName

    def descriptors(self, *ranges: tuple[int, int, int]) -> Descriptors:
        """(local offset, remote offset, size) triples."""
        local, remote, sizes = zip(*ranges, strict=True)
        return Descriptors.of(
            local=np.array([self.reader.address(offset) for offset in local], dtype=np.uint64),
            remote=np.array([self.writer.address(offset) for offset in remote], dtype=np.uint64),
            sizes=np.array(sizes, dtype=np.uint64),
            local_device=self.reader.device,
            remote_device=self.writer.device,
        )


def make_inproc() -> Maker:
    network = InprocNetwork()
    return Maker(lambda name: InprocTransport(name, network))


def make_nixl(backend: str = "UCX") -> Maker:
    limits = Limits(notification_poll_interval_s=0.001)
    config = Config(engine_id="conformance", nixl_backend=backend, limits=limits)
    return Maker(lambda name: NixlTransport(config, name))


@dataclass(frozen=True)
class OnStandIn(Maker):
    """Memory of the stand-in accelerator, as the host sees it at the addresses behind."""

    device: Device = ON_STANDIN

    def buffer(self, content: UInt64Array) -> tuple[np.ndarray, int, object]:
        owner = torch.from_numpy(content.astype(np.uint8)).to(f"{KIND}:1")
        address = owner.data_ptr()
        seen = (ctypes.c_uint8 * len(content)).from_address(load().reach(address))
        return np.frombuffer(seen, dtype=np.uint8), address, owner


MAPPED: dict[str, dict[str, Any]] = {
    "mapped": {},
    "mapped, by kernels": {"by_kernels": True},
    "refused": {"refuses": "no peer access"},
}
"""Ways of a transport that is to map the stand-in's memory."""


NIXL_BACKENDS = {"UCX": [], "UCX,POSIX": [], "LIBFABRIC": [pytest.mark.thorough]}
"""NIXL backends that move bytes between peers, alone and together, where they start on this machine. The fast suite
leaves out backends that do not start on most machines.
"""


@functools.cache
def problem_of(backend: str) -> str:
    """Why a backend does not start here; "" if it does. What this machine is known to have must start."""

    async def start() -> str:
        transport = NixlTransport(Config(engine_id="conformance", nixl_backend=backend), "start")
        try:
            await transport.open()
        except ConfigError as error:
            return str(error)
        await transport.aclose(WAIT_S)
        return ""

    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(start())))
    thread.start()
    thread.join()
    assert not found[0] or "UCX" not in backend, found[0]
    return found[0]


@pytest.fixture(
    params=[
        "inproc",
        *(pytest.param(name, marks=[pytest.mark.nixl, *marks]) for name, marks in NIXL_BACKENDS.items()),
        *(pytest.param(name, marks=pytest.mark.nixl) for name in MAPPED),
    ]
)
def make(request: pytest.FixtureRequest) -> Iterator[Maker]:
    if request.param == "inproc":
        yield make_inproc()
    elif request.param in MAPPED:
        try:
            load()
        except NotBuilt as error:
            pytest.skip(f"needs the stand-in accelerator: {error}")
        limits = Limits(notification_poll_interval_s=0.001)
        config = Config(engine_id="conformance", cuda_ipc=True, limits=limits)
        with mapping(**MAPPED[request.param]):
            is_mapped = "refuses" not in MAPPED[request.param]
            yield OnStandIn(lambda name: NixlTransport(config, name), mapped_peers=is_mapped)
    elif problem := problem_of(request.param):
        pytest.skip(f"NIXL's backend does not start here: {problem}")
    else:
        yield make_nixl(request.param)


async def open_side(make: Maker, name: str, fill: UInt64Array) -> Side:
    transport = make.transport(name)
    await transport.open()
    buffer, start, owner = make.buffer(fill)
    side = Side(transport, make.device, buffer, start)
    await transport.register([Span(address=start, size_bytes=SIZE)], make.device, owner, BOTH)
    return side


async def add(reader: Transport, writer: Transport) -> AgentName:
    return await reader.add_peer(await writer.metadata(), await writer.device_memory())


@contextlib.asynccontextmanager
async def two_ends(make: Maker) -> AsyncIterator[Ends]:
    writer = await open_side(make, "writer", np.arange(SIZE, dtype=np.uint64) % 251)
    reader = await open_side(make, "reader", np.full(SIZE, 255, dtype=np.uint64))
    peer = await add(reader.transport, writer.transport)
    assert reader.transport.statistics.mapped_peers == make.mapped_peers
    yield Ends(reader, writer, peer)
    for side in (reader, writer):
        await side.transport.aclose(WAIT_S)
        statistics = side.transport.statistics
        left = (statistics.open_reads, statistics.open_peers, statistics.open_spans, statistics.open_threads)
        assert (*left, statistics.mapped_peers) == (0, 0, 0, 0, 0)


@pytest.fixture
async def ends(make: Maker) -> AsyncIterator[Ends]:
    async with two_ends(make) as ends:
        yield ends


async def end_of(transport: Transport, count: int = 1) -> list[Event]:
    """The next `count` ends and notifications, and what comes between; raises what the transport ends with before."""
    events: list[Event] = []
    enough = asyncio.Event()

    def deliver(event: Event) -> None:
        events.append(event)
        if sum(not isinstance(one, CaughtUp) for one in events) >= count:
            enough.set()

    running = asyncio.create_task(transport.run(deliver))
    waiting = asyncio.create_task(enough.wait())
    try:
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not enough.is_set():
            await running
    finally:
        for task in (running, waiting):
            task.cancel()
        await asyncio.wait([running, waiting])
    return events


async def read_ended(ends: Ends, *ranges: tuple[int, int, int], peer: AgentName | None = None) -> ReadEnded:
    """How a read ends, of 8 bytes unless told otherwise."""
    descriptors = ends.descriptors(*(ranges or [(0, 0, 8)]))
    read = ends.reader.transport.post_read(peer or ends.peer, descriptors)
    (event,) = await end_of(ends.reader.transport)
    assert isinstance(event, ReadEnded)
    assert event.read is read
    return event


async def test_a_read_moves_exactly_its_bytes(ends: Ends) -> None:
    ranges = [(0, 100, 50), (1000, 5000, 1), (2000, 0, 4096), (SIZE - 8, SIZE - 8, 8)]
    expected = ends.reader.buffer.copy()
    for local, remote, size in ranges:
        expected[local : local + size] = ends.writer.buffer[remote : remote + size]
    ended = await read_ended(ends, *ranges)
    assert (ended.read.size_bytes, ended.error) == (50 + 1 + 4096 + 8, None)
    assert ended.post_s >= 0
    np.testing.assert_array_equal(ends.reader.buffer, expected)


async def test_many_reads_of_all_sizes_from_several_peers_each_end_once_and_fail_alone(make: Maker, ends: Ends) -> None:
    transport, other = ends.reader.transport, await open_side(make, "other", np.full(SIZE, 7, dtype=np.uint64))
    sources = [(ends.writer, ends.peer), (other, await add(transport, other.transport))]
    expected, reads, bytes_read = ends.reader.buffer.copy(), [], 0
    for index in range(200):
        (source, peer), is_right = sources[index % 3 > 0], index % 7 > 0
        size, offset = 1 << index % 13, index << 12
        local = ends.reader.address(offset if is_right else SIZE - size // 2 - 1)
        of = {"local": [local], "remote": [source.address(offset)], "sizes": [size + 1 - is_right]}
        reads.append(
            transport.post_read(
                peer, Descriptors.of(**of, local_device=ends.reader.device, remote_device=ends.writer.device)
            )
        )
        if is_right:
            expected[offset : offset + size] = source.buffer[offset : offset + size]
            bytes_read += size
    ended = [event for event in await end_of(transport, 200) if isinstance(event, ReadEnded)]
    errors = {event.read: event.error for event in ended}
    assert (len(ended), [errors[read] is None for read in reads]) == (200, [index % 7 > 0 for index in range(200)])
    np.testing.assert_array_equal(ends.reader.buffer, expected)
    assert transport.statistics.bytes_read == bytes_read
    await transport.remove_peer(sources[1][1])
    await other.transport.aclose(WAIT_S)


@pytest.mark.parametrize("side", ["local", "remote"])
async def test_ranges_outside_registered_memory_end_with_an_error(ends: Ends, side: str) -> None:
    ranges = (SIZE - 4, 0, 8) if side == "local" else (0, SIZE - 4, 8)
    before = ends.reader.buffer.copy()
    assert isinstance((await read_ended(ends, ranges)).error, TransportError)
    np.testing.assert_array_equal(ends.reader.buffer, before)
    assert ends.reader.transport.statistics.reads_failed == 1


async def test_a_peer_can_be_removed_and_added_again(ends: Ends) -> None:
    transport = ends.reader.transport
    await transport.remove_peer(ends.peer)
    assert transport.statistics.open_peers == 0
    for unknown in (ends.peer, AgentName("nobody")):
        assert isinstance((await read_ended(ends, peer=unknown)).error, TransportError)
    assert await add(transport, ends.writer.transport) == ends.peer
    assert (await read_ended(ends)).error is None


async def test_an_addition_that_was_given_up_does_not_bar_the_next_one(ends: Ends) -> None:
    transport = ends.reader.transport
    await transport.remove_peer(ends.peer)
    metadata = await ends.writer.transport.metadata(), await ends.writer.transport.device_memory()
    adding = asyncio.create_task(transport.add_peer(*metadata))
    await asyncio.sleep(0)
    adding.cancel()
    await asyncio.wait([adding])
    if adding.cancelled():
        assert transport.statistics.open_peers == 0
        assert await transport.add_peer(*metadata) == ends.peer
    assert (await read_ended(ends)).error is None


async def test_notifications_arrive_in_order_and_whole(ends: Ends) -> None:
    payloads = [b"\x00binary\xff" + bytes([index]) * index for index in range(1, 50)]
    for payload in payloads:
        ends.reader.transport.notify(ends.peer, payload)
    events = await end_of(ends.writer.transport, len(payloads))
    assert [event.payload for event in events if isinstance(event, Notified)] == payloads
    assert ends.writer.transport.statistics.notifications_received == len(payloads)


async def test_a_notification_between_reads_arrives_although_reads_go_on(ends: Ends) -> None:
    arrival = asyncio.create_task(end_of(ends.writer.transport))
    ends.reader.transport.notify(ends.peer, b"hello")
    while not arrival.done():
        await read_ended(ends)
    assert await arrival == [Notified(b"hello")]


@pytest.mark.parametrize("end", ["remove_peer", "aclose"])
async def test_a_notification_is_sent_before_its_peer_is_forgotten(ends: Ends, end: str) -> None:
    transport = ends.reader.transport
    transport.notify(ends.peer, b"connected")
    await end_of(ends.writer.transport)
    transport.notify(ends.peer, b"hello")
    await (transport.remove_peer(ends.peer) if end == "remove_peer" else transport.aclose(WAIT_S))
    assert await end_of(ends.writer.transport) == [Notified(b"hello")]


async def test_a_notification_to_nobody_is_counted(ends: Ends) -> None:
    ends.reader.transport.notify(AgentName("nobody"), b"hello")
    ends.reader.transport.notify(ends.peer, b"hello")
    await end_of(ends.writer.transport)
    assert ends.reader.transport.statistics.notifications_failed == 1


async def test_metadata_that_is_none_is_refused(ends: Ends) -> None:
    for junk in (b"", b"junk", b"\x00" * 64):
        with pytest.raises(TransportError):
            await ends.reader.transport.add_peer(junk)
    assert (await read_ended(ends)).error is None


async def test_events_that_nobody_takes_are_kept(ends: Ends) -> None:
    waiting = asyncio.create_task(end_of(ends.reader.transport))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await read_ended(ends)


async def test_closing_ends_the_wait_for_events_and_every_verb(make: Maker) -> None:
    side = await open_side(make, "alone", np.zeros(SIZE, dtype=np.uint64))
    transport = side.transport
    waiting = asyncio.create_task(end_of(transport))
    await asyncio.sleep(0)
    await transport.aclose(WAIT_S)
    await transport.aclose(WAIT_S)
    with pytest.raises(TransportBroken):
        await waiting
    with pytest.raises(TransportBroken):
        await transport.metadata()
    with pytest.raises(TransportBroken):
        transport.notify(AgentName("x"), b"x")
    never_opened = make.transport("never")
    await never_opened.aclose(1.0)
    with pytest.raises(TransportBroken):
        await never_opened.metadata()


async def test_an_unreachable_device_cannot_be_registered(make: Maker) -> None:
    side = await open_side(make, "alone", np.zeros(SIZE, dtype=np.uint64))
    with pytest.raises(TransportError, match="cannot reach device 'tpu'"):
        await side.transport.register([Span(address=1, size_bytes=1)], Device("tpu", 0), None, BOTH)
    await side.transport.aclose(WAIT_S)


@pytest.fixture
async def nixl() -> AsyncIterator[tuple[Ends, Any]]:
    """Ends of NIXL, and the reader; the first reads of a connection, which have to wait for it, are over."""
    async with two_ends(make_nixl()) as ends:
        for size in (SIZE, 8):
            await read_ended(ends, (0, 0, size))
        yield ends, ends.reader.transport


@contextlib.contextmanager
def busy(transport: Any) -> Iterator[None]:
    """Its thread does nothing inside the block."""
    gate = threading.Event()
    transport._require_open()[0].submit(lambda: gate.wait(WAIT_S))
    try:
        yield
    finally:
        gate.set()


@pytest.mark.nixl
async def test_nixl_posts_the_smaller_of_two_reads_first(nixl: tuple[Ends, Any]) -> None:
    """Over shared memory posting is copying, so a small read waits for one large one at most."""
    ends, transport = nixl
    with busy(transport):
        large = transport.post_read(ends.peer, ends.descriptors((0, 0, SIZE // 2)))
        small = transport.post_read(ends.peer, ends.descriptors((SIZE // 2, 0, 8)))
        assert transport.statistics.open_reads == 2
    events = await end_of(transport, 2)
    assert [event.read for event in events if isinstance(event, ReadEnded)] == [small, large]


@pytest.mark.nixl
async def test_nixl_that_was_behind_tells_when_reads_have_been_started_before_they_end(nixl: tuple[Ends, Any]) -> None:
    """While it reads them, the loop prepares the next ones."""
    ends, transport = nixl
    with busy(transport):
        count = 0
        while not transport.behind:
            transport.post_read(ends.peer, ends.descriptors((8 * count, 0, 8)))
            count += 1
    events = await end_of(transport, count)
    assert [type(event) for event in events] == [CaughtUp] + [ReadEnded] * count


@pytest.mark.nixl
async def test_nixl_tells_of_ends_however_often_its_thread_is_called(nixl: tuple[Ends, Any]) -> None:
    """An end waits for what the thread is called for, once."""
    ends, transport = nixl
    transport._agents._has_jobs = lambda: True
    await read_ended(ends, (0, 0, SIZE))
    await read_ended(ends, (0, 0, 8))


class Watched:
    """An agent of NIXL: the names of its calls go to `log`."""

    def __init__(self, native: Any, log: list[str]) -> None:
        self._native = native
        self._log = log

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self._log.append(name)
        call: Callable[..., Any] = getattr(self._native, name)
        return call


@pytest.mark.nixl
async def test_nixl_tells_of_an_end_before_its_thread_lets_go_of_the_lock_again(nixl: tuple[Ends, Any]) -> None:
    """Every call of NIXL releases Python's lock, and waits for it beside a busy loop: no call is between the landing
    and the report. The report comes before the handle is released.
    """
    ends, transport = nixl
    thread, agents = transport._require_open()
    log: list[str] = []
    put, native = agents._put_event, agents._reading.native

    def tell(event: Event) -> None:
        log.append("told")
        put(event)

    def watch() -> None:
        agents._put_event, agents._reading.native = tell, Watched(native, log)

    await thread.call(watch)
    await read_ended(ends, (0, 0, 8))
    await thread.call(lambda: setattr(agents._reading, "native", native))
    calls = [name for name in log if name not in ("getNotifs", "getXferStatus")]
    assert calls == ["createXferReq", "postXferReq", "told", "releaseXferReq"]
    assert log[log.index("told") - 1] in ("postXferReq", "getXferStatus")


@pytest.mark.nixl
async def test_nixl_is_behind_while_many_reads_wait_to_be_started(nixl: tuple[Ends, Any]) -> None:
    ends, transport = nixl
    seen = []
    with busy(transport):
        for index in range(64):
            transport.post_read(ends.peer, ends.descriptors((index * 64, index * 64, 64)))
            seen.append(transport.behind)
    assert (seen[0], seen[-1], seen == sorted(seen)) == (False, True, True)
    await end_of(transport, 64)
    assert not transport.behind
    await read_ended(ends, (0, 0, SIZE))
    assert not transport.behind
