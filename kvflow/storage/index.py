"""Index of a store: its entries, and which of them make room for others.

Entries have an order. Those that could not be read go first, and are not found any more; then the one that was saved or
restored longest ago. An entry that is being read never goes. An entry that is being written counts with its whole size
from the beginning; one that was replaced counts until its last reader has finished. So the files never exceed the
bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvflow.checks import counted


class NoRoom(Exception):
    """No room: all entries that would have to go are being read or written."""


@dataclass(slots=True, eq=False)
class Entry:
    """A file of the store."""

    name: str
    """Name of its key: see `entry.entry_name`."""
    file: str
    size_bytes: int
    readers: int = 0
    aside: bool = False
    """True once a read of it has failed: it takes room, and is not found."""
    dropped: bool = False
    """True once it has left the index: its bytes count until nobody reads it."""
    unwanted: bool = False
    """True if it is not to be put back."""


class StoreIndex:
    """The entries by name, the first to go first."""

    def __init__(self, bytes_max: int, found: Iterable[Entry] = ()) -> None:
        """`found` are the entries of a folder, the first to go first."""
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self._entries: dict[str, Entry] = {}
        for entry in found:
            self.commit(self.reserved(entry))

    def __len__(self) -> int:
        return len(self._entries)

    def pick(self, names: Iterable[str] | None) -> tuple[Entry, ...]:
        """The entries of these names, those that could not be read included; None for all."""
        if names is None:
            return tuple(self._entries.values())
        return tuple(self._entries[name] for name in dict.fromkeys(names) if name in self._entries)

    def find(self, name: str) -> Entry | None:
        entry = self._entries.get(name)
        return None if entry is None or entry.aside else entry

    def make_room(self, size_bytes: int) -> tuple[Entry, ...]:
        """Reserve bytes. Returns the entries that left the index for that, whose files have to go. Raises NoRoom."""
        excess, victims = self.used_bytes + size_bytes - self.bytes_max, []
        for entry in self._entries.values():
            if excess <= 0:
                break
            if not entry.readers:
                victims.append(entry)
                excess -= entry.size_bytes
        if excess > 0:
            raise NoRoom(f"{counted(size_bytes, 'byte')} more, {self.used_bytes} of {self.bytes_max} are used")
        for entry in victims:
            self.drop(entry)
        self.used_bytes += size_bytes
        return tuple(victims)

    def reserved(self, entry: Entry) -> Entry:
        """Count a file for which no room was reserved."""
        self.used_bytes += entry.size_bytes
        return entry

    def put_back(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Take entries back whose files could not be removed: they are the first to go again.

        Those that were replaced meanwhile, or are unwanted, are not, and are returned: their files are left.
        """
        kept = {entry.name: entry for entry in entries if entry.name not in self._entries and not entry.unwanted}
        for entry in kept.values():
            entry.dropped = False
            self.reserved(entry)
        self._entries = kept | self._entries
        return [entry for entry in entries if entry.name not in kept]

    def set_aside(self, entry: Entry) -> bool:
        """Set an entry aside that could not be read: nobody finds it, it is the first to go. True if that is new."""
        if entry.dropped or entry.aside:
            return False
        entry.aside = True
        self._entries = {entry.name: entry} | self._entries
        return True

    def give_back(self, size_bytes: int) -> None:
        """Give back room that was reserved."""
        self.used_bytes -= size_bytes

    def commit(self, entry: Entry) -> Entry | None:
        """Add a complete entry, in room that was reserved. The entry that it replaces is dropped."""
        before = self._entries.get(entry.name)
        if before is not None:
            self.drop(before)
        self._entries[entry.name] = entry
        return before

    def drop(self, entry: Entry) -> None:
        """Forget an entry. Doing so twice is fine."""
        if entry.dropped:
            return
        entry.dropped = True
        del self._entries[entry.name]
        if not entry.readers:
            self.used_bytes -= entry.size_bytes

    def begin_read(self, entry: Entry) -> None:
        """Keep an entry while somebody reads it."""
        entry.readers += 1

    def end_read(self, entry: Entry) -> None:
        entry.readers -= 1
        if entry.dropped and not entry.readers:
            self.used_bytes -= entry.size_bytes

    def touch(self, entry: Entry) -> None:
        """Note an entry as restored: all others go before it."""
        if not entry.dropped:
            entry.aside = False
            self._entries[entry.name] = self._entries.pop(entry.name)
