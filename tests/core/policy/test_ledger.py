"""The ledger against a naive model: allowed uses, refused uses, and accounts that always add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvflow.core.cache.groups import CacheGroup
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.policy.ledger import BlockCounts, BlockLedger
from kvflow.errors import BlocksBusy, RequestError
from tests.support.budgets import machine_test
from tests.support.tests_support import each

TOTAL = 7
block_sets = st.lists(st.integers(0, TOTAL - 1), unique=True, max_size=4)


def blocks_of(name: str, num_blocks: int, pool: str, *, split: int = 1) -> CacheGroup:
    """Return a group of one layer with `num_blocks` blocks."""
    caches = {f"{name}.0": torch.zeros(num_blocks, 1, 1, 2)}
    return CacheGroup(name, caches, CacheLayout.infer(caches, order="NHD", block_size=1), pool=pool, split=split)


def array(ids: list[int]) -> BlockIds:
    return np.array(ids, dtype=np.int64)


class LedgerAgainstModel(RuleBasedStateMachine):
    """The model: a list of open leases, and two lists of loads, each a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = BlockLedger([blocks_of("kv", TOTAL, "kv")])
        self.leases: list[list[int]] = []
        self.in_flight: list[list[int]] = []
        self.quarantined: list[list[int]] = []
        self.kept: list[BlockIds] = []

    def leased(self) -> set[int]:
        return {block for ids in self.leases for block in ids}

    def flying(self) -> set[int]:
        return {block for ids in (*self.in_flight, *(ids.tolist() for ids in self.kept)) for block in ids}

    def held(self) -> set[int]:
        return {block for ids in self.quarantined for block in ids}

    def busy(self) -> set[int]:
        return self.flying() | self.held() | self.leased()

    @rule(ids=block_sets)
    def lease(self, ids: list[int]) -> None:
        if set(ids) & (self.flying() | self.held()):
            with pytest.raises(BlocksBusy, match="cannot be served"):
                self.ledger.lease(array(ids))
        else:
            self.ledger.lease(array(ids))
            self.leases.append(ids)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.leases) - 1))
        self.ledger.release(array(self.leases.pop(index)))

    @rule(ids=block_sets)
    def begin_load(self, ids: list[int]) -> None:
        if set(ids) & self.busy():
            with pytest.raises(BlocksBusy, match="cannot be loaded"):
                self.ledger.begin_load(array(ids))
        else:
            self.ledger.begin_load(array(ids))
            self.in_flight.append(ids)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        ids = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        self.ledger.quarantine(array(ids))
        self.quarantined.append(ids)

    @precondition(lambda self: self.in_flight or self.quarantined)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        loads = data.draw(st.sampled_from([loads for loads in (self.in_flight, self.quarantined) if loads]))
        self.ledger.end_load(array(loads.pop(data.draw(st.integers(0, len(loads) - 1)))))

    @rule(ids=block_sets)
    def keep(self, ids: list[int]) -> None:
        if set(ids) & self.busy():
            with pytest.raises(BlocksBusy, match="cannot be loaded"):
                self.ledger.claim_for_sources(array(ids))
        else:
            self.kept.append(array(ids))
            self.ledger.claim_for_sources(self.kept[-1])

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), late=st.booleans(), over=st.booleans())
    def read_from_another_source(self, data: st.DataObject, *, late: bool, over: bool) -> None:
        """Loads may begin one after the other. Between them, the blocks stay claimed."""
        index = data.draw(st.integers(0, len(self.kept) - 1))
        ids = self.kept[index]
        self.ledger.begin_load(ids)
        if late:
            self.ledger.quarantine(ids)
        if not over or not late:
            self.ledger.end_load(ids)
        if over:
            del self.kept[index]
            self.ledger.end_claim(ids, safe=not late)
            if late:
                self.quarantined.append(ids.tolist())

    @rule(ids=block_sets)
    def misuse(self, ids: list[int]) -> None:
        """Our own bugs are caught where they happen, and change nothing either."""
        if not set(ids) <= self.leased():
            with pytest.raises(AssertionError, match="not leased"):
                self.ledger.release(array(ids))
        if not set(ids) <= self.flying():
            with pytest.raises(AssertionError, match="not in flight"):
                self.ledger.quarantine(array(ids))
        if not set(ids) <= self.flying() | self.held():
            with pytest.raises(AssertionError, match="not in flight"):
                self.ledger.end_load(array(ids))

    @invariant()
    def accounts_add_up(self) -> None:
        counts = self.ledger.counts()
        assert counts.free + counts.leased + counts.in_flight + counts.quarantined == counts.total == TOTAL
        assert counts.free >= 0
        model = (len(self.leased()), len(self.flying()), len(self.held()))
        assert (counts.leased, counts.in_flight, counts.quarantined) == model

    @invariant()
    def each_block_is_in_the_use_that_the_model_says(self) -> None:
        """Asked from outside: which calls a block refuses tells its use."""
        for block in range(TOTAL):
            ids = array([block])
            if block in self.leased():
                with pytest.raises(BlocksBusy, match=rf"block {block} .*leased"):
                    self.ledger.begin_load(ids)
            elif block in self.flying() or block in self.held():
                use = "being loaded" if block in self.flying() else "quarantined"
                with pytest.raises(BlocksBusy, match=rf"block {block} .*{use}"):
                    self.ledger.begin_load(ids)
                with pytest.raises(BlocksBusy, match=rf"block {block} .*{use}"):
                    self.ledger.lease(ids)
            else:
                self.ledger.begin_load(ids)
                self.ledger.end_load(ids)

    def teardown(self) -> None:
        """Whatever happened: when all users of blocks have left, all blocks are free."""
        for ids in self.leases:
            self.ledger.release(array(ids))
        for kept in self.kept:
            self.ledger.end_claim(kept, safe=True)
        for ids in [*self.in_flight, *self.quarantined]:
            self.ledger.end_load(array(ids))
        assert self.ledger.counts() == BlockCounts(total=TOTAL, free=TOTAL, leased=0, in_flight=0, quarantined=0)


TestLedgerAgainstModel = machine_test(LedgerAgainstModel, 20, 80, steps=25)


def test_a_cache_of_many_blocks_is_counted_in_full() -> None:
    ledger = BlockLedger([blocks_of("kv", 100_000, "kv")])
    for ids in np.array_split(np.arange(90_000, dtype=np.int64), 9):
        ledger.lease(ids)
        ledger.lease(ids)
    ledger.begin_load(np.arange(95_000, 100_000, dtype=np.int64))
    expected = BlockCounts(total=100_000, free=5_000, leased=90_000, in_flight=5_000, quarantined=0)
    assert ledger.counts() == expected


# --- pools


def grouped() -> BlockLedger:
    return BlockLedger([blocks_of("full", 6, "shared"), blocks_of("local", 6, "shared"), blocks_of("cross", 4, "own")])


def test_groups_of_one_pool_share_its_entries_and_others_have_their_own() -> None:
    ledger = grouped()
    tables, entries = ledger.find_entries({"full": [1, 2], "cross": [3, 1]}, "block_ids")
    assert [ids.tolist() for ids in tables] == [[1, 2], [], [3, 1]]
    assert entries.tolist() == [1, 2, 9, 7]
    ledger.lease(entries)
    assert ledger.counts() == BlockCounts(total=10, free=6, leased=4, in_flight=0, quarantined=0)
    _, taken = ledger.find_entries([[], [2], []], "block_ids")
    with pytest.raises(BlocksBusy, match="block 2 of pool 'shared' cannot be loaded: it is leased"):
        ledger.begin_load(taken)
    _, others = ledger.find_entries([[], [], [2]], "block_ids")
    ledger.begin_load(others)
    with pytest.raises(BlocksBusy, match="block 2 of pool 'own' cannot be served: it is being loaded"):
        ledger.lease(others)


@each(
    ("given", "problem"),
    [
        ([[1], [1], []], "block 1 of one pool is given for two groups"),
        ([[1], [2], [4]], "group 'cross': block id 4 is not in 0..3"),
        ([[1], [2, 2], []], "group 'local': block id 2 is given twice"),
        ([[1], [2]], r"expected block ids for each of \['full', 'local', 'cross'\]"),
        ([1, 2, 3], "group 'full': expected a flat list"),
        ({"full": [1], "mamba": [2]}, "no group 'mamba', there are"),
    ],
)
def test_block_ids_that_cannot_be_are_named(given: object, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        grouped().find_entries(given, "block_ids")


def test_some_blocks_of_a_group_are_one_of_its_pools() -> None:
    """Using one of the pieces uses the whole block of the pool."""
    ledger = BlockLedger([blocks_of("state", 4, "all"), blocks_of("full", 8, "all", split=2)])
    tables, entries = ledger.find_entries([[3], [0, 1, 4]], "ids")
    assert ([ids.tolist() for ids in tables], sorted(entries.tolist())) == ([[3], [0, 1, 4]], [0, 2, 3])
    ledger.lease(entries)
    assert ledger.counts() == BlockCounts(total=4, free=1, leased=3, in_flight=0, quarantined=0)
    with pytest.raises(BlocksBusy, match="block 2 cannot be loaded: it is leased"):
        ledger.begin_load(ledger.find_entries([[], [5]], "ids")[1])
    with pytest.raises(RequestError, match="block 3 of one pool is given for two groups"):
        ledger.find_entries([[3], [7]], "ids")
    ledger.release(entries)
    assert ledger.counts().free == 4


def test_more_blocks_than_there_are_is_told_by_pool() -> None:
    """Whoever uses blocks now: the message names the size of the pool."""
    groups = [blocks_of("a", 12, "one", split=2), blocks_of("b", 6, "one"), blocks_of("c", 3, "two")]
    ledger = BlockLedger(groups)
    ledger.lease(np.arange(9))
    for counts in ((12, 0, 3), (5, 3, 0), (0, 6, 3)):
        ledger.check_enough_blocks(counts, "req: num_tokens 9")
    kv = BlockLedger([blocks_of("kv", 7, "kv", split=7)])
    for of, counts, problem in (
        (ledger, (5, 4, 0), "7 blocks of pool 'one', there are 6"),
        (ledger, (0, 0, 4), "4 blocks of pool 'two', there are 3"),
        (kv, (8,), "8 blocks, there are 7"),
    ):
        with pytest.raises(RequestError, match=f"^req: num_tokens 9 needs {problem}$"):
            of.check_enough_blocks(counts, "req: num_tokens 9")
