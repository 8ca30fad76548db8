"""The report of a run as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from kvflow.bench.scenario import Report, Table
from kvflow.bench.targets import TargetRow, Verdict

_VERDICT_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.NOT_MEASURED: "dim"}


def as_json(report: Report) -> dict[str, Any]:
    """Every number of the report. Units are in the names; 'GB' is 10**9 bytes, a size of '16 MB' is 16 * 2**20."""
    outcome = asdict(report.outcome)
    return {
        "schema_version": report.scenario.SCHEMA_VERSION,
        "settings": asdict(report.scenario),
        "machine": report.machine,
        **outcome["results"],
        "targets": outcome["targets"],
    }


def print_report(report: Report, console: Console) -> None:
    for table in report.outcome.tables:
        console.print(_render(table))
    console.print(_render_targets(report.outcome.targets))


def _render(table: Table) -> RichTable:
    made = RichTable(title=table.title, caption=table.caption, box=box.SIMPLE_HEAD, pad_edge=False)
    made.collapse_padding = True
    for index, heading in enumerate(table.headings):
        made.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in table.rows:
        made.add_row(*row, style="bold" if len(row) == 1 else None)
    return made


def _render_targets(rows: Sequence[TargetRow]) -> RichTable:
    made = RichTable("target", "need", "worst", "at", "", title="targets", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        measured = "" if row.measured is None else f"{row.measured:.2f}"
        cells = (row.target, row.need, measured, row.where, row.verdict.upper())
        made.add_row(*cells, style=_VERDICT_STYLES[row.verdict])
    return made
