"""Starting threads where the system may be at its limit of threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvflow.errors import ConfigError


@contextlib.contextmanager
def starting(what: str) -> Iterator[None]:
    """Start a thread for `what` in this context: ConfigError if the system starts none (in Python a RuntimeError)."""
    try:
        yield
    except RuntimeError as error:
        limits = "`ulimit -u`, or the pids limit of the container"
        raise ConfigError(f"{what}: the system starts no further thread ({error}): raise {limits}") from error
