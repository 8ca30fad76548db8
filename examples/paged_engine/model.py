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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

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
class Chunk:
    """The next tokens of one sequence, at positions start, start + 1, ... `pages` hold all earlier tokens."""

    token_ids: Sequence[int]
    start: int
    pages: Pages

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The sequences of one forward pass, and the cosine and sine of the position of each row."""

    chunks: Sequence[Chunk]
    masks: Sequence[Mapping[int, torch.Tensor]]
    """Attention masks of each chunk, by the window of a layer."""
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
        self._weights = weights
        self._embedding = weights["model.embed_tokens.weight"]
        self.windows = {layer_name(index): config.window_of(index) for index in range(config.layer_count)}
        """Window of each layer in tokens, by layer name; 0: the layer attends to all tokens."""
        self.layer_names = tuple(self.windows)
        self.dtype = self._embedding.dtype
        self.vocabulary_size = len(self._embedding)

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
        for layer in self.layer_names:
            attended = self._attention(layer, self._normed(hidden, f"{layer}.input_layernorm"), batch)
            hidden = hidden + self._reduce(attended)
            hidden = hidden + self._reduce(self._mlp(layer, self._normed(hidden, f"{layer}.post_attention_layernorm")))
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        # Tied embeddings: the output projection is the embedding itself.
        return linear(self._normed(hidden, "model.norm"), self._embedding)

    def _batch(self, chunks: Sequence[Chunk], row_count: int) -> Batch:
        assert all(0 < chunk.stop <= chunk.pages.capacity for chunk in chunks), "a sequence outgrew its blocks"
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.stop)]
        cos, sin = _rotation(_rows(positions, row_count), self.config)
        windows = {*self.windows.values()}
        masks = [{window: _mask(chunk.start, chunk.stop, window) for window in windows} for chunk in chunks]
        return Batch(chunks=chunks, masks=masks, cos=cos, sin=sin)

    def _normed(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._weights[f"{name}.weight"]
        return rms_norm(hidden, weight.shape, weight, self.config.norm_eps)

    def _linear(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        return linear(hidden, self._weights[f"{name}.weight"])

    def _heads(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        """Project, and split the result into heads: [tokens, heads, head_dim]."""
        return self._linear(hidden, name).view(len(hidden), -1, self.config.head_dim)

    def _attention(self, layer: str, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        query = _rotated(self._heads(hidden, f"{layer}.self_attn.q_proj"), batch)
        key = _rotated(self._heads(hidden, f"{layer}.self_attn.k_proj"), batch)
        value = self._heads(hidden, f"{layer}.self_attn.v_proj")
        attended = torch.zeros_like(query)
        row = 0
        for chunk, masks in zip(batch.chunks, batch.masks, strict=True):
            rows = slice(row, row := row + len(chunk.token_ids))
            chunk.pages.write(layer, chunk.start, key[rows], value[rows])
            context = chunk.pages.read(layer, chunk.stop)
            attended[rows] = _attended(query[rows], *context, masks[self.windows[layer]])
        return self._linear(attended.flatten(1), f"{layer}.self_attn.o_proj")

    def _mlp(self, layer: str, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self._linear(hidden, f"{layer}.mlp.gate_proj"), self._linear(hidden, f"{layer}.mlp.up_proj")
        return self._linear(silu(gate) * up, f"{layer}.mlp.down_proj")


def _rows(numbers: Sequence[int], row_count: int) -> torch.Tensor:
    """Return a tensor with one number for each row, and zeros for rows of padding."""
    assert len(numbers) <= row_count, "more tokens than rows"
    return torch.tensor([*numbers, *repeat(0, row_count - len(numbers))])


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
