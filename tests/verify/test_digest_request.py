"""The messages of digests on the wire: their bytes stay, and only a rank that asks for digests reads them."""

from __future__ import annotations

from functools import partial

import pytest

from kvflow.core.protocol import codec
from kvflow.verify.digest_request import DigestPart, DigestRequest, Digests
from tests.support.part_messages import ASKED, check_message, check_unknown_to_the_core

PARTS = (DigestPart("", (0, 7), 8, 4, 32, 16, 41), DigestPart("conv.x", (3,), 0, 1, 2, 40, 41))
ASKING = DigestRequest(**ASKED, request_id="req", lease_id="0123456789abcdef" * 2, definition=1, parts=PARTS)
KINDS = codec.requests_with([DigestRequest])
DIGESTS = Digests(values=(0, (1 << 64) - 1))


def test_they_are_bounded_and_survive_the_wire() -> None:
    """The 64 bits of a digest are what MessagePack has."""
    check_message(ASKING, partial(codec.decode_request, decoder=KINDS))
    check_unknown_to_the_core(ASKING)
    check_message(DIGESTS, partial(codec.decode_reply, question=ASKING), without_bounds="Digests.values[]")
    assert codec.decode_reply(codec.encode(Digests(values=())), ASKING) == Digests(values=())


def test_a_reply_of_a_part_answers_no_question_of_the_core() -> None:
    with pytest.raises(codec.WireError, match="digests"):
        codec.decode_reply(codec.encode(DIGESTS))


def test_their_bytes_are_those_of_protocol_6() -> None:
    asked = b"\xa6reader\xaereader/0.0.0#1\xa6target\x93\xa6holder\x93\x00\x00\x00\xb1tcp://127.0.0.1:1"
    lease = b"\xaarequest_id\xa3req\xa8lease_id\xd9\x200123456789abcdef0123456789abcdef"
    parts = b"\x92\x97\xa0\x92\x00\x07\x08\x04\x20\x10\x29\x97\xa6conv.x\x91\x03\x00\x01\x02\x28\x29"
    whole = b"\x87\xa4type\xabget_digests" + asked + lease + b"\xaadefinition\x01\xa5parts" + parts
    assert codec.encode(ASKING) == whole
    assert codec.encode(DIGESTS) == b"\x82\xa4type\xa7digests\xa6values\x92\x00\xcf" + b"\xff" * 8
