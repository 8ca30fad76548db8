"""Resources of a process when nothing is under way, and whether they grow."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, ClassVar

import psutil

WARM_UP_SHARE = 0.25
ALLOWED: Mapping[str, tuple[float, float]] = {
    "heap_mib": (4.0, 0.02),
    "objects": (500.0, 0.005),
    "kvflow_objects": (50.0, 0.02),
    "fds": (0.0, 0.0),
    "threads": (0.0, 0.0),
    "sockets": (0.0, 0.0),
    "tasks": (0.0, 0.0),
}
"""Allowed growth from the first third of the samples to the last: an amount, and a share of the first third.

The spread of the middle half of a third's samples is allowed on top. Resident memory is in the samples and not judged:
with as many threads as these processes have, the C library's arenas keep more and more free memory between the used
blocks. `heap_mib` counts the used blocks.
"""
BOUNDED = frozenset(
    {
        "kvflow.core.protocol.messages.Offer",  # what late readers are told of (lease_questions.py)
        "kvflow.core.protocol.messages.LeaseAnswer",
        "kvflow.core.protocol.addresses.Address",  # who is told goodbye (Limits.readers_max)
        "kvflow.storage.index.Entry",  # files of the store
        "zmq.constants.Event",  # combinations of flags, which enum keeps
    }
)
"""Kinds of objects that have a bound and have not come to it within an hour: not counted."""


class _HeapInfo(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library: bytes, for all arenas."""

    _fields_: ClassVar = [
        (f"other{at}" if name == "_" else name, ctypes.c_size_t)
        for at, name in enumerate(("_", "_", "_", "_", "mapped", "_", "_", "used", "free", "_"))
    ]


def _heap() -> _HeapInfo:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _HeapInfo
    found: _HeapInfo = mallinfo()
    return found


def sample() -> dict[str, Any]:
    """Counted after a full collection."""
    gc.collect()
    kinds = Counter[str]()
    for kind, count in Counter(map(type, gc.get_objects())).items():
        kinds[f"{kind.__module__}.{kind.__qualname__}"] += count
    kinds = Counter({kind: count for kind, count in kinds.items() if kind not in BOUNDED})
    process, heap = psutil.Process(), _heap()
    files = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _still(name)]
    rollup = Path("/proc/self/smaps_rollup").read_text()
    pss_kib = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return {
        "heap_mib": (heap.used + heap.mapped) / 2**20,
        "heap_free_mib": heap.free / 2**20,
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
        first, last = ([one[name] for one in some] for some in (warm[:third], warm[-third:]))
        before, after = median(first), median(last)
        flat = after - before <= most + share * before + max(_spread(first), _spread(last))
        found[name] = {"first third": before, "last third": after, "flat": flat}
    return found


def _spread(values: Sequence[float]) -> float:
    """Return the spread of the middle half of the values."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return high - low


def grown_kinds(samples: Sequence[Mapping[str, Any]], most: int = 5) -> dict[str, int]:
    """Return the types with more objects than before, the most grown first."""
    warm = samples[int(len(samples) * WARM_UP_SHARE) :]
    grown = Counter(warm[-1]["kinds"])
    grown.subtract(warm[0]["kinds"])
    return {kind: count for kind, count in grown.most_common(most) if count > 0 and kind in warm[0]["kinds"]}
