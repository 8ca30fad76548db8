"""Detection of kvflow's blocking calls on an event loop (invariant I6)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from blockbuster import blockbuster_ctx


@contextlib.contextmanager
def no_blocking_calls_of_kvflow() -> Iterator[None]:
    """Make a blocking call by kvflow's code on a running event loop raise an error in the block."""
    with blockbuster_ctx("kvflow") as detector:
        for function in detector.functions.values():  # Hypothesis reads source files when a test draws on the loop
            function.can_block_in("hypothesis/internal/conjecture/providers.py", "_get_local_constants")
        # Joining a thread that is about to end takes microseconds.
        detector.functions["threading.Lock.acquire"].can_block_in("kvflow/transport/owner_thread.py", "ended")
        for name in ("os.stat", "os.listdir"):  # of /proc, which is not on a disk
            detector.functions[name].can_block_in("kvflow/runtime/open_files.py", "left")
        for name in ("io.TextIOWrapper.read", "io.BufferedReader.read"):  # in a test copies may run on the loop
            detector.functions[name].can_block_in("kvflow/staging/host_memory.py", "_lines")
        yield
