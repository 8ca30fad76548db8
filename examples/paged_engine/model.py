"""A Llama forward pass over a paged KV cache: RMSNorm, RoPE, grouped-query attention, SwiGLU.

This module owns the weights and the arithmetic. The engine decides which blocks a sequence has, and what to do with the
logits. Weights keep the names and the head order of Hugging Face checkpoints.

The number of heads is taken from the weights, not from the config. So a layer with a slice of the heads computes that
slice, and `reduce` then sums over all ranks.

Theory of batches: the tokens of all sequences are rows of one matrix, and only attention handles each sequence alone.
The rounding of a matrix product depends on the number of rows, but not on the content of other rows. So with equal
`row_count` a sequence gets the same bits, whichever sequences are in its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat

import torch
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from paged_engine.cache import Pages

# Turns one rank's part of a sum into the sum over all ranks.
Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Facts of a model that its weights do not show."""

    layer_count: int
    kv_head_count: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    position_count_max: int
    eos_token_id: int
    name: str = "llama"
    window: int = 0
    """Number of tokens, itself included, that a token attends to in layers with a window; 0: no layer has a window."""
    full_attention_every: int = 1
    """Period of the layers without a window: the last layer of each period attends to all tokens."""

    def window_of(self, layer: int) -> int:
        """Return the window of a layer in tokens; 0 if the layer attends to all tokens."""
        return self.window if (layer + 1) % self.full_attention_every else 0


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
class Chunk:
    """The next tokens of one sequence, at positions start, start + 1, ... `pages` hold all earlier tokens."""

    token_ids: Sequence[int]
    start: int
    pages: Pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One sequence in a batch: its rows in the matrix of tokens, its pages, and its attention masks."""

    rows: slice
    pages: Pages
    start: int
    context_count: int
    masks: Mapping[int, torch.Tensor]
    """Attention masks by the window of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The sequences of one forward pass, and the cosine and sine of the position of each row."""

    parts: Sequence[Part]
    cos: torch.Tensor
    sin: torch.Tensor


def no_reduce(part: torch.Tensor) -> torch.Tensor:
    """Return `part`: the sum over all ranks of an engine with one rank."""
    return part


class LlamaModel:
    """A model's weights and config. It has no state, so one model serves any number of sequences."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], *, reduce: Reduce = no_reduce) -> None:
        self.config = config
        self._reduce = reduce
        self._embedding = weights["model.embed_tokens.weight"]
        self._norm = weights["model.norm.weight"]
        self._layers = {
            layer_name(index): _layer_weights(weights, layer_name(index)) for index in range(config.layer_count)
        }
        self.windows = {layer_name(index): config.window_of(index) for index in range(config.layer_count)}
        """Window of each layer in tokens, by layer name; 0: the layer attends to all tokens."""

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(self._layers)

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def vocabulary_size(self) -> int:
        return len(self._embedding)

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], start: int, pages: Pages) -> torch.Tensor:
        """Compute the tokens of one sequence at positions start, start + 1, ... Return the logits after the last token.

        `pages` must hold the keys and values of all earlier positions. Those of the new tokens are added.
        """
        chunk = Chunk(token_ids=token_ids, start=start, pages=pages)
        return self._logits(self._hidden([chunk], row_count=len(token_ids))[-1])

    @torch.inference_mode()
    def forward_batch(self, chunks: Sequence[Chunk], *, row_count: int) -> torch.Tensor:
        """Compute one token of each sequence. Return a row of logits for each."""
        assert all(len(chunk.token_ids) == 1 for chunk in chunks), "the rows are the sequences"
        return self._logits(self._hidden(chunks, row_count=row_count))[: len(chunks)]

    def _hidden(self, chunks: Sequence[Chunk], *, row_count: int) -> torch.Tensor:
        """Return the last layer's output for the tokens of all chunks, then for rows of padding up to `row_count`."""
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        batch = self._batch(chunks, row_count)
        hidden = embedding(_rows(token_ids, row_count), self._embedding)
        for name, layer in self._layers.items():
            attended = self._attention(name, layer, self._normed(hidden, layer.attention_norm), batch)
            hidden = hidden + self._reduce(attended)
            hidden = hidden + self._reduce(_mlp(layer, self._normed(hidden, layer.mlp_norm)))
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        # Tied embeddings: the output projection is the embedding itself.
        return linear(self._normed(hidden, self._norm), self._embedding)

    def _batch(self, chunks: Sequence[Chunk], row_count: int) -> Batch:
        positions = [chunk.start + index for chunk in chunks for index in range(len(chunk.token_ids))]
        cos, sin = _rotation(_rows(positions, row_count), self.config)
        ends = accumulate(len(chunk.token_ids) for chunk in chunks)
        windows = {*self.windows.values()}
        parts = [_part(chunk, end, windows) for chunk, end in zip(chunks, ends, strict=True)]
        return Batch(parts=parts, cos=cos, sin=sin)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, weight.shape, weight, self.config.norm_eps)

    def _heads(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Project, and split the result into heads: [tokens, heads, head_dim]."""
        return linear(hidden, weight).view(len(hidden), -1, self.config.head_dim)

    def _attention(self, name: str, layer: LayerWeights, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        query = _rotated(self._heads(hidden, layer.query), batch)
        key = _rotated(self._heads(hidden, layer.key), batch)
        value = self._heads(hidden, layer.value)
        attended = torch.zeros_like(query)
        for part in batch.parts:
            part.pages.write(name, part.start, key[part.rows], value[part.rows])
            context, mask = part.pages.read(name, part.context_count), part.masks[self.windows[name]]
            attended[part.rows] = _attended(query[part.rows], *context, mask)
        return linear(attended.flatten(1), layer.output)


def _rows(numbers: Sequence[int], row_count: int) -> torch.Tensor:
    """Return a tensor with one number for each row, and zeros for rows of padding."""
    assert len(numbers) <= row_count, "more tokens than rows"
    return torch.tensor([*numbers, *repeat(0, row_count - len(numbers))])


def _part(chunk: Chunk, end: int, windows: Iterable[int]) -> Part:
    """Return the `Part` of a chunk, with its last token in the row before `end`."""
    token_count = len(chunk.token_ids)
    context_count = chunk.start + token_count
    assert 0 < context_count <= chunk.pages.capacity, "the sequence outgrew its blocks"
    return Part(
        rows=slice(end - token_count, end),
        pages=chunk.pages,
        start=chunk.start,
        context_count=context_count,
        masks={window: _mask(chunk.start, context_count, window) for window in windows},
    )


def _mask(start: int, stop: int, window: int) -> torch.Tensor:
    """Return the mask of the tokens from `start` on: each attends to itself and to earlier tokens in the window."""
    distance = torch.arange(start, stop)[:, None] - torch.arange(stop)
    return (distance >= 0) & (distance < window) if window else distance >= 0


def _attended(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the attention of the new tokens of a sequence, [tokens, heads, head_dim], to all its tokens."""
    # Neighbouring query heads share one KV head.
    group_size = query.shape[1] // keys.shape[0]
    attended = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.repeat_interleave(group_size, dim=0)[None],
        values.repeat_interleave(group_size, dim=0)[None],
        attn_mask=mask,
    )
    return attended[0].transpose(0, 1)


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
    """Return the cosine and sine of RoPE's angles at each position, [tokens, 1, head_dim]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    angles = (positions[:, None] * frequencies).repeat(1, 2)[:, None]
    return angles.cos(), angles.sin()


def _rotated(heads: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Apply RoPE in the half-split order of Hugging Face checkpoints: value i rotates with value i + head_dim / 2."""
    first, second = heads.chunk(2, dim=-1)
    return heads * batch.cos + torch.cat((-second, first), dim=-1) * batch.sin


def _mlp(layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
    return linear(silu(linear(hidden, layer.gate)) * linear(hidden, layer.up), layer.down)
