"""A helper: a second thread that does a share of the copy thread's work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Helper:
    """Another thread, for the one that owns it. It is started by the first work that is shared, and stays."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: ThreadPoolExecutor | None = None

    def share(self, work: Callable[[], T]) -> list[T]:
        """Call `work` here and on the helper at once: what each call has returned.

        Raises what one of them has raised, after both have ended.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, self._name)
        theirs = self._threads.submit(work)
        try:
            found = [work()]
        finally:
            theirs.exception()  # waits
        return [*found, theirs.result()]

    def end(self) -> None:
        """End the thread, which has nothing to do."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
