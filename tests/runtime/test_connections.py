"""Connections of the side channel are kept: which questions share one, which answers belong to them, when one ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest
import zmq
import zmq.asyncio
from hand_overs import free_ports
from side_channels import ANSWER, PLAIN, REQUEST, address_of, asking, listening, seen, to
from tests_support import limited, until

from kvflow import Config
from kvflow.core.protocol import codec, messages
from kvflow.errors import PeerUnreachable
from kvflow.runtime.channel import asking as asking_module
from kvflow.runtime.channel import connections
from kvflow.runtime.channel.asking import REFUSALS_MAX, ZmqSideChannel
from kvflow.runtime.channel.connections import KeptConnection
from kvflow.runtime.channel.protocol import QUESTIONS_MAX
from kvflow.testing import ManualClock
from tests.core.protocol.test_messages import METADATA

BRIEF = replace(PLAIN, handshake_timeout_s=0.05)


class Scripted:
    """A listener in the hands of a test: questions wait until it answers them, in the order that it likes."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket

    async def next(self) -> tuple[bytes, codec.Header, messages.Request]:
        """The next question, and the connection that it came over."""
        sender, header, body = await self._socket.recv_multipart()
        return sender, codec.decode_header(header), codec.decode_request(body)

    async def answer(self, sender: bytes, question: int, answer: float) -> None:
        reply = shown(answer)
        await self._socket.send_multipart([sender, *codec.encode_frames(codec.our_header(b"", question), reply)])


@contextlib.asynccontextmanager
async def scripted(config: Config = PLAIN) -> AsyncIterator[tuple[Scripted, ZmqSideChannel, str]]:
    """Return a scripted peer, a channel that asks it, and its address."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with asking(config) as channel:
            yield Scripted(socket), channel, f"tcp://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def relayed(port: int) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Open a relay to a port. Yield its address, and a flag that lets the port's answers through."""
    flows = asyncio.Event()
    flows.set()
    pumps: set[asyncio.Task[None]] = set()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, gate: asyncio.Event | None) -> None:
        with contextlib.closing(sink), contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                if gate is not None:
                    await gate.wait()
                sink.write(data)
                await sink.drain()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_port, to_port = await asyncio.open_connection("127.0.0.1", port)
        for way in (pump(reader, to_port, None), pump(from_port, writer, flows)):
            pumps.add(asyncio.create_task(way))

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", flows
        await asyncio.gather(*pumps)


def numbered(index: int) -> messages.MetadataRequest:
    """Return a question of reader `index`."""
    return messages.MetadataRequest(reader=str(index), target=REQUEST.target)


def start(channel: ZmqSideChannel, address: str, index: int = 0) -> asyncio.Task[messages.Reply]:
    return asyncio.create_task(channel.ask(to(address, numbered(index)), fingerprint=b""))


def shown(answer: float) -> messages.Ack:
    """Return an answer with this number in it."""
    return messages.Ack(incarnation=str(float(answer)))


async def acquainted(peer: Scripted, channel: ZmqSideChannel, address: str) -> bytes:
    """A first question, so that there is a connection to share: the peer's name for it."""
    first = start(channel, address)
    sender, header, _ = await peer.next()
    await peer.answer(sender, header.question, 0.5)
    assert await first == shown(0.5)
    return sender


async def put(peer: Scripted, count: int) -> dict[str, tuple[bytes, int]]:
    """Wait until `count` questions have come. Return the connection and number of each, by reader."""
    found = {}
    for _ in range(count):
        sender, header, request = await peer.next()
        assert isinstance(request, messages.MetadataRequest)
        found[request.reader] = sender, header.question
    return found


async def test_so_many_questions_share_a_connection_and_answers_may_come_in_any_order() -> None:
    async with scripted() as (peer, channel, address):
        kept = await acquainted(peer, channel, address)
        count = QUESTIONS_MAX + 2
        asked = [start(channel, address, index) for index in range(count)]
        came = await put(peer, count)
        assert sum(sender == kept for sender, _ in came.values()) == QUESTIONS_MAX
        assert len({sender for sender, _ in came.values()}) == 2
        for reader in sorted(came, reverse=True):
            await peer.answer(*came[reader], float(reader))
        assert await asyncio.gather(*asked) == [shown(index) for index in range(count)]


async def test_where_those_that_are_kept_are_full_further_connections_are_kept() -> None:
    """Of 3 connections' worth of questions that always wait: once that is so no question opens another connection."""
    async with scripted() as (peer, channel, address):
        await acquainted(peer, channel, address)
        count = 3 * QUESTIONS_MAX
        asked = {str(index): start(channel, address, index) for index in range(count)}
        came = list((await put(peer, count)).items())
        senders = []
        for turn in range(4 * count):
            reader, where = came.pop(turn % 5)
            await peer.answer(*where, float(turn))
            assert await asked.pop(reader) == shown(float(turn))
            asked[str(count + turn)] = start(channel, address, count + turn)
            came += (await put(peer, 1)).items()
            senders.append(came[-1][1][0])
        assert len({*senders[2 * count :]}) <= 3
        assert {*senders[2 * count :]} <= {*senders[: 2 * count]}
        for reader, where in came:
            await peer.answer(*where, 0.0)
            await asked.pop(reader)
        assert open_connections(channel) == 3


def large_or_small(header: codec.Header, request: messages.Request) -> messages.Reply:
    """A large one, to one question, is more than the system's buffers take."""
    return LARGE if getattr(request, "reader", "") == "1" else ANSWER


LARGE = msgspec.structs.replace(METADATA, agent_metadata=b"x" * (8 << 20))


async def test_the_answers_of_as_many_questions_as_share_a_connection_may_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of a reader that is slow: and ZeroMQ takes answers that have left for waiting ones until some more leave."""
    monkeypatch.setattr(connections, "ANSWER_BYTES_MAX", 16 << 20)
    async with listening(PLAIN, answer=large_or_small) as listener, relayed(listener.port) as (address, flows):
        with asking(PLAIN) as channel:
            for left_before in range(1, QUESTIONS_MAX):
                for _ in range(left_before):
                    assert await start(channel, address, 0) == ANSWER
                answered = listener.statistics.answered
                flows.clear()
                asked = [start(channel, address, 1), *(start(channel, address, 0) for _ in range(QUESTIONS_MAX - 1))]
                await seen(listener, answered=answered + QUESTIONS_MAX)
                flows.set()
                assert await asyncio.gather(*asked) == [LARGE, *[ANSWER] * (QUESTIONS_MAX - 1)]
            await seen(listener, dropped=0, connections=1)


OFFER = messages.LeaseAnswer(
    state=messages.LeaseAnswerState.COMPLETE,
    offer=messages.Offer(
        num_tokens=900_000, ttl_s=1.0, block_ids=((1 << 20,) * 900_000,), extends=False, prompt_digest=""
    ),
)


async def test_an_answer_is_as_large_as_its_own_reader_takes_whatever_the_producer_could_send() -> None:
    """The connection goes on: a reader that accepts fewer block ids gets a typed answer."""
    many = limited(PLAIN, block_ids_max=1 << 20)
    replies: dict[str, messages.Reply] = {"1": OFFER, "2": LARGE}
    async with listening(many, answer=lambda _, asked: replies.get(getattr(asked, "reader", ""), ANSWER)) as listener:
        address = f"tcp://127.0.0.1:{listener.port}"
        with asking(PLAIN) as channel:
            declined, refused = await start(channel, address, 1), await start(channel, address, 2)
            assert isinstance(declined, messages.LeaseAnswer)
            assert declined.state is messages.LeaseAnswerState.FAILED
            assert f"the reader accepts at most {4 << 20} (limits.block_ids_max)" in declined.reason
            assert isinstance(refused, messages.Refusal)
            assert await start(channel, address, 0) == ANSWER
            await seen(listener, connections=1, answered=1, refused=2)
        with asking(many) as channel:
            assert await start(channel, address, 1) == OFFER


async def test_answers_that_a_reader_does_not_take_are_dropped_and_counted_and_others_get_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "ANSWER_BYTES_MAX", 16 << 20)
    question = codec.encode_frames(codec.our_header(b"", 1), numbered(1))
    async with listening(PLAIN, answer=large_or_small) as listener, relayed(listener.port) as (address, flows):
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as reader, asking() as channel:
            reader.linger = 0
            reader.connect(address)
            await reader.send_multipart(codec.encode_frames(codec.our_header(b"", 1), numbered(0)))
            await reader.recv_multipart()
            flows.clear()
            for _ in range(3 * QUESTIONS_MAX):
                await reader.send_multipart(question)
            await until(lambda: listener.statistics.answered + listener.statistics.dropped == 1 + 3 * QUESTIONS_MAX)
            assert 0 < listener.statistics.dropped <= 2 * QUESTIONS_MAX, "each is counted once"
            assert await start(channel, address_of(listener), 0) == ANSWER
            flows.set()


async def test_an_answer_to_a_reader_that_has_left_harms_nobody() -> None:
    promised: asyncio.Future[messages.Reply] = asyncio.get_running_loop().create_future()

    def answer(header: codec.Header, request: messages.Request) -> messages.Reply | asyncio.Future[messages.Reply]:
        return promised if getattr(request, "reader", "") == "1" else ANSWER

    async with listening(PLAIN, answer=answer) as listener:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as reader:
            reader.linger = 0
            reader.connect(address_of(listener))
            for index in (1, 0):  # questions are taken in order
                await reader.send_multipart(codec.encode_frames(codec.our_header(b"", 1), numbered(index)))
            await reader.recv_multipart()
        await seen(listener, connections=0)
        promised.set_result(ANSWER)
        with asking() as channel:
            assert await start(channel, address_of(listener)) == ANSWER
        await seen(listener, answered=3, dropped=0)


async def test_the_first_question_shares_with_nobody() -> None:
    """The peer is unknown before its first answer: of several questions, it may answer only one."""
    async with scripted() as (peer, channel, address):
        asked = [start(channel, address, index) for index in range(2)]
        came = await put(peer, 2)
        assert len({sender for sender, _ in came.values()}) == 2
        for index in (1, 0):
            await peer.answer(*came[str(index)], 1.0 + index)
            assert await asked[index] == shown(1.0 + index)


async def test_one_is_given_up_while_another_waits() -> None:
    """Its late answer is dropped; the next question uses a new connection."""
    async with scripted() as (peer, channel, address):
        kept = await acquainted(peer, channel, address)
        given_up, waiting = (start(channel, address, index) for index in range(2))
        came = await put(peer, 2)
        given_up.cancel()
        await asyncio.wait([given_up])
        later = start(channel, address, 2)
        late = await put(peer, 1)
        assert late["2"][0] != kept
        await peer.answer(*came["0"], 7.0)
        await peer.answer(kept, came["1"][1] + 1, 8.0)  # a number that nobody has
        await peer.answer(*came["1"], 1.0)
        await peer.answer(*late["2"], 2.0)
        assert (await waiting, await later) == (shown(1.0), shown(2.0))


async def test_a_question_that_got_no_answer_spends_its_connection() -> None:
    """It may have gone dead in silence: the next one has a connection of its own. Others wait as long as they like."""
    async with scripted(BRIEF) as (peer, channel, address):
        kept = await acquainted(peer, channel, address)
        long = asyncio.create_task(channel.ask(to(address, numbered(1)), fingerprint=b"", timeout_s=60.0))
        came = await put(peer, 1)
        with pytest.raises(PeerUnreachable, match=r"within 0\.05 s"):
            await start(channel, address)
        assert (await put(peer, 1))["0"][0] == kept
        with pytest.raises(PeerUnreachable, match=r"within 0\.01 s"):
            await channel.ask(to(address, numbered(3)), fingerprint=b"", timeout_s=0.01)
        await peer.answer(*came["1"], 1.0)
        assert await long == shown(1.0)
        again = asyncio.create_task(channel.ask(to(address, numbered(4)), fingerprint=b"", timeout_s=60.0))
        while "4" not in (later := await put(peer, 1)):
            pass
        assert later["4"][0] != kept
        await peer.answer(*later["4"], 2.0)
        assert await again == shown(2.0)


async def test_a_peer_that_does_not_number_its_answers_gets_a_connection_for_each_question() -> None:
    async with scripted() as (peer, channel, address):
        senders = set()
        for index in range(3):
            asked = start(channel, address, index)
            sender, _, _ = await peer.next()
            senders.add(sender)
            await peer.answer(sender, 0, float(index))
            assert await asked == shown(index)
        assert len(senders) == 3


async def test_an_answer_without_a_number_is_not_guessed() -> None:
    """Over a connection with several open questions: each of them is asked again over a connection of its own."""
    async with scripted() as (peer, channel, address):
        kept = await acquainted(peer, channel, address)
        asked = [start(channel, address, index) for index in range(2)]
        await put(peer, 2)
        await peer.answer(kept, 0, 9.0)
        again = await put(peer, 2)
        assert kept not in {sender for sender, _ in again.values()}
        for reader, where in again.items():
            await peer.answer(*where, float(reader))
        assert await asyncio.gather(*asked) == [shown(0.0), shown(1.0)]


async def test_an_answer_that_comes_twice_is_the_first() -> None:
    async with scripted() as (peer, channel, address):
        asked = start(channel, address)
        sender, header, _ = await peer.next()
        for answer in (1.0, 2.0):
            await peer.answer(sender, header.question, answer)
        assert await asked == shown(1.0)
        again = start(channel, address)
        await peer.answer(*(await put(peer, 1))["0"], 3.0)
        assert await again == shown(3.0)


@pytest.mark.parametrize("noticed", [True, False])
async def test_a_peer_that_has_gone_refuses_the_connection_and_one_that_has_restarted_is_asked_again(
    noticed: bool,
) -> None:
    """Whether or not the loop has noticed the end of the connection before the next question."""
    with asking() as channel:
        address = PLAIN.listen
        for _ in range(2):
            async with listening(replace(PLAIN, listen=address)) as listener:
                address = address_of(listener)
                assert await channel.ask(to(address), fingerprint=b"") == ANSWER
                await seen(listener, connections=1)
                assert open_connections(channel) == 1
            if noticed:
                await until(lambda: open_connections(channel) == 0)
        with pytest.raises(PeerUnreachable, match=r"[Cc]onnect"):
            await channel.ask(to(address), fingerprint=b"")


async def test_a_connection_does_not_wait_for_what_zeromq_has_yet_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python may reuse the identity of a deleted object, and ZeroMQ closes a socket some time after `close`."""
    monkeypatch.setattr(connections, "id", lambda _: 0, raising=False)
    with asking() as channel:
        questions = [channel.ask(to("tcp://127.0.0.1:9"), fingerprint=b"") for _ in range(8)]
        ended = await asyncio.gather(*questions, return_exceptions=True)
    assert [str(error) for error in ended if "onnect" not in str(error)] == []


async def test_a_listener_that_drops_all_connections_is_asked_again() -> None:
    config = limited(PLAIN, side_channel_connections_max=4)
    async with listening(config) as listener:
        with asking() as channel:
            ask = channel.ask(to(address_of(listener)), fingerprint=b"")
            assert await ask == ANSWER
            raw = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(4)]
            assert await channel.ask(to(address_of(listener)), fingerprint=b"") == ANSWER
            await seen(listener, recycled=1)
            for _, writer in raw:
                writer.close()
            assert await channel.ask(to(address_of(listener)), fingerprint=b"") == ANSWER


async def test_readers_that_come_at_once_and_are_all_dropped_get_their_answers() -> None:
    """As after a restart of all decode engines: each over its first connection, and more than a listener takes."""
    config = limited(PLAIN, side_channel_connections_max=8)
    async with listening(config) as listener:
        with contextlib.ExitStack() as readers:
            channels = [readers.enter_context(asking()) for _ in range(12)]
            asked = [channel.ask(to(address_of(listener)), fingerprint=b"") for channel in channels]
            answers = await asyncio.gather(*asked, return_exceptions=True)
        assert answers == [ANSWER] * 12
        assert listener.statistics.recycled > 0


@pytest.mark.parametrize("refusals", [1, REFUSALS_MAX, REFUSALS_MAX + 1])
async def test_a_listener_that_is_not_bound_for_a_moment_is_asked_again(
    refusals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example a listener that has dropped all connections, and binds its port in a later turn of its loop."""
    config, probe, finals = replace(PLAIN, listen=f"tcp://127.0.0.1:{free_ports(1)}"), asking_module._probe, []
    async with contextlib.AsyncExitStack() as stack:

        async def probed(endpoint: str, *, final: bool) -> bool:
            finals.append(final)
            bound = await probe(endpoint, final=final)
            if len(finals) == refusals:
                await stack.enter_async_context(listening(config))
            return bound

        monkeypatch.setattr(asking_module, "_probe", probed)
        channel = stack.enter_context(asking())
        ask = channel.ask(to(config.listen), fingerprint=b"")
        if refusals <= REFUSALS_MAX:
            assert await ask == ANSWER
        else:
            with pytest.raises(PeerUnreachable, match="Errno 111"):
                await ask
        assert finals == [False, False, True][:refusals]


async def test_a_connection_is_kept_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEPT_IDLE_S", 0.2)
    async with listening(PLAIN) as listener:
        with asking(PLAIN) as channel:
            for _ in range(3):
                assert await channel.ask(to(address_of(listener)), fingerprint=b"") == ANSWER
                assert open_connections(channel) == 1
            await seen(listener, connections=1)
            await until(lambda: open_connections(channel) == 0)
            await seen(listener, connections=0)
            assert await channel.ask(to(address_of(listener)), fingerprint=b"") == ANSWER


async def test_of_many_peers_those_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEPT_MAX", 3)
    everywhere = replace(PLAIN, listen="tcp://0.0.0.0:0", advertise_host="127.0.0.1")
    async with listening(everywhere) as listener:
        with asking(PLAIN) as channel:

            async def ask(host: int) -> None:
                address = f"tcp://127.0.0.{host}:{listener.port}"
                assert await channel.ask(to(address), fingerprint=b"") == ANSWER

            await asyncio.gather(*(ask(host) for host in range(1, 41)))
            assert open_connections(channel) == 3
            await seen(listener, connections=3)
            for host in (1, 2, 3, 1, 4):  # 2 was not used for longest
                await ask(host)
            kept = {way.endpoint.split(":")[1][2:] for way in channel._connections._shared}
            assert kept == {"127.0.0.3", "127.0.0.1", "127.0.0.4"}


async def test_closing_leaves_nothing_of_what_was_kept() -> None:
    gc.collect()
    before = files(), threads()
    async with listening(PLAIN) as listener:
        of_listener = threads()
        channel = ZmqSideChannel(PLAIN, ManualClock().now_s)
        assert await channel.ask(to(address_of(listener)), fingerprint=b"") == ANSWER
        assert open_connections(channel) == 1
        channel.close()
        channel.close()
        await until(lambda: threads() == of_listener)
        await seen(listener, connections=0)
    await until(lambda: (files(), threads()) <= before)


async def test_an_abandoned_channel_leaves_nothing_either() -> None:
    async with scripted() as (peer, _, address):
        of_peer = threads()
        channel = ZmqSideChannel(PLAIN, ManualClock().now_s)
        await acquainted(peer, channel, address)
        waiting = start(channel, address)
        await peer.next()
        channel.abandon()
        assert open_connections(channel) == 0
        waiting.cancel()
        await asyncio.wait([waiting])
        await until(lambda: threads() == of_peer)


async def test_a_kept_connection_does_not_wake_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    woken = 0

    def counted(name: str) -> None:
        real = getattr(KeptConnection, name)

        def look(connection: KeptConnection) -> None:
            nonlocal woken
            woken += 1
            real(connection)

        monkeypatch.setattr(KeptConnection, name, look)

    counted("_receive_answers")
    counted("_receive_events")
    loop = asyncio.get_running_loop()
    async with listening(PLAIN) as listener:
        with asking() as channel:
            assert await channel.ask(to(address_of(listener)), fingerprint=b"") == ANSWER
            for _ in range(10):  # what the question has left behind
                await asyncio.sleep(0)
            before, rested = woken, loop.create_future()
            start_s = time.process_time()
            loop.call_later(0.2, rested.set_result, None)
            await rested
            assert before > 0
            assert woken == before
            assert time.process_time() - start_s < 0.1


def open_connections(channel: ZmqSideChannel) -> int:
    return len(channel._connections._open)


def threads() -> int:
    """Of this process, ZeroMQ's included."""
    return len(os.listdir("/proc/self/task"))


def files() -> int:
    return len(os.listdir("/proc/self/fd"))
