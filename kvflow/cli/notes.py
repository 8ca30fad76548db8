"""How a command tells of an error that its user can do something about."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer
from rich.console import Console


@contextlib.contextmanager
def told(command: str, *errors: type[Exception], exit_code: int = 1) -> Iterator[None]:
    """These errors end a command: one line that says why, and an exit code."""
    try:
        yield
    except errors as error:
        Console(stderr=True, highlight=False).print(f"kvflow {command}: {error}", style="red", markup=False)
        raise typer.Exit(code=exit_code) from error
