"""Python sources as syntax trees."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    return parsed_text(path.read_text("utf-8"))


def parsed_text(text: str) -> ast.Module:
    """Parse `text` without a garbage collection meanwhile.

    CPython 3.11 counts the depth of a tree in one place for all parsers, so a parser that runs inside another ends the
    outer one with SystemError. A collection can start one: asyncio logs the error of a task that was never awaited, and
    the carets of its traceback are found by parsing.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if collecting:
            gc.enable()
