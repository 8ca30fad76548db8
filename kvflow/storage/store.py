"""The store's verbs: blocks into a file and back, each one way, under one deadline, with one end.

A save leases its blocks, takes their digests, makes room, moves them, and makes the file an entry. A restore claims its
blocks as a load does, fills them from the file, and is good only if their digests are those that were saved. So bytes
that were changed anywhere between the two, on disk or on the way, are never reported as good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from kvflow import checks
from kvflow.checks import counted
from kvflow.core.cache.groups import GroupFacts
from kvflow.core.cache.regions import Regions, device_of, map_spans
from kvflow.core.plan.descriptors import BlockIds, Descriptors
from kvflow.core.protocol.proof import HOST
from kvflow.errors import (
    CacheUnregistered,
    ConfigError,
    DeadlineExceeded,
    EntryDamaged,
    KVFlowError,
    NotStored,
    Overloaded,
    RequestError,
    RuntimeClosed,
    RuntimeUnavailable,
    StorageFailed,
    StoreFull,
)
from kvflow.logs import logger_of
from kvflow.runtime.assembly import RegisteredCache
from kvflow.runtime.context import RankContext
from kvflow.runtime.load.gear import Gear
from kvflow.runtime.load.reads import CopyFailed
from kvflow.storage.disk import EntryFile
from kvflow.storage.entry import EntryHeader, NotAnEntry, checked_key, entry_name, fingerprint_of
from kvflow.storage.files import Direction, Files
from kvflow.storage.index import Entry, NoRoom
from kvflow.storage.jobs import Job, Jobs, WantedEntry
from kvflow.storage.placing import data_bytes, plan_file
from kvflow.storage.rank_files import FileShelf, open_shelf
from kvflow.storage.staged import StagedBlocks
from kvflow.storage.storage_requests import (
    RestoreReport,
    RestoreRequest,
    SaveReport,
    SaveRequest,
    StoreStatistics,
    checked,
)
from kvflow.transport.base import TransportError
from kvflow.verify.cache_digests import DigestedCache, Digesting, HeadSpan, TokenBlocks

logger = logger_of(__name__)

ReportT = TypeVar("ReportT", SaveReport, RestoreReport)

_RANDOM_BYTES = 8


class StoredCache(NamedTuple):
    """The cache whose blocks are saved: its own memory, or host buffers if that is on a device."""

    sets: Sequence[tuple[int, Regions]]
    """Group and regions of each set of layers; memory that several layers share is there once."""
    layers: Sequence[Sequence[int]]
    """Layers of each set by position; of those that share all of their memory the first."""
    groups: Sequence[GroupFacts]
    fingerprint: bytes
    digested: DigestedCache
    """Digests of what is saved."""
    staged: StagedBlocks | None = None
    """The way through host buffers."""


class BlockStore:
    """All saves and restores of one registration."""

    def __init__(self, context: RankContext, gear: Gear, shelf: FileShelf, cache: StoredCache) -> None:
        self._config = context.config
        self._now_s = context.clock.now_s
        self._token_hex = context.token_hex
        self._gear = gear
        self._directory, self._index, self._files = shelf.directory, shelf.index, shelf.files
        self._cache = cache
        self._jobs = Jobs(shelf, gear.ledger)
        self._closed: type[RuntimeUnavailable] | None = None
        self._evicted = self._dropped = 0

    @property
    def statistics(self) -> StoreStatistics:
        return StoreStatistics(
            entries=len(self._index),
            bytes=self._index.used_bytes,
            bytes_max=self._index.bytes_max,
            open_requests=len(self._jobs),
            quarantines=len(self.quarantines),
            evicted=self._evicted,
            dropped=self._dropped,
            **self._jobs.outcomes,
        )

    @property
    def open_requests(self) -> list[str]:
        return self._jobs.requests

    @property
    def quarantines(self) -> tuple[Job, ...]:
        """Restores that have ended and whose blocks are not safe yet."""
        return self._jobs.quarantines

    def has(self, key: object) -> bool:
        """See `Storage.has`."""
        return self._index.find(entry_name(self._cache.fingerprint, checked_key(key, "key"))) is not None

    async def drop(self, keys: Sequence[bytes | str] | None) -> int:
        """See `Storage.drop`."""
        names = None
        if keys is not None:
            checks.count(keys, "keys")
            if (listed := checks.answer(lambda: tuple(keys))) is None:
                raise RequestError(f"keys: expected a list, got {checks.shown(keys)}")
            names = {entry_name(self._cache.fingerprint, checked_key(key, "keys")) for key in listed}
        files = self._jobs.drop(names)
        self._dropped += len(files)
        if not files:
            return 0
        path, bound_s = self._directory.path, self._config.load_deadline_s
        logger.info("store %s: dropped %s", path, counted(len(files), "entry", "entries"))
        try:
            async with asyncio.timeout(bound_s):
                failed = await self._files.call(partial(self._directory.remove_all, files))
        except TimeoutError:
            failed = {path: OSError(f"not done within {bound_s:g} s (load_deadline_s)")}
        if failed:
            file, why = next(iter(failed.items()))
            left = f"files of {counted(len(files), 'entry', 'entries')} that were dropped may be back at the next start"
            raise StorageFailed(f"store {path!r}: {left}: {file}: {why}", request_id="")
        return len(files)

    async def save(self, request: SaveRequest) -> SaveReport:
        """See `Storage.save`."""
        given = checks.instance(request, SaveRequest, "save")
        return await self._carry_out(self._accept(given, Direction.SAVE), self._save)

    async def restore(self, request: RestoreRequest) -> RestoreReport:
        """See `Storage.restore`."""
        given = checks.instance(request, RestoreRequest, "restore")
        return await self._carry_out(self._accept(given, Direction.RESTORE), self._restore)

    def close(self, error: type[RuntimeUnavailable]) -> None:
        """Make everything under way end soon, with that error: RuntimeClosed or CacheUnregistered, of two the first."""
        self._closed = self._closed or error
        self._jobs.hurry()

    async def drained(self) -> None:
        """Wait until nothing is under way and no block is quarantined."""
        await self._jobs.drained()

    async def aclose(self, timeout_s: float) -> str:
        """End the thread, once no move is under way. Returns what went wrong, or ""."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._files.aclose(self._jobs.put_all_away)
        except TimeoutError:
            return self._never_known(
                f"not stopped within {timeout_s} s: {counted(self._files.moves_under_way, 'move')} of the store"
            )
        if self._files.cause is not None:
            self._directory.close()
            return self._never_known(f"the store's thread has died: {self._files.cause}")
        self._jobs.all_stopped()
        return ""

    def _never_known(self, problem: str) -> str:
        self._jobs.never_known(problem)
        return problem

    def abandon(self, wait_s: float) -> None:
        """Shut down without the loop, which is gone."""
        self._files.abandon(self._jobs.put_all_away, wait_s)

    # --- one save or restore

    def _accept(self, request: SaveRequest | RestoreRequest, direction: Direction) -> Job:
        """Check all that can be judged without a file, claim the blocks, and open the job."""
        given, key = checked(request, self._config.limits)
        what = f"request {given.request_id!r}"
        tables, entries = self._gear.ledger.find(given.block_ids, f"{what}: block_ids")
        for group, ids in zip(self._cache.groups, tables, strict=True):
            needed = -(-given.num_tokens // group.block_size)
            if len(ids) > needed or (group.whole and len(ids) < needed):
                blocks = f"{counted(len(ids), 'block')} of {counted(group.block_size, 'token')}"
                takes = f"num_tokens {given.num_tokens} takes {needed}"
                raise RequestError(f"{what}: group {group.name!r}: {blocks}, {takes}")
        if not len(entries):
            raise RequestError(f"{what}: there are no blocks to {direction}")
        if len(self._jobs) >= self._config.loads_waiting_max:
            full = f"{what}: saves and restores under way: {len(self._jobs)} (loads_waiting_max)"
            raise Overloaded(full, request_id=given.request_id, peer=self._directory.path)
        loop = asyncio.get_running_loop()
        deadline_s = self._config.load_deadline_s if given.deadline_s is None else given.deadline_s
        timeout = asyncio.timeout_at(loop.time() + deadline_s)
        wanted = WantedEntry(given, key, direction, tables, entries)
        job = Job(wanted, timeout, self._gear, self._files, self._jobs.put_away)
        self._jobs.add(job)
        return job

    async def _carry_out(self, job: Job, work: Callable[[Job], Awaitable[ReportT]]) -> ReportT:
        """Carry a save or a restore out to its outcome. Every one ends here."""
        try:
            try:
                report = await self._within(job, work)
                job.flight.land()
                job.outcome = "saved" if job.direction is Direction.SAVE else "restored"
            finally:
                await self._jobs.end(job, self._config.cancel_grace_s)
        except KVFlowError as error:
            logger.info("%s %s failed in phase %s: %s", job.direction, job.request_id, job.phase, error)
            error.quarantine = job if job.quarantined else None
            raise
        return report

    async def _within(self, job: Job, work: Callable[[Job], Awaitable[ReportT]]) -> ReportT:
        """Do the work of a job within its deadline, and translate its errors."""
        request_id, path = job.request.request_id, self._directory.path
        what = f"request {request_id!r}: {job.direction} in {path!r}"
        try:
            async with job.timeout:
                job.timed = True
                try:
                    if self._closed:
                        raise self._closed_error(job)
                    return await work(job)
                finally:
                    job.timed = False
        except (OSError, TransportError, CopyFailed) as error:  # a TimeoutError among them
            cause = job.moves.error or error  # a move that was lost has ended it early
            if cause is error and job.timeout.expired():
                if self._closed:
                    raise self._closed_error(job) from None
                late = f"{what}: deadline exceeded in phase {job.phase!r}"
                raise DeadlineExceeded(late, request_id=request_id, peer=path, phase=job.phase) from None
            self._jobs.note_failure(job, cause)
            raise StorageFailed(f"{what}: {cause}", request_id=request_id) from cause

    async def _save(self, job: Job) -> SaveReport:
        header = EntryHeader(
            fingerprint=self._cache.fingerprint,
            key=job.key,
            num_tokens=job.request.num_tokens,
            block_counts=job.counts,
            data_bytes=data_bytes(self._cache.sets, job.counts),
            digests=b"",
        )
        what = f"request {job.request.request_id!r}"
        most = self._index.bytes_max
        if header.file_bytes > most:
            raise RequestError(f"{what}: it takes {counted(header.file_bytes, 'byte')}, bytes_max is {most}")
        digests = await self._digests(job)
        header = msgspec.structs.replace(header, digests=digests)
        evicted = self._make_room(job, header)
        assert job.file is not None, "made with its room"
        await self._files.call(job.file.create)
        await self._move(job, header.data_start)
        job.enter("sync", self._now_s())
        await self._files.call(partial(job.file.commit, header))
        self._jobs.committed(job)
        job.enter("sync", self._now_s())
        return SaveReport(
            request_id=job.request.request_id,
            bytes=header.file_bytes,
            blocks=sum(job.counts),
            tokens=job.request.num_tokens,
            evicted=evicted,
            seconds=job.seconds,
        )

    def _make_room(self, job: Job, header: EntryHeader) -> int:
        """Reserve the room of a file. Returns the number of entries that have to go for it."""
        what, size_bytes = f"request {job.request.request_id!r}", header.file_bytes
        try:
            victims = self._index.make_room(size_bytes)
        except NoRoom as full:
            text = f"{what}: {full}; all entries that are left are being read or written"
            raise StoreFull(text, request_id=job.request.request_id) from None
        name = entry_name(self._cache.fingerprint, job.key)
        job.reserved = Entry(name, f"{name}-{self._token_hex(_RANDOM_BYTES)}", size_bytes)
        job.file = EntryFile(self._directory, job.reserved, self._files.mover)
        job.file.victims = list(victims)
        self._evicted += len(victims)
        return len(victims)

    async def _restore(self, job: Job) -> RestoreReport:
        request_id = job.request.request_id
        entry = self._index.find(entry_name(self._cache.fingerprint, job.key))
        if entry is None:
            job.outcome = "missed"
            raise NotStored(f"request {request_id!r}: nothing is stored under its key", request_id=request_id)
        self._index.begin_read(entry)
        job.read, job.file = entry, EntryFile(self._directory, entry, self._files.mover)
        try:
            header = await self._files.call(job.file.open)
        except FileNotFoundError:
            self._index.drop(entry)
            job.outcome = "missed"
            raise NotStored(f"request {request_id!r}: its file was removed", request_id=request_id) from None
        except NotAnEntry as error:
            raise self._damaged(job, str(error)) from error
        self._judge(job, header)
        await self._move(job, header.data_start)
        job.enter("check", self._now_s())
        if await self._digests(job) != header.digests:
            raise self._damaged(job, "its blocks are not those that were saved")
        job.enter("sync", self._now_s())
        job.file.restored = True
        self._index.touch(entry)
        return RestoreReport(
            request_id=request_id,
            bytes=job.flight.size_bytes,
            blocks=sum(job.counts),
            tokens=job.request.num_tokens,
            seconds=job.seconds,
        )

    def _judge(self, job: Job, header: EntryHeader) -> None:
        """EntryDamaged or RequestError unless a file's header is of the entry, and of what was asked for."""
        expected = self._cache.fingerprint, job.key, data_bytes(self._cache.sets, header.block_counts)
        if (header.fingerprint, header.key, header.data_bytes) != expected:
            raise self._damaged(job, "it is of another cache, or of another key")
        ours, theirs = (job.request.num_tokens, job.counts), (header.num_tokens, header.block_counts)
        if ours != theirs:
            what = f"request {job.request.request_id!r}: num_tokens and blocks of each group"
            raise RequestError(
                f"{what}: asked for {ours[0]} and {list(ours[1])}, saved {theirs[0]} and {list(theirs[1])}"
            )

    def _damaged(self, job: Job, why: str) -> EntryDamaged:
        """Drop a damaged entry, have its file removed, and make the error."""
        assert job.read is not None, "it is read"
        assert job.file is not None, "it is read"
        job.outcome = "damaged"
        self._index.drop(job.read)
        job.file.remove = True
        path, request_id = f"{self._directory.path}/{job.read.file}", job.request.request_id
        logger.warning("request %s: removing the damaged file %s: %s", request_id, path, why)
        return EntryDamaged(f"request {request_id!r}: the file {path!r} is damaged: {why}", request_id=request_id)

    async def _move(self, job: Job, start: int) -> None:
        job.enter("move", self._now_s())
        assert job.file is not None, "it is open"
        limits = self._config.limits
        plan = partial(
            plan_file,
            self._cache.sets,
            fd=job.file.fd,
            start=start,
            bytes_max=limits.slice_bytes_max,
            descriptors_max=limits.slice_descriptors_max,
        )
        if self._cache.staged is None:
            await job.move(plan(job.tables))
        else:

            def plan_span(tables: Sequence[BlockIds], firsts: Sequence[int]) -> Iterator[Descriptors]:
                return plan(tables, counts=job.counts, firsts=firsts)

            await job.flight.fly_groups(self._cache.staged.moves(job.direction, job.tables, plan_span))
        queued_s = job.flight.queued_s
        job.seconds["queued"] += queued_s
        job.seconds["move"] -= queued_s

    async def _digests(self, job: Job) -> bytes:
        """Digests of every byte of its blocks, wherever they are in the prompt."""
        if self._cache.staged is not None:
            return np.array(await self._cache.staged.digests(job.tables), dtype="<u8").tobytes()
        asked = []
        for at, (group, regions) in enumerate(self._cache.sets):
            ids, size = job.tables[group], self._cache.groups[group].block_size
            if len(ids):
                layers = self._cache.layers[at]
                blocks = TokenBlocks(ids, size, 0, len(ids) * size)
                asked.append(Digesting(at, layers, HeadSpan(0, regions.block.heads, 0), blocks))
        return np.array(await self._cache.digested.digests(asked), dtype="<u8").tobytes()

    def _closed_error(self, job: Job) -> KVFlowError:
        what = f"request {job.request.request_id!r}"
        if self._closed is CacheUnregistered:
            return CacheUnregistered(f"{what}: the cache was unregistered in phase {job.phase!r}")
        return RuntimeClosed(f"{what}: the runtime was closed, or had drained, in phase {job.phase!r}")


async def open_store(cache: RegisteredCache, files: Files, folder: str, bytes_max: int) -> BlockStore:
    """The store of a cache that is being registered. Cancelling leaves nothing open.

    Args:
        cache: whose blocks are saved.
        files: moves the bytes.
        folder: for the files of all ranks.
        bytes_max: bytes of this rank's files.

    Raises:
        ConfigError: blocks of such a cache cannot be saved.
        TransportError: the memory or the folder cannot be used.
    """
    context, gear, local, memory = cache.context, cache.gear, cache.local, cache.memory
    own, shown = memory.own, memory.shown
    where = device_of([layer for one in own for layer in one.caches.items()])
    through = where != HOST  # what is on the host needs no host buffers, though peers read them
    if through and not memory.staging:
        raise ConfigError(
            f"storage: blocks are saved from host memory, the cache is on {where.kind!r}: set staging='always'"
        )
    saved, device = (shown, memory.filled) if through else (own, memory.device)
    digested = DigestedCache(saved, gear.copy_thread, device)
    if problem := digested.problem:
        raise ConfigError(f"storage: blocks cannot be saved without digests: {problem}")
    found = [(one.group, one.regions) for one in saved]
    sets = [(group, regions.distinct) for group, regions in found]
    shapes = [(group, len(regions), regions.parts, tuple(regions.block)) for group, regions in found]
    shared = [regions.first_of for _, regions in found if len(regions.distinct) < len(regions)]
    facts = [local.compatibility, local.cache_shares, local.groups, shapes, *shared]
    layers_once = [regions.distinct_layers for _, regions in found]
    shelf = await open_shelf(context.identity.rank, files, folder, bytes_max)
    layers = [layer for one in saved for layer in one.caches.items()]
    try:
        await files.call(lambda: files.mover.register(map_spans(layers), layers))
    except BaseException:
        files.abandon(shelf.directory.close, 0.0)
        raise
    count, used = counted(len(shelf.index), "entry", "entries"), counted(shelf.index.used_bytes, "byte")
    logger.info("store %s: %s, %s of %s", shelf.directory.path, count, used, shelf.index.bytes_max)
    span_bytes_max = context.config.limits.slice_bytes_max
    stored = StoredCache(sets, layers_once, local.groups, fingerprint_of(facts), digested)
    if through:
        copies = memory, digested, gear.copy_thread
        staged = StagedBlocks(sets, layers_once, local.groups, *copies, span_bytes_max)
        stored = stored._replace(staged=staged)
    return BlockStore(context, gear, shelf, stored)
