"""The handshake and the listener against peers that are wrong, mute, hostile or gone (I7, I8)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import msgspec
import pytest
import zmq
import zmq.asyncio
from budgets import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests_support import PATIENT, WAIT_S, altered, limited, small_cache

from kvflow import Config, LeaseOutcome, LoadRequest, Runtime, ServeRequest, Ticket
from kvflow.core.cache.layout import BlockShape
from kvflow.core.protocol import messages
from kvflow.errors import (
    DeadlineExceeded,
    LeaseExpired,
    PeerIncompatible,
    PeerNotReady,
    PeerRefused,
    PeerUnreachable,
    ProtocolError,
)
from kvflow.runtime.world import World
from kvflow.testing import InprocPair, InprocTransport, inproc_pair

BRIEF = replace(PATIENT, handshake_timeout_s=0.2)
Answer = Callable[[list[bytes]], list[bytes] | None]


@contextlib.asynccontextmanager
async def fake_peer(answer: Answer) -> AsyncIterator[int]:
    """A ROUTER that answers two frames with what `answer` returns, or not at all; yields its port."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    async def serve() -> None:
        while True:
            sender, *frames = await socket.recv_multipart()
            reply = answer(frames)
            if reply is not None:
                await socket.send_multipart([sender, *reply])

    task = asyncio.create_task(serve())
    try:
        yield port
    finally:
        task.cancel()
        await asyncio.wait([task])
        socket.close(linger=0)
        context.term()


def ticket_for(pair: InprocPair, port: int, **changes: object) -> Ticket:
    lease = pair.offer([3], "template")
    lease.revoke()
    return altered(lease.ticket, port=port, **changes)


def reply_frames(body: messages.Reply, version: int = messages.PROTOCOL_VERSION) -> list[bytes]:
    return messages.encode_frames(messages.Header(magic=messages.MAGIC, version=version, fingerprint=b""), body)


def metadata_of(pair: InprocPair) -> messages.Metadata:
    """What the producer's listener really answers."""
    runtime = pair.producer.runtime
    cache = pair.consumer.runtime._supervisor.cache
    assert cache is not None
    request = messages.MetadataRequest(reader="test", target=messages.Target("producer", 0, 0, 0))
    reply = runtime._supervisor._answer(messages.our_header(cache.local.compatibility.fingerprint()), request)
    assert isinstance(reply, messages.Metadata)
    return reply


async def load_from(pair: InprocPair, ticket: Ticket) -> None:
    await pair.consumer.runtime.load_blocks(LoadRequest("req", ticket=ticket, block_ids=[0]))


async def test_a_refused_port_fails_at_once(pair: InprocPair) -> None:
    ticket = ticket_for(pair, 1)
    with pytest.raises(PeerUnreachable, match=r"tcp://127\.0\.0\.1:1: .*[Cc]onnect") as caught:
        await load_from(pair, ticket)
    assert caught.value.peer == "tcp://127.0.0.1:1"


async def test_an_unknown_host_is_unreachable(pair: InprocPair) -> None:
    with pytest.raises(PeerUnreachable, match="no-such-host"):
        await load_from(pair, ticket_for(pair, 5600, host="no-such-host.invalid"))


async def test_a_host_is_found_by_its_name(pair: InprocPair) -> None:
    lease = pair.offer([3])
    ticket = lease.ticket.to_params() | {"remote_host": "localhost"}
    await pair.consumer.runtime.load_blocks(LoadRequest("req", ticket=ticket, block_ids=[0]))
    pair.assert_loaded([0], [3])


async def test_a_mute_peer_costs_the_timeout_and_names_it() -> None:
    async with inproc_pair(config=BRIEF) as pair, fake_peer(lambda frames: None) as port:
        with pytest.raises(PeerUnreachable, match=r"within 0\.2 s"):
            await load_from(pair, ticket_for(pair, port))


async def test_a_mute_producer_costs_a_release_its_bound() -> None:
    async with inproc_pair(config=BRIEF) as pair, fake_peer(lambda _: None) as port:
        ticket = ticket_for(pair, port)
        assert not await pair.consumer.runtime.release_blocks(ticket)
        request = LoadRequest("req", ticket=ticket, block_ids=[], deadline_s=0.01)
        with pytest.raises(DeadlineExceeded, match="in phase 'notify'"):
            await pair.consumer.runtime.load_blocks(request)


@pytest.mark.parametrize(
    "reply",
    [
        messages.ClockShown(incarnation="i", clock_s=1.0),
        messages.Refusal(reason="no", version=messages.PROTOCOL_VERSION),
    ],
)
async def test_a_release_that_is_answered_by_something_else_told_nobody(
    pair: InprocPair, reply: messages.Reply
) -> None:
    async with fake_peer(lambda _: reply_frames(reply)) as port:
        assert not await pair.consumer.runtime.release_blocks(ticket_for(pair, port))


async def test_the_load_deadline_covers_the_handshake(pair: InprocPair) -> None:
    async with fake_peer(lambda frames: None) as port:
        request = LoadRequest("req", ticket=ticket_for(pair, port), block_ids=[0], deadline_s=0.05)
        with pytest.raises(DeadlineExceeded, match="in phase 'handshake'"):
            await pair.consumer.runtime.load_blocks(request)


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"junk", b"junk"], [b"\x93\xa6kvflow\x01\xc4\x00", b"\xff"], [b"a", b"b", b"c"]],
    ids=["one frame", "junk", "bad body", "three frames"],
)
async def test_an_answer_that_is_no_kvflow_message(pair: InprocPair, frames: list[bytes]) -> None:
    async with fake_peer(lambda _: frames) as port:
        with pytest.raises(ProtocolError, match="the answer is no kvflow message"):
            await load_from(pair, ticket_for(pair, port))


async def test_an_answer_larger_than_the_limit_is_not_read() -> None:
    config = limited(PATIENT, side_channel_message_bytes_max=1000)
    async with inproc_pair(config=config) as pair, fake_peer(lambda _: [b"x", b"y" * 2000]) as port:
        with pytest.raises(PeerUnreachable):
            await load_from(pair, ticket_for(pair, port))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"engine_id": "other"}, PeerRefused, "expected engine 'producer', found 'other'"),
        ({"incarnation": "ffff"}, ProtocolError, "agent name: expected '.*#ffff', got"),
        ({"clock_s": float("nan")}, ProtocolError, "clock: nan s"),
        ({"seals": messages.SealLocation(address=0, count=5, hold_s=0.01)}, ProtocolError, "seal table: 5 seals at 0"),
    ],
)
async def test_metadata_that_contradicts_itself(
    pair: InprocPair, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    lie = msgspec.structs.replace(metadata_of(pair), **changes)
    async with fake_peer(lambda _: reply_frames(lie)) as port:
        with pytest.raises(error, match=message):
            await load_from(pair, ticket_for(pair, port))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"bases": [1]}, ProtocolError, "region table: 1 bases and 4 strides"),
        ({"num_blocks": 1 << 62}, ProtocolError, "region table: base"),
        ({"bases": [1], "strides": [4096]}, ProtocolError, "region table: 1 regions, parts of a layer"),
        ({"bases": [1, 1], "strides": [4096] * 2}, ProtocolError, "cache share: 2 layers, 2 regions"),
        ({"block": BlockShape(4, 2, 16, 16, 64)}, PeerIncompatible, "bytes of a head: ours 64, theirs 32"),
        ({"block": BlockShape(4, 2, 32, 16, 64)}, ProtocolError, "region table: 16 blocks of shape"),
        ({"block": BlockShape(2, 4, 32, 32, 64)}, ProtocolError, "cache share: block_size 4, kv_heads 2"),
        ({"device_kind": "tape"}, PeerIncompatible, "device: ours .*, theirs tape"),
    ],
)
async def test_region_tables_that_cannot_be_true_or_do_not_fit(
    pair: InprocPair, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    honest = metadata_of(pair)
    lie = msgspec.structs.replace(honest, regions=msgspec.structs.replace(honest.regions, **changes))
    async with fake_peer(lambda _: reply_frames(lie)) as port:
        with pytest.raises(error, match=message):
            await load_from(pair, ticket_for(pair, port))


@pytest.mark.parametrize(
    "changes",
    [{"tp_size": 0}, {"block_size": 0}, {"kv_heads": -1}, {"layers": (1 << 40,)}, {"layers": tuple(range(40_000))}],
    ids=str,
)
async def test_a_refusal_that_cannot_be_true_costs_its_load_and_nothing_else(
    pair: InprocPair, changes: dict[str, object]
) -> None:
    honest = metadata_of(pair)
    cache = pair.consumer.runtime._supervisor.cache
    assert cache is not None
    refusal = messages.Refusal(
        reason="no",
        version=messages.PROTOCOL_VERSION,
        compatibility=cache.local.compatibility,
        cache_share=msgspec.structs.replace(honest.cache_share, **changes),
    )
    async with fake_peer(lambda _: reply_frames(refusal)) as port:
        with pytest.raises(ProtocolError, match="cache share: "):
            await load_from(pair, ticket_for(pair, port))
    lease = pair.offer([3])
    await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0]))


async def test_an_engine_of_another_protocol_version(pair: InprocPair) -> None:
    refusal = messages.Refusal(reason="no", version=7)
    async with fake_peer(lambda _: reply_frames(refusal, version=7)) as port:
        with pytest.raises(PeerIncompatible, match="kvflow protocol version: ours 3, theirs 7"):
            await load_from(pair, ticket_for(pair, port))


async def test_the_listener_refuses_another_version_before_it_reads_the_body(pair: InprocPair) -> None:
    header = messages.Header(magic=messages.MAGIC, version=9, fingerprint=b"")
    reply = await exchange(pair.producer.runtime.address, [msgspec.msgpack.encode(header), b"\xff not a body"])
    refusal = messages.decode_reply(reply[1])
    assert isinstance(refusal, messages.Refusal)
    assert refusal.reason == "kvflow protocol version: ours 3, theirs 9"


async def test_another_engine_at_the_address_is_named(pair: InprocPair) -> None:
    port = int(pair.producer.runtime.address.rpartition(":")[2])
    with pytest.raises(PeerRefused, match="unknown engine: expected 'ghost', this is 'producer'"):
        await load_from(pair, ticket_for(pair, port, engine_id="ghost"))


async def test_an_incompatible_cache_lists_every_difference(pair: InprocPair) -> None:
    kv_caches, layout = small_cache(layers=3, block_size=6)
    config = Config(engine_id="odd", listen="tcp://127.0.0.1:0", model="another model")
    network = pair.producer.transport._network
    async with Runtime(config, world=World(transport=lambda _, name: InprocTransport(name, network))) as runtime:
        await runtime.register_kv_caches(kv_caches, layout)
        lease = pair.offer([3])
        with pytest.raises(PeerIncompatible) as caught:
            await runtime.load_blocks(LoadRequest("req", ticket=lease.ticket, block_ids=[0]))
        lease.revoke()
    text = str(caught.value)
    for difference in (
        "model: ours 'another model', theirs ''",
        "layers: ours 3 (0, 1, 2), theirs 2 (0, 1)",
        "block_size: ours 6, theirs 4: neither divides the other",
    ):
        assert difference in text
    assert "dtype" not in text


async def test_a_peer_without_a_cache_is_not_ready(pair: InprocPair) -> None:
    config = Config(engine_id="producer", listen="tcp://127.0.0.1:0", transport="inproc")
    async with Runtime(config) as runtime:
        port = int(runtime.address.rpartition(":")[2])
        with pytest.raises(PeerNotReady, match="engine 'producer' has no KV cache registered yet"):
            await load_from(pair, ticket_for(pair, port))


async def test_a_slow_peer_does_not_delay_another(pair: InprocPair) -> None:
    async with fake_peer(lambda _: None) as port:
        stuck = asyncio.create_task(load_from(pair, ticket_for(pair, port)))
        lease = pair.offer([3])
        await pair.consumer.runtime.load_blocks(pair.wanted(lease, [1]))
        assert not stuck.done()
        stuck.cancel()
        await asyncio.wait([stuck])


async def test_giving_up_a_handshake_does_not_take_it_from_others(pair: InprocPair) -> None:
    lease = pair.offer([3])
    runtime = pair.consumer.runtime
    first = asyncio.create_task(runtime.load_blocks(pair.wanted(lease, [0])))
    second = asyncio.create_task(runtime.load_blocks(pair.wanted(lease, [1])))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).blocks == 1
    pair.assert_loaded([1], [3])


async def test_a_restarted_producer_never_satisfies_an_old_ticket(pair: InprocPair) -> None:
    """Same name, same address, new incarnation: the reader learns it in the handshake, the lease is gone."""
    old = pair.offer([3])
    await pair.consumer.runtime.load_blocks(pair.wanted(old, [0]))
    port = int(pair.producer.runtime.address.rpartition(":")[2])
    network = pair.producer.transport._network
    unread = pair.offer([4], "unread")
    await pair.producer.runtime.aclose()
    config = Config(engine_id="producer", listen=f"tcp://127.0.0.1:{port}")
    kv_caches, layout = small_cache(num_blocks=16, fill=5.0)
    async with Runtime(config, world=World(transport=lambda _, name: InprocTransport(name, network))) as reborn:
        await reborn.register_kv_caches(kv_caches, layout)
        with pytest.raises(LeaseExpired, match="engine 'producer' has restarted"):
            await pair.consumer.runtime.load_blocks(pair.wanted(unread, [1]))
        same = reborn.serve_blocks(ServeRequest("unread", block_ids=[4], num_tokens=4))
        assert not await pair.consumer.runtime.release_blocks(unread.ticket)
        assert not (await pair.consumer.runtime.load_blocks(pair.wanted(unread, []))).notified
        assert same.state == "offered"
        same.revoke()
        lease = reborn.serve_blocks(ServeRequest("new", block_ids=[2], num_tokens=4))
        await pair.consumer.runtime.load_blocks(pair.wanted(lease, [1]))
        assert await lease is LeaseOutcome.READ
    for tensor in pair.consumer.kv_caches.values():
        assert (tensor[:, 1] == 5.0).all()


@examples(25, 60, suppress_health_check=list(HealthCheck))
@given(frames=st.lists(st.binary(max_size=300), min_size=1, max_size=4))
async def test_garbage_does_not_stop_the_listener(frames: list[bytes]) -> None:
    async with inproc_pair(config=PATIENT) as pair:
        await send_only(pair.producer.runtime.address, [frames, [b"", *frames], [messages.MAGIC.encode()] * 2])
        lease = pair.offer([3])
        await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0]))
        assert await lease is LeaseOutcome.READ


async def test_garbage_is_counted() -> None:
    config = limited(PATIENT, side_channel_message_bytes_max=10_000)
    async with inproc_pair(config=config) as pair:
        runtime = pair.producer.runtime
        valid_header = msgspec.msgpack.encode(messages.our_header(b""))
        await exchange(runtime.address, [valid_header, b"\xc1"])
        await send_only(runtime.address, [[b"one"], [b"x" * 20_000, b"too large"], [b"not a header", b""]])
        statistics = runtime.statistics().listener
        assert statistics is not None
        assert statistics.refused == 1
        async with asyncio.timeout(WAIT_S):
            while (now := runtime.statistics().listener) is not None and now.dropped < 2:
                await asyncio.sleep(0)
        lease = pair.offer([3])
        await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0]))


async def exchange(address: str, frames: list[bytes]) -> list[bytes]:
    """Send raw frames and return the answer."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        await socket.send_multipart(frames)
        reply: list[bytes] = await socket.recv_multipart()
        return reply


async def send_only(address: str, messages: list[list[bytes]]) -> None:
    """Send raw messages that get no answer; lingers until they have left."""
    with zmq.asyncio.Context() as context:
        for frames in messages:
            with context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, int(WAIT_S * 1000))
                socket.connect(address)
                await socket.send_multipart(frames)
