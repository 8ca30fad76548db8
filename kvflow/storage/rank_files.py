"""The files of one rank: their directory, their index, which knows their room, and their thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from kvflow.core.plan.topology import Rank
from kvflow.errors import ConfigError
from kvflow.storage.disk import Directory, InUse
from kvflow.storage.files import Files
from kvflow.storage.index import Entry, StoreIndex


@dataclass(frozen=True, slots=True)
class FileShelf:
    """Directory, index and thread of a store's files."""

    directory: Directory
    index: StoreIndex
    files: Files


async def open_shelf(rank: Rank, files: Files, folder: str, bytes_max: int) -> FileShelf:
    """Start the thread, and find the files that are there. Raises ConfigError; cancelling leaves nothing open."""
    path = os.path.join(folder, f"dp{rank.dp}-pp{rank.pp}-tp{rank.tp}")
    directory = Directory(path)
    try:
        await files.open()
        found = await files.call(directory.open)
        index = StoreIndex(bytes_max, found)
        victims = index.make_room(0)  # the bound may have been larger
        await files.call(_removing(directory, victims))
    except InUse:
        files.abandon(directory.close, 0.0)
        raise ConfigError(f"storage: {path!r} is in use by another runtime, here or in another process") from None
    except OSError as error:
        files.abandon(directory.close, 0.0)
        raise ConfigError(f"storage: {path!r} cannot be used: {error}") from error
    except BaseException:
        files.abandon(directory.close, 0.0)
        raise
    return FileShelf(directory, index, files)


def _removing(directory: Directory, entries: tuple[Entry, ...]) -> Callable[[], None]:
    def remove() -> None:
        for entry in entries:
            directory.remove(entry.file)

    return remove
