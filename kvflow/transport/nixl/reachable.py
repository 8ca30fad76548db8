"""Which devices' memory NIXL reaches: CUDA's by its own wheel, others if its UCX was built for them.

UCX reaches the memory of a kind of device by a module of its own, a library beside its others. Without the module it
takes such addresses for the host's, and faults where they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvflow.transport.device.cuda import is_rocm

_MAPS = Path("/proc/self/maps")


def found_kinds() -> Mapping[str, bool]:
    """Return whether NIXL reaches those kinds of devices that depend on its UCX. Once an agent has loaded UCX."""
    found = {"xpu": has_module("ze")}
    return {**found, "cuda": has_module("rocm")} if is_rocm() else found


def has_module(name: str) -> bool:
    """Return whether the UCX that this process has loaded has its module for a kind of device, such as "ze"."""
    lines = _MAPS.read_text("utf-8", "replace").splitlines()
    loaded = {Path(line.split(maxsplit=5)[5]) for line in lines if "/libuct" in line}
    folders = {folder for library in loaded for folder in (library.parent, library.parent / "ucx")}
    return any(next(folder.glob(f"libuct_{name}*.so*"), None) is not None for folder in folders)
