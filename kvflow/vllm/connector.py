"""KVFlowConnector: kvflow as vLLM's KV connector (KVConnectorBase_V1), for producers, consumers and both.

vLLM makes one connector object in its scheduler, over a `connector.scheduler.ConnectorScheduler`, and one in each
worker, over a `connector.worker.ConnectorWorker` and a runtime with its own thread. Transfers continue while no step
runs. A worker's step never waits for a load, only for the end of leases of blocks that it will overwrite
(`handle_preemptions`).

If a model has windows or recurrent state, the prefill engine computes the prompt without its last token. The decode
engine computes that token in any case, for its logits, and needs the cache as it was before: a state cannot be rolled
back by one token, and vLLM frees a window's first block with the last token.

The connector refuses to start with unknown kinds of caches (see `kv_cache_layout`), and with caches on a device that
the transport cannot reach.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from kvflow.blocking import Runtime
from kvflow.checks import counted
from kvflow.connector.kv_hints import IgnoredHint, KVHints
from kvflow.connector.paged_groups import as_registered
from kvflow.connector.parameters import OWN_DIALECT
from kvflow.connector.scheduler import ConnectorScheduler
from kvflow.connector.step import Step
from kvflow.connector.worker import ConnectorWorker, Results
from kvflow.core.cache.regions import Device
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.protocol.ticket import Ticket, merge_tickets
from kvflow.errors import ConfigError, KVFlowError, PromptMismatch, RequestError
from kvflow.logs import logger_of
from kvflow.parts import importing_part
from kvflow.runtime.part import Part
from kvflow.transport.device.cache_device import record_event
from kvflow.vllm.engine_requests import engine_request_of, picture_ids_from_content, sharing_of, spreads_samples
from kvflow.vllm.extra_config import (
    Extra,
    config_of,
    extra_of,
    scheduling_of,
    token_shards,
    unmapping_option,
    warn_of_side_channel,
)
from kvflow.vllm.kv_cache_layout import cache_groups, groups_of
from kvflow.vllm.nixl_settings import settings_in
from kvflow.vllm.recent_prompts import RecentPrompts
from kvflow.vllm.succession import Succession
from kvflow.vllm.vllm_metrics import KVFlowPromMetrics, KVFlowStats
from kvflow.vllm.warming import WarmRequests, cut_prompt
from kvflow.vllm.weights import follow_weight_versions

try:  # vLLM 0.30 and later
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:
    KVConnectorTransferResults = None
try:  # vLLM 0.32 and later
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    CacheHitSource = None

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvflow.stock import EngineRanks
    from kvflow.vllm.prefix import RequestPrefixes

logger = logger_of("vllm.kvflow")

# vLLM 0.33 and later call workers before they unmap the cache's memory, and after they have mapped it again.
_NOTIFIES_OF_SLEEP = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
_PREFIX_SETTINGS = "share_prefixes, prefix_peers or prefix_events"
# vLLM steps again and again while a load or a lease is under way, and looks for new requests only between two steps. So
# a step that computes nothing waits for a result: first briefly, then longer, since each step takes the processor from
# the load itself, or from another engine of this machine.
_IDLE_STEP_S, _IDLE_STEP_MAX_S = 0.002, 0.010
_ANY_GRAMMAR = StructuredOutputsParams(json_object=True)
_REFUSED = "this prompt is not the one that was prefilled"
_COMPLETED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass(frozen=True)
class KVFlowMetadata(KVConnectorMetadata):
    """The work of one engine step, from the scheduler's connector object to the workers'."""

    step: Step
    cards: tuple[bytes, ...] = ()
    """For stock readers: all workers' encoded metadata (`EngineRanks.card`), since a stock reader may ask any worker
    about all workers. Empty if the workers have the metadata already."""
    successor: Ticket | None = None
    """A ticket of the server that takes this one's place, in the step after it was named."""
    idle: bool = False
    """True if the engine computes nothing in this step. The workers may then wait a moment for a load."""


@dataclass(frozen=True)
class KVFlowIntroduction(KVConnectorHandshakeMetadata):
    """Message from a worker to the scheduler's connector object: how readers reach the worker.

    vLLM collects the messages of all workers at its start, and again when it wakes from a sleep.
    """

    ticket: Ticket
    """Ticket without blocks that names the worker's rank and address (`ConnectorWorker.introduction`)."""
    card: bytes = b""
    """The worker's encoded metadata for stock readers (`EngineRanks.card`); empty if `stock_peers` is off."""


@dataclass(frozen=True)
class KVFlowWorkerReport(KVConnectorWorkerMetadata):
    """Report of one worker, or of all workers, to the scheduler's connector object; sent with a step's results."""

    found: Mapping[str, tuple[Ticket, ...]] = field(default_factory=dict)
    """By request id, for requests that wait for peers' answers: the tickets with which to load a prefix of the prompt.
    """
    refused: tuple[tuple[str, PromptMismatch], ...] = ()
    """Ids and errors of requests that must fail: the producer's prompt has the same tokens as the request's, but other
    pictures, another adapter or another cache salt."""

    offered: tuple[str, ...] = ()
    """Ids of requests that have waited for the offer of their prompts, and may get blocks now (`late_blocks`)."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVFlowWorkerReport:
        others = cast(KVFlowWorkerReport, other)
        found, refused = {**self.found, **others.found}, self.refused + others.refused
        return KVFlowWorkerReport(found, refused, self.offered + others.offered)


class KVFlowConnector(KVConnectorBase_V1, SupportsHMA):
    """kvflow as vLLM's KV connector: one object in vLLM's scheduler, and one in each worker."""

    _cache_hit_source = CacheHitSource and CacheHitSource.P2P
    _address = ""
    """In the scheduler: address of this engine's first rank, once the workers are known."""
    _successor: Ticket | None = None
    """In a worker: a ticket of the server that takes this one's place; None unless an operator has named it."""
    _cards: tuple[bytes, ...] = ()
    """In the scheduler: the workers' encoded metadata for stock readers (`EngineRanks.card`), for the next step."""
    _picture_ids_from_content = True
    """In the scheduler: True if vLLM's identifiers of pictures depend on the pictures' content; if not, prompts with
    pictures cannot be compared."""
    _recomputes_failed_loads = False
    """In the scheduler: True if vLLM computes a prompt locally after its load has failed."""
    _spreads_samples = False
    """In the scheduler: True if vLLM may give samples of one prompt to several engines."""
    _steps_alone = True
    """In the scheduler: False if other engines wait for this engine's steps, as data-parallel engines do."""
    _prefixes: RequestPrefixes | None = None
    """In the scheduler: shares and loads prefixes of prompts; None if the configuration asks for neither."""
    _recent: RecentPrompts | None = None
    """In the scheduler: the prompts answered last; None unless the configuration asks to remember them."""
    _shares_prefixes = False
    """In a worker: True if peers may read prefixes from this engine's cache."""
    _asks_for_engine = True
    """In a worker: True if this rank asks peers for prefixes on behalf of the whole engine."""
    _pulls_prefixes = False
    """In a worker: True if this engine asks peers for prefixes and loads them."""
    _worker_report = KVFlowWorkerReport()
    """In a worker: the report that goes out with the results of the next step."""
    _registered = False
    """In a worker: True while the cache is registered: from its first registration, but for vLLM's sleep."""
    _device: Device | None = None
    """In a worker: device of the cache, on which events are recorded; None on the CPU."""
    _idle_step_s = _IDLE_STEP_S
    """In a worker: seconds for which the next step waits for a result if it computes nothing."""
    _ranks: EngineRanks | None = None
    """In a worker: metadata of all ranks of this engine for stock readers; None if `stock_peers` is off."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm()
        self._groups = groups_of(kv_cache_config, token_shards(vllm_config))
        if KVConnectorTransferResults is None and len(self._groups) > 1:
            several = counted(len(self._groups), "group")
            raise ConfigError(f"KVFlowConnector: {several} of layers: vLLM before 0.30 cannot fail a load of several")
        self._stats = KVFlowStats()
        begin = self._begin_in_scheduler if role is KVConnectorRole.SCHEDULER else self._begin_in_worker
        begin(vllm_config, kv_cache_config, extra_of(vllm_config))

    def _begin_in_scheduler(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, extra: Extra) -> None:
        self._scheduling = scheduling_of(vllm_config, self._groups)
        self._picture_ids_from_content = picture_ids_from_content(vllm_config)
        self._recomputes_failed_loads = vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
        warn_of_side_channel(vllm_config)
        follow_weight_versions()
        self._spreads_samples = spreads_samples(vllm_config)
        self._steps_alone = vllm_config.parallel_config.data_parallel_size == 1
        dialect = OWN_DIALECT
        if extra.stock_peers:
            with importing_part("stock", "stock_peers", ConfigError):
                from kvflow.vllm import stock_settings

            dialect = stock_settings.dialect_of(extra, config_of(vllm_config, tp_rank=0, pp_rank=0), self._scheduling)
        if extra.uses_prefixes:
            with importing_part("prefix", _PREFIX_SETTINGS, ConfigError):
                from kvflow.vllm.prefix import RequestPrefixes

            self._prefixes = RequestPrefixes(extra, self._scheduling, self._groups, vllm_config, kv_cache_config)
        pulls = self._prefixes is not None and self._prefixes.pulls
        self._hints = KVHints(pulls=pulls, on_ignored=self._note_ignored_hint)
        block_tokens = self._groups[0].facts.block_size
        self._warm = WarmRequests(
            block_tokens, pulls=pulls, on_end=lambda outcome: self._stats.data["warms"].append(str(outcome))
        )
        self._succession = Succession()
        if extra.recent_tokens_max:
            cache_bytes = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
            token_bytes = cache_bytes // (kv_cache_config.num_blocks * block_tokens)
            self._recent = RecentPrompts(extra.recent_tokens_max, block_tokens, token_bytes)
        self._scheduler = ConnectorScheduler(
            self._scheduling,
            new_secret=lambda: secrets.token_hex(16),
            dialect=dialect,
            questions=None if self._prefixes is None else self._prefixes.questions,
        )

    def _begin_in_worker(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, extra: Extra) -> None:
        self._kv_format = extra.kv_format
        self._whole_blocks_only = extra.stock_peers
        config = config_of(vllm_config, tp_rank=get_tensor_model_parallel_rank(), pp_rank=get_pp_group().rank_in_group)
        parts, self._late_reads = list[Part](), deque[str]()
        if extra.stock_peers:
            with importing_part("stock", "stock_peers", ConfigError):
                from kvflow.vllm import stock_settings

            stock_peers = stock_settings.peers_of(vllm_config, extra, self._late_reads.append)
            self._ranks = stock_peers.ranks
            parts.append(stock_peers)
        peers = None
        if extra.uses_prefixes:
            with importing_part("prefix", _PREFIX_SETTINGS, ConfigError):
                from kvflow.vllm import prefix

            peers = prefix.prefix_peers_of(vllm_config, extra)
            parts.append(peers.prefixes)
            possible = not prefix.sharing_obstacle(self._groups, kv_cache_config)
            self._shares_prefixes = extra.share_prefixes and possible
            self._pulls_prefixes = extra.pulls_prefixes and possible
        self._runtime = Runtime(config, parts=parts)
        self._worker = ConnectorWorker(self._runtime, peers)
        self._asks_for_engine = (config.tp_rank, config.pp_rank) == (0, 0)
        self._failed_blocks: set[int] = set()
        self._split = 1
        self._before_step: DeviceEvent | None = None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the name of the cache layout that vLLM has to use: in a block, heads come before tokens.

        Then the bytes of a head in a block are contiguous, so a rank need not read the heads of other ranks. Return
        None for models with MLA: any layout will do.
        """
        return None if vllm_config.model_config is None or vllm_config.model_config.use_mla else "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return whether vLLM may sleep: kvflow unregisters the cache before, and registers it again afterwards.

        vLLM 0.33 and later ask this, and call `unregister_kv_caches` and `restore_kv_caches`. True for NIXL's backend
        UCX alone, with which vLLM's own NixlConnector sleeps, too.
        """
        return bool(settings_in(kv_transfer_config).get("nixl_backend", "UCX") == "UCX")

    # --- the scheduler's role

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        workers = [entry for entry in metadata.values() if isinstance(entry, KVFlowIntroduction)]
        if len(workers) == len(metadata):
            self._introduce(workers)
        else:
            logger.warning(
                "nothing is offered: vLLM's MultiConnector passes on the handshake metadata of only one connector, the "
                "first that has some; list KVFlowConnector before it"
            )

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._warm.bind_pool(gpu_block_pool)
        if self._prefixes is not None:
            self._prefixes.bind_pool(gpu_block_pool)

    def has_pending_push_work(self) -> bool:
        """Return True if vLLM has to run one more step, although no request needs it, to report reused blocks."""
        return self._prefixes is not None and self._prefixes.must_report

    def on_new_request(self, request: Request) -> None:
        if request.abort_immediately:
            self._on_rejected(request)
            return
        hinted = self._source_in_hints(request)
        if self._prefixes is not None:
            self._prefixes.add(request, hinted)
        self._warm.add(request)
        self._succession.add(request)
        if self._recent is not None:
            self._recent.add(request)
        offered = self._scheduling.offers(request.kv_transfer_params or {})
        if offered and self._scheduling.leaves_last_token and not self._leave_out_last_token(request):
            logger.info("request %s: its prompt is not offered: its last token cannot be left out", request.request_id)
            return
        try:
            sharing = sharing_of(request.request_id, spread=self._spreads_samples)
            self._scheduler.add(
                engine_request_of(request, picture_ids_from_content=self._picture_ids_from_content), sharing=sharing
            )
        except RequestError as error:
            logger.warning("request %s: its prompt is computed here: %s", request.request_id, error)
            self._stats.data["tickets_refused"].append(type(error).__name__)
        if self._fail_if_refused(request):
            self._stats.data["load_failures"].append(PromptMismatch.__name__)
        elif request.get_skip_reading_prefix_cache() and self._scheduling.takes(request.kv_transfer_params or {}):
            self._scheduler.note_computed_here("log probabilities of its prompt are requested")

    def _source_in_hints(self, request: Request) -> str | None:
        """Return the address of the peer that, by a router's KV hint, holds a prefix of `request`; None with a ticket.

        vLLM has the hint in `kv_hints` (0.32 and later). Dynamo may pass it in the parameters, as "kv_hint".
        """
        params, hints = request.kv_transfer_params or {}, getattr(request, "kv_hints", None)
        hints = params.get("kv_hint") if hints is None else hints
        return None if hints is None or self._scheduling.takes(params) else self._hints.source(hints)

    def _note_ignored_hint(self, reason: IgnoredHint) -> None:
        self._stats.data["hints_ignored"].append(str(reason))

    def _fail_if_refused(self, request: Request) -> bool:
        """If the ticket of `request` is for the same tokens but other pictures or the like, fail the request.

        Return whether the request was failed: then its prompt must be neither loaded nor computed.
        """
        error = self._scheduler.refusal(request.request_id)
        if error is not None:
            logger.error("request %s fails, and is not computed here: %s", request.request_id, error)
            # vLLM has no call to fail a request. If the grammar of a waiting request cannot be compiled, vLLM ends the
            # request without a step, under any policy for failed loads. vLLM before 0.33 returns HTTP 500, without the
            # text. Later versions return HTTP 400 with the text, so it says nothing about the other request.
            answer = RequestError(f"{_REFUSED}: request {request.request_id!r}")
            request.structured_output_request = StructuredOutputRequest(_ANY_GRAMMAR, answer)
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        return error is not None

    def _on_rejected(self, request: Request) -> None:
        """Release the ticket of a request that vLLM's HTTP server has refused, or that has failed there.

        vLLM adds such a request only to abort it at once.
        """
        try:
            self._scheduler.reject(engine_request_of(request, picture_ids_from_content=self._picture_ids_from_content))
        except RequestError as error:
            logger.debug("request %s: it was rejected, and has no ticket: %s", request.request_id, error)

    def _leave_out_last_token(self, request: Request) -> bool:
        """Let `request` offer its prompt without the last token. Return False if that is not possible.

        With `withhold_last_token`, compute the last token but do not offer it; else remove that token from `request`.
        """
        if not self._scheduling.withhold_last_token:
            return _remove_last_token(request)
        request.max_tokens = 1
        return bool(request.num_prompt_tokens > 1)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        # The request's load may have found the mismatch; under the policy "recompute" vLLM would compute the prompt.
        if self._fail_if_refused(request):
            return None, False
        matched = self._scheduler.num_new_matched_tokens(request.request_id, num_computed_tokens)
        return self._warm.match(request, num_computed_tokens, matched)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        tables = self._transferred_tables(blocks.get_block_ids())
        self._scheduler.update_after_alloc(request.request_id, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        resolve = scheduler_output.kv_connector_block_state.resolve_block_ids
        cached, scheduled = _computed_tokens(scheduler_output)
        preempted = scheduler_output.preempted_req_ids or ()

        def block_ids(request_id: str) -> tuple[list[int], ...]:
            return self._transferred_tables(resolve(request_id))

        # Another connector may still load some of these tokens within the step. Older versions do not say.
        if getattr(scheduler_output, "has_sync_kv_loads", True):
            cached = {}
        step = self._scheduler.build_step(scheduled, preempted=preempted, block_ids=block_ids, cached=cached)
        if self._prefixes is not None:
            # Another connector may load within the step, and fail: its blocks are shared only after the step.
            done = {} if scheduler_output.has_sync_kv_loads else scheduled
            self._prefixes.build_step(step, done, preempted=preempted, block_ids=block_ids)
        cards, self._cards = self._cards, ()
        named = self._succession.take_named()
        return KVFlowMetadata(
            step, cards, named, idle=self._steps_alone and not scheduler_output.total_num_scheduled_tokens
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        received, sent = connector_output.finished_recving or (), connector_output.finished_sending or ()
        meta = connector_output.kv_connector_worker_meta
        report = meta if isinstance(meta, KVFlowWorkerReport) else KVFlowWorkerReport()
        self._scheduler.update_from_workers(received=received, sent=sent, found=report.found, offered=report.offered)
        self._scheduler.refuse(report.refused)
        self._warm.note_failed(connector_output.failed_recving or ())
        if self._recomputes_failed_loads:
            for _ in connector_output.failed_recving or ():
                self._scheduler.note_computed_here("its load failed")

    def _introduce(self, workers: Sequence[KVFlowIntroduction]) -> None:
        """Begin to offer prompts from the ranks of `workers`, which are all workers of this engine.

        The next step brings each worker all workers' metadata for stock readers, before any router gets a ticket.
        ConfigError if `workers` are not all ranks of the engine.
        """
        expected = workers[0].ticket.tp_size * workers[0].ticket.pp_size
        if len(workers) != expected:
            raise ConfigError(
                f"KVFlowConnector: vLLM's scheduler has {counted(len(workers), 'rank')} of {expected}. With "
                "--distributed-executor-backend external_launcher each rank has a scheduler, and tickets, of its own"
            )
        introduction = merge_tickets([worker.ticket for worker in workers])
        self._address = introduction.address
        self._succession.introduction = introduction
        self._scheduler.introduce(introduction)
        self._cards = tuple(worker.card for worker in workers if worker.card)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        tables = self._transferred_tables(block_ids)
        if self._prefixes is not None:
            self._prefixes.finish(request, tables)
        completed = request.status in _COMPLETED
        hold, params = self._scheduler.request_finished(request.request_id, completed=completed, block_ids=tables)
        recent = None if self._recent is None else self._recent.finish(request, self._address)
        named = self._succession.finish(request.request_id)
        return hold, self._warm.finish(request.request_id) or recent or named or params

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(group.index for group in self._groups)

    def _transferred_tables(self, tables: Sequence[list[int]]) -> tuple[list[int], ...]:
        """Return the block tables of `_groups`, in order. `tables` has a block table for each of vLLM's groups."""
        return tuple(tables[group.index] for group in self._groups)

    def reset_cache(self) -> bool:
        """End all leases, because the blocks' contents are no longer valid, for example after new weights. Return True.

        vLLM also calls this before its workers sleep.
        """
        self._scheduler.withdraw_all()
        if self._recent is not None:
            self._recent.forget_all()
        return True

    def note_new_weights(self, version: str) -> None:
        """Note the version of vLLM's new weights, in either role (`kvflow.vllm.weights`): in the workers first."""
        if self.role is KVConnectorRole.WORKER:
            self._worker.set_weights(version)
            return
        self._scheduler.set_weights(version)
        if self._recent is not None:
            self._recent.forget_all()
        if self._prefixes is not None:
            self._prefixes.withdraw_all()

    # --- the workers' role

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        where = next(iter(kv_caches.values())).device
        device = where.type
        model, buffer_device = self._vllm_config.model_config, self._vllm_config.kv_transfer_config.kv_buffer_device
        if buffer_device not in (device, "cpu"):
            raise ConfigError(f"KVFlowConnector: kv_buffer_device is {buffer_device!r}, the cache is on {device!r}")
        unmapping = unmapping_option(model)
        if unmapping is not None and device != "cpu" and not _NOTIFIES_OF_SLEEP:
            # After a sleep the same addresses are mapped to other memory; the old memory would still be registered.
            raise ConfigError(
                f"KVFlowConnector: {unmapping} is on, and the cache is on {device!r}: vLLM before 0.33 does not notify "
                "connectors when it unmaps a cache, so peers would read other memory. Leave it off, or use vLLM 0.33"
            )
        groups = cache_groups(kv_caches, self._groups, self._vllm_config, kv_format=self._kv_format)
        self._split = groups[0].split
        if self._whole_blocks_only and any(group.split > 1 for group in groups):
            what = f"a block of vLLM's is {counted(self._split, 'block')} of its kernels"
            raise ConfigError(f"KVFlowConnector: stock_peers: {what}, which stock engines count differently")
        self._device = None if device == "cpu" else Device(device, where.index or 0)
        self._cache_groups = groups
        self._runtime.open()
        self._register(follow_events=self._asks_for_engine)

    def _register(self, *, follow_events: bool) -> None:
        """Register the cache and, as configured, share prefixes from it and connect to peers.

        `follow_events`: begin to receive KV events, which goes on until the runtime closes.
        """
        self._runtime.register_kv_caches(self._cache_groups)
        if self._shares_prefixes:
            size, pairs = self._groups[0].facts.block_size, zip(self._groups, self._cache_groups, strict=True)
            self._worker.share([as_registered(group.facts, size // cache.split) for group, cache in pairs], size)
        if self._pulls_prefixes:
            self._worker.connect_peers(follow_events=follow_events)
        self._registered = True

    def unregister_kv_caches(self) -> None:
        """Unregister the cache, before vLLM unmaps its memory: afterwards kvflow reads and writes nothing there.

        Steps without requests may follow before `restore_kv_caches`. A second call does nothing.
        """
        self._registered = False
        self._runtime.unregister()

    def restore_kv_caches(self) -> None:
        """Register the cache again, once vLLM has mapped its memory. A second call does nothing.

        Before its next step, vLLM passes the workers' new introductions to the scheduler's connector object.
        """
        if not self._registered:
            self._register(follow_events=False)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report, self._worker_report = self._worker_report, KVFlowWorkerReport()
        return report if report != KVFlowWorkerReport() else None

    def get_handshake_metadata(self) -> KVFlowIntroduction:
        card = b"" if self._ranks is None else self._ranks.card
        return KVFlowIntroduction(self._worker.introduction(), card)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """End all reads, by peers, of blocks that this step will overwrite, and send the step's questions to peers.

        vLLM calls this before the step writes any block.
        """
        metadata = cast(KVFlowMetadata, kv_connector_metadata)
        step, self._successor = metadata.step, metadata.successor or self._successor
        ready = self._record_event() if step.save_cached else None
        self._worker.prepare(
            step if self._asks_for_engine else msgspec.structs.replace(step, questions=[]), ready=ready
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Store the work of the step that begins.

        In a worker, also record a device event that happens when all work of earlier steps is done. The step's loads
        wait for this event before they write.
        """
        super().bind_connector_metadata(connector_metadata)
        if self.role is KVConnectorRole.WORKER:
            self._before_step = self._record_event()
            if self._ranks is not None and (cards := cast(KVFlowMetadata, connector_metadata).cards):
                self._ranks.show(cards)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start the step's loads, end leases, and do all other work that does not need the results of this step."""
        prepared: dict[str, Any] = {"reused": (), "recall": [], "questions": [], "save_cached": []}
        step = msgspec.structs.replace(self._step, save=[], grow=[], cached_blocks=[], **prepared)
        self._worker.begin(step, after=self._before_step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled only after its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Do nothing: readers read the blocks directly from the cache."""

    def wait_for_save(self) -> None:
        """Open and extend leases of the blocks that the step computes. Despite the method's name, do not wait.

        The leases get a device event that happens once the submitted forward pass is done. Readers wait for that event.
        """
        step = Step(save=self._step.save, grow=self._step.grow, cached_blocks=self._step.cached_blocks)
        self._worker.begin(step, ready=self._record_event())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._collect()
        return KVConnectorTransferResults(
            finished_sending=results.sent - results.not_offered,
            finished_recving=set(results.received),
            failed_recving=set(results.failed),
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As `get_transfer_results`, for vLLM before 0.30, which recognizes a failed load by its blocks."""
        results = self._collect()
        return results.sent - results.not_offered, set(results.received)

    def _collect(self) -> Results:
        idle = self.has_connector_metadata() and cast(KVFlowMetadata, self._get_connector_metadata()).idle
        results = self._worker.collect(self._idle_step_s if idle else 0.0)
        waited_in_vain = idle and results == Results()
        self._idle_step_s = min(2 * self._idle_step_s, _IDLE_STEP_MAX_S) if waited_in_vain else _IDLE_STEP_S
        self._worker_report = self._worker_report.aggregate(
            KVFlowWorkerReport(found=results.found, refused=results.refused, offered=tuple(results.offered))
        )
        self._stats.add_results(results)
        self._stats.data["prefix_runs"] += self._worker.shared_outcomes()
        while self._late_reads:
            self._late_reads.popleft()
            self._stats.data["late_reads"].append("stock")
        if len(self._groups) == 1:  # with several, vLLM cannot assign a block to a group: it computes the whole prompt
            failed = (block for load in results.failed.values() for block in load.block_tables[0])
            self._failed_blocks.update(block // self._split for block in failed)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def get_kv_connector_stats(self) -> KVFlowStats | None:
        """Return the statistics of this connector object since the last call; None if there are none."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, KVFlowStats()
        return taken

    def shutdown(self) -> None:
        if self.role is not KVConnectorRole.WORKER:
            return
        if self._successor is not None:  # readers that wait here are sent there, and goodbyes name it
            try:
                self._runtime.drain(successor=self._successor)
            except (KVFlowError, TimeoutError) as error:
                logger.warning("the server that takes this one's place is not named to readers: %s", error)
        self._runtime.close()

    def _record_event(self) -> DeviceEvent | None:
        """Return a new device event that happens once all work submitted so far is done. None on the CPU."""
        return None if self._device is None else record_event(self._device)

    @property
    def _step(self) -> Step:
        return cast(KVFlowMetadata, self._get_connector_metadata()).step

    # --- the frontend's

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFlowStats:
        return KVFlowStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVFlowPromMetrics:
        return KVFlowPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _computed_tokens(output: SchedulerOutput) -> tuple[dict[str, int], dict[str, int]]:
    """Return, for each request in the step, by id, its totals of computed tokens before and after the step."""
    going_on = output.scheduled_cached_reqs
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    before.update(zip(going_on.req_ids, going_on.num_computed_tokens, strict=True))
    added = output.num_scheduled_tokens
    return before, {request_id: computed + added[request_id] for request_id, computed in before.items()}


def _log_as_vllm() -> None:
    """Pass kvflow's log lines to the handlers of vLLM's logger, unless the logger "kvflow" is already configured."""
    ours, vllms = logging.getLogger("kvflow"), logging.getLogger("vllm")
    if not ours.handlers and ours.level == logging.NOTSET:
        for handler in vllms.handlers:
            ours.addHandler(handler)
        ours.setLevel(vllms.level)
        ours.propagate = False


def _remove_last_token(request: Request) -> bool:
    """Remove the last prompt token of `request`, limit the answer to one token, and return True.

    If the prompt has only one token or no token ids, or if the request asks for log probabilities of its prompt, only
    return False.
    """
    cut = request.num_prompt_tokens > 1 and request.prompt_token_ids is not None
    if not cut or request.get_skip_reading_prefix_cache():
        return False
    cut_prompt(request, request.num_prompt_tokens - 1)
    request.max_tokens = 1
    return True
