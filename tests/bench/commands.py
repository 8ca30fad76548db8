"""`python3 dev.py bench NAME`: a command for each scenario. Its fields are the options, its docstring the help."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from functools import partial
from inspect import Parameter, Signature
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvflow.bench.child import BenchError
from kvflow.bench.loads import SettingsError
from kvflow.cli.bench import describe_machine, errors_reported
from tests.bench.scenario import Outcome, Scenario, run_scenario
from tests.bench.targets import Spread, Verdict

_LEAST = {int: 1, float: 0.1}
_SECONDS = re.compile("(?<!_per)_s$")
_BORDER, _BETWEEN = 2, 2  # what the style below takes at the sides, and for each column
_STYLE: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)}
_JSON = Annotated[
    typer.FileTextWrite | None, typer.Option("--json", lazy=False, help="Write every number to this file.")
]
_VERDICT_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.NOT_MEASURED: "dim"}


def add_scenario(app: typer.Typer, name: str, kind: type[Scenario]) -> None:
    """Make a scenario a command of `app`."""

    def command(**options: Any) -> None:
        json_file = options.pop("json_file")
        notes = Console(stderr=True, highlight=False)
        with errors_reported(f"bench {name}", SettingsError, BenchError):
            scenario, machine = kind(**options), describe_machine()
            notes.print(f"load average {machine['load_average_1m']:.1f} before; every number includes other work here")
            outcome = run_scenario(scenario, note=notes.print)
        print_outcome(outcome, Console())
        if json_file is not None:
            numbers = {"settings": asdict(scenario), "machine": machine, **as_json(outcome)}
            json_file.write(json.dumps(numbers, indent=2) + "\n")

    parameters = list(_parameters(kind))
    # Typer reads the options off these.
    vars(command)["__signature__"] = Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=kind.__doc__)(command)


def _parameters(kind: type[Scenario]) -> Iterator[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        value, text, *least = get_args(hints[field.name])
        annotation: Any = Annotated[value, typer.Option(help=text, min=least[0] if least else _LEAST.get(value))]
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation)
    yield Parameter("json_file", Parameter.KEYWORD_ONLY, default=None, annotation=_JSON)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Every number. Units are in the names; 'GB' is 10**9 bytes, a size of '16 MB' is 16 * 2**20."""
    numbers = asdict(outcome)
    return {**numbers["results"], "targets": numbers["targets"]}


def print_outcome(outcome: Outcome, console: Console) -> None:
    for name, rows in outcome.results.items():
        shown = [field.name for field in fields(rows[0]) if field.repr]
        for table in _tables(name.replace("_", " "), shown, rows, console):
            console.print(table)
    console.print(outcome.legend, style="italic")
    targets = Table("target", "need", "worst", "at", "", title="targets", **_STYLE)
    for target in outcome.targets:
        measured = "" if target.measured is None else f"{target.measured:.2f}"
        cells = (target.target, target.need, measured, target.where, target.verdict.upper())
        targets.add_row(*cells, style=_VERDICT_STYLES[target.verdict])
    console.print(targets)


def _tables(title: str, shown: list[str], rows: Sequence[Any], console: Console) -> Iterator[Table]:
    """One table with whole words; if it is too wide for that, one for each value of the first column.

    Rows that are compared stay in one table: where each would get one of its own, they become its columns if those fit.
    """
    lines = [[_SECONDS.sub("_ms", heading).replace("_", " ") for heading in shown]]
    lines += [[_cell(getattr(row, heading), heading) for heading in shown] for row in rows]
    cells = [list(column) for column in zip(*lines, strict=True)]
    least = [max(len(word) for cell in column for word in cell.split() or [""]) for column in cells]
    wanted = [max(map(len, column)) for column in cells]
    spare = console.width - _BORDER - sum(least) - _BETWEEN * len(shown)
    if spare < 0 and len(shown) > 1 and len({line[0] for line in lines[1:]}) == len(rows) > 1:
        narrow = [max(len(word) for cell in line for word in cell.split() or [""]) for line in lines]
        if console.width >= _BORDER + sum(narrow) + _BETWEEN * len(lines):
            table = Table(title=title, **_STYLE)
            for line, width in zip(lines, narrow, strict=True):
                table.add_column(line[0], min_width=width)
            for measure in list(zip(*lines, strict=True))[1:]:
                table.add_row(*measure)
            yield table
            return
    if spare < 0 and len(shown) > 1:
        for value, some in groupby(rows, key=attrgetter(shown[0])):
            yield from _tables(f"{title}, {_cell(value, shown[0])}", shown[1:], list(some), console)
        return
    table = Table(title=title, **_STYLE)
    for heading, width, most in zip(lines[0], least, wanted, strict=True):
        more = min(max(spare, 0), most - width)
        spare -= more
        table.add_column(heading, width=width + more)
    for line in lines[1:]:
        table.add_row(*line)
    yield table


def _cell(value: Any, heading: str) -> str:
    """Seconds in ms; of a spread the median, its quartiles and p99, of several numbers the least and the greatest."""
    cell = partial(_cell, heading=heading)
    match value:
        case None:
            return "-"
        case Spread():
            return f"{cell(value.p50)} ({cell(value.p25)}..{cell(value.p75)}), p99 {cell(value.p99)}"
        case tuple():
            return f"{cell(min(value))}..{cell(max(value))}"
        case float():
            scaled = value * 1e3 if _SECONDS.search(heading) else value
            return f"{scaled:.0f}" if scaled >= 1000 else f"{scaled:.3g}"
        case int():
            return f"{value:,}"
    return str(value)
