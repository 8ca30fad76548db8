"""SealProof: proof by a lease's seal that the lease covered the whole read (invariant I2).

A producer keeps one 16-byte word per open lease in memory that peers can read: the *seal*. It holds the lease's secret
id while the lease is open. When the lease ends, for whatever reason, the seal is wiped at once, and the blocks are
given back `hold_s` later. A reader fetches the seal through the same transport as the blocks and compares it with its
ticket; a torn, wiped or reused word matches no id. Two arguments make a read fresh:

- *Fetched after*: the seal was intact when it was fetched, after the last byte had landed. So the lease was open
  during the whole read.
- *Fetched meanwhile*: the seal was intact when it was fetched; and the last byte had landed within less than
  `quick_read_max_s`, half of `hold_s`, of the moment at which that fetch was posted, on the reader's own clock. Had the
  lease ended later than the fetch, the blocks were still held. This saves small loads a round trip.

A producer whose device has yet to compute the prompt, or that copies its blocks to host buffers before they can be
read, opens the lease first: until all is there, the last four bytes of its word are those of the id, exclusive-or the
number of the prompt's last tokens that are missing. What comes before those is there in all groups. So a reader that
comes early finds out how far it may read, again without an answer from the producer. If the prompt will never be
complete the word says so, by a number that no prompt has (`FAILED`), through the hold after the lease's end and, for
readers that come later, until the word is needed for another lease.

Both arguments have two premises, which a seal cannot vouch for. What it says to be there has been computed: the
producer's engine says so, by an event or by having waited for its device. And addresses mean the memory that they meant
when they were registered: so nobody maps other memory there before they are unregistered (`Runtime.unregister`).

No clocks are compared, nobody on the producer has to answer, and it makes no difference why a lease ended: ran out,
was revoked, or was used up by another reader of the same ticket. Half of the hold leaves room for the drift of clocks
and the coarseness of timers.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvflow.core.cache.regions import Device, Span
from kvflow.core.plan.descriptors import Descriptors, Piece

SEAL_SIZE_BYTES = 16
HOST = Device("cpu", 0)
_WIPED = bytes(SEAL_SIZE_BYTES)
FAILED = (1 << 32) - 1
"""Word in place of how many tokens are missing: the lease has ended because its prompt could not be computed."""
_SECRET_BYTES = 12  # of an id; the rest of its word also counts
_WORD_COUNTS = SEAL_SIZE_BYTES // 4


class SealTable:
    """Words of host memory, free or used: a producer's seals, or a reader's landing places for them."""

    def __init__(self, count: int) -> None:
        self.words: npt.NDArray[np.uint8] = np.zeros((count, SEAL_SIZE_BYTES), dtype=np.uint8)
        self._bytes = memoryview(self.words.reshape(-1).data)
        self._counts = self._bytes.cast("I")[_WORD_COUNTS - 1 :: _WORD_COUNTS]
        self._free = deque(range(count - 1, -1, -1))
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

    def retire(self, index: int) -> None:
        """Make a word free as it is: it is the last to be taken, and says what it says until it is sealed again."""
        self._free.appendleft(index)

    def seal(self, index: int, lease_id: str, tokens_missing: int = 0) -> None:
        """Write a lease's id, which its readers find from now on, with the number of tokens that cannot be read yet."""
        word, start = bytes.fromhex(lease_id), index * SEAL_SIZE_BYTES
        self._bytes[start : start + _SECRET_BYTES] = word[:_SECRET_BYTES]
        # One aligned store: a reader sees the old count or the new one.
        self._counts[index] = int.from_bytes(word[_SECRET_BYTES:], "little") ^ tokens_missing

    def tokens_missing(self, index: int, lease_id: str) -> int | None:
        """Return how many tokens of this lease cannot be read yet; None if the word is not this lease's id."""
        word: bytes = self.words[index].tobytes()
        wanted = bytes.fromhex(lease_id)
        if word == wanted and word != _WIPED:  # the usual case, in few steps
            return 0
        if len(wanted) != SEAL_SIZE_BYTES or word[:_SECRET_BYTES] != wanted[:_SECRET_BYTES] or word == _WIPED:
            return None
        return int.from_bytes(word[_SECRET_BYTES:], "little") ^ int.from_bytes(wanted[_SECRET_BYTES:], "little")


class Step(enum.StrEnum):
    """The next step of a read about one lease."""

    POST = "post"  # the lease stands, as far as is known: read
    FETCH = "fetch"  # its seal has to be seen first
    STALE = "stale"  # it has ended
    FRESH = "fresh"  # it covered the whole read


class Proof(Protocol):
    """The proof that a read was fresh: `SealProof`, by a seal, or `stock.deadline`, where there is none."""

    asked: bool
    seen_s: float

    @property
    def kind(self) -> str: ...

    @property
    def grows(self) -> bool: ...

    @property
    def looking(self) -> bool: ...

    @property
    def over(self) -> bool: ...

    @property
    def failed(self) -> bool: ...

    def there(self, num_tokens: int) -> int: ...

    def anew(self) -> Proof: ...

    def fetching(self) -> None: ...

    def heard(self, tokens_missing: int | None, posted_s: float) -> None: ...

    def before(self) -> Step: ...

    def after(self, read_s: float | None) -> Step: ...


class SealProof:
    """The proof of a lease for a load's read; pure. `before` is asked before each post, `after` after the last byte,
    `heard` tells what was seen, `there` how far the prompt may be read.

    The seal is fetched with the first read, and has to say that everything is there. Of a lease that `grows` (some of
    it is still being computed, or staged) nothing is read beyond what its seal was seen to say.
    """

    kind = "seal"
    """The kind of proof, as in `LoadReport.freshness`."""

    def __init__(self, *, grows: bool, quick_read_max_s: float) -> None:
        self.asked = False
        """True once a fetch was posted."""
        self.grows = grows
        """True if tokens may not be there yet when a read of them is due."""
        self.seen_s = -math.inf
        """Time at which the last fetch was posted that has found the lease open."""
        self._quick_read_max_s = quick_read_max_s
        self.looking = False
        """True while a fetch is under way."""
        self.over = False
        """True once the seal has shown that the lease is not open any more, for good."""
        self._seen: int | None = None

    @property
    def failed(self) -> bool:
        """True if the seal was seen to say that the prompt could not be computed."""
        return self._seen == FAILED

    def there(self, num_tokens: int) -> int:
        """Tokens of the lease that may be read, as far as is known."""
        if not self.grows:
            return num_tokens
        return 0 if self.over or self._seen is None else num_tokens - self._seen

    def anew(self) -> SealProof:
        """A fresh proof for another read under the same lease: nothing was seen yet."""
        return SealProof(grows=self.grows, quick_read_max_s=self._quick_read_max_s)

    def fetching(self) -> None:
        """Note that a read that fetches the seal was posted."""
        self.asked = self.looking = True

    def heard(self, tokens_missing: int | None, posted_s: float) -> None:
        """Note what a fetch that was posted then has found; None if the word is not the lease's."""
        self.asked, self.looking = True, False
        if tokens_missing is None or tokens_missing == FAILED:
            if tokens_missing is not None or not self.over:
                self._seen = tokens_missing
            self.over = True
        elif not self.over:
            self._seen, self.seen_s = tokens_missing, posted_s

    def before(self) -> Step:
        """POST or STALE, before a read: of a lease that grows, of no more than is `there`."""
        return Step.STALE if self.over else Step.POST

    def after(self, read_s: float | None) -> Step:
        """FRESH, STALE or FETCH, when nothing is under way. `read_s`: how long ago the last fetch was posted that has
        found the lease open; None if that was after the end of the read.
        """
        if self.over or self._seen is None or (self._seen > 0 and not self.grows):
            return Step.STALE
        return Step.FRESH if read_s is None or read_s < self._quick_read_max_s else Step.FETCH


def quick_read_max_s(hold_s: float) -> float:
    """Longest time of a read for which a seal that was fetched meanwhile may vouch."""
    return hold_s / 2


def fetch_seal(seal: Piece) -> Descriptors:
    """The read that fetches one seal and nothing else."""
    return Descriptors.of(
        local=[seal.local], remote=[seal.remote], sizes=[seal.size_bytes], local_device=HOST, remote_device=HOST
    )
