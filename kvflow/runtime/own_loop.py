"""A runtime, its leases and its loads belong to the event loop that opened the runtime, and to that loop's thread."""

from __future__ import annotations

import asyncio

from kvflow.errors import UsageError


def require_loop(loop: asyncio.AbstractEventLoop | None, what: str) -> None:
    """UsageError unless this is called on `loop`, by its thread."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is not loop:
        where = "no event loop runs here" if running is None else "another loop runs here"
        raise UsageError(f"{what}: belongs to the event loop that opened the runtime, and {where}")
