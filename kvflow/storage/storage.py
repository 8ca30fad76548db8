"""Storage: the part of a runtime that saves blocks to files and restores them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

from kvflow import checks
from kvflow.config import STORE_BACKEND, Config, params_of
from kvflow.errors import CacheUnregistered, ConfigError, RuntimeClosed
from kvflow.runtime.assembly import RegisteredCache
from kvflow.runtime.part import Ending, Part, PartOwner
from kvflow.runtime.supervisor import Supervisor
from kvflow.storage.storage_requests import RestoreReport, RestoreRequest, SaveReport, SaveRequest, StoreStatistics
from kvflow.storage.store import BlockStore, open_store
from kvflow.storage.store_thread import PlainMover, StoreThread
from kvflow.storage.store_transfer import StoreTransfer
from kvflow.transport.base import TransportError


def make_store_thread(config: Config, name: str) -> StoreThread:
    """Return the store's I/O thread, not opened yet, with the mover for the transport that `config` names.

    Thread `kvflow-store <name>`: begun when a cache is registered with `Storage`. Ends when no file is moved; then its
    folder is free. If it dies, saves and restores under way fail, and their blocks stay leased or quarantined.
    """
    if config.transport != "nixl":
        return StoreThread(f"kvflow-store {name}", lambda _: PlainMover())
    from kvflow.storage.posix import PosixMover

    params = params_of(config, STORE_BACKEND)
    return StoreThread(f"kvflow-store {name}", partial(PosixMover, f"{name}/store", params))


class Storage(Part):
    """Part of a runtime that saves blocks to files and restores them: `Runtime(config, parts=[Storage("blocks")])`.

    Each rank has a subfolder of its own, which one runtime at a time may use.

    Args:
        folder: path of the folder for the files; it is created if it does not exist.
        bytes_max: most bytes that the files of this rank may take. The least recently used entries are evicted to make
            room for new ones.
        files: for tests: function of the config and the agent's name that makes the store's thread.

    Raises:
        ConfigError: `folder` is not a path, or `bytes_max` is not a number of bytes.
    """

    name = "storage"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        bytes_max: int = 16 << 30,
        files: Callable[[Config, str], StoreThread] = make_store_thread,
    ) -> None:
        path = checks.try_call(lambda: os.fspath(folder))
        self.folder = checks.text(path, "folder", error=ConfigError) if isinstance(path, str) else "\0"
        if "\0" in self.folder:
            raise ConfigError(f"folder: expected a path, got {checks.short_repr(folder)}")
        self.bytes_max = checks.whole(bytes_max, "bytes_max", least=1, error=ConfigError)
        self._make_thread = files
        self._owner = PartOwner(self)
        self._store: BlockStore | None = None

    def __repr__(self) -> str:
        return f"<kvflow.storage.Storage {self.folder!r}>"

    async def save(self, request: SaveRequest) -> SaveReport:
        """Save blocks to a file under a key, to be restored later by that key.

        Meanwhile the blocks are leased: they may be read, not written. When this returns, the entry is complete and on
        disk, and the least recently used entries may have been evicted to make room for it. If cancelled, this returns
        within Config.cancel_grace_s, and the entry is either complete or not there. If the disk hangs, the blocks may
        be read for longer; they stay leased until then.

        Args:
            request: the blocks to save, and their key.

        Returns:
            Bytes, blocks and tokens saved, and the time taken.

        Raises:
            RequestError: the request is invalid, or its file would be larger than `bytes_max`. BlocksBusy if a block is
                being loaded or restored.
            StoreFull: the entries that could be evicted are being read or written.
            StorageFailed: the disk has failed, or is full.
            DeadlineExceeded, Overloaded, RuntimeUnavailable, RuntimeBroken: as for loads.
            UsageError: no runtime with a registered cache has this storage, or this is not the runtime's event loop.
        """
        return await self._require("save").save(request)

    async def restore(self, request: RestoreRequest) -> RestoreReport:
        """Fill local blocks with the blocks saved under a key, by this runtime or an earlier one with an equal cache.

        This returns only if every byte equals the saved one. Meanwhile the blocks are claimed, as by a load. If
        cancelled, this returns within Config.cancel_grace_s. If bytes may still land after the restore has ended, it is
        listed in `quarantines`, and it is the `quarantine` of the error that it raised.

        Args:
            request: the key, and the local blocks to fill.

        Returns:
            Bytes, blocks and tokens restored, and the time taken.

        Raises:
            NotStored: nothing is stored under the key, or its file is gone.
            EntryDamaged: the file is torn, or its blocks are not those that were saved; it is removed. The local blocks
                may hold anything.
            StorageFailed: the disk has failed.
            RequestError: the request is invalid, or its numbers of tokens or blocks differ from those saved. BlocksBusy
                if a block is leased or being written.
            DeadlineExceeded, Overloaded, RuntimeUnavailable, RuntimeBroken: as for loads.
            UsageError: as for `save`.
        """
        return await self._require("restore").restore(request)

    def has(self, key: bytes | str) -> bool:
        """Return whether an entry is stored under a key. Looks in memory, not at the file.

        Args:
            key: as it was given to `save`.

        Returns:
            True if there is such an entry. An entry saved from a cache with another layout does not count.

        Raises:
            RequestError: `key` cannot be a key.
            UsageError: as for `save`.
        """
        return self._require("has", new_work=False).has(key)

    async def drop(self, keys: Sequence[bytes | str] | None = None) -> int:
        """Drop entries: they are not found afterwards, and their files are removed.

        Restores under way continue, and get the entry that they have begun to read. A save under way becomes an entry
        when it is complete: if it should not, let it end before you drop. Cancelling stops the waiting; dropped entries
        stay dropped.

        Args:
            keys: keys of the entries to drop, as they were given to `save`. None for all entries in this rank's folder,
                including those of earlier caches and of other models and layouts.

        Returns:
            Number of entries dropped; their files are removed.

        Raises:
            RequestError: `keys` is no list of keys; nothing was dropped.
            StorageFailed: files could not be removed. Their entries are not found by this runtime, but may be by the
                next one.
            UsageError: as for `save`.
            RuntimeUnavailable, RuntimeBroken: as for loads.
        """
        return await self._require("drop", new_work=False).drop(keys)

    @property
    def quarantines(self) -> tuple[StoreTransfer, ...]:
        """Restores that have ended while bytes may still land in their blocks: await their `settled()`."""
        return () if self._store is None else self._store.quarantines

    @property
    def statistics(self) -> StoreStatistics | None:
        """Counts since the cache was registered; None if no cache is registered."""
        return self._store.statistics if self._store is not None and self._owner.registered else None

    async def registered(self, runtime: Supervisor, cache: RegisteredCache) -> None:
        """Only for the runtime: see `Part`."""
        self._owner.begin(runtime)
        store_thread = self._make_thread(cache.config, cache.local.reader)
        try:
            self._store = await open_store(cache, store_thread, self.folder, self.bytes_max)
        except (TransportError, RuntimeError) as error:
            raise ConfigError(f"{self!r}: the cache cannot be registered with it: {error}") from error

    def end(self, why: Ending, wait_s: float = 0.0) -> None:
        """Only for the runtime: see `Part`."""
        if self._store is None:
            return
        if why is Ending.ABANDONED:
            self._store.abandon(wait_s)
            self._store = None
        else:
            self._store.close(CacheUnregistered if why is Ending.UNREGISTERED else RuntimeClosed)

    async def drained(self) -> None:
        """Only for the runtime: see `Part`."""
        if self._store is not None:
            await self._store.drained()

    async def release(self, timeout_s: float) -> str:
        """Only for the runtime: see `Part`."""
        return "" if self._store is None else await self._store.aclose(timeout_s)

    def _require(self, what: str, *, new_work: bool = True) -> BlockStore:
        self._owner.require(what, new_work=new_work)
        assert self._store is not None, "it is registered with the cache"
        return self._store
