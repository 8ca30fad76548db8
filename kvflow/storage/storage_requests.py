"""Requests and reports of saves and restores, and the statistics of a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from kvflow.checks import Seconds, Size
from kvflow.core.plan.descriptors import GivenBlockIds
from kvflow.runtime.statistics import PartStatistics
from kvflow.storage.entry import checked_key

PHASES = ("check", "queued", "move", "sync")


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """Fields that `SaveRequest` and `RestoreRequest` share."""

    request_id: str
    key: StoreKey
    block_ids: GivenBlockIds
    num_tokens: Size
    deadline_s: Seconds | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class SaveRequest(StoreRequest):
    """Request to save `block_ids`, in prompt order, which hold `num_tokens` tokens, under `key`.

    `key` is bytes or text of 1 to 256 bytes, such as a digest of the prompt: the store assumes that equal keys mean
    equal blocks. If an entry is stored under `key` already, it is replaced. For a cache of several groups, `block_ids`
    has one list for each group, in order, or is a mapping by the names of the groups. `deadline_s` defaults to
    Config.load_deadline_s. Where saves, restores and loads wait for each other, a smaller `priority` goes first.
    """


@dataclass(frozen=True, slots=True)
class RestoreRequest(StoreRequest):
    """Request to fill `block_ids`, in prompt order, with the blocks saved under `key`.

    The numbers of blocks and tokens must equal those that were saved. See `SaveRequest`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """Fields that `SaveReport` and `RestoreReport` share."""

    request_id: str
    bytes: int
    blocks: int
    tokens: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport(StoreReport):
    """Report of a save. `bytes` is the size of the file, `evicted` the number of entries evicted to make room for it.

    `seconds` has the time spent in each phase: check, queued, move, sync.
    """

    evicted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport(StoreReport):
    """Report of a restore. `seconds` has the time spent in each phase: check, queued, move, sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics(PartStatistics):
    """Contents of a store now, and counts since the cache was registered.

    A save or restore counts as open until its file is closed.
    """

    entries: int
    bytes: int
    """Size of all files, including those being written and dropped ones that are still being read."""
    bytes_max: int
    quarantines: int
    saved: int
    restored: int
    missed: int
    """Restores of a key under which nothing was stored."""
    damaged: int
    """Restores that found a torn file, or other bytes than were saved."""
    evicted: int
    dropped: int
    """Entries dropped by `Storage.drop`."""
    failed: int
    """Saves and restores that ended in any other way, including cancelled ones."""


StoreKey: TypeAlias = Annotated[bytes | str, checked_key]
