"""What UCX itself says of the way that bytes take: the tables that UCX_PROTO_INFO=y makes it log. Pure.

For every kind of operation on a connection UCX logs which range of sizes goes which way, such as

    | reader/0.0.0 intra-node cfg#1                                    |
    | remote memory read by ucp_get*(multi) into host memory from host |
    | Range  | Description | Config                                    |
    | 0..inf | zero-copy   | cma/memory                                |

which is the one reliable source: what is allowed (UCX_TLS) and what exists does not tell what was chosen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from kvflow.doctor.findings import Finding, ok, warn

_OPERATION = "remote memory read by ucp_get"
_RANGE = re.compile(r"(\d+)(?:\.\.(\d+|inf))?")
_SHARED_MEMORY = ("cma/", "xpmem/", "knem/", "posix/", "sysv/")


class ReadPath(NamedTuple):
    """How reads of some size are done, and over what, in UCX's words."""

    how: str
    over: str


def read_path(log: str, size_bytes: int) -> ReadPath | None:
    """How a process whose UCX wrote `log` reads pieces of this size from another process; None if it does not say."""
    found = None
    owner, reading = "", False
    for cells in _rows(log):
        match cells:
            case [text] if _OPERATION in text:
                reading = " self " not in owner
            case [text]:
                owner, reading = text, False
            case [sizes, how, over] if reading and _covers(sizes, size_bytes):
                found = ReadPath(how, over)
    return found


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


def _rows(log: str) -> Iterator[list[str]]:
    """The cells of every table row."""
    for line in log.splitlines():
        _, bar, rest = line.partition("| ")
        if bar and rest.endswith("|"):
            yield [cell.strip() for cell in rest[:-1].split("|")]


def _covers(sizes: str, size_bytes: int) -> bool:
    match = _RANGE.fullmatch(sizes)
    if match is None:
        return False
    first, last = match[1], match[2] or match[1]
    return int(first) <= size_bytes and (last == "inf" or size_bytes <= int(last))
