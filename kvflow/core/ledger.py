"""Who uses which local block: the accounts behind conservation (invariant I5).

Every block is free, leased (one or more leases read-protect it), in flight (one load writes it) or quarantined (a
load has ended, its bytes may still land). Leases share blocks; a write excludes everything else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvflow.core.plan import BlockIds
from kvflow.errors import BlocksBusy

_FREE, _IN_FLIGHT, _QUARANTINED = 0, 1, 2
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
        self._leases: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self._writer: npt.NDArray[np.int8] = np.zeros(num_blocks, dtype=np.int8)

    def lease(self, ids: BlockIds) -> None:
        """Protect blocks for readers; BlocksBusy if one is being written."""
        self._require_no_writer(ids, "cannot be served")
        self._leases[ids] += 1

    def release(self, ids: BlockIds) -> None:
        """End one lease of these blocks."""
        assert (self._leases[ids] > 0).all(), "released a block that is not leased"
        self._leases[ids] -= 1

    def begin_load(self, ids: BlockIds) -> None:
        """Claim blocks for writing; BlocksBusy if one is leased or being written."""
        self._require_no_writer(ids, "cannot be loaded")
        leased = ids[self._leases[ids] > 0]
        if len(leased):
            raise BlocksBusy(f"block {leased[0]} cannot be loaded: it is leased to readers")
        self._writer[ids] = _IN_FLIGHT

    def quarantine(self, ids: BlockIds) -> None:
        """The load of these blocks has ended, its bytes have not."""
        assert (self._writer[ids] == _IN_FLIGHT).all(), "quarantined a block that is not in flight"
        self._writer[ids] = _QUARANTINED

    def end_load(self, ids: BlockIds) -> None:
        """No byte can land in these blocks any more."""
        assert (self._writer[ids] != _FREE).all(), "ended the load of a block that is not in flight"
        self._writer[ids] = _FREE

    def counts(self) -> BlockCounts:
        """A summary; also checks that no block is leased and written at once."""
        leased = self._leases > 0
        assert not (leased & (self._writer != _FREE)).any(), "a block is leased and written at once"
        in_flight = int((self._writer == _IN_FLIGHT).sum())
        quarantined = int((self._writer == _QUARANTINED).sum())
        total = len(self._writer)
        return BlockCounts(
            total=total,
            free=total - int(leased.sum()) - in_flight - quarantined,
            leased=int(leased.sum()),
            in_flight=in_flight,
            quarantined=quarantined,
        )

    def _require_no_writer(self, ids: BlockIds, what: str) -> None:
        busy = ids[self._writer[ids] != _FREE]
        if len(busy):
            use = _WRITER_TEXT[int(self._writer[busy[0]])]
            raise BlocksBusy(f"block {busy[0]} {what}: it is {use} by another request")
