"""What a check makes of the way that bytes took between two processes of one machine. Pure."""

from __future__ import annotations

from kvflow.bench.ucx import ReadPath
from kvflow.doctor.findings import Finding, ok, warn

_SHARED_MEMORY = ("cma/", "xpmem/", "knem/", "posix/", "sysv/")


def check_path(path: ReadPath | None, ucx_tls: str | None) -> Finding:
    """Whether two processes of one machine took the way that is best for them."""
    name = "way of the bytes"
    if path is None:
        return warn(name, "UCX did not say", "look at UCX's log: UCX_PROTO_INFO=y UCX_LOG_LEVEL=info")
    found = f"{path.over} ({path.how})"
    if path.over.startswith(_SHARED_MEMORY):
        return ok(name, f"shared memory: {found}")
    if "tcp/" not in path.over:
        return ok(name, found)
    if ucx_tls is not None:
        return ok(name, f"tcp: {found}; UCX_TLS={ucx_tls} is set")
    fix = "see /dev/shm and reading other processes; without them engines of one machine talk over tcp"
    return warn(name, f"tcp, on one machine: {found}", fix)
