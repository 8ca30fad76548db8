"""Messages of the stock side channel: strict, bounded, and the same from every line."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from tests_support import each

from kvflow.core.protocol.codec import WireError
from kvflow.runtime.channel import connections
from kvflow.stock.versions import LINES, ReleaseLine, line_of_metadata
from kvflow.stock.wire import (
    METADATA_BYTES_MAX,
    StockAnswer,
    StockMetadata,
    agent_name_of,
    decode_answer,
    decode_question,
    encode_answer,
    encode_metadata,
    encode_question,
)
from tests.fuzz.mutants import bent, torn

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden-0.33.json").read_text("utf-8"))
VALUES = {**GOLDEN["metadata_values"], "agent_metadata": bytes.fromhex(GOLDEN["metadata_values"]["agent_metadata"])}
METADATA = msgspec.convert(VALUES, StockMetadata)
HASH = "ab" * 32
LINE = LINES[-2]


def answer_with(**values: Any) -> list[bytes]:
    metadata = msgspec.msgpack.encode({**msgspec.to_builtins(METADATA), "agent_metadata": b"x", **values})
    return encode_answer(HASH, metadata, 1.0)


@pytest.mark.parametrize("line", LINES, ids=[line.version for line in LINES])
def test_metadata_of_every_line_is_read(line: ReleaseLine) -> None:
    shown = decode_answer(encode_answer(HASH, encode_metadata(METADATA, line), 2.5))
    assert shown.fields == set(line.metadata)
    assert line_of_metadata(shown.fields).metadata == line.metadata
    assert shown.metadata.kv_caches_base_addr == METADATA.kv_caches_base_addr
    assert (shown.metadata.block_strides is None) == (line.number < (0, 29))
    assert (shown.metadata.region_names is None) == (line.number < (0, 30))


@pytest.mark.parametrize("rank", [(-1, 0), (0, -1), (1 << 20, 0)])
def test_no_question_is_made_for_what_is_no_rank(rank: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no rank"):
        encode_question(*rank)


QUESTIONS: list[Any] = [[b"get_meta_msg", 0], ["get_meta_msg", 0, 0], [b"get_meta_msg", 0, 0, 0], [b"other", 0, 0]]
QUESTIONS += [[b"get_meta_msg", -1, 0], [b"get_meta_msg", 0.0, 0], [b"get_meta_msg" * 10, 0, 0], {"a": 1}]


@each("frame", [b"", b"get_meta_msg", *map(msgspec.msgpack.encode, QUESTIONS)])
def test_another_question_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode_question(frame)


WRONG: dict[str, list[Any]] = {
    "engine_id": ["", None, 3, "a b", "x" * 300, "\0"],
    "kv_caches_base_addr": [[], [0] * 3, [-1] * 3, [1 << 63] * 3, None, ["a"], [(1 << 63) - 5] * 3],
    "device_id": [-1, None, "0"],
    "num_blocks": [0, -1, 1 << 40],
    "block_lens": [[], [0] * 3, [98304] * 2, None],
    "block_strides": [[1] * 3, [98304] * 2, [-1] * 3, [1 << 62] * 3],
    "block_size": [0, None, 1.5],
    "ssm_sizes": [[0], [0, 0, 0], None],
    "physical_blocks_per_logical_kv_block": [0, -1],
    "region_num_blocks": [[364], [0] * 3],
    "region_group_ids": [[0], ["a"] * 3],
    "region_names": [["a"], [0] * 3, ["x" * 2000] * 3],
    "region_mem_types": [["DRAM"]],
    "region_members": [[["a"]], {}],
    "dcp_size": [0, None],
    "packed_member_layouts": [{0: [1]}, [1]],
}


@each(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_that_cannot_be_is_refused(name: str, value: Any) -> None:
    assert isinstance(decode_answer(answer_with()), StockAnswer)
    with pytest.raises(WireError):
        decode_answer(answer_with(**{name: value}))


@pytest.mark.parametrize(
    ("values", "packs"),
    [
        ({}, False),
        ({"region_members": [["a"]] * 3}, False),
        ({"region_members": [[], ["a"], ["b"]]}, False),
        ({"region_members": [["a"], ["b"], ["c", "d"]]}, True),
        ({"region_members": [[0]] * 3}, True),
        ({"packed_member_layouts": {"a": [0, 64]}}, True),
        ({"packed_member_layouts": {"a": "odd"}}, True),
    ],
)
def test_whether_regions_hold_several_layers_is_all_that_is_asked_of_their_names(
    values: dict[str, Any], packs: bool
) -> None:
    assert decode_answer(answer_with(**values)).metadata.packs_layers == packs


def test_an_answer_takes_no_more_than_others_may() -> None:
    """By its own length, and by the memory that it takes: unread names stay in the message."""
    assert connections.ANSWER_BYTES_MAX == METADATA_BYTES_MAX
    with pytest.raises(WireError, match=f"at most {METADATA_BYTES_MAX}"):
        decode_answer(answer_with(region_members=[["x" * 100] * 60_000] * 3))
    with pytest.raises(WireError, match="at most 100"):
        decode_answer(answer_with(), bytes_max=100)
    frames = answer_with(region_members=[[f"{number:x}" for number in range(60_000)] for _ in range(3)])
    tracemalloc.start()
    try:
        assert decode_answer(frames).metadata.packs_layers
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(frames[0])


@each("name", METADATA.__struct_fields__[:11])
def test_a_field_that_every_line_has_is_needed(name: str) -> None:
    values = {key: value for key, value in VALUES.items() if key != name}
    with pytest.raises(WireError):
        decode_answer(encode_answer(HASH, msgspec.msgpack.encode(values), 1.0))


PAYLOAD, CLOCK = answer_with()


ODD_FRAMES = [[], [PAYLOAD], [PAYLOAD, CLOCK, b""], [b"", CLOCK], [PAYLOAD, b""]]
ODD_FRAMES += [[PAYLOAD, msgspec.msgpack.encode(clock)] for clock in ("a", float("nan"))]
ODD_FRAMES += [encode_answer(wrong_hash, b"", 1.0) for wrong_hash in ("short", "AB" * 32)]
ODD_FRAMES += [[bytes(METADATA_BYTES_MAX + 1), CLOCK], answer_with(**{str(number): None for number in range(1000)})]


@each("frames", ODD_FRAMES)
def test_frames_that_are_no_answer_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode_answer(frames)


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"x" * 100,
        VALUES["agent_metadata"][:20],
        b"nixlSerDes|Agent\x04" + bytes(7) + b"ab\x00d|",
        b"nixlSerDes|Agent\x02" + bytes(7) + b"\xff\xff|",
    ],
)
def test_metadata_of_no_agent_is_refused(blob: bytes) -> None:
    with pytest.raises(WireError):
        agent_name_of(blob)


def test_hostile_answers_are_refused_or_read() -> None:
    rng, plain = Random(3), {**msgspec.to_builtins(METADATA), "agent_metadata": VALUES["agent_metadata"]}
    for _ in range(3000):
        if rng.random() < 0.5:
            metadata = torn(rng, encode_metadata(METADATA, LINE))
        else:
            try:
                metadata = msgspec.msgpack.encode(bent(rng, plain))
            except (TypeError, ValueError, OverflowError, RecursionError):
                continue
        frames = encode_answer(HASH, metadata, 1.0)
        frames[rng.randrange(2)] = torn(rng, frames[rng.randrange(2)]) if rng.random() < 0.3 else frames[0]
        with contextlib.suppress(WireError):
            assert isinstance(decode_answer(frames), StockAnswer)
        with contextlib.suppress(WireError):
            decode_question(torn(rng, encode_question(0, 1)))
