"""Records of ended loads and leases. The observers of a runtime get each record once.

A record is final. Observers run on the event loop, in the step that ends the load or lease, so they must be quick. An
error of an observer is logged and changes nothing. If an observer fails repeatedly, its 1st, 2nd, 4th, 8th ... error is
logged, with the number of errors left out. In tests closing the runtime also raises the first error (`World.forgives`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from kvflow import checks
from kvflow.checks import counted
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.history import Moment
from kvflow.errors import ConfigError
from kvflow.logs import logger_of

logger = logger_of(__name__)

LOADED, CANCELLED = "loaded", "cancelled"

RecordT = TypeVar("RecordT", "LoadRecord", "LeaseRecord")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One source of a load with several sources, and the outcome of the attempt to read from it."""

    engine_id: str
    address: str
    """Address of the first rank in the source's ticket."""
    outcome: str
    """"loaded", the name of the error's type, or "ended" if the load ended before the attempt had an outcome."""
    error: str
    """Reason why the source did not deliver the prompt, or ""."""
    bytes: int
    """Bytes of the reads that were posted to this source. Only the bytes of the source that "loaded" were used."""
    seconds: float
    """Seconds from the start of the attempt until no further byte from this source could land."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """A load that has ended or was refused. `seconds` has an entry per phase; together they are the whole time."""

    engine_id: str
    rank: Rank
    request_id: str
    outcome: str
    """"loaded", "cancelled" or the name of the error's type."""
    error: str
    """The error's message, or ""."""
    phase: str
    """Phase in which the load ended."""
    seconds: Mapping[str, float]
    peer_engine_id: str = ""
    """Producer's engine id. Empty, as all fields below, if the load was refused: its request is unchecked."""
    remote_request_id: str = ""
    """The producer's request id, as in the producer's lease records."""
    peer: str = ""
    """Address of the first rank in the ticket."""
    bytes: int = 0
    blocks: int = 0
    blocks_by_group: Mapping[str, int] = field(default_factory=dict)
    """Number of blocks by the names of the cache's groups of layers."""
    descriptors: int = 0
    verification: str = "off"
    """Outcome of the comparison with the producer's bytes, a `Verification`: "off", "verified", "repaired", "mismatch"
    or "unverified"."""
    freshness: str = ""
    """Proof of the bytes, as in a `LoadReport`: "seal" or "deadline"; "" if the load read no blocks, or ended before
    its sources were known."""
    landed: Sequence[Moment] = ()
    """For a lease that grows: how many tokens had landed when, in seconds from the start of the load."""
    traceparent: str = ""
    """W3C trace context in the ticket, or ""."""
    attempts: Sequence[Attempt] = ()
    """Attempts of a load with several tickets, or with `again`, in the order in which they began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """A lease that has ended, and given its blocks back.

    `seconds`: "offered" until the lease was read, expired, revoked or failed; "held" from then until its blocks were
    free.
    """

    engine_id: str
    rank: Rank
    request_id: str
    outcome: str
    reason: str = ""
    """Reason why the prompt could not be computed, if the lease failed."""
    blocks: int
    blocks_by_group: Mapping[str, int]
    """Number of blocks by the names of the cache's groups of layers."""
    tokens: int
    readers: int
    """Number of consumer ranks that reported that they had read."""
    seconds: Mapping[str, float]
    traceparent: str
    computed: Sequence[Moment] = ()
    """For a lease that grows: how many tokens were computed when, in seconds from the opening of the lease."""


class Observer(Protocol):
    """An observer of runtimes: it gets the record of each of their loads and leases."""

    def load_ended(self, record: LoadRecord) -> None:
        """Called when a load has ended, with any outcome.

        Args:
            record: the load, its outcome, and the seconds of its phases.
        """

    def lease_ended(self, record: LeaseRecord) -> None:
        """Called when a lease has ended, with any outcome, and its blocks are free.

        Args:
            record: the lease and its outcome.
        """


class Observers:
    """The observers of one runtime. Each record is passed to all, and their errors are logged."""

    def __init__(self, observers: Sequence[Observer], *, forgiven: bool = True) -> None:
        listed = checks.answer(lambda: tuple(observers))
        if listed is None or not all(map(_listens, listed)):
            what = "expected objects with load_ended and lease_ended"
            raise ConfigError(f"observers: {what}, got {checks.shown(observers)}")
        self.all = listed
        self._forgiven = forgiven
        self._failures = Counter[int]()
        """Number of errors of each observer, by `id`."""
        self._error: Exception | None = None
        """The first error of an observer, if errors are not forgiven."""

    @contextlib.contextmanager
    def one_more(self, observer: Observer) -> Iterator[None]:
        """Add an observer for the duration of the block. For tests."""
        self.all = (*self.all, observer)
        try:
            yield
        finally:
            self.all = tuple(other for other in self.all if other is not observer)
            self._log_rest(id(observer))

    def load_ended(self, record: LoadRecord) -> None:
        for observer in self.all:
            self._tell(observer, observer.load_ended, record)

    def lease_ended(self, record: LeaseRecord) -> None:
        for observer in self.all:
            self._tell(observer, observer.lease_ended, record)

    def close(self) -> None:
        """Log the errors that were left out. Raise the first error of an observer once, unless errors are forgiven."""
        for observer in list(self._failures):
            self._log_rest(observer)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _tell(self, observer: Observer, listen: Callable[[RecordT], None], record: RecordT) -> None:
        try:
            listen(record)
        except Exception as error:
            self._failures[id(observer)] += 1
            count = self._failures[id(observer)]
            if not _left_out(count):
                more = f" (left out: {counted(count // 2 - 1, 'failure')} of it)" if count > 2 else ""
                logger.exception("an observer failed on %s%s", record, more)
            if self._error is None and not self._forgiven:
                error.add_note(f"an observer failed on {record}")
                self._error = error

    def _log_rest(self, observer: int) -> None:
        count = self._failures.pop(observer, 0)
        if left_out := _left_out(count):
            logger.warning("an observer failed %s; left out were the last %s", counted(count, "time"), left_out)


def _left_out(count: int) -> int:
    """Return how many of `count` failures came after the last logged failure (the 1st, 2nd, 4th, 8th ...)."""
    return count - (1 << count.bit_length() >> 1)


def _listens(observer: object) -> bool:
    methods = [checks.answer(partial(getattr, observer, name)) for name in ("load_ended", "lease_ended")]
    return all(map(callable, methods))
