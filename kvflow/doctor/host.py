"""The machine: `read_host` looks, the checks judge what it saw.

Numbers that a kernel or a container sets are read from where the kernel shows them; what cannot be read is None, and a
check that has nothing to judge says so.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvflow.config import Config
from kvflow.doctor.files import check_open_files
from kvflow.doctor.findings import Finding, ok, warn
from kvflow.doctor.findings import fail as failed

PYTHON_MIN = (3, 11)
SHARED_MEMORY_FREE_MIN_BYTES = 256 << 20
_CAP_IPC_LOCK, _CAP_SYS_PTRACE = 14, 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What was seen. `None` means that it cannot be known here, or does not exist."""

    python: tuple[int, int, int]
    locked_bytes_max: int | None
    """How much memory a process may lock; None is no limit."""
    open_files_max: int | None
    open_files_hard_max: int | None
    """How many files, sockets included, a process may have open, and how far it may raise that; None is no limit."""
    capabilities: int
    """The process's effective capabilities, a bit each."""
    shared_memory_free_bytes: int | None
    ptrace_scope: int | None
    """Yama's setting; None if the kernel has no Yama."""
    huge_pages: str | None
    """The setting of transparent huge pages: always, madvise or never."""
    rdma_devices: tuple[str, ...]
    networks: tuple[str, ...]
    """Interfaces that are up, but for the loopback."""
    gpus: tuple[str, ...]
    environment: Mapping[str, str]
    """Those variables that concern us."""

    def may(self, capability: int) -> bool:
        return bool(self.capabilities >> capability & 1)


def read_host() -> Host:
    locked_bytes_max, _ = _limits(resource.RLIMIT_MEMLOCK)
    open_files_max, open_files_hard_max = _limits(resource.RLIMIT_NOFILE)
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    huge_pages = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    names = ("UCX_TLS", "UCX_NET_DEVICES", "THP_MEM_ALLOC_ENABLE")
    return Host(
        python=sys.version_info[:3],
        locked_bytes_max=locked_bytes_max,
        open_files_max=open_files_max,
        open_files_hard_max=open_files_hard_max,
        capabilities=_capabilities(_read("/proc/self/status") or ""),
        shared_memory_free_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        ptrace_scope=None if scope is None else int(scope),
        huge_pages=None if huge_pages is None else huge_pages.partition("[")[2].partition("]")[0],
        rdma_devices=_entries("/sys/class/infiniband"),
        networks=tuple(_networks()),
        gpus=_entries("/proc/driver/nvidia/gpus"),
        environment={name: os.environ[name] for name in names if name in os.environ},
    )


def check_host(host: Host, config: Config) -> Iterator[Finding]:
    yield check_python(host)
    yield check_devices(host)
    yield check_memory_locking(host)
    yield check_open_files(host.open_files_max, host.open_files_hard_max, config)
    yield check_shared_memory(host)
    yield check_process_reading(host)
    yield check_huge_pages(host)


def check_python(host: Host) -> Finding:
    found = ".".join(map(str, host.python))
    if host.python[:2] < PYTHON_MIN:
        return failed("Python", found, f"install Python {'.'.join(map(str, PYTHON_MIN))} or newer")
    return ok("Python", found)


def check_devices(host: Host) -> Finding:
    kinds = (("RDMA", host.rdma_devices), ("network", host.networks), ("GPU", host.gpus))
    found = "; ".join(f"{kind}: {', '.join(names) or 'none'}" for kind, names in kinds)
    set_by_hand = ", ".join(f"{name}={value}" for name, value in host.environment.items() if name.startswith("UCX_"))
    return ok("devices", found + (f"; {set_by_hand}" if set_by_hand else ""))


def check_memory_locking(host: Host) -> Finding:
    """RDMA pins what it registers; nothing else does."""
    name = "memory locking"
    if host.locked_bytes_max is None or host.may(_CAP_IPC_LOCK):
        why = "no limit" if host.locked_bytes_max is None else "limited, but the process may exceed it (CAP_IPC_LOCK)"
        return ok(name, why)
    found = f"at most {host.locked_bytes_max >> 10} KiB"
    if host.rdma_devices:
        fix = "raise `ulimit -l` to unlimited (containers: --ulimit memlock=-1): RDMA pins the whole cache"
        return failed(name, found, fix)
    return ok(name, f"{found}, which only RDMA would need; there is none")


def check_shared_memory(host: Host) -> Finding:
    name, free = "/dev/shm", host.shared_memory_free_bytes
    if free is None:
        return warn(name, "does not exist", "mount a tmpfs there: engines on one machine talk through it")
    if free < SHARED_MEMORY_FREE_MIN_BYTES:
        fix = f"make it larger, {SHARED_MEMORY_FREE_MIN_BYTES >> 20} MiB at least (containers: --shm-size=1g)"
        return warn(name, f"{free >> 20} MiB free", fix)
    return ok(name, f"{free >> 20} MiB free")


def check_process_reading(host: Host) -> Finding:
    """Between processes of one machine UCX copies by process_vm_readv, which asks for the right to trace the other."""
    name, scope = "reading other processes", host.ptrace_scope
    if host.may(_CAP_SYS_PTRACE):
        return ok(name, "allowed (CAP_SYS_PTRACE)")
    if scope is None:
        return ok(name, "allowed to processes of the same user (no Yama)")
    if scope == 0:
        return ok(name, "allowed to processes of the same user (ptrace_scope 0)")
    fix = "sysctl kernel.yama.ptrace_scope=0, or give the engines CAP_SYS_PTRACE (containers: --cap-add SYS_PTRACE)"
    return warn(name, f"not allowed (ptrace_scope {scope}): engines of one machine may fall back to tcp", fix)


def check_huge_pages(host: Host) -> Finding:
    name, setting = "huge pages", host.huge_pages
    if setting == "always":
        return ok(name, "always")
    if setting == "madvise":
        if host.environment.get("THP_MEM_ALLOC_ENABLE") == "1":
            return ok(name, "madvise, and torch asks for them (THP_MEM_ALLOC_ENABLE=1)")
        fix = "for caches in host memory: THP_MEM_ALLOC_ENABLE=1 makes torch ask for them; copies get faster"
        return warn(name, "madvise, and torch does not ask for them", fix)
    fix = "for caches in host memory: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return warn(name, setting or "the kernel has none", fix if setting else "")


def _limits(which: int) -> tuple[int | None, int | None]:
    """The soft and the hard one; None is no limit."""
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(which))
    return soft, hard


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return None


def _entries(path: str) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(path)))
    except OSError:
        return ()


def _capabilities(status: str) -> int:
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _networks() -> Iterator[str]:
    for name in _entries("/sys/class/net"):
        if name != "lo" and (_read(f"/sys/class/net/{name}/operstate") or "").strip() in ("up", "unknown"):
            yield name
