"""Index of a store: its entries, and which of them make room for others.

Entries have an order. Those that could not be read go first, and are not found any more; then the one that was saved or
restored longest ago. An entry that is being read never goes. An entry that is being written counts with its whole size
from the beginning; one that was replaced counts until its last reader has finished. So the files never exceed the
bound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvflow.checks import counted
from kvflow.errors import StoreFull


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
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        for entry in found:
            self.used_bytes += entry.size_bytes
            self.commit(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def drop_all(self, names: Collection[str] | None) -> list[Entry]:
        """Drop the entries of these names, those that could not be read included, or all. Returns them."""
        found = [*self._entries] if names is None else [name for name in names if name in self._entries]
        dropped = [self._entries[name] for name in found]
        for entry in dropped:
            self.drop(entry)
        return dropped

    def find(self, name: str) -> Entry | None:
        entry = self._entries.get(name)
        return None if entry is None or entry.aside else entry

    def make_room(self, size_bytes: int, request_id: str) -> list[Entry]:
        """Reserve bytes for a request. Returns the entries that left the index for that, whose files have to go.

        Raises StoreFull if all entries that would have to go are being read or written.
        """
        excess, victims = self.used_bytes + size_bytes - self.bytes_max, []
        for entry in self._entries.values():
            if excess <= 0:
                break
            if not entry.readers:
                victims.append(entry)
                excess -= entry.size_bytes
        if excess > 0:
            full = f"{counted(size_bytes, 'byte')} more, {self.used_bytes} of {self.bytes_max} are used"
            text = f"request {request_id!r}: {full}; all entries that are left are being read or written"
            raise StoreFull(text, request_id=request_id)
        for entry in victims:
            self.drop(entry)
        self.used_bytes += size_bytes
        return victims

    def put_back(self, entries: Sequence[Entry]) -> list[Entry]:
        """Take entries back whose files could not be removed: they are the first to go again.

        Those that were replaced meanwhile, or are unwanted, are not, and are returned: their files are left.
        """
        kept = {entry.name: entry for entry in entries if entry.name not in self._entries and not entry.unwanted}
        for entry in kept.values():
            entry.dropped = False
            self.used_bytes += entry.size_bytes
        self._entries = kept | self._entries
        return [entry for entry in entries if entry.name not in kept]

    def set_aside(self, entry: Entry) -> bool:
        """Set an entry aside that could not be read: nobody finds it, it is the first to go. True if that is new."""
        if entry.dropped or entry.aside:
            return False
        entry.aside = True
        self._entries.move_to_end(entry.name, last=False)
        return True

    def give_back(self, size_bytes: int) -> None:
        """Give back room that was reserved."""
        self.used_bytes -= size_bytes

    def commit(self, entry: Entry) -> Entry | None:
        """Add a complete entry, in room that was reserved. Returns the entry that it replaces, which is dropped.

        Does nothing if the entry was added before, also if it was dropped since.
        """
        before = self._entries.get(entry.name)
        if before is entry or entry.dropped:
            return None
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

    def end_read(self, entry: Entry) -> None:
        """Count one reader less of an entry, which may go once it has none."""
        entry.readers -= 1
        if entry.dropped and not entry.readers:
            self.used_bytes -= entry.size_bytes

    def touch(self, entry: Entry) -> None:
        """Note an entry as restored: all others go before it."""
        if not entry.dropped:
            entry.aside = False
            self._entries.move_to_end(entry.name)
