"""vLLM's own copies between a cache and host buffers, on devices for which its platform brings them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from kvflow.core.cache.groups import CacheGroup
from kvflow.core.cache.layout import CacheLayout, KVStyle
from kvflow.runtime.memory import CopyDirection

if TYPE_CHECKING:
    import torch

_Tensors: TypeAlias = "dict[str, torch.Tensor]"
CopyOperation: TypeAlias = Callable[[_Tensors, _Tensors, list[int], list[int], Any], None]
"""vLLM's `copy_kv_blocks`: from, to, blocks there, blocks here, "d2h" or "h2d"."""
_OURS = ("cpu", "cuda")
"""Kinds of devices for which kvflow's own copies are faster."""
_BLOCKS_OUTSIDE = (KVStyle.BLOCKS_FIRST, KVStyle.FUSED, KVStyle.MLA)


class PlatformCopies:
    """A `BlockCopier` by the operation that vLLM sets after it has registered its caches."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._layers: dict[str, Any] = {name: layer for group in groups for name, layer in group.layers.items()}
        self.operation: CopyOperation | None = None

    def __call__(self, host_caches: Any, pairs: Sequence[tuple[int, int]], direction: CopyDirection) -> None:
        """Copy blocks of some layers. Raises RuntimeError if vLLM has set no operation."""
        if self.operation is None:
            raise RuntimeError("vLLM has not called set_host_xfer_buffer_ops: there is nothing to copy blocks with")
        ours, hosts = ([pair[at] for pair in pairs] for at in range(2))
        layers = {name: self._layers[name] for name in host_caches}
        if direction is CopyDirection.TO_HOST:
            self.operation(layers, dict(host_caches), ours, hosts, "d2h")
        else:
            self.operation(dict(host_caches), layers, hosts, ours, "h2d")


def platform_copies(groups: Sequence[CacheGroup], device: str) -> PlatformCopies | None:
    """Return the copies of a cache by vLLM's platform; None if kvflow's own are to be used.

    vLLM's operation takes tensors whose first axis is the block's.
    """
    layouts = [layout for group in groups for layout in group.layouts]
    fits = all(isinstance(one, CacheLayout) and one.style in _BLOCKS_OUTSIDE for one in layouts)
    return PlatformCopies(groups) if fits and device not in _OURS else None
