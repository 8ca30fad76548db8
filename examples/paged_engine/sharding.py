"""Tensor parallelism: each rank's part of the weights, and padding of heads so that the ranks can divide them.

Query, key, value, gate and up are split by rows, so each rank computes its own heads and its own part of the MLP.
Output and down are split by columns, so each rank computes a part of a sum, and the ranks add the parts up
(`all_reduce`). All other weights are whole on every rank. Heads are split in order: rank 0 has the first.

Padding adds KV heads at the end, with the query heads that share them. Their weights are zero, in the output projection
too, so they add exactly 0 to any sum. Their keys and values are zeros in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from paged_engine.model import ModelConfig

# The dimension along which a layer's weight is split. Weights that are not listed are whole on every rank.
ATTENTION_DIMENSIONS = {"q_proj.weight": 0, "k_proj.weight": 0, "v_proj.weight": 0, "o_proj.weight": 1}
MLP_DIMENSIONS = {"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1}
SHARDED_DIMENSIONS = ATTENTION_DIMENSIONS | MLP_DIMENSIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part of a model. With `kv_head_count` the model is first padded to that many KV heads."""

    tp_rank: int = 0
    tp_size: int = 1
    kv_head_count: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(f"tp_rank: {self.tp_rank} is not in 0..{self.tp_size - 1}")


WHOLE = Shard()


def divisible_kv_heads(kv_head_count: int, tp_sizes: Iterable[int]) -> int:
    """Return the smallest number of KV heads, at least `kv_head_count`, that every size in `tp_sizes` divides."""
    multiple = math.lcm(*tp_sizes)
    return -(-kv_head_count // multiple) * multiple


def take_shard(
    config: ModelConfig, weights: Mapping[str, torch.Tensor], shard: Shard
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Return a rank's config, which counts only its own KV heads, and its weights.

    Whole weights, and weights split by rows, are views of the original.
    """
    if shard.kv_head_count is not None:
        config, weights = padded(config, weights, shard.kv_head_count)
    kv_head_count = _divided("KV heads", config.kv_head_count, shard)
    return replace(config, kv_head_count=kv_head_count), {
        name: _part(name, weight, shard) for name, weight in weights.items()
    }


def padded(
    config: ModelConfig, weights: Mapping[str, torch.Tensor], kv_head_count: int
) -> tuple[ModelConfig, Mapping[str, torch.Tensor]]:
    """Return the model padded to `kv_head_count` KV heads. The added heads have no effect."""
    if kv_head_count < config.kv_head_count:
        raise ValueError(f"kv_head_count: the model has {config.kv_head_count}, {kv_head_count} is less")
    grown = dict(weights)
    for name, weight in weights.items():
        dimension = _dimension(name, ATTENTION_DIMENSIONS)
        if dimension is not None:
            size = list(weight.shape)
            # Query heads are padded in proportion to the KV heads.
            size[dimension] = size[dimension] // config.kv_head_count * (kv_head_count - config.kv_head_count)
            grown[name] = torch.cat((weight, weight.new_zeros(size)), dim=dimension)
    return replace(config, kv_head_count=kv_head_count), grown


def _part(name: str, weight: torch.Tensor, shard: Shard) -> torch.Tensor:
    dimension = _dimension(name, SHARDED_DIMENSIONS)
    if dimension is None:
        return weight
    size = _divided(name, weight.shape[dimension], shard)
    return weight.narrow(dimension, shard.tp_rank * size, size).contiguous()


def _dimension(name: str, dimensions: Mapping[str, int]) -> int | None:
    return next((dimension for suffix, dimension in dimensions.items() if name.endswith(suffix)), None)


def _divided(what: str, count: int, shard: Shard) -> int:
    if count % shard.tp_size:
        raise ValueError(f"{what}: {count} cannot be parted among {shard.tp_size} ranks")
    return count // shard.tp_size
