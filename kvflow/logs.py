"""kvflow's loggers: the arguments of a log line become printable, bounded text, so that no argument can forge a line.

Request ids, reasons, file names and errors contain text of callers, peers and routers. A line break in it would begin a
line that looks like another log record. So each logger of kvflow has a filter, which changes each record before the
handlers get it: numbers stay unchanged, every other argument becomes text of one line. The lines of a traceback are
indented, so that no line looks like a record.
"""

from __future__ import annotations

import logging
import traceback
from types import TracebackType

from kvflow.checks import counted, printable, try_call
from kvflow.errors import ERROR_CHARS_MAX, shortened

_CHARS_MAX = ERROR_CHARS_MAX - 100  # leaves room for the time, level and logger that a handler adds
"""Maximum number of characters of an argument, of a log line, and of each line of a traceback."""
_ARGUMENTS_CHARS = 1000  # with fewer characters in its arguments a line is short enough: kvflow's own words are few
_TRACEBACK_LINES_MAX = 200
_INDENT = "    "


def logger_of(name: str) -> logging.Logger:
    """Return the logger of module `name`, with the filter that makes the arguments of log lines printable."""
    logger = logging.getLogger(name)
    logger.addFilter(_make_plain)
    return logger


def _make_plain(record: logging.LogRecord) -> bool:
    """Make the arguments and the traceback of a log record printable. This is the filter of all kvflow's loggers.

    Always return True, so that no record is left out.
    """
    if isinstance(record.args, tuple):
        record.args = tuple(map(_plain, record.args))
        if sum(len(argument) for argument in record.args if isinstance(argument, str)) > _ARGUMENTS_CHARS:
            record.msg, record.args = shortened(record.getMessage(), _CHARS_MAX), ()
    if record.exc_info and record.exc_info[1] is not None:
        record.exc_text = _traceback(record.exc_info[1], record.exc_info[2])
    return True


def _plain(value: object) -> object:
    """Return an argument of a log line: a number unchanged, any other value as text of one line."""
    if type(value) in (int, float, bool):
        return value
    text = try_call(lambda: str(value))
    return f"a {type(value).__name__}" if text is None else shortened(printable(text, 4 * _CHARS_MAX), _CHARS_MAX)


def _traceback(error: BaseException, where: TracebackType | None) -> str:
    """Return the traceback of `error` as printable text. `where`: the traceback object.

    The text is for a log record's `exc_text`, which a `logging.Formatter` uses if it is set.
    """
    lines = "".join(traceback.format_exception(type(error), error, where)).splitlines()
    if len(lines) > _TRACEBACK_LINES_MAX:
        left_out = f"... {counted(len(lines) - _TRACEBACK_LINES_MAX, 'line')} ..."
        lines = [*lines[: _TRACEBACK_LINES_MAX // 2], left_out, *lines[-_TRACEBACK_LINES_MAX // 2 :]]
    return "\n".join(_INDENT + shortened(printable(line, 4 * _CHARS_MAX), _CHARS_MAX) for line in lines)
