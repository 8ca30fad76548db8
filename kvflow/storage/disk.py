"""The store's directory and files, by system calls. All of this runs on the store's I/O thread and may raise OSError.

A file is written under a name that ends in `.part`: first its blocks, then its header. The file is synced, renamed to
its final name, and then the directory is synced. So a crash leaves either a whole entry or a `.part` file, which is
removed when the directory is opened again. A directory has one owner at a time, which holds a lock on it while it is
open.
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
_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK: opening a FIFO or a device does not wait


class StoreDirectory:
    """The directory that holds a store's files."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock_fd = -1

    def open(self) -> list[Entry]:
        """Lock the directory, remove leftovers of a crash, and return the entries, those first that are evicted first.

        Raises BlockingIOError if another owner has locked the directory. `close` must follow, also after an error.
        """
        os.makedirs(self.path, exist_ok=True)
        self._lock_fd = os.open(self.path_of(_LOCK_FILE), os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = [
            item
            for item in os.scandir(self.path)
            if _FILE_NAME.match(item.name) and item.is_file(follow_symlinks=False)
        ]
        found: dict[str, Entry] = {}
        for item in sorted(ours, key=lambda item: (item.stat(follow_symlinks=False).st_mtime_ns, item.name)):
            name = item.name.partition("-")[0]
            if item.name.endswith(_PARTIAL_SUFFIX):
                self.remove(item.name)
                continue
            if name in found:  # the entry was replaced, and a crash prevented its removal
                self.remove(found.pop(name).file)
            found[name] = Entry(name, item.name, item.stat(follow_symlinks=False).st_size)
        return list(found.values())

    def close(self) -> None:
        """Release the lock. Closing twice is fine."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def remove(self, file: str) -> None:
        """Remove `file`, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path_of(file))

    def remove_all(self, files: Sequence[str]) -> None:
        """Remove `files`, and sync the directory so that they stay removed.

        If some cannot be removed, the others are removed first; then the first OSError is raised.
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
        """Sync the directory, so that new names and removals survive a crash."""
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def path_of(self, name: str) -> str:
        """Return the path of the file called `name`."""
        return os.path.join(self.path, name)


class EntryFile:
    """The file of one entry, while it is written or read."""

    def __init__(self, directory: StoreDirectory, entry: Entry, mover: Mover, victims: Iterable[Entry] = ()) -> None:
        self.entry = entry
        self.fd = -1
        self.complete = False
        """True once the file has its final name."""
        self.remove_when_closed = False
        """True if `close` is to remove the file."""
        self.restored = False
        """True once a restore from the file has succeeded: `close` then updates its time, so it is evicted last."""
        self.victims = list(victims)
        """Entries evicted to make room for this file, and not removed from disk yet."""
        self._directory = directory
        self._mover = mover
        self._partial_name = entry.file + _PARTIAL_SUFFIX
        self._created = False

    def create(self) -> None:
        """Remove the files of `victims`, which makes room, then create the `.part` file at its full size."""
        while self.victims:
            self._directory.remove(self.victims[0].file)
            del self.victims[0]
        self.fd = os.open(
            self._directory.path_of(self._partial_name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        self._created = True
        os.posix_fallocate(self.fd, 0, self.entry.size_bytes)
        self._mover.register_file(self.fd, self.entry.size_bytes)

    def commit(self, header: EntryHeader) -> None:
        """Write `header`, sync the file and give it its final name. All blocks of the entry must be written before."""
        start = encode_header(header)
        if os.pwrite(self.fd, start, 0) != len(start):
            raise OSError("the header was written only in part")
        os.fsync(self.fd)
        os.rename(self._directory.path_of(self._partial_name), self._directory.path_of(self.entry.file))
        self.complete = True
        self._directory.sync()

    def open(self) -> EntryHeader:
        """Open the file to read, and return its header. NotAnEntry if it is damaged or is no regular file.

        Does not wait even if the file is a FIFO or a device. Also raises FileNotFoundError and MoveFailed.
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
        """Close the file. Remove it if it is marked for removal or was not completed. Never raises."""
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
