"""A store's directory and files, by system calls. All functions run on the store's I/O thread, and may raise OSError.

A file is written under a name that ends in `.part`: first the blocks, then the header. The file is synced and renamed,
and then the directory is synced. So a crash leaves either a complete file or a `.part` file, which is removed when the
directory is opened again. The process that uses a directory holds a lock on it. Whatever cleaners remove is missed by
nobody but restores: a directory that is gone is created again by the next save.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterable, Sequence

from kvflow.checks import counted
from kvflow.storage.entry import (
    HEADER_PREFIX_BYTES,
    EntryHeader,
    NotAnEntry,
    decode_header,
    encode_header,
    header_size_bytes,
)
from kvflow.storage.index import Entry
from kvflow.storage.store_thread import MoveFailed, Mover

_LOCK_FILE = "lock"
_PARTIAL_SUFFIX = ".part"
_FILE_NAME = re.compile(r"[0-9a-f]{40}-[0-9a-f]{16}(\.part)?\Z")
_NOT_REGULAR_ERRORS = frozenset((errno.ELOOP, errno.ENXIO, errno.ENODEV))  # a symbolic link; a socket; a missing device
DISK_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK: opening a FIFO or a device does not wait


class StoreDirectory:
    """The directory of a store's files, and the lock on this directory."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fds: list[int] = []
        """The locked files: first the directory itself, then its lock file."""

    def open(self) -> list[Entry]:
        """Lock the directory, remove incomplete files, and return an `Entry` for each file, least recently used first.

        If the directory does not exist, create it. Raise BlockingIOError if another owner has locked it. Even after an
        error, call `close`.
        """
        self._lock()
        named = (item for item in os.scandir(self.path) if _FILE_NAME.match(item.name))
        stored = (item for item in named if item.is_file(follow_symlinks=False))
        entries: dict[str, Entry] = {}
        for item in sorted(stored, key=lambda item: (item.stat(follow_symlinks=False).st_mtime_ns, item.name)):
            name = item.name.partition("-")[0]
            if item.name.endswith(_PARTIAL_SUFFIX):
                self.remove(item.name)
                continue
            if name in entries:  # the file was replaced, and a crash prevented its removal
                self.remove(entries.pop(name).file)
            entries[name] = Entry(name, item.name, item.stat(follow_symlinks=False).st_size)
        return list(entries.values())

    def create_again(self) -> bool:
        """If the directory was removed or replaced, create and lock it again, and return True.

        Raise BlockingIOError if another owner has locked the new one.
        """
        with contextlib.suppress(FileNotFoundError):
            if self._fds and os.path.samestat(os.stat(self.path), os.fstat(self._fds[0])):
                return False
        self.close()
        self._lock()
        return True

    def _lock(self) -> None:
        os.makedirs(self.path, exist_ok=True)
        self._fds.append(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self._fds.append(os.open(self.path_of(_LOCK_FILE), os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, 0o600))
        for fd in self._fds:  # both, since a cleaner may remove the file, and NFS cannot lock a directory
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise

    def close(self) -> None:
        """Release the lock on the directory. A second call does nothing."""
        while self._fds:
            os.close(self._fds.pop())

    def remove(self, file: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path_of(file))

    def remove_all(self, files: Sequence[str]) -> None:
        """Remove the named files, and sync the directory so that they stay removed after a crash.

        If a file cannot be removed, still remove the others; then raise the first OSError.
        """
        failed: OSError | None = None
        for file in files:
            try:
                self.remove(file)
            except OSError as error:
                failed = failed or error
        self.sync()
        if failed is not None:
            raise failed

    def sync(self) -> None:
        """Sync the directory, so that new file names and removals survive a crash."""
        os.fsync(self._fds[0])

    def path_of(self, name: str) -> str:
        return os.path.join(self.path, name)


class EntryFile:
    """One stored file, while a save writes it or a restore reads it."""

    def __init__(self, directory: StoreDirectory, entry: Entry, mover: Mover, victims: Iterable[Entry] = ()) -> None:
        self.entry = entry
        self.fd = -1
        self.complete = False
        """True once the file has its final name."""
        self.remove_when_closed = False
        """True if `close` must remove the file, because the file is damaged."""
        self.restored = False
        """True once a restore from the file has succeeded. `close` then updates the file's time, so the file is evicted
        last.
        """
        self.victims = list(victims)
        """Index entries of files that must still be removed to make room for this file."""
        self._directory = directory
        self._mover = mover
        self._partial_name = entry.file + _PARTIAL_SUFFIX
        self._created = False

    def create(self) -> bool:
        """Remove the files of `victims` to make room, then create the `.part` file with its full size.

        Return True if the directory had to be created again, so that its other files are lost. If the disk is full
        (`DISK_FULL`), this may be called again, with more victims.
        """
        lost = self._directory.create_again()
        while self.victims:
            self._directory.remove(self.victims[0].file)
            del self.victims[0]
        if self.fd < 0:
            path = self._directory.path_of(self._partial_name)
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._created = True
        os.posix_fallocate(self.fd, 0, self.entry.size_bytes)
        self._mover.register_file(self.fd, self.entry.size_bytes)
        return lost

    def commit(self, header: EntryHeader) -> None:
        """Write `header`, sync the file and give it its final name. Call this once all blocks are written."""
        start = encode_header(header)
        if os.pwrite(self.fd, start, 0) != len(start):
            raise OSError("the header was written only in part")
        os.fsync(self.fd)
        os.rename(self._directory.path_of(self._partial_name), self._directory.path_of(self.entry.file))
        self.complete = True
        self._directory.sync()

    def open(self) -> EntryHeader:
        """Open the file to read it, and return its header. Do not block, even if the path is a FIFO or a device.

        Raise NotAnEntry if the file is damaged or no regular file, FileNotFoundError if it does not exist, and
        MoveFailed if reading the header failed.
        """
        try:
            self.fd = os.open(self._directory.path_of(self.entry.file), os.O_RDONLY | _OPEN_FLAGS)
        except OSError as error:
            if error.errno in _NOT_REGULAR_ERRORS:
                raise NotAnEntry(f"not a regular file: {error.strerror}") from error
            raise
        facts = os.fstat(self.fd)
        if not stat.S_ISREG(facts.st_mode):
            raise NotAnEntry(f"not a regular file: {stat.filemode(facts.st_mode)}")
        os.set_blocking(self.fd, True)  # with a non-blocking file io_uring fails reads that would wait
        try:
            size_bytes = header_size_bytes(os.pread(self.fd, HEADER_PREFIX_BYTES, 0))
            header = decode_header(os.pread(self.fd, size_bytes, 0), facts.st_size)
        except OSError as error:
            raise MoveFailed(f"reading its header: {error}") from error
        if facts.st_size != self.entry.size_bytes:
            raise NotAnEntry(f"its size is {counted(facts.st_size, 'byte')}, expected {self.entry.size_bytes}")
        self._mover.register_file(self.fd, facts.st_size)
        return header

    def close(self) -> None:
        """Close the file. Remove the file if it was not completed, or if `remove_when_closed` is set. Raise nothing."""
        if self.fd >= 0:
            self._mover.deregister_file(self.fd)
            with contextlib.suppress(OSError):
                if self.restored:
                    os.utime(self.fd)
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(OSError):
            if self._created and not self.complete:
                self._directory.remove(self._partial_name)
            elif self.remove_when_closed:
                self._directory.remove(self.entry.file)
