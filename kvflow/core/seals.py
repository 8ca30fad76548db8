"""How a reader knows that a lease covered its whole read: seals (invariant I2).

A producer keeps one 16-byte word per open lease in memory that peers can read: the *seal*. It holds the lease's secret
id while the lease is open. When the lease ends, for whatever reason, the seal is wiped at once, and the blocks are
given back `hold_s` later. A reader fetches the seal through the same transport as the blocks and compares it with its
ticket; a torn, wiped or reused word matches no id. Two arguments make a read fresh:

- *Fetched after*: the seal was intact when it was fetched, after the last byte had landed. So the lease was open
  during the whole read.
- *Fetched meanwhile*: the seal was fetched at any moment after the read began, and was intact; and the whole read took
  less than `trust_s`, half of `hold_s`, on the reader's own clock. Had the lease ended later than the fetch, the blocks
  were still held. This saves small loads a round trip.

No clocks are compared, nobody on the producer has to answer, and it makes no difference why a lease ended: ran out,
was revoked, or was used up by another reader of the same ticket. Half of the hold leaves room for the drift of clocks
and the coarseness of timers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvflow.core.layout import Device, Span
from kvflow.core.plan import Descriptors, Piece

SEAL_SIZE_BYTES = 16
HOST = Device("cpu", 0)
_WIPED = bytes(SEAL_SIZE_BYTES)


class SealTable:
    """Words of host memory and which of them are free. A producer's seals, or a reader's landing places for them."""

    def __init__(self, count: int) -> None:
        self.words: npt.NDArray[np.uint8] = np.zeros((count, SEAL_SIZE_BYTES), dtype=np.uint8)
        self._free = list(range(count - 1, -1, -1))
        self._address = int(self.words.ctypes.data)

    @property
    def span(self) -> Span:
        return Span(address=self.address(0), size_bytes=self.words.nbytes)

    @property
    def count(self) -> int:
        return len(self.words)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    def address(self, index: int) -> int:
        return self._address + index * SEAL_SIZE_BYTES

    def take(self) -> int | None:
        """A free word's index, or None if all are used."""
        return self._free.pop() if self._free else None

    def give_back(self, index: int) -> None:
        """Wipe a word and make it free."""
        self.words[index] = 0
        self._free.append(index)

    def seal(self, index: int, lease_id: str) -> None:
        """Write a lease's id: from now on its readers find it."""
        self.words[index] = np.frombuffer(bytes.fromhex(lease_id), dtype=np.uint8)

    def holds(self, index: int, lease_id: str) -> bool:
        """Whether the word is this lease's id; an empty word is nobody's."""
        word: bytes = self.words[index].tobytes()
        return word != _WIPED and word == bytes.fromhex(lease_id)


def fetch_seal(seal: Piece) -> Descriptors:
    """The read that fetches one seal and nothing else."""
    return Descriptors.of(
        local=[seal.local], remote=[seal.remote], sizes=[seal.size_bytes], local_device=HOST, remote_device=HOST
    )


def trust_s(hold_s: float) -> float:
    """How long a read may take at most for a seal that was fetched meanwhile to vouch for it."""
    return hold_s / 2
