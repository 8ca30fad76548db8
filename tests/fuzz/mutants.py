"""Bytes and structures that are almost right: mutations of valid ones, and noise. One seed, one sequence."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec

from kvflow.core.plan.topology import CacheShare, Rank
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.notifications import ReadDone
from kvflow.growing.decline_request import DeclineRequest
from kvflow.stock.wire import encode_question
from kvflow.verify.digest_request import DigestPart, DigestRequest

ODD_NUMBERS = [True, -1, 0, 1, (1 << 31) - 1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1]
ODD_NUMBERS += [0.0, 1e308, float("nan"), float("-inf")]
ODD_TEXTS = ["", "\0", "x" * 5000, "\u202e\u00e9", b"\xff" * 100]
ODD_VALUES = [*ODD_NUMBERS, *ODD_TEXTS, None, [], [0] * 3000, {}, {"": None}, {"type": "metadata"}]
TARGET = Address("producer", Rank(0, 0, 0), "tcp://127.0.0.1:1")
READER = "fuzz/0.0.0#0"


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def torn(rng: Random, data: bytes) -> bytes:
    """The bytes with some bits, bytes or pieces changed, lost, added or doubled."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(len(out) + 1)
        end = min(len(out), at + rng.choice((1, 1, 4, 16)))
        match rng.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.choice((0, 0x7F, 0x80, 0xC1, 0xD9, 0xDD, 0xDF, 0xFF, rng.randrange(256)))
            case 2:
                del out[at:end]
            case 3:
                out[at:at] = rng.randbytes(end - at + 1)
            case 4:
                out[at:at] = out[at:end]
            case _:
                del out[at:]
    return bytes(out)


def bent(rng: Random, value: Any) -> Any:
    """The structure with one of its values replaced, removed, doubled or hidden under another name."""
    root = [copy.deepcopy(value)]
    spots: list[tuple[Any, Any]] = [(root, 0)]
    for holder, key in spots:
        inner = holder[key]
        if isinstance(inner, dict):
            spots.extend((inner, name) for name in inner)
        elif isinstance(inner, list):
            spots.extend((inner, index) for index in range(min(len(inner), 50)))
    holder, key = rng.choice(spots)
    match rng.randrange(5):
        case 0 if holder is not root:
            del holder[key]
        case 1 if isinstance(holder[key], list):
            holder[key] = holder[key] * rng.choice((2, 50))
        case 2 if isinstance(holder, dict):
            holder[str(key) + rng.choice(("", "_", "\0"))] = holder.pop(key)
        case 3 if isinstance(holder[key], int):
            holder[key] += rng.choice((-1, 1, 1 << 16))
        case _:
            holder[key] = rng.choice(ODD_VALUES) if rng.randrange(20) else nested(rng.choice((50, 2000)))
    return root[0]


def mutant(rng: Random, message: msgspec.Struct) -> bytes:
    """A message of ours that went wrong on its way."""
    if rng.random() < 0.5:
        return torn(rng, codec.encode(message))
    return packed_bent(rng, msgspec.msgpack.decode(codec.encode(message)))


def packed_bent(rng: Random, value: Any) -> bytes:
    """The structure with something wrong in it, as bytes."""
    while True:
        try:
            return msgspec.msgpack.encode(bent(rng, value))
        except (OverflowError, RecursionError):
            continue


def requests(rng: Random, cache_shares: tuple[CacheShare, ...]) -> list[messages.Request]:
    """Return one message of each kind. No process listens at the caller's address."""
    digest = rng.randbytes(16)
    caller = Address("fuzz", Rank(0, 0, 0), "tcp://127.0.0.1:1")
    return [
        messages.MetadataRequest(reader=READER, target=TARGET),
        messages.MetadataRequest(reader=READER, target=TARGET, request_id="honest", caller=caller),
        messages.LeaseRequest(reader=READER, target=TARGET, request_id="honest", num_tokens=4, blocks_digest=digest),
        messages.ReleaseRequest(
            reader=READER,
            target=TARGET,
            lease_id="0" * 32,
            cache_shares=cache_shares,
        ),
        DigestRequest(
            reader=READER,
            target=TARGET,
            request_id="honest",
            lease_id="0" * 32,
            definition=1,
            parts=(DigestPart("", (0, 1), 0, 2, 2, 0, 4),),
        ),
        messages.LeaseRequest(reader=READER, target=TARGET, request_id=rng.choice(("honest", "x")), wait_s=0.5),
        messages.LeaseRequest(
            reader=READER, target=TARGET, request_id="honest", lease_id="0" * 32, known=(0,), wait_s=rng.random()
        ),
        DeclineRequest(
            reader=READER, target=TARGET, request_id=rng.choice(("honest", "x")), reason="no", instead=rng.randbytes(9)
        ),
        messages.Goodbye(target=TARGET, sender=Address("reader", Rank(0, 0, 0), "tcp://127.0.0.1:1"), incarnation="0"),
    ]


def non_requests() -> list[msgspec.Struct]:
    """Messages of ours that are no requests."""
    return [
        messages.LeaseAnswer(state=messages.LeaseAnswerState.ENDED),
        messages.Refusal(reason="no", version=codec.PROTOCOL_VERSION),
        messages.Ack(incarnation="i"),
        ReadDone(lease_ids=("0" * 32,), reader=READER, numerator=1, denominator=1),
    ]


def listener_messages(
    rng: Random, fingerprint: bytes, cache_shares: tuple[CacheShare, ...], bytes_max: int
) -> Iterator[list[bytes]]:
    """Messages without end, for a listener: noise, mutants, wrong frames, sizes around its limit."""
    header = codec.our_header(fingerprint)
    while True:
        body = rng.choice([*requests(rng, cache_shares), *non_requests()])
        match rng.randrange(10):
            case 0:
                yield [rng.randbytes(rng.choice((0, 1, 30, 3000))) for _ in range(rng.randrange(1, 7))]
            case 1:
                yield [mutant(rng, header), codec.encode(body)]
            case 2:
                frames = codec.encode_frames(header, messages.MetadataRequest(reader="fuzz/0.0.0#0", target=TARGET))
                yield rng.choice(([b"", *frames], frames[:1], frames[::-1], frames * 2, [*frames, b""], [b""] * 300))
            case 3 if rng.random() < 0.05:
                size = bytes_max + rng.choice((-1, 0, 1, 1000))
                yield [
                    codec.encode(header),
                    codec.encode(body)[:20].ljust(size, rng.choice((b"\0", b"\x91", b"\xc1"))),
                ]
            case 4:
                yield [codec.encode(header), rng.randbytes(rng.randrange(200))]
            case 5:
                yield [codec.encode(header), codec.encode(body)]
            case _:
                yield [codec.encode(header), mutant(rng, body)]


def stock_messages(rng: Random, bytes_max: int) -> Iterator[list[bytes]]:
    """Yield messages for a listener that stock engines ask: damaged questions, and bytes that are no question."""
    while True:
        question = encode_question(rng.choice((0, 0, 1)), rng.choice((0, 0, 1, 7, 130, 1023)))
        match rng.randrange(8):
            case 0:
                few = ([b""], [b"", b""], [b"", question, b""], [question], [b"", b"", question])
                yield rng.choice((*few, [b""] * 300))
            case 1:
                yield [b"", packed_bent(rng, [b"get_meta_msg", 0, 0])]
            case 2:
                yield [b"", rng.randbytes(rng.choice((1, 20, 64, 65, 3000)))]
            case 3:  # one that says that it is huge, and one that is
                yield [b"", rng.choice((b"\xdd", b"\xc6", b"\xdf", b"\xdb")) + b"\xff" * 4 + question]
                if rng.random() < 0.02:
                    yield [b"", question.ljust(bytes_max + rng.choice((-1, 0, 1, 1000)), b"\0")]
            case 4:  # other versions: one item, two, four, another word
                others = ([b"get_meta_msg"], [b"get_meta_msg", 0], [b"get_meta_msg", 0, 0, 0], [b"get_data_msg", 0, 0])
                yield [b"", rng.choice((b"get_meta_msg", *map(msgspec.msgpack.encode, others)))]
            case 5:
                yield [b"", question]
            case _:
                yield [b"", torn(rng, question)]


def messages_of_both_wires(
    rng: Random, fingerprint: bytes, cache_shares: tuple[CacheShare, ...], bytes_max: int
) -> Iterator[list[bytes]]:
    """Messages without end, for a listener that answers both kinds."""
    kinds = (stock_messages(rng, bytes_max), listener_messages(rng, fingerprint, cache_shares, bytes_max))
    while True:
        yield next(rng.choice(kinds))


def stock_text(rng: Random, names: list[str]) -> bytes:
    """A forged notification of a stock reader, of a request that there is or may be, or one gone wrong."""
    name = rng.choice((*names, "x" * 1024, "HB", "", "a,b", "\u00e9", ":"))
    match rng.randrange(6):
        case 0:
            return f"{name}:{rng.choice((0, -1, 1, 2, 1 << 20, 1 << 70, 'x', ''))}".encode()
        case 1:
            return ("HB:" + ",".join(rng.choices(names, k=rng.choice((1, 3, 1000))))).encode()
        case 2:
            return b"PUSH_REG:" + msgspec.msgpack.encode({"request_id": name, "decode_port": 1})
        case 3:
            return rng.randbytes(rng.choice((0, 1, 40, 5000)))
        case _:
            return torn(rng, f"{name}:{rng.choice((1, 2, 3))}".encode())


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
NULL, CURVE = (name.ljust(20, b"\0") + bytes(32) for name in (b"NULL", b"CURVE"))
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + b"\x11" * 120


def tcp_streams(rng: Random) -> Iterator[bytes]:
    """Yield streams of connections that are not ZeroMQ's, or only look like it. An empty stream stays half-open."""
    while True:
        whole = rng.choice((GREETING + NULL + READY + b"\x01\x01a\x00\x01b" * 3, GREETING + CURVE + HELLO))
        match rng.randrange(6):
            case 0:
                yield b""
            case 1:
                yield rng.randbytes(rng.randrange(1, 500))
            case 2:
                yield whole[: rng.randrange(len(whole))]
            case 3:
                yield b"\x01\x00" * rng.randrange(1, 300)  # ZeroMQ 2
            case 4:
                yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
            case _:
                yield torn(rng, whole)
