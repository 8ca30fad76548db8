"""Settings that follow from vLLM's configuration, and refused configurations. No server is started."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast, get_args

import msgspec
import pytest
import torch
import vllm
from vllm.config import KVTransferConfig
from vllm.config.cache import CacheDType
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

import kvflow.vllm.connector as connector_module
import kvflow.vllm.worker_side as worker_side_module
from kvflow import CacheGroup, CacheLayout, Config, LeaseOutcome, Limits, ServeRequest
from kvflow.blocking import Runtime
from kvflow.connector.prefix_peers import PrefixPeers
from kvflow.connector.scheduler import ConnectorScheduler
from kvflow.connector.step import Save, Step
from kvflow.connector.worker import ConnectorWorker, FailedLoad, Results
from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.cache.regions import Device
from kvflow.core.cache.tensors import FIRST_DRAFT_LAYER
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.errors import ConfigError, LayoutError, LeaseExpired
from kvflow.prefix import Prefixes
from kvflow.vllm import extra_config, kv_cache_layout, stock_settings
from kvflow.vllm.cache_dtypes import CACHE_DTYPES
from kvflow.vllm.connector import KVFlowConnector
from kvflow.vllm.extra_config import config_of, extra_of, scheduling_of, warn_of_side_channel
from kvflow.vllm.kv_cache_layout import Group, groups_of
from kvflow.vllm.messages import KVFlowIntroduction, KVFlowMetadata
from kvflow.vllm.prefix import RequestPrefixes
from kvflow.vllm.scheduler_side import SchedulerSide
from kvflow.vllm.vllm_metrics import KVFlowStats
from kvflow.vllm.worker_side import WorkerSide
from tests.support.tests_support import any_ticket

HEADS: dict[str, Any] = {"block_size": 128, "num_kv_heads": 3, "head_size": 64, "dtype": torch.float32}
STATE: dict[str, Any] = {"block_size": 2048, "shapes": ((3, 8),), "dtypes": (torch.float32,)}
FULL = Group(index=0, specs={}, facts=GroupFacts(name="full", block_size=16), frees_blocks=False)
OURS = Config(engine_id="prefill", listen="tcp://127.0.0.1:0", transport="inproc")
INSTALLED = ".".join(vllm.__version__.split(".")[:2])


def scheduler_side(*groups: Group, role: str = "kv_both", **settings: Any) -> SchedulerSide:
    scheduling = scheduling_of(vllm_config(role), groups)
    return SchedulerSide(scheduling, ConnectorScheduler(scheduling, new_secret=lambda: "secret"), groups, **settings)


def worker_connector(side: WorkerSide) -> KVFlowConnector:
    connector = KVFlowConnector.__new__(KVFlowConnector)
    connector._role, connector._worker_side = KVConnectorRole.WORKER, side
    return connector


def vllm_config(role: str = "kv_both", **extra: Any) -> Any:
    """The parts of a VllmConfig that are read."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id="engine",
            kv_role=role,
            kv_buffer_device="cpu",
            kv_connector_extra_config=extra,
            is_kv_producer=role != "kv_consumer",
            is_kv_consumer=role != "kv_producer",
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=4, data_parallel_index=1, data_parallel_size=1, pipeline_parallel_size=2
        ),
        model_config=SimpleNamespace(
            model="org/model", use_mla=False, get_total_num_kv_heads=lambda: 8, multimodal_config=None
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )


def test_ranks_and_names_are_vllms() -> None:
    config = config_of(vllm_config(), tp_rank=3, pp_rank=1)
    assert (config.engine_id, config.model, config.num_kv_heads) == ("engine", "org/model", 8)
    assert (config.tp_rank, config.tp_size, config.pp_rank, config.pp_size, config.dp_rank) == (3, 4, 1, 2, 1)
    assert config.role == "both"
    assert config_of(vllm_config("kv_consumer"), tp_rank=0, pp_rank=0).role == "consumer"
    assert (config.listen, config.listen_port) == ("tcp://127.0.0.1:0", 0)


@pytest.mark.parametrize(
    ("variables", "extra", "told"),
    [
        ({"HOST": "10.0.0.7", "PORT": "5600"}, {}, ["HOST=10.0.0.7, VLLM_NIXL_SIDE_CHANNEL_PORT=5600"]),
        ({"PORT": "5600"}, {"lease_ttl_s": 7}, ["PORT=5600"]),
        ({"HOST": "10.0.0.7"}, {"listen": "tcp://10.0.0.7:5600"}, []),
        ({"HOST": ""}, {}, []),
        ({}, {}, []),
    ],
)
def test_variables_of_nixl_connector_in_place_of_listen_are_warned_of(
    variables: dict[str, str],
    extra: dict[str, Any],
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("HOST", "PORT"):
        monkeypatch.delenv(f"VLLM_NIXL_SIDE_CHANNEL_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"VLLM_NIXL_SIDE_CHANNEL_{name}", value)
    with caplog.at_level("WARNING"):
        warn_of_side_channel(vllm_config(**extra))
    found = [one.getMessage() for one in caplog.records if "NixlConnector" in one.getMessage()]
    assert len(found) == len(told)
    for line, words in zip(found, told, strict=True):
        assert f"VLLM_NIXL_SIDE_CHANNEL_{words}: " in line
        assert "tcp://127.0.0.1:0" in line
        assert "Set `listen`" in line


def test_extra_config_goes_where_it_belongs() -> None:
    given = vllm_config(
        "kv_producer",
        listen="tcp://127.0.0.1:5600",
        lease_ttl_s=7,
        fetch_tokens_min=64,
        release_failed_loads=False,
        kv_format="plain",
        limits={"peers_max": 7},
    )
    config = config_of(given, tp_rank=3, pp_rank=1)
    assert config.limits == Limits(peers_max=7)
    assert (config.lease_ttl_s, config.listen_port) == (7.0, 5600 + (1 * 2 + 1) * 4 + 3)
    scheduling = scheduling_of(given, [FULL])
    assert (scheduling.block_size, scheduling.lease_ttl_s, scheduling.fetch_tokens_min) == (16, 7.0, 64)
    assert (scheduling.produces, scheduling.consumes) == (True, False)
    assert not scheduling.release_failed_loads
    assert extra_of(given).kv_format == "plain"


def test_a_source_that_does_not_answer_leaves_a_load_the_time_for_another() -> None:
    config = config_of(vllm_config(), tp_rank=0, pp_rank=0)
    assert 2 * config.handshake_timeout_s < config.load_deadline_s


def test_workers_on_several_nodes_name_the_addresses_that_their_own_nodes_have() -> None:
    given = vllm_config(listen="tcp://0.0.0.0:0", advertise_host="auto:10.0.0.1")
    config = config_of(given, tp_rank=3, pp_rank=1)
    assert (config.listens_everywhere, config.advertise_toward) == (True, "10.0.0.1")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"lease_ttl": 5}, "unknown: lease_ttl; did you mean 'lease_ttl_s'"),
        ({"tp_rank": 5}, r"unknown: tp_rank \(engine_id, tp_rank.*come from vLLM\)"),
        ({"lease_ttl_s": "5"}, "kv_connector_extra_config: lease_ttl_s: expected `float`, got '5'"),
        (
            {"fetch_tokens_min": 1.5},
            r"kv_connector_extra_config: Expected `int`, got `float` - at `\$\.fetch_tokens_min`, got 1.5",
        ),
        (
            {"limits": {"peer_max": 5}},
            "kv_connector_extra_config: limits: .*unknown: peer_max; did you mean 'peers_max'",
        ),
        ({"limits": {"peers_max": "5"}}, "kv_connector_extra_config: limits: peers_max: expected .* got '5'"),
        ({"lease_ttl_s": -1}, "lease_ttl_s: expected `float` > 0.0"),
        ({"fetch_tokens_min": 0}, r"Expected `int` >= 1 - at `\$\.fetch_tokens_min`, got 0"),
        ({"listen": "5600"}, "listen: expected 'tcp://host:port'"),
        (
            {"prefix_peers": "tcp://a:1"},
            r"kv_connector_extra_config: Expected `array.*, got `str` - at `\$\.prefix_peers`",
        ),
        ({"prefix_tokens_min": 0}, r"Expected `int` >= 1 - at `\$\.prefix_tokens_min`"),
        ({"prefix_wait_s": 0}, r"Expected `float` > 0.0 - at `\$\.prefix_wait_s`"),
        ({"recompute_s_per_token": -1.0}, r"Expected `float` > 0.0 - at `\$\.recompute_s_per_token`"),
        ({"prefix_events": [{"holder": "tcp://a:1"}]}, r"missing required field `endpoint` - at `\$\.prefix_events"),
        ({"prefix_events": [{"at": "tcp://a:1"}]}, r"unknown field `at` - at `\$\.prefix_events\[0\]`"),
        ({"stock": {"hash": "a"}}, r"unknown field `hash` - at `\$\.stock`"),
    ],
)
def test_what_cannot_be_meant_is_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scheduling_of(vllm_config(**extra), [FULL])


def test_the_name_by_which_routers_know_vllms_own_connector() -> None:
    """Found as vLLM finds it: by the name in the module that the configuration names, not by its registry."""
    given = KVTransferConfig(
        kv_connector="NixlConnector", kv_connector_module_path="kvflow.vllm.named_nixl", kv_role="kv_both"
    )
    found = KVConnectorFactory.get_connector_class(given)
    assert issubclass(found, KVFlowConnector)
    assert found.__name__ == "NixlConnector"
    assert KVConnectorFactory.supports_hma_config(given)


def prefixes(role: str = "kv_both", policy: str = "recompute", spec: KVCacheSpec | None = None, **extra: Any) -> Any:
    """The scheduler's side of prefixes, with this configuration."""
    config = vllm_config(role, **extra)
    config.kv_transfer_config.kv_load_failure_policy = policy
    cache = cache_of(spec or FullAttentionSpec(**HEADS))
    groups, scheduling = groups_of(cache), scheduling_of(config, groups_of(cache))
    return RequestPrefixes(extra_of(config), scheduling, groups, config, cache)


def test_prefixes_are_pulled_only_where_a_failed_pull_is_computed() -> None:
    """And where vLLM keeps blocks from being loaded into while a step may write them."""
    prefixes(prefix_peers=["tcp://a:1"])
    prefixes("kv_producer", "fail", share_prefixes=True)
    with pytest.raises(ConfigError, match=r"prefix_peers: kv_load_failure_policy is 'fail'.*'recompute'"):
        prefixes(policy="fail", prefix_peers=[])
    with pytest.raises(ConfigError, match="prefix_peers: kv_role is 'kv_producer'"):
        prefixes("kv_producer", prefix_events=[{"holder": "tcp://a:1", "endpoint": "tcp://a:2"}])


@pytest.mark.parametrize(
    ("part", "module", "extra"),
    [
        ("stock", "stock_settings", {"stock_peers": True}),
        ("prefix", "prefix", {"share_prefixes": True}),
        ("prefix", "prefix", {"prefix_peers": []}),
    ],
)
def test_a_setting_whose_part_is_not_there_names_it(
    part: str, module: str, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"kvflow.vllm.{module}")
    monkeypatch.delattr(sys.modules["kvflow.vllm"], module)
    monkeypatch.setitem(sys.modules, f"kvflow.{part}", None)  # as if its folder were deleted
    config = vllm_config(**extra)
    config.kv_transfer_config.kv_load_failure_policy = "recompute"
    config.model_config.multimodal_config = None
    with pytest.raises(ConfigError, match=rf"{next(iter(extra))}.* needs kvflow\.{part}, which is not installed$"):
        KVFlowConnector(config, KVConnectorRole.SCHEDULER, cache_of(FullAttentionSpec(**HEADS)))


def test_addresses_of_peers_are_checked_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"prefix_peers: .*'a:1'"):
        prefixes(prefix_peers=["a:1"])
    with pytest.raises(ConfigError, match="prefix_peers: expected at most 64 entries, got 65"):
        prefixes(prefix_peers=["tcp://a:1"] * 65)


def test_who_shares_also_serves(caplog: pytest.LogCaptureFixture) -> None:
    assert config_of(vllm_config("kv_consumer", share_prefixes=True), tp_rank=0, pp_rank=0).role == "both"
    assert prefixes(share_prefixes=True)._shares_prefixes
    with caplog.at_level("WARNING"):
        made = prefixes(share_prefixes=True, prefix_peers=["tcp://a:1"], spec=MambaSpec(**STATE))
    assert not made._shares_prefixes
    assert not made.pulls
    made.bind_pool(SimpleNamespace())
    shared = prefixes(share_prefixes=True)
    with caplog.at_level("WARNING"):
        shared.bind_pool(SimpleNamespace())
    assert "this vLLM's block pool does not report reused blocks" in caplog.text


def cache_of(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layers.{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)


def test_groups_and_their_windows() -> None:
    """vLLM keeps what the next token needs: a window counts the token itself."""
    found = groups_of(
        cache_of(
            FullAttentionSpec(**HEADS),
            SlidingWindowSpec(**HEADS, sliding_window=96),
            ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64),
            MambaSpec(**STATE),
            FullAttentionSpec(**HEADS, sliding_window=96),  # as with the hybrid cache manager off
        )
    )
    facts = [(group.facts.kind, group.facts.window, group.facts.block_size, group.frees_blocks) for group in found]
    assert facts == [
        ("full", 0, 128, False),
        ("sliding", 95, 128, True),
        ("chunked", 64, 128, True),
        ("state", 0, 1, True),
        ("full", 0, 128, True),
    ]
    assert [group.index for group in found] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("specs", "problem"),
    [
        ((), "the model has no KV cache"),
        ((CrossAttentionSpec(**HEADS),), "layers.0, ...: CrossAttentionSpec is not transferred"),
        ((MambaSpec(**STATE, num_speculative_blocks=2),), "state with speculative decoding is not transferred"),
        ((FullAttentionSpec(**HEADS, tokens_per_state=4),), "tokens_per_state is 4: compressed tokens"),
    ],
)
def test_what_is_not_transferred_is_refused_at_the_start(specs: tuple[KVCacheSpec, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        groups_of(cache_of(*specs))


def test_vllm_that_cannot_fail_a_load_of_several_groups_is_refused_those(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector_module, "KVConnectorTransferResults", None)
    two = cache_of(FullAttentionSpec(**HEADS), SlidingWindowSpec(**HEADS, sliding_window=96))
    with pytest.raises(ConfigError, match=r"2 groups of layers: vLLM before 0\.30"):
        KVFlowConnector(vllm_config(), KVConnectorRole.SCHEDULER, two)


@pytest.mark.parametrize(
    ("role", "params", "left"),
    [
        ("kv_both", {"do_remote_decode": True}, True),
        ("kv_producer", {"do_remote_decode": True, "do_remote_prefill": True}, True),
        ("kv_consumer", {"do_remote_decode": True}, False),
        ("kv_both", {"do_remote_decode": True, "do_remote_prefill": True}, False),
        ("kv_both", {}, False),
        ("kv_both", None, False),
    ],
)
def test_the_last_token_is_left_only_by_who_offers(role: str, params: dict[str, Any] | None, left: bool) -> None:
    side = scheduler_side(dataclasses.replace(FULL, frees_blocks=True), role=role)
    prompt = [5, 6, 7]
    request: Any = SimpleNamespace(
        request_id="r",
        prompt_token_ids=prompt,
        _all_token_ids=[*prompt],
        all_token_ids=prompt,
        num_prompt_tokens=3,
        max_tokens=9,
        kv_transfer_params=params,
        abort_immediately=False,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
        prompt_embeds=None,
        get_skip_reading_prefix_cache=lambda: False,
    )
    side.on_new_request(request)
    assert (request.num_prompt_tokens, request.max_tokens) == ((2, 1) if left else (3, 9))
    assert (request.prompt_token_ids, request._all_token_ids) == ((prompt[:2],) * 2 if left else (prompt,) * 2)
    assert prompt == [5, 6, 7], "it may be another request's, too"


@pytest.mark.parametrize(
    ("buffers", "option", "problem"),
    [
        ("xpu", "", "kv_buffer_device is 'xpu', the cache is on 'cuda'"),
        ("cuda", "enable_sleep_mode", "--enable-sleep-mode is on, and the cache is on 'cuda'"),
        ("cuda", "enable_cumem_allocator", "--enable-cumem-allocator is on, and the cache is on 'cuda'"),
    ],
)
def test_what_would_go_wrong_on_a_gpu_is_refused(
    buffers: str, option: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that vLLM unmaps: by versions that do not notify their connectors."""
    monkeypatch.setattr(worker_side_module, "_NOTIFIES_OF_SLEEP", False)
    given: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_buffer_device=buffers),
        model_config=SimpleNamespace(**{option: True} if option else {}),
    )
    cache: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    with pytest.raises(ConfigError, match=problem):
        WorkerSide(given, Runtime(OURS), [FULL]).register_kv_caches({"layers.0": cache})


@pytest.mark.parametrize(
    ("platform", "buffers", "expected"), [("cuda", "cpu", "always"), ("cuda", "cuda", "auto"), ("cpu", "cpu", "auto")]
)
def test_a_buffer_on_the_cpu_is_host_staging(
    platform: str, buffers: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extra_config, "current_platform", SimpleNamespace(device_type=platform))
    config = vllm_config()
    config.kv_transfer_config.kv_buffer_device = buffers
    assert config_of(config, tp_rank=0, pp_rank=0).staging == expected


def test_a_step_on_a_gpu_is_told_what_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads wait for work that was queued before the step, saves for the step itself; on a CPU nothing is recorded."""
    begun: list[tuple[object, object]] = []
    side = WorkerSide(vllm_config(), Runtime(OURS), [FULL])
    side._worker = SimpleNamespace(  # type: ignore[assignment]
        begin=lambda step, ready=None, after=None: begun.append((ready, after))
    )
    connector = worker_connector(side)
    recorded: list[object] = []

    class Event:
        def record(self) -> None:
            recorded.append(self)

    monkeypatch.setattr(worker_side_module.torch.cuda, "Event", Event)
    for side._device in (None, Device("cuda", 0)):
        connector.bind_connector_metadata(KVFlowMetadata(Step()))
        connector.start_load_kv(None)  # type: ignore[arg-type]
        connector.wait_for_save()
    before, computed = recorded
    assert begun == [(None, None), (None, None), (None, before), (computed, None)]


def test_a_sleep_unregisters_the_cache_and_waking_introduces_its_ranks_anew() -> None:
    """vLLM 0.33 calls each hook twice if it likes, may step in between, and passes introductions on at the end."""
    config = vllm_config("kv_both")
    cache = torch.zeros(2, 4, 2, 16, 8)
    layout = CacheLayout.infer({"layers.0": cache}, order="HND", block_size=16)
    peers = PrefixPeers(prefixes=Prefixes())
    with Runtime(OURS, parts=[peers.prefixes]) as runtime:
        worker, scheduler = WorkerSide(config, runtime, [FULL], peers, shares_prefixes=True), scheduler_side(FULL)
        worker._cache_groups = [CacheGroup("full", {"layers.0": cache}, layout)]
        worker._register(follow_events=False)
        worker.restore_kv_caches()
        first = worker.get_handshake_metadata()
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): first})
        lease = runtime.serve_blocks(ServeRequest("req", [1], 16))
        scheduler.reset_cache()
        worker.unregister_kv_caches()
        worker.unregister_kv_caches()
        assert lease.wait(10.0) is LeaseOutcome.REVOKED
        step = scheduler._scheduler.build_step({}, preempted=(), block_ids=lambda _: ())
        step.reused = (1,)
        worker.handle_preemptions(KVFlowMetadata(step))
        worker.begin_step(KVFlowMetadata(step))
        assert worker.build_connector_worker_meta() is None
        worker.restore_kv_caches()
        worker.restore_kv_caches()
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
        known = scheduler._scheduler._producers._introduction
        assert known is not None
        assert known.first.incarnation != first.ticket.first.incarnation
        assert known == worker.get_handshake_metadata().ticket


@pytest.mark.parametrize("option", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_ucx_is_told_that_vllm_may_unmap_the_cache(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's NixlConnector does; a user's setting stays."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.delenv("UCX_RCACHE_ENABLE", raising=False)
    for extra, told in (
        ({}, {"UCX.engine_config": "RCACHE_ENABLE=n,TLS=^cuda_ipc"}),
        ({"nixl_backend": "LIBFABRIC"}, {}),
        (
            {"nixl_backend_params": {"engine_config": "TLS=rc", "num_workers": "2"}},
            {"engine_config": "TLS=rc", "num_workers": "2", "UCX.engine_config": "TLS=rc,RCACHE_ENABLE=n"},
        ),
    ):
        config = vllm_config(**extra)
        assert config_of(config, tp_rank=0, pp_rank=0).nixl_backend_params == extra.get("nixl_backend_params", {})
        setattr(config.model_config, option, True)
        assert config_of(config, tp_rank=0, pp_rank=0).nixl_backend_params == told


@pytest.mark.parametrize(("extra", "sleeps"), [({}, True), ({"nixl_backend": "UCX,POSIX"}, False)])
def test_vllm_may_sleep_with_ucx_alone(extra: dict[str, Any], sleeps: bool) -> None:
    config = KVTransferConfig(kv_connector="KVFlowConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    assert KVFlowConnector.supports_sleep_mode(config) is sleeps


def test_what_workers_show_stock_readers_goes_to_all_of_them_with_the_next_step() -> None:
    """So that whichever a stock reader asks answers for all, before it can have parameters."""
    seen = list[Any]()
    ranks: Any = SimpleNamespace(show=seen.append)
    scheduler = scheduler_side(FULL)
    with Runtime(OURS) as runtime:
        worker = worker_connector(WorkerSide(vllm_config(), runtime, [FULL], ranks=ranks))
        cache = {"layers.0": torch.zeros(2, 4, 2, 16, 8)}
        runtime.register_kv_caches(cache, CacheLayout.infer(cache, order="HND", block_size=16))
        ticket = ConnectorWorker(runtime).introduction()
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): KVFlowIntroduction(ticket, b"card")})
    output: Any = SimpleNamespace(
        kv_connector_block_state=SimpleNamespace(resolve_block_ids=None),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        preempted_req_ids=None,
    )
    for _ in range(2):
        worker.bind_connector_metadata(scheduler.build_connector_meta(output))
    assert seen == [(b"card",)]


@pytest.mark.parametrize(
    ("alone", "tokens", "waits_ms"),
    [(True, 0, [2, 4, 8, 10, 10, 2]), (True, 5, [0] * 6), (False, 0, [0] * 6)],
    ids=["alone", "computes", "beside others"],
)
def test_only_a_step_that_computes_nothing_waits(alone: bool, tokens: int, waits_ms: list[int]) -> None:
    """Longer the more steps have waited in vain. Nor does it if others wait for the step, as data-parallel ones do."""
    scheduler = scheduler_side(FULL, steps_alone=alone)
    waited: list[float] = []

    def collect(wait_s: float) -> Results:
        waited.append(wait_s)
        return Results(sent={"ended"}) if len(waited) == 5 else Results()

    side = WorkerSide(vllm_config(), Runtime(OURS), [FULL])
    side._worker = cast(Any, SimpleNamespace(collect=collect, shared_outcomes=lambda: ()))
    worker = worker_connector(side)
    output: Any = SimpleNamespace(
        kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda _: ([],)),
        num_scheduled_tokens={"r": tokens} if tokens else {},
        total_num_scheduled_tokens=tokens,
        scheduled_new_reqs=[SimpleNamespace(req_id="r", num_computed_tokens=0)] if tokens else [],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        preempted_req_ids=None,
    )
    worker.bind_connector_metadata(scheduler.build_connector_meta(output))
    for _ in waits_ms:
        worker.get_transfer_results(set())
    assert waited == [pytest.approx(wait_ms / 1e3) for wait_ms in waits_ms]


def _sent(worker: KVFlowConnector, finished: set[str]) -> set[str]:
    sent: set[str] = worker.get_transfer_results(finished).finished_sending
    return sent


def _sent_before_030(worker: KVFlowConnector, finished: set[str]) -> set[str]:
    return worker.get_finished(finished)[0]


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("asked", [_sent, _sent_before_030])
def test_vllm_is_told_of_a_prompt_that_was_not_offered_only_once_its_request_has_ended(
    sent: bool, asked: Callable[[KVFlowConnector, set[str]], set[str]]
) -> None:
    """It would free the blocks of the request, which goes on."""
    cache = torch.zeros(2, 4, 2, 16, 8)
    layout = CacheLayout.infer({"layers.0": cache}, order="HND", block_size=16)
    limits = Limits(leases_max=1)
    with Runtime(dataclasses.replace(OURS, limits=limits)) as runtime:
        runtime.register_kv_caches({"layers.0": cache}, layout)
        runtime.serve_blocks(ServeRequest("full", [1], 16))
        side = WorkerSide(vllm_config(), runtime, [FULL])
        worker = worker_connector(side)
        worker.bind_connector_metadata(KVFlowMetadata(Step()))
        save = Save(request_id="r", serve_id="r#1", block_tables=((2,),), num_tokens=16, ttl_s=9.0)
        side._worker.begin(Step(save=[save]))
        if sent:
            side._worker.begin(Step(send=["r"]))
        runtime.start(lambda _: asyncio.sleep(0)).result(10.0)  # begun after the steps, and ended after them
        assert asked(worker, set()) == ({"r"} if sent else set())
        side._worker.begin(Step(withdraw=["r"]) if sent else Step(send=["r"]))
        runtime.start(lambda _: asyncio.sleep(0)).result(10.0)
        assert asked(worker, {"r"}) == (set() if sent else {"r"})


def test_prompts_of_windows_are_computed_whole_for_stock_readers() -> None:
    window = dataclasses.replace(FULL, frees_blocks=True)
    state = Group(index=1, specs={}, facts=GroupFacts(name="s", block_size=1, kind=GroupKind.STATE), frees_blocks=True)
    config = vllm_config(stock_peers=True)
    assert scheduling_of(config, [window]).withhold_last_token
    assert not scheduling_of(config, [FULL]).withhold_last_token
    assert not scheduling_of(vllm_config(), [window]).withhold_last_token
    with pytest.raises(ConfigError, match="state per request"):
        stock_settings.dialect_of(extra_of(config), Config(engine_id="e"), scheduling_of(config, [FULL, state]))


def test_parameters_for_stock_readers_count_the_ranks_registrations() -> None:
    """Tickets of a later registration name other incarnations, whichever way the scheduler gets them."""
    config = vllm_config(stock_peers=True, stock={"serve_version": "0.33.0"})
    dialect = stock_settings.dialect_of(extra_of(config), Config(engine_id="e"), scheduling_of(config, [FULL]))
    ranks = [RankLease.without_lease_id(Rank(0, 0, tp), "first", "h", 1) for tp in (0, 1)]
    again = msgspec.structs.replace(ranks[1], incarnation="again")
    found = []
    for registered in (ranks, ranks, [ranks[0], again], ranks):
        ticket = any_ticket(tp_size=2)
        params = dialect.params_of(msgspec.structs.replace(ticket, ranks=tuple(registered)))
        found.append(params["remote_registration_generation"])
    assert found == [1, 1, 2, 1]


def test_statistics_add_up() -> None:
    error = LeaseExpired("gone", request_id="r", peer="tcp://127.0.0.1:1")
    stats, others = KVFlowStats(), KVFlowStats()
    stats.add_results(Results(failed={"r": FailedLoad(((1,),), error)}, leases=[("s", LeaseOutcome.READ)]))
    others.add_results(Results(failed={"r": FailedLoad(((1,),), None)}))
    both = stats.aggregate(others)
    assert both.data["load_failures"] == ["LeaseExpired", "Abandoned"]
    assert both.reduce()["Failed loads"] == 2
    assert both.reduce()["Leases read"] == 1
    assert KVFlowStats().is_empty()
    assert not both.is_empty()


def named(layers: Iterable[int], model: str = "model", part: str = "attn") -> list[str]:
    return [f"{model}.layers.{layer}.self_attn.{part}" for layer in layers]


FIRST = FIRST_DRAFT_LAYER


@pytest.mark.parametrize(
    ("whole", "stages"),
    [
        (named(range(60)), [named(range(30)), named(range(30, 60))]),
        (
            named(range(60)) + named(range(60), part="indexer.k_cache"),
            [
                named(range(30)) + named(range(30), part="indexer.k_cache"),
                named(range(30, 60), part="indexer.k_cache") + named(range(30, 60)),
            ],
        ),
        (named(range(61)), [named(range(30)), named(range(30, 61))]),
        (named(range(60)) + named(range(4), "draft_model"), [named(range(60))]),
        (
            named(range(60)) + named(range(4), "draft_model"),
            [named(range(30)), named(range(30, 60)) + named(range(4), "draft_model")],
        ),
        ([*named(range(60)), "mtp.layers.0.self_attn.attn"], [[*named(range(60)), "mtp.layers.0.self_attn.attn"]]),
    ],
    ids=["plain", "indexers", "EAGLE", "a draft here only", "a draft on the last stage", "MTP"],
)
def test_a_layer_has_one_number_whoever_else_is_there(whole: list[str], stages: list[list[str]]) -> None:
    numbers = kv_cache_layout._layer_numbers(whole, 60)
    held = {name: number for stage in stages for name, number in kv_cache_layout._layer_numbers(stage, 60).items()}
    assert held == {name: numbers[name] for name in held}
    assert len(set(numbers.values())) == len(whole)
    assert [numbers[name] for name in named(range(60))] == list(range(60)), "as stock engines and errors have them"
    drafts = {name for name, number in numbers.items() if number >= FIRST}
    assert drafts == {name for name in whole if "draft" in name or "mtp" in name or ".60." in name}


@pytest.mark.parametrize(
    "names",
    [["model.layers.1024.attn"], [f"model.layers.3.attn{nth}" for nth in range(17)]],
    ids=["a number too large", "too many of one number"],
)
def test_layers_that_there_are_no_numbers_for_are_refused(names: list[str]) -> None:
    with pytest.raises(LayoutError, match=r"layer 'model\.layers\..*expected numbers below 1024, and 16"):
        kv_cache_layout._layer_numbers(names)


# --- quantized caches


@pytest.mark.skipif(INSTALLED < "0.32", reason="the values of vLLM before 0.32 were not read")
def test_every_cache_dtype_of_vllms_is_in_the_table() -> None:
    """With a new dtype of vLLM this test fails: add a row, and try it or refuse it."""
    assert {row.name for row in CACHE_DTYPES.values() if row.since <= INSTALLED} == {*get_args(CacheDType)}


@pytest.mark.parametrize("name", [*(row.name for row in CACHE_DTYPES.values() if not row.kv_format), "of a plug-in"])
def test_blocks_that_are_not_moved_are_refused_at_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype {name}: its blocks are not transferred; known: auto, fl"):
        layouts_of({"layers.0.attn": torch.zeros(8, 2, 16, 40, dtype=torch.uint8)}, "TRITON_ATTN", name)


def layouts_of(caches: dict[str, torch.Tensor], backend: str, cache_dtype: str) -> dict[str, tuple[str, str, int]]:
    """Of each layer on one of two ranks: the format of its bytes, its dtype, and its KV heads."""
    config = vllm_config()
    config.model_config.get_total_num_hidden_layers = lambda: len(caches)
    config.cache_config.cache_dtype = cache_dtype
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    group = Group(0, dict.fromkeys(caches, spec), GroupFacts(name="full", block_size=16), frees_blocks=False)
    with pytest.MonkeyPatch.context() as patch:
        backends = [SimpleNamespace(get_name=lambda: backend)]
        patch.setattr(kv_cache_layout, "get_current_attn_backends", lambda *_: backends)
        (found,) = kv_cache_layout.cache_groups(caches, [group], config, kv_format=None)
    layouts = cast("list[CacheLayout]", found.layout)
    return {name: (one.kv_format, one.dtype, one.kv_heads) for one in layouts for name in one.layer_names}


BYTES, VALUES = torch.zeros(8, 2, 16, 40, dtype=torch.uint8), torch.zeros(8, 2, 16, 32, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("backend", "cache_dtype", "expected"),
    [
        ("TRITON_ATTN", "int8_per_token_head", ("int8_per_token_head", "uint8", 2)),
        ("TRITON_ATTN", "fp8_e5m2", ("plain", "float8_e5m2", 2)),
        ("FLASHINFER", "nvfp4", ("nvfp4", "uint8", 1)),
        ("FLASHINFER", "nvfp4_4over6", ("nvfp4_4over6", "uint8", 1)),
    ],
)
def test_layers_that_are_not_quantized_have_the_models_values(
    backend: str, cache_dtype: str, expected: tuple[str, str, int]
) -> None:
    """`--kv-cache-dtype-skip-layers 1`."""
    found = layouts_of({"layers.0.attn": BYTES, "layers.1.attn": VALUES}, backend, cache_dtype)
    assert found == {"layers.0.attn": expected, "layers.1.attn": ("plain", "bfloat16", 2)}


def test_bytes_in_a_format_that_their_backend_does_not_have_are_refused() -> None:
    with pytest.raises(LayoutError, match="FLASH_ATTN: kv_format is 'nvfp4', expected one of"):
        layouts_of({"layers.0.attn": BYTES}, "FLASH_ATTN", "nvfp4")
