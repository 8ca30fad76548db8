"""The lease book against a plain model of its promises, with timers that come early and late."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvflow.core.policy.lease_book import Counted, LeaseBook, LeaseEntry
from kvflow.core.policy.states import LeaseEvent, LeaseState
from tests.support.budgets import machine_test

HOLD_S, LIFETIME_S = 0.05, 10.0


def book() -> LeaseBook:
    return LeaseBook(hold_s=HOLD_S, lifetime_s=LIFETIME_S)


def open_one(
    book: LeaseBook, now_s: float, number: int = 0, *, ttl_s: float = 1.0, readers: int = 1, blocks: bool = True
) -> LeaseEntry:
    return book.open(f"lease {number}", f"req {number}", now_s, ttl_s=ttl_s, reader_count=readers, holds_blocks=blocks)


def test_a_lease_is_read_by_all_its_readers_and_held_for_a_moment() -> None:
    leases = book()
    entry = open_one(leases, 100.0, readers=2)
    assert leases.note_read("lease 0", "a", (1, 2))[0] is Counted.NOTED
    assert leases.note_read("lease 0", "a", (1, 2))[0] is Counted.DUPLICATE
    assert leases.note_read("lease 0", "b", (1, 2))[0] is Counted.NOTED
    assert entry.is_open
    assert leases.note_read("lease 0", "c", (1, 1))[0] is Counted.NOTED
    leases.hold(entry, 100.3)
    assert (entry.state, entry.ended_s) == (LeaseState.READ, 100.3)
    assert leases.note_read("lease 0", "d", (1, 1))[0] is Counted.LATE
    assert leases.next_s == pytest.approx(100.3 + HOLD_S)
    assert list(leases.release_held(100.3 + HOLD_S / 2)) == []
    assert list(leases.release_held(100.3 + HOLD_S)) == [entry]
    assert (len(leases), leases.next_s) == (0, None)


@pytest.mark.parametrize("share", [(0, 1), (2, 1), (-1, 1), (1, (1 << 32) + 1)])
def test_a_share_that_cannot_be_changes_nothing(share: tuple[int, int]) -> None:
    leases = book()
    entry = open_one(leases, 0.0)
    assert leases.note_read("lease 0", "a", share)[0] is Counted.MALFORMED
    assert (entry.is_open, entry.readers) == (True, {})


def test_renewals_move_the_end_up_to_the_lifetime_and_not_for_those_who_have_read() -> None:
    leases = book()
    entry = open_one(leases, 0.0, ttl_s=6.0, readers=2)
    assert leases.renew("lease 0", "a", 3.0) is Counted.NOTED
    assert entry.expires_s == 9.0
    assert leases.renew("lease 0", "a", 8.0) is Counted.NOTED
    assert entry.expires_s == LIFETIME_S
    leases.note_read("lease 0", "a", (1, 1))
    assert leases.renew("lease 0", "a", 8.5) is Counted.LATE
    assert leases.renew("nobody", "a", 8.5) is Counted.LATE
    assert list(leases.expire(9.0)) == []
    assert list(leases.expire(10.0)) == [entry]
    assert leases.renew("lease 0", "b", 10.0) is Counted.LATE


def test_a_lease_of_nothing_leaves_the_book_with_its_end() -> None:
    leases = book()
    entry = open_one(leases, 0.0, blocks=False)
    assert leases.end(entry, "all_read")
    assert not leases.end(entry, "revoke")
    leases.hold(entry, 0.0)
    assert (len(leases), leases.next_s, leases.ended_recently("req 0")) == (0, None, True)


def test_what_ended_long_ago_costs_no_memory() -> None:
    leases = book()
    for number in range(5000):
        entry = open_one(leases, 0.0, number, ttl_s=1e6)
        leases.end(entry, "revoke")
        leases.hold(entry, 0.0)
        assert list(leases.release_held(HOLD_S)) == [entry]
    assert len(leases._expiring) < 200
    assert len(leases._recent) <= 4096
    assert not leases.ended_recently("req 0")


class BookMachine(RuleBasedStateMachine):
    """Any sequence of calls, with a clock that a coarse timer reads late, or that calls too early."""

    def __init__(self) -> None:
        super().__init__()
        self.book = book()
        self.now_s = 0.0
        self.made = 0
        self.ended: dict[LeaseEntry, float] = {}
        self.freed: set[LeaseEntry] = set()
        self.promised: dict[LeaseEntry, float] = {}
        self.first_ttl_s: dict[LeaseEntry, float] = {}
        self.begun: dict[LeaseEntry, tuple[float, float]] = {}

    def some(self, number: int) -> LeaseEntry | None:
        entries = list(self.promised)
        return entries[number % len(entries)] if entries else None

    @rule(ttl_s=st.floats(0.001, 20.0), readers=st.integers(1, 3), blocks=st.booleans())
    def open(self, ttl_s: float, readers: int, blocks: bool) -> None:
        entry = open_one(self.book, self.now_s, self.made, ttl_s=ttl_s, readers=readers, blocks=blocks)
        self.made += 1
        self.first_ttl_s[entry] = ttl_s
        self.promised[entry] = self.now_s + ttl_s

    @rule(number=st.integers(0, 50), reader=st.sampled_from("abc"))
    def renew(self, number: int, reader: str) -> None:
        entry = self.some(number)
        if entry is None:
            return
        before_s, is_open = entry.expires_s, entry.is_open
        counted = self.book.renew(entry.lease_id, reader, self.now_s)
        if counted is Counted.NOTED:
            assert is_open
            assert reader not in entry.readers
            begun_s, ttl_s = self.begun.get(entry, (entry.offered_s, self.first_ttl_s[entry]))
            end_s = max(begun_s + max(ttl_s, LIFETIME_S), entry.offered_s + self.first_ttl_s[entry])
            self.promised[entry] = max(self.promised[entry], min(self.now_s + ttl_s, end_s))
        else:
            assert (counted, entry.expires_s) == (Counted.LATE, before_s)

    @rule(number=st.integers(0, 50), ttl_s=st.floats(0.001, 20.0))
    def restart(self, number: int, ttl_s: float) -> None:
        """As if it were opened now, but for what a reader may have been told before."""
        entry = self.some(number)
        if entry is not None:
            self.book.restart(entry, ttl_s, self.now_s)
            if entry.is_open:
                self.begun[entry] = (self.now_s, ttl_s)
                self.promised[entry] = max(self.promised[entry], self.now_s + ttl_s)

    @rule(number=st.integers(0, 50), reader=st.sampled_from("abc"), whole=st.integers(1, 3))
    def read(self, number: int, reader: str, whole: int) -> None:
        entry = self.some(number)
        if entry is None:
            return
        was_open, known = entry.is_open, reader in entry.readers
        counted, _ = self.book.note_read(entry.lease_id, reader, (1, whole))
        assert counted is (Counted.LATE if not was_open else Counted.DUPLICATE if known else Counted.NOTED)
        if was_open and not entry.is_open:
            assert sum(entry.readers.values(), Fraction()) >= entry.reader_count
            self.note_end(entry, LeaseState.READ)

    @rule(number=st.integers(0, 50), how=st.sampled_from(["revoke", "fail"]))
    def withdraw(self, number: int, how: LeaseEvent) -> None:
        entry = self.some(number)
        if entry is not None and self.book.end(entry, how):
            self.note_end(entry, LeaseState.FAILED if how == "fail" else LeaseState.REVOKED)

    @rule(seconds=st.floats(0.0, 5.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(late_s=st.floats(0.0, 2.0))
    def timer(self, late_s: float) -> None:
        """The moment that the book has asked for, or somewhat later."""
        next_s = self.book.next_s
        if next_s is not None:
            self.now_s = max(self.now_s, next_s + late_s)
            self.look()

    @rule()
    def look(self) -> None:
        for entry in self.book.expire(self.now_s):
            assert self.promised[entry] <= self.now_s, "ended before its time"
            self.note_end(entry, LeaseState.EXPIRED)
        for entry in self.book.release_held(self.now_s):
            assert self.now_s >= self.ended[entry] + HOLD_S, "freed before its hold was over"
            assert entry not in self.freed, "freed twice"
            self.freed.add(entry)
        for entry, promised_s in self.promised.items():
            assert promised_s > self.now_s or not entry.is_open, "not ended in time"
        held = [entry for entry in self.ended if entry not in self.freed and entry.holds_blocks]
        assert all(self.ended[entry] + HOLD_S > self.now_s for entry in held), "not freed in time"

    def note_end(self, entry: LeaseEntry, state: LeaseState) -> None:
        assert entry not in self.ended, "ended twice"
        assert entry.state is state
        self.book.hold(entry, self.now_s)
        self.ended[entry] = self.now_s

    @invariant()
    def books_balance(self) -> None:
        open_now = {entry for entry in self.promised if entry not in self.ended}
        held = {entry for entry in self.ended if entry.holds_blocks and entry not in self.freed}
        assert set(self.book.entries) == open_now | held
        for entry in self.promised:
            assert (self.book.open_lease_of(entry.request_id) is entry) == (entry in open_now)
        assert (self.book.next_s is None) == (not open_now and not held)
        if held:
            assert self.book.next_s is not None
            assert self.book.next_s <= min(self.ended[entry] for entry in held) + HOLD_S


TestBookMachine = machine_test(BookMachine, 25, 100, steps=50)


@given(st.lists(st.floats(0.001, 50.0), min_size=1, max_size=200))
def test_leases_expire_in_the_order_of_their_ends(ttls_s: list[float]) -> None:
    leases = book()
    entries = [open_one(leases, 0.0, number, ttl_s=ttl_s) for number, ttl_s in enumerate(ttls_s)]
    assert sorted(entries, key=lambda entry: entry.expires_s) == list(leases.expire(100.0))
