"""What another process imports to raise an error that it was sent: nothing else, so that it starts quickly."""

from __future__ import annotations


def raise_it(error: Exception) -> None:
    raise error
