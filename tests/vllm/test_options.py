"""No option of vLLM changes what a block id means unnoticed: each is handled, refused, or known to have no effect."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.config
from vllm.config.aux_output import AuxOutputConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.mla import indexer
from vllm.v1.kv_cache_interface import FullAttentionSpec

import kvflow.vllm.worker_side as worker_side
from kvflow import CacheLayout, Config
from kvflow.attention_backends import rows_of
from kvflow.blocking import Runtime
from kvflow.connector.plugin_settings import RefusedOption
from kvflow.connector.worker import ConnectorWorker
from kvflow.errors import ConfigError, LayoutError
from kvflow.vllm.connector import KVFlowConnector
from kvflow.vllm.extra_config import REFUSED_OPTIONS
from kvflow.vllm.kv_cache_layout import groups_of
from kvflow.vllm.messages import KVFlowIntroduction
from kvflow.vllm.named_nixl import NixlConnector
from tests.vllm.options import HANDLED, INDIFFERENT, REFUSED
from tests.vllm.test_settings import FULL, HEADS, cache_of, scheduler_side, vllm_config

CONFIGS = {
    "parallel_config": vllm.config.ParallelConfig,
    "cache_config": vllm.config.CacheConfig,
    "attention_config": vllm.config.AttentionConfig,
    "scheduler_config": vllm.config.SchedulerConfig,
    "kv_transfer_config": vllm.config.KVTransferConfig,
}
"""vLLM's classes of options that its KV cache depends on."""


def classified(config: str) -> list[str]:
    """The fields of a config in all tables, as often as they are in one."""
    refused = [option.field.partition(".") for option in REFUSED_OPTIONS]
    return [
        *HANDLED.get(config, {}),
        *REFUSED.get(config, {}),
        *(name for of, _, name in refused if of == config),
        *(name for names in INDIFFERENT.get(config, {}).values() for name in names.split()),
    ]


@pytest.mark.parametrize("config", CONFIGS)
def test_each_option_of_the_installed_vllm_is_in_one_table(config: str) -> None:
    declared = CONFIGS[config].__dataclass_fields__  # with those that are only given, such as max_model_len
    fields = {name for name in declared if not name.isupper()}
    found = classified(config)
    assert len(found) == len({*found}), "in two tables"
    assert not fields - {*found}, "what does this mean for blocks? Handle or refuse it, or say that it has no effect"


@pytest.mark.parametrize(
    "test",
    sorted({test for config in CONFIGS for table in (HANDLED, REFUSED) for test in table.get(config, {}).values()}),
)
def test_what_is_handled_or_refused_names_a_test(test: str) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (Path(__file__).parent / file).read_text(), re.MULTILINE)


@pytest.mark.parametrize("role", KVConnectorRole)
@pytest.mark.parametrize("connector", [KVFlowConnector, NixlConnector])
@pytest.mark.parametrize("extra", [{}, {"stock_peers": True}, {"share_prefixes": True}], ids=str)
@pytest.mark.parametrize("option", REFUSED_OPTIONS, ids=lambda option: option.field)
def test_an_option_that_is_refused_is_named_at_the_start(
    option: RefusedOption,
    extra: dict[str, Any],
    connector: type[KVFlowConnector],
    role: KVConnectorRole,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In vLLM's scheduler as in its workers, before a request."""
    monkeypatch.setattr(worker_side, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(worker_side, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
    config, _, name = option.field.partition(".")
    given = vllm_config(**extra)
    given.kv_transfer_config.kv_load_failure_policy = "recompute"
    holder = given.__dict__.setdefault(config, SimpleNamespace())
    on = 2 if name.endswith("_size") else True
    setattr(holder, name, on)
    with pytest.raises(ConfigError, match=f"^KVFlowConnector: {option.option} is {on}, supported is {option.off}: "):
        connector(given, role, cache_of(FullAttentionSpec(**HEADS)))


def test_what_is_refused_is_off_by_default() -> None:
    configs = {**CONFIGS, "aux_output_config": AuxOutputConfig}
    for option in REFUSED_OPTIONS:
        config, _, name = option.field.partition(".")
        assert config not in configs or getattr(configs[config](), name) == option.off


def test_a_scheduler_that_knows_only_some_ranks_is_refused() -> None:
    """Torchrun's way, external_launcher: each rank has a scheduler, which would offer only its own blocks."""
    side = scheduler_side(FULL)
    config = Config(engine_id="prefill", listen="tcp://127.0.0.1:0", transport="inproc", tp_size=2, num_kv_heads=4)
    with Runtime(config) as runtime:
        cache = {"layers.0": torch.zeros(2, 4, 2, 16, 8)}
        runtime.register_kv_caches(cache, CacheLayout.infer(cache, order="HND", block_size=16))
        ticket = ConnectorWorker(runtime).introduction()
        with pytest.raises(ConfigError, match=r"1 rank of 2\..*--distributed-executor-backend external_launcher"):
            side.set_xfer_handshake_metadata_pp_aware({(0, 0): KVFlowIntroduction(ticket)})


def test_the_layout_of_the_cache_is_the_one_that_ranks_can_divide() -> None:
    """Whatever VLLM_KV_CACHE_LAYOUT is: vLLM uses the connector's layout. Latents are not divided."""
    given = vllm_config()
    assert KVFlowConnector.get_required_kvcache_layout(given) == "LBHNC"
    given.model_config.use_mla = True
    assert KVFlowConnector.get_required_kvcache_layout(given) is None


def test_a_cache_in_the_memory_of_the_host_is_refused() -> None:
    cache = cache_of(FullAttentionSpec(**HEADS))
    cache.kv_cache_groups[0].host_resident = True
    with pytest.raises(ConfigError, match="HiSparse"):
        groups_of(cache)


@pytest.mark.parametrize("backend", [indexer.DeepseekV32IndexerBackend, indexer.DeepseekV4IndexerBackend])
def test_models_with_an_indexer_are_refused(backend: type[AttentionBackend]) -> None:
    """Its cache has formats of its own, by the option, that the table of layouts does not have."""
    with pytest.raises(LayoutError, match=backend.get_name()):
        rows_of(backend.get_name(), vllm.__version__)
