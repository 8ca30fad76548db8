"""Configuration from JSON: every field of Config can be given, and nothing of another type."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields
from typing import Any

import pytest

from kvflow import Config
from kvflow.connector.settings import checked_fields
from kvflow.errors import ConfigError
from tests.tests_support import each

FIELDS = [entry.name for entry in fields(Config)]


def default_of(name: str) -> Any:
    entry = next(entry for entry in fields(Config) if entry.name == name)
    if entry.default_factory is not MISSING:
        return entry.default_factory()
    return "engine" if entry.default is MISSING else entry.default


@each("name", FIELDS)
def test_every_field_of_config_can_be_given(name: str) -> None:
    value = json.loads(json.dumps(default_of(name)))
    assert checked_fields({name: value}, Config, where="extra") == {name: value}


@each("name", FIELDS)
def test_no_field_takes_anything(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^extra: {name}: Expected `.*, got `array`"):
        checked_fields({name: [[]]}, Config, where="extra")


@dataclass
class Some:
    seconds_s: float
    path: str | None = None


def test_whole_numbers_are_numbers_and_other_keys_are_left_alone() -> None:
    checked = checked_fields({"seconds_s": 5, "other": object()}, Some, where="extra")
    assert checked == {"seconds_s": 5.0}
    assert isinstance(checked["seconds_s"], float)
