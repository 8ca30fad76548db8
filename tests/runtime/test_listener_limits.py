"""The cost of one peer for the listener: messages, connections, time of the loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import zmq
import zmq.asyncio
from log_lines import Written
from side_channels import ANSWER, PLAIN, REQUEST, ask, assert_answers, listening, seen
from tests_support import WAIT_S, limited, until

from kvflow.core.protocol import codec, messages
from kvflow.errors import PeerNotReady, PeerUnreachable
from kvflow.runtime.channel.listening import REQUEST_BYTES_MAX, ZmqListener
from kvflow.testing import ManualClock

QUESTION = codec.encode_frames(codec.our_header(b""), REQUEST)


@contextlib.asynccontextmanager
async def dealer(listener: ZmqListener, source: str = "127.0.0.1") -> AsyncIterator[zmq.asyncio.Socket]:
    """A socket that is connected to the listener from `source`."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as opened:
        opened.linger = 0
        opened.connect(f"tcp://{source}:0;127.0.0.1:{listener.port}")
        yield opened


@contextlib.asynccontextmanager
async def connection(listener: ZmqListener) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """One without ZeroMQ on our side."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    yield reader, writer
    writer.close()


async def test_what_comes_too_often_is_not_answered() -> None:
    config, clock = limited(PLAIN, side_channel_requests_per_s_max=3), ManualClock()
    async with listening(config, clock) as listener, dealer(listener) as one, dealer(listener, "127.0.0.2") as two:
        for _ in range(5):
            await one.send_multipart(QUESTION)
        await seen(listener, answered=3, over_rate=2)
        await two.send_multipart(QUESTION)  # another peer
        await seen(listener, answered=4, over_rate=2)
        clock.advance(0.34)  # a third of a second is one request
        for _ in range(2):
            await one.send_multipart(QUESTION)
        await seen(listener, answered=5, over_rate=3)


async def test_nobody_can_choose_the_address_that_it_is_counted_under() -> None:
    """Messages of a peer have its own claims, too, beside the address that ZeroMQ knows."""
    config = limited(PLAIN, side_channel_requests_per_s_max=1)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    said = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x0cPeer-Address\x00\x00\x00\x07" + b"9.9.9.9"
    async with listening(config) as listener:
        for _ in range(2):
            async with connection(listener) as (reader, writer):
                writer.write(greeting + b"\x04" + bytes([len(said)]) + said)
                await reader.readuntil(b"READY")
                writer.write(b"\x00\x01x")
                await writer.drain()
        await seen(listener, dropped=1, over_rate=1)


async def test_garbage_counts_as_asking() -> None:
    config = limited(PLAIN, side_channel_requests_per_s_max=3)
    async with listening(config) as listener, dealer(listener) as one:
        for frames in ([b"x"], [b"x"] * 5, [b"x", b"y"], [b"x", b"y"], QUESTION):
            await one.send_multipart(frames)
        await seen(listener, dropped=3, over_rate=2)


async def test_a_request_that_is_too_large_ends_its_connection_unread() -> None:
    async with listening(PLAIN) as listener:
        long = messages.LeaseRequest(
            reader="r", target=REQUEST.target, request_id="x" * REQUEST_BYTES_MAX, num_tokens=1, blocks_digest=b""
        )
        with pytest.raises(PeerUnreachable, match="closed the connection without an answer"):
            await ask(listener, request=long)
        await assert_answers(listener)


async def test_a_flood_leaves_the_loop_its_turns() -> None:
    """ZeroMQ's sockets do not give way as long as messages are there."""
    steps: list[int] = []

    def taken() -> int:
        """Return the number of handled questions, with or without room for the answer."""
        return listener.statistics.answered + listener.statistics.dropped

    async with listening(limited(PLAIN, side_channel_requests_per_s_max=10_000)) as listener:
        with zmq.Context() as context, context.socket(zmq.DEALER) as flood:
            flood.linger = 0
            flood.connect(f"tcp://127.0.0.1:{listener.port}")
            for _ in range(500):  # from another thread of ZeroMQ's; they wait while this does not
                flood.send_multipart(QUESTION)
            async with asyncio.timeout(WAIT_S):
                while taken() < 500:
                    before = taken()
                    await asyncio.sleep(0)
                    steps.append(taken() - before)
    assert max(steps) <= 1


async def test_zeromq_never_stops_reading_and_sends_no_heartbeats() -> None:
    """ZeroMQ 4.3.5 has aborted processes with other settings. Its default queue of 1,000 is one of these."""
    async with listening(PLAIN) as listener:
        assert listener._socket.getsockopt(zmq.RCVHWM) == 0
        assert listener._socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
        await assert_answers(listener)


async def test_connections_are_counted_down_when_they_end() -> None:
    async with listening(PLAIN) as listener:
        for _ in range(3):
            await assert_answers(listener)
        with socket.create_connection(("127.0.0.1", listener.port)) as raw:
            raw.setblocking(False)
            await seen(listener, connections=1)
            await asyncio.get_running_loop().sock_sendall(raw, b"\xff" * 100)
            await seen(listener, connections=0, rejected=1, recycled=0)


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64, bytes(100), b"\x01\x00" * 300, b"\xff" + bytes(8) + b"\x01\x00" * 300],
    ids=["http", "zeros", "ZeroMQ 2", "half of a greeting"],
)
async def test_bytes_that_are_no_message_change_nothing(data: bytes) -> None:
    """ZeroMQ also delivers messages of its first protocols, without the name of the sender."""
    async with listening(PLAIN) as listener:
        async with connection(listener) as (_, writer):
            writer.write(data)
            await writer.drain()
            await assert_answers(listener)
        await seen(listener, answered=1, refused=0, connections=0)


async def test_too_many_connections_are_all_dropped_and_the_port_stays() -> None:
    config = limited(PLAIN, side_channel_connections_max=8)
    async with listening(config) as listener:
        port = listener.port
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(9)]
        await seen(listener, recycled=1, connections=0)
        for reader, writer in idle:
            with contextlib.suppress(ConnectionError):
                await reader.read()  # what ZeroMQ says first, and the end
            writer.close()
        await assert_answers(listener)
        assert listener.port == port
        await seen(listener, recycled=1, connections=0)


async def test_who_never_finishes_the_handshake_is_dropped() -> None:
    async with listening(replace(PLAIN, handshake_timeout_s=0.05)) as listener, connection(listener) as (reader, _):
        async with asyncio.timeout(WAIT_S):
            await reader.read()
        await seen(listener, connections=0)


async def test_a_burst_of_questions_is_answered_later_and_the_producer_says_so(written: Written) -> None:
    """More than the limit at once, from one address, as behind a NAT: readers ask again by themselves."""
    config, clock = limited(PLAIN, side_channel_requests_per_s_max=50), ManualClock()
    async with listening(config, clock) as listener, asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(listener)) for _ in range(80)]
        await until(lambda: listener.statistics.over_rate >= 30)
        while not all(task.done() for task in asked):
            clock.advance(0.02)
            await asyncio.sleep(0)
    assert [task.result() for task in asked] == [ANSWER] * 80
    assert listener.statistics.answered == 80
    (line,) = (text for text in written.texts if "readers ask again later" in text)
    assert "WARNING" in line
    assert "more than 50 requests a second from 127.0.0.1" in line


async def test_busy_answers_of_a_burst_name_one_time_after_the_other_and_have_a_bound() -> None:
    config = limited(PLAIN, side_channel_requests_per_s_max=2)
    async with listening(config) as listener, dealer(listener) as one:
        pauses: list[float] = []
        for number in range(2 + 20 + 3):
            await one.send_multipart(QUESTION)
            await seen(listener, answered=min(number + 1, 2), over_rate=max(number - 1, 0))
            if number < 2:
                await one.recv_multipart()
            elif number < 22:
                _, body = await one.recv_multipart()
                reply = codec.decode_reply(body)
                assert isinstance(reply, messages.Refusal)
                assert reply.transient, "readers of older versions may try again, too"
                pauses.append(reply.retry_after_s)
        assert pauses == pytest.approx([(number + 1) / 2 for number in range(20)])
        with pytest.raises(zmq.Again):
            await one.recv_multipart(zmq.NOBLOCK)


async def test_a_question_whose_turn_is_after_its_time_says_that_the_peer_is_busy() -> None:
    config = limited(replace(PLAIN, handshake_timeout_s=5.0), side_channel_requests_per_s_max=1)
    async with listening(config) as listener, dealer(listener) as one:
        for _ in range(7):
            await one.send_multipart(QUESTION)
        await seen(listener, answered=1, over_rate=6)
        with pytest.raises(PeerNotReady, match="more than 1 a second are asked") as caught:
            await ask(listener, config=config)
        assert caught.value.retry_after_s == pytest.approx(7.0)
