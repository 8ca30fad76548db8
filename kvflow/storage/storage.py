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
from kvflow.storage.files import Files, PlainMover
from kvflow.storage.storage_requests import RestoreReport, RestoreRequest, SaveReport, SaveRequest, StoreStatistics
from kvflow.storage.store import BlockStore, open_store
from kvflow.storage.store_transfer import StoreTransfer
from kvflow.transport.base import TransportError


def make_files(config: Config, name: str) -> Files:
    """Make the mover of blocks between memory and files beside the transport that `config` names, not opened yet.

    Thread `kvflow-store <name>`: begun when a cache is registered with `Storage`. Ends when no file is moved;
    then its folder is free. If it dies waiters are told, and their blocks stay quarantined.
    """
    if config.transport != "nixl":
        return Files(f"kvflow-store {name}", lambda _: PlainMover())
    from kvflow.storage.posix import PosixMover

    params = params_of(config, STORE_BACKEND)
    return Files(f"kvflow-store {name}", partial(PosixMover, f"{name}/store", params))


class Storage(Part):
    """Saves blocks to files in a folder, and restores them: `Runtime(config, parts=[Storage("blocks")])`.

    Each rank has a folder of its own in it, for one runtime at a time.

    Args:
        folder: for the files; it is made if there is none.
        bytes_max: bytes of a rank's files. The least recently used entries make room for new ones.
        files: maker of the mover of blocks to files, from config and agent's name, for tests.

    Raises:
        ConfigError: what was given is no path, or no number of bytes.
    """

    name = "storage"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        bytes_max: int = 16 << 30,
        files: Callable[[Config, str], Files] = make_files,
    ) -> None:
        path = checks.answer(lambda: os.fspath(folder))
        self.folder = checks.text(path, "folder", error=ConfigError) if isinstance(path, str) else "\0"
        if "\0" in self.folder:
            raise ConfigError(f"folder: expected a path, got {checks.shown(folder)}")
        self.bytes_max = checks.whole(bytes_max, "bytes_max", least=1, error=ConfigError)
        self._files = files
        self._owner = PartOwner(self)
        self._store: BlockStore | None = None

    def __repr__(self) -> str:
        return f"<kvflow.storage.Storage {self.folder!r}>"

    async def save(self, request: SaveRequest) -> SaveReport:
        """Save blocks to a file, to be restored by their key.

        The blocks are leased meanwhile: they may be read, not written. When this returns the entry is complete and on
        disk; entries that were not used for longest have made room for it. Cancelling returns within
        Config.cancel_grace_s and leaves no entry, or a complete one; bytes of the blocks may be read for longer if the
        disk hangs, and they stay leased until then.

        Args:
            request: the blocks, and the key to find them by.

        Returns:
            How much was saved, and how long it took.

        Raises:
            RequestError: it cannot be right, or takes more than `bytes_max`. BlocksBusy if a block is being loaded or
                restored.
            StoreFull: what would have to make room is being read or written.
            StorageFailed: the disk has failed, or is full.
            DeadlineExceeded, Overloaded, RuntimeUnavailable, RuntimeBroken: as for loads.
            UsageError: no runtime with a registered cache has this storage, or this is not its loop.
        """
        return await self._require("save").save(request)

    async def restore(self, request: RestoreRequest) -> RestoreReport:
        """Fill local blocks with what was saved under a key, by this runtime or one before it with an equal cache.

        Returns only if every byte is the one that was saved. The blocks are claimed meanwhile, as by a load. Cancelling
        returns within Config.cancel_grace_s; if bytes may still land then the restore is in `quarantines`, and the
        `quarantine` of an error that it ends with.

        Args:
            request: the key, and the local blocks to fill.

        Returns:
            How much was restored, and how long it took.

        Raises:
            NotStored: there is nothing under the key, or no more.
            EntryDamaged: what was there is torn, or not what was saved; it is removed. The blocks may hold anything.
            StorageFailed: the disk has failed.
            RequestError: it cannot be right, or asks for other numbers of tokens or blocks than were saved. BlocksBusy
                if a block is leased or being written.
            DeadlineExceeded, Overloaded, RuntimeUnavailable, RuntimeBroken: as for loads.
            UsageError: as for `save`.
        """
        return await self._require("restore").restore(request)

    def has(self, key: bytes | str) -> bool:
        """Return whether there is an entry under a key, as far as is known without looking at its file.

        Args:
            key: as it was given to `save`.

        Returns:
            False also for an entry of a cache with another layout.

        Raises:
            RequestError: it cannot be a key.
            UsageError: as for `save`.
        """
        return self._require("has", new_work=False).has(key)

    async def drop(self, keys: Sequence[bytes | str] | None = None) -> int:
        """Drop entries: nobody finds them from now on, and their files are removed.

        Restores under way go on, and get what they have begun to read. A save under way becomes an entry when it is
        complete: let it end first if it should not. Cancelling stops the waiting; what was dropped stays dropped.

        Args:
            keys: those to drop, as they were given to `save`; others stay. None for all entries of this rank's folder,
                those of caches before it, of other models and layouts, included.

        Returns:
            How many entries were dropped; their files are gone.

        Raises:
            RequestError: `keys` is no list of keys; nothing was dropped.
            StorageFailed: files could not be removed: nobody finds them in this run, the next one may.
            UsageError: as for `save`.
            RuntimeUnavailable, RuntimeBroken: as for loads.
        """
        return await self._require("drop", new_work=False).drop(keys)

    @property
    def quarantines(self) -> tuple[StoreTransfer, ...]:
        """Restores that have ended and in whose blocks bytes may still land: await their `settled()`."""
        return () if self._store is None else self._store.quarantines

    @property
    def statistics(self) -> StoreStatistics | None:
        """Counts since the cache was registered; None without one."""
        return self._store.statistics if self._store is not None and self._owner.registered else None

    async def registered(self, runtime: Supervisor, cache: RegisteredCache) -> None:
        """Only for the runtime: see `Part`."""
        self._owner.begin(runtime)
        files = self._files(cache.config, cache.local.reader)
        try:
            self._store = await open_store(cache, files, self.folder, self.bytes_max)
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

    async def closed(self, timeout_s: float) -> str:
        """Only for the runtime: see `Part`."""
        return "" if self._store is None else await self._store.aclose(timeout_s)

    def _require(self, what: str, *, new_work: bool = True) -> BlockStore:
        self._owner.require(what, new_work=new_work)
        assert self._store is not None, "it is registered with the cache"
        return self._store
