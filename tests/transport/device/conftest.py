"""These tests run on asyncio and on uvloop, with blocking calls detected."""

from __future__ import annotations

from both_loops import no_blocking_calls, pair, pytest_asyncio_loop_factories

__all__ = ["no_blocking_calls", "pair", "pytest_asyncio_loop_factories"]
