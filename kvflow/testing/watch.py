"""Functions by which `watch_blocks`, `watch_loads` and `watch_offers` name faults, and raise errors.

Each of these context managers raises its first fault again when the `with` block ends, because a background task of the
engine may have swallowed the error at the fault itself.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence


def raise_first(found: Sequence[str | Exception]) -> None:
    """Raise the first exception in `found`, the faults so far.

    If it contains only texts, raise an AssertionError with the first text. If `found` is empty, do nothing.
    """
    for error in found:
        if isinstance(error, Exception):
            raise error
    more = f" ({len(found) - 1} more were found)" if len(found) > 1 else ""
    assert not found, f"{found[0]}{more}"


def calling_line(file: str) -> str:
    """Return the line of code outside `file` that has called into `file`, in the form `path:line (function)`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == file:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


@contextlib.contextmanager
def checked_at_end(check: Callable[[], None], after_error: Callable[[], None] | None = None) -> Iterator[None]:
    """Call `check` when the `with` block ends.

    If `check` may rightly fail after an error, give `after_error`, which is called instead if the block raises an
    error. An AssertionError of `after_error` or `check` replaces the block's error, and has the block's error as its
    cause.
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
