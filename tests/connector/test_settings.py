"""Configuration from JSON: every field of Config can be given, and nothing of another type."""

from __future__ import annotations

import collections
import json
from dataclasses import MISSING, dataclass, fields
from typing import Any

import msgspec
import pytest

from kvflow import Config, Limits
from kvflow.connector.settings import PluginSettings, checked_fields, load_connector
from kvflow.errors import ConfigError
from tests.support.tests_support import each

FIELDS = [entry.name for entry in fields(Config)]


def default_of(name: str) -> Any:
    entry = next(entry for entry in fields(Config) if entry.name == name)
    if entry.default_factory is not MISSING:
        return entry.default_factory()
    return "engine" if entry.default is MISSING else entry.default


@each("name", FIELDS)
def test_every_field_of_config_can_be_given(name: str) -> None:
    given = json.loads(msgspec.json.encode(default_of(name)))
    assert checked_fields({name: given}, Config, where="extra") == {name: default_of(name)}


def test_limits_are_a_dict_of_their_own() -> None:
    given = {"limits": {"peers_max": 7, "peer_idle_s": 5}}
    assert checked_fields(given, Config, where="extra") == {"limits": Limits(peers_max=7, peer_idle_s=5.0)}
    for name in (entry.name for entry in fields(Limits)):
        with pytest.raises(ConfigError, match=f"^extra: limits: {name}: Expected `(int|float)`, got `str`"):
            checked_fields({"limits": {name: "7"}}, Config, where="extra")
    with pytest.raises(ConfigError, match=r"^extra: limits: unknown: peer_max; did you mean 'peers_max'"):
        checked_fields({"limits": {"peer_max": 7}}, Config, where="extra")


@dataclass(frozen=True)
class Holds:
    several: tuple[Limits, ...] = ()


def test_several_of_a_kind_are_a_list_of_dicts() -> None:
    given = {"several": [{"peers_max": 7}, {}]}
    assert checked_fields(given, Holds, where="extra") == {"several": (Limits(peers_max=7), Limits())}
    with pytest.raises(ConfigError, match=r"^extra: several: 1: unknown: peer_max; did you mean 'peers_max'"):
        checked_fields({"several": [{}, {"peer_max": 7}]}, Holds, where="extra")
    with pytest.raises(ConfigError, match=r"^extra: several: Expected `array`, got `int`"):
        checked_fields({"several": 7}, Holds, where="extra")


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


def test_a_connector_is_found_by_name() -> None:
    assert load_connector("OrderedDict", "collections") is collections.OrderedDict
    with pytest.raises(ConfigError, match=r"^connector 'A': not found in module kvflow\.no_such_module: No module"):
        load_connector("A", "kvflow.no_such_module")
    with pytest.raises(ConfigError, match=r"^connector 'B': not found in module collections: .*'B'"):
        load_connector("B", "collections")


PLUGIN = PluginSettings(where="extra", engine="an engine", from_engine=("engine_id", "role"), others=("other",))


def test_settings_of_a_plugin_make_a_config() -> None:
    values = {"engine_id": "e", "role": "producer", "listen": "tcp://127.0.0.1:0"}
    given = {"lease_ttl_s": 60, "listen": "tcp://127.0.0.2:0", "limits": {"peers_max": 7}, "other": object()}
    config = PLUGIN.config(given, values)
    assert (config.engine_id, config.role, config.listen) == ("e", "producer", "tcp://127.0.0.2:0")
    assert (config.lease_ttl_s, config.limits) == (60.0, Limits(peers_max=7))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lease_ttl": 60}, "lease_ttl_s"),
        ({"lease_ttl_s": "60"}, "lease_ttl_s"),
        ({"lease_ttl_s": -1.0}, "lease_ttl_s"),
        ({"limits": {"peers_max": 0}}, "peers_max"),
        ({"curve_peers_dir": "x"}, "curve_secret_key_file, curve_peers_dir"),
        ({"role": "both"}, r"role \(engine_id, role come from an engine\)"),
    ],
)
def test_what_a_plugin_cannot_take_is_named_with_its_place(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^extra: .*{words}"):
        PLUGIN.config(given, {"engine_id": "e"})


def test_what_the_engine_says_wrong_is_not_blamed_on_the_place() -> None:
    with pytest.raises(ConfigError, match=r"^tp_rank: "):
        PLUGIN.config({"lease_ttl_s": 60}, {"engine_id": "e", "tp_rank": 3})
