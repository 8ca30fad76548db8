"""Entry point of the `kvflow` command. If the extra `kvflow[cli]` is missing, the command says what to install.

Modules that need typer or rich are imported only after that check.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from kvflow.doctor.version import version_lines
from kvflow.extras import install_command

_MODULES = ("typer", "rich")


def missing_modules() -> tuple[str, ...]:
    """Return the names of the modules of the extra `kvflow[cli]` that are not installed."""
    return tuple(name for name in _MODULES if find_spec(name) is None)


def main() -> None:
    if sys.argv[1:] == ["--version"]:  # needs no extra
        print(version_lines())
        return
    missing = missing_modules()
    if missing:
        sys.exit(f"kvflow: the command line needs {' and '.join(missing)}; install it with: {install_command('cli')}")
    from kvflow.cli.app import app

    app()


if __name__ == "__main__":
    main()
