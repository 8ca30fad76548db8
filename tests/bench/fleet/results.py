"""Results of fleets, and of the memory that peers take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """Results of one phase, for `ranks` prefill ranks and as many decode ranks."""

    ranks: int
    phase: str
    right: int
    lost: int
    failed: int
    """Failed loads between ranks that lived, asked by a decode rank in service."""
    errors: str
    wrong: int
    settle_s: float
    slowest_s: float
    connections: int
    dropped_all: int
    wait_s: float
    files: int
    """That the busiest prefill rank would have open, with NIXL over tcp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryResult:
    """Bytes for each peer of a rank."""

    peers: int
    layers: int
    connected_bytes: int
    loaded_bytes: int
    """After loads of every length that the last block of a prompt can have."""
