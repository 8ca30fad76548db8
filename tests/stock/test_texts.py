"""Notifications: a stock producer gets only texts that it expects, and texts without a meaning are refused."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.config import RANKS_MAX
from kvflow.core.protocol.codec import WireError, encode
from kvflow.core.protocol.notifications import ReadDone, Renew
from kvflow.core.protocol.spare import SPARE_MARK, bare_id
from kvflow.stock.texts import (
    RECEIVED_BYTES_MAX,
    TEXT_BYTES_MAX,
    ReaderText,
    decode_text,
    fits_text,
    heartbeat_texts,
    is_text,
    read_text,
)
from tests.support.tests_support import each


def as_stock_reads(payload: bytes) -> tuple[str, int] | list[str]:
    """A stock producer's own steps (pull_worker._get_new_notifs)."""
    text = payload.decode("utf-8")
    if text.startswith("HB:"):
        return text[3:].split(",")
    request_id, readers = text.rsplit(":", 1)
    return request_id, int(readers)


@each("request_id", ["", "a,b", "HB:x", "PUSH_REG:x", "\n", "é", "x" * 1025, "\ud800"])
def test_an_id_that_no_text_can_name_is_never_sent(request_id: str) -> None:
    assert not fits_text(request_id)
    with pytest.raises(ValueError, match="can"):
        read_text(request_id, 1)
    with pytest.raises(ValueError, match="can"):
        list(heartbeat_texts([request_id]))


@each("readers", [0, -1, RANKS_MAX + 1])
def test_a_number_of_readers_that_cannot_be_is_never_sent(readers: int) -> None:
    with pytest.raises(ValueError, match=str(readers)):
        read_text("id", readers)


@given(st.text(max_size=40), st.integers(-5, 2000))
def test_whatever_is_sent_is_read_by_a_stock_producer_as_it_was_meant(request_id: str, readers: int) -> None:
    if fits_text(request_id) and 1 <= readers <= RANKS_MAX:
        assert as_stock_reads(read_text(request_id, readers)) == (request_id, readers)
        assert decode_text(read_text(request_id, readers)) == ReaderText((request_id,), readers)


@given(st.lists(st.text("abc-:0#", min_size=1, max_size=900).filter(fits_text), max_size=60, unique=True))
def test_heartbeats_name_all_of_many_in_bounded_texts(names: list[str]) -> None:
    texts = list(heartbeat_texts(names))
    assert all(len(text) <= TEXT_BYTES_MAX for text in texts)
    assert [name for text in texts for name in as_stock_reads(text)] == names
    heard = [decode_text(text) for text in texts]
    assert [name for one in heard if not one.readers for name in one.request_ids] == names


NO_READS = ["", "no colon", ":1", "id:", "id:x", "id:-1", "id:0", "id:1.0", "id:9999999", "id:٣"]
NO_BEATS = ["HB:", "HB:a,,b", "HB:" + "a," * 100_000 + "a"]
NO_TEXTS = [b"\xff:1", b"PUSH_REG:\x80", b"x" * (RECEIVED_BYTES_MAX - 1) + b":1"]


@each("payload", [*map(str.encode, NO_READS + NO_BEATS), *NO_TEXTS])
def test_a_text_that_says_nothing_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode_text(payload)


def test_a_reader_with_many_requests_names_all_in_one_heartbeat() -> None:
    """vLLM's bounds it nowhere: dropped, it would let every lease run out that it names."""
    names = [f"cmpl-{number:036}-0-aabbccdd#{number:032}" for number in range(2000)]
    heard = decode_text(("HB:" + ",".join([*names, *names[:9]])).encode())
    assert heard == ReaderText(tuple(names))


def test_our_own_notifications_are_told_from_texts_by_their_first_byte() -> None:
    for message in (ReadDone(("0" * 32,), "reader", 1, 2), Renew(lease_ids=("0" * 32,), reader="reader")):
        assert not is_text(encode(message))
    assert is_text(b"id:1")
    assert is_text(b"HB:id")


def test_noise_is_refused_or_read() -> None:
    rng = Random(7)
    for _ in range(20_000):
        payload = bytearray(rng.choice([b"cmpl-1-0-aabbccdd:1", b"HB:a,b", msgspec.msgpack.encode(["HB"])]))
        for _ in range(rng.randrange(4)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        try:
            found = decode_text(bytes(payload))
        except WireError:
            continue
        assert all(map(fits_text, found.request_ids))


def test_what_is_written_behind_an_id_is_taken_off() -> None:
    """Stock readers name a request by its whole id, with the suffix."""
    assert decode_text(b"cmpl~kvflow~1#secret~kvflow~AbC-_==:2") == ReaderText(("cmpl~kvflow~1#secret",), 2)
    assert decode_text(b"HB:a~kvflow~AAAA,b,a") == ReaderText(("a", "b"))
    many = [f"cmpl-{number}#secret{SPARE_MARK}" + "A" * 400 for number in range(4000)]
    heard = decode_text(f"HB:{','.join(many)}".encode())
    assert heard == ReaderText(tuple(map(bare_id, many)))
