"""Messages and tickets: what is written can be read, and what cannot be right is refused and nothing else happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvflow.core import wire
from kvflow.core.layout import CacheLayout, Device, Regions
from kvflow.errors import RequestError

LEASE_ID = "0123456789abcdef0123456789abcdef"
TICKET = wire.Ticket(
    engine_id="prefill-0",
    request_id="req-1",
    block_ids=(3, 7, 9),
    host="10.0.0.7",
    port=5600,
    tp_size=2,
    lease_id=LEASE_ID,
    seal_index=17,
    incarnation="8f14e45fceea167a",
    num_tokens=41,
    ttl_s=30.0,
)
FACTS = wire.Compatibility(
    model="llama",
    dtype="bfloat16",
    layers=32,
    parts=("K", "V"),
    memory_order="NHD",
    block_size=16,
    num_kv_heads=8,
    head_size=128,
    tp_size=1,
    pp_size=1,
)
REGIONS = wire.RegionTable(
    bases=[4096, 8192], strides=[64, 64], block_size_bytes=64, num_blocks=4, device_kind="cpu", device_index=0
)
METADATA = wire.Metadata(
    engine_id="prefill-0",
    incarnation="8f14e45fceea167a",
    tp_rank=1,
    pp_rank=0,
    agent_metadata=b"\x00agent\xff",
    agent_metadata_crc32=7,
    regions=REGIONS,
    seals=wire.SealLocation(address=4096, count=16, hold_s=0.02),
)
REQUEST = wire.MetadataRequest(reader="decode-0/0.0#1", engine_id="prefill-0", tp_rank=0, pp_rank=0)
DECODERS: dict[str, tuple[Callable[[bytes], object], list[msgspec.Struct]]] = {
    "header": (wire.decode_header, [wire.our_header(b""), wire.our_header(FACTS.fingerprint())]),
    "request": (wire.decode_request, [REQUEST]),
    "reply": (
        wire.decode_reply,
        [
            METADATA,
            wire.Refusal(reason="no such rank", version=1),
            wire.Refusal(reason="differs", version=1, compatibility=FACTS),
        ],
    ),
    "notification": (wire.decode_notification, [wire.ReadDone(lease_id=LEASE_ID, reader="decode-0/0.0#1")]),
}


# --- messages


@pytest.mark.parametrize("kind", DECODERS)
def test_messages_survive_the_wire(kind: str) -> None:
    decode, messages = DECODERS[kind]
    for message in messages:
        assert decode(wire.encode(message)) == message


def test_frames_are_a_header_and_a_body() -> None:
    header, body = wire.encode_frames(wire.our_header(b"f" * 16), REQUEST)
    assert wire.decode_header(header) == wire.Header(
        magic="kvflow", version=wire.PROTOCOL_VERSION, fingerprint=b"f" * 16
    )
    assert wire.decode_request(body) == REQUEST


def test_a_header_of_another_version_is_read() -> None:
    """So that a newer peer can be told which version we speak."""
    newer = wire.Header(magic="kvflow", version=wire.PROTOCOL_VERSION + 1, fingerprint=b"")
    assert wire.decode_header(wire.encode(newer)) == newer
    with_more = msgspec.msgpack.encode(["kvflow", 9, b"", {"new": "field"}])
    assert wire.decode_header(with_more).version == 9


@pytest.mark.parametrize(
    "header",
    [
        wire.Header(magic="kvfl0w", version=1, fingerprint=b""),
        wire.Header(magic="", version=1, fingerprint=b""),
        wire.Header(magic="kvflow", version=1, fingerprint=b"x" * 65),
    ],
)
def test_a_header_that_is_not_ours_is_refused(header: wire.Header) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_header(wire.encode(header))


@pytest.mark.parametrize("kind", DECODERS)
def test_a_message_of_another_kind_is_refused(kind: str) -> None:
    decode, _ = DECODERS[kind]
    for other, (_, messages) in DECODERS.items():
        for message in messages:
            if other != kind:
                with pytest.raises(wire.WireError):
                    decode(wire.encode(message))


def only_wire_errors(payload: bytes) -> None:
    """Whatever the bytes are: a message of its kind or a WireError. A second pass must agree with the first."""
    for decode, messages in DECODERS.values():
        try:
            message = decode(payload)
        except wire.WireError:
            continue
        assert type(message) in {type(known) for known in messages}
        assert isinstance(message, msgspec.Struct)
        assert decode(wire.encode(message)) == message


@settings(max_examples=2000)
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


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=6)
    | st.sampled_from(["kvflow", "get_metadata", "metadata", "refusal", "read_done", LEASE_ID]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "engine_id", "regions", "seals", "reason", "version"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=1000)
@given(value=VALUES)
def test_valid_msgpack_of_another_shape_raises_wire_errors_only(value: object) -> None:
    only_wire_errors(msgspec.msgpack.encode(value))


ENCODED = [wire.encode(message) for _, messages in DECODERS.values() for message in messages]


@settings(max_examples=2000)
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


@pytest.mark.parametrize("message", ENCODED, ids=range(len(ENCODED)))
def test_a_truncated_message_is_refused(message: bytes) -> None:
    for decode, _ in DECODERS.values():
        for length in range(len(message)):
            with pytest.raises(wire.WireError):
                decode(message[:length])


def test_trailing_bytes_are_refused() -> None:
    for decode, messages in DECODERS.values():
        with pytest.raises(wire.WireError):
            decode(wire.encode(messages[0]) + b"\x00")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine_id", 5),
        ("engine_id", b"prefill-0"),
        ("tp_rank", "0"),
        ("tp_rank", True),
        ("tp_rank", 0.0),
        ("agent_metadata", "text"),
        ("regions", []),
        ("seals", None),
    ],
)
def test_decoding_does_not_convert(field: str, value: object) -> None:
    raw = msgspec.to_builtins(METADATA, builtin_types=(bytes,)) | {field: value}
    with pytest.raises(wire.WireError, match=field):
        wire.decode_reply(msgspec.msgpack.encode(raw))


# --- regions and seals


@settings(max_examples=50)
@given(data=st.data(), blocks=st.integers(1, 1 << 20), size=st.integers(1, 1 << 20), device=st.integers(0, 7))
def test_region_tables_survive_the_wire(data: st.DataObject, blocks: int, size: int, device: int) -> None:
    count = data.draw(st.integers(1, 20))
    bases = data.draw(st.lists(st.integers(1, 1 << 62), min_size=count, max_size=count))
    strides = data.draw(st.lists(st.integers(size, 1 << 40), min_size=count, max_size=count))
    regions = Regions(
        bases=np.array(bases, dtype=np.uint64),
        strides=np.array(strides, dtype=np.uint64),
        block_size_bytes=size,
        num_blocks=blocks,
        device=Device("cuda", device),
    )
    table = msgspec.msgpack.decode(wire.encode(wire.regions_to_wire(regions)), type=wire.RegionTable)
    back = wire.regions_from_wire(table)
    assert (back.bases.tolist(), back.strides.tolist()) == (bases, strides)
    assert back.bases.dtype == back.strides.dtype == np.dtype(np.uint64)
    assert (back.block_size_bytes, back.num_blocks, back.device) == (size, blocks, regions.device)


@pytest.mark.parametrize(
    "changes",
    [
        {"bases": [], "strides": []},
        {"bases": [4096]},
        {"strides": [64]},
        {"bases": [1] * ((1 << 16) + 1), "strides": [64] * ((1 << 16) + 1)},
        {"num_blocks": 0},
        {"num_blocks": -1},
        {"block_size_bytes": 0},
        {"block_size_bytes": -64},
        {"bases": [4096, 0]},
        {"bases": [4096, -1]},
        {"strides": [64, 63]},
        {"strides": [64, 0]},
        {"strides": [64, -64]},
        {"block_size_bytes": 65},
        {"bases": [4096, (1 << 64) - 64]},
        {"num_blocks": 1 << 62},
        {"num_blocks": (1 << 64) - 1, "strides": [(1 << 64) - 1] * 2},
        {"strides": [64, 1 << 63]},
        {"device_index": -1},
        {"device_index": 1 << 16},
    ],
    ids=lambda changes: ", ".join(f"{name}={str(value)[:20]}" for name, value in changes.items()),
)
def test_a_region_table_that_cannot_be_true_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(wire.WireError, match="region table"):
        wire.regions_from_wire(msgspec.structs.replace(REGIONS, **changes))


@settings(max_examples=300)
@given(
    bases=st.lists(st.integers(0, 2**64 - 1), max_size=3),
    strides=st.lists(st.integers(0, 2**64 - 1), max_size=3),
    size=st.integers(-1, 2**64 - 1),
    blocks=st.integers(-1, 2**64 - 1),
)
@example(bases=[1], strides=[2**64 - 2], size=1, blocks=1)
@example(bases=[2], strides=[2**64 - 2], size=1, blocks=1)
def test_no_block_of_an_accepted_table_wraps_around(
    bases: list[int], strides: list[int], size: int, blocks: int
) -> None:
    table = msgspec.structs.replace(REGIONS, bases=bases, strides=strides, block_size_bytes=size, num_blocks=blocks)
    try:
        regions = wire.regions_from_wire(table)
    except wire.WireError:
        return
    assert 0 < len(regions) == len(regions.strides)
    for base, stride in zip(regions.bases.tolist(), regions.strides.tolist(), strict=True):
        assert 0 < regions.block_size_bytes <= stride
        assert 0 < base < base + (regions.num_blocks - 1) * stride + regions.block_size_bytes <= 2**64


@pytest.mark.parametrize(
    ("address", "count"),
    [(0, 1), (-1, 1), (4096, 0), (4096, -1), (4096, (1 << 24) + 1), ((1 << 64) - 16, 1), (1 << 64, 1)],
)
def test_a_seal_table_that_cannot_be_true_is_refused(address: int, count: int) -> None:
    with pytest.raises(wire.WireError, match=f"{count} seals at {address}"):
        wire.check_seals(wire.SealLocation(address=address, count=count, hold_s=0.02))


@pytest.mark.parametrize("hold_s", [0.0, -1.0, float("nan"), float("inf"), 1e6])
def test_a_peer_that_promises_to_hold_blocks_for_ever_is_refused(hold_s: float) -> None:
    """A reader would trust a seal that it fetched long before its last byte landed."""
    with pytest.raises(wire.WireError, match=f"hold_s {hold_s}"):
        wire.check_seals(wire.SealLocation(address=4096, count=16, hold_s=hold_s))


def test_seal_tables_of_legal_sizes_pass() -> None:
    for address, count in ((1, 1), (4096, 1 << 24), ((1 << 62) + 1, 16384)):
        wire.check_seals(wire.SealLocation(address=address, count=count, hold_s=0.02))


# --- compatibility

OTHER_FACTS: dict[str, Any] = {
    "model": "mistral",
    "dtype": "float16",
    "layers": 33,
    "parts": ("KV",),
    "memory_order": "HND",
    "block_size": 32,
    "num_kv_heads": 4,
    "head_size": 64,
    "tp_size": 2,
    "pp_size": 4,
}
facts = st.builds(
    wire.Compatibility,
    model=st.sampled_from(["", "a", "ab"]),
    dtype=st.sampled_from(["float16", "int8"]),
    layers=st.integers(1, 3),
    parts=st.sampled_from([("K", "V"), ("KV",), ("latent",)]),
    memory_order=st.sampled_from(["NHD", "HND"]),
    block_size=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    head_size=st.integers(1, 3),
    tp_size=st.integers(1, 2),
    pp_size=st.integers(1, 2),
)


def test_other_facts_cover_every_field() -> None:
    assert set(OTHER_FACTS) == set(wire.Compatibility.__struct_fields__)


@settings(max_examples=300)
@given(ours=facts, theirs=facts)
def test_fingerprints_are_equal_exactly_for_equal_facts(ours: wire.Compatibility, theirs: wire.Compatibility) -> None:
    assert (ours.fingerprint() == theirs.fingerprint()) == (ours == theirs)
    assert bool(ours.differences(theirs)) == (ours != theirs)
    assert len(ours.fingerprint()) == 16


@pytest.mark.parametrize("field", OTHER_FACTS)
def test_every_fact_changes_the_fingerprint(field: str) -> None:
    theirs = msgspec.structs.replace(FACTS, **{field: OTHER_FACTS[field]})
    assert theirs.fingerprint() != FACTS.fingerprint()
    assert FACTS.differences(theirs) == [f"{field}: ours {getattr(FACTS, field)!r}, theirs {OTHER_FACTS[field]!r}"]


def test_differences_name_all_fields_that_differ() -> None:
    found = FACTS.differences(wire.Compatibility(**OTHER_FACTS))
    assert [text.split(":")[0] for text in found] == list(OTHER_FACTS)
    assert FACTS.differences(FACTS) == []


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    """Two machines compare it, so it must not depend on hashing seeds or on object identity."""
    copy = msgspec.msgpack.decode(wire.encode(FACTS), type=wire.Compatibility)
    assert copy.fingerprint() == FACTS.fingerprint()
    assert FACTS.fingerprint().hex() == "0fdbcbbeccde533e74d214c4d6309a9b"


def layout_of(
    tensor: torch.Tensor, order: str = "NHD", layers: int = 2, block_size: int = 4, **changes: Any
) -> wire.Compatibility:
    caches = {f"l{index}": tensor for index in range(layers)}
    layout = CacheLayout.infer(caches, order=order, block_size=block_size)
    return wire.compatibility_of(layout, **{"model": "m", "tp_size": 1, "pp_size": 1, **changes})


def test_caches_whose_blocks_mean_the_same_are_compatible() -> None:
    kv_first = layout_of(torch.zeros(2, 7, 4, 3, 8))
    assert layout_of(torch.zeros(9, 2, 4, 3, 8)) == kv_first  # K and V elsewhere, another number of blocks
    assert (
        layout_of(torch.zeros(2, 7, 4, 3, 8).transpose(2, 3), order="HND") == kv_first
    )  # the same memory, shown as HND


def test_caches_whose_blocks_mean_something_else_are_not() -> None:
    kv_first = layout_of(torch.zeros(2, 7, 4, 3, 8))
    others = [
        layout_of(torch.zeros(2, 7, 3, 4, 8), order="HND"),
        layout_of(torch.zeros(2, 7, 4, 3, 16)),
        layout_of(torch.zeros(2, 7, 8, 3, 8), block_size=8),
        layout_of(torch.zeros(2, 7, 4, 6, 8)),
        layout_of(torch.zeros(7, 4, 3, 16)),
        layout_of(torch.zeros(7, 4, 48)),
        layout_of(torch.zeros(2, 7, 4, 3, 8), layers=3),
        layout_of(torch.zeros(2, 7, 4, 3, 8, dtype=torch.int32)),
        layout_of(torch.zeros(2, 7, 4, 3, 8), model="n"),
        layout_of(torch.zeros(2, 7, 4, 3, 8), tp_size=2),
        layout_of(torch.zeros(2, 7, 4, 3, 8), pp_size=2),
    ]
    assert len({kv_first.fingerprint(), *(other.fingerprint() for other in others)}) == 1 + len(others)


def test_agent_names_are_different_for_every_rank_and_life() -> None:
    names = {
        wire.agent_name(engine, pp_rank, tp_rank, life)
        for engine in ("a", "b")
        for pp_rank in range(3)
        for tp_rank in range(3)
        for life in ("x", "y")
    }
    assert len(names) == 2 * 3 * 3 * 2


# --- tickets

names = st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"]), min_size=1, max_size=20)
tickets = st.builds(
    wire.Ticket,
    engine_id=names,
    request_id=st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    block_ids=st.lists(st.integers(0, 2**31), max_size=6).map(tuple),
    host=st.sampled_from(["127.0.0.1", "[::1]", "node-7.cluster.local"]),
    port=st.integers(1, 65535),
    tp_size=st.integers(1, 64),
    lease_id=st.binary(min_size=16, max_size=16).filter(any).map(bytes.hex),
    seal_index=st.integers(0, 2**24),
    incarnation=names,
    num_tokens=st.integers(0, 2**31),
    ttl_s=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
)


@settings(max_examples=300)
@given(ticket=tickets)
def test_a_ticket_survives_json_and_fields_of_others(ticket: wire.Ticket) -> None:
    params = json.loads(json.dumps(ticket.to_params(), allow_nan=False))
    assert wire.Ticket.from_params(params) == ticket
    crowded = {**params, "added_by_router": [{"deep": None}], "kvflow": {**params["kvflow"], "later": 1}}
    assert wire.Ticket.from_params(crowded) == ticket


def test_the_field_names_that_routers_forward() -> None:
    params = TICKET.to_params()
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill-0",
        "remote_request_id": "req-1",
        "remote_block_ids": [3, 7, 9],
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "tp_size": 2,
        "kvflow": {
            "version": 1,
            "lease_id": LEASE_ID,
            "seal_index": 17,
            "incarnation": "8f14e45fceea167a",
            "num_tokens": 41,
            "ttl_s": 30.0,
        },
    }
    assert TICKET.address == "tcp://10.0.0.7:5600"


def changed(path: str, value: object) -> dict[str, Any]:
    """The ticket's dict with another value at `path`, such as "kvflow.ttl_s"."""
    params = TICKET.to_params()
    where = params
    *parents, name = path.split(".")
    for parent in parents:
        where = where[parent]
    where[name] = value
    return params


FIELDS = [*TICKET.to_params(), *(f"kvflow.{name}" for name in TICKET.to_params()["kvflow"])]
TEXT_FIELDS = ["remote_engine_id", "remote_request_id", "remote_host", "kvflow.lease_id", "kvflow.incarnation"]
NAME_FIELDS = ["remote_engine_id", "remote_host", "kvflow.incarnation"]
INTEGER_FIELDS = ["remote_port", "tp_size", "kvflow.version", "kvflow.seal_index", "kvflow.num_tokens"]


@pytest.mark.parametrize("path", FIELDS)
def test_a_missing_field_is_named(path: str) -> None:
    params = TICKET.to_params()
    parent, _, name = path.rpartition(".")
    del (params[parent] if parent else params)[name]
    with pytest.raises(RequestError, match=rf"^ticket: .*\b{name}\b"):
        wire.Ticket.from_params(params)


WRONG_TYPES: list[tuple[str, object]] = [
    *((path, value) for path in FIELDS for value in (None, [None], object(), {"x": 1}, b"bytes")),
    *((path, value) for path in TEXT_FIELDS for value in (7, True, ["text"])),
    *((path, value) for path in INTEGER_FIELDS for value in ("1", True, 1.5, [1])),
    *((path, value) for path in ("do_remote_prefill", "do_remote_decode") for value in (1, "true")),
    ("remote_block_ids", "123"),
    ("remote_block_ids", [1, "2"]),
    ("remote_block_ids", [1, 2.5]),
    ("remote_block_ids", [1, True]),
    ("remote_block_ids", [[1]]),
    ("remote_block_ids", {"0": 1}),
    ("kvflow", []),
    ("kvflow", "kvflow"),
    ("kvflow.ttl_s", "30"),
    ("kvflow.ttl_s", True),
]


@pytest.mark.parametrize(("path", "value"), WRONG_TYPES, ids=lambda value: ascii(value)[:30])
def test_a_field_of_another_type_is_named(path: str, value: object) -> None:
    with pytest.raises(RequestError, match=rf"^ticket: .*\b{path.rpartition('.')[2]}\b"):
        wire.Ticket.from_params(changed(path, value))


OUT_OF_RANGE: list[tuple[str, object]] = [
    ("do_remote_prefill", False),
    *(("remote_port", port) for port in (0, -1, 65536, 2**70)),
    *(("tp_size", size) for size in (0, -1)),
    *(("kvflow.version", version) for version in (0, 2, -1)),
    *(("kvflow.seal_index", index) for index in (-1, -(2**70))),
    *(("kvflow.num_tokens", count) for count in (-1, -(2**70))),
    *(("kvflow.ttl_s", ttl_s) for ttl_s in (0, 0.0, -1.0, float("nan"), float("inf"), float("-inf"))),
    *(
        ("kvflow.lease_id", text)
        for text in ("", LEASE_ID[:-1], LEASE_ID + "0", LEASE_ID + "\n", "g" * 32, " " * 32, "０" * 32)
    ),
    *((path, text) for path in NAME_FIELDS for text in ("", "a b", "a\n", "\t", "x" * 1025, "a\u2003b")),
    ("remote_request_id", ""),
]


@pytest.mark.parametrize(("path", "value"), OUT_OF_RANGE, ids=lambda value: ascii(value)[:30])
def test_a_field_out_of_range_is_named(path: str, value: object) -> None:
    with pytest.raises(RequestError, match=rf"^ticket: .*\b{path.rpartition('.')[2]}\b"):
        wire.Ticket.from_params(changed(path, value))


@pytest.mark.parametrize("path", NAME_FIELDS)
@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"], ids=ascii)
def test_text_that_no_message_can_carry_is_refused(path: str, text: str) -> None:
    """JSON may carry half a surrogate pair; UTF-8, hence every message of ours, cannot."""
    params = json.loads(json.dumps(changed(path, text)))
    with pytest.raises(RequestError, match=path.rpartition(".")[2]):
        wire.Ticket.from_params(params)


@pytest.mark.parametrize("path", NAME_FIELDS)
@pytest.mark.parametrize("text", ["a\x00b", "a\x1bb"], ids=ascii)
def test_names_with_characters_that_cannot_be_seen_are_refused(path: str, text: str) -> None:
    """A NUL ends a host for C and breaks Python's resolver; control characters forge log lines."""
    with pytest.raises(RequestError, match=path.rpartition(".")[2]):
        wire.Ticket.from_params(changed(path, text))


@pytest.mark.parametrize("host", ["a..b", "a.b." + "c" * 64])
def test_a_host_that_no_resolver_takes_is_refused(host: str) -> None:
    """Python's resolver answers such a host with a UnicodeError instead of an OSError."""
    with pytest.raises(RequestError, match="remote_host"):
        wire.Ticket.from_params(changed("remote_host", host))


@pytest.mark.parametrize("params", [None, [], 5, "ticket", b"{}", {}, {1: 2}, object()], ids=ascii)
def test_what_is_no_dict_of_a_ticket_is_refused(params: Any) -> None:
    with pytest.raises(RequestError, match=r"^ticket: "):
        wire.Ticket.from_params(params)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=1000)
@given(path=st.sampled_from(FIELDS), value=JSON)
@example(path="remote_engine_id", value="\ud800")
def test_whatever_a_router_puts_into_a_field_is_a_request_error_or_a_usable_ticket(path: str, value: object) -> None:
    params = changed(path, value)
    assume(json.dumps(params) != json.dumps(TICKET.to_params()))
    try:
        ticket = wire.Ticket.from_params(params)
    except RequestError:
        return
    assert wire.Ticket.from_params(json.loads(json.dumps(ticket.to_params(), allow_nan=False))) == ticket
    wire.encode(wire.MetadataRequest(reader="r", engine_id=ticket.engine_id, tp_rank=0, pp_rank=0))
    wire.encode(wire.ReadDone(lease_id=ticket.lease_id, reader="r"))
    assert 0 < ticket.port < 65536
    assert len(bytes.fromhex(ticket.lease_id)) == 16


def test_a_ticket_is_a_value() -> None:
    with pytest.raises(AttributeError):
        TICKET.port = 1  # type: ignore[misc]
    assert hash(TICKET) == hash(msgspec.structs.replace(TICKET))
