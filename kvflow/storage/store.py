"""The store: saves blocks to files and restores them. Each save or restore has one deadline and one outcome.

A save leases its blocks, computes their digests, makes room for a file, copies the bytes to the file, and adds the file
to the index. A restore claims its blocks as a load does, and fills them from the file. The restore succeeds only if the
digests of the filled blocks equal the saved digests, so bytes that were changed on disk or on the way are never
reported as good.

A transfer (a save or a restore) is over when no byte can land in its blocks and its file is closed. The caller waits
for that at most `cancel_grace_s`; then the transfer outlives the call. If bytes may still land in the blocks, they are
quarantined.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar, cast

import msgspec

from kvflow import checks
from kvflow.checks import counted
from kvflow.core.cache.regions import map_spans
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
)
from kvflow.logs import logger_of
from kvflow.runtime.copy_thread import CopyFailed
from kvflow.runtime.part import PartHost
from kvflow.storage.disk import DISK_FULL, EntryFile, StoreDirectory
from kvflow.storage.entry import EntryHeader, NotAnEntry, checked_key, entry_name
from kvflow.storage.index import Entry, StoreIndex
from kvflow.storage.placing import data_bytes
from kvflow.storage.storage_requests import (
    RestoreReport,
    RestoreRequest,
    SaveReport,
    SaveRequest,
    StoreRequest,
    StoreStatistics,
)
from kvflow.storage.store_thread import Direction, MoveFailed, StoreThread
from kvflow.storage.store_transfer import StoreTransfer
from kvflow.storage.stored_cache import StoredCache
from kvflow.transport.base import TransportError

logger = logger_of(__name__)

ReportT = TypeVar("ReportT", SaveReport, RestoreReport)

_RANDOM_BYTES = 8
_TRIES_IF_FULL = 3
"""Number of attempts of a save to create its file on a full disk. On a disk shared with others, room that was made may
be taken at once, and evicting everything in vain would be worse than a failed save."""
_OUTCOMES = ("saved", "restored", "missed", "damaged", "failed")


class BlockStore:
    """Store of one registered KV cache: its saves and restores under way, and its stored files."""

    def __init__(
        self,
        host: PartHost,
        stored: StoredCache,
        directory: StoreDirectory,
        index: StoreIndex,
        store_thread: StoreThread,
    ) -> None:
        self._config = host.context.config
        self._token_hex = host.context.token_hex
        self._resources = host.resources
        self._stored_cache, self._directory, self._index, self._store_thread = stored, directory, index, store_thread
        self._transfers: dict[StoreTransfer, None] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._close_error: type[RuntimeUnavailable] | None = None
        self._outcomes = dict.fromkeys(_OUTCOMES, 0)
        """Number of saves and restores that ended with each outcome. Keys are names of fields of `StoreStatistics`."""
        self._evicted = self._dropped = 0

    @property
    def statistics(self) -> StoreStatistics:
        return StoreStatistics(
            entries=len(self._index),
            bytes=self._index.used_bytes,
            bytes_max=self._index.bytes_max,
            open_requests=len(self._transfers),
            quarantines=len(self.quarantines),
            evicted=self._evicted,
            dropped=self._dropped,
            **self._outcomes,
        )

    @property
    def quarantines(self) -> tuple[StoreTransfer, ...]:
        """Restores that have ended while bytes may still land in their blocks."""
        return tuple(transfer for transfer in self._transfers if transfer.quarantined)

    def has(self, key: object) -> bool:
        """Return True if blocks are stored under `key`. Implementation of `Storage.has`."""
        return self._index.find(entry_name(self._stored_cache.fingerprint, checked_key(key, "key"))) is not None

    async def drop(self, keys: Sequence[bytes | str] | None) -> int:
        """Remove stored files, and return how many. Implementation of `Storage.drop`."""
        names = None
        if keys is not None:
            checks.count(keys, "keys")
            if (listed := checks.try_call(lambda: tuple(keys))) is None:
                raise RequestError(f"keys: expected a list, got {checks.short_repr(keys)}")
            names = {entry_name(self._stored_cache.fingerprint, checked_key(key, "keys")) for key in listed}
        for transfer in self._transfers:  # if removing the file of an evicted entry fails, do not put the entry back
            for victim in [] if transfer.file is None else list(transfer.file.victims):
                victim.dropped_by_caller = victim.dropped_by_caller or names is None or victim.name in names
        # A restore under way continues: its file is open, or an earlier job of the I/O thread opens it.
        files = [entry.file for entry in self._index.drop_all(names)]
        self._dropped += len(files)
        if not files:
            return 0
        path, entries = self._directory.path, counted(len(files), "entry", "entries")
        logger.info("store %s: dropped %s", path, entries)
        try:
            async with asyncio.timeout(self._config.load_deadline_s):
                await self._store_thread.call(partial(self._directory.remove_all, files))
        except OSError as error:
            why = str(error) or f"not done within {self._config.load_deadline_s:g} s (load_deadline_s)"
            left = f"{entries} dropped, but their files may be found again at the next start"
            raise StorageFailed(f"store {path!r}: {left}: {why}", request_id="") from error
        return len(files)

    async def save(self, request: SaveRequest) -> SaveReport:
        """Save blocks to a file. Implementation of `Storage.save`."""
        checked = checks.instance(request, SaveRequest, "save")
        return await self._carry_out(self._accept(checked, Direction.SAVE), self._save)

    async def restore(self, request: RestoreRequest) -> RestoreReport:
        """Fill local blocks from a file. Implementation of `Storage.restore`."""
        checked = checks.instance(request, RestoreRequest, "restore")
        return await self._carry_out(self._accept(checked, Direction.RESTORE), self._restore)

    def close(self, error: type[RuntimeUnavailable]) -> None:
        """Make all saves and restores, also later ones, fail soon with `error`: RuntimeClosed or CacheUnregistered.

        In a second call `error` is ignored.
        """
        self._close_error = self._close_error or error
        for transfer in self._transfers:
            transfer.expire()

    async def drained(self) -> None:
        """Wait until no save or restore is under way and no block is quarantined."""
        await self._idle.wait()

    async def aclose(self, timeout_s: float) -> str:
        """End the I/O thread once it copies no bytes.

        Return "", or a message if the thread has died, or hangs for `timeout_s`.
        """
        problem = ""
        try:
            async with asyncio.timeout(timeout_s):
                await self._store_thread.aclose(self._close_all)
        except TimeoutError:
            moves = counted(self._store_thread.moves_under_way, "move")
            problem = f"not stopped within {timeout_s} s: {moves} of the store"
        if self._store_thread.cause is not None:
            self._directory.close()
            problem = f"the store's thread has died: {self._store_thread.cause}"
        self._store_thread.end_all_moves(problem)
        for transfer in [] if problem else list(self._transfers):
            self._end_transfer(transfer)
        return problem

    def abandon(self, wait_s: float) -> None:
        """End the I/O thread, and wait for that at most `wait_s`. Call this after the event loop has ended."""
        self._store_thread.abandon(self._close_all, wait_s)

    # --- one save or restore

    def _accept(self, request: StoreRequest, direction: Direction) -> StoreTransfer:
        """Check a request, then claim the blocks to restore or lease the blocks to save. Return a StoreTransfer.

        Facts that only the file has are not checked yet. Raise RequestError (also BlocksBusy), Overloaded, or
        DeadlineExceeded if no time is left.
        """
        checked = checks.normalize_request(request, type(request), "request", self._config.limits.block_ids_max)
        what = f"request {checked.request_id!r}"
        tables, entries = self._resources.ledger.find_entries(checked.block_ids, f"{what}: block_ids")
        for group, ids in zip(self._stored_cache.groups, tables, strict=True):
            needed = -(-checked.num_tokens // group.block_size)
            if len(ids) > needed or (group.whole and len(ids) < needed):
                blocks = f"{counted(len(ids), 'block')} of {counted(group.block_size, 'token')}"
                takes = f"num_tokens {checked.num_tokens} needs {needed}"
                raise RequestError(f"{what}: group {group.name!r}: {blocks}, {takes}")
        if not len(entries):
            raise RequestError(f"{what}: no blocks to {direction}")
        if len(self._transfers) >= self._config.loads_waiting_max:
            full = f"{what}: saves and restores under way: {len(self._transfers)} (loads_waiting_max)"
            raise Overloaded(full, request_id=checked.request_id, peer=self._directory.path)
        deadline_s = self._config.load_deadline_s if checked.deadline_s is None else checked.deadline_s
        if deadline_s <= 0:
            late = f"{what}: {direction}: its deadline_s was {deadline_s:g} when it was requested"
            raise DeadlineExceeded(late, request_id=checked.request_id, peer=self._directory.path, phase="queued")
        transfer = StoreTransfer(checked, direction, tables, entries, self._resources, self._store_thread, deadline_s)
        transfer.flight.on_safe = lambda _: self._close_when_safe(transfer)
        self._transfers[transfer] = None
        self._idle.clear()
        return transfer

    async def _carry_out(self, transfer: StoreTransfer, work: Callable[[StoreTransfer], Awaitable[ReportT]]) -> ReportT:
        """Run `work` (`_save` or `_restore`) for a transfer within its deadline. Return the report of `work`.

        Raise a KVFlowError on failure. Before returning or raising, wait until no byte can land in the blocks and the
        file is closed, but at most `cancel_grace_s`.
        """
        try:
            try:
                async with transfer.timeout:
                    if self._close_error:
                        raise self._early_end_error(transfer)
                    report = await work(transfer)
                transfer.flight.land()
                transfer.outcome = "saved" if transfer.direction is Direction.SAVE else "restored"
            except (OSError, TransportError, CopyFailed, ConfigError) as error:  # TimeoutError is an OSError
                cause = transfer.error or error  # a copy that failed but may still run has ended the transfer early
                if cause is error and transfer.timeout.expired():
                    raise self._early_end_error(transfer) from None
                self._mark_if_unreadable(transfer, cause)
                text = f"{self._description(transfer)}: {cause}"
                raise StorageFailed(text, request_id=transfer.request_id) from cause
            finally:
                self._outcomes[transfer.outcome] += 1
                await transfer.stop(self._config.cancel_grace_s)
        except KVFlowError as error:
            logger.info("%s %s failed in phase %s: %s", transfer.direction, transfer.request_id, transfer.phase, error)
            error.quarantine = transfer if transfer.quarantined else None
            raise
        return report

    def _description(self, transfer: StoreTransfer) -> str:
        return f"request {transfer.request_id!r}: {transfer.direction} in {self._directory.path!r}"

    def _early_end_error(self, transfer: StoreTransfer) -> KVFlowError:
        """Return the error of a transfer that was ended because the store was closed or the deadline has passed."""
        what, phase = f"request {transfer.request_id!r}", transfer.phase
        if self._close_error is CacheUnregistered:
            return CacheUnregistered(f"{what}: the cache was unregistered in phase {phase!r}")
        if self._close_error:
            return RuntimeClosed(f"{what}: the runtime was closed, or had drained, in phase {phase!r}")
        late = f"{self._description(transfer)}: deadline exceeded in phase {phase!r}"
        return DeadlineExceeded(late, request_id=transfer.request_id, peer=self._directory.path, phase=phase)

    async def _save(self, transfer: StoreTransfer) -> SaveReport:
        request, stored, counts = transfer.request, self._stored_cache, tuple(map(len, transfer.tables))
        key, fingerprint = cast(bytes, request.key), stored.fingerprint
        header = EntryHeader(
            fingerprint=fingerprint,
            key=key,
            num_tokens=request.num_tokens,
            block_counts=counts,
            data_bytes=data_bytes(stored.layer_sets, counts),
            digests=b"",
        )
        if header.file_bytes > self._index.bytes_max:
            takes = f"its file would have {counted(header.file_bytes, 'byte')}, bytes_max is {self._index.bytes_max}"
            raise RequestError(f"request {request.request_id!r}: {takes}")
        header = msgspec.structs.replace(header, digests=await stored.digests(transfer.tables))
        victims = self._index.reserve(header.file_bytes, request.request_id)
        name = entry_name(fingerprint, key)
        entry = Entry(name, f"{name}-{self._token_hex(_RANDOM_BYTES)}", header.file_bytes)
        file = transfer.file = EntryFile(self._directory, entry, self._store_thread.mover, victims)
        evicted = await self._create_file(file)
        await self._move_blocks(transfer, file.fd, header.data_start)
        transfer.begin_phase("sync")
        await self._store_thread.call(partial(file.commit, header))
        self._commit_entry(entry)
        transfer.begin_phase("sync")
        return SaveReport(
            request_id=request.request_id,
            bytes=header.file_bytes,
            blocks=sum(counts),
            tokens=request.num_tokens,
            evicted=evicted,
            seconds=transfer.seconds,
        )

    async def _create_file(self, file: EntryFile) -> int:
        """Create the file of a save. If the disk is full, evict other entries, for a few times.

        Return how many entries were evicted, including the `EntryFile.victims` given. Raise OSError if all was in vain.
        """
        path, evicted = self._directory.path, len(file.victims)
        self._evicted += evicted
        for tries_left in reversed(range(_TRIES_IF_FULL)):
            try:
                if await self._store_thread.call(file.create):
                    lost = counted(len(self._index.drop_all(None)), "entry", "entries")
                    logger.warning("store %s: its folder was removed, with %s: it is created again", path, lost)
                return evicted
            except OSError as error:
                victims = self._index.evict(file.entry.size_bytes) if error.errno in DISK_FULL and tries_left else ()
                if not victims:
                    raise
                file.victims += victims
                evicted += len(victims)
                self._evicted += len(victims)
                left = f"{counted(self._index.used_bytes, 'byte')} of bytes_max {self._index.bytes_max}"
                what = counted(len(victims), "entry", "entries")
                logger.warning("store %s: %s at %s: evicting %s", path, error.strerror, left, what)
        raise AssertionError("the last try returns or raises")

    async def _restore(self, transfer: StoreTransfer) -> RestoreReport:
        request_id, key = transfer.request_id, cast(bytes, transfer.request.key)
        fingerprint = self._stored_cache.fingerprint
        entry = self._index.find(entry_name(fingerprint, key))
        if entry is None:
            transfer.outcome = "missed"
            raise NotStored(f"request {request_id!r}: nothing is stored under its key", request_id=request_id)
        entry.readers += 1
        file = transfer.file = EntryFile(self._directory, entry, self._store_thread.mover)
        try:
            header = await self._store_thread.call(file.open)
        except FileNotFoundError:
            self._index.drop(entry)
            transfer.outcome = "missed"
            raise NotStored(f"request {request_id!r}: its file was removed", request_id=request_id) from None
        except NotAnEntry as error:
            raise self._drop_damaged(transfer, file, str(error)) from error
        expected = fingerprint, key, data_bytes(self._stored_cache.layer_sets, header.block_counts)
        if (header.fingerprint, header.key, header.data_bytes) != expected:
            raise self._drop_damaged(transfer, file, "it was saved from another cache or under another key")
        tokens, counts = transfer.request.num_tokens, tuple(map(len, transfer.tables))
        if (tokens, counts) != (header.num_tokens, header.block_counts):
            what = f"request {request_id!r}: num_tokens and blocks of each group"
            saved = f"saved {header.num_tokens} and {list(header.block_counts)}"
            raise RequestError(f"{what}: asked for {tokens} and {list(counts)}, {saved}")
        await self._move_blocks(transfer, file.fd, header.data_start)
        transfer.begin_phase("check")
        if await self._stored_cache.digests(transfer.tables) != header.digests:
            raise self._drop_damaged(transfer, file, "its blocks are not those that were saved")
        if fingerprint != self._stored_cache.fingerprint:
            transfer.outcome = "missed"
            replaced = "this engine's weights were replaced during the restore"
            raise NotStored(f"request {request_id!r}: {replaced}", request_id=request_id)
        transfer.begin_phase("sync")
        file.restored = True
        self._index.touch(entry)
        return RestoreReport(
            request_id=request_id,
            bytes=transfer.flight.size_bytes,
            blocks=sum(counts),
            tokens=tokens,
            seconds=transfer.seconds,
        )

    def _drop_damaged(self, transfer: StoreTransfer, file: EntryFile, why: str) -> EntryDamaged:
        """Remove the damaged `file` from the index, and have `close` remove it. Return an EntryDamaged to raise."""
        transfer.outcome = "damaged"
        self._index.drop(file.entry)
        file.remove_when_closed = True
        path, request_id = f"{self._directory.path}/{file.entry.file}", transfer.request_id
        logger.warning("request %s: removing the damaged file %s: %s", request_id, path, why)
        return EntryDamaged(f"request {request_id!r}: the file {path!r} is damaged: {why}", request_id=request_id)

    async def _move_blocks(self, transfer: StoreTransfer, fd: int, start: int) -> None:
        transfer.begin_phase("move")
        await transfer.flight.read_groups(self._stored_cache.moves(transfer, fd, start))
        queued_s = transfer.flight.queued_s
        transfer.seconds["queued"] += queued_s
        transfer.seconds["move"] -= queued_s

    # --- the end of a transfer

    def _mark_if_unreadable(self, transfer: StoreTransfer, error: BaseException | None) -> None:
        """If `error` (MoveFailed) shows that a restore could not read its file, mark the file's entry as unreadable."""
        file = transfer.file
        if file is None or transfer.direction is Direction.SAVE or not isinstance(error, MoveFailed):
            return
        if self._index.mark_unreadable(file.entry):
            path = f"{self._directory.path}/{file.entry.file}"
            logger.warning("request %r: %s is unreadable, restores ignore it now: %s", transfer.request_id, path, error)

    def _close_when_safe(self, transfer: StoreTransfer) -> None:
        """Callback when no byte of a transfer is being copied: release a save's blocks, and close the file.

        The I/O thread closes the file after all earlier jobs that use the file.
        """
        self._resources.ledger.release(transfer.leased_entries)
        if transfer.file is None:
            self._end_transfer(transfer)
            return
        try:
            self._store_thread.submit(transfer.file.close, partial(self._end_transfer, transfer))
        except KVFlowError:  # the thread has ended, so it has no file to close
            self._end_transfer(transfer)

    def _close_all(self) -> None:
        """Last job of the I/O thread: close all files, and unlock the directory."""
        for transfer in list(self._transfers):
            if transfer.file is not None:
                transfer.file.close()
        self._directory.close()

    def _end_transfer(self, transfer: StoreTransfer) -> None:
        """Update the index after a transfer's file was closed, and wake the tasks that wait for the transfer's end."""
        if transfer not in self._transfers:
            return
        del self._transfers[transfer]
        self._mark_if_unreadable(transfer, transfer.error)  # the transfer may have ended before the error was known
        if (file := transfer.file) is not None:
            for victim in self._index.put_back(file.victims):
                self._remove_file(victim)
            if transfer.direction is Direction.RESTORE:
                self._index.end_read(file.entry)
            elif file.complete:
                self._commit_entry(file.entry)
            else:
                self._index.release(file.entry.size_bytes)
        transfer.ended.set_result(None)
        if not self._transfers:
            self._idle.set()

    def _commit_entry(self, entry: Entry) -> None:
        """Add the entry of a complete file to the index. If the entry replaces another, remove that entry's file."""
        replaced = self._index.commit(entry)
        if replaced is not None:
            self._remove_file(replaced)

    def _remove_file(self, entry: Entry) -> None:
        """Have the I/O thread remove the file of `entry`. A failure is only logged."""

        def remove() -> None:
            try:
                self._directory.remove(entry.file)
            except OSError as error:
                logger.warning("store %s: cannot remove %s: %s", self._directory.path, entry.file, error)

        try:
            self._store_thread.submit(remove, lambda: None)
        except KVFlowError:
            logger.info("store %s: %s is removed when the store is opened again", self._directory.path, entry.file)


async def open_store(host: PartHost, store_thread: StoreThread, folder: str, bytes_max: int) -> BlockStore:
    """Open and return the store of a KV cache that is being registered. If cancelled, nothing stays open.

    Raise ConfigError if blocks of this KV cache cannot be saved, or if the memory or the folder cannot be used.

    `store_thread`: the store's I/O thread, not started. `folder`: folder for the files of all ranks; this rank's
    subfolder is named by its DP, PP and TP rank. `bytes_max`: maximum number of bytes of this rank's files. Existing
    files beyond that are removed.
    """
    stored, rank = StoredCache(host), host.context.rank
    directory = StoreDirectory(os.path.join(folder, f"dp{rank.dp}-pp{rank.pp}-tp{rank.tp}"))
    path = directory.path
    try:
        await store_thread.open(map_spans(stored.tensors), stored.tensors)
        index = StoreIndex(bytes_max, await store_thread.call(directory.open))
        victims = [entry.file for entry in index.reserve(0, "")]  # an earlier run may have had a larger bound
        await store_thread.call(lambda: directory.remove_all(victims))
    except BaseException as error:
        store_thread.abandon(directory.close, 0.0)
        if isinstance(error, BlockingIOError):
            raise ConfigError(f"storage: {path!r} is in use by another runtime, here or in another process") from None
        if isinstance(error, OSError):
            raise ConfigError(f"storage: {path!r} cannot be used: {error}") from error
        raise
    entries, used = counted(len(index), "entry", "entries"), counted(index.used_bytes, "byte")
    logger.info("store %s: %s, %s of %s", path, entries, used, bytes_max)
    return BlockStore(host, stored, directory, index, store_thread)
