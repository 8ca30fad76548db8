"""The report of a run as tables for people and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvflow.cli.bench.run import BenchReport
from kvflow.cli.bench.samples import Contender, LagSummary, SizeResult, TransportResult
from kvflow.cli.bench.targets import TargetRow, Verdict

SCHEMA_VERSION = 2
_TITLES = {
    Contender.EXAMPLE: "(a) example",
    Contender.TUNED: "(b) tuned",
    Contender.KVFLOW: "(c) kvflow",
    Contender.HOP: "(d) bare hop",
}
_LEGEND = (
    "(a) raw NIXL as its examples use it, (b) raw NIXL at its best, "
    "(d) b awaited from a loop through one thread and nothing else; n loads each, by several pairs of processes. "
    "p50: median of the pairs' medians; pairs: their least and greatest, what differs by less may be chance. "
    "Ratios are of p50, above 1 is faster. "
    "With n < 100 the p99 is the slowest load. s/GB: CPU of reader and producer. "
    "All blocks were compared once, then samples."
)
_VERDICT_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.NOT_MEASURED: "dim"}


def as_json(report: BenchReport) -> dict[str, Any]:
    """Every number of the report. Units are in the names; 'GB' is 10**9 bytes, a size of '16 MB' is 16 * 2**20."""
    return {"schema_version": SCHEMA_VERSION, **asdict(report)}


def print_report(report: BenchReport, console: Console) -> None:
    for result in report.transports:
        console.print(_speed_table(report, result))
        console.print(_loop_table(result))
    console.print(target_table(report.targets))


def _speed_table(report: BenchReport, result: TransportResult) -> Table:
    shape = report.settings.shape
    descriptor = f"{shape.region_block_size_bytes >> 10} KiB a descriptor"
    table = Table(
        title=f"{result.transport}: {report.settings.pattern} blocks, {descriptor}",
        caption=_LEGEND,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("one load by", no_wrap=True)
    for heading in ("n", "p50 ms", "pairs", "p99 ms", "GB/s", "/(a)", "/(b)", "s/GB"):
        table.add_column(heading, justify="right")
    for size in result.sizes:
        table.add_row(size.label, style="bold")
        for row in _speed_rows(size):
            table.add_row(*row)
        table.add_row()
    return table


def _speed_rows(size: SizeResult) -> Iterator[tuple[str, ...]]:
    for contender in Contender:
        found = size.contenders[contender]
        yield (
            _TITLES[contender],
            str(found.samples),
            _three_digits(found.median_s * 1e3),
            "..".join(_three_digits(bound(found.pair_medians_s) * 1e3) for bound in (min, max)),
            _three_digits(found.p99_s * 1e3),
            f"{found.gb_per_s:.2f}",
            f"{found.ratio_to_a:.2f}",
            f"{found.ratio_to_b:.2f}",
            f"{found.cpu_s_per_gb:.2f}",
        )


def _three_digits(value: float) -> str:
    """0.0584, 0.584, 5.84, 58.4, 584, 5840: at least three significant digits, never an exponent."""
    decimals = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{decimals}f}"


def _loop_table(result: TransportResult) -> Table:
    table = Table(
        title=f"{result.transport}: lag of kvflow's event loop, 1 ms ticker",
        caption=(
            f"idle CPU, one open lease: {result.idle_cpu_percent:.2f} % of a core; "
            f"huge pages: at least {result.huge_page_share:.0%} of every cache"
        ),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("while loading")
    for heading in ("ticks", "p50 ms", "p99 ms", "max ms"):
        table.add_column(heading, justify="right")
    for size in result.sizes:
        table.add_row(size.label, *_lag_cells(size.lag))
    table.add_row("(idle loop)", *_lag_cells(result.idle_lag), style="dim")
    return table


def _lag_cells(lag: LagSummary) -> tuple[str, ...]:
    return (str(lag.samples), f"{lag.p50_ms:.2f}", f"{lag.p99_ms:.2f}", f"{lag.max_ms:.2f}")


def target_table(rows: tuple[TargetRow, ...]) -> Table:
    table = Table(title="targets", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("target", "need", "worst", "at", ""):
        table.add_column(heading)
    for row in rows:
        measured = "" if row.measured is None else f"{row.measured:.2f}"
        table.add_row(
            row.target, row.need, measured, row.where, row.verdict.upper(), style=_VERDICT_STYLES[row.verdict]
        )
    return table
