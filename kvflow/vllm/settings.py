"""vLLM's configuration as kvflow's: which rank this is, and what `kv_connector_extra_config` asks for.

Keys of `kv_connector_extra_config` are fields of `kvflow.Config`, except those that vLLM itself knows (`_FROM_VLLM`),
and fields of `Extra`. Nothing is guessed: an unknown key or a value of the wrong type is a ConfigError that names it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.platforms import current_platform

from kvflow.checks import Seconds, Size
from kvflow.config import Config
from kvflow.connector.scheduler import SchedulingConfig
from kvflow.connector.settings import PluginSettings
from kvflow.core.cache.groups import GroupKind
from kvflow.errors import ConfigError
from kvflow.logs import logger_of
from kvflow.vllm.layout import Group

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logger_of("vllm.kvflow")

_FROM_VLLM = ("engine_id", "tp_rank", "tp_size", "dp_rank", "pp_rank", "pp_size", "num_kv_heads", "role")
# The system chooses the ports: tickets name those of all ranks. A peer that is only slow is waited for, since its
# failure would be a request's, but no longer than leaves the load time for its next source.
_DEFAULTS = {"listen": "tcp://127.0.0.1:0", "drain_timeout_s": 1.0, "handshake_timeout_s": 10.0}

# A stock reader looks at nothing: what it reads late is wrong, so it is kept long, and freed when it has been read.
_STOCK_DEFAULTS = {"lease_ttl_s": 120.0}


class StockExtra(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `stock_peers`: see docs/stock.md. Times are seconds."""

    hashes: tuple[str, ...] = ()
    """Compatibility hashes of engines that are read from, beside that of this engine as the installed vLLM makes it."""
    serve_hash: str = ""
    """Hash that readers are shown; this engine's own if it is empty."""
    serve_version: str = ""
    """Version of vLLM that those readers run; the installed one if it is empty."""
    tp_sizes: tuple[int, ...] = ()
    lease_s: float = 30.0
    router_s: float = 5.0


class EventsExtra(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one of `prefix_events`: see `kvflow.prefix.kv_events.EventSource`."""

    holder: str
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


class Extra(msgspec.Struct, frozen=True, kw_only=True):
    """Settings beside those of kvflow.Config."""

    fetch_tokens_min: Size = 1
    full_blocks_only: bool = False
    release_failed_loads: bool = True
    """True if the offer of a load that has failed is given back; False where a router uses its parameters again."""
    kv_format: str | None = None
    """Meaning of the cache's bytes, for attention backends with several formats (see `layout_for_backend`)."""
    stock_peers: bool = False
    """True if engines with vLLM's own NixlConnector are read from, and served."""
    stock: StockExtra = StockExtra()
    share_prefixes: bool = False
    """True if peers may read prefixes out of this engine's cache."""
    prefix_peers: tuple[str, ...] | None = None
    """Addresses of engines, one of each, that are asked for the prefix of a prompt that no prefill engine offers. With
    an empty list only those are asked that a router names, with None nobody."""
    prefix_events: tuple[EventsExtra, ...] = ()
    """Engines whose KV events say who is to be asked; each `holder` is the engine's address, as in `prefix_peers`."""
    prefix_tokens_min: Size = 256
    """With fewer tokens than this that are not cached, nobody is asked."""
    prefix_wait_s: Seconds = 0.05
    """Longest time that a question may take."""
    recompute_s_per_token: Seconds | None = None
    """Time to compute a token here: whatever takes longer to pull is computed. With None, all that is found is
    pulled."""

    @property
    def uses_prefixes(self) -> bool:
        return self.share_prefixes or self.pulls_prefixes

    @property
    def pulls_prefixes(self) -> bool:
        return self.prefix_peers is not None or bool(self.prefix_events)


_NIXL_VARIABLES = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")
_SETTINGS = PluginSettings(
    where="kv_connector_extra_config",
    engine="vLLM",
    from_engine=_FROM_VLLM,
    own=Extra.__struct_fields__,
)


def extra_of(vllm_config: VllmConfig) -> Extra:
    """The keys that kvflow.Config does not know. Raises ConfigError for any key that nobody knows."""
    return _SETTINGS.own_settings(vllm_config.kv_transfer_config.kv_connector_extra_config, Extra)


def config_of(vllm_config: VllmConfig, *, tp_rank: int, pp_rank: int) -> Config:
    """One rank's Config. Raises ConfigError."""
    parallel, model, transfer = vllm_config.parallel_config, vllm_config.model_config, vllm_config.kv_transfer_config
    extra = extra_of(vllm_config)
    stock = _STOCK_DEFAULTS if extra.stock_peers else {}
    values: dict[str, Any] = {
        "model": str(model.model),
        **_DEFAULTS,
        **stock,
        **_staging(transfer.kv_buffer_device),
        "engine_id": transfer.engine_id,
        "tp_rank": tp_rank,
        "tp_size": parallel.tensor_parallel_size,
        "dp_rank": parallel.data_parallel_index,
        "pp_rank": pp_rank,
        "pp_size": parallel.pipeline_parallel_size,
        "num_kv_heads": _model_kv_heads(vllm_config),
        "role": "both" if extra.share_prefixes else str(transfer.kv_role).removeprefix("kv_"),
    }
    return _SETTINGS.config(transfer.kv_connector_extra_config, values)


def warn_of_side_channel(vllm_config: VllmConfig) -> None:
    """Warn of NixlConnector's variables where they are set in place of `listen`, which this connector reads."""
    given = vllm_config.kv_transfer_config.kv_connector_extra_config
    found = [f"{name}={os.environ[name]}" for name in _NIXL_VARIABLES if os.environ.get(name)]
    if found and "listen" not in given:
        logger.warning(
            "%s: NixlConnector's, which KVFlowConnector does not read: it listens at %s, where only this host reaches "
            "it. Set `listen` (and `advertise_host`) in kv_connector_extra_config",
            ", ".join(found),
            _DEFAULTS["listen"],
        )


def _check_outputs(vllm_config: VllmConfig) -> None:
    """Refuse auxiliary outputs: those of a prompt's tokens stay at the engine that has computed them. ConfigError."""
    holders = (getattr(vllm_config, name, None) for name in ("aux_output_config", "model_config"))
    if any(getattr(holder, "enable_return_routed_experts", False) for holder in holders):
        raise ConfigError(
            "--enable-return-routed-experts: KVFlowConnector moves blocks, and not the experts of their tokens: a "
            "prompt that was received would be answered without them"
        )


def _staging(buffer_device: str) -> dict[str, str]:
    """vLLM's own setting: a buffer on the CPU for a cache that is not."""
    on_cpu = buffer_device == "cpu" and current_platform.device_type != "cpu"
    return {"staging": "always"} if on_cpu else {}


def _model_kv_heads(vllm_config: VllmConfig) -> int | None:
    """None where the tensors tell: one rank has all heads of each layer, be they as many in all layers or not."""
    if vllm_config.model_config.use_mla or vllm_config.parallel_config.tensor_parallel_size == 1:
        return None
    return vllm_config.model_config.get_total_num_kv_heads() or None


def scheduling_of(vllm_config: VllmConfig, groups: Sequence[Group]) -> SchedulingConfig:
    """Return the settings of the scheduler's half. Raises ConfigError."""
    _check_outputs(vllm_config)
    extra, transfer = extra_of(vllm_config), vllm_config.kv_transfer_config
    recycles = any(group.recycles for group in groups)
    has_state = any(group.facts.kind is GroupKind.STATE for group in groups)
    return SchedulingConfig(
        block_size=groups[0].facts.block_size,
        groups=tuple(group.facts for group in groups),
        leave_last_token=recycles,
        # Stock readers take blocks that are full for cached, last tokens included: they have to be computed.
        withhold_last_token=extra.stock_peers and recycles and not has_state,
        lease_ttl_s=config_of(vllm_config, tp_rank=0, pp_rank=0).lease_ttl_s,
        fetch_tokens_min=extra.fetch_tokens_min,
        full_blocks_only=extra.full_blocks_only,
        release_failed_loads=extra.release_failed_loads,
        produces=transfer.is_kv_producer,
        consumes=transfer.is_kv_consumer,
    )
