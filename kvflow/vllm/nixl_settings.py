"""Settings of vLLM's own NixlConnector as settings of kvflow, for engines in which kvflow has its name.

That name comes from the switch `KVFLOW_AS_NIXL`. The keys of NixlConnector in `kv_connector_extra_config`, and its
environment variables, then mean what they mean there. Keys of kvflow may stand beside them, and win.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvflow import checks
from kvflow.connector.as_nixl import AS_NIXL, acts_as_nixl
from kvflow.errors import ConfigError
from kvflow.hosts import address_at, plain_address

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

NIXL_NAMES = ("NixlConnector", "NixlPullConnector")
"""Names of vLLM's connector whose wire kvflow speaks. NixlPushConnector has another wire, and stays vLLM's."""
HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"

_WHERE = "kv_connector_extra_config"
_DEFAULT_HOST, _DEFAULT_PORT = "127.0.0.1", "5600"  # of NixlConnector, if the user sets only one of the two variables
_WITHOUT_EFFECT = (
    *("num_threads", "engine_ttl", "bidirectional_kv_xfer", "kv_recompute_threshold", "decoder_kv_blocks_ttl"),
    "push_registration_timeout",
)
_OLD_VARIABLE = "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"  # NixlConnector's own successor is `kv_lease_duration`


def has_nixls_name(transfer: KVTransferConfig) -> bool:
    """Return True if `KVFLOW_AS_NIXL` is on, and `transfer` asks for vLLM's own NixlConnector."""
    return acts_as_nixl() and transfer.kv_connector in NIXL_NAMES and not transfer.kv_connector_module_path


def settings_in(transfer: KVTransferConfig) -> Mapping[str, Any]:
    """Return the user's settings, with keys of kvflow only. ConfigError names a key that kvflow cannot do."""
    settings: Mapping[str, Any] = transfer.kv_connector_extra_config
    return as_kvflows(settings, os.environ) if has_nixls_name(transfer) else settings


def as_kvflows(given: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of kvflow that mean the same as `given` and NixlConnector's variables in `environment`.

    Engines with vLLM's own NixlConnector may be in the fleet, so `stock_peers` is on unless `given` has it.
    """
    ours: dict[str, Any] = {"stock_peers": True}
    if "listen" not in given:
        ours |= _side_channel(environment)
    for key, value in given.items():
        if key in _MEANINGS:
            ours |= _MEANINGS[key](value)
    kvflows = {key: value for key, value in given.items() if key not in (*_MEANINGS, *_WITHOUT_EFFECT)}
    if isinstance(stock := kvflows.get("stock"), Mapping):
        kvflows["stock"] = {**ours.get("stock", {}), **stock}
    return ours | kvflows


def switch_warning(given: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Return the log line that says that kvflow has NixlConnector's name, and which of its settings have no effect."""
    without = [key for key in _WITHOUT_EFFECT if key in given]
    without += [_OLD_VARIABLE] if environment.get(_OLD_VARIABLE) else []
    exchanges = "exchanges blocks" if given.get("stock_peers", True) else "exchanges nothing"
    line = (
        f"{AS_NIXL}=1: NixlConnector is kvflow's connector in this engine. It {exchanges} with engines that have "
        f"vLLM's own (`stock_peers` in {_WHERE})"
    )
    return f"{line}. Without effect: {', '.join(without)}" if without else line


def _side_channel(environment: Mapping[str, str]) -> dict[str, str]:
    host, port = environment.get(HOST), environment.get(PORT)
    if not (host or port):
        return {}
    address = address_at(host or _DEFAULT_HOST, port or _DEFAULT_PORT)
    return {"listen": plain_address(address, what=f"{HOST}, {PORT}"), "advertise_host": "auto"}


def _backends(value: Any) -> dict[str, Any]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{_WHERE}: backends: expected a list of NIXL's backends, got {checks.short_repr(value)}")
    names = [checks.text(name, f"{_WHERE}: backends", error=ConfigError) for name in value]
    return {"nixl_backend": ",".join(names)}


def _lease(value: Any) -> dict[str, Any]:
    lease_s = checks.whole(value, f"{_WHERE}: kv_lease_duration", least=1, error=ConfigError)
    return {"lease_ttl_s": lease_s, "stock": {"lease_s": lease_s}}


def _compatible(value: Any) -> dict[str, Any]:
    if value is not True:
        raise ConfigError(
            f"{_WHERE}: enforce_handshake_compat is {checks.short_repr(value)}, supported is True: kvflow reads only "
            "from caches that it knows to be alike. Name the hashes of the other engines in `stock`"
        )
    return {}


_MEANINGS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "backends": _backends,
    "kv_lease_duration": _lease,
    "enforce_handshake_compat": _compatible,
}
"""For each key of NixlConnector that kvflow can do: the function that returns kvflow's settings for a value."""
