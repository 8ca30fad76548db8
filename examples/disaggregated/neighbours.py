"""Prefix sharing: a prefill worker loads the beginning of a prompt from another worker, and computes the rest.

In this engine a freed block keeps its content until it is reserved again. So a worker shares the prompts in its blocks
until it reserves these blocks for another request. A worker that leaves hands its prompts on to another one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack

from paged_engine import BlockId, Engine

import kvflow
from disaggregated.background import StartTask, free_when_settled
from disaggregated.groups import LayerGroups
from disaggregated.messages import PrefillRequest
from kvflow.connector.paged_prefix_cache import PagedPrefixCache
from kvflow.connector.scheduler import PagedGroup
from kvflow.connector.step import CachedBlocks
from kvflow.prefix import HandedOnPrefix, HandOnReport, Prefixes, PrefixRequest, prefix_keys

ANY_NUMBER = 1 << 31  # no limit of pinned blocks: sharing a prefix reserves no blocks here
TOKENS_MIN = 64  # a shorter prefix is computed faster than another worker can be asked
RECENT_MAX = 256  # prompts that are offered to a successor
HANDED_ON_BYTES_MAX = 1 << 30


class Neighbours:
    """The prefixes that one prefill worker shares with other workers and loads from them."""

    def __init__(self, engine: Engine, runtime: kvflow.Runtime, prefixes: Prefixes, start_task: StartTask) -> None:
        self._engine = engine
        self._block_size = engine.block_size
        self._groups = LayerGroups(engine)
        self._cache = PagedPrefixCache([PagedGroup(group.facts) for group in self._groups.caches], engine.block_size)
        self._sharing = prefixes.share(self._cache, pinned_blocks_max=ANY_NUMBER)
        self._runtime = runtime
        self._prefixes = prefixes
        self._start_task = start_task
        self._recent: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()
        """The keys of each prompt in the cache, by its last key, the least recently used first. Some may have been
        reused since."""

    def add(self, prompt: Sequence[int], block_ids: Sequence[BlockId]) -> None:
        """Note that `block_ids` hold `prompt`, so that other workers can load its beginning."""
        self._add(tuple(prefix_keys(prompt, self._block_size)), block_ids)

    def _add(self, keys: tuple[bytes, ...], block_ids: Sequence[BlockId]) -> None:
        if keys:
            tables = (tuple(block_ids[: len(keys)]),) * len(self._groups.caches)
            self._cache.add([CachedBlocks(parent=b"", keys=keys, block_tables=tables)], None)
            self._recent[keys[-1]] = keys
            self._recent.move_to_end(keys[-1])
            if len(self._recent) > RECENT_MAX:
                self._recent.popitem(last=False)

    async def pull(self, request: PrefillRequest, block_ids: Sequence[BlockId], blocks: AsyncExitStack) -> int:
        """Load the beginning of the prompt from another worker into reserved blocks. Return the number of its tokens.

        Other workers can no longer load the old content of these blocks. The prompt's last token is never loaded. If no
        worker has the beginning, or its load fails, return 0; if bytes may still land then, raise the load's error.
        """
        self._remove_reused(block_ids)
        keys = prefix_keys(request.prompt[:-1], self._block_size)
        if not request.neighbours or len(keys) * self._block_size < TOKENS_MIN:
            return 0
        wanted = PrefixRequest(
            f"{request.request_id}/prefix",
            keys=keys,
            key_tokens=self._block_size,
            block_ids=self._tables(block_ids[: len(keys)]),
            peers=request.neighbours,
        )
        return await self._pull(wanted, blocks)

    def accept(self, predecessors: Collection[str]) -> None:
        """Take over the prompts of workers that leave, of those at these addresses."""
        self._prefixes.accept(self._take, predecessors=[*predecessors])

    async def hand_on(self, successor: str, within_s: float) -> HandOnReport:
        """Offer the most recent prompts to the worker at the address `successor`, and wait until it has pulled them."""
        return await self._prefixes.hand_on(
            successor,
            [*reversed(self._recent.values())],
            key_tokens=self._block_size,
            bytes_max=HANDED_ON_BYTES_MAX,
            within_s=within_s,
        )

    async def _take(self, offered: HandedOnPrefix) -> int | None:
        """Pull an offered prompt into free blocks. Return its number of tokens; None if too few blocks are free."""
        if offered.key_tokens != self._block_size or offered.keys[-1] in self._recent:
            return 0
        if len(offered.keys) > self._engine.statistics().blocks_free:
            return None
        async with AsyncExitStack() as blocks:
            block_ids = await blocks.enter_async_context(self._engine.reserve(len(offered.keys) * self._block_size))
            self._remove_reused(block_ids)
            wanted = PrefixRequest(
                f"handed-on-{offered.keys[-1].hex()[:16]}",
                keys=offered.keys,
                key_tokens=self._block_size,
                block_ids=self._tables(block_ids),
                peers=[offered.holder],
                deadline_s=offered.within_s,
            )
            tokens = await self._pull(wanted, blocks)
            self._add(tuple(offered.keys[: tokens // self._block_size]), block_ids)
        return tokens

    def _tables(self, block_ids: Sequence[BlockId]) -> dict[str, Sequence[BlockId]]:
        return {group.name: block_ids for group in self._groups.caches}

    def _remove_reused(self, block_ids: Sequence[BlockId]) -> None:
        """Share the old content of these blocks no longer."""
        for pinned in self._cache.remove_reused(block_ids):
            self._sharing.end(pinned)

    async def _pull(self, wanted: PrefixRequest, blocks: AsyncExitStack) -> int:
        try:
            return (await self._prefixes.pull(wanted)).num_tokens
        except BaseException:  # also a cancellation
            if loads := self._runtime.quarantines:  # one of them may be that of this pull
                self._start_task(free_when_settled(loads, blocks.pop_all()), f"quarantine {wanted.request_id}")
            raise
