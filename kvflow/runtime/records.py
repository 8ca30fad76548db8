"""Records of ended loads and leases. The observers of a runtime get each record once.

Observers run on the event loop, in the step that ends the load or lease, so they must be quick. An error of an observer
is logged and has no other effect. If an observer fails repeatedly, its 1st, 2nd, 4th, 8th ... error is logged, with the
number of errors that were not logged. In tests closing the runtime also raises the first error.
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
    """One attempt of a load with several tickets or with `LoadRequest.again`: the attempt's producer and outcome."""

    engine_id: str
    address: str
    """Address of the first rank in the producer's ticket."""
    outcome: str
    """"loaded", the name of the error's type, or "ended" if the load ended before the attempt had an outcome."""
    error: str
    """Reason why the producer did not deliver the prompt, or empty."""
    bytes: int
    """Number of bytes of the reads that were posted to this producer. The load uses only the bytes of the attempt with
    the outcome "loaded"."""
    seconds: float
    """Seconds from the start of the attempt until no further byte from this producer could land."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """A load that has ended or was refused. `seconds` has the time spent in each phase; their sum is the whole time."""

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
    """Engine id of the producer. If the load was refused, this field and all fields below are empty, since the request
    was not checked."""
    remote_request_id: str = ""
    """The producer's request id, as in the producer's lease records."""
    peer: str = ""
    """Address of the first rank in the ticket."""
    bytes: int = 0
    blocks: int = 0
    blocks_by_group: Mapping[str, int] = field(default_factory=dict)
    """Number of blocks, by name of the group of layers."""
    descriptors: int = 0
    verification: str = "off"
    """Outcome of comparing the loaded blocks' digests with the producer's, a value of `Verification`: "off",
    "verified", "repaired", "mismatch" or "unverified"."""
    freshness: str = ""
    """Kind of proof that the bytes were fresh, as in a `LoadReport`: "seal" or "deadline"; "" if the load read no
    blocks, or ended before it was known from which ranks to read."""
    landed: Sequence[Moment] = ()
    """How many tokens had landed at which times, in seconds from the start of the load, if the lease opened before all
    tokens were computed. Else empty."""
    traceparent: str = ""
    """W3C trace context in the ticket, or ""."""
    attempts: Sequence[Attempt] = ()
    """Attempts of a load with several tickets, or with `LoadRequest.again`, in the order in which they began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """A lease that has ended, and no longer holds its blocks.

    `seconds["offered"]` is the time for which the lease was open, `seconds["held"]` the time from the end of the lease
    until its blocks were free.
    """

    engine_id: str
    rank: Rank
    request_id: str
    outcome: str
    reason: str = ""
    """Reason why the prompt could not be computed, if the lease failed."""
    blocks: int
    blocks_by_group: Mapping[str, int]
    """Number of blocks, by name of the group of layers."""
    tokens: int
    readers: int
    """Number of consumer ranks that reported that they had finished with the blocks."""
    seconds: Mapping[str, float]
    traceparent: str
    computed: Sequence[Moment] = ()
    """How many tokens were computed at which times, in seconds from the opening of the lease, if the lease opened
    before all tokens were computed. Else empty."""


class Observer(Protocol):
    """Interface of an observer, which a runtime calls with the record of every ended load and lease."""

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

    def __init__(self, observers: Sequence[Observer], *, errors_logged_only: bool = True) -> None:
        listed = checks.try_call(lambda: tuple(observers))
        if listed is None or not all(map(_is_observer, listed)):
            what = "expected objects with load_ended and lease_ended"
            raise ConfigError(f"observers: {what}, got {checks.short_repr(observers)}")
        self.all = listed
        self._errors_logged_only = errors_logged_only
        self._failures = Counter[int]()
        """Number of errors that each observer has raised, by the `id()` of the observer."""
        self._error: Exception | None = None
        """The first error that an observer raised, which `close` raises; None if `errors_logged_only`."""

    @contextlib.contextmanager
    def adding(self, observer: Observer) -> Iterator[None]:
        """Return a context manager that adds an observer while its `with` body runs. For tests."""
        self.all = (*self.all, observer)
        try:
            yield
        finally:
            self.all = tuple(other for other in self.all if other is not observer)
            self._log_unlogged(id(observer))

    def load_ended(self, record: LoadRecord) -> None:
        for observer in self.all:
            self._call_observer(observer, observer.load_ended, record)

    def lease_ended(self, record: LeaseRecord) -> None:
        for observer in self.all:
            self._call_observer(observer, observer.lease_ended, record)

    def close(self) -> None:
        """Log how many errors of observers were not logged. Raise the first error, unless `errors_logged_only`."""
        for observer in list(self._failures):
            self._log_unlogged(observer)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _call_observer(self, observer: Observer, method: Callable[[RecordT], None], record: RecordT) -> None:
        try:
            method(record)
        except Exception as error:
            self._failures[id(observer)] += 1
            count = self._failures[id(observer)]
            if not _unlogged_count(count):
                more = f" (not logged: {counted(count // 2 - 1, 'failure')})" if count > 2 else ""
                logger.exception("an observer failed on %s%s", record, more)
            if self._error is None and not self._errors_logged_only:
                error.add_note(f"an observer failed on {record}")
                self._error = error

    def _log_unlogged(self, observer: int) -> None:
        count = self._failures.pop(observer, 0)
        if left_out := _unlogged_count(count):
            logger.warning("an observer failed %s; the last %s were not logged", counted(count, "time"), left_out)


def _unlogged_count(count: int) -> int:
    """Return how many of `count` failures of an observer came after the last logged one (1st, 2nd, 4th, 8th ...)."""
    return count - (1 << count.bit_length() >> 1)


def _is_observer(observer: object) -> bool:
    methods = [checks.try_call(partial(getattr, observer, name)) for name in ("load_ended", "lease_ended")]
    return all(map(callable, methods))
