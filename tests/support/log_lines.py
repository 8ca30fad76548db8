"""What a handler writes of kvflow's lines, and what would forge some: the fixture `written` is every test's."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

FORGED = "a\n2026-01-01 ERROR kvflow.forged \x1b[2J\u2028\u202e\r\x85b"
"""A request id that begins lines of its own, clears terminals and turns text around."""


class Written(logging.Handler):
    """What a handler makes of the lines, by the format of the forger's choice."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("2026-01-01 %(levelname)s %(name)s %(message)s"))
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    def assert_plain(self, *said: str) -> None:
        """There are lines that say that, and none is anybody else's."""
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
