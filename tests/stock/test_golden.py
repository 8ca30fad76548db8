"""What we make and read is byte for byte what vLLM 0.32's own encoders make (tests/vllm/stock_bytes.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.protocol.codec import WireError, decode_notification
from kvflow.errors import RequestError
from kvflow.stock.params import is_stock_params, needed_blocks, read_stock_params
from kvflow.stock.texts import ReaderText, decode_text, heartbeat_texts, is_text, read_text
from kvflow.stock.versions import line_of
from kvflow.stock.wire import (
    StockMetadata,
    agent_name_of,
    decode_answer,
    decode_question,
    encode_answer,
    encode_metadata,
    encode_question,
)

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden.json").read_text("utf-8"))
VALUES = {**GOLDEN["metadata_values"], "agent_metadata": bytes.fromhex(GOLDEN["metadata_values"]["agent_metadata"])}
METADATA = msgspec.convert(VALUES, StockMetadata)
PAYLOAD = bytes.fromhex(GOLDEN["payload"])


def test_the_fixture_is_of_the_newest_line_that_was_installed() -> None:
    assert (line_of(GOLDEN["vllm"]).version, GOLDEN["protocol"]) == ("0.32", 14)


@pytest.mark.parametrize(("pp_rank", "tp_rank", "frame"), GOLDEN["questions"])
def test_questions(pp_rank: int, tp_rank: int, frame: str) -> None:
    assert encode_question(pp_rank, tp_rank).hex() == frame
    assert decode_question(bytes.fromhex(frame)) == (pp_rank, tp_rank)


def test_metadata() -> None:
    assert encode_metadata(METADATA, line_of("0.32.0")).hex() == GOLDEN["metadata"]


@pytest.mark.parametrize(("clock_s", "frame"), GOLDEN["clocks"])
def test_answers(clock_s: float, frame: str) -> None:
    frames = [PAYLOAD, bytes.fromhex(frame)]
    assert encode_answer("ab" * 32, bytes.fromhex(GOLDEN["metadata"]), clock_s) == frames
    shown = decode_answer(frames)
    assert (shown.metadata, shown.compatibility_hash) == (METADATA, "ab" * 32)
    assert shown.fields == set(line_of("0.32").metadata)


def test_texts() -> None:
    request_id, readers, text = GOLDEN["read"]
    assert read_text(request_id, readers).hex() == text
    assert decode_text(bytes.fromhex(text)) == ReaderText((request_id,), readers)
    named, text = GOLDEN["heartbeat"]
    (beat,) = heartbeat_texts(named)
    assert beat.hex() == text
    assert decode_text(beat) == ReaderText(tuple(named))
    for payload in (beat, read_text(request_id, readers)):
        assert is_text(payload)
        with pytest.raises(WireError):
            decode_notification(payload)


def test_params() -> None:
    params = GOLDEN["params"]
    assert tuple(sorted(params)) == tuple(sorted(line_of("0.32").params))
    assert is_stock_params(params)
    ticket = read_stock_params(params, arrived=None, lease_s=30.0, block_ids_max=100)
    assert ticket.block_tables == ((4, 9, 2),)
    assert (ticket.num_tokens, ticket.offered_tokens, ticket.tp_size) == (300, 300, 1)
    assert ticket.address == "tcp://10.0.0.7:5600"
    assert (ticket.engine_id, ticket.request_id) == ("prefill-1", "cmpl-9d2f-0-0a1b2c3d")
    assert ticket.least_line == "0.29"
    assert ticket.to_params() == params


def in_doubles(value: Any) -> Any:
    """JSON as a gateway leaves it that keeps all numbers as doubles."""
    if isinstance(value, dict):
        return {name: in_doubles(one) for name, one in value.items()}
    if isinstance(value, list):
        return [in_doubles(one) for one in value]
    return float(value) if type(value) is int else value


@pytest.mark.parametrize("name", ["params", "group_params"])
def test_params_whose_numbers_have_become_doubles(name: str) -> None:
    plain, doubled = (
        read_stock_params(given, arrived=None, lease_s=30.0, block_ids_max=100)
        for given in (GOLDEN[name], in_doubles(GOLDEN[name]))
    )
    assert doubled == plain
    assert {type(number) for table in doubled.block_tables for number in table} == {int}
    assert type(doubled.first.port) is int


@pytest.mark.parametrize(
    "wrong", [{"remote_port": 5600.5}, {"remote_port": float("nan")}, {"remote_block_ids": [[0.5]]}]
)
def test_doubles_that_are_no_whole_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        read_stock_params({**in_doubles(GOLDEN["params"]), **wrong}, arrived=None, lease_s=30.0, block_ids_max=100)


def test_params_of_several_groups() -> None:
    """Of a window of 100 tokens in blocks of 64 a stock scheduler lists three, be they null or not."""
    ticket = read_stock_params(GOLDEN["group_params"], arrived=None, lease_s=30.0, block_ids_max=100)
    assert ticket.block_tables == ((4, 9, 2, 11, 5), (0, 21, 22))
    full = GroupFacts(name="full", block_size=64)
    window = GroupFacts(name="window", block_size=64, kind=GroupKind.SLIDING, window=99)
    assert needed_blocks(ticket, (full, window)) == ((4, 9, 2, 11, 5), (21, 22))


def test_the_agent_is_named_in_its_metadata() -> None:
    assert agent_name_of(METADATA.agent_metadata) == "abcd"
