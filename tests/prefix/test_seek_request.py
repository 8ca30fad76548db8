"""The message of prefixes on the wire: accepted by a rank with the part, refused by a rank without it."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import Address
from kvflow.prefix.keys import KEY_BYTES
from kvflow.prefix.seek_request import KEYS_MAX, SeekRequest
from tests.core.protocol.test_messages import HOSTILE, altered, unbounded
from tests.support.tests_support import each

ASKED = SeekRequest(
    reader="reader/0.0.0#1",
    target=Address("holder", Rank(0, 0, 0), "tcp://127.0.0.1:1"),
    request_id="question",
    keys=bytes(2 * KEY_BYTES),
    key_tokens=16,
)
KINDS = codec.requests_with([SeekRequest])


def test_every_field_has_bounds() -> None:
    assert [*unbounded(inspect.type_info(SeekRequest), "", set())] == []


def test_it_is_decoded_beside_the_questions_of_the_core() -> None:
    metadata = messages.MetadataRequest(reader=ASKED.reader, target=ASKED.target)
    for asked in (ASKED, metadata):
        assert codec.decode_request(codec.encode(asked), KINDS) == asked
    assert codec.decode_request(codec.encode(metadata)) == metadata


def test_a_reader_from_before_weights_had_versions_is_understood() -> None:
    """As one that was never told of its weights."""
    fields = msgspec.to_builtins(ASKED, builtin_types=(bytes,))
    assert fields.pop("weights") == ""
    assert codec.decode_request(msgspec.msgpack.encode(fields), KINDS) == ASKED


@each("kind", ["seek", "get_secrets", "x" * 40])
def test_what_nobody_answers_is_refused_by_its_kind(kind: str) -> None:
    """Without the part the message is refused by its kind. With the part the error names the wrong field."""
    for more in ({}, msgspec.to_builtins(ASKED), {"keys": 7}):
        with pytest.raises(codec.UnknownRequest, match=f"^nothing here answers a question of kind '{kind}'$"):
            codec.decode_request(msgspec.msgpack.encode({**more, "type": kind}))


@each("keys", [b"", bytes(KEY_BYTES - 1), bytes(KEY_BYTES * KEYS_MAX + 1), "text", None])
def test_keys_are_so_many_at_most(keys: Any) -> None:
    wrong = {**msgspec.to_builtins(ASKED, builtin_types=(bytes,)), "keys": keys}
    with pytest.raises(codec.WireError, match="keys") as caught:
        codec.decode_request(msgspec.msgpack.encode(wrong), KINDS)
    assert not isinstance(caught.value, codec.UnknownRequest)


@each("hostile", HOSTILE)
def test_whatever_is_in_a_field_it_is_decoded_or_refused(hostile: Any) -> None:
    for changed in altered(msgspec.to_builtins(ASKED, builtin_types=(bytes,)), hostile):
        with contextlib.suppress(codec.WireError):
            assert isinstance(codec.decode_request(msgspec.msgpack.encode(changed), KINDS), SeekRequest)
