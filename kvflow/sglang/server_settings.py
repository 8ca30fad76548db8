"""Reads and checks a user's settings for an SGLang server: the environment variable `KVFLOW_SGLANG_CONFIG`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from kvflow.checks import short_repr
from kvflow.config import Config
from kvflow.connector.as_nixl import AS_NIXL, acts_as_nixl
from kvflow.connector.plugin_settings import PluginSettings, RefusedOption
from kvflow.errors import ConfigError

SETTINGS = "KVFLOW_SGLANG_CONFIG"
"""Name of the environment variable with fields of `kvflow.Config` as a JSON object, for all ranks of a server."""

_TOKENS_OF_RANKS = "the tokens of a page are on several ranks"
REFUSED_OPTIONS = (
    RefusedOption("--attn-cp-size", "parallel.attn_cp_size", 1, _TOKENS_OF_RANKS),
    RefusedOption("--dcp-size", "parallel.attn_dcp_size", 1, _TOKENS_OF_RANKS),
    RefusedOption("--enable-kv-cache-sharding", "parallel.enable_kv_cache_sharding", False, _TOKENS_OF_RANKS),
    RefusedOption("--pp-size", "parallel.pp_size", 1, "ranks of other stages have pages of other layers"),
    RefusedOption("--enable-hisparse", "memory.enable_hisparse", False, "pages of a decode server are in host memory"),
    RefusedOption(
        "--enable-unified-memory", "memory.enable_unified_memory", False, "pages are of all layers, and move"
    ),
    RefusedOption(
        "--enable-memory-saver", "exec.features.enable_memory_saver", False, "pages lose the memory that is registered"
    ),
    RefusedOption(
        "--disaggregation-decode-allocation-policy",
        "disagg.disaggregation_decode_allocation_policy",
        "early",
        "a decode server has to have pages before the first chunk",
    ),
)
"""Options that change what a page index means. tests/sglang/options.py says it of all options."""

_RANKS = ("tp_rank", "tp_size", "dp_rank", "pp_rank", "pp_size")
_SETTINGS = PluginSettings(
    where=SETTINGS, engine="SGLang", from_engine=("engine_id", "model", *_RANKS, "num_kv_heads", "role")
)
_NIXL_BACKEND, _NIXL_PARAMS = "SGLANG_DISAGGREGATION_NIXL_BACKEND", "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"
_JSON_OBJECT = msgspec.json.Decoder(dict[str, Any])


def config_of(values: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Config:
    """Return the kvflow.Config for one pool of a rank, with the user's settings from the `environment`.

    `values` has fields of Config that are derived from the SGLang server, and a default for `listen`, which the user
    may override. With `KVFLOW_AS_NIXL`, SGLang's variables for its backend "nixl" are defaults, too. ConfigError if a
    variable is not a JSON object, or has an unknown, mistyped or invalid setting.
    """
    nixl = _settings_of_nixl(environment) if acts_as_nixl(environment) else {}
    return _SETTINGS.config(_json_object(environment, SETTINGS), {**values, **nixl})


def switch_warning(ib_device: str | None) -> str:
    """Return the log line that says that the backend "nixl" is kvflow, and whether `ib_device` has no effect."""
    without = f". Without effect: --disaggregation-ib-device {ib_device} (UCX_NET_DEVICES has one)" if ib_device else ""
    return (
        f"{AS_NIXL}=1: the transfer backend nixl is kvflow in this server. It exchanges nothing with servers that run "
        f"SGLang's own backend nixl: set {AS_NIXL} on all servers{without}"
    )


def _settings_of_nixl(environment: Mapping[str, str]) -> dict[str, Any]:
    backend, params = environment.get(_NIXL_BACKEND), _json_object(environment, _NIXL_PARAMS)
    return ({"nixl_backend": backend} if backend else {}) | ({"nixl_backend_params": params} if params else {})


def _json_object(environment: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return the JSON object in the variable `name`; empty if the variable is unset or blank."""
    text = environment.get(name, "").strip() or "{}"
    try:
        return _JSON_OBJECT.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{name}: expected a JSON object of settings ({error}), got {short_repr(text)}") from error
