"""An entry's header: a written header is read, and no other bytes pass for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import RequestError
from kvflow.storage.entry import (
    KEY_BYTES_MAX,
    EntryHeader,
    NotAnEntry,
    checked_key,
    decode_header,
    encode_header,
    entry_name,
    fingerprint_of,
)
from tests.support.tests_support import each

HEADER = EntryHeader(
    fingerprint=b"f" * 32, key=b"prompt", num_tokens=40, block_counts=(3, 1), data_bytes=12_288, digests=b"d" * 64
)
headers = st.builds(
    EntryHeader,
    fingerprint=st.binary(min_size=32, max_size=32),
    key=st.binary(min_size=1, max_size=KEY_BYTES_MAX),
    num_tokens=st.integers(1, 1 << 40),
    block_counts=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=64).map(tuple),
    data_bytes=st.integers(0, 1 << 50),
    digests=st.binary(max_size=3 * 4096),
)


@given(headers)
def test_what_was_written_is_read(header: EntryHeader) -> None:
    start = encode_header(header)
    assert len(start) == header.data_start
    assert len(start) % 4096 == 0
    assert decode_header(start, header.file_bytes) == header


def test_a_file_that_was_cut_anywhere_is_no_entry() -> None:
    start = encode_header(HEADER)
    whole = len(start) + HEADER.data_bytes
    for size in [*range(200), *range(len(start) - 3, len(start) + 3), whole - 1, whole + 1]:
        with pytest.raises(NotAnEntry):
            decode_header(start[:size], size)


def test_a_header_with_any_bit_flipped_is_none_or_says_the_same() -> None:
    start = encode_header(HEADER)
    used = len(start.rstrip(b"\0"))
    for at in range(len(start)):
        for bit in range(8) if at < used else (3,):
            changed = bytearray(start)
            changed[at] ^= 1 << bit
            if at < used:
                with pytest.raises(NotAnEntry):
                    decode_header(bytes(changed), HEADER.file_bytes)
            else:
                assert decode_header(bytes(changed), HEADER.file_bytes) == HEADER  # what fills it up means nothing


@given(st.binary(max_size=100))
def test_what_is_none_is_refused(junk: bytes) -> None:
    for start in (junk, encode_header(HEADER)[:16] + junk, encode_header(HEADER)[:24] + junk):
        with pytest.raises(NotAnEntry):
            decode_header(start, len(start))


def test_names_differ_by_layout_and_by_key() -> None:
    one, other = fingerprint_of(["a", 1]), fingerprint_of(["a", 2])
    assert one == fingerprint_of(["a", 1])
    assert len({entry_name(one, b"k"), entry_name(other, b"k"), entry_name(one, b"l")}) == 3


@each(("key", "plain"), [("k", b"k"), (b"k", b"k"), ("\u00fc", b"\xc3\xbc"), (b"x" * 256, b"x" * 256)])
def test_keys(key: object, plain: bytes) -> None:
    assert checked_key(key, "key") == plain


@each("key", ["", b"", "x" * 257, b"x" * 257, "\u00fc" * 129, None, 1, bytearray(b"k"), ["k"], "\ud800"])
def test_what_cannot_be_a_key_is_refused(key: object) -> None:
    with pytest.raises(RequestError, match=r"^key: "):
        checked_key(key, "key")
