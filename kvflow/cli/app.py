"""The tree of commands: each function reads the options of one command and calls the code that does the work."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvflow.bench.child import BenchError
from kvflow.bench.loads import Fabric
from kvflow.checks import counted
from kvflow.cli.bench import bench, errors_reported
from kvflow.cli.hand_on import HandOnError, checked_url, hand_on, send_json
from kvflow.cli.selftest import BLOCKS_MAX, hand_over
from kvflow.config import Config
from kvflow.doctor.findings import Finding, Status, is_broken
from kvflow.doctor.run import examine
from kvflow.doctor.version import version_lines
from kvflow.errors import ConfigError
from kvflow.observe.timeline import BadRecords, overlap, read_records, timeline
from kvflow.runtime.channel.keyring import make_key_files

app = typer.Typer(name="kvflow", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")
keys = typer.Typer(
    help="Keys for an encrypted and authenticated side channel.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(keys, name="keys")


def _print_version(asked: bool) -> None:
    if asked:
        print(version_lines())
        raise typer.Exit


@app.callback()
def kvflow_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of kvflow and its dependencies, and exit.",
        ),
    ] = False,
) -> None:
    """Move paged KV cache between LLM engines."""


@keys.command()
def new(
    folder: Annotated[Path, typer.Argument(help="Folder for the two files; created if missing.")],
    name: Annotated[str, typer.Option(help="The engine's id; all its ranks share its keys.")],
) -> None:
    """Make an engine's key pair: NAME.secret stays with the engine, NAME.public goes to every engine it talks to."""
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with errors_reported("keys new", ConfigError):
        secret, public = make_key_files(folder, name)
    notes.print(f"{secret}: keep it on machines that run {name} only", markup=False)
    notes.print(f"{public}: copy it into the curve_peers_dir of every engine that talks to {name}", markup=False)
    Console(highlight=False, soft_wrap=True).print(
        f'Config(engine_id="{name}", ...,\n    curve_secret_key_file="{secret}",\n    curve_peers_dir="{folder}")',
        markup=False,
    )


@app.command()
def selftest(
    blocks: Annotated[int, typer.Option(min=1, max=BLOCKS_MAX, help="Number of blocks, of 16 tokens each.")] = 32,
    transport: Annotated[Fabric, typer.Option(help="UCX path of the transfer: shared memory or TCP.")] = Fabric.SHM,
) -> None:
    """Hand a prompt's blocks over between two processes, over NIXL and without a model, and compare every byte."""
    with errors_reported("selftest", BenchError):
        hand_over(blocks, transport, Console(highlight=False))


@app.command()
def trace(
    files: Annotated[list[Path], typer.Argument(help="Files that timeline.RecordFile has written.", exists=True)],
    out: Annotated[Path, typer.Option(help="The timeline to write; open it at ui.perfetto.dev.")] = Path("trace.json"),
) -> None:
    """Make one timeline of the record files of several engines."""
    notes = Console(stderr=True, highlight=False)
    with errors_reported("trace", BadRecords, OSError):
        lines = [line for file in files for line in read_records(file)]
    out.write_text(json.dumps(timeline(lines)))
    notes.print(f"{counted(len(lines), 'record')} in {out}; open it at ui.perfetto.dev", markup=False)
    if shares := list(overlap(lines).values()):
        share = f"{statistics.median(shares):.0%} of the tokens (median) had landed when the last one was computed"
        notes.print(f"{counted(len(shares), 'load')} of leases that grew: {share}")


@app.command("hand-on")
def hand_prompts_on(
    old: Annotated[str, typer.Argument(help="URL of the vLLM server that is taken out of service.")],
    new: Annotated[str, typer.Argument(help="URL of the vLLM server that takes its place.")],
    bytes_max: Annotated[int | None, typer.Option(min=1, help="Most bytes that one rank of NEW reads.")] = None,
    within_s: Annotated[float, typer.Option(min=0.1, max=3600, help="Most seconds to take.")] = 20.0,
) -> None:
    """Warm a vLLM server with the most recent prompts of another one, before that one is stopped."""
    with errors_reported("hand-on", HandOnError, ConfigError):
        at = [checked_url(old, "OLD"), checked_url(new, "NEW")]
        handed_on = hand_on(*at, bytes_max=bytes_max, within_s=within_s, send=send_json)
    console = Console(highlight=False, soft_wrap=True)
    by_outcome = ", ".join(f"{count} {outcome}" for outcome, count in handed_on.outcomes.items()) or "none"
    read = f"{counted(handed_on.tokens, 'token')}, bytes of each rank: {handed_on.size_bytes:,}"
    console.print(f"prompts: {by_outcome}; read: {read}", markup=False)
    if handed_on.stopped:
        console.print(f"stopped early: {handed_on.stopped}", markup=False)
    if not handed_on.named:
        console.print(
            "the old server does not name the new one to its readers: one of both has an older kvflow", markup=False
        )


@app.command()
def doctor(
    peer: Annotated[str | None, typer.Option(help="A peer's side channel to try, tcp://host:port.")] = None,
    peer_engine: Annotated[str, typer.Option(help="The engine id expected there.")] = "",
    stock: Annotated[
        str | None, typer.Option(help="The side channel of a vLLM with its own NixlConnector, tcp://host:port.")
    ] = None,
    pair: Annotated[
        tuple[str, str] | None,
        typer.Option(
            help="A prefill and a decode engine, ENGINE_ID@tcp://host:port each: could decode load from prefill?"
        ),
    ] = None,
    engine_id: Annotated[str, typer.Option(help="The engine id whose CURVE keys the doctor uses.")] = "doctor",
    curve_secret_key_file: Annotated[Path | None, typer.Option(help="As in Config.")] = None,
    curve_peers_dir: Annotated[Path | None, typer.Option(help="As in Config.")] = None,
    transfer: Annotated[bool, typer.Option(help="Hand blocks over between two processes.")] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check whether kvflow works and is fast on this machine. Exit code 1: something is broken."""
    notes = Console(stderr=True, highlight=False)
    with errors_reported("doctor", ConfigError, exit_code=2):
        config = Config(
            engine_id=engine_id, curve_secret_key_file=curve_secret_key_file, curve_peers_dir=curve_peers_dir
        )
    found = examine(
        config, peer=peer, peer_engine=peer_engine, stock=stock, pair=pair, transfer=transfer, note=notes.print
    )
    findings = list(found)
    if json_output:
        print(json.dumps(findings_as_json(findings), indent=2))
    else:
        print_findings(findings, Console())
    raise typer.Exit(code=int(is_broken(findings)))


def findings_as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"schema_version": 1, "broken": is_broken(findings), "findings": [asdict(finding) for finding in findings]}


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    styles = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("")
    table.add_column("found", overflow="fold")
    for finding in findings:
        table.add_row(finding.name, Text(finding.status.upper(), styles[finding.status]), Text(finding.found))
        if finding.fix:
            table.add_row("", "", Text(f"-> {finding.fix}", style="italic"))
    console.print(table)
    if is_broken(findings):
        console.print("something is broken: see FAIL", style="bold red")
