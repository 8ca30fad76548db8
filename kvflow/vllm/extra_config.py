"""kvflow's settings from vLLM's configuration: each rank's `Config`, and the keys of `kv_connector_extra_config`.

These keys are the fields of `Extra`, and those of `kvflow.Config` except the fields that vLLM itself sets
(`_FROM_VLLM`). For an unknown key or a value of a wrong type, a ConfigError names the key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.platforms import current_platform

from kvflow.checks import Count, Seconds, Size, built
from kvflow.config import Config
from kvflow.connector.plugin_settings import PluginSettings, RefusedOption, refuse_options
from kvflow.connector.scheduler import SchedulingConfig
from kvflow.core.cache.groups import GroupKind
from kvflow.errors import ConfigError
from kvflow.logs import logger_of
from kvflow.transport.nixl.defaults import UNMAPPED_MEMORY, add_settings
from kvflow.vllm import nixl_settings
from kvflow.vllm.kv_cache_layout import Group, check_sharding

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logger_of("vllm.kvflow")

PREFIX_SETTINGS = "share_prefixes, prefix_peers or prefix_events"
"""Settings that need the part `prefix`."""
_FROM_VLLM = ("engine_id", "tp_rank", "tp_size", "dp_rank", "pp_rank", "pp_size", "num_kv_heads", "role")
# The system chooses the ports, since tickets name the ports of all ranks. The handshake timeout is long enough for a
# slow peer, since a failed handshake fails requests, and short enough that the load has time for its next source.
_DEFAULTS = {"listen": "tcp://127.0.0.1:0", "drain_timeout_s": 1.0, "handshake_timeout_s": 10.0}

# A stock reader cannot detect that it reads too late, so its leases are long. They end early once they are read.
_STOCK_DEFAULTS = {"lease_ttl_s": 120.0}


class StockExtra(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Value of the key `stock`: settings for the exchange with stock engines (`stock_peers`), see docs/stock.md."""

    hashes: tuple[str, ...] = ()
    """vLLM's compatibility hashes of further stock engines to read from. Engines with the hash that the installed vLLM
    computes are always read."""
    serve_hash: str = ""
    """Compatibility hash in answers to stock readers; if empty, the hash that the installed vLLM computes."""
    serve_version: str = ""
    """vLLM version of the stock readers; if empty, the installed version."""
    tp_sizes: tuple[int, ...] = ()
    """Tensor-parallel sizes of the stock engines. Needed if ranks have copies of the same heads (MLA, or more ranks
    than heads)."""
    lease_s: float = 30.0
    """The stock producers' `kv_lease_duration`, in seconds. If the value here is larger than theirs, a load may succeed
    with wrong contents."""
    router_s: float = 5.0
    """Maximum seconds from the end of a prefill until the decode engine has the parameters from the router."""


class EventsExtra(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source in the list `prefix_events`, with the fields of `kvflow.prefix.kv_events.EventSource`."""

    holder: str
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


@built
class Extra(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `kv_connector_extra_config` that are not fields of kvflow.Config; see docs/vllm.md."""

    fetch_tokens_min: Size = 1
    """Smallest number of tokens to load. If fewer are missing, they are computed locally."""
    full_blocks_only: bool = False
    """True to offer only full blocks of a prompt."""
    release_failed_loads: bool = True
    """True to release the ticket when a load fails. False if the router retries with the same parameters."""
    late_blocks: bool = False
    """True to give a request with a pending ticket blocks only once its prefill has begun. Until then it waits in
    vLLM's queue."""
    secondary_tiers: tuple[dict[str, object], ...] = ()
    """Not used by kvflow: Dynamo reads here where this engine's prefixes can be fetched, for its KV hints."""
    kv_format: str | None = None
    """Name of the byte format of the cache, if the attention backend has several (see `layout_for_backend`)."""
    stock_peers: bool = False
    """True to exchange blocks, in both directions, with engines that run vLLM's own NixlConnector."""
    stock: StockExtra = StockExtra()
    share_prefixes: bool = False
    """True to let peers read prefixes from this engine's cache."""
    prefix_peers: tuple[str, ...] | None = None
    """Addresses, one for each engine, to ask for a prefix of the prompt if a request has no ticket. (): ask only peers
    that the router names. None: ask no peer, unless `prefix_events` has sources."""
    follow_successors: bool = False
    """True to ask, in place of a peer that is gone, the engine that its goodbye has named."""
    prefix_events: tuple[EventsExtra, ...] = ()
    """Sources of other engines' KV events: this engine also asks engines that, according to their events, have part of
    a prefix. `holder` is an engine's address, as in `prefix_peers`."""
    prefix_tokens_min: Size = 256
    """Smallest number of missing prompt tokens for which to ask peers for a prefix."""
    prefix_wait_s: Seconds = 0.05
    """Seconds to wait at most for peers' answers about a prefix."""
    recompute_s_per_token: Seconds | None = None
    """Seconds that this engine takes to compute a token. A prefix is computed locally if loading it would take longer.
    None: load every prefix that a peer has."""

    recent_tokens_max: Count = 0
    """Number of tokens of recently answered prompts to remember, so that a server that takes this one's place can be
    warmed with them. 0: remember none."""

    @property
    def uses_prefixes(self) -> bool:
        return self.share_prefixes or self.pulls_prefixes

    @property
    def pulls_prefixes(self) -> bool:
        return self.prefix_peers is not None or bool(self.prefix_events)


_MEANING = "a block id would stand for the tokens of several ranks"
_EXPERTS = "only the engine that computes a prompt knows the experts of its tokens, and they are not transferred"
REFUSED_OPTIONS = (
    RefusedOption("--prefill-context-parallel-size", "parallel_config.prefill_context_parallel_size", 1, _MEANING),
    RefusedOption("--use-replayssm", "cache_config.use_replayssm", False, "blocks hold a state that lags behind"),
    RefusedOption("--enable-return-routed-experts", "aux_output_config.enable_return_routed_experts", False, _EXPERTS),
    RefusedOption(
        "--enable-return-routed-experts", "model_config.enable_return_routed_experts", False, _EXPERTS
    ),  # 0.28
)
"""Options that change what a block id means, or need more than blocks. tests/vllm/options.py says it of all options."""

_UNMAPPING = {"--enable-sleep-mode": "enable_sleep_mode", "--enable-cumem-allocator": "enable_cumem_allocator"}
"""Options with which vLLM, on a GPU, puts the cache into memory that `/sleep` and `/release_kv_cache_memory` unmap."""

_SETTINGS = PluginSettings(
    where="kv_connector_extra_config", engine="vLLM", from_engine=_FROM_VLLM, own_keys=Extra.__struct_fields__
)


def extra_of(vllm_config: VllmConfig) -> Extra:
    """Return the user's settings in `kv_connector_extra_config` that are fields of Extra.

    ConfigError if a key is a field of neither Extra nor kvflow.Config, or if a value has a wrong type.
    """
    return _SETTINGS.own_settings(nixl_settings.settings_in(vllm_config.kv_transfer_config), Extra)


def token_shards(vllm_config: VllmConfig) -> int:
    """Return the number of ranks over which vLLM shards the tokens of a block (decode context parallelism), usually 1.

    ConfigError if kvflow cannot transfer blocks that are sharded so.
    """
    parallel = vllm_config.parallel_config
    shards: int = getattr(parallel, "decode_context_parallel_size", 1)
    if shards == 1:
        return shards
    extra = extra_of(vllm_config)
    refused = {
        f"it is not --tensor-parallel-size, {parallel.tensor_parallel_size}": shards != parallel.tensor_parallel_size,
        "the model has no latents (MLA)": not vllm_config.model_config.use_mla,
        "stock_peers is on": extra.stock_peers,
        "share_prefixes, prefix_peers or prefix_events is set": extra.uses_prefixes,
    }
    if why := next((why for why, applies in refused.items() if applies), ""):
        raise ConfigError(f"KVFlowConnector: --decode-context-parallel-size is {shards}, supported is 1: {why}")
    return shards


def config_of(vllm_config: VllmConfig, *, tp_rank: int, pp_rank: int) -> Config:
    """Return the kvflow.Config for one rank, made from vLLM's configuration. ConfigError names a wrong setting."""
    refuse_options(REFUSED_OPTIONS, vllm_config, plugin="KVFlowConnector")
    token_shards(vllm_config)
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
    settings = nixl_settings.settings_in(transfer)
    return _SETTINGS.config(settings if unmapping_option(model) is None else _for_unmapped_memory(settings), values)


def unmapping_option(model: ModelConfig) -> str | None:
    """Return vLLM's option that lets vLLM unmap the cache's memory while the server runs; None if no such option is on.

    `model` is vLLM's configuration of the model, which has these options.
    """
    return next((option for option, field in _UNMAPPING.items() if getattr(model, field, False)), None)


def _for_unmapped_memory(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `settings`, the user's, with UCX's settings for unmapped memory, but for those that the user set."""
    params = settings.get("nixl_backend_params", {})
    if "UCX" not in str(settings.get("nixl_backend", "UCX")).split(",") or not isinstance(params, Mapping):
        return settings
    chosen = params.get("UCX.engine_config", params.get("engine_config", ""))
    config = add_settings("UCX", str(chosen), UNMAPPED_MEMORY)
    return {**settings, "nixl_backend_params": {**params, "UCX.engine_config": config}}


def warn_of_side_channel(vllm_config: VllmConfig) -> None:
    """Log a warning if the user has set NixlConnector's environment variables for addresses, but not `listen`.

    KVFlowConnector ignores these variables, except under NixlConnector's name by `KVFLOW_AS_NIXL`.
    """
    settings = nixl_settings.settings_in(vllm_config.kv_transfer_config)
    variables = (nixl_settings.HOST, nixl_settings.PORT)
    in_use = [f"{name}={os.environ[name]}" for name in variables if os.environ.get(name)]
    if in_use and "listen" not in settings:
        logger.warning(
            "%s: only NixlConnector reads this. KVFlowConnector listens at %s, where only this host reaches it. Set "
            "`listen` (and `advertise_host`) in kv_connector_extra_config",
            ", ".join(in_use),
            _DEFAULTS["listen"],
        )


def _staging(buffer_device: str) -> dict[str, str]:
    """Return {"staging": "always"} if `kv_buffer_device` is "cpu" and the cache is on another device, else {}."""
    on_cpu = buffer_device == "cpu" and current_platform.device_type != "cpu"
    return {"staging": "always"} if on_cpu else {}


def _model_kv_heads(vllm_config: VllmConfig) -> int | None:
    """Return the number of KV heads in a layer of the model, or None if kvflow can derive it from the tensors.

    kvflow can do so with one rank or with MLA, since each rank then has all heads of each layer.
    """
    if vllm_config.model_config.use_mla or vllm_config.parallel_config.tensor_parallel_size == 1:
        return None
    return vllm_config.model_config.get_total_num_kv_heads() or None


def scheduling_of(vllm_config: VllmConfig, groups: Sequence[Group]) -> SchedulingConfig:
    """Return the settings for a `ConnectorScheduler`, from vLLM's configuration and the transferred `groups` of layers.

    ConfigError names a wrong setting.
    """
    extra, transfer = extra_of(vllm_config), vllm_config.kv_transfer_config
    for group in groups:
        check_sharding(group, vllm_config)
    frees_blocks = any(group.frees_blocks for group in groups)
    has_state = any(group.facts.kind is GroupKind.STATE for group in groups)
    return SchedulingConfig(
        block_size=groups[0].facts.block_size,
        groups=tuple(group.facts for group in groups),
        leave_last_token=frees_blocks,
        # Stock readers treat full blocks as cached, including the last token, so the prefill side has to compute it.
        withhold_last_token=extra.stock_peers and frees_blocks and not has_state,
        lease_ttl_s=config_of(vllm_config, tp_rank=0, pp_rank=0).lease_ttl_s,
        fetch_tokens_min=extra.fetch_tokens_min,
        full_blocks_only=extra.full_blocks_only,
        release_failed_loads=extra.release_failed_loads,
        late_blocks=extra.late_blocks,
        produces=transfer.is_kv_producer,
        consumes=transfer.is_kv_consumer,
    )
