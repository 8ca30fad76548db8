"""Entry point of the `kvflow` command: says what to install when the extra `kvflow[cli]` is missing.

Everything that needs typer or rich is imported behind the check, so a bare installation of kvflow gets one clear
sentence instead of a traceback.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import requires
from importlib.util import find_spec

from kvflow.doctor.version import version_lines

_EXTRA_MODULES = ("typer", "rich")


def missing_modules() -> tuple[str, ...]:
    """Modules of the extra that are not installed."""
    return tuple(name for name in _EXTRA_MODULES if find_spec(name) is None)


def install_line() -> str:
    """Of the extra's own packages: kvflow itself may have come from a checkout, and be on no index."""
    needed = [one.partition(";") for one in requires("kvflow") or ()]
    names = [name.strip() for name, _, mark in needed if re.search(r"""extra == ['"]cli['"]""", mark)]
    return f"pip install {shlex.join(names)}"


def main() -> None:
    if sys.argv[1:] == ["--version"]:  # needs no extra
        print(version_lines())
        return
    missing = missing_modules()
    if missing:
        sys.exit(f"kvflow: the command line needs {' and '.join(missing)}; install them with: {install_line()}")
    from kvflow.cli.app import app

    app()


if __name__ == "__main__":
    main()
