"""Prefix sharing: a prefill worker loads the beginning of a prompt from another worker, and computes the rest.

In this engine a freed block keeps its content until it is reserved again. So a worker shares the prompts in its blocks
until it reserves these blocks for another request.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from paged_engine import BlockId, Engine

import kvflow
from disaggregated.background import StartTask, free_when_settled
from disaggregated.groups import LayerGroups
from disaggregated.messages import PrefillRequest
from kvflow.connector.paged_prefix_cache import PagedPrefixCache
from kvflow.connector.scheduler import PagedGroup
from kvflow.connector.step import CachedBlocks
from kvflow.prefix import Prefixes, PrefixRequest, prefix_keys

ANY_NUMBER = 1 << 31  # no limit of pinned blocks: sharing a prefix reserves no blocks here
TOKENS_MIN = 64  # a shorter prefix is computed faster than another worker can be asked


class Neighbours:
    """The prefixes that one prefill worker shares with other workers and loads from them."""

    def __init__(self, engine: Engine, runtime: kvflow.Runtime, prefixes: Prefixes, start_task: StartTask) -> None:
        self._block_size = engine.block_size
        self._groups = LayerGroups(engine)
        self._cache = PagedPrefixCache([PagedGroup(group.facts) for group in self._groups.caches], engine.block_size)
        self._sharing = prefixes.share(self._cache, pinned_blocks_max=ANY_NUMBER)
        self._runtime = runtime
        self._prefixes = prefixes
        self._start_task = start_task

    def add(self, prompt: Sequence[int], block_ids: Sequence[BlockId]) -> None:
        """Note that `block_ids` hold `prompt`, so that other workers can load its beginning."""
        keys = tuple(prefix_keys(prompt, self._block_size))
        if keys:
            tables = (tuple(block_ids[: len(keys)]),) * len(self._groups.caches)
            self._cache.add([CachedBlocks(parent=b"", keys=keys, block_tables=tables)], None)

    async def pull(self, request: PrefillRequest, block_ids: Sequence[BlockId], blocks: AsyncExitStack) -> int:
        """Load the beginning of the prompt from another worker into reserved blocks. Return the number of its tokens.

        Other workers can no longer load the old content of these blocks. The prompt's last token is never loaded. If no
        worker has the beginning, or its load fails, return 0; if bytes may still land then, raise the load's error.
        """
        for pinned in self._cache.remove_reused(block_ids):
            self._sharing.end(pinned)
        keys = prefix_keys(request.prompt[:-1], self._block_size)
        if not request.neighbours or len(keys) * self._block_size < TOKENS_MIN:
            return 0
        wanted = PrefixRequest(
            f"{request.request_id}/prefix",
            keys=keys,
            key_tokens=self._block_size,
            block_ids={group.name: block_ids[: len(keys)] for group in self._groups.caches},
            peers=request.neighbours,
        )
        try:
            return (await self._prefixes.pull(wanted)).num_tokens
        except BaseException:  # also a cancellation
            if loads := self._runtime.quarantines:  # one of them may be that of this pull
                self._start_task(free_when_settled(loads, blocks.pop_all()), f"quarantine {wanted.request_id}")
            raise
