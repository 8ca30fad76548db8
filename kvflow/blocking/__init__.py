"""kvflow for engines that are not asyncio programs: the same verbs, called from any thread.

`Runtime` is the handle of a thread with an event loop of its own, and on it a `kvflow.Runtime`. Every verb comes in two
forms: one that blocks and has a bound, and one that starts the work and returns at once (`start_load`, `start`). The
bound is the `timeout_s` of the call, where None is as long as it takes; without one, the time that Config and the
request allow for what is asked, and `call_timeout_s` of the Runtime for the loop's thread. `Runtime.open` alone has
none, as opening a `kvflow.Runtime` has none.

Progress depends on no thread of the engine. Nothing is left behind: closing, dropping the handle, or the death of the
loop settles whoever waits, and the thread ends.
"""

from __future__ import annotations

from kvflow.blocking.handles import Lease, Load
from kvflow.blocking.runtime import Runtime

__all__ = ["Lease", "Load", "Runtime"]
