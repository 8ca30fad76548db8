"""`python3 dev.py simulate`: the simulator over many seeds."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from tests.simulator.many_seeds import print_summary, run_all

app = typer.Typer(name="dev.py simulate", add_completion=False, rich_markup_mode=None)


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
    begun_s = time.monotonic()
    summary = run_all(start, seeds, jobs, failures_max=failures, notes=Console(stderr=True, highlight=False))
    print_summary(summary, time.monotonic() - begun_s, Console(highlight=False))
    if summary.failed:
        raise typer.Exit(code=1)


if __name__ == "__main__":
    app()
