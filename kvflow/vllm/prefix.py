"""Shares and loads prefixes in vLLM's scheduler: prefix keys of requests, vLLM's block pool, questions to peers.

vLLM's block pool can watch a block (`BlockPool.unpin_blocks`): it calls a function when it reuses the block, or drops
its whole cache. kvflow has requests' blocks watched, and reports a reused block to the workers with the step that may
write to it. No block is pinned for peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvflow import checks
from kvflow.connector.cached_prompts import CachedPrompts, GroupTablesOf
from kvflow.connector.prefix_peers import PrefixPeers
from kvflow.connector.prefix_questions import PrefixQuestions, source_in
from kvflow.connector.scheduler import SchedulingConfig
from kvflow.connector.step import Step
from kvflow.core.cache.groups import GroupKind
from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.errors import ConfigError, RequestError
from kvflow.hosts import plain_address
from kvflow.logs import logger_of
from kvflow.prefix import Prefixes, prefix_keys
from kvflow.prefix.kv_events import EventSource
from kvflow.prefix.prefix_requests import PEERS_MAX
from kvflow.vllm.engine_requests import picture_ids_from_content, tokens_of
from kvflow.vllm.extra_config import Extra
from kvflow.vllm.kv_cache_layout import Group

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logger_of("vllm.kvflow")

_ADAPTERS_MAX = 1 << 14
_RELOADED = 0  # no id of vLLM's


def sharing_obstacle(groups: Sequence[Group], kv_cache_config: KVCacheConfig) -> str:
    """Return why prefixes in this cache can be neither shared with peers nor loaded from peers; "" if they can."""
    sizes = {group.facts.block_size for group in groups}
    if any(group.facts.kind is GroupKind.STATE for group in groups):
        return "the model has state per request, which blocks do not hold"
    if len(sizes) > 1:
        return f"its groups of layers have block sizes {sorted(sizes)}"
    if kv_cache_config.needs_kv_cache_zeroing:
        return "vLLM zeroes this model's blocks before kvflow learns of the step"
    return ""


def known_peers(extra: Extra) -> tuple[str, ...]:
    """Return the checked addresses in `extra.prefix_peers`; empty if it is None.

    ConfigError if an address is invalid, or if there are too many.
    """
    checks.count(extra.prefix_peers or (), "prefix_peers", most=PEERS_MAX, error=ConfigError)
    return tuple(plain_address(peer, what="prefix_peers") for peer in extra.prefix_peers or ())


def prefix_peers_of(vllm_config: VllmConfig, extra: Extra) -> PrefixPeers:
    """Return the `PrefixPeers` for a worker, made from vLLM's configuration and the user's settings `extra`.

    ConfigError if an address or a setting is invalid.
    """
    parallel = vllm_config.parallel_config
    return PrefixPeers(
        prefixes=Prefixes(follow_successors=extra.follow_successors),
        wait_s=extra.prefix_wait_s,
        events=tuple(EventSource(**msgspec.structs.asdict(source)) for source in extra.prefix_events),
        known_peers=(*known_peers(extra), *(source.holder for source in extra.prefix_events)),
        recompute_s_per_token=extra.recompute_s_per_token,
        every_rank=parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1,
    )


class RequestPrefixes:
    """Shares prefixes of requests with peers, and loads prefixes from peers, in the scheduler's connector object."""

    def __init__(
        self,
        extra: Extra,
        scheduling: SchedulingConfig,
        groups: Sequence[Group],
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """Take the user's settings from `extra`, for a cache with the transferred `groups`.

        ConfigError if prefixes are to be loaded, but `kv_role` or `kv_load_failure_policy` does not allow that.
        """
        transfer = vllm_config.kv_transfer_config
        if extra.pulls_prefixes and not transfer.is_kv_consumer:
            raise ConfigError(f"prefix_peers: kv_role is {transfer.kv_role!r}, which loads nothing: kv_both does")
        if extra.pulls_prefixes and transfer.kv_load_failure_policy != "recompute":
            given = f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}"
            raise ConfigError(f"prefix_peers: {given}: a request would fail with its pull; set it to 'recompute'")
        why = sharing_obstacle(groups, kv_cache_config)
        if why:
            logger.warning("prefixes are neither shared nor pulled: %s", why)
        self._scheduling = scheduling
        self._picture_ids_from_content = picture_ids_from_content(vllm_config)
        self._block_tokens = groups[0].facts.block_size
        self._freeing_groups = [index for index, group in enumerate(groups) if group.frees_blocks]
        self._shares_prefixes = extra.share_prefixes and not why
        interval = getattr(kv_cache_config, "prefix_cache_retention_interval", None)
        if self._shares_prefixes and self._freeing_groups and interval not in (None, self._block_tokens):
            logger.info(
                "vLLM reuses most blocks of windows before all others, so peers may not find answers and prefixes: "
                "with --prefix-cache-retention-interval %d it does not",
                self._block_tokens,
            )
        self._ended: list[KVCacheBlock] = []
        """Blocks of ended requests, in groups with windows, that vLLM has not freed, or has freed since the last step.
        """
        self._cached_prompts: CachedPrompts | None = None
        self._blocks: Sequence[KVCacheBlock] = ()
        self._watch: Callable[[Sequence[int]], None] | None = None
        """The pool's blocks by id, and a function that has the pool watch blocks, and reuse them last if they are free;
        None if no prefixes are shared."""
        self.pulls = extra.pulls_prefixes and not why
        """True if requests ask peers for prefixes."""
        self._adapter_ids = BoundedMap[tuple[str, str], int](_ADAPTERS_MAX)
        """By adapter (name and path), vLLM's id of the adapter in its first request; `_RELOADED` once it was reloaded.
        """
        self.questions = PrefixQuestions(
            known_peers(extra),
            block_tokens=self._block_tokens,
            tokens_min=extra.prefix_tokens_min,
            use_events=bool(extra.prefix_events),
        )

    def bind_pool(self, pool: BlockPool) -> None:
        """If prefixes are shared, have vLLM's block pool report when it reuses requests' blocks."""
        if not self._shares_prefixes:
            return
        if not hasattr(pool, "unpin_blocks"):
            logger.warning("prefixes are not shared: this vLLM's block pool does not report reused blocks")
            return

        def on_reuse(block: KVCacheBlock) -> None:
            cached_prompts.note_reused(block.block_id)

        def watch(block_ids: Sequence[int]) -> None:
            blocks = [pool.blocks[block_id] for block_id in block_ids]
            pool.touch(blocks)
            pool.unpin_blocks(blocks, on_reuse)

        self._blocks, self._watch = pool.blocks, watch
        null_block = pool.null_block.block_id
        cached_prompts = self._cached_prompts = CachedPrompts(
            self._block_tokens, watch, null_block=null_block, freeing_groups=self._freeing_groups
        )

    @property
    def must_report(self) -> bool:
        """True if the workers must get a report of reused blocks, even in a step without requests."""
        return self._cached_prompts is not None and self._cached_prompts.must_report

    def add(self, request: Request, hinted: str | None) -> None:
        """Add a new request. If it has no ticket from a prefill engine, let it ask peers for a prefix of the prompt.

        `hinted` is the address of the peer to ask, from a KV hint, unless `kv_transfer_params` name another peer.
        """
        params = request.kv_transfer_params
        asks = self.pulls and not self._scheduling.takes(params or {})
        if (self._cached_prompts is None and not asks) or self._has_reloaded_adapter(request):
            return
        keys = self._keys(request, request.num_prompt_tokens)
        if self._cached_prompts is not None:
            self._cached_prompts.add(request.request_id, keys)
        if asks and not request.skip_reading_prefix_cache:
            try:
                source = source_in(params) or hinted
            except RequestError as error:
                logger.warning("request %s: no peer is asked for its prefix: %s", request.request_id, error)
                return
            most = (request.num_prompt_tokens - 1) // self._block_tokens
            self.questions.add(request.request_id, keys[:most], source)

    def _has_reloaded_adapter(self, request: Request) -> bool:
        """Return True if vLLM has loaded the adapter of `request` more than once under the same name and path.

        Keys of prefixes have name and path, so they cannot tell the new weights from the old. At the first such request
        all shared prefixes are withdrawn.
        """
        if (adapter := request.lora_request) is None:
            return False
        place = adapter.lora_name, adapter.lora_path
        known = self._adapter_ids.setdefault(place, adapter.lora_int_id)
        if known == adapter.lora_int_id and not adapter.load_inplace:
            return False
        if known != _RELOADED:
            self._adapter_ids[place] = _RELOADED
            if self._cached_prompts is not None:
                self._cached_prompts.withdraw_all()
            logger.warning(
                "adapter %r was loaded again from %r: its prefixes are no longer shared or pulled, since "
                "their keys do not tell its weights from the old ones. Load changed weights from another path",
                *place,
            )
        return True

    def _keys(self, request: Request, num_tokens: int) -> list[bytes]:
        tokens = tokens_of(request, num_tokens, picture_ids_from_content=self._picture_ids_from_content)
        return [] if tokens is None else prefix_keys(tokens, self._block_tokens)

    def build_step(
        self, step: Step, scheduled: Mapping[str, int], *, preempted: Iterable[str], block_ids: GroupTablesOf
    ) -> None:
        """Set `step.reused` to the blocks reused since the last step, and `step.cached_blocks` to newly filled blocks.

        `scheduled` has each request's total of computed tokens after the step. `preempted` are the ids of requests that
        have lost their blocks. `block_ids` returns a request's block tables.
        """
        if self._cached_prompts is not None:
            self._cached_prompts.build_step(step, scheduled, preempted=preempted, block_ids=block_ids)
            if self._ended and self._watch is not None:
                self._reuse_last(self._cached_prompts, self._watch)

    def _reuse_last(self, cached_prompts: CachedPrompts, watch: Callable[[Sequence[int]], None]) -> None:
        """Have the pool reuse the freed ones of `_ended` last, not first.

        vLLM reuses a freed block first if its own prefix cache does not have it. Of a window, vLLM's cache has only the
        blocks around the prompt's end (`prefix_cache_retention_interval`), but peers ask for the answer, too.
        """
        known = [block for block in self._ended if block.block_hash is None and cached_prompts.holds(block.block_id)]
        self._ended = [block for block in known if block.ref_cnt]
        watch([block.block_id for block in known if block.ref_cnt == 0])

    def withdraw_all(self) -> None:
        """With the next step, take all shared blocks back: they were computed with weights that are replaced."""
        if self._cached_prompts is not None:
            self._cached_prompts.withdraw_all()

    def finish(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """With the next step, report the blocks `block_ids` of `request`, which has ended but still has them."""
        if self._cached_prompts is not None:
            computed = min(request.num_computed_tokens, request.num_tokens - 1)
            self._cached_prompts.finish(
                request.request_id, keys=lambda: self._keys(request, computed), computed=computed, block_ids=block_ids
            )
            if self._blocks:
                ids = [block_id for index in self._freeing_groups for block_id in block_ids[index]]
                self._ended += [block for block in map(self._blocks.__getitem__, ids) if not block.is_null]
