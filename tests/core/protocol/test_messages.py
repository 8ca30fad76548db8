"""Messages: what is written can be read, and what cannot be right is refused and nothing else happens."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import inspect

from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.cache.layout import BlockShape, CacheLayout
from kvflow.core.cache.regions import Device, Regions
from kvflow.core.plan.topology import CacheShare, Rank
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import agent_name
from kvflow.core.protocol.claims import (
    all_regions_from_wire,
    check_cache_shares,
    check_seals,
    check_sets,
    regions_from_wire,
    regions_to_wire,
)
from kvflow.core.protocol.compatibility import Compatibility, compatibility_of
from kvflow.core.protocol.notifications import Notification, ReadDone, Renew, joined, leases_max
from tests.core.plans import SHARE
from tests.support.budgets import examples
from tests.support.tests_support import each

LEASE_ID = "0123456789abcdef0123456789abcdef"
FACTS = Compatibility(model="llama", dtype="bfloat16", kv_format="plain", attention="K and V", head_size="128")
BLOCK = BlockShape(tokens=4, heads=2, run=8, token_stride=16, head_stride=8)
REGIONS = messages.RegionTable(
    bases=[4096, 8192],
    strides=[64, 64],
    block=BLOCK,
    parts=("K", "V"),
    num_blocks=4,
    device_kind="cpu",
    device_index=0,
)
HOLDING = msgspec.structs.replace(
    SHARE, tp_rank=1, tp_size=2, pp_size=3, layers=(7,), kv_heads=2, model_kv_heads=4, block_size=4
)
METADATA = messages.Metadata(
    engine_id="prefill-0",
    incarnation="8f14e45fceea167a",
    clock_s=86400.25,
    cache_shares=(HOLDING,),
    agent_metadata=b"\x00agent\xff",
    agent_metadata_crc32=7,
    regions=(REGIONS,),
    groups=(GroupFacts(name="kv", block_size=4),),
    seals=messages.SealLocation(address=4096, count=16, hold_s=0.02),
    staged=False,
)
TARGET = messages.Target("prefill-0", dp_rank=0, pp_rank=2, tp_rank=1)
REQUEST = messages.MetadataRequest(reader="decode-0/0.0.0#1", target=TARGET)
OF_REQUEST = {"request_id": "req-1", "num_tokens": 41, "blocks_digest": messages.digest_of((3, 7))}
QUESTION = messages.LeaseRequest(reader="decode-0/0.0.0#1", target=TARGET, **OF_REQUEST)
RELEASE = messages.ReleaseRequest(
    reader="decode-0/0.0.0#1", target=TARGET, **OF_REQUEST, lease_id=LEASE_ID, cache_shares=(HOLDING,)
)
FOUND = messages.LeaseFound(
    incarnation="8f14e45f", clock_s=86400.25, expires_s=86430.5, lease_id=LEASE_ID, seal_index=17, block_ids=None
)
DIGESTS = messages.DigestRequest(
    reader="decode-0/0.0.0#1",
    target=TARGET,
    request_id="req",
    lease_id=LEASE_ID,
    definition=1,
    parts=(messages.DigestPart("", (0, 7), 8, 4, 32, 16, 41), messages.DigestPart("conv.x", (3,), 0, 1, 2, 40, 41)),
)
NEWS_QUESTION = messages.NewsRequest(
    reader="decode-0/0.0.0#1", target=TARGET, request_id="req", lease_id=LEASE_ID, known=(3, 0), wait_s=9.5
)
OFFER = messages.Offer(
    lease=FOUND, num_tokens=41, ttl_s=30.0, block_ids=((3, 7), (5,)), extends=True, prompt_digest="0" * 32
)
DECODERS: dict[str, tuple[Callable[[bytes], object], list[msgspec.Struct]]] = {
    "header": (codec.decode_header, [codec.our_header(b""), codec.our_header(FACTS.fingerprint())]),
    "request": (
        codec.decode_request,
        [
            REQUEST,
            QUESTION,
            RELEASE,
            msgspec.structs.replace(RELEASE, lease_id=None),
            messages.ClockRequest(reader="decode-0/0.0.0#1", target=TARGET),
            DIGESTS,
            msgspec.structs.replace(DIGESTS, parts=()),
            messages.OfferRequest(reader="decode-0/0.0.0#1", target=TARGET, request_id="secret", wait_s=9.5),
            NEWS_QUESTION,
            msgspec.structs.replace(NEWS_QUESTION, known=()),
        ],
    ),
    "reply": (
        codec.decode_reply,
        [
            METADATA,
            msgspec.structs.replace(METADATA, staged=True),
            FOUND,
            msgspec.structs.replace(FOUND, block_ids=(3, 1)),
            messages.Released(incarnation="8f14e45f"),
            messages.ClockShown(incarnation="8f14e45f", clock_s=-1.5),
            messages.Digests(values=()),
            messages.Digests(values=(0, (1 << 64) - 1)),
            OFFER,
            msgspec.structs.replace(OFFER, lease=None, block_ids=()),
            messages.Declined(reason="no room"),
            messages.News(state=messages.LeaseNews.OPEN, more_block_ids=((3,), ())),
            messages.News(state=messages.LeaseNews.COMPLETE, payload=b"\x00token"),
            messages.News(state=messages.LeaseNews.FAILED, reason="out of memory"),
            messages.NoLease(ended=True),
            messages.NoLease(ended=False),
            messages.Refusal(reason="no such rank", version=1),
            messages.Refusal(reason="differs", version=1, compatibility=FACTS, cache_shares=(HOLDING,)),
        ],
    ),
    "notification": (
        codec.decode_notification,
        [
            ReadDone(lease_ids=(LEASE_ID,), reader="decode-0/0.0.0#1", numerator=2, denominator=64),
            Renew(lease_ids=(), reader="decode-0/0.0.0#1"),
            Renew(lease_ids=(LEASE_ID, LEASE_ID[::-1]), reader="decode-0/0.0.0#1"),
        ],
    ),
}


# --- messages


@each("kind", DECODERS)
def test_messages_survive_the_wire(kind: str) -> None:
    decode, examples = DECODERS[kind]
    for message in examples:
        assert decode(codec.encode(message)) == message


def test_frames_are_a_header_and_a_body() -> None:
    header, body = codec.encode_frames(codec.our_header(b"f" * 16), REQUEST)
    assert codec.decode_header(header) == codec.Header(
        magic="kvflow", version=codec.PROTOCOL_VERSION, fingerprint=b"f" * 16
    )
    assert codec.decode_request(body) == REQUEST


def test_a_header_of_another_version_is_read() -> None:
    """So that a newer peer can be told which version we speak."""
    newer = codec.Header(magic="kvflow", version=codec.PROTOCOL_VERSION + 1, fingerprint=b"")
    assert codec.decode_header(codec.encode(newer)) == newer
    with_more = msgspec.msgpack.encode(["kvflow", 9, b"", 7, {"new": "field"}])
    assert codec.decode_header(with_more).version == 9


def test_a_header_may_leave_out_which_question_it_is_of() -> None:
    short = msgspec.msgpack.encode(["kvflow", codec.PROTOCOL_VERSION, b""])
    assert codec.decode_header(short) == codec.our_header(b"")
    assert codec.decode_header(codec.encode(codec.our_header(b"", 7))).question == 7


@each(
    "header",
    [
        codec.Header(magic="kvfl0w", version=1, fingerprint=b""),
        codec.Header(magic="", version=1, fingerprint=b""),
        codec.Header(magic="kvflow", version=1, fingerprint=b"x" * 65),
    ],
)
def test_a_header_that_is_not_ours_is_refused(header: codec.Header) -> None:
    with pytest.raises(codec.WireError):
        codec.decode_header(codec.encode(header))


@each("kind", DECODERS)
def test_a_message_of_another_kind_is_refused(kind: str) -> None:
    decode, _ = DECODERS[kind]
    for other, (_, samples) in DECODERS.items():
        for message in samples:
            if other != kind:
                with pytest.raises(codec.WireError):
                    decode(codec.encode(message))


def only_wire_errors(payload: bytes) -> None:
    """Whatever the bytes are: a message of its kind or a WireError. A second pass must agree with the first."""
    for decode, samples in DECODERS.values():
        try:
            message = decode(payload)
        except codec.WireError:
            continue
        assert type(message) in {type(known) for known in samples}
        assert isinstance(message, msgspec.Struct)
        assert decode(codec.encode(message)) == message


@examples(200, 1400)
@given(payload=st.binary(max_size=80))
@example(payload=b"")
@example(payload=b"\xc1")
@example(payload=b"\x91" * 100_000)
@example(payload=b"\x81\xa1a" * 100_000)
@example(payload=b"\x82\xa4type\xa8metadata\xa1x" + b"\x91" * 100_000)
@example(payload=b"\x84" + b"\xa6reason\x90" * 4)
@example(payload=b"\xdd\xff\xff\xff\xff")
@example(payload=b"\xdf\xff\xff\xff\xff")
@example(payload=b"\xc6\xff\xff\xff\xff")
def test_random_bytes_raise_wire_errors_only(payload: bytes) -> None:
    only_wire_errors(payload)


NAMES = ["type", "engine_id", "regions", "seals", "reason", "version", "ended", "lease_id", "target", "cache_shares"]
TAGS = ["kvflow", "get_metadata", "find_lease", "metadata", "lease", "no_lease", "refusal", "read_done", LEASE_ID]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=6)
    | st.sampled_from(TAGS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=8,
)


@examples(200, 1000)
@given(value=VALUES)
def test_valid_msgpack_of_another_shape_raises_wire_errors_only(value: object) -> None:
    only_wire_errors(msgspec.msgpack.encode(value))


ENCODED = [codec.encode(message) for _, examples in DECODERS.values() for message in examples]


@examples(200, 1400)
@given(data=st.data())
def test_damaged_messages_raise_wire_errors_only(data: st.DataObject) -> None:
    payload = bytearray(data.draw(st.sampled_from(ENCODED)))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(payload) - 1))
        match data.draw(st.sampled_from(["flip", "insert", "cut"])):
            case "flip":
                payload[position] = data.draw(st.integers(0, 255))
            case "insert":
                payload[position:position] = data.draw(st.binary(min_size=1, max_size=6))
            case "cut":
                del payload[position + 1 :]
    only_wire_errors(bytes(payload))


@each(
    ("path", "value"),
    [
        ("engine_id", b"prefill-0"),
        ("cache_shares.0.tp_rank", True),
        ("cache_shares.0.tp_rank", 0.0),
        ("cache_shares.0.layers", [7, "8"]),
        ("regions.0.block", [4, 2, 8, 16]),
        ("regions.0.block", [4, 2, 8, 16, 8, 1]),
        ("seals", None),
        ("staged", 1),
    ],
)
def test_decoding_does_not_convert(path: str, value: object) -> None:
    raw = where = msgspec.to_builtins(METADATA, builtin_types=(bytes,))
    *parents, field = (int(part) if part.isdigit() else part for part in path.split("."))
    for parent in parents:
        where = where[parent]
    where[field] = value
    with pytest.raises(codec.WireError, match=field):
        codec.decode_reply(msgspec.msgpack.encode(raw))


@each("body", [["read_done", LEASE_ID, "r"], ["read_done", LEASE_ID, "r", True, 1], ["renew", LEASE_ID, "r"]])
def test_a_notification_of_another_shape_is_refused(body: list[object]) -> None:
    """Such as of a reader of version 1."""
    with pytest.raises(codec.WireError):
        codec.decode_notification(msgspec.msgpack.encode(body))


@given(reader=st.text(max_size=300), bytes_max=st.integers(1, 1 << 17))
def test_as_many_renewals_as_fit_into_a_notification(reader: str, bytes_max: int) -> None:
    count = leases_max(reader, bytes_max)
    size = len(codec.encode(Renew(lease_ids=(LEASE_ID,) * count, reader=reader)))
    assert count == 1 or size <= bytes_max
    done = ReadDone(lease_ids=(LEASE_ID,) * (count + 2), reader=reader, numerator=1 << 31, denominator=1 << 31)
    assert len(codec.encode(done)) > bytes_max


def test_what_many_readers_tell_is_joined() -> None:
    def done(lease_ids: str, numerator: int = 1) -> bytes:
        return codec.encode(ReadDone(tuple(lease_ids), "reader", numerator, 2))

    told = joined([done("a"), done("b", 2), done("cd"), done("e")], leases_most=3)
    assert told == [done("acd"), done("e"), done("b", 2)]


def unbounded(kind: Any, place: str, seen: set[type]) -> Iterator[str]:
    """The places in a type where a number, text or list of any size fits."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            if (kind.ge is None and kind.gt is None) or (kind.le is None and kind.lt is None):
                yield place
        case inspect.StrType() | inspect.BytesType():
            if kind.max_length is None:
                yield place
        case inspect.ListType() | inspect.VarTupleType():
            if kind.max_length is None:
                yield place
            yield from unbounded(kind.item_type, place + "[]", seen)
        case inspect.UnionType():
            for one in kind.types:
                yield from unbounded(one, place, seen)
        case inspect.StructType() | inspect.NamedTupleType():
            if kind.cls not in seen:
                seen.add(kind.cls)
                for field in kind.fields:
                    yield from unbounded(field.type, f"{kind.cls.__name__}.{field.name}", seen)
        case inspect.BoolType() | inspect.EnumType() | inspect.NoneType():
            pass
        case _:
            yield f"{place}: {kind}"


def test_every_field_of_every_message_has_bounds() -> None:
    """So whatever is decoded is of a size, in a range: a digest's 64 bits are what MessagePack has."""
    seen: set[type] = set()
    for kind in (codec.Header, messages.Request, messages.Reply, Notification):
        places = [*unbounded(inspect.type_info(kind), "", seen)]
        assert places == (["Digests.values[]"] if kind is messages.Reply else [])
    assert {type(message) for _, samples in DECODERS.values() for message in samples} <= seen
    assert {GroupFacts, CacheShare, BlockShape} <= seen


HOSTILE = ["x" * 200_000, "a\n2026-01-01 ERROR \x1b[2J", -1, 1 << 63, float("nan"), float("-inf"), -1e-9, True, None]
HOSTILE += [b"x" * (1 << 21), [0] * (1 << 17), [[0]] * 2000, [-1], ["x" * 200_000], [[1 << 63]], {}, 1.5]


def altered(value: Any, hostile: Any) -> Iterator[Any]:
    """A message with each of its fields in turn, and what they hold, replaced."""
    for key in value if isinstance(value, dict) else range(min(len(value), 8)):
        changed = value.copy()
        changed[key] = hostile
        yield changed
        if isinstance(value[key], dict | list):
            for inner in altered(value[key], hostile):
                changed = value.copy()
                changed[key] = inner
                yield changed


@each("kind", DECODERS)
def test_no_field_carries_what_could_not_be_said(kind: str) -> None:
    """What is decoded can be encoded, compared and printed; what is refused is told in a line."""
    decode, samples = DECODERS[kind]
    for message in {type(sample): sample for sample in samples}.values():
        plain = msgspec.msgpack.decode(codec.encode(message))
        for hostile in HOSTILE:
            for changed in altered(plain, hostile):
                told = ""
                try:
                    found = decode(msgspec.msgpack.encode(changed))
                    assert decode(codec.encode(found)) == found
                except codec.WireError as error:
                    told = str(error)
                assert told.isprintable()
                assert len(told) < 400


StructT = TypeVar("StructT", bound=msgspec.Struct)


def sent(value: StructT) -> StructT:
    """A struct as it arrives: within the bounds of its type, or refused."""
    try:
        found: StructT = codec._decode(codec.encode(value), type(value))
    except OverflowError as error:
        raise codec.WireError(f"out of range: {error}") from error
    return found


@each(
    ("decode", "body", "told"),
    [
        (
            codec.decode_request,
            {"type": "get_clock", "reader": "r" * 5000},
            "length <= 4096 - at `$.reader`, got 'rrr",
        ),
        (
            codec.decode_request,
            {"type": "get_clock", "reader": "r", "target": ["e", 0, -7, 0]},
            "`$.target.pp_rank`, got -7",
        ),
        (codec.decode_notification, ["read_done", ["a"], "r", -1, 2], ">= 0 - at `$.numerator`, got -1"),
        (codec.decode_header, ["kvflow", -2, b""], ">= 0 - at `$.version`, got -2"),
    ],
)
def test_a_refusal_names_field_bound_and_value(decode: Callable[[bytes], Any], body: object, told: str) -> None:
    with pytest.raises(codec.WireError, match=re.escape(told)):
        decode(msgspec.msgpack.encode(body))


def test_a_refused_lease_id_is_not_repeated() -> None:
    body = {"type": "release", "reader": "r", "target": ["e", 0, 0, 0], "request_id": "x", "num_tokens": 1}
    with pytest.raises(codec.WireError, match="lease_id") as caught:
        codec.decode_request(msgspec.msgpack.encode({**body, "blocks_digest": b"", "lease_id": "5ec2e7" * 9}))
    assert "5ec2e7" not in str(caught.value)


@each("clock_s", [float("nan"), float("inf"), float("-inf")])
def test_no_clock_shows_that(clock_s: float) -> None:
    sent(messages.ClockShown(incarnation="a", clock_s=-1e300))
    with pytest.raises(codec.WireError, match="clock_s"):
        sent(messages.ClockShown(incarnation="a", clock_s=clock_s))


# --- regions and seals


def shape_of(tokens: int, heads: int, run: int, order: str) -> BlockShape:
    token_stride, head_stride = (heads * run, run) if order == "NHD" else (run, tokens * run)
    return BlockShape(tokens, heads, run, token_stride, head_stride)


shapes = st.builds(
    shape_of, st.integers(1, 1 << 8), st.integers(1, 1 << 6), st.integers(1, 1 << 6), st.sampled_from(["NHD", "HND"])
)


@examples(25, 50)
@given(
    data=st.data(),
    blocks=st.integers(1, 1 << 20),
    block=shapes,
    parts=st.sampled_from([("K", "V"), ("KV",), ("latent",)]),
    device=st.integers(0, 7),
)
def test_region_tables_survive_the_wire(
    data: st.DataObject, blocks: int, block: BlockShape, parts: tuple[str, ...], device: int
) -> None:
    count = data.draw(st.integers(1, 10)) * len(parts)
    bases = data.draw(st.lists(st.integers(1, 1 << 62), min_size=count, max_size=count))
    strides = data.draw(st.lists(st.integers(block.size_bytes, 1 << 40), min_size=count, max_size=count))
    regions = Regions(
        bases=np.array(bases, dtype=np.uint64),
        strides=np.array(strides, dtype=np.uint64),
        block=block,
        parts=parts,
        num_blocks=blocks,
        device=Device("cuda", device),
    )
    table = msgspec.msgpack.decode(codec.encode(regions_to_wire(regions)), type=messages.RegionTable)
    back = regions_from_wire(table)
    assert (back.bases.tolist(), back.strides.tolist()) == (bases, strides)
    assert back.bases.dtype == back.strides.dtype == np.dtype(np.uint64)
    assert (back.block, back.parts, back.num_blocks, back.device) == (block, parts, blocks, regions.device)


@each(
    "changes",
    [
        {"bases": [], "strides": []},
        {"strides": [64]},
        {"bases": [1] * ((1 << 16) + 1), "strides": [64] * ((1 << 16) + 1)},
        {"num_blocks": 0},
        *({"block": BLOCK._replace(**{axis: value})} for axis in BLOCK._fields for value in (0, -8, 1 << 31, 1 << 70)),
        {"block": BlockShape(tokens=4, heads=2, run=8, token_stride=8, head_stride=16)},  # tokens of 2 heads overlap
        {"block": BlockShape(tokens=4, heads=2, run=8, token_stride=8, head_stride=64)},  # a gap
        {"block": BlockShape(tokens=-4, heads=-2, run=8, token_stride=-16, head_stride=8)},
        {"parts": ()},
        {"parts": ("K",)},
        {"parts": ("K", "V", "K", "V")},
        {"parts": ("x" * 100_000,)},
        {"bases": [4096] * 3, "strides": [64] * 3},  # K and V, and a K
        {"bases": [4096, 0]},
        {"strides": [64, 63]},
        {"block": shape_of(5, 2, 8, "NHD")},
        {"bases": [4096, (1 << 64) - 64]},
        {"num_blocks": (1 << 64) - 1, "strides": [(1 << 64) - 1] * 2},
        {"strides": [64, 1 << 63]},
        {"device_index": -1},
        {"device_index": 1 << 16},
    ],
)
def test_a_region_table_that_cannot_be_true_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(codec.WireError, match=f"region table|{'|'.join(changes)}|out of range") as caught:
        regions_from_wire(sent(msgspec.structs.replace(REGIONS, **changes)))
    assert len(str(caught.value)) < 300


NUMBERS = st.integers(-1, 2**64 - 1) | st.integers(1, 64)


@examples(60, 300)
@given(
    bases=st.lists(st.integers(0, 2**64 - 1), max_size=3),
    strides=st.lists(st.integers(0, 2**64 - 1), max_size=3),
    block=st.builds(BlockShape, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS)
    | st.builds(shape_of, NUMBERS, NUMBERS, NUMBERS, st.sampled_from(["NHD", "HND"])),
    blocks=st.integers(-1, 2**64 - 1) | st.integers(1, 64),
)
@example(bases=[1], strides=[2**64 - 2], block=BlockShape(1, 1, 1, 1, 1), blocks=1)
@example(bases=[2], strides=[2**64 - 2], block=BlockShape(1, 1, 1, 1, 1), blocks=1)
@example(bases=[1], strides=[2**63 - 2], block=BlockShape(1, 1, 1, 1, 1), blocks=1)
def test_no_byte_of_an_accepted_table_wraps_around(
    bases: list[int], strides: list[int], block: BlockShape, blocks: int
) -> None:
    table = msgspec.structs.replace(
        REGIONS, bases=bases, strides=strides, block=block, parts=("latent",), num_blocks=blocks
    )
    try:
        regions = regions_from_wire(sent(table))
    except codec.WireError:
        return
    assert 0 < len(regions) == len(regions.strides)
    for base, stride in zip(regions.bases.tolist(), regions.strides.tolist(), strict=True):
        assert 0 < regions.block_size_bytes <= stride
        assert 0 < base < base + (regions.num_blocks - 1) * stride + regions.block_size_bytes <= 2**63
    last_slot = (block.tokens - 1) * block.token_stride + (block.heads - 1) * block.head_stride
    assert 0 < last_slot + block.run == regions.block_size_bytes


# --- holdings


def cache_share_and_regions(**changes: Any) -> tuple[CacheShare, Regions]:
    return msgspec.structs.replace(HOLDING, **changes), regions_from_wire(REGIONS)


def check_set(share: CacheShare, regions: Regions) -> None:
    """Of a rank that has this set of layers only."""
    check_sets((sent(share),), (regions,), (GroupFacts(name="kv", block_size=max(share.block_size, 1)),))


def test_a_cache_share_that_goes_with_its_regions_passes() -> None:
    check_set(*cache_share_and_regions())
    check_set(*cache_share_and_regions(model_kv_heads=0))
    check_set(*cache_share_and_regions(tp_rank=1023, tp_size=1024, pp_rank=1023, pp_size=1024))
    latent = msgspec.structs.replace(REGIONS, parts=("latent",), block=shape_of(8, 1, 8, "NHD"))
    theirs = msgspec.structs.replace(HOLDING, layers=(3, 1), kv_heads=1, latent=True, block_size=8)
    check_set(theirs, regions_from_wire(latent))


@each(
    "changes",
    [
        {"tp_size": 0},
        {"tp_rank": 2},
        {"tp_size": 1025},
        {"tp_rank": 1 << 63, "tp_size": (1 << 64) - 1},
        {"pp_rank": -1},
        {"pp_rank": 3},
        {"pp_size": 1025},
        {"layers": ()},
        {"layers": (7, 8)},
        {"layers": (7, 7)},
        {"layers": (-1,)},
        {"layers": (1 << 15,)},
        {"layers": tuple(range(100_000))},
        {"kv_heads": 4},
        {"kv_heads": 0},
        {"model_kv_heads": -1},
        {"block_size": 8},
        {"latent": True},
    ],
)
def test_a_cache_share_that_cannot_be_true_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(codec.WireError, match=f"^cache share: |{next(iter(changes))}") as caught:
        check_set(*cache_share_and_regions(**changes))
    assert len(str(caught.value)) < 300


FACTS_OF_GROUP = GroupFacts(name="kv", block_size=4)


@each(
    ("shares", "tables", "groups", "problem"),
    [
        ((), (), (FACTS_OF_GROUP,), "cache share: 0 shares"),
        ((HOLDING,) * 65, (REGIONS,) * 65, (FACTS_OF_GROUP,), "cache share: 65 shares"),
        ((HOLDING, HOLDING), (REGIONS,) * 2, (FACTS_OF_GROUP,), "some layer is in two of them"),
        (
            (HOLDING, msgspec.structs.replace(HOLDING, layers=(8,), tp_rank=0)),
            (REGIONS,) * 2,
            (FACTS_OF_GROUP,),
            "of several ranks",
        ),
        ((HOLDING,), (REGIONS,) * 2, (FACTS_OF_GROUP,), "1, but 2 region tables"),
        ((HOLDING,), (REGIONS,), (), "groups: 0, expected 1 to 64"),
        ((HOLDING,), (REGIONS,), (FACTS_OF_GROUP, FACTS_OF_GROUP), "groups: 2, expected 1 to 64 of different names"),
        ((HOLDING,), (REGIONS,), (GroupFacts(name="a\x1bb", block_size=4),), "different names"),
        ((HOLDING,), (REGIONS,), (FACTS_OF_GROUP, GroupFacts(name="b", block_size=4)), "of 1 groups, but there are 2"),
        ((HOLDING,), (REGIONS,), (GroupFacts(name="a", block_size=4, window=3),), "groups: kind full, window 3"),
        ((HOLDING,), (REGIONS,), (GroupFacts(name="a", block_size=4, kind=GroupKind.STATE),), "kind state"),
        (
            (HOLDING, msgspec.structs.replace(HOLDING, layers=(8,))),
            (REGIONS, msgspec.structs.replace(REGIONS, num_blocks=3)),
            (FACTS_OF_GROUP,),
            "group 0 has 4 and other blocks",
        ),
        (
            (HOLDING, msgspec.structs.replace(HOLDING, layers=(8,))),
            (REGIONS, msgspec.structs.replace(REGIONS, device_kind="cuda")),
            (FACTS_OF_GROUP,),
            "on several devices",
        ),
        ((msgspec.structs.replace(HOLDING, part="conv.x"),), (REGIONS,), (FACTS_OF_GROUP,), "blocks of shape|part"),
        ((msgspec.structs.replace(HOLDING, part="a b"),), (REGIONS,), (FACTS_OF_GROUP,), "part 'a b'"),
    ],
)
def test_sets_of_layers_that_cannot_be_true_are_refused(
    shares: tuple[CacheShare, ...],
    tables: tuple[messages.RegionTable, ...],
    groups: tuple[GroupFacts, ...],
    problem: str,
) -> None:
    with pytest.raises(codec.WireError, match=problem) as caught:
        regions = tuple(map(regions_from_wire, tables))
        check_sets(shares, regions, groups)
    assert len(str(caught.value)) < 300


def test_more_regions_than_can_be_looked_at_are_refused_unread() -> None:
    many = msgspec.structs.replace(REGIONS, bases=[4096] * 40_000, strides=[64] * 40_000)
    with pytest.raises(codec.WireError, match="region tables: 2 with 80000 regions"):
        all_regions_from_wire((many, many))
    with pytest.raises(codec.WireError, match="region tables: 65 with 130 regions"):
        all_regions_from_wire((REGIONS,) * 65)
    with pytest.raises(codec.WireError, match="cache share: 3 shares with 90000 layers"):
        check_cache_shares((msgspec.structs.replace(HOLDING, layers=tuple(range(30_000))),) * 3)


def test_a_latent_has_one_head() -> None:
    """A plan reads one: with more, the rest of a block would be left out."""
    latent = regions_from_wire(msgspec.structs.replace(REGIONS, parts=("latent",)))
    with pytest.raises(codec.WireError, match=r"^cache share: .*latent.* 2 heads"):
        check_set(msgspec.structs.replace(HOLDING, layers=(7, 8), latent=True), latent)
    with pytest.raises(codec.WireError, match=r"^cache share: .*latent is False"):
        check_set(msgspec.structs.replace(HOLDING, layers=(7, 8)), latent)


@each(
    ("address", "count", "hold_s", "problem"),
    [
        *((address, count, 0.02, "") for address, count in ((1, 1), (4096, 1 << 24), ((1 << 62) + 1, 16384))),
        *((address, 1, 0.02, "1 seals at|address|out of range") for address in (0, -1, (1 << 64) - 16, 1 << 64)),
        *((4096, count, 0.02, f"`\\$.count`, got {count}") for count in (0, -1, (1 << 24) + 1)),
        # a reader would trust a seal that it fetched long before its last byte landed
        *((4096, 16, hold_s, f"`\\$.hold_s`, got {hold_s}") for hold_s in (0.0, -1.0, float("nan"), float("inf"), 1e6)),
    ],
)
def test_a_seal_table_that_cannot_be_true_is_refused(address: int, count: int, hold_s: float, problem: str) -> None:
    with pytest.raises(codec.WireError, match=problem) if problem else contextlib.nullcontext():
        check_seals(sent(messages.SealLocation(address=address, count=count, hold_s=hold_s)))


# --- compatibility

facts = st.builds(
    Compatibility,
    model=st.sampled_from(["", "a", "ab"]),
    dtype=st.sampled_from(["float16", "int8"]),
    kv_format=st.sampled_from(["plain", "a"]),
    attention=st.sampled_from(["K and V", "latent"]),
    head_size=st.sampled_from(["1", "2", "1 and 2"]),
)


@examples(60, 300)
@given(ours=facts, theirs=facts)
def test_fingerprints_are_equal_exactly_for_equal_facts(ours: Compatibility, theirs: Compatibility) -> None:
    assert (ours.fingerprint() == theirs.fingerprint()) == (ours == theirs)
    assert ours.differences(theirs) == [
        f"{name}: ours {getattr(ours, name)!r}, theirs {getattr(theirs, name)!r}"
        for name in Compatibility.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    ]
    assert len(ours.fingerprint()) == 16


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    """Two machines compare it, so it must not depend on hashing seeds or on object identity."""
    copy = msgspec.msgpack.decode(codec.encode(FACTS), type=Compatibility)
    assert copy.fingerprint() == FACTS.fingerprint()
    assert FACTS.fingerprint().hex() == "f0290ec5871968c7c0d2da22d019a090"


def facts_of(
    tensor: torch.Tensor, order: str = "NHD", layers: int = 2, block_size: int = 4, model: str = "m", **changes: Any
) -> Compatibility:
    caches = {f"l{index}": tensor for index in range(layers)}
    layout = CacheLayout.infer(caches, order=order, block_size=block_size, **changes)
    return compatibility_of([layout], model=model)


def test_caches_between_which_blocks_can_be_planned_are_compatible() -> None:
    """What a plan makes up for is no fact: where K and V lie, the order of axes, sizes of blocks, heads of a rank."""
    assert {
        facts_of(torch.zeros(2, 7, 4, 3, 8)),
        facts_of(torch.zeros(9, 2, 4, 3, 8)),  # K and V elsewhere, another number of blocks
        facts_of(torch.zeros(2, 7, 4, 3, 8).transpose(2, 3), order="HND"),  # the same memory, shown as HND
        facts_of(torch.zeros(2, 7, 3, 4, 8), order="HND"),  # other memory
        facts_of(torch.zeros(7, 4, 3, 16)),  # K and V of a head together
        facts_of(torch.zeros(2, 7, 8, 3, 8), block_size=8),
        facts_of(torch.zeros(2, 7, 4, 6, 8)),  # a rank with more heads
        facts_of(torch.zeros(2, 7, 4, 3, 8), layers=3),  # a rank with more layers
    } == {facts_of(torch.zeros(2, 7, 4, 3, 8))}


def test_caches_whose_bytes_mean_something_else_are_not() -> None:
    kv_first = facts_of(torch.zeros(2, 7, 4, 3, 8))
    others = [
        facts_of(torch.zeros(2, 7, 4, 3, 16)),
        facts_of(torch.zeros(7, 4, 3, 8)),  # fused, so that a head of K has 4 elements
        facts_of(torch.zeros(7, 4, 8)),
        facts_of(torch.zeros(7, 4, 48)),
        facts_of(torch.zeros(2, 7, 4, 3, 8, dtype=torch.int32)),
        facts_of(torch.zeros(2, 7, 4, 3, 8), model="n"),
        facts_of(torch.zeros(2, 7, 4, 3, 8), kv_format="scaled"),
    ]
    assert len({kv_first.fingerprint(), *(other.fingerprint() for other in others)}) == 1 + len(others)


def test_agent_names_are_different_for_every_rank_and_life() -> None:
    places = list(itertools.product("ab", range(3), range(3), range(12), "xy"))
    names = {agent_name(engine, Rank(dp, pp, tp), life) for engine, dp, pp, tp, life in places}
    assert len(names) == len(places)


@examples(60, 300)
@given(st.lists(st.lists(st.integers(0, 2**31), max_size=4).map(tuple), min_size=2, max_size=2))
@example([(1, 2), (2, 1)])
@example([(), (0,)])
@example([(1,), (1, 0)])
def test_digests_of_block_ids_are_equal_exactly_for_equal_ids(both: list[tuple[int, ...]]) -> None:
    """Ranks that hold other blocks for a request must not be read: their ids are positions in another prompt."""
    first, second = both
    assert (messages.digest_of(first) == messages.digest_of(second)) == (first == second)
    assert len(messages.digest_of(first)) == 16
    assert messages.digest_of((3, 7, 9)).hex() == "87639e90e2b29382d711298f861a9019"
