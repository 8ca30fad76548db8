"""Findings of `kvflow doctor`: the result of each check in one line, with advice."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Status(enum.StrEnum):
    OK = "ok"
    WARN = "warn"
    """kvflow works, but slower than possible, or not for every use."""
    FAIL = "fail"
    """kvflow does not work until this is fixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check. `fix`: advice for the user, or ""."""

    name: str
    status: Status
    found: str
    fix: str = ""


def is_broken(findings: Iterable[Finding]) -> bool:
    return any(finding.status is Status.FAIL for finding in findings)


def ok(name: str, found: str) -> Finding:
    return Finding(name=name, status=Status.OK, found=found)


def warn(name: str, found: str, fix: str) -> Finding:
    return Finding(name=name, status=Status.WARN, found=found, fix=fix)


def fail(name: str, found: str, fix: str) -> Finding:
    return Finding(name=name, status=Status.FAIL, found=found, fix=fix)
