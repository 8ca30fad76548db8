"""Parts that a request or a device asks for, by name. The core imports none of them: each is imported at its first use.

A part is whole in its folder. Without the folder, its tests and its row here everything else works, and a request that
needs the part says so. Parts with settings or state of their own have no row: they are given to `Runtime(parts=[...])`.

The module of a part that one registration keeps has `begin(cache)`, which makes it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType

from kvflow.errors import KVFlowError, RequestError

PARTS: Mapping[str, str] = {
    "failover": "kvflow.failover.several_tickets",  # loads of several tickets, or with `again`
    "growing": "kvflow.growing.growing_loads",  # prompts that are still being computed, offers that are still to come
    "staging": "kvflow.staging.buffered",  # caches that peers cannot read, and blocks in small pieces
    "verify": "kvflow.verify.verifying",  # loads that are compared with the producer, and questions of such readers
}
"""Module of each part by the name of its folder."""


def part(name: str, what: str, kind: type[KVFlowError] = RequestError) -> ModuleType:
    """Import a part at its first use.

    Args:
        name: folder of the part.
        what: what needs it, for the error.
        kind: the error if the part is not there.

    Returns:
        The part's module in `PARTS`.

    Raises:
        RequestError: The part is not there; or `kind`.
    """
    with needing(name, what, kind):
        return importlib.import_module(PARTS[name])


@contextlib.contextmanager
def needing(name: str, what: str, kind: type[KVFlowError]) -> Iterator[None]:
    """Import modules that need a part. If the part is not there, `kind` says that `what` needs it."""
    try:
        yield
    except (KeyError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{error.name}.".startswith(f"kvflow.{name}."):
            raise  # the part is there, and something that it imports is not
        raise kind(f"{what} needs kvflow.{name}, which is not there") from error


def preload(*names: str) -> None:
    """Import parts now, so that no loop waits for that at the first request that needs one; missing ones are left out.

    Args:
        names: of parts in `PARTS`.
    """
    for name in names:
        with contextlib.suppress(RequestError):
            part(name, "preload")
