"""Prefixes of neighbours: a prefill worker loads what another one has computed of a prompt, and computes the rest.

A block of this engine holds what was computed into it until it is reserved anew, also when it is free meanwhile. So a
worker shares what its blocks hold, until it reserves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from paged_engine import BlockId, Engine

import kvflow
from disaggregated.background import StartTask, load_into
from disaggregated.groups import LayerGroups
from disaggregated.messages import PrefillRequest
from kvflow.connector.paged_prefix_cache import PagedPrefixCache
from kvflow.connector.scheduler import PagedGroup
from kvflow.connector.step import CachedBlocks
from kvflow.prefix import Prefixes, PrefixRequest, prefix_keys

ANY_NUMBER = 1 << 31  # nothing is pinned for readers
TOKENS_MIN = 64  # fewer are computed sooner than asked for


class Neighbours:
    """What one prefill worker shares with others, and gets of them."""

    def __init__(self, engine: Engine, runtime: kvflow.Runtime, prefixes: Prefixes, start_task: StartTask) -> None:
        self._block_size = engine.block_size
        self._groups = LayerGroups(engine)
        self._cache = PagedPrefixCache([PagedGroup(group.facts) for group in self._groups.caches], engine.block_size)
        self._sharing = prefixes.share(self._cache, pinned_blocks_max=ANY_NUMBER)
        self._runtime = runtime
        self._prefixes = prefixes
        self._start_task = start_task

    def computed(self, prompt: Sequence[int], block_ids: Sequence[BlockId]) -> None:
        """These blocks hold this prompt."""
        keys = tuple(prefix_keys(prompt, self._block_size))
        if keys:
            tables = (tuple(block_ids[: len(keys)]),) * len(self._groups.caches)
            self._cache.add([CachedBlocks(parent=b"", keys=keys, block_tables=tables)], None)

    async def pull(self, request: PrefillRequest, block_ids: Sequence[BlockId], blocks: AsyncExitStack) -> int:
        """Fill reserved blocks with what a neighbour has of the prompt; return how many tokens that is.

        Whoever reads prefixes of these blocks gets a miss from here on. The last token is always computed. Raises what
        a load does if bytes may still land.
        """
        for pinned in self._cache.take(block_ids):
            self._sharing.end(pinned)
        keys = prefix_keys(request.prompt[:-1], self._block_size)
        if not request.neighbours or len(keys) * self._block_size < TOKENS_MIN:
            return 0
        offers = await self._prefixes.seek(
            PrefixRequest(
                request.request_id,
                keys=keys,
                key_tokens=self._block_size,
                block_ids=(),
                peers=request.neighbours,
            )
        )
        for other in offers[1:]:
            await self._runtime.release_blocks(other.ticket)
        if not offers:
            return 0
        tokens = offers[0].num_tokens
        load = kvflow.LoadRequest(
            f"{request.request_id}/prefix",
            ticket=offers[0].ticket,
            block_ids=self._groups.tables(block_ids, tokens),
        )
        try:
            await load_into(blocks, self._runtime, load, self._start_task)
        except kvflow.errors.KVFlowError as error:
            if getattr(error, "quarantine", None) is not None:
                raise
            return 0
        return tokens
