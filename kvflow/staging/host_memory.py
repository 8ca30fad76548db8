"""Memory that this process may use: the host's memory, or less if the control groups of its container allow less.

A control group's limit holds for all groups inside it, so the limits of the process's own group and of all groups
around it are read, for both versions of control groups. Limits that cannot be read are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Return how many bytes of memory this process may use. `root`: folder that has /proc and /sys, for tests."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    """Yield the memory limits, in bytes, of all control groups that this process is in."""
    own = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            own["cgroup2"] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            own["cgroup"] = PurePosixPath(path)
    for line in _lines(root / "proc/self/mountinfo"):
        mounted, separator, system = line.partition(" - ")
        if not separator:
            continue
        kind, *_, options = system.split()
        shown, place = mounted.split()[3:5]
        if kind not in own or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        # In a container the mount may begin at the container's own group, which has the path that the host sees.
        inside = own[kind].relative_to(shown) if own[kind].is_relative_to(shown) else PurePosixPath()
        name = "memory.max" if kind == "cgroup2" else "memory.limit_in_bytes"
        for group in (inside, *inside.parents):
            for text in _lines(root / place.lstrip("/") / group / name):
                if text.isdecimal():  # else "max"
                    yield int(text)


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; an empty list if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
