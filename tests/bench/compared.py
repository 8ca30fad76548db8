"""The blocks of a turn to compare: all blocks, or a few of each load."""

from __future__ import annotations

from collections.abc import Iterable

from kvflow.bench.loads import PlannedLoad

_SAMPLE_BLOCKS = 8


def blocks_to_compare(loads: Iterable[PlannedLoad], *, check_all: bool) -> tuple[list[int], list[int]]:
    """Local and remote ids of the blocks to compare: all, or of each load a few with the first and the last."""
    local_ids: list[int] = []
    remote_ids: list[int] = []
    for load in loads:
        chosen = sample_indices(len(load.local_ids), check_all=check_all)
        local_ids += (load.local_ids[index] for index in chosen)
        remote_ids += (load.remote_ids[index] for index in chosen)
    return local_ids, remote_ids


def sample_indices(count: int, *, check_all: bool) -> list[int]:
    if check_all or count <= _SAMPLE_BLOCKS:
        return list(range(count))
    return [round(position * (count - 1) / (_SAMPLE_BLOCKS - 1)) for position in range(_SAMPLE_BLOCKS)]
