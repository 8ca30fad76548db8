"""The ledger: how each local block is used. It keeps the conservation of blocks (invariant I5).

An *entry* is the number of a block in the ledger, which numbers the blocks of all pools of block ids in one sequence.
Groups of layers that share a pool share its entries. If several blocks of a group form one block of its pool
(`CacheGroup.split`), they have one entry. With a single group the entry of a block is the block id.

Every block is free, leased (protected from writes by one or more leases), in flight (a load writes it) or quarantined
(a load has ended, but its bytes may still land). If a load reads from one producer after another, the load's blocks
stay *claimed* in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvflow import checks
from kvflow.checks import counted, short_repr
from kvflow.core.cache.groups import CacheGroup
from kvflow.core.cache.tensors import GET_ADDRESS, TensorAddresses
from kvflow.core.plan.descriptors import BlockIds, check_block_ids
from kvflow.errors import BlocksBusy, RequestError

# Use of a block: the number of its leases (0: free), or one of the negative numbers.
_FREE, _IN_FLIGHT, _QUARANTINED = 0, -1, -2
_NO_TENSORS = TensorAddresses(())
_WRITER_TEXT = {_IN_FLIGHT: "being loaded", _QUARANTINED: "quarantined"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Number of blocks in each use. The other four numbers add up to `total`."""

    total: int
    free: int
    leased: int
    in_flight: int
    quarantined: int


class BlockLedger:
    """The use of each local block: free, leased, in flight or quarantined.

    Most methods take entries. An entry is the index of a block in the ledger; `find_entries` computes entries from
    block ids.
    """

    def __init__(self, groups: Sequence[CacheGroup], addresses: TensorAddresses = _NO_TENSORS) -> None:
        """`addresses`: the tensors of the cache. A block is not used any more once one of the tensors has moved."""
        self._addresses = weakref.ref(addresses)  # no reference to tensors: handles outlive their cache
        self._pools = [str(group.pool) for group in groups]
        self._num_blocks = [group.num_blocks for group in groups]
        self._splits = [group.split for group in groups] if len(groups) > 1 else [1]  # one group has its own pool
        self._names = [group.name for group in groups]
        self._first: dict[str, int] = {}
        """First entry of each pool, by the pool's name."""
        total = 0
        for pool, num_blocks, split in zip(self._pools, self._num_blocks, self._splits, strict=True):
            if pool not in self._first:
                self._first[pool] = total
                total += num_blocks // split
        self._use: npt.NDArray[np.int32] = np.zeros(total, dtype=np.int32)
        self._claimed: list[BlockIds] = []
        """Arrays of entries that are claimed (`claim_for_sources`), compared by identity."""

    def find_entries(self, block_ids: Any, what: str) -> tuple[tuple[BlockIds, ...], BlockIds]:
        """Check the block ids of a request. Return a block table for each group, and the entries of all these blocks.

        `block_ids` is a sequence or, with several groups, a sequence for each group or a mapping by the groups' names;
        groups that the mapping lacks have no blocks. RequestError, which begins with `what`, names an id that is
        invalid or that is given for two groups of one pool.
        """
        if len(self._pools) == 1 and (type(block_ids) is list or not isinstance(block_ids, Mapping)):
            ids = check_block_ids(block_ids, num_blocks=self._num_blocks[0], what=what)
            return (ids,), ids
        tables, checked = self._by_group(block_ids, what), []
        for name, num_blocks, ids in zip(self._names, self._num_blocks, tables, strict=True):
            checked.append(check_block_ids(ids, num_blocks=num_blocks, what=f"{what} of group {name!r}"))
        entries = self.entries(checked)
        ordered = np.sort(entries)
        if (ordered[1:] == ordered[:-1]).any():
            twice = int(ordered[1:][ordered[1:] == ordered[:-1]][0])
            raise RequestError(f"{what}: block {twice} of one pool is given for two groups")
        return tuple(checked), entries

    def entries(self, tables: Sequence[BlockIds | Sequence[int]]) -> BlockIds:
        """Return the entries of all blocks in `tables`, which holds one table of checked block ids per group."""
        numbers = []
        for pool, split, ids in zip(self._pools, self._splits, tables, strict=True):
            own = np.asarray(ids, dtype=np.int64)
            if split > 1:
                own = np.unique(own // split)
            numbers.append(own + self._first[pool])
        return np.concatenate(numbers)

    def check_enough_blocks(self, counts: Sequence[int], what: str) -> None:
        """Raise RequestError if, for some group i, the cache has fewer than `counts[i]` blocks, whether free or in use.

        Counts of groups that share a pool are added up. `what` begins the message.
        """
        needed, there = dict.fromkeys(self._first, 0), dict.fromkeys(self._first, 0)
        for pool, num_blocks, split, count in zip(self._pools, self._num_blocks, self._splits, counts, strict=True):
            needed[pool] += -(-count // split)
            there[pool] = num_blocks // split
        for pool, count in needed.items():
            if count > there[pool]:
                of_pool = f" of pool {pool!r}" if len(self._pools) > 1 else ""
                raise RequestError(f"{what} needs {counted(count, 'block')}{of_pool}, there are {there[pool]}")

    def _by_group(self, block_ids: Any, what: str) -> Sequence[Any]:
        if isinstance(block_ids, Mapping):
            by_name = checks.mapping(block_ids, what)
            unknown = next((name for name in by_name if name not in self._names), None)
            if unknown is not None:
                raise RequestError(f"{what}: no group {short_repr(unknown)}, there are {self._names}")
            return [by_name.get(name, ()) for name in self._names]
        if not isinstance(block_ids, tuple | list) or len(block_ids) != len(self._names):
            raise RequestError(f"{what}: expected block ids for each of {self._names}, got {short_repr(block_ids)}")
        return block_ids

    def lease(self, ids: BlockIds) -> None:
        """Count a further lease of each block in `ids` (ledger entries).

        BlocksBusy if a block is in flight or quarantined. LayoutError if a tensor of the cache has moved.
        """
        # Without a call of `check`, here and in `begin_load`: each lease and load pays 0.1 us per tensor and no more.
        if (at := self._addresses()) is not None and list(map(GET_ADDRESS, at.tensors)) != at.registered:
            at.check()
        use = self._use[ids]
        if (use < _FREE).any():
            self._refuse(ids, use < _FREE, "served")
        self._use[ids] = use + 1

    def check_tensors(self) -> None:
        """Raise LayoutError if a tensor of the cache has moved since the cache was registered."""
        if (at := self._addresses()) is not None:
            at.check()

    def release(self, ids: BlockIds) -> None:
        """Count one lease fewer for each block in `ids` (ledger entries). A block without leases is free."""
        assert (self._use[ids] > _FREE).all(), "released a block that is not leased"
        self._use[ids] -= 1

    def begin_load(self, ids: BlockIds) -> None:
        """Mark the blocks in `ids` (ledger entries) as in flight, because a load will write them.

        BlocksBusy if a block is leased, in flight or quarantined. LayoutError if a tensor of the cache has moved. If
        the load has claimed the array `ids` (`claim_for_sources`), the blocks are in flight already, and the call has
        no effect.
        """
        if (at := self._addresses()) is not None and list(map(GET_ADDRESS, at.tensors)) != at.registered:
            at.check()
        use = self._use[ids]
        if use.any() and not self._is_claimed(ids):
            self._refuse(ids, use != _FREE, "loaded")
        self._use[ids] = _IN_FLIGHT

    def claim_for_sources(self, ids: BlockIds) -> None:
        """Claim the blocks in `ids` (ledger entries) for a load that may try several producers, one after the other.

        The blocks are in flight until `end_claim`. Until then `begin_load`, `quarantine` and `end_load`, called with
        the same array object for each producer, change nothing. BlocksBusy if a block is leased, in flight or
        quarantined.
        """
        self.begin_load(ids)
        self._claimed.append(ids)

    def end_claim(self, ids: BlockIds, *, safe: bool) -> None:
        """End the claim on the blocks of the array `ids`, which was passed to `claim_for_sources`.

        If `safe`, no further byte can land in the blocks, and they are free; else they are quarantined until
        `end_load`.
        """
        self._claimed = [claim for claim in self._claimed if claim is not ids]
        if safe:
            self.end_load(ids)
        else:
            self.quarantine(ids)

    def _is_claimed(self, ids: BlockIds) -> bool:
        return any(claim is ids for claim in self._claimed)

    def quarantine(self, ids: BlockIds) -> None:
        """Mark the blocks in `ids` (ledger entries) as quarantined: their load has ended, but bytes may still land.

        If the load has claimed the array `ids` (`claim_for_sources`), the call has no effect: the blocks stay in flight
        until `end_claim`.
        """
        assert (self._use[ids] == _IN_FLIGHT).all(), "quarantined a block that is not in flight"
        self._use[ids] = _IN_FLIGHT if self._claimed and self._is_claimed(ids) else _QUARANTINED

    def end_load(self, ids: BlockIds) -> None:
        """Mark the blocks in `ids` (ledger entries) as free, because a load no longer writes them.

        The caller guarantees that no further byte can land in the blocks. If the load has claimed the array `ids`
        (`claim_for_sources`), to try several producers, the call has no effect: the blocks stay in flight until
        `end_claim`.
        """
        assert (self._use[ids] < _FREE).all(), "ended the load of a block that is not in flight"
        self._use[ids] = _IN_FLIGHT if self._claimed and self._is_claimed(ids) else _FREE

    def counts(self) -> BlockCounts:
        return BlockCounts(
            total=len(self._use),
            free=int((self._use == _FREE).sum()),
            leased=int((self._use > _FREE).sum()),
            in_flight=int((self._use == _IN_FLIGHT).sum()),
            quarantined=int((self._use == _QUARANTINED).sum()),
        )

    def use_of(self, entry: int) -> str:
        """Return the use of the block with this entry, as text for a message; "" if the block is free or unknown."""
        use = int(self._use[entry]) if 0 <= entry < len(self._use) else _FREE
        return "leased to readers" if use > _FREE else _WRITER_TEXT.get(use, "")

    def _refuse(self, ids: BlockIds, busy: npt.NDArray[np.bool_], verb: str) -> NoReturn:
        entry = int(ids[busy][0])
        pool, first = max(
            ((name, start) for name, start in self._first.items() if start <= entry), key=lambda named: named[1]
        )
        block = f"block {entry - first}" if len(self._first) == 1 else f"block {entry - first} of pool {pool!r}"
        by_whom = " by another request" if self._use[entry] < _FREE else ""
        raise BlocksBusy(f"{block} cannot be {verb}: it is {self.use_of(entry)}{by_whom}")
