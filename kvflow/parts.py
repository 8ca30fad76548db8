"""Parts that a request asks for, by name. The core imports none of them: each is imported at its first use.

A part is whole in its folder. Without the folder, its tests and its row here everything else works, and a request that
needs the part says so. Parts with settings or state of their own have no row: they are given to `Runtime(parts=[...])`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType

from kvflow.errors import RequestError

PARTS: Mapping[str, str] = {
    "failover": "kvflow.failover.several_tickets",  # loads of several tickets, or with `again`
}
"""Module of each part by the name of its folder."""


def part(name: str, what: str) -> ModuleType:
    """Import a part at its first use.

    Args:
        name: folder of the part.
        what: what needs it, for the error.

    Returns:
        The part's module in `PARTS`.

    Raises:
        RequestError: The part is not there.
    """
    try:
        return importlib.import_module(PARTS[name])
    except (KeyError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and not PARTS[name].startswith(error.name or PARTS[name]):
            raise  # the part is there, and something that it imports is not
        raise RequestError(f"{what} needs kvflow.{name}, which is not there") from error
