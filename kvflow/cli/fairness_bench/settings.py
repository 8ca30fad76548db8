"""What one run of the fairness bench measures, and which blocks a round moves. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvflow.cli.bench.messages import Load, RunRound
from kvflow.cli.bench.settings import MIB, CacheShape, SettingsError, Transport

_LAYERS, _KV_HEADS = 8, 8
_SLICE_LOADS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessSettings:
    """`alone` and `behind` one-block loads a round: while nothing else runs, and while `huge_loads` huge ones do."""

    transport: Transport
    shape: CacheShape
    huge_loads: int
    huge_blocks: int
    slice_blocks: int
    alone: int
    behind: int
    rounds: int
    quick: bool

    @property
    def huge_bytes(self) -> int:
        return self.huge_blocks * self.shape.block_size_bytes

    @property
    def slice_bytes(self) -> int:
        return self.slice_blocks * self.shape.block_size_bytes


def make_settings(
    *, transport: Transport, size_mb: int, huge_loads: int, rounds: int, slice_bytes: int, quick: bool
) -> FairnessSettings:
    """Turn options into settings; `slice_bytes` is what a load may read at once."""
    block_bytes = CacheShape(layers=_LAYERS, kv_heads=_KV_HEADS, blocks=1).block_size_bytes
    alone, behind = 30, 200
    if quick:
        size_mb, huge_loads, rounds, alone, behind = 256, 1, 1, 3, 20
    huge_blocks, rest = divmod(size_mb * MIB, block_bytes)
    if rest or huge_blocks * block_bytes < 2 * slice_bytes:
        raise SettingsError(
            f"--size: {size_mb} MB is no multiple of a block, which has {block_bytes} bytes, "
            f"or less than two slices, which have {2 * slice_bytes}"
        )
    slice_blocks = slice_bytes // block_bytes
    blocks = 1 + alone + _SLICE_LOADS * slice_blocks + huge_loads * huge_blocks + behind
    return FairnessSettings(
        transport=transport,
        shape=CacheShape(layers=_LAYERS, kv_heads=_KV_HEADS, blocks=blocks),
        huge_loads=huge_loads,
        huge_blocks=huge_blocks,
        slice_blocks=slice_blocks,
        alone=alone,
        behind=behind,
        rounds=rounds,
        quick=quick,
    )


def loads_of_round(settings: FairnessSettings, index: int) -> RunRound:
    """Scattered blocks for every load of a round, which share none."""
    rng = np.random.default_rng(index)
    local_ids, remote_ids = (rng.permutation(settings.shape.blocks).tolist() for _ in range(2))
    start = 0

    def take(what: str, loads: int, blocks: int) -> tuple[Load, ...]:
        nonlocal start
        taken = []
        for number in range(loads):
            part = slice(start, start + blocks)
            start += blocks
            taken.append(
                Load(
                    request_id=f"round {index} {what} {number}",
                    local_ids=tuple(local_ids[part]),
                    remote_ids=tuple(remote_ids[part]),
                )
            )
        return tuple(taken)

    return RunRound(
        wake=take("wake", 1, 1)[0],
        alone=take("alone", settings.alone, 1),
        slices=take("slice", _SLICE_LOADS, settings.slice_blocks),
        huge=take("huge", settings.huge_loads, settings.huge_blocks),
        behind=take("behind", settings.behind, 1),
    )
