"""Ranks that tests of the bench start in child processes, which import this module."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator


class Rank:
    """A rank with a step for each way in which a step can end."""

    async def add(self, one: int, *, other: int) -> int:
        return one + other

    async def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    async def fail(self) -> None:
        raise ZeroDivisionError("as it was told to")

    async def die(self) -> None:
        os._exit(3)


@contextlib.asynccontextmanager
async def open_rank() -> AsyncIterator[Rank]:
    yield Rank()


@contextlib.asynccontextmanager
async def open_never() -> AsyncIterator[Rank]:
    raise ZeroDivisionError("as it was told to")
    yield
