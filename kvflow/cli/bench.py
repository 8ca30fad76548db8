"""`kvflow bench`: measure loads on this machine, through kvflow and through raw NIXL."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvflow.bench.child import BenchError
from kvflow.bench.loads import Fabric, SettingsError
from kvflow.bench.transfer_bench import Speed, measure


@contextlib.contextmanager
def errors_reported(command: str, *errors: type[Exception], exit_code: int = 1) -> Iterator[None]:
    """Context manager: if the body raises one of `errors`, print one line to stderr and exit with `exit_code`.

    The line has `command`, the name of the command, then the error.
    """
    try:
        yield
    except errors as error:
        Console(stderr=True, highlight=False).print(f"kvflow {command}: {error}", style="red", markup=False)
        raise typer.Exit(code=exit_code) from error


def describe_machine() -> dict[str, str | int | float]:
    """Return, by name, the facts of the machine and the versions of packages that influence the results of a bench.

    Call this before the bench, so that the load average does not include the bench's own work.
    """
    return {
        "cpus": os.cpu_count() or 0,
        "load_average_1m": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "nixl", "numpy", "uvloop")},
    }


bench = typer.Typer(help="Measure kvflow on this machine.", no_args_is_help=True, rich_markup_mode=None)


@bench.command()
def transfer(
    transport: Annotated[
        Fabric | None, typer.Option(help="UCX path of the transfers: shm, or tcp (UCX_TLS=tcp). Default: both.")
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="Sizes of a load: 'block' or a number of MB (2**20 bytes), separated by commas.")
    ] = "block,1,16,256",
    pairs: Annotated[
        int, typer.Option(min=1, help="Number of fresh process pairs: identical processes differ in speed.")
    ] = 3,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds for each pair and size; both contenders do the same loads in each.")
    ] = 4,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the imaginary model.")] = 8,
    backend: Annotated[str, typer.Option(help="NIXL's backend for both; several are separated by commas.")] = "UCX",
    json_file: Annotated[
        typer.FileTextWrite | None, typer.Option("--json", lazy=False, help="Write every number to this file.")
    ] = None,
) -> None:
    """Compare loads between two processes through kvflow with the same loads through well-tuned NIXL alone."""
    notes, machine = Console(stderr=True, highlight=False), describe_machine()
    notes.print(f"load average {machine['load_average_1m']:.1f} before; every number includes other work here")
    settings = {"sizes": sizes, "pairs": pairs, "rounds": rounds, "layers": layers, "backend": backend}
    speeds: list[Speed] = []
    with errors_reported("bench transfer", SettingsError, BenchError):
        for path in tuple(Fabric) if transport is None else (transport,):
            speeds += measure(path, sizes, pairs=pairs, rounds=rounds, layers=layers, backend=backend, note=notes.print)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "one load", "kvflow ms", "p99 ms", "NIXL ms", "ratio", "GB/s"):
        table.add_column(heading, justify="left" if heading in ("", "one load") else "right")
    for speed in speeds:
        times = (f"{seconds * 1e3:.3g}" for seconds in (speed.kvflow_s, speed.kvflow_p99_s, speed.raw_s))
        table.add_row(speed.transport, speed.size, *times, f"{speed.ratio:.2f}", f"{speed.gb_per_s:.3g}")
    console = Console()
    console.print(table)
    console.print(
        "Medians. NIXL: alone, without an event loop, its backends set as kvflow's are. The ratio is of speed: above 1 "
        "kvflow is faster. Every byte was compared.",
        style="italic",
    )
    if json_file is not None:
        numbers = {"settings": settings, "machine": machine, "speed": [asdict(speed) for speed in speeds]}
        json_file.write(json.dumps(numbers, indent=2) + "\n")
