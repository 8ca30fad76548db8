"""Which layers have a block table of their own for kvflow: those with a window need the end of a prompt only.

This engine keeps all tokens of all layers under one block table, which is simple. For kvflow each kind of layers is a
group, so that blocks before a window are neither offered nor read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch
from paged_engine import BlockId, Engine, blocks_for

import kvflow


@asynccontextmanager
async def registered(
    config: kvflow.Config,
    engine: Engine,
    observers: Sequence[kvflow.Observer] = (),
    parts: Sequence[kvflow.Part] = (),
) -> AsyncIterator[kvflow.Runtime]:
    """A runtime that knows the engine's cache. It is closed before the engine: it uses the engine's memory."""
    async with kvflow.Runtime(config, observers=observers, parts=parts) as runtime:
        await runtime.register_kv_caches(LayerGroups(engine).caches)
        yield runtime


class LayerGroups:
    """An engine's layers by window. There is one group if no layer has a window, or all have the same."""

    def __init__(self, engine: Engine) -> None:
        self._block_size = engine.block_size
        by_window: defaultdict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in engine.kv_caches.items():
            by_window[engine.windows[name]][name] = tensor
        self._layers = dict(by_window)
        self.caches = [
            kvflow.CacheGroup(
                _name(window),
                layers,
                kvflow.CacheLayout.infer(layers, order="HND", block_size=engine.block_size),
                window=window or None,
            )
            for window, layers in by_window.items()
        ]
        """As they are registered."""

    def tables(self, block_ids: Sequence[BlockId], token_count: int) -> dict[str, Sequence[BlockId]]:
        """Of a sequence's blocks, each group's: those that hold what the last and the next token attend to."""
        filled = blocks_for(token_count, self._block_size)
        return {_name(window): block_ids[self._first(window, token_count) : filled] for window in self._layers}

    def left(self, token_count: int) -> tuple[int, int]:
        """(blocks, bytes) that a sequence has before the windows of its layers: they are not moved."""
        first = {window: self._first(window, token_count) for window in self._layers}
        sizes = (first[window] * _block_bytes(layers) for window, layers in self._layers.items())
        return sum(first.values()), sum(sizes)

    def _first(self, window: int, token_count: int) -> int:
        """The first block that is needed; a window counts the token itself."""
        return max(0, token_count - window) // self._block_size if window else 0


def _name(window: int) -> str:
    return f"window-{window}" if window else "full"


def _block_bytes(layers: dict[str, torch.Tensor]) -> int:
    """Of one block in all of these layers, (K and V, blocks, ...) each."""
    return sum(tensor.nbytes // tensor.shape[1] for tensor in layers.values())
