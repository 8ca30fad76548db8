"""Facts of the machine, read by `read_host`, and the checks that judge them.

Limits that the kernel or a container sets are read from /proc, /sys and getrlimit.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvflow.checks import counted
from kvflow.config import Config
from kvflow.doctor.findings import Finding, fail, ok, warn
from kvflow.runtime.open_files import ANSWER_FILES, PEER_FILES, QUESTION_FILES, READER_FILES, RUNTIME_FILES, needed

SHARED_MEMORY_FREE_MIN_BYTES = 256 << 20
_CAP_IPC_LOCK, _CAP_SYS_PTRACE = 14, 19
_VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES", "THP_MEM_ALLOC_ENABLE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Facts of the machine and of this process. Unless a field says otherwise, None means unknown."""

    locked_bytes_max: int | None
    """Limit of locked memory of a process, in bytes; None: no limit."""
    open_files_max: int | None
    """Soft limit of open files of a process, sockets included; None: no limit."""
    open_files_hard_max: int | None
    """Hard limit of open files, up to which a process may raise its soft limit; None: no limit."""
    capabilities: int
    """Effective capabilities of this process, as a bit mask."""
    shared_memory_free_bytes: int | None
    """Free bytes in /dev/shm; None if it does not exist."""
    ptrace_scope: int | None
    """Value of the kernel setting ptrace_scope, by which Yama limits tracing; None if the kernel has no Yama."""
    huge_pages: str | None
    """Setting of transparent huge pages: always, madvise or never."""
    rdma_devices: tuple[str, ...]
    networks: tuple[str, ...]
    """Network interfaces that are up, without the loopback."""
    gpus: tuple[str, ...]
    """PCI addresses of the NVIDIA GPUs."""
    environment: Mapping[str, str]
    """Values by name of environment variables that change how kvflow moves bytes; only those that are set."""

    def has_capability(self, capability: int) -> bool:
        return bool(self.capabilities >> capability & 1)


def read_host() -> Host:
    limits = [
        None if limit == resource.RLIM_INFINITY else limit
        for which in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)
        for limit in resource.getrlimit(which)
    ]
    status = dict(line.split(":", 1) for line in _read("/proc/self/status").splitlines())
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    huge_pages = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    up = ("up", "unknown")
    return Host(
        locked_bytes_max=limits[0],
        open_files_max=limits[2],
        open_files_hard_max=limits[3],
        capabilities=int(status.get("CapEff", "0"), 16),
        shared_memory_free_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        ptrace_scope=int(scope) if scope else None,
        huge_pages=huge_pages.partition("[")[2].partition("]")[0] or None,
        rdma_devices=directory_entries("/sys/class/infiniband"),
        networks=tuple(
            name
            for name in directory_entries("/sys/class/net")
            if name != "lo" and _read(f"/sys/class/net/{name}/operstate").strip() in up
        ),
        gpus=directory_entries("/proc/driver/nvidia/gpus"),
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
    )


def has_gpus(host: Host) -> bool:
    """Return True if an NVIDIA driver is loaded: `host` lists GPUs, or /dev/nvidiactl exists.

    Some containers hide /proc, where the GPUs are listed, but not /dev/nvidiactl.
    """
    return bool(host.gpus) or os.path.exists("/dev/nvidiactl")


def _read(path: str) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""


def directory_entries(path: str) -> tuple[str, ...]:
    """Return the sorted names in the folder `path`; an empty tuple if it cannot be read."""
    try:
        return tuple(sorted(os.listdir(path)))
    except OSError:
        return ()


# --- the checks: each gets its own name, the facts, and the config of an engine


def check_devices(name: str, host: Host, _: Config) -> Finding:
    kinds = (("RDMA", host.rdma_devices), ("network", host.networks), ("GPU", host.gpus))
    found = [f"{kind}: {', '.join(names) or 'none'}" for kind, names in kinds]
    by_hand = ", ".join(f"{name}={value}" for name, value in host.environment.items() if name.startswith("UCX_"))
    return ok(name, "; ".join([*found, by_hand] if by_hand else found))


def check_memory_locking(name: str, host: Host, _: Config) -> Finding:
    """Check the limit of locked memory. Only RDMA needs it: registering memory with an RDMA device locks the memory."""
    if host.locked_bytes_max is None:
        return ok(name, "no limit")
    if host.has_capability(_CAP_IPC_LOCK):
        return ok(name, "limited, but the process may exceed it (CAP_IPC_LOCK)")
    found = f"at most {host.locked_bytes_max >> 10} KiB"
    if host.rdma_devices:
        fix = "raise `ulimit -l` to unlimited (containers: --ulimit memlock=-1): RDMA pins the whole cache"
        return fail(name, found, fix)
    return ok(name, f"{found}; only RDMA needs more, and there is no RDMA device")


def check_open_files(name: str, host: Host, config: Config) -> Finding:
    """Check this process's limit of open files, which an engine started in the same way also has.

    Only the hard limit counts: a runtime raises its soft limit to the hard limit when it opens.
    """
    soft, hard, least = host.open_files_max, host.open_files_hard_max, needed(config)
    if soft is None or soft >= least:
        return ok(name, f"{'no limit' if soft is None else f'at most {soft}'}, {least} needed at most")
    if hard is None or hard >= least:
        raised = "without limit" if hard is None else f"to {hard}"
        return ok(name, f"at most {soft}, which a runtime raises {raised}; {least} needed at most")
    found = f"at most {hard} (soft limit {soft})"
    elsewhere = f"systemd: LimitNOFILE={least}, containers: --ulimit nofile={least}"
    fix = f"ulimit -Hn {least} as root where the engine is started ({elsewhere}), or /etc/security/limits.conf"
    if hard < RUNTIME_FILES:
        return fail(name, f"{found}: too few for a runtime without any peer", fix)
    neighbours = (hard - RUNTIME_FILES) // (PEER_FILES + QUESTION_FILES + READER_FILES + ANSWER_FILES)
    return warn(
        name,
        f"{found}: enough for some {counted(neighbours, 'other rank')}, not for as many as Config allows "
        f"(peers_max {config.limits.peers_max}, readers_max {config.limits.readers_max})",
        fix,
    )


def check_shared_memory(name: str, host: Host, _: Config) -> Finding:
    free = host.shared_memory_free_bytes
    if free is None:
        return warn(name, "does not exist", "mount a tmpfs there: engines on one machine talk through it")
    if free < SHARED_MEMORY_FREE_MIN_BYTES:
        fix = f"make it larger, {SHARED_MEMORY_FREE_MIN_BYTES >> 20} MiB at least (containers: --shm-size=1g)"
        return warn(name, f"{free >> 20} MiB free", fix)
    return ok(name, f"{free >> 20} MiB free")


def check_process_reading(name: str, host: Host, _: Config) -> Finding:
    """Check whether engines have the permission to trace other processes (ptrace).

    Without this permission UCX cannot read another process's memory by the system call process_vm_readv.
    """
    scope = host.ptrace_scope
    if host.has_capability(_CAP_SYS_PTRACE):
        return ok(name, "allowed (CAP_SYS_PTRACE)")
    if not scope:
        why = "no Yama" if scope is None else "ptrace_scope 0"
        return ok(name, f"allowed to processes of the same user ({why}); engines of two users use tcp")
    fix = "sysctl kernel.yama.ptrace_scope=0, or give the engines CAP_SYS_PTRACE (containers: --cap-add SYS_PTRACE)"
    return warn(name, f"not allowed (ptrace_scope {scope}): engines of one machine may fall back to tcp", fix)


def check_huge_pages(name: str, host: Host, _: Config) -> Finding:
    setting, asked_for = host.huge_pages, host.environment.get("THP_MEM_ALLOC_ENABLE") == "1"
    if setting == "always":
        return ok(name, "always")
    if setting == "madvise" and asked_for:
        return ok(name, "madvise, and torch asks for them (THP_MEM_ALLOC_ENABLE=1)")
    if setting == "madvise":
        fix = "for caches in host memory: THP_MEM_ALLOC_ENABLE=1 makes torch ask for them; copies get faster"
        return warn(name, "madvise, and torch does not ask for them", fix)
    fix = "for caches in host memory: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return warn(name, setting or "the kernel has none", fix if setting else "")


CHECKS: Mapping[str, Callable[[str, Host, Config], Finding]] = {
    "devices": check_devices,
    "memory locking": check_memory_locking,
    "open files": check_open_files,
    "/dev/shm": check_shared_memory,
    "reading other processes": check_process_reading,
    "huge pages": check_huge_pages,
}


def check_host(host: Host, config: Config) -> Iterator[Finding]:
    return (check(name, host, config) for name, check in CHECKS.items())
