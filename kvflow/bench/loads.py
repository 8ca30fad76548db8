"""Loads of a bench: the network path that moves the bytes, and the blocks that each load moves. Without I/O."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from kvflow.bench.child import QUIET_ENVIRONMENT

MIB = 1 << 20

Ticket: TypeAlias = dict[str, object]


class SettingsError(ValueError):
    """Error: an option of a bench has a value that the bench cannot use. The message names the option and the value."""


class Fabric(enum.StrEnum):
    SHM = "shm"
    TCP = "tcp"

    @property
    def environment(self) -> Mapping[str, str | None]:
        """Environment variables that make UCX in a child process use this path. They override the caller's UCX_TLS."""
        return {**QUIET_ENVIRONMENT, "UCX_TLS": "tcp" if self is Fabric.TCP else None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoad:
    """A load that reads block `remote_ids[i]` of the producer into block `local_ids[i]` of the reader, for each i."""

    request_id: str
    local_ids: tuple[int, ...]
    remote_ids: tuple[int, ...]


def scattered_ids(seed: str, blocks: int, count: int) -> tuple[int, ...]:
    """Return `count` different block ids, chosen at random below `blocks`. Equal seeds give equal ids."""
    rng = np.random.default_rng(list(seed.encode()))
    return tuple(rng.permutation(blocks)[:count].tolist())


def scattered_loads(name: str, blocks: int, counts: Sequence[int], *, seed: str = "") -> tuple[PlannedLoad, ...]:
    """Return one load for each number of blocks in `counts`. No two loads share a block.

    The block ids on each side are chosen at random below `blocks`. Equal seeds give equal ids; the default seed is
    `name`.
    """
    local_ids, remote_ids = (
        scattered_ids(f"{seed or name} {side}", blocks, sum(counts)) for side in ("local", "remote")
    )
    return tuple(
        PlannedLoad(
            request_id=f"{name} {index}",
            local_ids=local_ids[end - count : end],
            remote_ids=remote_ids[end - count : end],
        )
        for index, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True))
    )
