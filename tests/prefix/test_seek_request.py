"""The messages of prefixes on the wire: accepted by a rank with the part, refused by a rank without it."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import Address
from kvflow.prefix.hand_on_request import (
    HANDED_ON_PREFIXES_MAX,
    HandedOn,
    HandedOnKeys,
    HandedOnKeysRequest,
    HandOnRequest,
)
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
HANDED_ON = HandOnRequest(
    reader="leaving/0.0.0#1",
    target=ASKED.target,
    hand_on_id="0" * 32,
    sender=Address("leaving", Rank(0, 0, 0), "tcp://127.0.0.1:2"),
    prefixes=7,
    bytes_max=1 << 30,
    within_s=10.0,
)
KEYS_ASKED = HandedOnKeysRequest(reader=ASKED.reader, target=ASKED.target, hand_on_id="0" * 32, index=6)
KINDS = codec.requests_with([SeekRequest, HandOnRequest, HandedOnKeysRequest])
KEYS, TAKEN = HandedOnKeys(keys=bytes(64), key_tokens=16), HandedOn(prefixes=7, tokens=112, size_bytes=4096)
"""Replies."""


def test_every_field_has_bounds() -> None:
    for kind in (SeekRequest, HandOnRequest, HandedOnKeysRequest, HandedOnKeys, HandedOn):
        assert [*unbounded(inspect.type_info(kind), "", set())] == []


def test_replies_are_decoded_for_their_questions_only() -> None:
    for asked, reply in ((HANDED_ON, TAKEN), (KEYS_ASKED, KEYS)):
        assert codec.decode_reply(codec.encode(reply), asked) == reply
        with pytest.raises(codec.WireError):
            codec.decode_reply(codec.encode(reply), ASKED)


@each("changes", [{"prefixes": HANDED_ON_PREFIXES_MAX + 1}, {"prefixes": -1}, {"within_s": 1e9}, {"bytes_max": -1}])
def test_an_offer_is_bounded(changes: dict[str, Any]) -> None:
    with pytest.raises(codec.WireError, match=next(iter(changes))):
        codec.decode_request(codec.encode(msgspec.structs.replace(HANDED_ON, **changes)), KINDS)


def test_it_is_decoded_beside_the_questions_of_the_core() -> None:
    metadata = messages.MetadataRequest(reader=ASKED.reader, target=ASKED.target)
    for asked in (ASKED, HANDED_ON, KEYS_ASKED, metadata):
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
    for asked in (ASKED, HANDED_ON, KEYS_ASKED):
        for changed in altered(msgspec.to_builtins(asked, builtin_types=(bytes,)), hostile):
            with contextlib.suppress(codec.WireError):
                assert isinstance(codec.decode_request(msgspec.msgpack.encode(changed), KINDS), type(asked))
