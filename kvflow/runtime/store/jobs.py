"""Saves and restores under way, and what becomes of each: its blocks are safe first, then its file is put away.

A job is over when both are done. Who has asked for it waits that long, but no longer than `cancel_grace_s`; then the
job outlives the answer, and its blocks are quarantined if bytes may still land in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.storage.index import Entry
from kvflow.errors import KVFlowError, RuntimeBroken
from kvflow.logs import logger_of
from kvflow.runtime.store.disk import EntryFile
from kvflow.runtime.store.requests import PHASES, SaveRequest
from kvflow.runtime.store.shelf import Shelf
from kvflow.runtime.store.transit import Transit
from kvflow.transport.base import TransportError
from kvflow.transport.files import MoveFailed

logger = logger_of(__name__)

_OUTCOMES = ("saved", "restored", "missed", "damaged", "failed")


@dataclass(slots=True, eq=False)
class Job:
    """A save or restore under way."""

    request: SaveRequest
    key: bytes
    tables: Sequence[BlockIds]
    transit: Transit
    timeout: asyncio.Timeout
    over: asyncio.Future[None]
    """Done when its file is put away and its blocks are given back."""
    phase: str = PHASES[0]
    since_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    timed: bool = False
    """Whether its time runs: it has begun, and has no outcome yet."""
    outcome: str = "failed"
    """Unless something better is known."""
    reserved: Entry | None = None
    """The entry that it writes; its room is reserved."""
    read: Entry | None = None
    """The entry that it reads."""
    file: EntryFile | None = None

    def enter(self, phase: str, now_s: float) -> None:
        self.seconds[self.phase] += now_s - self.since_s
        self.phase, self.since_s = phase, now_s

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(map(len, self.tables))


class Jobs:
    """All of one store."""

    def __init__(self, shelf: Shelf) -> None:
        self.outcomes = dict.fromkeys(_OUTCOMES, 0)
        """How many have ended how."""
        self._directory, self._index, self._files = shelf.directory, shelf.index, shelf.files
        self._under_way: dict[Job, None] = {}
        self._quiet = asyncio.Event()
        self._quiet.set()

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def requests(self) -> list[str]:
        return [job.request.request_id for job in self._under_way]

    @property
    def quarantines(self) -> tuple[Transit, ...]:
        """Restores that have ended and whose blocks are not safe yet."""
        return tuple(job.transit for job in self._under_way if job.transit.quarantined)

    def add(self, job: Job) -> None:
        self._under_way[job] = None
        self._quiet.clear()

    def hurry(self) -> None:
        """Make all end soon, as if their deadline had passed."""
        now_s = asyncio.get_running_loop().time()
        for job in self._under_way:
            if job.timed and not job.timeout.expired():
                job.timeout.reschedule(now_s)

    async def end(self, job: Job, grace_s: float) -> None:
        """It has its outcome: wait until its moves have stopped and its file is put away, or for `grace_s`; then
        quarantine. Holds a cancellation back until then, as a load's flight does.
        """
        self.outcomes[job.outcome] += 1
        job.transit.abandon()
        loop, cancelled = asyncio.get_running_loop(), False
        deadline_s = loop.time() + grace_s
        while not job.over.done() and (left_s := deadline_s - loop.time()) > 0:
            try:
                await asyncio.wait([job.over], timeout=left_s)
            except asyncio.CancelledError:
                cancelled = True
        job.transit.quarantine()
        if cancelled:
            raise asyncio.CancelledError

    async def drained(self) -> None:
        """Wait until nothing is under way and no block is quarantined."""
        await self._quiet.wait()

    def all_stopped(self) -> None:
        """The store's thread has ended in good order, and has put all files away."""
        for job in list(self._under_way):
            job.transit.all_stopped()
            self._over(job)

    def never_known(self, problem: str) -> None:
        """Nobody will tell when bytes have stopped."""
        for job in self._under_way:
            job.transit.never_known(RuntimeBroken(problem))

    def put_all_away(self) -> None:
        """On the thread, at its end."""
        for job in list(self._under_way):
            if job.file is not None:
                job.file.put_away()
        self._directory.close()

    def put_away(self, job: Job) -> None:
        """Its blocks are safe: put its file away, after what the thread may still do to it."""
        if job.file is None:
            self._over(job)
            return
        try:
            self._files.submit(job.file.put_away, partial(self._over, job))
        except KVFlowError:  # the thread has ended, and so has nothing to put away
            self._over(job)

    def committed(self, job: Job) -> None:
        """Its file has its name: from now on it is an entry."""
        entry, job.reserved = job.reserved, None
        replaced = None if entry is None else self._index.commit(entry)
        if replaced is not None:
            self._remove(replaced)

    def note_failure(self, job: Job, error: TransportError | None) -> None:
        """If its file could not be read nobody is to try that again: the entry is set aside."""
        if job.read is not None and isinstance(error, MoveFailed) and self._index.set_aside(job.read):
            path = f"{self._directory.path}/{job.read.file}"
            logger.warning(
                "request %r: setting %s aside, which cannot be read: %s", job.request.request_id, path, error
            )

    def _over(self, job: Job) -> None:
        """The thread does nothing for it any more: what came of its file counts."""
        if job not in self._under_way:
            return
        del self._under_way[job]
        self.note_failure(job, job.transit.error)  # it may have ended before that was known
        if job.file is not None and job.file.victims:  # they are still there
            for replaced in self._index.put_back(job.file.victims):
                self._remove(replaced)
        if job.file is not None and job.file.complete:
            self.committed(job)
        elif job.reserved is not None:
            self._index.give_back(job.reserved.size_bytes)
        if job.read is not None:
            self._index.end_read(job.read)
        job.over.set_result(None)
        if not self._under_way:
            self._quiet.set()

    def _remove(self, entry: Entry) -> None:
        def remove() -> None:
            try:
                self._directory.remove(entry.file)
            except OSError as error:
                logger.warning("store %s: cannot remove %s: %s", self._directory.path, entry.file, error)

        try:
            self._files.submit(remove, lambda: None)
        except KVFlowError:
            logger.info("store %s: %s is removed when it is opened again", self._directory.path, entry.file)
