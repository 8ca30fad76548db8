"""`kvflow bench NAME`: a command for each scenario. Its options are the scenario's fields, its help the docstring."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.console import Console

from kvflow.bench.child import BenchError
from kvflow.bench.fairness import Fairness
from kvflow.bench.loads import SettingsError
from kvflow.bench.planning import Planning
from kvflow.bench.report import as_json, print_report
from kvflow.bench.scenario import Scenario, run_scenario
from kvflow.bench.topology.scenario import Topology
from kvflow.bench.transfer.scenario import Transfer
from kvflow.cli.notes import told

SCENARIOS: dict[str, type[Scenario]] = {
    "transfer": Transfer,
    "topology": Topology,
    "fairness": Fairness,
    "planning": Planning,
}
_LEAST = {int: 1, float: 0.1}
_QUICK = Annotated[bool, typer.Option(help="A few small loads that show the bench works; numbers mean little.")]
_JSON = Annotated[
    typer.FileTextWrite | None, typer.Option("--json", lazy=False, help="Write every number to this file.")
]

bench = typer.Typer(help="Measure kvflow on this machine.", no_args_is_help=True)


def _add(name: str, kind: type[Scenario]) -> None:
    def command(**options: Any) -> None:
        json_file = options.pop("json_file")
        notes = Console(stderr=True, highlight=False)
        with told(f"bench {name}", SettingsError, BenchError):
            scenario = kind(**options | (dict(kind.QUICK) if options["quick"] else {}))
            report = run_scenario(scenario, note=notes.print)
        print_report(report, Console())
        if json_file is not None:
            json_file.write(json.dumps(as_json(report), indent=2) + "\n")

    parameters = list(_parameters(kind))
    # Typer reads the options off these.
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    bench.command(name, help=kind.__doc__)(command)


def _parameters(kind: type[Scenario]) -> Iterator[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        annotation = hints[field.name]
        if field.name == "quick":
            annotation = _QUICK
        else:
            value, text = get_args(annotation)
            annotation = Annotated[value, typer.Option(help=text, min=_LEAST.get(value))]
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation)
    yield Parameter("json_file", Parameter.KEYWORD_ONLY, default=None, annotation=_JSON)


for _name, _kind in SCENARIOS.items():
    _add(_name, _kind)
