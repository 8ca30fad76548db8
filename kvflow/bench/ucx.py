"""The path that reads take, found in the tables that UCX logs with UCX_PROTO_INFO=y.

UCX logs the transport of each operation on a connection, by ranges of sizes:

    | reader/0.0.0 intra-node cfg#1                                    |
    | remote memory read by ucp_get*(multi) into host memory from host |
    | Range  | Description | Config                                    |
    | 0..inf | zero-copy   | cma/memory                                |

This log is the only reliable source of UCX's choice. Between caches in GPU memory the operation is "into cuda/GPU0 from
cuda", and the path is cuda_ipc/cuda (NVLink, or the same GPU), rc_mlx5/mlx5_0:1 (RDMA), or "software emulation" over
some transport, where the peer's process copies for the reader.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvflow.bench.child import QUIET_ENVIRONMENT

_OPERATION = "remote memory read by ucp_get"
_SIZE = r"\d+[KMGT]?"
_RANGE = re.compile(rf"({_SIZE})(?:\.\.({_SIZE}|inf))?")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class ReadPath(NamedTuple):
    """How UCX performs reads of one size, in UCX's words: the method, and the transport with its device."""

    method: str
    transport: str

    def __str__(self) -> str:
        return f"{self.transport} ({self.method})"


class UcxLog:
    """The folder for the UCX logs of child processes that are started with `environment`.

    A log is complete once its child process has ended.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self.environment = {**QUIET_ENVIRONMENT, "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": f"{folder}/%p.log"}

    def read_path(self, pid: int, size_bytes: int) -> ReadPath | None:
        """Return how the ended process `pid` performed reads of `size_bytes`; None if its UCX log does not say."""
        text = "".join(file.read_text(errors="replace") for file in self._folder.glob(f"{pid}.log*"))
        return read_path(text, size_bytes)


@contextlib.contextmanager
def ucx_log() -> Iterator[UcxLog]:
    with tempfile.TemporaryDirectory(prefix="kvflow-ucx-") as folder:
        yield UcxLog(folder)


def read_path(log: str, size_bytes: int) -> ReadPath | None:
    """Return how the process that wrote `log` reads `size_bytes` from another process; None if `log` does not say."""
    path = None
    owner, reading = "", False
    for cells in _table_rows(log):
        match cells:
            case [text] if _OPERATION in text:
                reading = " self " not in owner
            case [text]:
                owner, reading = text, False
            case [sizes, method, transport] if reading and _range_covers(sizes, size_bytes):
                path = ReadPath(method, transport)
    return path


def _table_rows(log: str) -> Iterator[list[str]]:
    """Yield each row of the tables in `log`, as a list of its cells."""
    for line in log.splitlines():
        _, bar, rest = line.partition("| ")
        if bar and rest.endswith("|"):
            yield [cell.strip() for cell in rest[:-1].split("|")]


def _range_covers(sizes: str, size_bytes: int) -> bool:
    match = _RANGE.fullmatch(sizes)
    if match is None:
        return False
    first, last = match[1], match[2] or match[1]
    return _parse_size(first) <= size_bytes and (last == "inf" or size_bytes <= _parse_size(last))


def _parse_size(size: str) -> int:
    """Return the number of bytes in one of UCX's sizes, such as "8K". K, M, G and T are powers of 1024."""
    unit = _UNITS.get(size[-1])
    return int(size) if unit is None else int(size[:-1]) * unit
