"""The handshake and the listener against peers that are wrong, mute, hostile or gone (I7, I8)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from random import Random

import msgspec
import pytest
import zmq
import zmq.asyncio
from budgets import budget
from pairs import EnginePair, engine_world, host_of, load_request, open_pair
from tests_support import PATIENT, WAIT_S, altered, small_cache, until

from kvflow import Config, LeaseOutcome, Limits, Runtime, ServeRequest, Ticket
from kvflow.core.cache.layout import BlockShape
from kvflow.core.cache.regions import Device
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import Address
from kvflow.errors import (
    DeadlineExceeded,
    KVFlowError,
    PeerIncompatible,
    PeerNotReady,
    PeerRefused,
    PeerUnreachable,
    PrefillFailed,
    ProtocolError,
)
from kvflow.runtime.channel import connections

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


def ticket_for(pair: EnginePair, port: int, **changes: object) -> Ticket:
    lease = pair.offer([3], "template")
    lease.revoke()
    return altered(lease.ticket, port=port, **changes)


def port_of(runtime: Runtime) -> int:
    return int(runtime.address.rpartition(":")[2])


def reply_frames(body: messages.Reply, version: int = codec.PROTOCOL_VERSION) -> list[bytes]:
    return codec.encode_frames(codec.Header(magic=codec.MAGIC, version=version, fingerprint=b""), body)


def refusal(version: int = codec.PROTOCOL_VERSION, **others: object) -> messages.Refusal:
    return messages.Refusal(reason="no", version=version, **others)


def metadata_of(pair: EnginePair) -> messages.Metadata:
    """Return the real answer of the producer's listener."""
    request = messages.MetadataRequest(reader="test", target=Address("producer", Rank(0, 0, 0), "tcp://127.0.0.1:1"))
    header = codec.our_header(host_of(pair.reader).context.local.compatibility.fingerprint())
    reply = pair.writer._supervisor._answer(header, request)
    assert isinstance(reply, messages.Metadata)
    return reply


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"port": 1}, r"tcp://127\.0\.0\.1:1: .*[Cc]onnect"),
        ({"port": 5600, "host": "no-such-host.invalid"}, "no-such-host"),
    ],
)
async def test_where_nobody_is_a_load_fails_at_once(pair: EnginePair, changes: dict[str, object], message: str) -> None:
    ticket = ticket_for(pair, **changes)
    assert (await pair.fails(PeerUnreachable, ticket, match=message)).peer == ticket.address


async def test_a_host_is_found_by_its_name(pair: EnginePair) -> None:
    await pair.load(pair.offer([3]).ticket.to_params() | {"remote_host": "localhost"})
    pair.assert_loaded([0], [3])


async def test_a_mute_producer_costs_the_bounds_of_who_asks() -> None:
    async with open_pair(BRIEF) as pair, fake_peer(lambda _: None) as port:
        ticket = ticket_for(pair, port)
        assert not await pair.reader.release_blocks(ticket)
        await pair.fails(DeadlineExceeded, ticket, [], match="in phase 'notify'", deadline_s=0.01)
        await pair.fails(PeerUnreachable, ticket, match=r"within 0\.2 s")


async def test_the_load_deadline_covers_the_handshake(pair: EnginePair) -> None:
    async with fake_peer(lambda _: None) as port:
        ticket = ticket_for(pair, port)
        await pair.fails(DeadlineExceeded, ticket, match="in phase 'handshake'", deadline_s=0.05)


async def test_a_release_that_is_answered_by_something_else_told_nobody(pair: EnginePair) -> None:
    for reply in (messages.NOTHING_YET, refusal()):
        async with fake_peer(lambda _, reply=reply: reply_frames(reply)) as port:  # type: ignore[misc]
            assert not await pair.reader.release_blocks(ticket_for(pair, port))


async def test_an_answer_that_is_no_kvflow_message(pair: EnginePair) -> None:
    bad_body = [b"\x93\xa6kvflow\x01\xc4\x00", b"\xff"]
    for frames in ([b""], [b"junk", b"junk"], bad_body, [b"a", b"b", b"c"]):
        async with fake_peer(lambda _, frames=frames: frames) as port:  # type: ignore[misc]
            await pair.fails(ProtocolError, ticket_for(pair, port), match="the answer is not a kvflow message")


async def test_an_answer_larger_than_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWER_BYTES_MAX", 1000)
    async with open_pair() as pair, fake_peer(lambda _: [b"x", b"y" * 2000]) as port:
        await pair.fails(PeerUnreachable, ticket_for(pair, port))


LIES: list[tuple[str, dict[str, object], type[KVFlowError], str]] = [
    ("", {"engine_id": "other"}, PeerRefused, "expected engine 'producer', found 'other'"),
    ("", {"incarnation": "ffff"}, ProtocolError, "agent name: expected '.*#ffff', got"),
    ("cache_shares", {"dtype": "int8"}, PeerIncompatible, "dtype: ours 'float32', theirs 'int8'"),
    ("", {"seals": messages.SealLocation(address=0, count=5, hold_s=0.01)}, ProtocolError, r"\$.seals.address"),
    ("regions", {"bases": [1]}, ProtocolError, "region table: 1 base and 4 strides"),
    ("regions", {"bases": [1, 1], "strides": [4096] * 2}, ProtocolError, "cache share: 2 layers, 2 regions"),
    ("regions", {"block": BlockShape(4, 2, 16, 16, 64)}, PeerIncompatible, "bytes of a head: ours 64, theirs 32"),
    ("regions", {"device": Device("tape", 0)}, PeerIncompatible, "device: ours .*, theirs tape"),
]
"""False claims of a peer, in one of its parts. Other false claims are in `core/protocol/test_claims`."""


async def test_metadata_that_cannot_be_true_or_does_not_fit(pair: EnginePair) -> None:
    honest = metadata_of(pair)
    for part, changes, error, message in LIES:
        if part:
            (only,) = getattr(honest, part)
            changes = {part: (msgspec.structs.replace(only, **changes),)}
        lie = msgspec.structs.replace(honest, **changes)
        async with fake_peer(lambda _, lie=lie: reply_frames(lie)) as port:  # type: ignore[misc]
            await pair.fails(error, ticket_for(pair, port), match=message)
        await pair.reader.forget_peer("producer")  # the next one may be given the same port


async def test_a_refusal_that_cannot_be_true_costs_its_load_and_nothing_else(pair: EnginePair) -> None:
    for changes in ({"tp_size": 0}, {"layers": tuple(range(40_000))}):
        share = msgspec.structs.replace(metadata_of(pair).cache_shares[0], **changes)
        lie = refusal(compatibility=host_of(pair.reader).context.local.compatibility, cache_shares=(share,))
        async with fake_peer(lambda _, lie=lie: reply_frames(lie)) as port:  # type: ignore[misc]
            await pair.fails(ProtocolError, ticket_for(pair, port), match="cache share: |cache_shares")
    await pair.load(pair.offer([3]))


async def test_another_protocol_version_is_refused_by_both_sides(pair: EnginePair) -> None:
    """The listener does so before it reads the body."""
    async with fake_peer(lambda _: reply_frames(refusal(7), version=7)) as port:
        await pair.fails(PeerIncompatible, ticket_for(pair, port), match="kvflow protocol version: ours 6, theirs 7")
    header = codec.Header(magic=codec.MAGIC, version=9, fingerprint=b"")
    reply = await exchange(pair.writer.address, [msgspec.msgpack.encode(header), b"\xff not a body"])
    answer = codec.decode_reply(reply[1])
    assert isinstance(answer, messages.Refusal)
    assert answer.reason == "kvflow protocol version: ours 6, theirs 9"


async def test_another_engine_at_the_address_is_named(pair: EnginePair) -> None:
    ghost = ticket_for(pair, port_of(pair.writer), engine_id="ghost")
    await pair.fails(PeerRefused, ghost, match="unknown engine: expected 'ghost', this is 'producer'")


async def test_an_incompatible_cache_lists_every_difference(pair: EnginePair) -> None:
    config = Config(engine_id="odd", listen="tcp://127.0.0.1:0", model="another model")
    async with Runtime(config, world=engine_world(pair)) as runtime:
        await runtime.register_kv_caches(*small_cache(layers=3, block_size=6))
        with pytest.raises(PeerIncompatible) as caught:
            await runtime.load_blocks(load_request(pair.offer([3])))
    text = str(caught.value)
    for difference in (
        "model: ours 'another model', theirs ''",
        "layers: ours 3 (0, 1, 2), theirs 2 (0, 1)",
        "block_size: ours 6, theirs 4: neither divides the other",
    ):
        assert difference in text
    assert "dtype" not in text


async def test_a_peer_without_a_cache_is_not_ready(pair: EnginePair) -> None:
    async with Runtime(Config(engine_id="producer", listen="tcp://127.0.0.1:0", transport="inproc")) as runtime:
        ticket = ticket_for(pair, port_of(runtime))
        await pair.fails(PeerNotReady, ticket, match="engine 'producer' has no KV cache registered yet")


async def test_a_slow_peer_does_not_delay_another(pair: EnginePair) -> None:
    async with fake_peer(lambda _: None) as port:
        stuck = pair.start(ticket_for(pair, port))
        await pair.load(pair.offer([3]), [1])
        assert not stuck.done()
        stuck.cancel()
        await asyncio.wait([stuck])


async def test_giving_up_a_handshake_does_not_take_it_from_others(pair: EnginePair) -> None:
    lease = pair.offer([3])
    first, second = (pair.start(lease, [block]) for block in (0, 1))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).blocks == 1
    pair.assert_loaded([1], [3])


@pytest.mark.budget
async def test_garbage_does_not_stop_the_listener(pair: EnginePair) -> None:
    rng = Random(7)
    for turn in range(budget(40, 400)):
        frames = [rng.randbytes(rng.randrange(300)) for _ in range(rng.randint(1, 4))]
        await send_only(pair.writer.address, [frames, [b"", *frames], [codec.MAGIC.encode()] * 2])
        if turn % 10 == 9:
            lease = pair.offer([3], f"req {turn}")
            await pair.load(lease)
            assert await lease is LeaseOutcome.READ


async def test_garbage_is_counted() -> None:
    async with open_pair() as pair:
        await exchange(pair.writer.address, [msgspec.msgpack.encode(codec.our_header(b"")), b"\xc1"])
        await send_only(pair.writer.address, [[b"one"], [b"x" * 100_000, b"too large"], [b"not a header", b""]])
        assert pair.listener.refused == 1
        await until(lambda: pair.listener.dropped >= 2)
        await pair.load(pair.offer([3]))


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


async def test_an_offer_that_no_answer_can_carry_is_said_to_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWER_BYTES_MAX", 1 << 14)  # what describes a cache is smaller
    ids = list(range(1 << 13))
    async with open_pair(num_blocks=len(ids)) as pair:
        tokens = len(ids) * host_of(pair.writer).context.local.groups[0].block_size
        introduction = pair.writer.serve_blocks(ServeRequest("hello", [], 0)).ticket
        lease = pair.writer.serve_blocks(ServeRequest("long", ids, tokens))
        ticket = Ticket.rendezvous(introduction, "long")
        error = await pair.fails(
            PrefillFailed, ticket.to_params(), ids, match=r"the answer is too large: 8192 block ids"
        )
        assert "the reader accepts at most 16384" in str(error)
        assert "limits.block_ids_max" in str(error)
        lease.revoke()


def test_a_reader_of_more_block_ids_takes_larger_answers() -> None:
    assert connections.answer_bytes_max(Limits()) == connections.answer_bytes_max(Limits(block_ids_max=1)) == 4 << 20
    assert connections.answer_bytes_max(Limits(block_ids_max=1 << 20)) > 5 * (1 << 20), "an id takes up to 5 bytes"
