"""Requests and reports of saves and restores, and the statistics of a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from kvflow.checks import Deadline, Size
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
    deadline_s: Deadline | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class SaveRequest(StoreRequest):
    """Request to save `block_ids`, in prompt order, which hold `num_tokens` tokens, under `key`.

    `key` is bytes or text of 1 to 256 bytes, such as a digest of the prompt; equal keys must mean equal blocks. Blocks
    that are stored under `key` already are replaced. For a cache of several groups, `block_ids` is one list for each
    group, in the order of the groups, or a mapping from group names to lists. `deadline_s` defaults to
    Config.load_deadline_s. Among waiting saves, restores and loads, those with a smaller `priority` go first.
    """


@dataclass(frozen=True, slots=True)
class RestoreRequest(StoreRequest):
    """Request to fill the local blocks `block_ids`, in prompt order, with the blocks saved under `key`.

    `num_tokens` and the number of blocks of each group must equal the saved ones. Fields have the forms of
    `SaveRequest`.
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
    """Report of a save. `bytes` is the size of the file, `evicted` the number of files removed to make room.

    `seconds` has the seconds of each phase: "check" (checks and digests), "queued" (waiting to copy), "move" (copying
    bytes) and "sync" (writing to disk).
    """

    evicted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport(StoreReport):
    """Report of a restore. `seconds` has the seconds of each phase.

    The phases are "check" (checks and digests), "queued" (waiting to copy), "move" (copying bytes) and "sync" (always 0
    for a restore, which writes nothing to disk).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics(PartStatistics):
    """Contents of a store now, and counts of saves and restores since the KV cache was registered.

    `open_requests` counts a save or restore until its file is closed.
    """

    entries: int
    bytes: int
    """Size of all files, including files that are being written, and removed files that are still being read."""
    bytes_max: int
    quarantines: int
    saved: int
    restored: int
    missed: int
    """Number of restores that found nothing stored under the key."""
    damaged: int
    """Number of restores that failed because the file was damaged."""
    evicted: int
    dropped: int
    """Number of files that `Storage.drop` has removed."""
    failed: int
    """Number of saves and restores that failed for other reasons, or were cancelled."""


StoreKey: TypeAlias = Annotated[bytes | str, checked_key]
