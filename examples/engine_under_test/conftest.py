"""Enables kvflow's fixtures, and makes the toy engine importable."""

import sys
from pathlib import Path

pytest_plugins = ["kvflow.testing.fixtures"]

sys.path.insert(0, str(Path(__file__).parent))
