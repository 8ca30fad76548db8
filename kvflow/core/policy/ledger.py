"""Who uses which local block: the accounts behind conservation (invariant I5).

Every block is free, leased (one or more leases read-protect it), in flight (one load writes it) or quarantined (a
load has ended, its bytes may still land). Leases share blocks; a write excludes everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvflow.core.plan.descriptors import BlockIds
from kvflow.errors import BlocksBusy

# How a block is used: the number of its leases, or one of these.
_FREE, _IN_FLIGHT, _QUARANTINED = 0, -1, -2
_WRITER_TEXT = {_IN_FLIGHT: "being loaded", _QUARANTINED: "quarantined"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """How many blocks are in which use; they add up to `total`."""

    total: int
    free: int
    leased: int
    in_flight: int
    quarantined: int


class BlockLedger:
    """The use of each local block. Ids were checked by the caller (`plan.check_block_ids`)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._use: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)

    def lease(self, ids: BlockIds) -> None:
        """Protect blocks for readers; BlocksBusy if one is being written."""
        use = self._use[ids]
        if (use < _FREE).any():
            self._refuse(ids, use < _FREE, "served")
        self._use[ids] = use + 1

    def release(self, ids: BlockIds) -> None:
        """End one lease of these blocks."""
        assert (self._use[ids] > _FREE).all(), "released a block that is not leased"
        self._use[ids] -= 1

    def begin_load(self, ids: BlockIds) -> None:
        """Claim blocks for writing; BlocksBusy if one is leased or being written."""
        use = self._use[ids]
        if use.any():
            self._refuse(ids, use != _FREE, "loaded")
        self._use[ids] = _IN_FLIGHT

    def quarantine(self, ids: BlockIds) -> None:
        """The load of these blocks has ended, its bytes have not."""
        assert (self._use[ids] == _IN_FLIGHT).all(), "quarantined a block that is not in flight"
        self._use[ids] = _QUARANTINED

    def end_load(self, ids: BlockIds) -> None:
        """No byte can land in these blocks any more."""
        assert (self._use[ids] < _FREE).all(), "ended the load of a block that is not in flight"
        self._use[ids] = _FREE

    def counts(self) -> BlockCounts:
        """A summary."""
        return BlockCounts(
            total=len(self._use),
            free=int((self._use == _FREE).sum()),
            leased=int((self._use > _FREE).sum()),
            in_flight=int((self._use == _IN_FLIGHT).sum()),
            quarantined=int((self._use == _QUARANTINED).sum()),
        )

    def use_of(self, block: int) -> str:
        """How a block is used now, as messages say it; "" for a free one, or one that is not of this cache."""
        use = int(self._use[block]) if 0 <= block < len(self._use) else _FREE
        return "leased to readers" if use > _FREE else _WRITER_TEXT.get(use, "")

    def _refuse(self, ids: BlockIds, busy: npt.NDArray[np.bool_], verb: str) -> NoReturn:
        block = int(ids[busy][0])
        by_whom = " by another request" if self._use[block] < _FREE else ""
        raise BlocksBusy(f"block {block} cannot be {verb}: it is {self.use_of(block)}{by_whom}")
