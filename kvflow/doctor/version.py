"""Versions installed here: kvflow, and what it stands on. Nothing of that is imported to find out."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import kvflow


def installed(package: str) -> str:
    """Installed version of a package, as pip knows it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Versions by name, kvflow first."""
    stands_on = {package: installed(package) for package in ("nixl", "torch")}
    return {"kvflow": kvflow.__version__, **stands_on, "python": platform.python_version()}


def version_lines() -> str:
    return "\n".join(f"{name} {number}" for name, number in versions().items())
