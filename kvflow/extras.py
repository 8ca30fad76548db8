"""Extras of the package: the line that installs one's packages, for messages where one is missing."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires


def install_line(extra: str) -> str:
    """Command that installs an extra's own packages: kvflow itself may come from a checkout, and be on no index."""
    try:
        needed = [one.partition(";") for one in requires("kvflow") or ()]
    except PackageNotFoundError:  # run from a checkout that is not installed
        return f"pip install '.[{extra}]'"
    names = [name.strip() for name, _, mark in needed if re.search(rf"""extra == ['"]{extra}['"]""", mark)]
    return f"pip install {shlex.join(names)}"
