"""What all tests share. On a machine that does other things too, an example may be slow without being wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("kvflow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvflow")

HERE = Path(__file__).parent
COMPUTING = ("core", "testing")
"""Tests that compute and wait for nothing, so the bound of those that hang is none for them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(HERE).parts[0] in COMPUTING:
            item.add_marker(pytest.mark.timeout(600))
