"""The message of redirects on the wire: its bytes stay, and a rank without the part refuses it by its kind."""

from __future__ import annotations

from functools import partial

from kvflow.core.protocol import codec
from kvflow.growing.decline_request import DeclineRequest
from tests.support.part_messages import ASKED, check_message, check_unknown_to_the_core

DECLINED = DeclineRequest(**ASKED, request_id="secret", reason="it came to us", instead=b"\x80")


def test_it_is_bounded_and_survives_the_wire() -> None:
    check_message(DECLINED, partial(codec.decode_request, decoder=codec.requests_with([DeclineRequest])))
    check_unknown_to_the_core(DECLINED)


def test_its_bytes_are_those_of_protocol_6() -> None:
    place = [b"\xa6holder", b"\x93\x00\x00\x00", b"\xb1tcp://127.0.0.1:1"]
    assert codec.encode(DECLINED) == b"".join(
        (
            *(b"\x86", b"\xa4type\xa7decline", b"\xa6reader\xaereader/0.0.0#1"),
            *(b"\xa6target\x93", *place, b"\xaarequest_id\xa6secret", b"\xa6reason\xadit came to us"),
            b"\xa7instead\xc4\x01\x80",
        )
    )
