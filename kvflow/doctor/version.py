"""Installed versions of kvflow and of the packages that it depends on, found without importing them."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import kvflow


def installed(package: str) -> str:
    """Return the installed version of the distribution `package`, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Return the versions of kvflow, nixl, torch and Python, by name."""
    packages = {package: installed(package) for package in ("nixl", "torch")}
    return {"kvflow": kvflow.__version__, **packages, "python": platform.python_version()}


def version_lines() -> str:
    return "\n".join(f"{name} {number}" for name, number in versions().items())
