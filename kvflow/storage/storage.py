"""The class `Storage`, which saves blocks to files and restores them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

from kvflow import checks
from kvflow.config import STORE_BACKEND, Config, params_of
from kvflow.errors import CacheUnregistered, ConfigError, RuntimeClosed
from kvflow.runtime.part import Ending, Part, PartHost, PartOwner, PartRuntime
from kvflow.storage.storage_requests import RestoreReport, RestoreRequest, SaveReport, SaveRequest, StoreStatistics
from kvflow.storage.store import BlockStore, open_store
from kvflow.storage.store_thread import PlainMover, StoreThread
from kvflow.storage.store_transfer import StoreTransfer
from kvflow.transport.base import TransportError


def make_store_thread(config: Config, name: str) -> StoreThread:
    """Return the store's I/O thread, not started. `config.transport` decides how the thread copies bytes.

    Thread `kvflow-store <name>`: begun when a cache is registered with `Storage`; ends when the cache is unregistered
    and no copy is under way. The thread then unlocks the store's folder. If the thread dies, saves and restores under
    way fail, and their blocks stay leased or quarantined.
    """
    if config.transport != "nixl":
        return StoreThread(f"kvflow-store {name}", lambda _: PlainMover())
    from kvflow.storage.posix import PosixMover

    params = params_of(config, STORE_BACKEND)
    return StoreThread(f"kvflow-store {name}", partial(PosixMover, f"{name}/store", params))


class Storage(Part):
    """Optional feature of a runtime that saves blocks to files and restores them.

    To use it, create the runtime by `Runtime(config, parts=[Storage("blocks")])`. Each rank uses its own subfolder;
    only one runtime at a time may use a subfolder.

    Args:
        folder: path of the folder for the files of all ranks; created if it does not exist.
        bytes_max: maximum number of bytes that the files of this rank may take. To make room, the least recently used
            files are removed (evicted).
        files: only for tests: makes the store's I/O thread, from the config and the agent's name.

    Raises:
        ConfigError: `folder` is no path, or `bytes_max` is no number of bytes.
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
        """Save blocks to a file under a key, with which `restore` finds them.

        During the save the blocks are leased: they may be read, but not written. When `save` returns, the file is
        complete and on disk; the least recently used files may have been removed to make room. If `save` is cancelled,
        it returns within Config.cancel_grace_s, and the file is either complete or not found. If the disk hangs, the
        blocks stay leased after `save` has returned, until they are no longer read.

        Args:
            request: the blocks to save, and their key.

        Returns:
            The report of the save.

        Raises:
            RequestError: the request is invalid, its file would be larger than `bytes_max`, or (BlocksBusy) a block is
                being loaded or restored.
            LayoutError: a tensor of the cache has moved since the cache was registered.
            StoreFull: there is not enough room, even if all files that are not being read or written are removed.
            StorageFailed: the disk has failed, or is full.
            DeadlineExceeded: the save took longer than the request's `deadline_s`.
            Overloaded: too many saves and restores are under way (Config.loads_waiting_max).
            RuntimeUnavailable: the runtime drains, is closed, or has no KV cache at the moment.
            RuntimeBroken: a task or thread of the runtime has died.
            UsageError: this object is not in the `parts` of a runtime with a KV cache, or this is not the runtime's
                loop.
        """
        return await self._require("save").save(request)

    async def restore(self, request: RestoreRequest) -> RestoreReport:
        """Fill local blocks from the file that was saved under a key.

        This runtime or an earlier one, with a KV cache of the same layout, has saved the file. A restore succeeds only
        if the digests of the filled blocks equal those of the saved blocks. During the restore the blocks are claimed,
        as by a load. If `restore` is cancelled, it returns within Config.cancel_grace_s. If bytes may still land in the
        blocks when `restore` ends, the raised error's `quarantine` says when the blocks are safe.
        `Storage.quarantines` lists it, too.

        Args:
            request: the key, and the local blocks to fill.

        Returns:
            The report of the restore.

        Raises:
            NotStored: nothing is stored under the key with this engine's weights, or the file was removed.
            EntryDamaged: the file is damaged, and is removed. The local blocks may hold anything.
            StorageFailed: the disk has failed.
            RequestError: the request is invalid, its numbers of tokens or blocks differ from the saved ones, or
                (BlocksBusy) a local block is leased, or is being written.
            LayoutError: a tensor of the cache has moved since the cache was registered.
            DeadlineExceeded: the restore took longer than the request's `deadline_s`.
            Overloaded: too many saves and restores are under way (Config.loads_waiting_max).
            RuntimeUnavailable: the runtime drains, is closed, or has no KV cache at the moment.
            RuntimeBroken: a task or thread of the runtime has died.
            UsageError: this object is not in the `parts` of a runtime with a KV cache, or this is not the runtime's
                loop.
        """
        return await self._require("restore").restore(request)

    def has(self, key: bytes | str) -> bool:
        """Return whether blocks are stored under a key. Only the index in memory is searched; the file is not read.

        Args:
            key: the key that was given to `save`.

        Returns:
            True if blocks of a KV cache with the same layout are stored under `key`.

        Raises:
            RequestError: `key` is not bytes or text of 1 to 256 bytes.
            UsageError: this object is not in the `parts` of a runtime with a KV cache, or this is not the runtime's
                loop.
            RuntimeUnavailable: the runtime is closed, or has no KV cache at the moment.
            RuntimeBroken: a task or thread of the runtime has died.
        """
        return self._require("has", new_work=False).has(key)

    async def drop(self, keys: Sequence[bytes | str] | None = None) -> int:
        """Remove stored files. Their keys are no longer found.

        Restores under way read the removed file to its end. Saves under way are not affected; to remove their files
        too, await these saves first. If `drop` is cancelled, the keys are still no longer found.

        Args:
            keys: keys of the files to remove, as given to `save`. None removes all files in this rank's folder, also
                files of earlier caches, other models and other layouts.

        Returns:
            Number of removed files.

        Raises:
            RequestError: `keys` is no list of keys; nothing was removed.
            StorageFailed: a file could not be removed. This runtime no longer finds the file, but the next one may.
            UsageError: this object is not in the `parts` of a runtime with a KV cache, or this is not the runtime's
                loop.
            RuntimeUnavailable: the runtime is closed, or has no KV cache at the moment.
            RuntimeBroken: a task or thread of the runtime has died.
        """
        return await self._require("drop", new_work=False).drop(keys)

    @property
    def quarantines(self) -> tuple[StoreTransfer, ...]:
        """Restores that have ended while bytes may still land in their blocks. Await `settled()` of each."""
        return () if self._store is None else self._store.quarantines

    @property
    def statistics(self) -> StoreStatistics | None:
        """Contents of the store, and counts since the last KV cache was registered; None before the first one."""
        return None if self._store is None else self._store.statistics

    async def registered(self, runtime: PartRuntime, host: PartHost) -> None:
        """Only for the runtime: open the store for a newly registered KV cache, as `Part.registered` says."""
        self._owner.begin(runtime)
        store_thread = self._make_thread(host.context.config, host.context.local.reader)
        try:
            self._store = await open_store(host, store_thread, self.folder, self.bytes_max)
        except (TransportError, RuntimeError) as error:
            raise ConfigError(f"{self!r}: the cache cannot be registered with it: {error}") from error

    def end(self, why: Ending, wait_s: float = 0.0) -> None:
        """Only for the runtime: make all saves and restores end soon, as `Part.end` says."""
        if self._store is None:
            return
        if why is Ending.ABANDONED:
            self._store.abandon(wait_s)
            self._store = None
        else:
            self._store.close(CacheUnregistered if why is Ending.UNREGISTERED else RuntimeClosed)

    async def drained(self) -> None:
        """Only for the runtime: wait until all saves and restores have ended, as `Part.drained` says."""
        if self._store is not None:
            await self._store.drained()

    async def release(self, timeout_s: float) -> str:
        """Only for the runtime: end the I/O thread. Return "", or a message if that takes longer than `timeout_s`."""
        return "" if self._store is None else await self._store.aclose(timeout_s)

    def _require(self, what: str, *, new_work: bool = True) -> BlockStore:
        self._owner.require(what, new_work=new_work)
        assert self._store is not None, "it is registered with the cache"
        return self._store
