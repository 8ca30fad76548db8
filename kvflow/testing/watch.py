"""Parts of the watches that a test opens around an engine: what they have found, and when it is raised.

A watch raises where it is closed, too: an error in some background task of an engine may have been swallowed there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class Findings:
    """Findings of a watch so far."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._error: Exception | None = None

    def add(self, what: str) -> None:
        self._found.append(what)

    def fail(self, error: Exception) -> None:
        """Note that the watch could not do its work."""
        self._error = self._error or error

    def assert_none(self) -> None:
        if self._error is not None:
            raise self._error
        more = f" ({len(self._found) - 1} more were found)" if len(self._found) > 1 else ""
        assert not self._found, self._found[0] + more


@contextlib.contextmanager
def checked_at_end(check: Callable[[], None], after_error: Callable[[], None] | None = None) -> Iterator[None]:
    """Check when the block ends; what is found goes before an error of the engine that came of it.

    `after_error` is checked in its place after such an error, where less can be asked for then.
    """
    try:
        yield
    except Exception as error:
        try:
            (after_error or check)()
        except AssertionError as found:
            raise found from error
        raise
    check()
