"""What a process holds when nothing is under way, and whether that grows."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

WARM_UP_SHARE = 0.25
ALLOWED: Mapping[str, tuple[float, float]] = {
    "rss_mib": (4.0, 0.02),
    "pss_mib": (4.0, 0.02),
    "objects": (500.0, 0.005),
    "kvflow_objects": (50.0, 0.02),
    "fds": (0.0, 0.0),
    "threads": (0.0, 0.0),
    "sockets": (0.0, 0.0),
    "tasks": (0.0, 0.0),
}
"""How much more there may be in the last third than in the first one: so much, and such a share of it."""


def sample() -> dict[str, Any]:
    """Counted after a full collection."""
    gc.collect()
    kinds = Counter[str]()
    for kind, count in Counter(map(type, gc.get_objects())).items():
        kinds[f"{kind.__module__}.{kind.__qualname__}"] += count
    process = psutil.Process()
    files = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _still(name)]
    rollup = Path("/proc/self/smaps_rollup").read_text()
    pss_kib = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return {
        "rss_mib": process.memory_info().rss / 2**20,
        "pss_mib": pss_kib / 2**10,
        "objects": sum(kinds.values()),
        "kvflow_objects": sum(count for kind, count in kinds.items() if kind.startswith("kvflow.")),
        "fds": len(files),
        "threads": process.num_threads(),
        "sockets": sum(name.startswith("socket:") for name in files),
        "tasks": len(asyncio.all_tasks()),
        "kinds": dict(kinds.most_common(150)),
    }


def _still(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


def growth(samples: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | bool]]:
    """For each number: its median in the first and the last third after the warm-up, and whether that is flat."""
    warm = samples[int(len(samples) * WARM_UP_SHARE) :]
    third = max(len(warm) // 3, 1)
    found: dict[str, dict[str, float | bool]] = {}
    for name, (most, share) in ALLOWED.items():
        before, after = (median(one[name] for one in some) for some in (warm[:third], warm[-third:]))
        flat = after - before <= most + share * before
        found[name] = {"first third": before, "last third": after, "flat": flat}
    return found


def grown_kinds(samples: Sequence[Mapping[str, Any]], most: int = 5) -> dict[str, int]:
    """The types of objects of which there are more than before, those that grew most first."""
    warm = samples[int(len(samples) * WARM_UP_SHARE) :]
    grown = Counter(warm[-1]["kinds"])
    grown.subtract(warm[0]["kinds"])
    return {kind: count for kind, count in grown.most_common(most) if count > 0 and kind in warm[0]["kinds"]}
