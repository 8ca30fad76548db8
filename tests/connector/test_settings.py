"""Settings from JSON: every field of Config can be given, a plugin's own beside them, and nothing of another type."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvflow import Config, Limits
from kvflow.connector.plugin_settings import PluginSettings, RefusedOption, refuse_options
from kvflow.errors import ConfigError
from kvflow.parts import importing_part
from tests.support.tests_support import each

FIELDS = [entry.name for entry in fields(Config) if entry.name not in ("engine_id", "role")]


class Own(msgspec.Struct, frozen=True):
    other: int = 1


PLUGIN = PluginSettings(where="extra", engine="an engine", from_engine=("engine_id", "role"), own_keys=("other",))


def default_of(name: str) -> Any:
    entry = next(entry for entry in fields(Config) if entry.name == name)
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


@each("name", FIELDS)
def test_every_field_of_config_can_be_given(name: str) -> None:
    given = json.loads(msgspec.json.encode(default_of(name)))
    assert PLUGIN.config({name: given}, {"engine_id": "e"}) == Config(engine_id="e")


@each("name", FIELDS)
def test_no_field_takes_anything(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^extra: {name}: expected .*, got "):
        PLUGIN.config({name: [[]]}, {"engine_id": "e"})


def test_limits_are_a_dict_of_their_own() -> None:
    given = {"limits": {"peers_max": 7, "peer_idle_s": 5}}
    assert PLUGIN.config(given, {"engine_id": "e"}).limits == Limits(peers_max=7, peer_idle_s=5.0)
    for name in (entry.name for entry in fields(Limits)):
        with pytest.raises(ConfigError, match=f"^extra: limits: {name}: expected .*, got '7'"):
            PLUGIN.config({"limits": {name: "7"}}, {"engine_id": "e"})
    with pytest.raises(ConfigError, match=r"^extra: limits: .*unknown: peer_max; did you mean 'peers_max'"):
        PLUGIN.config({"limits": {"peer_max": 7}}, {"engine_id": "e"})


def test_settings_of_a_plugin_make_a_config() -> None:
    values = {"engine_id": "e", "role": "producer", "listen": "tcp://127.0.0.1:0"}
    given = {"lease_ttl_s": 60, "listen": "tcp://127.0.0.2:0", "limits": {"peers_max": 7}, "other": object()}
    config = PLUGIN.config(given | {"loads_waiting_max": 5.0}, values)  # JSON of a gateway that has no whole numbers
    assert (config.engine_id, config.role, config.listen) == ("e", "producer", "tcp://127.0.0.2:0")
    assert (config.lease_ttl_s, config.limits, config.loads_waiting_max) == (60.0, Limits(peers_max=7), 5)


def test_settings_of_the_plugin_itself_stand_beside_them() -> None:
    assert PLUGIN.own_settings({"lease_ttl_s": 60}, Own) == Own()
    assert PLUGIN.own_settings({"lease_ttl_s": 60, "other": 7}, Own) == Own(7)
    with pytest.raises(ConfigError, match=r"^extra: Expected `int`, got `str` - at `\$\.other`, got '7'$"):
        PLUGIN.own_settings({"other": "7"}, Own)
    with pytest.raises(ConfigError, match=r"^extra: unknown: others; did you mean 'other'"):
        PLUGIN.own_settings({"others": 7}, Own)


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


@pytest.mark.parametrize("configs", [{}, {"parallel": {}}, {"parallel": {"cp_size": 1}}], ids=str)
def test_an_option_that_an_engine_does_not_have_is_off(configs: dict[str, dict[str, int]]) -> None:
    option = RefusedOption("--cp-size", "parallel.cp_size", 1, "why")
    given = SimpleNamespace(**{name: SimpleNamespace(**one) for name, one in configs.items()})
    refuse_options([option], given, plugin="kvflow")
    given.parallel = SimpleNamespace(cp_size=4)
    with pytest.raises(ConfigError, match=r"^kvflow: --cp-size is 4, supported is 1: why$"):
        refuse_options([option], given, plugin="kvflow")


def test_a_setting_whose_part_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvflow.stock", None)  # as if the folder were deleted
    needs = pytest.raises(ConfigError, match=r"^stock_peers needs kvflow\.stock, which is not installed$")
    with needs, importing_part("stock", "stock_peers", ConfigError):
        importlib.import_module("kvflow.stock")
    with (
        pytest.raises(ModuleNotFoundError, match="kvflow_of_nowhere"),
        importing_part("stock", "stock_peers", ConfigError),
    ):
        importlib.import_module("kvflow_of_nowhere")
