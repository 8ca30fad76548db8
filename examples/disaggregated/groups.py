"""Groups of layers for kvflow: layers with a sliding window get their own block table, with the end of the prompt only.

For simplicity this engine keeps all tokens of all layers under one block table. For kvflow the layers with the same
window are a group, so that blocks before a window are neither offered nor read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch
from paged_engine import BlockId, Engine, blocks_for

import kvflow


@asynccontextmanager
async def open_runtime(
    config: kvflow.Config,
    engine: Engine,
    observers: Sequence[kvflow.Observer] = (),
    parts: Sequence[kvflow.Part] = (),
) -> AsyncIterator[kvflow.Runtime]:
    """Open a runtime with the engine's cache registered. Close it before the engine: it uses the engine's memory."""
    async with kvflow.Runtime(config, observers=observers, parts=parts) as runtime:
        await runtime.register_kv_caches(LayerGroups(engine).caches)
        yield runtime


class LayerGroups:
    """The layers of an engine, in a group for each window size. Layers without a window are a group as well."""

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
        """The groups as they are registered with kvflow."""

    def tables(self, block_ids: Sequence[BlockId], token_count: int) -> dict[str, Sequence[BlockId]]:
        """Return the block table of each group for a sequence of `token_count` tokens in `block_ids`.

        A table has the blocks that the last token and the next one attend to.
        """
        filled = blocks_for(token_count, self._block_size)
        return {_name(window): block_ids[self._first_block(window, token_count) : filled] for window in self._layers}

    def skipped(self, token_count: int) -> tuple[int, int]:
        """Return how many blocks and bytes of a sequence lie before the windows of its layers, and so are not moved."""
        first = {window: self._first_block(window, token_count) for window in self._layers}
        sizes = (first[window] * _block_bytes(layers) for window, layers in self._layers.items())
        return sum(first.values()), sum(sizes)

    def _first_block(self, window: int, token_count: int) -> int:
        """Return the index of the first block that a layer with this window needs. A window counts the token itself."""
        return max(0, token_count - window) // self._block_size if window else 0


def _name(window: int) -> str:
    return f"window-{window}" if window else "full"


def _block_bytes(layers: dict[str, torch.Tensor]) -> int:
    """Return the bytes of one block in all these layers, with tensors of shape (K and V, blocks, ...)."""
    return sum(tensor.nbytes // tensor.shape[1] for tensor in layers.values())
