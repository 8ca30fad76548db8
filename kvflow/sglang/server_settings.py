"""Reads and checks a user's settings for an SGLang server: the environment variable `KVFLOW_SGLANG_CONFIG`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from kvflow.checks import short_repr
from kvflow.config import Config
from kvflow.connector.plugin_settings import PluginSettings
from kvflow.errors import ConfigError

SETTINGS = "KVFLOW_SGLANG_CONFIG"
"""Name of the environment variable with fields of `kvflow.Config` as a JSON object, for all ranks of a server."""

_RANKS = ("tp_rank", "tp_size", "dp_rank", "pp_rank", "pp_size")
_SETTINGS = PluginSettings(
    where=SETTINGS, engine="SGLang", from_engine=("engine_id", "model", *_RANKS, "num_kv_heads", "role")
)


def config_of(values: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Config:
    """Return the kvflow.Config for one pool of a rank, with the user's settings from the `environment`.

    `values` has fields of Config that are derived from the SGLang server, and a default for `listen`, which the user
    may override. ConfigError if the variable is not a JSON object, or has an unknown, mistyped or invalid setting.
    """
    text = environment.get(SETTINGS, "").strip() or "{}"
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(
            f"{SETTINGS}: expected a JSON object of settings ({error}), got {short_repr(text)}"
        ) from error
    return _SETTINGS.config(given, values)
