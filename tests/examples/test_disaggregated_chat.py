"""The demo as users run it, and what its router does when a worker misbehaves."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from disaggregated.engines import start_engine
from disaggregated.hand_over import answer_alone, hand_over
from disaggregated.messages import Generate, Prefill, Ready, Token
from disaggregated.router import WorkerError
from disaggregated.worker import WorkerSettings
from paged_engine import blocks_for
from paged_engine.weights import CONFIG_NAME, WEIGHTS_NAME, read_checkpoint
from safetensors.torch import save_file
from tiny_model import EXAMPLES, PROMPT, Model, RunPython

Settings = Callable[..., WorkerSettings]

DEMO = EXAMPLES / "disaggregated_chat.py"
PHASES = ("queued", "handshake", "plan", "post", "wire", "notify", "total")

# 30 layers, K and V, 3 heads of 64 float32 values.
SMOLLM2_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("transport", "tokens", "block_size"), [("shm", 48, 16), ("tcp", 12, 7)], ids=["shm", "tcp"])
@pytest.mark.thorough
@pytest.mark.usefixtures("smollm2_packages")
def test_runs_as_it_stands(run_python: RunPython, transport: str, tokens: int, block_size: int) -> None:
    """Thorough: see `test_two_engines_answer_as_one` of this file."""
    options = {"transport": transport, "tokens": tokens, "block-size": block_size}
    demo = run_python(str(DEMO), *(f"--{name}={value}" for name, value in options.items()))
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stderr == ""
    assert "✓ same text" in demo.stdout
    assert f"NIXL over {transport}" in demo.stdout
    # The decode engine was never told of the dog: the word came with the KV cache.
    answer = re.search(r"╭─ SmolLM2 .*?╰", demo.stdout, flags=re.DOTALL)
    assert answer is not None, demo.stdout
    assert "dog" in answer.group()
    table = dict(re.findall(r"^│ ([a-z +]+?) +│ +(\S.*?) │", demo.stdout, flags=re.MULTILINE))
    tokens_read = int(table["prompt tokens"])
    blocks = blocks_for(tokens_read, block_size)
    assert int(table["blocks"]) == blocks
    # Of a partly filled last block the rest may be read or not.
    size = int(table["bytes"].replace(",", ""))
    assert tokens_read * SMOLLM2_BYTES_PER_TOKEN <= size <= blocks * block_size * SMOLLM2_BYTES_PER_TOKEN
    assert int(table["descriptors"].replace(",", "")) > 0
    assert table["lease"] == "read"
    assert all(re.fullmatch(r"[\d,]+\.\d\d ms", table[phase]) for phase in PHASES)
    assert all(table[rate].endswith(" GB/s") for rate in ("post + wire", "all phases"))


def test_names_what_is_not_installed(run_python: RunPython) -> None:
    lines = (
        "import runpy, sys",
        "sys.modules['rich'] = sys.modules['gguf'] = None",
        f"sys.path.insert(0, {str(EXAMPLES)!r})",
        f"runpy.run_path({str(DEMO)!r}, run_name='__main__')",
    )
    demo = run_python("-c", "\n".join(lines))
    assert demo.returncode == 2
    assert demo.stderr.startswith("error: not installed: rich, gguf.")
    assert "pip install 'kvflow[examples]'" in demo.stderr


@pytest.mark.parametrize(("option", "value", "least"), [("--tokens", "1", 2), ("--block-size", "0", 1)])
def test_refuses_counts_that_prove_nothing(run_python: RunPython, option: str, value: str, least: int) -> None:
    demo = run_python(str(DEMO), option, value)
    assert demo.returncode == 2
    assert f"{option}: {value} is less than {least}" in demo.stderr


async def test_two_engines_answer_as_one(settings: Settings, tiny: Model) -> None:
    async with start_engine(settings("prefill-0")) as prefill, start_engine(settings("decode-0")) as decode:
        await prefill.expect(Ready)
        await decode.expect(Ready)
        shown: list[int] = []
        handed_over = await hand_over(
            prefill, decode, request_id="chat-1", prompt=PROMPT, max_tokens=20, show=shown.append
        )
        assert handed_over.token_ids == shown == tiny.greedy(PROMPT, 20)
        assert await answer_alone(decode, PROMPT, 20) == shown
        assert [loaded.blocks for loaded in handed_over.loaded] == [3]
        assert handed_over.outcomes == ["read"]


async def test_wrong_answers_are_noticed(settings: Settings, tiny: Model, tmp_path: Path) -> None:
    """A prefill engine with other weights leaves other keys and values: the comparison must see it."""
    other = with_other_weights(tiny.checkpoint, tmp_path)
    async with (
        start_engine(settings("prefill-0", checkpoint=other)) as prefill,
        start_engine(settings("decode-0")) as decode,
    ):
        await prefill.expect(Ready)
        await decode.expect(Ready)
        handed_over = await hand_over(
            prefill, decode, request_id="chat-1", prompt=PROMPT, max_tokens=20, show=lambda token: None
        )
        assert handed_over.token_ids != await answer_alone(decode, PROMPT, 20)


def with_other_weights(checkpoint: Path, directory: Path) -> Path:
    """The same checkpoint, but the embedding is turned around."""
    _, weights = read_checkpoint(checkpoint)
    weights["model.embed_tokens.weight"] = torch.flip(weights["model.embed_tokens.weight"], dims=(0,))
    save_file(weights, directory / WEIGHTS_NAME)
    (directory / CONFIG_NAME).write_bytes((checkpoint / CONFIG_NAME).read_bytes())
    return directory


async def test_a_worker_that_cannot_start_says_why(settings: Settings, tmp_path: Path) -> None:
    async with start_engine(settings("decode-0", checkpoint=tmp_path)) as decode:
        with pytest.raises(WorkerError, match=r"decode-0 failed: FileNotFoundError: .*model\.json"):
            await decode.expect(Ready)


async def test_a_failed_request_leaves_the_worker_in_service_and_a_kill_is_an_error(
    settings: Settings, tiny: Model
) -> None:
    async with start_engine(settings("decode-0")) as decode:
        await decode.expect(Ready)
        await decode.send(Prefill(request_id="long", prompt=[3] * 65))
        with pytest.raises(WorkerError, match="65 tokens need 17 blocks, the cache has 16"):
            await decode.expect(Token)
        assert await answer_alone(decode, PROMPT, 5) == tiny.greedy(PROMPT, 5)
        await decode.send(Generate(prompt=PROMPT, max_tokens=50))
        await decode.expect(Token)
        (worker,) = decode.ranks
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"decode-0 died unexpectedly \(killed by SIGKILL\)"):
            [token async for token in decode.tokens()]
