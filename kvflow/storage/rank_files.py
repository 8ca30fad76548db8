"""The files of one rank: their directory, their index, which knows their room, and their thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from kvflow.config import Config
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


async def open_shelf(config: Config, files: Files) -> FileShelf:
    """Start the thread, and find the files that are there. Raises ConfigError; cancelling leaves nothing open."""
    assert config.store_dir is not None, "Config names a store"
    path = os.path.join(os.fspath(config.store_dir), f"dp{config.dp_rank}-pp{config.pp_rank}-tp{config.tp_rank}")
    directory = Directory(path)
    try:
        await files.open()
        found = await files.call(directory.open)
        index = StoreIndex(config.store_bytes_max, found)
        victims = index.make_room(0)  # the bound may have been larger
        await files.call(_removing(directory, victims))
    except InUse:
        files.abandon(directory.close, 0.0)
        raise ConfigError(f"store_dir: {path!r} is in use by another runtime, here or in another process") from None
    except OSError as error:
        files.abandon(directory.close, 0.0)
        raise ConfigError(f"store_dir: {path!r} cannot be used: {error}") from error
    except BaseException:
        files.abandon(directory.close, 0.0)
        raise
    return FileShelf(directory, index, files)


def _removing(directory: Directory, entries: tuple[Entry, ...]) -> Callable[[], None]:
    def remove() -> None:
        for entry in entries:
            directory.remove(entry.file)

    return remove
