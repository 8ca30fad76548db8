"""The optional features ("parts") that a request or a device may need.

Each part is imported at its first use, and is complete in its folder. If the folder, its tests and its rows in `PARTS`
and `REQUESTS` are deleted, everything else works, and a request that needs the part fails with an error that names the
part. Parts with settings or state have no row: users pass them to `Runtime(parts=[...])`.

A part that keeps state for a registered cache has a function `begin(host)` in its module, which returns that state.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType

from kvflow.errors import KVFlowError, RequestError

PARTS: Mapping[str, str] = {
    "failover": "kvflow.failover.several_tickets",  # loads of several tickets, or with `again`
    "growing": "kvflow.growing.growing_loads",  # prompts that are still being computed, and pending tickets
    "staging": "kvflow.staging.buffered",  # caches that peers cannot read, and blocks in small pieces
    "verify": "kvflow.verify.verifying",  # loads that compare digests, and the producer's answers to them
}
"""Full name of each optional part's module, by the name of the part's folder in kvflow/."""

REQUESTS: Mapping[str, str] = {
    "growing": "kvflow.growing.decline_request",
    "verify": "kvflow.verify.digest_request",
}
"""Full name of the module with `REQUEST`, the type of requests from peers to an optional part, by the part's name.

These modules are imported when a runtime opens, so that its listener decodes these requests.
"""


def import_part(name: str, what: str, kind: type[KVFlowError] = RequestError) -> ModuleType:
    """Import and return the module of an optional part, a name in `PARTS`.

    `what`: name of the request or device that needs the part, for the error.

    Raises:
        KVFlowError: of class `kind`, if the part is missing.
    """
    with importing_part(name, what, kind):
        return importlib.import_module(PARTS[name])


@contextlib.contextmanager
def importing_part(name: str, what: str, kind: type[KVFlowError]) -> Iterator[None]:
    """Context manager around imports from the optional part `name`.

    If the part or another one that it imports is missing, raise an error of class `kind`, which says that `what`, a
    request or device, needs it.
    """
    try:
        yield
    except (KeyError, ModuleNotFoundError) as error:
        package, _, module = (f"kvflow.{name}" if isinstance(error, KeyError) else str(error.name)).partition(".")
        if package != "kvflow":
            raise  # the part is there, but a package that it imports is missing
        raise kind(f"{what} needs kvflow.{module.partition('.')[0]}, which is not installed") from error


def preload(*names: str) -> None:
    """Import optional parts, names in `PARTS`, so that the first request does not block the event loop for the imports.

    A part that is not installed (its folder was deleted) is skipped.
    """
    for name in names:
        with contextlib.suppress(RequestError):
            import_part(name, "preload")
