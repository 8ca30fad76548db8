"""kvflow's own fixtures, as users switch them on; the example's engine can be imported."""

import sys
from pathlib import Path

from kvflow.testing.fixtures import kvflow_cluster, kvflow_nixl_pair, kvflow_pair

__all__ = ["kvflow_cluster", "kvflow_nixl_pair", "kvflow_pair"]

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "engine_under_test"))
