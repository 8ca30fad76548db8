"""kvflow's own fixtures, as users switch them on."""

from kvflow.testing.fixtures import kvflow_cluster, kvflow_nixl_pair, kvflow_pair

__all__ = ["kvflow_cluster", "kvflow_nixl_pair", "kvflow_pair"]
