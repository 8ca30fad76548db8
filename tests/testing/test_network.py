"""The simulated network's faults of reads, notifications and questions, one at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvflow import Config
from kvflow.core.cache.regions import HOST, Span
from kvflow.core.plan.descriptors import Descriptors
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address
from kvflow.errors import PeerUnreachable, ProtocolError
from kvflow.testing.network_conditions import NetworkConditions
from kvflow.testing.side_channel import InprocSideChannel
from kvflow.testing.simulated_network import Network, SimFlight, SimHost
from kvflow.testing.simulated_world import send_through
from kvflow.testing.virtual_loop import SimProcess, VirtualLoop
from kvflow.transport.base import AgentName, Event, MemoryUse, Notified, PeerGone, ReadEnded
from kvflow.transport.inproc import InprocTransport, Row
from tests.support.tests_support import each, in_virtual_time

SIZE = 64


@dataclass
class Node:
    """A host with one agent, its memory, and its poller's events with their times."""

    host: SimHost
    transport: InprocTransport
    memory: np.ndarray
    events: list[tuple[float, Event]] = field(default_factory=list)

    async def serve(self, opened: asyncio.Event) -> None:
        await self.transport.open()
        span, use = Span(address=self.memory.ctypes.data, size_bytes=SIZE), MemoryUse.SERVED | MemoryUse.READ_INTO
        await self.transport.register([span], HOST, self.memory, use)
        opened.set()
        loop = asyncio.get_running_loop()
        await self.transport.run(lambda event: self.events.append((loop.time(), event)))


class Net:
    """A network with its conditions. A reader on it knows a target with a memory full of 7."""

    reader: Node
    target: Node

    def __init__(self) -> None:
        self.loop = virtual_loop()
        self.network = Network(self.loop, random.Random(1), lambda *_: None, self._landed)
        self.landings: list[int] = []
        """How many bytes landed at once."""

    def _landed(self, _: SimFlight, rows: list[Row]) -> None:
        self.landings.append(sum(size for _, _, size in rows))

    async def node(self, name: str) -> Node:
        host, opened = SimHost(name, f"tcp://{name}", SimProcess(self.loop, name)), asyncio.Event()
        node = Node(host, self.network.attach(host, name), np.zeros(SIZE, dtype=np.uint8))
        host.process.task(node.serve(opened), name=f"poller of {name}")
        await opened.wait()
        return node

    def read(self) -> None:
        """Post a read of four pieces."""
        offsets = range(0, SIZE, 16)
        local, remote = (
            [node.memory.ctypes.data + offset for offset in offsets] for node in (self.reader, self.target)
        )
        pieces = Descriptors.of(local=local, remote=remote, sizes=[16] * 4, local_device=HOST, remote_device=HOST)
        self.reader.transport.post_read(AgentName("target"), pieces)

    def kill(self, node: Node) -> None:
        node.host.process.kill()
        self.network.detach(node.host)

    def seen(self) -> tuple[bool, list[type | None]]:
        """Return whether the bytes have landed, and the error of each read that has ended."""
        errors = [event.error for _, event in self.reader.events if isinstance(event, ReadEnded)]
        return bool((self.reader.memory == 7).all()), [error and type(error) for error in errors]


async def begin(**conditions: float) -> Net:
    net = Net()
    net.network.conditions = NetworkConditions(**conditions)
    net.reader, net.target = await net.node("reader"), await net.node("target")
    net.target.memory[:] = 7
    await net.reader.transport.add_peer(await net.target.transport.metadata())
    return net


def virtual_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


async def pass_time(seconds: float) -> None:
    done = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(seconds, done.set_result, None)
    await done


@in_virtual_time
async def test_a_torn_read_sees_memory_at_several_moments() -> None:
    net = await begin(torn_share=1.0, read_s=0.01)
    seen_mixed = False
    for _ in range(20):
        net.landings.clear()
        net.target.memory[:] = 7
        net.read()
        while not net.landings:
            await pass_time(1e-5)
        net.target.memory[:] = 8
        await pass_time(1.0)
        seen_mixed = seen_mixed or set(net.reader.memory.tolist()) == {7, 8}
        assert sum(net.landings) == SIZE
    assert seen_mixed


Fate = Callable[[Net], object]
FATES: dict[str, tuple[Fate, Fate, tuple[bool, list[type | None]], tuple[bool, list[type | None]]]] = {
    # What befalls a read, and what ends that; what is seen of it before and after.
    "its link is cut": (
        lambda net: net.network.cut(net.reader.host, net.target.host),
        lambda net: net.network.heal(),
        (False, []),
        (True, [None]),
    ),
    "its source stands still": (
        lambda net: net.target.host.process.freeze(),
        lambda net: net.target.host.process.thaw(),
        (True, [None]),
        (True, [None]),
    ),
    "its reader stands still": (
        lambda net: net.reader.host.process.freeze(),
        lambda net: net.reader.host.process.thaw(),
        (True, []),
        (True, [None]),
    ),
    "its source dies": (
        lambda net: net.kill(net.target),
        lambda net: net.target.host.process.cancel_dead(),
        (False, [PeerGone]),
        (False, [PeerGone]),
    ),
    "its reader dies": (
        lambda net: net.kill(net.reader),
        lambda net: net.reader.host.process.cancel_dead(),
        (False, []),
        (False, []),
    ),
}


@each("fate", FATES)
@in_virtual_time
async def test_what_befalls_a_read(fate: str) -> None:
    strike, end, before, after = FATES[fate]
    net = await begin(read_s=0.01)
    net.read()
    strike(net)
    await pass_time(100.0)
    assert net.seen() == before
    assert (net.landings == []) == (not before[0])
    end(net)
    await pass_time(1.0)
    assert net.seen() == after


@in_virtual_time
async def test_a_read_that_fails_lands_in_part_at_most() -> None:
    net = await begin(failed_share=1.0, torn_share=1.0)
    for _ in range(20):
        net.read()
    await pass_time(1.0)
    assert len(net.reader.events) == 20
    assert None not in net.seen()[1]
    assert sum(net.landings) < 20 * SIZE


@each(("conditions", "expected"), [({}, 10), ({"lost_share": 1.0}, 0), ({"repeated_share": 1.0}, 20)])
@in_virtual_time
async def test_notifications(conditions: dict[str, float], expected: int) -> None:
    net = await begin(**conditions)
    for number in range(10):
        net.reader.transport.notify(AgentName("target"), bytes([number]))
    await pass_time(1.0)
    assert len(net.target.events) == expected


@in_virtual_time
async def test_late_notifications_change_places() -> None:
    net = await begin(late_share=0.5, late_s=0.1)
    for number in range(20):
        net.reader.transport.notify(AgentName("target"), bytes([number]))
    await pass_time(1.0)
    order = [event.payload[0] for _, event in net.target.events if isinstance(event, Notified)]
    assert sorted(order) == list(range(20))
    assert order != sorted(order)


@in_virtual_time
async def test_a_stalled_poller_hears_later() -> None:
    net = await begin()
    net.reader.host.poller_stalled_until_s = 3.0
    net.read()
    await pass_time(5.0)
    ((when_s, _),) = net.reader.events
    assert when_s == 3.0


# --- questions

QUESTION = messages.MetadataRequest(reader="reader", target=Address("target", Rank(0, 0, 0), "tcp://target:5600"))


async def ask(net: Net) -> object:
    config = Config(engine_id="any", handshake_timeout_s=0.5)
    asker = InprocSideChannel(net.network.exchange, config, send=send_through(net.network, net.reader.host))
    return await asker.ask(QUESTION, fingerprint=b"")


async def begin_listening() -> Net:
    """The target answers every question."""
    net = await begin()
    config = Config(engine_id="target", listen=f"{net.target.host.address}:5600")

    async def serve() -> None:
        channel = InprocSideChannel(net.network.exchange, config)
        listener = await channel.listen(lambda header, request: messages.Ack(incarnation="1"))
        await listener.serve()

    net.target.host.process.task(serve())
    await pass_time(0.1)
    return net


SILENT: dict[str, Fate] = {
    "unanswered": lambda net: setattr(net.network, "conditions", NetworkConditions(unanswered_share=1.0)),
    "cut": lambda net: net.network.cut(net.reader.host, net.target.host),
    "frozen": lambda net: net.target.host.process.freeze(),
}


@each("how", SILENT)
@in_virtual_time
async def test_no_answer_takes_as_long_as_a_handshake_may(how: str) -> None:
    net = await begin_listening()
    SILENT[how](net)
    begun_s = net.loop.time()
    with pytest.raises(PeerUnreachable, match=r"no answer within 0\.5 s"):
        await ask(net)
    assert net.loop.time() - begun_s == pytest.approx(0.5)
    net.target.host.process.thaw()


@in_virtual_time
async def test_a_garbled_answer_is_no_answer_of_ours() -> None:
    net = await begin_listening()
    net.network.conditions = NetworkConditions(garbled_share=1.0)
    found: set[str] = set()
    for _ in range(20):
        try:
            found.add(type(await ask(net)).__name__)
        except ProtocolError:
            found.add("no message")
    assert found == {"no message", "LeaseAnswer"}
