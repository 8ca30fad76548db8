"""kvflow for engines that are not asyncio programs: the methods of `kvflow.Runtime`, called from any thread.

`blocking.Runtime` is the handle of a thread that runs an event loop, and a `kvflow.Runtime` on that loop. A method
either blocks, for a bounded time, or starts the work and returns at once (`start_load`, `start`). The bound is the
`timeout_s` of the call, where None waits as long as it takes. Methods without `timeout_s` are bounded by the time that
Config and the request allow for the work, plus the runtime's `call_timeout_s` in case the loop's thread is busy. Only
`Runtime.open` has no bound, since opening a `kvflow.Runtime` has none.

Progress depends on no thread of the engine. Nothing is left behind: if the runtime is closed, its handle is dropped, or
its loop dies, then all waiting calls return or raise, and the thread ends.
"""

from __future__ import annotations

from kvflow.blocking.blocking_runtime import Runtime
from kvflow.blocking.handles import Lease, Load

__all__ = ["Lease", "Load", "Runtime"]
