"""A function for another process, which raises an error sent to it. No other imports, so the process starts quickly."""

from __future__ import annotations


def raise_it(error: Exception) -> None:
    raise error
