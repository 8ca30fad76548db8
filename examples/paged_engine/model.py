"""A Llama forward pass over a paged KV cache: RMSNorm, RoPE, grouped-query attention, SwiGLU.

It owns the weights and the arithmetic. Which blocks a sequence has, and what to do with the logits, is
the engine's affair. Weights keep the names and the head order of Hugging Face checkpoints.

The number of heads is read from the weights, not from the config, so a layer that holds a slice of the
heads computes that slice; `reduce` then adds up what all ranks have computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from paged_engine.cache import Pages

# One rank's part of a sum to the whole of it.
Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the weights alone do not tell."""

    layer_count: int
    kv_head_count: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    position_count_max: int
    eos_token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of one decoder layer."""

    attention_norm: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What every layer of one forward pass needs to know of the tokens it computes."""

    pages: Pages
    start: int
    context_count: int
    cos: torch.Tensor
    sin: torch.Tensor
    mask: torch.Tensor


def alone(part: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks where there is only one."""
    return part


class LlamaModel:
    """Weights and config; has no state of its own, so one model serves any number of sequences."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], *, reduce: Reduce = alone) -> None:
        self.config = config
        self._reduce = reduce
        self._embedding = weights["model.embed_tokens.weight"]
        self._norm = weights["model.norm.weight"]
        self._layers = {
            layer_name(index): _layer_weights(weights, layer_name(index)) for index in range(config.layer_count)
        }

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(self._layers)

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], start: int, pages: Pages) -> torch.Tensor:
        """Compute the tokens at positions start, start + 1, ...; return the logits after the last one.

        The keys and values of all earlier positions must be in the pages; those of these tokens are added.
        """
        assert 0 < start + len(token_ids) <= pages.capacity, "the sequence outgrew its blocks"
        step = self._step(len(token_ids), start, pages)
        hidden = embedding(torch.tensor(token_ids), self._embedding)
        for name, layer in self._layers.items():
            attended = self._attention(name, layer, self._normed(hidden, layer.attention_norm), step)
            hidden = hidden + self._reduce(attended)
            hidden = hidden + self._reduce(_mlp(layer, self._normed(hidden, layer.mlp_norm)))
        # Tied embeddings: the output projection is the embedding itself.
        return linear(self._normed(hidden[-1], self._norm), self._embedding)

    def _step(self, token_count: int, start: int, pages: Pages) -> Step:
        positions = torch.arange(start, start + token_count)
        cos, sin = _rotation(positions, self.config)
        context_count = start + token_count
        return Step(
            pages=pages,
            start=start,
            context_count=context_count,
            cos=cos,
            sin=sin,
            # A token sees itself and everything before it.
            mask=torch.arange(context_count) <= positions[:, None],
        )

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, weight.shape, weight, self.config.norm_eps)

    def _heads(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Project, and part the result into heads: [tokens, heads, head_dim]."""
        return linear(hidden, weight).view(len(hidden), -1, self.config.head_dim)

    def _attention(self, name: str, layer: LayerWeights, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        query = _rotated(self._heads(hidden, layer.query), step)
        key = _rotated(self._heads(hidden, layer.key), step)
        value = self._heads(hidden, layer.value)
        step.pages.write(name, step.start, key, value)
        keys, values = step.pages.read(name, step.context_count)
        # Neighbouring query heads share one KV head.
        group_size = query.shape[1] // keys.shape[0]
        attended = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.repeat_interleave(group_size, dim=0)[None],
            values.repeat_interleave(group_size, dim=0)[None],
            attn_mask=step.mask,
        )
        return linear(attended[0].transpose(0, 1).flatten(1), layer.output)


def layer_name(index: int) -> str:
    return f"model.layers.{index}"


def _layer_weights(weights: Mapping[str, torch.Tensor], prefix: str) -> LayerWeights:
    return LayerWeights(
        attention_norm=weights[f"{prefix}.input_layernorm.weight"],
        query=weights[f"{prefix}.self_attn.q_proj.weight"],
        key=weights[f"{prefix}.self_attn.k_proj.weight"],
        value=weights[f"{prefix}.self_attn.v_proj.weight"],
        output=weights[f"{prefix}.self_attn.o_proj.weight"],
        mlp_norm=weights[f"{prefix}.post_attention_layernorm.weight"],
        gate=weights[f"{prefix}.mlp.gate_proj.weight"],
        up=weights[f"{prefix}.mlp.up_proj.weight"],
        down=weights[f"{prefix}.mlp.down_proj.weight"],
    )


def _rotation(positions: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each position's angles, [tokens, 1, head_dim]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    angles = (positions[:, None] * frequencies).repeat(1, 2)[:, None]
    return angles.cos(), angles.sin()


def _rotated(heads: torch.Tensor, step: Step) -> torch.Tensor:
    """RoPE in the half-split order of Hugging Face checkpoints: value i turns with value i + head_dim / 2."""
    first, second = heads.chunk(2, dim=-1)
    return heads * step.cos + torch.cat((-second, first), dim=-1) * step.sin


def _mlp(layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
    return linear(silu(linear(hidden, layer.gate)) * linear(hidden, layer.up), layer.down)
