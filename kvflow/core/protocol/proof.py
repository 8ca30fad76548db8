"""`SealProof`: the proof, by a lease's seal, that the lease covered a whole read (invariant I2).

For each open lease a producer keeps a 16-byte word in memory that peers can read: the *seal*, which holds the lease's
secret id. When the lease ends, for any reason, the producer immediately wipes the seal, and `hold_s` later gives the
blocks back to the engine. A reader fetches the seal through the same transport as the blocks, and compares the seal
with its ticket. A torn, wiped or reused word matches no id. Two arguments prove that a read is fresh:

- *Fetched after*: the seal was fetched after the last byte had landed, and was intact. So the lease was open during the
  whole read.
- *Fetched meanwhile*: the seal was intact, no read was posted after its fetch, and the last byte landed less than
  `quick_read_max_s` (half of `hold_s`) after the fetch was posted, on the reader's own clock. Even if the lease ended
  right after the fetch, its blocks were still held then. This saves small loads a round trip. The other half of the
  hold is a margin for clock drift and coarse timers.

All clocks of a machine stand still while its hypervisor pauses it, so a clock vouches for no time between two posts:
what is read in several posts needs the first argument. Within one post the seal is the last descriptor, so that a
transport that reads in order has the seal read after the bytes, however long that takes.

A lease may be opened before its blocks can be read. Until all tokens can be read, the last four bytes of the seal are
the id's last four bytes XOR the number of tokens at the end of the prompt that are missing; the tokens before these can
be read in all groups. So an early reader need not ask how far it may read. If the prompt will never be complete, the
number is `FAILED`, which stays in the seal through the hold, and then for late readers until another lease needs the
seal.

A seal cannot prove two premises. First, tokens that the seal shows as readable have been computed: the producer's
engine asserts that, by an event or because it has waited for its device. Second, registered addresses still mean the
same memory: the engine maps no other memory there before `Runtime.unregister`.

No clocks of two machines are compared, and the producer need not answer.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvflow.core.cache.regions import HOST, Span
from kvflow.core.plan.descriptors import Descriptors, Piece

SEAL_SIZE_BYTES = 16
_WIPED = bytes(SEAL_SIZE_BYTES)
FAILED = (1 << 32) - 1
"""Number of missing tokens in a seal if the lease has ended because its prompt could not be computed."""
_SECRET_BYTES = 12  # bytes of a lease id that are in the seal unchanged; the last four also carry the missing tokens
_WORD_COUNTS = SEAL_SIZE_BYTES // 4


class SealTable:
    """Slots of 16 bytes in host memory, each free or used.

    A producer keeps the seals of its open leases in slots; a reader fetches seals of producers into its slots.
    """

    def __init__(self, count: int) -> None:
        self.slots: npt.NDArray[np.uint8] = np.zeros((count, SEAL_SIZE_BYTES), dtype=np.uint8)
        self._bytes = memoryview(self.slots.reshape(-1).data)
        self._counts = self._bytes.cast("I")[_WORD_COUNTS - 1 :: _WORD_COUNTS]
        self._free = deque(range(count - 1, -1, -1))
        self._address = int(self.slots.ctypes.data)

    @property
    def span(self) -> Span:
        return Span(address=self.address(0), size_bytes=self.slots.nbytes)

    @property
    def count(self) -> int:
        return len(self.slots)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    def address(self, index: int) -> int:
        return self._address + index * SEAL_SIZE_BYTES

    def take_slot(self) -> int | None:
        """Take a free slot. Return its index, or None if all slots are used."""
        return self._free.pop() if self._free else None

    def free_slot(self, index: int) -> None:
        """Wipe the slot at `index` and mark it as free."""
        self.slots[index] = 0
        self._free.append(index)

    def retire_slot(self, index: int) -> None:
        """Mark the slot at `index` as free without wiping it.

        Its content stays until `take_slot`, which prefers other free slots, takes it.
        """
        self._free.appendleft(index)

    def seal(self, index: int, lease_id: str, tokens_missing: int = 0) -> None:
        """Write the seal of a lease into the slot at `index`.

        `tokens_missing`: number of tokens of the lease that cannot be read yet, or FAILED.
        """
        word, start = bytes.fromhex(lease_id), index * SEAL_SIZE_BYTES
        self._bytes[start : start + _SECRET_BYTES] = word[:_SECRET_BYTES]
        # One aligned store: a reader sees the old count or the new one.
        self._counts[index] = int.from_bytes(word[_SECRET_BYTES:], "little") ^ tokens_missing

    def tokens_missing(self, index: int, lease_id: str) -> int | None:
        """Return how many tokens of lease `lease_id` cannot be read yet, by the seal in the slot at `index`.

        Return FAILED if the prompt could not be computed, None if the slot does not hold the seal of this lease, for
        example after a wipe.
        """
        word: bytes = self.slots[index].tobytes()
        wanted = bytes.fromhex(lease_id)
        if word == wanted and word != _WIPED:  # the usual case, in few steps
            return 0
        if len(wanted) != SEAL_SIZE_BYTES or word[:_SECRET_BYTES] != wanted[:_SECRET_BYTES] or word == _WIPED:
            return None
        return int.from_bytes(word[_SECRET_BYTES:], "little") ^ int.from_bytes(wanted[_SECRET_BYTES:], "little")


class ProofStep(enum.StrEnum):
    """The next step for a read under a lease, or the final verdict on the read."""

    POST = "post"  # as far as is known the lease is open: post the read
    FETCH = "fetch"  # the seal has to be fetched first
    STALE = "stale"  # the lease had ended: the read proves nothing
    FRESH = "fresh"  # the lease covered the whole read


class Proof(Protocol):
    """Interface of a proof that a lease covered a whole read. `SealProof` documents each attribute and method.

    The other implementation, in `stock.deadline`, serves stock engines, which have no seals.
    """

    fetch_posted: bool
    last_open_s: float

    @property
    def kind(self) -> str: ...

    @property
    def grows(self) -> bool: ...

    @property
    def fetch_under_way(self) -> bool: ...

    @property
    def lease_ended(self) -> bool: ...

    @property
    def failed(self) -> bool: ...

    def readable_tokens(self, num_tokens: int) -> int: ...

    def fresh_copy(self) -> Proof: ...

    def note_read_posted(self) -> None: ...

    def note_fetch_posted(self) -> None: ...

    def note_fetched(self, tokens_missing: int | None, posted_s: float) -> None: ...

    def judge_before_post(self) -> ProofStep: ...

    def judge_after_read(self, read_s: float | None) -> ProofStep: ...


class SealProof:
    """The proof that one lease covered a load's reads.

    It only decides: the caller fetches the seal and passes the times.

    Call `judge_before_post` before each read is posted, then `note_fetch_posted` if the post fetches the seal, with
    bytes or alone, else `note_read_posted`; `note_fetched` with what was fetched; and `judge_after_read` once the last
    byte has landed.

    The seal is fetched with the first read, and must show that no token is missing. If the lease `grows`, because some
    tokens are still being computed or copied to host buffers, only tokens that a fetched seal has shown as readable may
    be read (`readable_tokens`).
    """

    kind = "seal"
    """Name of this kind of proof in `LoadReport.freshness`."""

    def __init__(self, *, grows: bool, quick_read_max_s: float) -> None:
        self.fetch_posted = False
        self.grows = grows
        """True if some tokens of the lease may not be readable yet."""
        self.last_open_s = -math.inf
        """Time of the post of the latest seal fetch that found the lease open; -infinity if no fetch has."""
        self._quick_read_max_s = quick_read_max_s
        self.fetch_under_way = False
        self.lease_ended = False
        """True once a fetched seal has shown that the lease has ended."""
        self._seen: int | None = None
        self._read_since = False
        """True if a read was posted after the latest fetch."""

    @property
    def failed(self) -> bool:
        """True if a fetched seal has shown that the prompt could not be computed."""
        return self._seen == FAILED

    def readable_tokens(self, num_tokens: int) -> int:
        """Return how many of the lease's `num_tokens` tokens may be read now.

        These are all tokens, unless the lease `grows`; then the tokens that the last fetched seal has shown as
        readable.
        """
        if not self.grows:
            return num_tokens
        return 0 if self.lease_ended or self._seen is None else num_tokens - self._seen

    def fresh_copy(self) -> SealProof:
        """Return a new proof, without any fetched seal, for another read under the same lease."""
        return SealProof(grows=self.grows, quick_read_max_s=self._quick_read_max_s)

    def note_read_posted(self) -> None:
        self._read_since = True

    def note_fetch_posted(self) -> None:
        self.fetch_posted = self.fetch_under_way = True
        self._read_since = False

    def note_fetched(self, tokens_missing: int | None, posted_s: float) -> None:
        """Record the result of the seal's fetch that was posted at time `posted_s`.

        `tokens_missing`: what `SealTable.tokens_missing` returned for the fetched seal.
        """
        self.fetch_posted, self.fetch_under_way = True, False
        if tokens_missing is None or tokens_missing == FAILED:
            if tokens_missing is not None or not self.lease_ended:
                self._seen = tokens_missing
            self.lease_ended = True
        elif not self.lease_ended:
            self._seen, self.last_open_s = tokens_missing, posted_s

    def judge_before_post(self) -> ProofStep:
        """Return POST if another read may be posted, or STALE if the lease is known to have ended.

        A read must stay within the first `readable_tokens` tokens.
        """
        return ProofStep.STALE if self.lease_ended else ProofStep.POST

    def judge_after_read(self, read_s: float | None) -> ProofStep:
        """Return the verdict once all reads have ended: FRESH, STALE, or FETCH if the seal has to be fetched again.

        `read_s`: seconds from the post of the latest fetch that found the lease open (`last_open_s`) until the last
        byte landed; None if the last byte landed before that post.
        """
        if self.lease_ended or self._seen is None or (self._seen > 0 and not self.grows):
            return ProofStep.STALE
        if read_s is None or (read_s < self._quick_read_max_s and not self._read_since):
            return ProofStep.FRESH
        return ProofStep.FETCH


def quick_read_max_s(hold_s: float) -> float:
    """Return the seconds within which one post of a seal and of bytes must end, so that the seal proves the bytes."""
    return hold_s / 2


def fetch_seal(seal: Piece) -> Descriptors:
    """Return descriptors of one read, which fetches `seal` from a producer's host memory."""
    return Descriptors.of(
        local=[seal.local], remote=[seal.remote], sizes=[seal.size_bytes], local_device=HOST, remote_device=HOST
    )
