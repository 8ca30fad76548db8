"""The log lines that a handler writes, and a text that tries to forge lines. All tests have the fixture `written`."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

FORGED = "a\n2026-01-01 ERROR kvflow.forged \x1b[2J\u2028\u202e\r\x85b"
"""A request id that starts new lines, clears terminals and reverses text."""


class Written(logging.Handler):
    """A handler that keeps the formatted lines. Its format is that of the forged line."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("2026-01-01 %(levelname)s %(name)s %(message)s"))
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    def assert_plain(self, *said: str) -> None:
        """Assert that each text in `said` is in a line, and that no line was forged."""
        for text in self.texts:
            first, *traceback = text.split("\n")
            assert first.isprintable(), text
            assert all(line.startswith("    ") and line.isprintable() for line in traceback), text
        for words in said:
            assert any(words in text for text in self.texts), f"{words!r} is not in {self.texts}"


@pytest.fixture
def written() -> Iterator[Written]:
    logger, handler = logging.getLogger("kvflow"), Written()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)
