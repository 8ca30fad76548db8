"""What the simulated network does to reads, notifications and questions, one fault at a time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvflow import Config
from kvflow.core.cache.regions import Span
from kvflow.core.plan.descriptors import Descriptors
from kvflow.core.protocol import messages
from kvflow.core.protocol.proof import HOST
from kvflow.errors import PeerUnreachable, ProtocolError
from kvflow.testing.side_channel import InprocSideChannel
from kvflow.testing.simulator.network import Network, SimFlight, SimHost
from kvflow.testing.simulator.settings import Weather
from kvflow.testing.simulator.world import send_through
from kvflow.testing.virtual_loop import Life, VirtualLoop
from kvflow.transport.base import AgentName, Event, MemoryUse, Notified, PeerGone, ReadEnded
from kvflow.transport.inproc import InprocTransport, Row
from tests.support.tests_support import each, in_virtual_time

SIZE = 64


@dataclass
class Node:
    """A host with one agent, its memory, and what its poller has been told."""

    host: SimHost
    transport: InprocTransport
    memory: np.ndarray
    events: list[tuple[float, Event]] = field(default_factory=list)


@dataclass
class Setup:
    loop: VirtualLoop
    network: Network
    landings: list[tuple[float, int]] = field(default_factory=list)
    """When how many bytes landed."""

    async def node(self, name: str) -> Node:
        life = Life(self.loop, name)
        host = SimHost(name, f"tcp://{name}", life)
        transport = self.network.attach(host, name)
        memory = np.zeros(SIZE, dtype=np.uint8)
        node = Node(host, transport, memory)

        async def serve() -> None:
            await transport.open()
            await transport.register(
                [Span(address=memory.ctypes.data, size_bytes=SIZE)],
                HOST,
                memory,
                MemoryUse.SERVED | MemoryUse.READ_INTO,
            )
            opened.set()
            await transport.run(lambda event: node.events.append((self.loop.time(), event)))

        opened = asyncio.Event()
        life.task(serve(), name=f"poller of {name}")
        await opened.wait()
        return node

    def landed(self, _: SimFlight, rows: list[Row]) -> None:
        self.landings.append((self.loop.time(), sum(size for _, _, size in rows)))


def read(reader: Node, target: Node) -> None:
    """Post a read of four pieces."""
    offsets = range(0, SIZE, 16)
    reader.transport.post_read(
        AgentName("target"),
        Descriptors.of(
            local=[reader.memory.ctypes.data + offset for offset in offsets],
            remote=[target.memory.ctypes.data + offset for offset in offsets],
            sizes=[16] * len(offsets),
            local_device=HOST,
            remote_device=HOST,
        ),
    )


async def begin(**weather: float) -> tuple[Setup, Node, Node]:
    """A network with this weather, and on it a reader that knows a target whose memory is full of 7."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    setup = Setup(loop, Network(loop, random.Random(1), lambda *_: None, lambda *args: setup.landed(*args)))
    setup.network.weather = Weather(**weather)
    reader, target = await setup.node("reader"), await setup.node("target")
    target.memory[:] = 7
    await reader.transport.add_peer(await target.transport.metadata())
    return setup, reader, target


async def pass_time(seconds: float) -> None:
    done = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(seconds, done.set_result, None)
    await done


@in_virtual_time
async def test_a_torn_read_sees_memory_at_several_moments() -> None:
    setup, reader, target = await begin(torn_share=1.0, read_s=0.01)
    seen_mixed = False
    for _ in range(20):
        setup.landings.clear()
        target.memory[:] = 7
        read(reader, target)
        while not setup.landings:
            await pass_time(1e-5)
        target.memory[:] = 8
        await pass_time(1.0)
        seen_mixed = seen_mixed or set(reader.memory.tolist()) == {7, 8}
        assert sum(size for _, size in setup.landings) == SIZE
    assert seen_mixed


@in_virtual_time
async def test_a_read_stands_still_while_a_link_is_cut() -> None:
    setup, reader, target = await begin()
    setup.network.cut(reader.host, target.host)
    read(reader, target)
    await pass_time(100.0)
    assert reader.events == []
    assert not reader.memory.any()
    setup.network.heal()
    await pass_time(1.0)
    assert (reader.memory == 7).all()


@in_virtual_time
async def test_a_read_from_a_frozen_process_goes_on() -> None:
    _, reader, target = await begin()
    target.host.life.freeze()
    read(reader, target)
    await pass_time(1.0)
    assert (reader.memory == 7).all()
    target.host.life.thaw()


@in_virtual_time
async def test_a_frozen_reader_gets_its_bytes_and_hears_of_them_later() -> None:
    _, reader, target = await begin()
    read(reader, target)
    reader.host.life.freeze()
    await pass_time(5.0)
    assert (reader.memory == 7).all()
    assert reader.events == []
    reader.host.life.thaw()
    await pass_time(1.0)
    assert len(reader.events) == 1


@in_virtual_time
async def test_a_read_from_a_process_that_dies_fails() -> None:
    setup, reader, target = await begin(read_s=0.01)
    read(reader, target)
    target.host.life.kill()
    setup.network.detach(target.host)
    await pass_time(1.0)
    ((_, event),) = reader.events
    assert isinstance(event, ReadEnded)
    assert isinstance(event.error, PeerGone)
    target.host.life.bury()


@in_virtual_time
async def test_nothing_lands_in_a_process_that_is_dead() -> None:
    setup, reader, target = await begin(read_s=0.01)
    read(reader, target)
    reader.host.life.kill()
    setup.network.detach(reader.host)
    await pass_time(1.0)
    assert not reader.memory.any()
    assert setup.landings == []
    reader.host.life.bury()


@in_virtual_time
async def test_a_read_that_fails_lands_in_part_at_most() -> None:
    setup, reader, target = await begin(failed_share=1.0, torn_share=1.0)
    for _ in range(20):
        read(reader, target)
    await pass_time(1.0)
    assert len(reader.events) == 20
    assert all(isinstance(event, ReadEnded) and event.error is not None for _, event in reader.events)
    assert sum(size for _, size in setup.landings) < 20 * SIZE


@each(("weather", "expected"), [({}, 10), ({"lost_share": 1.0}, 0), ({"repeated_share": 1.0}, 20)])
@in_virtual_time
async def test_notifications(weather: dict[str, float], expected: int) -> None:
    _, reader, target = await begin(**weather)
    for number in range(10):
        reader.transport.notify(AgentName("target"), bytes([number]))
    await pass_time(1.0)
    assert len(target.events) == expected


@in_virtual_time
async def test_late_notifications_change_places() -> None:
    _, reader, target = await begin(late_share=0.5, late_s=0.1)
    for number in range(20):
        reader.transport.notify(AgentName("target"), bytes([number]))
    await pass_time(1.0)
    order = [event.payload[0] for _, event in target.events if isinstance(event, Notified)]
    assert sorted(order) == list(range(20))
    assert order != sorted(order)


@in_virtual_time
async def test_a_stalled_poller_hears_later() -> None:
    _, reader, target = await begin()
    reader.host.poller_stalled_until_s = 3.0
    read(reader, target)
    await pass_time(5.0)
    ((when_s, _),) = reader.events
    assert when_s == 3.0


# --- questions

QUESTION = messages.ClockRequest(reader="reader", target=messages.Target("target", 0, 0, 0))


async def ask(setup: Setup, node: Node) -> object:
    config = Config(engine_id="any", handshake_timeout_s=0.5)
    asker = InprocSideChannel(setup.network.exchange, config, send=send_through(setup.network, node.host))
    return await asker.ask("tcp://target:5600", QUESTION, fingerprint=b"")


async def start_listener(setup: Setup, node: Node) -> None:
    """Answers every question about the clock."""
    config = Config(engine_id="target", listen=f"{node.host.address}:5600")

    async def serve() -> None:
        channel = InprocSideChannel(setup.network.exchange, config)
        listener = await channel.listen(lambda header, request: messages.ClockShown(incarnation="1", clock_s=1.0))
        await listener.serve()

    node.host.life.task(serve())
    await pass_time(0.1)


@each("how", ["unanswered", "cut", "frozen"])
@in_virtual_time
async def test_no_answer_takes_as_long_as_a_handshake_may(how: str) -> None:
    setup, reader, target = await begin()
    await start_listener(setup, target)
    match how:
        case "unanswered":
            setup.network.weather = Weather(unanswered_share=1.0)
        case "cut":
            setup.network.cut(reader.host, target.host)
        case _:
            target.host.life.freeze()
    begun_s = setup.loop.time()
    with pytest.raises(PeerUnreachable, match=r"no answer within 0\.5 s"):
        await ask(setup, reader)
    assert setup.loop.time() - begun_s == pytest.approx(0.5)
    target.host.life.thaw()


@in_virtual_time
async def test_a_garbled_answer_is_no_answer_of_ours() -> None:
    setup, reader, target = await begin()
    await start_listener(setup, target)
    setup.network.weather = Weather(garbled_share=1.0)
    found: set[str] = set()
    for _ in range(20):
        try:
            reply = await ask(setup, reader)
        except ProtocolError:
            found.add("no message")
        else:
            found.add(type(reply).__name__)
    assert found == {"no message", "NoLease"}
