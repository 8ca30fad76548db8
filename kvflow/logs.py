"""kvflow's loggers: all arguments of a log line are made printable and bounded, so that none begins a line.

Request ids, reasons, file names and errors carry text of callers, peers and routers. Raw, a line break in one begins a
log line of its own, which reads as anybody's. Each logger of kvflow has one filter, which sees each record before any
handler does: numbers stay as they are, anything else becomes text of one line, and a traceback's lines are indented, so
that none begins as a record does. Nothing is done for a line that is not wanted.
"""

from __future__ import annotations

import logging
import traceback
from types import TracebackType

from kvflow.checks import answer, counted, printable
from kvflow.errors import ERROR_CHARS_MAX, shortened

_CHARS_MAX = ERROR_CHARS_MAX - 100  # a handler adds time, level and logger
"""Longest argument of a log line, and longest line, of a traceback's, too."""
_ARGUMENTS_CHARS = 1000  # a line whose arguments are shorter is no long one: our own words are few
_TRACEBACK_LINES_MAX = 200
_INDENT = "    "


def logger_of(name: str) -> logging.Logger:
    """The logger of a module of kvflow."""
    logger = logging.getLogger(name)
    logger.addFilter(_make_plain)
    return logger


def _make_plain(record: logging.LogRecord) -> bool:
    """Filter that keeps every record, with its arguments made printable."""
    if isinstance(record.args, tuple):
        record.args = tuple(map(_plain, record.args))
        if sum(len(one) for one in record.args if isinstance(one, str)) > _ARGUMENTS_CHARS:
            record.msg, record.args = shortened(record.getMessage(), _CHARS_MAX), ()
    if record.exc_info and record.exc_info[1] is not None:
        record.exc_text = _traceback(record.exc_info[1], record.exc_info[2])
    return True


def _plain(value: object) -> object:
    """Argument of a log line: a number as it is, anything else as text of one line."""
    if type(value) in (int, float, bool):
        return value
    text = answer(lambda: str(value))
    return f"a {type(value).__name__}" if text is None else shortened(printable(text, 4 * _CHARS_MAX), _CHARS_MAX)


def _traceback(error: BaseException, where: TracebackType | None) -> str:
    """Text of an error as handlers show it; a Formatter that finds it makes none of its own."""
    lines = "".join(traceback.format_exception(type(error), error, where)).splitlines()
    if len(lines) > _TRACEBACK_LINES_MAX:
        left_out = f"... {counted(len(lines) - _TRACEBACK_LINES_MAX, 'line')} ..."
        lines = [*lines[: _TRACEBACK_LINES_MAX // 2], left_out, *lines[-_TRACEBACK_LINES_MAX // 2 :]]
    return "\n".join(_INDENT + shortened(printable(line, 4 * _CHARS_MAX), _CHARS_MAX) for line in lines)
