"""Extras of the kvflow package: the command that installs an extra's packages, for errors if one is missing."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires


def install_command(extra: str) -> str:
    """Return the pip command that installs the packages of an extra of kvflow.

    It does not install kvflow itself, which may be on no package index.
    """
    try:
        needed = [requirement.partition(";") for requirement in requires("kvflow") or ()]
    except PackageNotFoundError:  # kvflow runs from a checkout that is not installed
        return f"pip install '.[{extra}]'"
    names = [name.strip() for name, _, mark in needed if re.search(rf"""extra == ['"]{extra}['"]""", mark)]
    return f"pip install {shlex.join(names)}"
