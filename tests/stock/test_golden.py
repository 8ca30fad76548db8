"""Bytes that kvflow makes and reads equal the bytes of vLLM's own encoders (tests/vllm/stock_bytes.py)."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest

from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.protocol.codec import WireError, decode_notification
from kvflow.errors import RequestError
from kvflow.stock.params import is_stock_params, needed_blocks, read_stock_params
from kvflow.stock.texts import ReaderText, decode_text, heartbeat_texts, is_text, read_text
from kvflow.stock.versions import LINES, line_of, line_of_params
from kvflow.stock.wire import (
    StockMetadata,
    agent_name_of,
    decode_answer,
    decode_question,
    encode_answer,
    encode_metadata,
    encode_question,
)

Golden: TypeAlias = dict[str, Any]
VERSIONS = ("0.32", "0.33")
FILES: dict[str, Golden] = {
    version: json.loads((Path(__file__).parent / f"golden-{version}.json").read_text("utf-8")) for version in VERSIONS
}
NEWEST = FILES[VERSIONS[-1]]


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest) -> Golden:
    return FILES[request.param]


def metadata_in(golden: Golden) -> StockMetadata:
    values = golden["metadata_values"]
    return msgspec.convert({**values, "agent_metadata": bytes.fromhex(values["agent_metadata"])}, StockMetadata)


def test_each_file_is_of_its_version_and_the_last_of_the_newest_line() -> None:
    found = [(line_of(one["vllm"]).version, one["protocol"]) for one in FILES.values()]
    assert found == [("0.32", 14), ("0.33", 15)]
    assert line_of(NEWEST["vllm"]) is LINES[-1]


def test_engines_of_two_versions_refuse_each_other_for_no_other_reason() -> None:
    """Of one model and cache: what else is on the wire has not changed."""
    assert len({one["hash"] for one in FILES.values()}) == len(FILES)
    assert len({one["metadata"] for one in FILES.values()}) == 1


def test_questions(golden: Golden) -> None:
    for pp_rank, tp_rank, frame in golden["questions"]:
        assert encode_question(pp_rank, tp_rank).hex() == frame
        assert decode_question(bytes.fromhex(frame)) == (pp_rank, tp_rank)


def test_metadata(golden: Golden) -> None:
    assert encode_metadata(metadata_in(golden), line_of(golden["vllm"])).hex() == golden["metadata"]


def test_answers(golden: Golden) -> None:
    metadata = bytes.fromhex(golden["metadata"])
    for clock_s, frame in golden["clocks"]:
        frames = [bytes.fromhex(golden["payload"]), bytes.fromhex(frame)]
        assert encode_answer(golden["hash"], metadata, clock_s) == frames
        shown = decode_answer(frames)
        assert (shown.metadata, shown.compatibility_hash) == (metadata_in(golden), golden["hash"])
        assert shown.fields == set(line_of(golden["vllm"]).metadata)
        assert shown.crc32 == zlib.crc32(metadata)


def test_texts(golden: Golden) -> None:
    request_id, readers, text = golden["read"]
    assert read_text(request_id, readers).hex() == text
    assert decode_text(bytes.fromhex(text)) == ReaderText((request_id,), readers)
    named, text = golden["heartbeat"]
    (beat,) = heartbeat_texts(named)
    assert beat.hex() == text
    assert decode_text(beat) == ReaderText(tuple(named))
    for payload in (beat, read_text(request_id, readers)):
        assert is_text(payload)
        with pytest.raises(WireError):
            decode_notification(payload)


def test_params(golden: Golden) -> None:
    params, line = golden["params"], line_of(golden["vllm"])
    assert sorted(params) == sorted(line.params)
    assert is_stock_params(params)
    ticket = read_stock_params(params, arrived=None, lease_s=30.0, block_ids_max=100)
    assert ticket.block_tables == ((4, 9, 2),)
    assert (ticket.num_tokens, ticket.offered_tokens, ticket.tp_size) == (300, 300, 1)
    assert ticket.generation == params.get("remote_registration_generation", 0)
    assert ticket.address == "tcp://10.0.0.7:5600"
    assert (ticket.engine_id, ticket.request_id) == ("prefill-1", "cmpl-9d2f-0-0a1b2c3d")
    assert ticket.least_line == line_of_params(line.params).version
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
        for given in (NEWEST[name], in_doubles(NEWEST[name]))
    )
    assert doubled == plain
    assert {type(number) for table in doubled.block_tables for number in table} == {int}
    assert type(doubled.first.port) is int
    assert (type(doubled.generation), doubled.generation) == (int, 2)


@pytest.mark.parametrize(
    "wrong", [{"remote_port": 5600.5}, {"remote_port": float("nan")}, {"remote_block_ids": [[0.5]]}]
)
def test_doubles_that_are_no_whole_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        read_stock_params({**in_doubles(NEWEST["params"]), **wrong}, arrived=None, lease_s=30.0, block_ids_max=100)


def test_params_of_several_groups() -> None:
    """Of a window of 100 tokens in blocks of 64 a stock scheduler lists three, be they null or not."""
    ticket = read_stock_params(NEWEST["group_params"], arrived=None, lease_s=30.0, block_ids_max=100)
    assert ticket.block_tables == ((4, 9, 2, 11, 5), (0, 21, 22))
    full = GroupFacts(name="full", block_size=64)
    window = GroupFacts(name="window", block_size=64, kind=GroupKind.SLIDING, window=99)
    assert needed_blocks(ticket, (full, window)) == ((4, 9, 2, 11, 5), (21, 22))


def test_the_agent_is_named_in_its_metadata() -> None:
    assert agent_name_of(metadata_in(NEWEST).agent_metadata) == "abcd"
