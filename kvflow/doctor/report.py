"""The findings as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvflow.doctor.findings import Finding, Status, is_broken

SCHEMA_VERSION = 1
_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "broken": is_broken(findings),
        "findings": [asdict(finding) for finding in findings],
    }


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("")
    table.add_column("found", overflow="fold")
    for finding in findings:
        status = Text(finding.status.upper(), style=_STYLES[finding.status])
        table.add_row(finding.name, status, Text(finding.found))
        if finding.fix:
            table.add_row("", "", Text(f"-> {finding.fix}", style="italic"))
    console.print(table)
    if is_broken(findings):
        console.print("something is broken: see FAIL", style="bold red")
