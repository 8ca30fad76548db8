"""Shared parts of the watches that a test opens around an engine: how findings are named, kept and raised.

A watch raises its first finding again when its block ends: the error raised at the fault itself may have been swallowed
by a background task of the engine.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence


def raise_first(found: Sequence[str | Exception]) -> None:
    """Raise the first exception in `found`, else its first text as an AssertionError. If it is empty, do nothing."""
    for error in found:
        if isinstance(error, Exception):
            raise error
    more = f" ({len(found) - 1} more were found)" if len(found) > 1 else ""
    assert not found, f"{found[0]}{more}"


def calling_line(file: str) -> str:
    """Return the line outside `file` from which the running code of `file` was called: `path:line (function)`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == file:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


@contextlib.contextmanager
def checked_at_end(check: Callable[[], None], after_error: Callable[[], None] | None = None) -> Iterator[None]:
    """Call `check` when the block ends.

    If the block raised, call `after_error` instead where it is given, since less may hold then. An AssertionError of
    that check replaces the block's error, which becomes its cause.
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
