"""The report of a run as tables for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvflow.cli.bench.report import target_table
from kvflow.cli.topology_bench.results import CaseResult
from kvflow.cli.topology_bench.run import TopologyReport

SCHEMA_VERSION = 1
_LEGEND = (
    "One rank loads the same tokens into the same memory; only the producer's cut differs, unless the "
    "row says otherwise. MB are read, which may be more than is wanted, in pieces of so many KiB; GB/s are of what is "
    "wanted. Ratios are of speed to the first row of the block: the median of the rounds' ratios, and their quartiles. "
    "The time from a staged producer runs from the offer on, copying included. All bytes of one load were compared, "
    "then a layer of each."
)


def as_json(report: TopologyReport) -> dict[str, Any]:
    """Every number of the report. Units are in the names; 'GB' is 10**9 bytes, a size of '64 MB' is 64 * 2**20."""
    return {"schema_version": SCHEMA_VERSION, **asdict(report)}


def print_report(report: TopologyReport, console: Console) -> None:
    console.print(_case_table(report))
    console.print(_planning_table(report))
    console.print(_memory_table(report))
    console.print(target_table(report.targets))


def _case_table(report: TopologyReport) -> Table:
    settings = report.settings
    table = Table(
        title=f"{settings.transport}: {settings.tokens} tokens, {settings.layers} layers, {settings.rounds} rounds",
        caption=_LEGEND,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("case", no_wrap=True)
    for heading in ("MB", "descr.", "KiB", "p50 ms", "GB/s", "ratio", "quartiles"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in report.cases:
        if case.label == case.baseline:
            table.add_row()
            table.add_row(f"to {case.consumer}: {case.size_bytes / (1 << 20):.3g} MB", style="bold")
        table.add_row(*_case_cells(case))
    return table


def _case_cells(case: CaseResult) -> tuple[str, ...]:
    return (
        case.label,
        f"{case.read_bytes / (1 << 20):.3g}",
        str(case.descriptors),
        f"{case.piece_bytes / 1024:.3g}",
        f"{case.median_s * 1e3:.1f}",
        f"{case.gb_per_s:.2f}",
        f"{case.ratio:.2f}",
        f"{case.ratio_low:.2f}..{case.ratio_high:.2f}",
    )


def _planning_table(report: TopologyReport) -> Table:
    table = Table(
        title="planning a prompt of 128k tokens, 80 layers, blocks of 16", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("rank reads")
    for heading in ("descriptors", "slices", "p50 ms", "range", "first slice ms"):
        table.add_column(heading, justify="right")
    for plan in report.planning:
        spread = f"{plan.min_s * 1e3:.1f}..{plan.max_s * 1e3:.1f}"
        numbers = (f"{plan.descriptors:,}", f"{plan.slices:,}", f"{plan.median_s * 1e3:.1f}", spread)
        table.add_row(plan.label, *numbers, f"{plan.first_s * 1e3:.2f}")
    return table


def _memory_table(report: TopologyReport) -> Table:
    small, large = report.memory[0].blocks
    table = Table(title="memory of a peer: its regions, the pairing, the pieces", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("pairing")
    for heading in ("regions", f"{small:,} blocks", f"{large:,} blocks"):
        table.add_column(heading, justify="right")
    for peer in report.memory:
        sizes = (f"{size / 1024:.1f} KiB" for size in peer.bytes_of_blocks)
        table.add_row(peer.label, str(peer.regions), *sizes)
    return table
