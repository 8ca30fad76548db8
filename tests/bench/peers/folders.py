"""The folders of `dev.py peers`: libraries that must not be mixed with what the environment has installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def folder(name: str) -> Path | None:
    """Return the folder `name`, if `dev.py` has made it."""
    home = os.environ.get("KVFLOW_PEERS_HOME")
    found = Path(home, name) if home else None
    return found if found and found.is_dir() else None


def import_from(name: str) -> None:
    """Have this process look for modules in the folder `name` first."""
    if (found := folder(name)) and str(found) not in sys.path:
        sys.path.insert(0, str(found))
