"""Seals are read as a peer reads them: raw bytes at the published address. No old id may be found there."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvflow.core.bounds import LEASE_ID_CHARS
from kvflow.core.cache.regions import Device
from kvflow.core.plan.descriptors import Piece
from kvflow.core.protocol.proof import FAILED, SEAL_SIZE_BYTES, SealTable, fetch_seal, quick_read_max_s
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import RequestError
from tests.support.budgets import machine_test
from tests.support.tests_support import any_ticket, each

COUNT = 4
ZERO_ID = "0" * LEASE_ID_CHARS
lease_ids = st.binary(min_size=SEAL_SIZE_BYTES, max_size=SEAL_SIZE_BYTES).filter(any).map(bytes.hex)
counts = st.integers(1, 2**32 - 1)
SECRET_CHARS = 24  # hexadecimal digits of an id that no count changes


def has_secret(lease_id: str) -> bool:
    return any(bytes.fromhex(lease_id[:SECRET_CHARS]))


def word_at(table: SealTable, index: int) -> bytes:
    return ctypes.string_at(table.address(index), SEAL_SIZE_BYTES)


class SealsAgainstModel(RuleBasedStateMachine):
    """The model: the seals in use, the id that each holds, and the number of blocks that it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SealTable(COUNT)
        self.span = self.table.span  # peers keep the address for the life of the runtime
        self.taken: dict[int, tuple[str, int] | None] = {}
        self.known: set[str] = set()
        self.failed: set[str] = set()

    @rule()
    def take(self) -> None:
        index = self.table.take_slot()
        if len(self.taken) == COUNT:
            assert index is None
            return
        assert index is not None
        assert 0 <= index < COUNT
        assert index not in self.taken
        self.taken[index] = None

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), lease_id=lease_ids.filter(has_secret), missing=st.just(0) | counts)
    def seal(self, data: st.DataObject, lease_id: str, missing: int) -> None:
        index = data.draw(st.sampled_from(sorted(self.taken)))
        self.table.seal(index, lease_id, missing)
        self.taken[index] = (lease_id, missing)
        self.known.add(lease_id)

    def some_lease(self, data: st.DataObject) -> tuple[int, str]:
        """A word that is taken, and the id that it holds."""
        return data.draw(st.sampled_from([(index, held[0]) for index, held in sorted(self.taken.items()) if held]))

    @precondition(lambda self: any(self.taken.values()))
    @rule(data=st.data(), missing=st.just(0) | counts)
    def count_down(self, data: st.DataObject, missing: int) -> None:
        """Or up: seals do not care."""
        index, lease_id = self.some_lease(data)
        self.table.seal(index, lease_id, missing)
        self.taken[index] = (lease_id, missing)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.taken)))
        self.table.free_slot(index)
        del self.taken[index]

    @precondition(lambda self: any(self.taken.values()))
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        """It goes on saying that its lease has failed, until it is taken and another one is written."""
        index, lease_id = self.some_lease(data)
        self.table.seal(index, lease_id, FAILED)
        self.table.retire_slot(index)
        assert self.table.tokens_missing(index, lease_id) == FAILED
        del self.taken[index]
        self.failed.add(lease_id)

    @invariant()
    def words_are_conserved(self) -> None:
        assert (self.table.count, self.table.span) == (COUNT, self.span)
        assert self.table.used == len(self.taken)

    @invariant()
    def a_word_holds_its_open_lease_and_no_other(self) -> None:
        """SealProof (invariant I2) rests on this: an id that was wiped or overwritten is found nowhere."""
        for index in range(COUNT):
            current, missing = self.taken.get(index) or (None, 0)
            for lease_id in self.known:
                open_and_whole = lease_id == current and missing == 0
                assert (self.table.tokens_missing(index, lease_id) == 0) == open_and_whole
                assert (word_at(self.table, index) == bytes.fromhex(lease_id)) == open_and_whole
                if lease_id[:SECRET_CHARS] != (current or "")[:SECRET_CHARS]:
                    said = self.table.tokens_missing(index, lease_id)
                    assert said is None or (said == FAILED and lease_id in self.failed)
                elif lease_id == current:
                    assert self.table.tokens_missing(index, lease_id) == missing


TestSealsAgainstModel = machine_test(SealsAgainstModel, 20, 80, steps=20)


def test_what_has_failed_is_the_last_to_be_taken() -> None:
    """Of the failed seals, the oldest is taken first."""
    table = SealTable(4)
    ids = {index: f"{index + 1:032x}" for index in (table.take_slot() for _ in range(4)) if index is not None}
    for index, lease_id in ids.items():
        table.seal(index, lease_id, FAILED)
    first, second, third, fourth = ids
    table.retire_slot(third)
    table.free_slot(second)
    table.retire_slot(fourth)
    table.free_slot(first)
    assert [table.take_slot() for _ in range(5)] == [first, second, third, fourth, None]
    assert [table.tokens_missing(index, ids[index]) for index in ids] == [None, None, FAILED, FAILED]


@given(lease_id=lease_ids.filter(has_secret), missing=counts)
def test_a_fetched_seal_holds_what_the_producer_sealed(lease_id: str, missing: int) -> None:
    """And says how many blocks are missing."""
    producer, reader = SealTable(COUNT), SealTable(COUNT)
    fetch = fetch_seal(Piece(reader.address(1), producer.address(2), SEAL_SIZE_BYTES))
    assert (fetch.sizes.tolist(), producer.span.size_bytes) == ([SEAL_SIZE_BYTES], COUNT * SEAL_SIZE_BYTES)
    assert producer.address(2) == producer.span.address + 2 * SEAL_SIZE_BYTES
    assert fetch.local_device == fetch.remote_device == Device("cpu", 0)
    for count in (missing, missing // 2, 0):
        producer.seal(2, lease_id, count)
        ctypes.memmove(int(fetch.local[0]), int(fetch.remote[0]), int(fetch.sizes[0]))
        assert reader.tokens_missing(1, lease_id) == count
        assert [index for index in range(COUNT) if reader.tokens_missing(index, lease_id) == 0] == (
            [] if count else [1]
        )


@given(first=lease_ids, second=lease_ids, torn_at=st.integers(1, SEAL_SIZE_BYTES - 1))
def test_a_torn_word_matches_neither_lease(first: str, second: str, torn_at: int) -> None:
    """A reader may fetch the word while the producer changes it."""
    cut = 2 * torn_at
    torn = first[:cut] + second[cut:]
    if torn in (first, second):
        return
    table = SealTable(1)
    table.seal(0, torn)
    for lease_id in (first, second):
        assert table.tokens_missing(0, lease_id) != 0
        if torn[:SECRET_CHARS] != lease_id[:SECRET_CHARS]:
            assert table.tokens_missing(0, lease_id) is None


@each("state", ["never used", "taken", "wiped"])
def test_an_empty_word_is_a_seal_of_no_ticket(state: str) -> None:
    """An empty word is all zeros, and so is a reader's landing place before anything was fetched into it.

    A forged ticket with the id of all zeros must not pass for a lease that is open.
    """
    table = SealTable(1)
    index = 0 if state == "never used" else table.take_slot()
    assert index is not None
    if state == "wiped":
        table.seal(index, "ab" * 16)
        table.free_slot(index)
    params = any_ticket().to_params()
    params["kvflow"]["ranks"][0]["lease_id"] = ZERO_ID
    with pytest.raises(RequestError, match="lease_id"):
        Ticket.from_params(params)
    for lease_id in ("ab" * 16, ZERO_ID):
        assert table.tokens_missing(index, "ab" * 16) != 0
        assert table.tokens_missing(index, lease_id) is None


@given(hold_s=st.floats(min_value=1e-6, max_value=60))
def test_a_seal_fetched_meanwhile_is_trusted_for_half_of_the_hold_at_most(hold_s: float) -> None:
    """The rest covers the drift of two clocks and the coarseness of timers."""
    assert 0 < quick_read_max_s(hold_s) <= hold_s / 2


@given(lease_id=lease_ids, end=st.integers(0, SEAL_SIZE_BYTES - 1))
def test_a_part_of_an_id_is_held_by_no_word(lease_id: str, end: int) -> None:
    """Also if only zeros are left out."""
    table = SealTable(1)
    part = lease_id[: 2 * end]
    table.seal(0, part + "00" * (SEAL_SIZE_BYTES - end))
    for other in (part, lease_id + "00"):
        assert table.tokens_missing(0, other) != 0
        assert table.tokens_missing(0, other) is None


# --- blocks that are missing yet


@given(lease_id=lease_ids.filter(has_secret), missing=counts)
def test_counting_changes_the_last_four_bytes_alone(lease_id: str, missing: int) -> None:
    """So they change in one store, and a reader sees the old count or the new one."""
    table = SealTable(1)
    table.seal(0, lease_id)
    whole = word_at(table, 0)
    table.seal(0, lease_id, missing)
    partial = word_at(table, 0)
    assert partial[:12] == whole[:12]
    assert partial[12:] != whole[12:]
    assert table.address(0) % 4 == 0


def test_a_word_that_counts_down_to_zeros_is_nobodys() -> None:
    """An id that is nearly all zeros, and as many missing blocks as make the rest zeros."""
    table = SealTable(1)
    lease_id = "00" * 12 + "05000000"
    table.seal(0, lease_id, 5)
    assert word_at(table, 0) == bytes(SEAL_SIZE_BYTES)
    assert table.tokens_missing(0, lease_id) is None
