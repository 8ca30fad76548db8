"""Index of a store: its entries, and the order in which they are evicted to make room.

Entries with files that could not be read are not found, and are evicted first. After them, the entry that was saved
or restored longest ago is evicted first. An entry that is being read is never evicted. An entry that is being written
counts with its full size from the beginning; a replaced entry counts until its last reader has finished. So the files
never exceed `bytes_max`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvflow.checks import counted
from kvflow.errors import StoreFull


@dataclass(slots=True, eq=False)
class Entry:
    """A file of the store, and its state in the index."""

    name: str
    """Name that `entry.entry_name` computes from the entry's key."""
    file: str
    size_bytes: int
    readers: int = 0
    unreadable: bool = False
    """True once a read of its file has failed: the entry still takes room, but is not found."""
    dropped: bool = False
    """True once the entry has left the index: its bytes count until its last reader has finished."""
    dropped_by_caller: bool = False
    """True if the entry was dropped by a caller while it was evicted, so `put_back` must not take it back."""


class StoreIndex:
    """The entries of a store by name, ordered by eviction: the first is evicted first."""

    def __init__(self, bytes_max: int, existing: Iterable[Entry] = ()) -> None:
        """`existing`: entries that the directory has already, in the order in which they are to be evicted."""
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        for entry in existing:
            self.used_bytes += entry.size_bytes
            self.commit(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def drop_all(self, names: Collection[str] | None) -> list[Entry]:
        """Drop the entries called `names`, or all entries if None, even unreadable ones. Return the dropped entries."""
        listed = [*self._entries] if names is None else [name for name in names if name in self._entries]
        dropped = [self._entries[name] for name in listed]
        for entry in dropped:
            self.drop(entry)
        return dropped

    def find(self, name: str) -> Entry | None:
        """Return the entry called `name`; None if there is none or it is unreadable."""
        entry = self._entries.get(name)
        return None if entry is None or entry.unreadable else entry

    def reserve(self, size_bytes: int, request_id: str) -> list[Entry]:
        """Reserve `size_bytes` for a request. Return the entries evicted for that; the caller removes their files.

        If evicting every entry that is not in use would not be enough, raises StoreFull and evicts none.
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
            text = f"request {request_id!r}: {full}; every other entry is being read or written"
            raise StoreFull(text, request_id=request_id)
        for entry in victims:
            self.drop(entry)
        self.used_bytes += size_bytes
        return victims

    def put_back(self, entries: Sequence[Entry]) -> list[Entry]:
        """Take back evicted `entries` with files that could not be removed; they are again the first to be evicted.

        Return the entries that were not taken back because they were replaced meanwhile or are unwanted: their files
        still have to be removed.
        """
        kept = {
            entry.name: entry for entry in entries if entry.name not in self._entries and not entry.dropped_by_caller
        }
        for entry in kept.values():
            entry.dropped = False
            self.used_bytes += entry.size_bytes
        self._entries = kept | self._entries
        return [entry for entry in entries if entry.name not in kept]

    def mark_unreadable(self, entry: Entry) -> bool:
        """Mark an entry as unreadable, after a failed read of its file: it is not found, and is evicted first.

        Return False, and do nothing, if the entry was dropped or marked before.
        """
        if entry.dropped or entry.unreadable:
            return False
        entry.unreadable = True
        self._entries.move_to_end(entry.name, last=False)
        return True

    def release(self, size_bytes: int) -> None:
        """Free `size_bytes` that `reserve` took, for an entry that was not completed."""
        self.used_bytes -= size_bytes

    def commit(self, entry: Entry) -> Entry | None:
        """Add a complete entry, in room that was reserved. Drop and return the entry that it replaces, or return None.

        Does nothing if `entry` was added before, even if it has been dropped since.
        """
        before = self._entries.get(entry.name)
        if before is entry or entry.dropped:
            return None
        if before is not None:
            self.drop(before)
        self._entries[entry.name] = entry
        return before

    def drop(self, entry: Entry) -> None:
        """Remove `entry` from the index. Dropping twice is fine."""
        if entry.dropped:
            return
        entry.dropped = True
        del self._entries[entry.name]
        if not entry.readers:
            self.used_bytes -= entry.size_bytes

    def end_read(self, entry: Entry) -> None:
        """Note that a reader of `entry` has finished.

        If it was the last reader of a dropped entry, free the entry's bytes.
        """
        entry.readers -= 1
        if entry.dropped and not entry.readers:
            self.used_bytes -= entry.size_bytes

    def touch(self, entry: Entry) -> None:
        """Make `entry`, which was just restored, the last to be evicted, and clear its mark as unreadable."""
        if not entry.dropped:
            entry.unreadable = False
            self._entries.move_to_end(entry.name)
