"""What kvflow's connector does in vLLM's scheduler, over a `connector.scheduler.ConnectorScheduler`.

If a model has windows or recurrent state, the prefill engine computes the prompt without its last token. The decode
engine computes that token in any case, for its logits, and needs the cache as it was before: a state cannot be rolled
back by one token, and vLLM frees a window's first block with the last token.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from kvflow.checks import counted
from kvflow.connector.kv_hints import IgnoredHint, KVHints
from kvflow.connector.parameters import OWN_DIALECT
from kvflow.connector.scheduler import ConnectorScheduler
from kvflow.connector.scheduling_config import SchedulingConfig
from kvflow.core.protocol.ticket import merge_tickets
from kvflow.errors import ConfigError, PromptMismatch, RequestError
from kvflow.logs import logger_of
from kvflow.parts import importing_part
from kvflow.vllm.engine_requests import engine_request_of, picture_ids_from_content, sharing_of, spreads_samples
from kvflow.vllm.extra_config import PREFIX_SETTINGS, Extra, config_of, scheduling_of, warn_of_side_channel
from kvflow.vllm.kv_cache_layout import Group
from kvflow.vllm.messages import KVFlowIntroduction, KVFlowMetadata, KVFlowWorkerReport
from kvflow.vllm.recent_prompts import RecentPrompts
from kvflow.vllm.succession import Succession
from kvflow.vllm.vllm_metrics import KVFlowStats
from kvflow.vllm.warming import WarmRequests, cut_prompt
from kvflow.vllm.weights import follow_weight_versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvflow.vllm.prefix import RequestPrefixes

logger = logger_of("vllm.kvflow")

_ANY_GRAMMAR = StructuredOutputsParams(json_object=True)
_REFUSED = "this prompt is not the one that was prefilled"
_COMPLETED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class _Verb(Protocol):
    """Requests that ask the server itself for something, and get it in the `kv_transfer_params` of their answers."""

    def add(self, request: Request) -> None:
        """Note a new request, if it is one of these."""

    def finish(self, request: Request) -> dict[str, Any] | None:
        """Return the `kv_transfer_params` of the answer to an ended request; None for other requests."""


def scheduler_side_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: Sequence[Group], extra: Extra
) -> SchedulerSide:
    """Return a `SchedulerSide` as the configuration asks for it. ConfigError if that is not possible."""
    scheduling = scheduling_of(vllm_config, groups)
    warn_of_side_channel(vllm_config)
    follow_weight_versions()
    dialect = OWN_DIALECT
    if extra.stock_peers:
        with importing_part("stock", "stock_peers", ConfigError):
            from kvflow.vllm import stock_settings

        dialect = stock_settings.dialect_of(extra, config_of(vllm_config, tp_rank=0, pp_rank=0), scheduling)
    prefixes = None
    if extra.uses_prefixes:
        with importing_part("prefix", PREFIX_SETTINGS, ConfigError):
            from kvflow.vllm.prefix import RequestPrefixes

        prefixes = RequestPrefixes(extra, scheduling, groups, vllm_config, kv_cache_config)
    block_tokens = groups[0].facts.block_size
    cache_bytes = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
    return SchedulerSide(
        scheduling,
        ConnectorScheduler(
            scheduling,
            new_secret=lambda: secrets.token_hex(16),
            dialect=dialect,
            questions=None if prefixes is None else prefixes.questions,
        ),
        groups,
        prefixes=prefixes,
        recent=RecentPrompts(
            extra.recent_tokens_max, block_tokens, cache_bytes // (kv_cache_config.num_blocks * block_tokens)
        ),
        picture_ids_from_content=picture_ids_from_content(vllm_config),
        recomputes_failed_loads=vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute",
        spreads_samples=spreads_samples(vllm_config),
        steps_alone=vllm_config.parallel_config.data_parallel_size == 1,
    )


class SchedulerSide:
    """kvflow's connector in vLLM's scheduler. vLLM's base class says when each method is called.

    Args:
        scheduling: facts about the engine.
        scheduler: decides which prompts are loaded and offered.
        groups: the groups of layers that are transferred.
        prefixes: shares and loads prefixes of prompts; None if the configuration asks for neither.
        recent: the prompts answered last.
        picture_ids_from_content: vLLM's identifiers of pictures depend on the pictures' content. If not, prompts with
            pictures cannot be compared.
        recomputes_failed_loads: vLLM computes a prompt locally after its load has failed.
        spreads_samples: vLLM may give samples of one prompt to several engines.
        steps_alone: no other engine waits for this engine's steps, as data-parallel engines do.
    """

    def __init__(
        self,
        scheduling: SchedulingConfig,
        scheduler: ConnectorScheduler,
        groups: Sequence[Group],
        *,
        prefixes: RequestPrefixes | None = None,
        recent: RecentPrompts | None = None,
        picture_ids_from_content: bool = True,
        recomputes_failed_loads: bool = False,
        spreads_samples: bool = False,
        steps_alone: bool = True,
    ) -> None:
        self._scheduling = scheduling
        self._scheduler = scheduler
        self._groups = groups
        self._prefixes = prefixes
        self._picture_ids_from_content = picture_ids_from_content
        self._recomputes_failed_loads = recomputes_failed_loads
        self._spreads_samples = spreads_samples
        self._steps_alone = steps_alone
        self.stats = KVFlowStats()
        self._cards: tuple[bytes, ...] = ()
        """The workers' encoded metadata for stock readers (`EngineRanks.card`), for the next step."""
        pulls, block_tokens = prefixes is not None and prefixes.pulls, groups[0].facts.block_size
        self._hints = KVHints(pulls=pulls, on_ignored=self._note_ignored_hint)
        self._warm = WarmRequests(
            block_tokens, pulls=pulls, on_end=lambda outcome: self.stats.data["warms"].append(str(outcome))
        )
        self._succession = Succession()
        self._recent = RecentPrompts(0, block_tokens, 0) if recent is None else recent
        self._verbs: tuple[_Verb, ...] = (self._warm, self._recent, self._succession)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
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
        for verb in self._verbs:
            verb.add(request)
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
            self.stats.data["tickets_refused"].append(type(error).__name__)
        if self._fail_if_refused(request):
            self.stats.data["load_failures"].append(PromptMismatch.__name__)
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
        self.stats.data["hints_ignored"].append(str(reason))

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

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVFlowMetadata:
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
        self._recent.holder = introduction.address
        self._succession.introduction = introduction
        self._scheduler.introduce(introduction)
        self._cards = tuple(worker.card for worker in workers if worker.card)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        tables = self._transferred_tables(block_ids)
        if self._prefixes is not None:
            self._prefixes.finish(request, tables)
        completed = request.status in _COMPLETED
        hold, params = self._scheduler.request_finished(request.request_id, completed=completed, block_ids=tables)
        answers = [verb.finish(request) for verb in self._verbs]
        return hold, next((answer for answer in answers if answer is not None), params)

    def _transferred_tables(self, tables: Sequence[list[int]]) -> tuple[list[int], ...]:
        """Return the block tables of `_groups`, in order. `tables` has a block table for each of vLLM's groups."""
        return tuple(tables[group.index] for group in self._groups)

    def reset_cache(self) -> None:
        """End all leases, because the blocks' contents are no longer valid, for example after new weights.

        vLLM also calls this before its workers sleep.
        """
        self._scheduler.withdraw_all()
        self._recent.forget_all()

    def note_new_weights(self, version: str) -> None:
        """Note the version of vLLM's new weights, once the workers have (`kvflow.vllm.weights`)."""
        self._scheduler.set_weights(version)
        self._recent.forget_all()
        if self._prefixes is not None:
            self._prefixes.withdraw_all()


def _computed_tokens(output: SchedulerOutput) -> tuple[dict[str, int], dict[str, int]]:
    """Return, for each request in the step, by id, its totals of computed tokens before and after the step."""
    going_on = output.scheduled_cached_reqs
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    before.update(zip(going_on.req_ids, going_on.num_computed_tokens, strict=True))
    added = output.num_scheduled_tokens
    return before, {request_id: computed + added[request_id] for request_id, computed in before.items()}


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
