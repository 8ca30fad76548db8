"""Memory of the host in huge pages, as far as the kernel gives them: what another process reads or is read into.

Over shared memory the kernel copies page by page, after it has looked each of them up. A read of 8 MiB into small pages
took a tenth longer than into huge ones, one from small pages up to twice as long (docs/decisions/0027-copies.md).
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

HUGE_PAGE_BYTES = 2 << 20


def host_pages(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes that have no memory before they are written, from the start of a huge page on if they fill one."""
    huge_bytes = size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES  # the rest would take a whole one
    if not huge_bytes:
        return np.zeros(size_bytes, dtype=np.uint8)
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    space: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
    start = -space.ctypes.data % HUGE_PAGE_BYTES
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, huge_bytes)
    return space[start : start + size_bytes]
