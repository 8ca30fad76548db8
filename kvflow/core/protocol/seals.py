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

A producer that copies blocks to host buffers before they can be read opens the lease first: until all are there, the
last four bytes of its word are those of the id, exclusive-or the number of blocks that are still missing. So a reader
that comes early finds out how far it may read, again without an answer from the producer.

No clocks are compared, nobody on the producer has to answer, and it makes no difference why a lease ended: ran out,
was revoked, or was used up by another reader of the same ticket. Half of the hold leaves room for the drift of clocks
and the coarseness of timers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvflow.core.cache.regions import Device, Span
from kvflow.core.plan.descriptors import Descriptors, Piece

SEAL_SIZE_BYTES = 16
HOST = Device("cpu", 0)
_WIPED = bytes(SEAL_SIZE_BYTES)
_SECRET_BYTES = 12  # of an id; the rest of its word also counts


class SealTable:
    """Words of host memory and which of them are free. A producer's seals, or a reader's places to fetch them into."""

    def __init__(self, count: int) -> None:
        self.words: npt.NDArray[np.uint8] = np.zeros((count, SEAL_SIZE_BYTES), dtype=np.uint8)
        self._counts = self.words.view(np.uint32)[:, -1]
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

    def seal(self, index: int, lease_id: str, missing: int = 0) -> None:
        """Write a lease's id: from now on its readers find it. `missing` blocks cannot be read yet."""
        word = np.frombuffer(bytes.fromhex(lease_id), dtype=np.uint8)
        self.words[index, :_SECRET_BYTES] = word[:_SECRET_BYTES]
        # One aligned store: a reader sees the old count or the new one.
        self._counts[index] = word.view(np.uint32)[-1] ^ np.uint32(missing)

    def missing(self, index: int, lease_id: str) -> int | None:
        """How many blocks of this lease cannot be read yet; None if the word is not this lease's."""
        word: bytes = self.words[index].tobytes()
        wanted = bytes.fromhex(lease_id)
        if word == wanted and word != _WIPED:  # the usual case, in few steps
            return 0
        if len(wanted) != SEAL_SIZE_BYTES or word[:_SECRET_BYTES] != wanted[:_SECRET_BYTES] or word == _WIPED:
            return None
        return int.from_bytes(word[_SECRET_BYTES:], "little") ^ int.from_bytes(wanted[_SECRET_BYTES:], "little")

    def holds(self, index: int, lease_id: str) -> bool:
        """Whether the word is this lease's id, all its blocks there; an empty word is nobody's."""
        return self.missing(index, lease_id) == 0


def fetch_seal(seal: Piece) -> Descriptors:
    """The read that fetches one seal and nothing else."""
    return Descriptors.of(
        local=[seal.local], remote=[seal.remote], sizes=[seal.size_bytes], local_device=HOST, remote_device=HOST
    )


def quick_read_max_s(hold_s: float) -> float:
    """How long a read may take at most for a seal that was fetched meanwhile to vouch for it."""
    return hold_s / 2
