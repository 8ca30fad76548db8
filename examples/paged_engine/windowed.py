"""A tiny random model with sliding windows: weights from a seed, a vocabulary of characters.

Five of six layers attend to the last `WINDOW` tokens only, as in Gemma 3. The model's answers are noise that depends on
every token its layers attend to, so equal answers mean equal KV caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from paged_engine.model import ModelConfig, layer_name
from paged_engine.weights import TEMPLATE_NAME, TOKENIZER_NAME, require_modules, write_weights

WINDOWED_NAME = "random-sliding-window"
WINDOW = 32
_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _MLP = 128, 4, 2, 32, 256
_CHARACTERS = tuple(map(chr, range(ord("!"), ord("~") + 1)))
_SPACE = "Ġ"  # the space in byte-level vocabularies
_END = "<end>"
_GAIN = 1.5  # scale of most weights: large enough that every earlier token has an effect
_ADDED = 6.0  # scale of output projections: below the embedding's, each token would be followed by itself
_SEED = 20

CONFIG = ModelConfig(
    name=WINDOWED_NAME,
    layer_count=6,
    kv_head_count=_KV_HEADS,
    head_dim=_HEAD_DIM,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    position_count_max=8192,
    eos_token_id=0,
    window=WINDOW,
    full_attention_every=6,
)


def write_windowed(directory: Path) -> None:
    """Write weights, config and tokenizer to a directory, for `load_model` and `ChatTokenizer`."""
    write_weights(dict(_tensors()), CONFIG, directory)
    _write_tokenizer(directory)


def _tensors() -> Iterator[tuple[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(_SEED)

    def weight(outputs: int, inputs: int, deviation: float) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=random) * deviation

    yield "model.embed_tokens.weight", weight(len(_CHARACTERS) + 2, _HIDDEN, 1.0)
    yield "model.norm.weight", torch.ones(_HIDDEN)
    shapes = {
        "self_attn.q_proj": (_HEADS * _HEAD_DIM, _HIDDEN, _GAIN),
        "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN, _GAIN),
        "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN, _GAIN),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD_DIM, _ADDED),
        "mlp.gate_proj": (_MLP, _HIDDEN, _GAIN),
        "mlp.up_proj": (_MLP, _HIDDEN, _GAIN),
        "mlp.down_proj": (_HIDDEN, _MLP, _ADDED),
    }
    for layer in map(layer_name, range(CONFIG.layer_count)):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", torch.ones(_HIDDEN)
        for name, (outputs, inputs, gain) in shapes.items():
            yield f"{layer}.{name}.weight", weight(outputs, inputs, gain * inputs**-0.5)


def _write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with one token for each printable ASCII character. Other characters become question marks."""
    require_modules("tokenizers")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate((_END, _SPACE, *_CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END, special=True)])
    tokenizer.save(str(directory / TOKENIZER_NAME))
    (directory / TEMPLATE_NAME).write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
