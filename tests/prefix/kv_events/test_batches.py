"""KV events in both dialects: what engines have encoded is read, and no bytes do more than be refused."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_events import SGLANG, VLLM

from kvflow.errors import ProtocolError
from kvflow.prefix.kv_events.batches import (
    BATCH_BYTES_MAX,
    BLOCK_TOKENS_MAX,
    BLOCKS_MAX,
    EVENTS_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
    encode_batch,
)
from kvflow.prefix.kv_events.prefix_map import PrefixMap
from tests.core.plans import traced_bytes
from tests.support.tests_support import each

pack = msgspec.msgpack.encode
HASHES = st.one_of(st.integers(-(1 << 63), (1 << 64) - 1), st.binary(max_size=64))
NAMES = st.none() | st.text(max_size=5)
STORED = st.builds(
    BlockStored,
    block_hashes=st.lists(HASHES, max_size=4),
    parent_block_hash=st.none() | HASHES,
    token_ids=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=9),
    block_size=st.integers(1, 4),
    lora_id=st.none() | st.integers(0, 9),
    medium=NAMES,
    lora_name=NAMES,
    group_idx=st.none() | st.integers(0, 3),
    kv_cache_spec_kind=NAMES,
)
REMOVED = st.builds(
    BlockRemoved, block_hashes=st.lists(HASHES, max_size=4), medium=NAMES, group_idx=st.none() | st.integers(0, 3)
)
CLEARED = st.builds(AllBlocksCleared, medium=NAMES)
EVENTS = st.lists(st.one_of(STORED, REMOVED, CLEARED), max_size=4)


def test_what_vllm_has_encoded_is_read() -> None:
    first, second, third = (bytes([number]) * 32 for number in range(3))
    assert list(decode_batch(VLLM)) == [
        BlockStored(
            block_hashes=[first, second],
            token_ids=list(range(100, 108)),
            block_size=4,
            medium="GPU",
            extra_keys=[["salt"], None],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        ),
        BlockStored(
            block_hashes=[third],
            parent_block_hash=second,
            token_ids=[108, 109, 110, 111],
            block_size=4,
            medium="GPU",
            extra_keys=[[("picture", 1)]],
            group_idx=0,
        ),
        BlockStored(
            block_hashes=[(1 << 64) - 1],
            token_ids=[1, 2, 3, 4],
            block_size=4,
            lora_id=1,
            medium="CPU",
            lora_name="adapter",
        ),
        BlockRemoved(block_hashes=[first], medium="GPU", group_idx=0),
        AllBlocksCleared(),
    ]


def test_what_sglang_has_encoded_is_read() -> None:
    assert list(decode_batch(SGLANG)) == [
        BlockStored(block_hashes=[-5, 7], token_ids=list(range(100, 108)), block_size=4, medium="GPU"),
        BlockStored(
            block_hashes=[9],
            parent_block_hash=7,
            token_ids=[108, 109, 110, 111],
            block_size=4,
            medium="GPU",
            cache_salt="salt",
        ),
        BlockStored(
            block_hashes=[11], parent_block_hash=7, token_ids=[1, 2], block_size=2, medium="CPU_PINNED"
        ),  # pairs
        BlockRemoved(block_hashes=[-5], medium="GPU"),
        AllBlocksCleared(),
    ]


def test_arrays_of_older_engines_are_read_by_their_places() -> None:
    stored: list[Any] = ["BlockStored", [1, b"two"], None, [5, 6], 1]
    batch = [1.5, [stored, [*stored, None, "GPU"], ["BlockRemoved", [-1]], ["BlockRemoved", [-1], "GPU", 2, "new"]], 3]
    told = BlockStored(block_hashes=[1, b"two"], token_ids=[5, 6], block_size=1)
    assert list(decode_batch(pack(batch))) == [
        told,
        msgspec.structs.replace(told, medium="GPU"),
        BlockRemoved(block_hashes=[-1]),
        BlockRemoved(block_hashes=[-1], medium="GPU", group_idx=2),
    ]
    assert list(decode_batch(pack([1, [["AllBlocksCleared"]]]))) == [AllBlocksCleared()]


@each(
    ("told", "more"),
    [
        ({"session_id": "chat-1"}, {}),
        ({}, {}),
        ({"cache_salt": "tenant", "session_id": "chat-1"}, {"cache_salt": "tenant"}),
        ({"cache_salt": None, "new": [1, {}]}, {}),
        ({"lora_name": "adapter"}, {"lora_name": "adapter"}),
    ],
)
def test_a_map_in_place_seven_is_read_by_its_names(told: dict[str, Any], more: dict[str, Any]) -> None:
    """As SGLang 0.5.18 to 0.5.22 write it, where vLLM has an adapter's name."""
    found = list(decode_batch(pack([1.5, [["BlockStored", [1], None, [5, 6], 2, None, "GPU", told]]])))
    assert found == [BlockStored(block_hashes=[1], token_ids=[5, 6], block_size=2, medium="GPU", **more)]


def test_a_clearing_may_be_of_one_medium() -> None:
    for cleared in (["AllBlocksCleared", "CPU"], {"type": "AllBlocksCleared", "medium": "CPU"}):
        assert list(decode_batch(pack([1, [cleared]]))) == [AllBlocksCleared(medium="CPU")]


@given(EVENTS, st.booleans())
def test_what_is_encoded_is_read_again(events: list[Any], arrays: bool) -> None:
    batch = encode_batch(events, ts=1.5, data_parallel_rank=2)
    if arrays:
        in_places = [[type(event).__name__, *list(msgspec.structs.asdict(event).values())[:10]] for event in events]
        batch = pack([1.5, in_places, 2])
    assert list(decode_batch(batch)) == events


def test_keys_that_vllm_does_not_have_are_written_only_with_a_value() -> None:
    """vLLM's router refuses a batch with such a key, also if it is null."""
    salted = BlockStored(block_hashes=[1], token_ids=[5], block_size=1, cache_salt="tenant")
    plain = BlockStored(block_hashes=[1], token_ids=[5], block_size=1)
    events = [salted, plain, AllBlocksCleared(medium="CPU"), AllBlocksCleared()]
    written = msgspec.msgpack.decode(encode_batch(events, ts=1.5))[1]
    assert [("cache_salt" in one, "medium" in one) for one in written] == [
        *((True, True), (False, True)),
        *((False, True), (False, False)),
    ]


PLAIN = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1}


NO_EVENTS = [{"type": "BlockMoved", "block_hashes": []}, ["BlockMoved", []], {"type": 7}, {}, [], None, "BlockStored"]
LACKING = [{"type": "BlockRemoved"}, ["BlockStored", [1]]]
REMOVING = [{"type": "BlockRemoved", "block_hashes": wrong} for wrong in ([bytes(65)], [1.0], [0] * (BLOCKS_MAX + 1))]
STORING = [
    {**PLAIN, "block_size": 0},
    {**PLAIN, "block_size": (1 << 64) - 1},
    {**PLAIN, "extra_keys": [[b"embeddings"]]},
]


@each("unknown", [*NO_EVENTS, *LACKING, *REMOVING, *STORING])
def test_events_of_other_forms_are_passed_over(unknown: object) -> None:
    cleared = {"type": "AllBlocksCleared", "new": {"deep": [1]}}
    unreadable: list[str] = []
    assert list(decode_batch(pack([1, [unknown, cleared]]), on_unreadable=unreadable.append)) == [AllBlocksCleared()]
    assert len(unreadable) == (unknown not in NO_EVENTS), "those of types that are known are reported"


@pytest.mark.parametrize("arrays", [True, False])
def test_pairs_of_tokens_are_read_by_their_first(arrays: bool) -> None:
    """SGLang's blocks with EAGLE or MTP."""
    stored = {"block_hashes": [9], "parent_block_hash": 7, "token_ids": [(5, 6), (6, 7)], "block_size": 2}
    event = ["BlockStored", *stored.values()] if arrays else {"type": "BlockStored", **stored}
    (found,) = decode_batch(pack([1, [event]]))
    assert found == BlockStored(block_hashes=[9], parent_block_hash=7, token_ids=[5, 6], block_size=2)
    unreadable: list[str] = []
    for wrong in ([(5, 6), 7], [(5, 6, 7)], [(0, 0)] * (BLOCK_TOKENS_MAX + 1), [[]]):
        event = {"type": "BlockStored", **stored, "token_ids": wrong}
        assert list(decode_batch(pack([1, [event]]), on_unreadable=unreadable.append)) == []
    assert len(unreadable) == 4
    assert unreadable[0].startswith("BlockStored: Expected `int`, got `array` - at `$.token_ids[0]`")


JUNK = [b"", b"\xc1", b"\xc0", b"\x93\x01"]
SHAPES = map(pack, ([], ["now", []], [1, {}], {"ts": 1}, [1, [], "rank"], [1, [None] * (EVENTS_MAX + 1)]))
DEEP = [b"\x91" * 100_000, b"\x92\x01\x91" + b"\x91" * 100_000 + b"\xc0"]
LONG = [b"\x92\x01\xdd\xff\xff\xff\xff", bytes(BATCH_BYTES_MAX + 1)]


@each("payload", [*JUNK, *SHAPES, *DEEP, *LONG])
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^KV events from tcp://peer:1: "):
        decode_batch(payload, peer="tcp://peer:1")


@each(
    ("name", "entry"),
    itertools.product(["block_hashes", "token_ids", "extra_keys", "unknown"], [b"\x90", b"\x80", b"\x01", b"\xc0"]),
)
def test_a_batch_of_the_largest_size_takes_memory_in_proportion(name: str, entry: bytes) -> None:
    """Of 4 MiB, whatever they are: an empty list of one byte would be an object of 64."""
    known = [pack(one) for item in PLAIN.items() if item[0] != name for one in item]
    head = b"\x92\x01\x91" + bytes([0x81 + len(known) // 2]) + b"".join(known)
    entries = BATCH_BYTES_MAX - len(head) - len(pack(name)) - 5
    payload = head + pack(name) + b"\xdd" + entries.to_bytes(4, "big") + entry * entries
    assert traced_bytes(lambda: list(decode_batch(payload)))[1] < 4 * BATCH_BYTES_MAX


@given(st.sampled_from([VLLM, SGLANG]), st.data())
def test_no_forged_bytes_do_more_than_be_refused(recorded: bytes, data: st.DataObject) -> None:
    forged, known = bytearray(recorded), PrefixMap(blocks_max=4)
    for _ in range(data.draw(st.integers(1, 6))):
        forged[data.draw(st.integers(0, len(forged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(forged)))
    for payload in (bytes(forged), bytes(forged[:cut])):
        try:
            for event in decode_batch(payload):
                known.apply("holder", event)
        except ProtocolError:
            pass
    assert known.blocks <= 4


@given(st.binary(max_size=60))
def test_no_bytes_at_all_do_more_than_be_refused(payload: bytes) -> None:
    try:
        list(decode_batch(payload))
        list(decode_batch(b"\x92\x01\x91" + payload))
    except ProtocolError:
        pass
