"""The demo as users run it, and what its router does when a worker misbehaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from disaggregated.engines import start_engine
from disaggregated.hand_over import answer_alone, hand_over
from disaggregated.messages import Generate, Prefill, Ready, Token
from disaggregated.router import WorkerError
from disaggregated.worker import WorkerSettings
from paged_engine import blocks_for

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Greedy = Callable[[Sequence[int], int], list[int]]
RunPython = Callable[..., subprocess.CompletedProcess[str]]

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = EXAMPLES / "disaggregated_chat.py"
PHASES = ("queued", "handshake", "plan", "post", "wire", "notify", "total")
PROMPT = [5, 17, 3, 88, 41, 9, 60, 2, 33, 71]

# 30 layers, K and V, 3 heads of 64 float32 values.
SMOLLM2_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4


def table_of(output: str) -> dict[str, str]:
    """First to second column of the table."""
    return dict(re.findall(r"^│ ([a-z +]+?) +│ +(\S.*?) │", output, flags=re.MULTILINE))


def answer_of(output: str) -> str:
    """What the assistant said."""
    panel = re.search(r"╭─ SmolLM2 .*?╰", output, flags=re.DOTALL)
    assert panel is not None, output
    return panel.group()


@pytest.mark.nixl
@pytest.mark.timeout(600)
class TestDemo:
    @pytest.mark.parametrize(
        ("transport", "tokens", "block_size"), [("shm", 48, 16), ("tcp", 12, 7)], ids=["shm", "tcp"]
    )
    @pytest.mark.thorough
    @pytest.mark.usefixtures("smollm2_packages")
    def test_runs_as_it_stands(self, run_python: RunPython, transport: str, tokens: int, block_size: int) -> None:
        """Thorough: see `test_two_engines_answer_as_one` of this file."""
        demo = run_python(
            *(str(DEMO), "--transport", transport),
            *("--tokens", str(tokens), "--block-size", str(block_size)),
        )
        assert demo.returncode == 0, demo.stdout + demo.stderr
        assert demo.stderr == ""
        assert "✓ same text" in demo.stdout
        assert f"NIXL over {transport}" in demo.stdout
        # The decode engine was never told of the dog: the word came with the KV cache.
        assert "dog" in answer_of(demo.stdout)
        table = table_of(demo.stdout)
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

    def test_names_what_is_not_installed(self, run_python: RunPython) -> None:
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
    def test_refuses_counts_that_prove_nothing(
        self, run_python: RunPython, option: str, value: str, least: int
    ) -> None:
        demo = run_python(str(DEMO), option, value)
        assert demo.returncode == 2
        assert f"{option}: {value} is less than {least}" in demo.stderr


@pytest.mark.nixl
@pytest.mark.timeout(300)
class TestRouter:
    def test_two_engines_answer_as_one(
        self, settings: Callable[..., WorkerSettings], tiny: tuple[Path, Greedy], run: Run
    ) -> None:
        async def scenario() -> None:
            async with start_engine(settings("prefill-0")) as prefill, start_engine(settings("decode-0")) as decode:
                await prefill.expect(Ready)
                await decode.expect(Ready)
                shown: list[int] = []
                handed_over = await hand_over(
                    prefill, decode, request_id="chat-1", prompt=PROMPT, max_tokens=20, show=shown.append
                )
                assert handed_over.token_ids == shown == tiny[1](PROMPT, 20)
                assert await answer_alone(decode, PROMPT, 20) == shown
                assert [loaded.blocks for loaded in handed_over.loaded] == [3]
                assert handed_over.outcomes == ["read"]

        run(scenario())

    def test_wrong_answers_are_noticed(
        self, settings: Callable[..., WorkerSettings], tiny: tuple[Path, Greedy], run: Run, tmp_path: Path
    ) -> None:
        """A prefill engine with other weights leaves other keys and values: the comparison must see it."""
        other = with_other_weights(tiny[0], tmp_path)

        async def scenario() -> None:
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

        run(scenario())

    def test_a_killed_worker_is_an_error_and_no_hang(self, settings: Callable[..., WorkerSettings], run: Run) -> None:
        async def scenario() -> None:
            async with start_engine(settings("decode-0")) as decode:
                await decode.expect(Ready)
                await decode.send(Generate(prompt=PROMPT, max_tokens=50))
                await decode.expect(Token)
                (worker,) = decode.ranks
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGKILL)
                with pytest.raises(WorkerError, match=r"decode-0 died unexpectedly \(killed by SIGKILL\)"):
                    [token async for token in decode.tokens()]

        run(scenario())

    def test_a_worker_that_cannot_start_says_why(
        self, settings: Callable[..., WorkerSettings], run: Run, tmp_path: Path
    ) -> None:
        async def scenario() -> None:
            async with start_engine(settings("decode-0", checkpoint=tmp_path)) as decode:
                with pytest.raises(WorkerError, match=r"decode-0 failed: FileNotFoundError: .*model\.json"):
                    await decode.expect(Ready)

        run(scenario())

    def test_a_failed_request_leaves_the_worker_in_service(
        self, settings: Callable[..., WorkerSettings], tiny: tuple[Path, Greedy], run: Run
    ) -> None:
        async def scenario() -> None:
            async with start_engine(settings("decode-0")) as decode:
                await decode.expect(Ready)
                await decode.send(Prefill(request_id="long", prompt=[3] * 65))
                with pytest.raises(WorkerError, match="65 tokens need 17 blocks, the cache has 16"):
                    await decode.expect(Token)
                assert await answer_alone(decode, PROMPT, 5) == tiny[1](PROMPT, 5)

        run(scenario())


def with_other_weights(checkpoint: Path, directory: Path) -> Path:
    """The same checkpoint, but the embedding is turned around."""
    from paged_engine.weights import CONFIG_NAME, WEIGHTS_NAME, read_checkpoint
    from safetensors.torch import save_file

    _, weights = read_checkpoint(checkpoint)
    weights["model.embed_tokens.weight"] = torch.flip(weights["model.embed_tokens.weight"], dims=(0,))
    save_file(weights, directory / WEIGHTS_NAME)
    (directory / CONFIG_NAME).write_bytes((checkpoint / CONFIG_NAME).read_bytes())
    return directory
