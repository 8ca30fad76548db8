"""`python3 dev.py bench NAME`: a command for each scenario."""

from __future__ import annotations

from pathlib import Path

import typer

from tests.bench.commands import add_scenario
from tests.bench.fairness import Fairness
from tests.bench.fleet.figure import draw
from tests.bench.fleet.scenario import FleetBench
from tests.bench.flow import Flow
from tests.bench.never_idle import NeverIdle
from tests.bench.pages import Pages
from tests.bench.peers.scenario import Peers
from tests.bench.profiling import Profile
from tests.bench.scenario import Outcome, Scenario
from tests.bench.surviving import Surviving
from tests.bench.topology import Topology
from tests.bench.transfer.scenario import Transfer
from tests.bench.verifying import Verifying

SCENARIOS: dict[str, type[Scenario]] = {
    "transfer": Transfer,
    "topology": Topology,
    "fairness": Fairness,
    "peers": Peers,
    "pages": Pages,
    "profile": Profile,
    "surviving": Surviving,
    "verifying": Verifying,
    "flow": Flow,
    "fleet": FleetBench,
    "never-idle": NeverIdle,
}


def draw_figure(scenario: Scenario, outcome: Outcome) -> None:
    """The curves of a fleet, if a file for them was named."""
    if isinstance(scenario, FleetBench) and scenario.figure:
        draw(outcome.results, Path(scenario.figure))


bench = typer.Typer(
    name="dev.py bench",
    help="Measure what only those need who work on kvflow.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for name, kind in SCENARIOS.items():
    add_scenario(bench, name, kind, afterwards=draw_figure)

if __name__ == "__main__":
    bench()
