"""Saves and restores under way, and their ends: first the blocks of a job are safe, then its file is put away.

A job is over when both are done. Its caller waits for that, but no longer than `cancel_grace_s`: then the job outlives
the call, and its flight has quarantined its blocks if bytes may still land in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kvflow.core.plan.descriptors import BlockIds, Descriptors
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.policy.states import TransferState
from kvflow.errors import KVFlowError, RuntimeBroken
from kvflow.logs import logger_of
from kvflow.runtime.load.flight import Flight
from kvflow.runtime.load.gear import Gear
from kvflow.runtime.load.reads import Read
from kvflow.storage.disk import EntryFile
from kvflow.storage.files import Direction, Files, MoveFailed
from kvflow.storage.index import Entry
from kvflow.storage.moves import Moves, opened_file
from kvflow.storage.rank_files import FileShelf
from kvflow.storage.storage_requests import PHASES, SaveRequest

logger = logger_of(__name__)

_OUTCOMES = ("saved", "restored", "missed", "damaged", "failed")


class WantedEntry(NamedTuple):
    """A save or restore, checked as far as that needs no file."""

    request: SaveRequest
    key: bytes
    direction: Direction
    tables: Sequence[BlockIds]
    """Blocks by group."""
    entries: BlockIds
    """Blocks as the ledger counts them."""


class Job:
    """A save or restore under way; also the `quarantine` of a restore that has ended while bytes may still land.

    The blocks of a restore are claimed by its flight. Those of a save are leased, and given back when the flight is
    safe: it writes none of them.
    """

    def __init__(
        self, wanted: WantedEntry, timeout: asyncio.Timeout, gear: Gear, files: Files, on_safe: Callable[[Job], None]
    ) -> None:
        """Raises BlocksBusy. `on_safe`: called when none of its moves is under way any more."""
        request, self.key, direction, self.tables, entries = wanted
        self.request, self.direction = request, direction
        self.timeout = timeout
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that is done when its file is put away and its blocks are given back."""
        self.moves = Moves(files, direction, self.hurry, self._all_stopped)
        self.leased = entries if direction is Direction.SAVE else entries[:0]
        gear.ledger.lease(self.leased)
        written, gear = entries[len(self.leased) :], replace(gear, poller=self.moves)
        self.flight = Flight(request.request_id, written, (), request.priority, gear)
        self.flight.on_safe = lambda _: on_safe(self)
        self.phase, self.since_s = PHASES[0], gear.clock.now_s()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.timed = False
        """True while the deadline counts: it has begun, and has no outcome yet."""
        self.outcome = "failed"
        """Outcome, as far as it is known."""
        self.reserved: Entry | None = None
        """The entry that it writes; its room is reserved."""
        self.read: Entry | None = None
        """The entry that it reads."""
        self.file: EntryFile | None = None

    def __repr__(self) -> str:
        return f"<Job {self.direction} {self.flight!r}>"

    def enter(self, phase: str, now_s: float) -> None:
        self.seconds[self.phase] += now_s - self.since_s
        self.phase, self.since_s = phase, now_s

    def hurry(self) -> None:
        """End soon, as if the deadline had passed."""
        if self.timed and not self.timeout.expired():
            self.timeout.reschedule(asyncio.get_running_loop().time())

    async def move(self, slices: Iterable[Descriptors]) -> None:
        """Move everything. Raises the first TransportError. Cancelling posts no more."""
        file = opened_file()
        await self.flight.fly(Read(file, descriptors) for descriptors in slices)

    async def stop(self, grace_s: float) -> None:
        """Wait until its moves have stopped and its file is put away, or for `grace_s`: see `Flight.stop`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + grace_s
        try:
            await self.flight.stop(grace_s)
        finally:
            self._all_stopped()
        if not self.over.done():
            await asyncio.wait([self.over], timeout=until_s - loop.time())

    def _all_stopped(self) -> None:
        if self.moves.stopped:
            self.flight.all_stopped()

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(map(len, self.tables))

    # --- as a quarantine

    @property
    def quarantined(self) -> bool:
        return self.flight.state is TransferState.QUARANTINED and self.direction is Direction.RESTORE

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """Blocks by group."""
        return tuple(tuple(ids.tolist()) for ids in self.tables)

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Blocks of the job; those of the first group, if there are several."""
        return self.block_tables[0]

    @property
    def safe(self) -> bool:
        """True once no byte can land in its blocks any more."""
        return self.flight.safe

    async def settled(self) -> None:
        """Return once no byte can land any more. RuntimeBroken if that can never be known.

        UsageError off the runtime's loop.
        """
        await self.flight.settled()


class Jobs:
    """All jobs of one store."""

    def __init__(self, shelf: FileShelf, ledger: BlockLedger) -> None:
        self._ledger = ledger
        self.outcomes = dict.fromkeys(_OUTCOMES, 0)
        """Jobs that have ended, by outcome."""
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
    def quarantines(self) -> tuple[Job, ...]:
        """Restores that have ended and whose blocks are not safe yet."""
        return tuple(job for job in self._under_way if job.quarantined)

    def add(self, job: Job) -> None:
        self._under_way[job] = None
        self._quiet.clear()

    def hurry(self) -> None:
        """Make all jobs end soon."""
        for job in self._under_way:
            job.hurry()

    async def end(self, job: Job, grace_s: float) -> None:
        """Count its outcome, and wait for its end: see `Job.stop`."""
        self.outcomes[job.outcome] += 1
        await job.stop(grace_s)

    async def drained(self) -> None:
        """Wait until nothing is under way and no block is quarantined."""
        await self._quiet.wait()

    def all_stopped(self) -> None:
        """End all jobs: the store's thread has ended in good order, and has put all files away."""
        for job in list(self._under_way):
            job.moves.all_stopped()
            self._over(job)

    def never_known(self, problem: str) -> None:
        """Give all jobs up: it will never be known when their bytes have stopped."""
        for job in self._under_way:
            job.moves.give_up(RuntimeBroken(problem))

    def put_all_away(self) -> None:
        """Put all entries away, on the thread, at its end."""
        for job in list(self._under_way):
            if job.file is not None:
                job.file.put_away()
        self._directory.close()

    def put_away(self, job: Job) -> None:
        """Give back the blocks of a save, and put the file away, since its moves have stopped.

        The file comes after whatever the thread has yet to do to it.
        """
        self._ledger.release(job.leased)
        if job.file is None:
            self._over(job)
            return
        try:
            self._files.submit(job.file.put_away, partial(self._over, job))
        except KVFlowError:  # the thread has ended, and so has nothing to put away
            self._over(job)

    def committed(self, job: Job) -> None:
        """Make the file of a job an entry, since it has its name."""
        entry, job.reserved = job.reserved, None
        replaced = None if entry is None else self._index.commit(entry)
        if replaced is not None:
            self._remove(replaced)

    def drop(self, names: Collection[str] | None) -> list[str]:
        """Drop the entries of these names, or all: nobody finds them. Returns their files, which are to be removed.

        A restore that has begun goes on: its file is open, or will be before it is removed. Entries that are just being
        evicted are not put back if that fails.
        """
        for job in self._under_way:
            for victim in [] if job.file is None else list(job.file.victims):
                victim.unwanted = victim.unwanted or names is None or victim.name in names
        found = self._index.pick(names)
        for entry in found:
            self._index.drop(entry)
        return [entry.file for entry in found]

    def note_failure(self, job: Job, error: BaseException | None) -> None:
        """Set an entry aside if its file could not be read: nobody is to try that again."""
        if job.read is not None and isinstance(error, MoveFailed) and self._index.set_aside(job.read):
            path = f"{self._directory.path}/{job.read.file}"
            logger.warning(
                "request %r: setting %s aside, which cannot be read: %s", job.request.request_id, path, error
            )

    def _over(self, job: Job) -> None:
        """End a job: the thread does nothing for it any more, and the state of its file counts."""
        if job not in self._under_way:
            return
        del self._under_way[job]
        self.note_failure(job, job.moves.error)  # it may have ended before that was known
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
