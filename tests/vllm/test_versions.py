"""The table of what vLLM's release lines bring, looked up in the vLLM under test."""

from __future__ import annotations

import importlib
import runpy
from functools import reduce
from pathlib import Path

import pytest

from tests.vllm.servers import VERSION

CHANGES = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "site" / "vllm_versions.py"))["CHANGES"]


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _has(name: str) -> bool:
    module, _, attributes = name.partition(":")
    try:
        reduce(getattr, attributes.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("name", [name for change in CHANGES for name in change.names])
def test_a_name_is_in_vllm_from_its_line_on(name: str) -> None:
    (since,) = (change.since for change in CHANGES if name in change.names)
    assert _has(name) == (_number(VERSION) >= _number(since))
