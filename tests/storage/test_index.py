"""Room and eviction: the bound always holds, the least recently used entry goes first, and entries in use stay."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvflow.errors import StoreFull
from kvflow.storage.index import Entry, StoreIndex
from tests.support.budgets import examples

BOUND = 100


def entry(name: str, size_bytes: int = 30) -> Entry:
    return Entry(name, f"{name}-file", size_bytes)


def saved(index: StoreIndex, *entries: Entry) -> list[str]:
    """Save the entries in turn. Return the evicted entries."""
    gone = []
    for one in entries:
        gone += [victim.name for victim in index.reserve(one.size_bytes, "save")]
        index.commit(one)
    return gone


def filled(names: str) -> tuple[StoreIndex, *tuple[Entry, ...]]:
    """An index with entries of these names, and they."""
    index, entries = StoreIndex(BOUND), [entry(name) for name in names]
    assert saved(index, *entries) == []
    return index, *entries


def test_who_was_not_used_for_longest_goes_first() -> None:
    index, a, _, _ = filled("abc")
    index.touch(a)
    assert saved(index, entry("d")) == ["b"]
    assert saved(index, entry("e", 60)) == ["c", "a"]
    assert (len(index), index.used_bytes) == (2, 90)


def test_what_is_read_stays_and_the_next_one_goes() -> None:
    index, a, _, _ = filled("abc")
    a.readers += 1
    assert saved(index, entry("d")) == ["b"]
    with pytest.raises(StoreFull, match="'save': 80 bytes more, 90 of 100 are used; every other entry"):
        index.reserve(80, "save")
    assert len(index) == 3, "nobody has gone for what does not fit"
    index.end_read(a)
    assert saved(index, entry("e", 80)) == ["a", "c", "d"]


def test_what_was_replaced_counts_until_nobody_reads_it() -> None:
    (index, old), new = filled("a"), entry("a")
    old.readers += 1
    saved(index, new)
    assert (index.find("a"), index.used_bytes) == (new, 60)
    index.touch(old)
    index.end_read(old)
    assert (len(index), index.used_bytes) == (1, 30)
    index.drop(old)
    index.drop(new)
    index.drop(new)
    assert (len(index), index.used_bytes) == (0, 0)


def test_what_was_found_counts_and_makes_room_for_a_smaller_bound() -> None:
    index = StoreIndex(BOUND, [entry("a", 50), entry("b", 50), entry("c", 50)])
    assert index.used_bytes == 150
    assert [one.name for one in index.reserve(0, "save")] == ["a"]


def test_what_could_not_be_removed_is_there_again_and_the_first_to_go() -> None:
    index, a, b, _ = filled("abc")
    assert index.reserve(60, "save") == [a, b]
    assert index.put_back([b]) == []
    index.release(60)
    assert (len(index), index.used_bytes) == (2, 60)
    assert saved(index, entry("d", 60)) == ["b"]


def test_what_was_saved_again_meanwhile_is_kept_when_the_old_one_could_not_be_removed() -> None:
    (index, old), new = filled("a"), entry("a")
    assert index.reserve(80, "save") == [old]
    index.release(80)
    saved(index, new)
    assert index.put_back([old]) == [old]
    assert (index.find("a"), len(index), index.used_bytes) == (new, 1, 30)


def test_what_cannot_be_read_is_not_found_and_the_first_to_go() -> None:
    index, a, b, c = filled("abc")
    assert index.mark_unreadable(b)
    assert not index.mark_unreadable(b), "it was"
    assert (index.find("b"), index.used_bytes) == (None, 90), "it takes room"
    assert saved(index, entry("d")) == ["b"]
    assert not index.mark_unreadable(b), "it is gone"
    assert index.mark_unreadable(a)
    index.touch(a)
    assert index.find("a") is a, "somebody could read it"
    index.mark_unreadable(c)
    new = entry("c", 0)
    assert index.commit(new) is c
    assert (index.find("c"), index.used_bytes) == (new, 60)
    assert index.commit(new) is None, "it was added before"
    index.drop(new)
    assert index.commit(new) is None, "and was dropped since"
    assert (index.find("c"), index.used_bytes) == (None, 60)


class Index(RuleBasedStateMachine):
    """The index, and the entries on disk."""

    def __init__(self) -> None:
        super().__init__()
        self.index = StoreIndex(BOUND)
        self.disk: set[Entry] = set()
        self.writing: list[Entry] = []
        self.reading: list[Entry] = []

    @rule(name=st.sampled_from("abcdef"), size=st.integers(1, BOUND))
    def begin_save(self, name: str, size: int) -> None:
        try:
            victims = self.index.reserve(size, "save")
        except StoreFull:
            kept = sum(one.size_bytes for one in {*self.writing, *self.reading})
            assert kept + size > BOUND, "there was room"
            return
        assert not set(victims) & set(self.reading)
        self.disk -= set(victims)
        self.writing.append(entry(name, size))
        self.disk.add(self.writing[-1])

    @precondition(lambda self: self.writing)
    @rule(complete=st.booleans())
    def end_save(self, complete: bool) -> None:
        one = self.writing.pop(0)
        if not complete:
            self.index.release(one.size_bytes)
            self.disk.discard(one)
        elif (before := self.index.commit(one)) is not None and before not in self.reading:
            self.disk.discard(before)

    @rule(name=st.sampled_from("abcdef"))
    def begin_read(self, name: str) -> None:
        found = self.index.find(name)
        if found is not None:
            found.readers += 1
            self.reading.append(found)

    @precondition(lambda self: self.reading)
    @rule(damaged=st.booleans())
    def end_read(self, damaged: bool) -> None:
        one = self.reading.pop(0)
        if damaged:
            self.index.drop(one)
        self.index.touch(one)
        self.index.end_read(one)
        if one.dropped and one not in self.reading:
            self.disk.discard(one)

    @invariant()
    def the_bound_holds_and_the_books_are_right(self) -> None:
        assert self.index.used_bytes == sum(one.size_bytes for one in self.disk) <= BOUND


TestIndex = Index.TestCase
TestIndex.settings = examples(50, 500)
