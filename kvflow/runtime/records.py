"""Records: each load and each lease as it has ended, told once to the observers of a runtime.

A record is final. Observers run on the event loop, in the step that ends the load or lease, so they have to be quick.
The error of an observer is logged and changes nothing; of many of one observer the 1st, 2nd, 4th, 8th ... are logged,
with how many were left out. In tests the first one is also raised when the runtime is closed (`World.forgives`).
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
    """One source of a load that has several, and its outcome."""

    engine_id: str
    address: str
    """Address of the rank that its ticket names first."""
    outcome: str
    """"loaded", the name of the error's type, or "ended" if the load has ended before it was known."""
    error: str
    """The reason why it has not given the prompt, or ""."""
    bytes: int
    """Bytes that were asked of it; only those of the one that has "loaded" count."""
    seconds: float
    """Seconds from its turn to its end: until no byte of it could land any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """One load that has ended, or was refused. `seconds` has an entry per phase, which add up."""

    engine_id: str
    rank: Rank
    request_id: str
    outcome: str
    """"loaded", "cancelled" or the name of the error's type."""
    error: str
    """The error's message, or ""."""
    phase: str
    """Phase in which it ended."""
    seconds: Mapping[str, float]
    peer_engine_id: str = ""
    """Empty, as all below, if it was refused: nothing of its request is known to be right."""
    remote_request_id: str = ""
    """The producer's name for the request: its leases' records have it."""
    peer: str = ""
    """Address of the rank that the ticket names first."""
    bytes: int = 0
    blocks: int = 0
    blocks_by_group: Mapping[str, int] = field(default_factory=dict)
    """Number of blocks by the names of the cache's groups of layers."""
    descriptors: int = 0
    verification: str = "off"
    """Outcome of comparing its bytes with the producer's, a `Verification`: "off", "verified", "repaired", "mismatch"
    or "unverified"."""
    freshness: str = ""
    """Proof of the bytes of a load that reads, as in a `LoadReport`: "seal" or "deadline"; "" if it reads
    nothing, or had ended before it knew from whom."""
    landed: Sequence[Moment] = ()
    """Moments of a load of a lease that grows: how many tokens had landed when, in seconds from its beginning."""
    traceparent: str = ""
    """Trace context that the ticket carried (W3C), or ""."""
    attempts: Sequence[Attempt] = ()
    """Sources of a load of several tickets, or with `again`, in the order of their turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """One lease that has ended and given its blocks back.

    `seconds`: "offered" until it was read, expired, revoked or failed, then "held" until its blocks were free.
    """

    engine_id: str
    rank: Rank
    request_id: str
    outcome: str
    reason: str = ""
    """The reason why its prompt could not be computed, if its producer has said so."""
    blocks: int
    blocks_by_group: Mapping[str, int]
    """Number of blocks by the names of the cache's groups of layers."""
    tokens: int
    readers: int
    """Ranks of consumers that said they have read."""
    seconds: Mapping[str, float]
    traceparent: str
    computed: Sequence[Moment] = ()
    """Moments of a lease that grows: how many tokens were computed when, in seconds from the offer."""


class Observer(Protocol):
    """Gets every record of the runtimes that it was given to."""

    def load_ended(self, record: LoadRecord) -> None:
        """A load has ended, in whatever way.

        Args:
            record: what the load was, how it ended, and how long its phases took.
        """

    def lease_ended(self, record: LeaseRecord) -> None:
        """A lease has ended, in whatever way.

        Args:
            record: what the lease was, and how it ended.
        """


class Observers:
    """The observers of one runtime."""

    def __init__(self, observers: Sequence[Observer], *, forgiven: bool = True) -> None:
        listed = checks.answer(lambda: tuple(observers))
        if listed is None or not all(map(_listens, listed)):
            what = "expected objects with load_ended and lease_ended"
            raise ConfigError(f"observers: {what}, got {checks.shown(observers)}")
        self.all = listed
        self._forgiven = forgiven
        self._failures = Counter[int]()
        """How often each observer has raised, by its id."""
        self._error: Exception | None = None
        """The first, if it is not forgiven."""

    @contextlib.contextmanager
    def one_more(self, observer: Observer) -> Iterator[None]:
        """Tell another observer, too, inside the block: for tests."""
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
        """Take no more records. Raises what an observer has raised first, unless that is forgiven, or was told."""
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
    """Return how many of `count` failures came after the last one that was logged: the 1st, 2nd, 4th, 8th ..."""
    return count - (1 << count.bit_length() >> 1)


def _listens(observer: object) -> bool:
    methods = [checks.answer(partial(getattr, observer, name)) for name in ("load_ended", "lease_ended")]
    return all(map(callable, methods))
