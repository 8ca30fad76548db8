"""The tree of commands; one function per command, which reads options and hands over."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvflow.cli.bench.children import BenchError
from kvflow.cli.bench.report import as_json, print_report
from kvflow.cli.bench.run import run_bench
from kvflow.cli.bench.settings import Pattern, SettingsError, Transport, TransportChoice, make_settings
from kvflow.cli.doctor import report as doctor_report
from kvflow.cli.doctor.findings import is_broken
from kvflow.cli.doctor.run import examine
from kvflow.cli.fairness_bench import report as fairness_report
from kvflow.cli.fairness_bench import settings as fairness_settings
from kvflow.cli.fairness_bench.run import READER, run_fairness
from kvflow.cli.topology_bench import report as topology_report
from kvflow.cli.topology_bench import settings as topology_settings
from kvflow.cli.topology_bench.run import run_topology
from kvflow.cli.version import version_lines
from kvflow.config import Config
from kvflow.errors import ConfigError
from kvflow.integrations.timeline import BadRecords, read_records, timeline
from kvflow.runtime.keyring import make_key_files

app = typer.Typer(name="kvflow", no_args_is_help=True)
bench = typer.Typer(help="Measure kvflow on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
keys = typer.Typer(help="Keys for an encrypted and authenticated side channel.", no_args_is_help=True)
app.add_typer(keys, name="keys")


def _say_version(asked: bool) -> None:
    if asked:
        print(version_lines())
        raise typer.Exit


@app.callback()
def kvflow_command(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print what is installed here, and exit."),
    ] = False,
) -> None:
    """Move paged KV cache between LLM engines."""


@contextlib.contextmanager
def _told(command: str, *errors: type[Exception], exit_code: int = 1) -> Iterator[None]:
    """These errors end a command: one line that says why, and an exit code."""
    try:
        yield
    except errors as error:
        Console(stderr=True, highlight=False).print(f"kvflow {command}: {error}", style="red", markup=False)
        raise typer.Exit(code=exit_code) from error


@keys.command()
def new(
    folder: Annotated[Path, typer.Argument(help="Where the two files go; it is made if need be.")],
    name: Annotated[str, typer.Option(help="The engine's id; all its ranks share its keys.")],
) -> None:
    """Make an engine's key pair: NAME.secret stays with the engine, NAME.public goes to every engine it talks to."""
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with _told("keys new", ConfigError):
        secret, public = make_key_files(folder, name)
    notes.print(f"{secret}: keep it to the machines that run {name}", markup=False)
    notes.print(f"{public}: copy it into the curve_peers_dir of every engine that talks to {name}", markup=False)
    Console(highlight=False, soft_wrap=True).print(
        f'Config(engine_id="{name}", ...,\n    curve_secret_key_file="{secret}",\n    curve_peers_dir="{folder}")',
        markup=False,
    )


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
    with _told("bench transfer", SettingsError, BenchError):
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
    with _told("bench topology", SettingsError, BenchError):
        settings = topology_settings.make_settings(
            transport=transport, size_mb=size, rounds=rounds, layers=layers, quick=quick
        )
        report = run_topology(settings, note=notes.print)
    topology_report.print_report(report, Console())
    if json_file is not None:
        json_file.write(json.dumps(topology_report.as_json(report), indent=2) + "\n")


@bench.command()
def fairness(
    transport: Annotated[
        Transport, typer.Option(help="Which way the bytes go: shm or tcp (UCX_TLS=tcp).")
    ] = Transport.SHM,
    size: Annotated[int, typer.Option(min=1, help="MB (2**20 bytes) of a huge load.")] = 1024,
    huge_loads: Annotated[int, typer.Option(min=1, help="How many huge loads run at once.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each measures everything once.")] = 9,
    json_file: Annotated[
        typer.FileTextWrite | None, typer.Option("--json", lazy=False, help="Write every number to this file.")
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="A few small loads that show the bench works; numbers mean little.")
    ] = False,
) -> None:
    """Measure how long one-block loads take alone, and while huge loads run beside them."""
    notes = Console(stderr=True, highlight=False)
    with _told("bench fairness", SettingsError, BenchError):
        settings = fairness_settings.make_settings(
            transport=transport,
            size_mb=size,
            huge_loads=huge_loads,
            rounds=rounds,
            slice_bytes=READER.slice_bytes_max,
            quick=quick,
        )
        report = run_fairness(settings, note=notes.print)
    fairness_report.print_report(report, Console())
    if json_file is not None:
        json_file.write(json.dumps(fairness_report.as_json(report), indent=2) + "\n")


@app.command()
def trace(
    files: Annotated[list[Path], typer.Argument(help="Files that timeline.RecordFile has written.", exists=True)],
    out: Annotated[Path, typer.Option(help="The timeline to write; open it at ui.perfetto.dev.")] = Path("trace.json"),
) -> None:
    """Make one timeline of the records of several engines."""
    notes = Console(stderr=True, highlight=False)
    with _told("trace", BadRecords, OSError):
        lines = [line for file in files for line in read_records(file)]
    out.write_text(json.dumps(timeline(lines)))
    notes.print(f"{len(lines)} records in {out}; open it at ui.perfetto.dev", markup=False)


@app.command()
def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds; each is one run of several engines.")] = 500,
    start: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the seeds.")] = 1,
    failures: Annotated[int, typer.Option(min=1, help="Stop after so many seeds have failed.")] = 5,
) -> None:
    """Run kvflow's engines in virtual time under random faults, and check every promise after every step.

    A seed that fails is printed with the command that replays it; then the exit code is 1.
    """
    from kvflow.cli.simulate import print_failure, print_summary, run_all

    console, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    begun_s = time.monotonic()
    summary = run_all(start, seeds, jobs, failures_max=failures, notes=notes)
    for result in summary.failed:
        print_failure(result, console)
    print_summary(summary, time.monotonic() - begun_s, console)
    if summary.failed:
        raise typer.Exit(code=1)


@app.command()
def doctor(
    peer: Annotated[str | None, typer.Option(help="A peer's side channel to try, tcp://host:port.")] = None,
    peer_engine: Annotated[str, typer.Option(help="The engine id that is expected there.")] = "",
    engine_id: Annotated[str, typer.Option(help="Our engine id, whose CURVE keys are used.")] = "doctor",
    curve_secret_key_file: Annotated[Path | None, typer.Option(help="As in Config.")] = None,
    curve_peers_dir: Annotated[Path | None, typer.Option(help="As in Config.")] = None,
    transfer: Annotated[bool, typer.Option(help="Hand blocks over between two processes.")] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Find out what keeps kvflow from working or from being fast here. Exit code 1: something is broken."""
    notes = Console(stderr=True, highlight=False)
    with _told("doctor", ConfigError, exit_code=2):
        config = Config(
            engine_id=engine_id, curve_secret_key_file=curve_secret_key_file, curve_peers_dir=curve_peers_dir
        )
    findings = examine(config, peer=peer, peer_engine=peer_engine, transfer=transfer, note=notes.print)
    if json_output:
        print(json.dumps(doctor_report.as_json(findings), indent=2))
    else:
        doctor_report.print_findings(findings, Console())
    raise typer.Exit(code=int(is_broken(findings)))
