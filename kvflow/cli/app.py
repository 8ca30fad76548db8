"""The tree of commands; one function per command, which reads options and hands over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvflow.cli.bench.children import BenchError
from kvflow.cli.bench.report import as_json, print_report
from kvflow.cli.bench.run import run_bench
from kvflow.cli.bench.settings import Pattern, SettingsError, Transport, TransportChoice, make_settings
from kvflow.cli.topology_bench import report as topology_report
from kvflow.cli.topology_bench import settings as topology_settings
from kvflow.cli.topology_bench.run import run_topology
from kvflow.integrations.timeline import BadRecords, read_records, timeline

app = typer.Typer(name="kvflow", help="Move paged KV cache between LLM engines.", no_args_is_help=True)
bench = typer.Typer(help="Measure kvflow on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command()
def transfer(
    transport: Annotated[
        TransportChoice, typer.Option(help="Which way the bytes go: shm, tcp (UCX_TLS=tcp) or both.")
    ] = TransportChoice.BOTH,
    sizes: Annotated[
        str, typer.Option(help="What one load moves: 'block' or MB (2**20 bytes), separated by commas.")
    ] = "block,1,16,256,1024",
    pairs: Annotated[
        int, typer.Option(min=1, help="How often every contender is started anew; equal processes differ in speed.")
    ] = 3,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds per size, divided among the pairs; each gives every contender a turn.")
    ] = 12,
    pattern: Annotated[
        Pattern, typer.Option(help="Block ids: random on both sides, or consecutive ones.")
    ] = Pattern.SCATTERED,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the imaginary model.")] = 8,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads per layer; 128 fp16 elements, 16 tokens a block.")] = 8,
    idle_s: Annotated[float, typer.Option(min=0.1, help="How long idle CPU is measured.")] = 5.0,
    json_file: Annotated[
        typer.FileTextWrite | None, typer.Option("--json", lazy=False, help="Write every number to this file.")
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="A few small loads that show the bench works; numbers mean little.")
    ] = False,
) -> None:
    """Compare (a) raw NIXL as in its examples, (b) raw NIXL tuned, (c) kvflow, (d) b behind one thread, on equal loads.

    (d) is the floor for any program that keeps NIXL off its event loop.
    """
    notes = Console(stderr=True, highlight=False)
    try:
        settings = make_settings(
            transport=transport,
            sizes=sizes,
            pairs=pairs,
            rounds=rounds,
            pattern=pattern,
            layers=layers,
            kv_heads=kv_heads,
            idle_s=idle_s,
            quick=quick,
        )
        report = run_bench(settings, note=notes.print)
    except (SettingsError, BenchError) as error:
        notes.print(f"kvflow bench transfer: {error}", style="red", markup=False)
        raise typer.Exit(code=1) from error
    print_report(report, Console())
    if json_file is not None:
        json_file.write(json.dumps(as_json(report), indent=2) + "\n")


@bench.command()
def topology(
    transport: Annotated[
        Transport, typer.Option(help="Which way the bytes go: shm or tcp (UCX_TLS=tcp).")
    ] = Transport.SHM,
    size: Annotated[int, typer.Option(min=1, help="MB (2**20 bytes) that a load brings a rank with 8 heads.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Loads of each case; the cases take turns.")] = 15,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the imaginary model.")] = 32,
    json_file: Annotated[
        typer.FileTextWrite | None, typer.Option("--json", lazy=False, help="Write every number to this file.")
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="A few small loads that show the bench works; numbers mean little.")
    ] = False,
) -> None:
    """Compare what loads cost between engines that cut the cache differently: TP, NHD and HND, block sizes, staging.

    Also: how long planning a prompt of 128k tokens takes, and what a peer costs in memory.
    """
    notes = Console(stderr=True, highlight=False)
    try:
        settings = topology_settings.make_settings(
            transport=transport, size_mb=size, rounds=rounds, layers=layers, quick=quick
        )
        report = run_topology(settings, note=notes.print)
    except (SettingsError, BenchError) as error:
        notes.print(f"kvflow bench topology: {error}", style="red", markup=False)
        raise typer.Exit(code=1) from error
    topology_report.print_report(report, Console())
    if json_file is not None:
        json_file.write(json.dumps(topology_report.as_json(report), indent=2) + "\n")


@app.command()
def trace(
    files: Annotated[list[Path], typer.Argument(help="Files that timeline.RecordFile has written.", exists=True)],
    out: Annotated[Path, typer.Option(help="The timeline to write; open it at ui.perfetto.dev.")] = Path("trace.json"),
) -> None:
    """Make one timeline of the records of several engines."""
    notes = Console(stderr=True, highlight=False)
    try:
        lines = [line for file in files for line in read_records(file)]
    except (BadRecords, OSError) as error:
        notes.print(f"kvflow trace: {error}", style="red", markup=False)
        raise typer.Exit(code=1) from error
    out.write_text(json.dumps(timeline(lines)))
    notes.print(f"{len(lines)} records in {out}; open it at ui.perfetto.dev", markup=False)
