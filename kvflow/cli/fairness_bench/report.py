"""The report of a run as tables for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvflow.cli.bench.report import target_table
from kvflow.cli.fairness_bench.run import FairnessReport

SCHEMA_VERSION = 1
_LEGEND = (
    "One-block loads, one after the other with random pauses, alone and while huge loads run. The delay is how much "
    "longer they take behind huge ones, in times of a load of one slice: the median of the rounds' ratios."
)


def as_json(report: FairnessReport) -> dict[str, Any]:
    """Every number of the report."""
    return {"schema_version": SCHEMA_VERSION, **asdict(report)}


def print_report(report: FairnessReport, console: Console) -> None:
    settings, result = report.settings, report.result
    table = Table(
        title=f"{settings.transport}: one block behind {settings.huge_loads} x {settings.huge_bytes >> 20} MB, "
        f"slices of {settings.slice_bytes >> 20} MB",
        caption=_LEGEND,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("load")
    for heading in ("n", "p50 ms", "p99 ms", "max ms", "delay p50", "delay p99"):
        table.add_column(heading, justify="right")
    for kind in result.kinds:
        delays = (f"{result.delay_p50:.2f}", f"{result.delay_p99:.2f}") if "behind" in kind.label else ("", "")
        times = (f"{seconds * 1e3:.2f}" for seconds in (kind.p50_s, kind.p99_s, kind.max_s))
        table.add_row(kind.label, str(kind.samples), *times, *delays)
    console.print(table)
    console.print(target_table(report.targets))
