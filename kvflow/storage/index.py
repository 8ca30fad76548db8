"""Index of a store: one entry for each stored file, in the order of eviction.

Entries of unreadable files are evicted first; then the entry that was saved or restored longest ago. An entry that is
being read is never evicted. An entry that is being written counts with its full size from the beginning; a replaced
entry counts until the last restore from it has ended. So all files together never exceed `bytes_max`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvflow.checks import counted
from kvflow.errors import StoreFull


@dataclass(slots=True, eq=False)
class Entry:
    """Record of one stored file in a store's index."""

    name: str
    """Result of `entry.entry_name` for the key of the saved blocks. The field `file` is the file's name."""
    file: str
    size_bytes: int
    readers: int = 0
    unreadable: bool = False
    """True once a read of the file has failed. The file still takes room, but `find` does not return the entry."""
    dropped: bool = False
    """True once the entry was removed from the index. The file takes room until the last restore from it has ended."""
    dropped_by_caller: bool = False
    """True if `Storage.drop` was called for the entry while it was being evicted, so `put_back` must not put it
    back.
    """


class StoreIndex:
    """The entries of a store in the order of eviction, and the bytes that all files take."""

    def __init__(self, bytes_max: int, existing: Iterable[Entry] = ()) -> None:
        """`existing`: entries of the files that are already in the directory, in the order of eviction."""
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        for entry in existing:
            self.used_bytes += entry.size_bytes
            self.commit(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def drop_all(self, names: Collection[str] | None) -> list[Entry]:
        """Remove the entries called `names`, or all entries if None, from the index.

        Return the removed entries, including unreadable ones.
        """
        listed = [*self._entries] if names is None else [name for name in names if name in self._entries]
        dropped = [self._entries[name] for name in listed]
        for entry in dropped:
            self.drop(entry)
        return dropped

    def find(self, name: str) -> Entry | None:
        """Return the entry called `name`, or None if there is none or its file is unreadable."""
        entry = self._entries.get(name)
        return None if entry is None or entry.unreadable else entry

    def reserve(self, size_bytes: int, request_id: str) -> list[Entry]:
        """Reserve room of `size_bytes` for a save. Return the evicted entries; the caller removes the files.

        If evicting all entries that are not being read would not suffice, raise StoreFull and evict none.
        """
        victims, lacking = self._victims(self.used_bytes + size_bytes - self.bytes_max)
        if lacking > 0:
            full = f"{counted(size_bytes, 'byte')} more, {self.used_bytes} of {self.bytes_max} are used"
            text = f"request {request_id!r}: {full}; every other entry is being read or written"
            raise StoreFull(text, request_id=request_id)
        for entry in victims:
            self.drop(entry)
        self.used_bytes += size_bytes
        return victims

    def evict(self, size_bytes: int) -> list[Entry]:
        """Remove entries of at least `size_bytes` from the index, or all that are not being read, and return them."""
        victims, _ = self._victims(size_bytes)
        for entry in victims:
            self.drop(entry)
        return victims

    def _victims(self, size_bytes: int) -> tuple[list[Entry], int]:
        """Return the entries to evict for `size_bytes`, and how many bytes are lacking even then, if more than 0."""
        victims = []
        for entry in self._entries.values():
            if size_bytes <= 0:
                break
            if not entry.readers:
                victims.append(entry)
                size_bytes -= entry.size_bytes
        return victims, size_bytes

    def put_back(self, entries: Sequence[Entry]) -> list[Entry]:
        """Put evicted `entries` back, because their files could not be removed. The next eviction begins with these.

        Return the entries that were replaced or dropped by a caller meanwhile: these are not put back, and their files
        must still be removed.
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
        """Mark `entry` after a failed read of its file: `find` ignores it, and it is evicted first.

        Return True, or False if the entry was dropped or marked before.
        """
        if entry.dropped or entry.unreadable:
            return False
        entry.unreadable = True
        self._entries.move_to_end(entry.name, last=False)
        return True

    def release(self, size_bytes: int) -> None:
        """Free the room of `size_bytes` that `reserve` took for a save that failed."""
        self.used_bytes -= size_bytes

    def commit(self, entry: Entry) -> Entry | None:
        """Add the entry of a complete file, in reserved room.

        If `entry` replaces another entry, drop and return the other entry. If `entry` was added before, do nothing,
        even if it was dropped since.
        """
        before = self._entries.get(entry.name)
        if before is entry or entry.dropped:
            return None
        if before is not None:
            self.drop(before)
        self._entries[entry.name] = entry
        return before

    def drop(self, entry: Entry) -> None:
        """Remove `entry` from the index. A second call does nothing."""
        if entry.dropped:
            return
        entry.dropped = True
        del self._entries[entry.name]
        if not entry.readers:
            self.used_bytes -= entry.size_bytes

    def end_read(self, entry: Entry) -> None:
        """Record that a restore from `entry` has ended.

        After the last restore from a dropped entry, free the room.
        """
        entry.readers -= 1
        if entry.dropped and not entry.readers:
            self.used_bytes -= entry.size_bytes

    def touch(self, entry: Entry) -> None:
        """Record that `entry` was just restored: mark it as readable, and evict it last."""
        if not entry.dropped:
            entry.unreadable = False
            self._entries.move_to_end(entry.name)
