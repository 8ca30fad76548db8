"""The store's files, by the system's calls: everything here runs on the store's thread, and may raise OSError.

A file is written under a name that ends in `.part`: first blocks, then the header. Both are synced before the file gets
its name, and then the name is synced. So a crash leaves a whole entry, or a `.part`, which is removed when the
directory is opened again. A directory has one owner, which holds a lock on it for as long as it lives.
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
from kvflow.storage.entry import PREFIX_BYTES, EntryHeader, NotAnEntry, decode, encode, header_bytes
from kvflow.storage.files import MoveFailed, Mover
from kvflow.storage.index import Entry

_LOCK = "lock"
_PART = ".part"
_NAME = re.compile(r"[0-9a-f]{40}-[0-9a-f]{16}(\.part)?\Z")
_NO_FILE = frozenset((errno.ELOOP, errno.ENXIO, errno.ENODEV))  # a symbolic link; a socket; a device that is not there
_OURS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # who opens a FIFO, or a device, does not wait


class Directory:
    """The directory of a store's files."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = -1

    def open(self) -> list[Entry]:
        """Lock it, remove what a crash has left, and return the entries, the first to go first.

        Raises BlockingIOError if another owner has locked it. `close` has to follow.
        """
        os.makedirs(self.path, exist_ok=True)
        self._lock = os.open(self.at(_LOCK), os.O_RDWR | os.O_CREAT | _OURS, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = [
            item for item in os.scandir(self.path) if _NAME.match(item.name) and item.is_file(follow_symlinks=False)
        ]
        found: dict[str, Entry] = {}
        for item in sorted(ours, key=lambda item: (item.stat(follow_symlinks=False).st_mtime_ns, item.name)):
            name = item.name.partition("-")[0]
            if item.name.endswith(_PART):
                self.remove(item.name)
                continue
            if name in found:  # replaced, and a crash came before it was removed
                self.remove(found.pop(name).file)
            found[name] = Entry(name, item.name, item.stat(follow_symlinks=False).st_size)
        return list(found.values())

    def close(self) -> None:
        """Give the lock back."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self, file: str) -> None:
        """Remove a file, which may be gone already."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.at(file))

    def remove_all(self, files: Sequence[str]) -> None:
        """Remove files for good. Raises the first OSError, once it has tried all."""
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
        """Bring the names of its files to the disk, and what was removed off it."""
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def at(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.path, name)


class EntryFile:
    """One file that is written or read, and its end."""

    def __init__(self, directory: Directory, entry: Entry, mover: Mover, victims: Iterable[Entry] = ()) -> None:
        self.entry = entry
        self.fd = -1
        self.complete = False
        """True once the file has its name."""
        self.remove = False
        """True if the file is to be removed."""
        self.restored = False
        """True once the file was read: then it is the last to make room."""
        self.victims = list(victims)
        """Entries that have to make room for it, and have not yet."""
        self._directory = directory
        self._mover = mover
        self._part = entry.file + _PART
        self._written = False

    def create(self) -> None:
        """Remove its victims, which makes room, then create it with all the room that it takes."""
        while self.victims:
            self._directory.remove(self.victims[0].file)
            del self.victims[0]
        self.fd = os.open(self._directory.at(self._part), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._written = True
        os.posix_fallocate(self.fd, 0, self.entry.size_bytes)
        self._mover.opened(self.fd, self.entry.size_bytes)

    def commit(self, header: EntryHeader) -> None:
        """Give it its name, for good, since all its blocks are there."""
        start = encode(header)
        if os.pwrite(self.fd, start, 0) != len(start):
            raise OSError("the header was not written whole")
        os.fsync(self.fd)
        os.rename(self._directory.at(self._part), self._directory.at(self.entry.file))
        self.complete = True
        self._directory.sync()

    def open(self) -> EntryHeader:
        """Open it to read, and return its header; never waits. Raises NotAnEntry, FileNotFoundError, MoveFailed."""
        try:
            self.fd = os.open(self._directory.at(self.entry.file), os.O_RDONLY | _OURS)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise NotAnEntry(f"it is no regular file: {error.strerror}") from error
            raise
        facts = os.fstat(self.fd)
        if not stat.S_ISREG(facts.st_mode):
            raise NotAnEntry(f"it is no regular file: {stat.filemode(facts.st_mode)}")
        os.set_blocking(self.fd, True)  # io_uring fails reads that would wait, else
        try:
            size_bytes = header_bytes(os.pread(self.fd, PREFIX_BYTES, 0))
            header = decode(os.pread(self.fd, size_bytes, 0), facts.st_size)
        except OSError as error:
            raise MoveFailed(f"reading its header: {error}") from error
        if facts.st_size != self.entry.size_bytes:
            raise NotAnEntry(f"it has {counted(facts.st_size, 'byte')}, it had {self.entry.size_bytes}")
        self._mover.opened(self.fd, facts.st_size)
        return header

    def put_away(self) -> None:
        """Close it; remove it, or what there is of it, if it is to be removed or was not completed. Never raises."""
        if self.fd >= 0:
            self._mover.closing(self.fd)
            with contextlib.suppress(OSError):
                if self.restored:
                    os.utime(self.fd)
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(OSError):
            if self._written and not self.complete:
                self._directory.remove(self._part)
            elif self.remove:
                self._directory.remove(self.entry.file)
