"""`python3 dev.py bench NAME`: a command for each scenario."""

from __future__ import annotations

import typer

from tests.bench.against import Against
from tests.bench.commands import add_scenario
from tests.bench.fairness import Fairness
from tests.bench.fleet.scenario import FleetBench
from tests.bench.flow import Flow
from tests.bench.late import Late
from tests.bench.never_idle import NeverIdle
from tests.bench.pages import Pages
from tests.bench.peers.scenario import Peers
from tests.bench.profiling import Profile
from tests.bench.scenario import Scenario
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
    "late": Late,
    "fleet": FleetBench,
    "never-idle": NeverIdle,
    "against": Against,
}


bench = typer.Typer(
    name="dev.py bench",
    help="Measure what only those need who work on kvflow.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for name, kind in SCENARIOS.items():
    add_scenario(bench, name, kind)

if __name__ == "__main__":
    bench()
