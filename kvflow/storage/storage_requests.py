"""Saving and restoring as their caller sees them: requests, reports, and the counts of all."""

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
    """The fields of both requests."""

    request_id: str
    key: StoreKey
    block_ids: GivenBlockIds
    num_tokens: Size
    deadline_s: Seconds | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class SaveRequest(StoreRequest):
    """Save `block_ids`, in prompt order, which hold `num_tokens` tokens, under `key`.

    The key is bytes or text, 1 to 256 bytes, such as a digest of the prompt: the store believes that equal keys are of
    equal blocks. What it had under the key before is replaced. For a cache of several groups `block_ids` are a list for
    each, in order, or by the groups' names. `deadline_s` defaults to Config.load_deadline_s; where saves, restores and
    loads wait for each other, a smaller `priority` goes first.
    """


@dataclass(frozen=True, slots=True)
class RestoreRequest(StoreRequest):
    """Fill `block_ids`, in prompt order, with what was saved under `key`: as many blocks, of as many tokens.

    See `SaveRequest`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """The fields of both reports."""

    request_id: str
    bytes: int
    blocks: int
    tokens: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport(StoreReport):
    """The report of one save. `bytes` is the size of the file, `evicted` counts the entries that made room for it.

    `seconds` has an entry for each of: check, queued, move, sync.
    """

    evicted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport(StoreReport):
    """The report of one restore. `seconds` has an entry for each of: check, queued, move, sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics(PartStatistics):
    """The store's contents now, and its counts since the cache was registered.

    A save or restore is open until its file is put away.
    """

    entries: int
    bytes: int
    """Size of all files, those being written and those still read included."""
    bytes_max: int
    quarantines: int
    saved: int
    restored: int
    missed: int
    """Restores of what is not stored."""
    damaged: int
    """Restores that have found a torn file, or other bytes than were saved."""
    evicted: int
    dropped: int
    """Entries that `Storage.drop` has dropped."""
    failed: int
    """Saves and restores that have ended otherwise, cancelled ones included."""


StoreKey: TypeAlias = Annotated[bytes | str, checked_key]
