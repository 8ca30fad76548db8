"""kvflow for engines that are not asyncio programs: the methods of `kvflow.Runtime`, to be called from any thread.

A `blocking.Runtime` starts a thread that runs an event loop, with a `kvflow.Runtime` on that loop. A method either
blocks, for at most the call's `timeout_s` (None: as long as the work takes), or starts the work and returns immediately
(`start_load`, `start`). Without `timeout_s`, the bound is the time that Config and the request allow for the work, plus
the runtime's `call_timeout_s` in case the loop's thread is busy. Only `Runtime.open` has no bound, since opening a
`kvflow.Runtime` has none.

Progress depends on no thread of the engine. If the runtime is closed, its handle is dropped, or its loop dies, then all
waiting calls return or raise, and the thread ends.
"""

from __future__ import annotations

from kvflow.blocking.blocking_runtime import Runtime
from kvflow.blocking.handles import Lease, Load

__all__ = ["Lease", "Load", "Runtime"]
