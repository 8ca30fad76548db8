"""Parts of the watches that a test opens around an engine: what they have found, and when it is raised.

A watch raises where it is closed, too: an error in some background task of an engine may have been swallowed there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence


def raise_first(found: Sequence[str | Exception]) -> None:
    """Raise what a watch has found: an error that kept it from its work, or the first finding as an AssertionError."""
    for error in found:
        if isinstance(error, Exception):
            raise error
    more = f" ({len(found) - 1} more were found)" if len(found) > 1 else ""
    assert not found, f"{found[0]}{more}"


def calling_line(file: str) -> str:
    """Return the line that has called into `file`, as findings name it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == file:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


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
