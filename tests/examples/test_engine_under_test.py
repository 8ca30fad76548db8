"""The example of a user's engine and its tests passes as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_the_example_passes() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "examples/engine_under_test"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout
