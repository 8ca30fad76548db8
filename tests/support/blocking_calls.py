"""Finds blocking calls of kvflow's on an event loop (invariant I6)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from blockbuster import blockbuster_ctx


@contextlib.contextmanager
def no_blocking_calls_of_kvflow() -> Iterator[None]:
    """A blocking call by kvflow's own code on the loop raises."""
    with blockbuster_ctx("kvflow") as detector:
        for function in detector.functions.values():  # what tests draw on the loop, Hypothesis looks for in their files
            function.can_block_in("hypothesis/internal/conjecture/providers.py", "_get_local_constants")
        # Joining a thread that has said its last word takes microseconds.
        detector.functions["threading.Lock.acquire"].can_block_in("kvflow/transport/thread.py", "ended")
        for name in ("os.stat", "os.listdir"):  # of /proc, which is no disk
            detector.functions[name].can_block_in("kvflow/runtime/open_files.py", "left")
        for name in ("io.TextIOWrapper.read", "io.BufferedReader.read"):  # a copy thread may be no thread in a test
            detector.functions[name].can_block_in("kvflow/staging/host_memory.py", "_lines")
        yield
