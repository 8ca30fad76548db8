"""A storage's verbs belong to the loop of its runtime."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from kvflow import Part, RuntimeState
from kvflow.storage import RestoreRequest, SaveRequest, Storage
from tests.runtime.test_ownership import STATES, assert_only_on_its_loop

VERBS: dict[str, Any] = {
    "save": SaveRequest("save", "key", [2], 4),
    "restore": RestoreRequest("restore", "key", [2], 4),
    "has": "key",
    "drop": ["key"],
}


def test_no_verb_is_forgotten() -> None:
    of_its_runtime = {name for name in vars(Part) if not name.startswith("_")}
    found = {name for name, _ in inspect.getmembers(Storage, inspect.isfunction) if not name.startswith("_")}
    assert found - of_its_runtime == {*VERBS}


@pytest.mark.parametrize("state", STATES)
async def test_every_verb_refuses_another_loop_and_takes_nothing(state: RuntimeState, tmp_path: Path) -> None:
    await assert_only_on_its_loop(Storage(tmp_path), state, VERBS, "has")
