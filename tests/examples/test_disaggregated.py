"""The two examples of disaggregated engines as users run them, and what their router does when a worker misbehaves."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import disaggregated_chat
import pytest
import torch
from disaggregated import engines, example
from disaggregated.engines import EngineProcesses, WorkerError, start_engine
from disaggregated.example import set_worker_environment
from disaggregated.hand_over import answer_alone, hand_over
from disaggregated.messages import Generate, PrefillRequest
from disaggregated.worker import WorkerSettings
from paged_engine import blocks_for
from paged_engine.all_reduce import SILENCE_TIMEOUT_S
from paged_engine.sharding import Shard
from paged_engine.weights import CONFIG_NAME, WEIGHTS_NAME, read_checkpoint
from safetensors.torch import save_file
from tiny_model import EXAMPLES, PROMPT, Model, RunPython

Settings = Callable[..., WorkerSettings]

CHAT = EXAMPLES / "disaggregated_chat.py"
PHASES = ("queued", "handshake", "plan", "post", "wire", "notify", "total")

# 30 layers, K and V, 3 heads of 64 float32 values.
SMOLLM2_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4

# The tiny model has two KV heads, the engines share out four.
SHARDS = {tp_size: Shard(tp_size=tp_size, kv_head_count=4) for tp_size in (1, 2, 4)}

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(600)]


# --- as users run them


@pytest.mark.thorough
def test_the_chat_answers_as_a_single_engine_does(run_python: RunPython, smollm2_checkpoint: Path) -> None:
    """Over tcp, with a block size that does not divide the prompt: `dev.py demo` runs it over shared memory.

    Thorough: see `test_what_lies_before_windows_is_not_moved` of this file.
    """
    block_size = 7
    options = {"checkpoint": smollm2_checkpoint, "transport": "tcp", "tokens": 12, "block-size": block_size}
    demo = run_python(str(CHAT), *(f"--{name}={value}" for name, value in options.items()))
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stderr == ""
    assert "same text: 12 tokens" in demo.stdout
    assert "NIXL over tcp" in demo.stdout
    # The decode engine was never told of the dog: the word came with the KV cache.
    answer = re.search(r"^decode-tp1: .*?^prefill-tp1 to", demo.stdout, flags=re.DOTALL | re.MULTILINE)
    assert answer is not None, demo.stdout
    assert "dog" in answer.group()
    table = first_loads(demo.stdout)
    tokens_read = int(table["prompt tokens"])
    blocks = blocks_for(tokens_read, block_size)
    assert int(table["blocks"]) == blocks
    # Of a partly filled last block the rest may be read or not.
    size = int(table["bytes"].replace(",", ""))
    assert tokens_read * SMOLLM2_BYTES_PER_TOKEN <= size <= blocks * block_size * SMOLLM2_BYTES_PER_TOKEN
    assert int(table["descriptors"].replace(",", "")) > 0
    assert "The leases ended as read, read." in demo.stdout
    assert all(re.fullmatch(r"[\d,]+\.\d\d ms", table[phase]) for phase in PHASES)
    assert all(table[rate].endswith(" GB/s") for rate in ("post + wire", "all phases"))


def test_what_lies_before_windows_is_not_moved(run_python: RunPython, tiny_chat: Path, tmp_path: Path) -> None:
    """Two groups of layers: one attends to all 101 tokens, two to the last 8."""
    for file in tiny_chat.iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / CONFIG_NAME).read_text())
    (tmp_path / CONFIG_NAME).write_text(json.dumps(config | {"window": 8, "full_attention_every": 3}))
    words = ("--checkpoint", str(tmp_path), "--prompt", "x" * 100, "--tokens=8", "--block-size=16")
    demo = run_python(str(CHAT), *words)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "same text: 8 tokens" in demo.stdout
    table = first_loads(demo.stdout)
    assert (table["prompt tokens"], table["blocks"]) == ("101", "9")
    block_bytes = 16 * 2 * 2 * 8 * 4  # of a layer: K and V, 2 heads of 8 float32 values
    assert table["blocks before windows, not moved"] == "5"
    assert table["bytes before windows, not moved"] == f"{5 * 2 * block_bytes:,}"
    assert int(table["bytes"].replace(",", "")) <= (7 + 2 * 2) * block_bytes


def first_loads(output: str) -> dict[str, str]:
    """Return the table's entries about the first load, by row."""
    table = output.partition(": the first loads connect the engines.")[2]
    return {row[0]: row[1] for line in table.splitlines() if len(row := re.split(r" {2,}", line)) == 3}


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [("--tokens", "1", 2), ("--block-size", "0", 1)],
)
def test_refuses_counts_that_prove_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str, least: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["chat", option, value])
    with pytest.raises(SystemExit, match="2"):
        disaggregated_chat.main()
    assert f"{option}: {value} is less than {least}" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_engines_of_several_ranks_answer_as_a_single_engine_does(
    run_python: RunPython, smollm2_checkpoint: Path
) -> None:
    """Thorough: see `test_what_lies_before_windows_is_not_moved` of this file."""
    sizes = ("--prefill-tp", "2", "--decode-tp", "1", "--decode-tp", "4")
    shown = run_python(str(CHAT), "--checkpoint", str(smollm2_checkpoint), "--tokens", "12", *sizes)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert shown.stderr == ""
    assert "same text: 12 tokens equal to a single engine's" in shown.stdout
    rows = [re.split(r" {2,}", line) for line in shown.stdout.splitlines() if line.startswith("read from ranks")]
    assert rows == [["read from ranks", *["0 1"] * 2], ["read from ranks", *["0"] * 4, *["1"] * 4]]


@pytest.mark.usefixtures("smollm2_packages")
@pytest.mark.parametrize(
    ("end", "exit_code"), [(True, 0), (False, 1), (WorkerError("gone"), 2), (KeyboardInterrupt(), 130)], ids=repr
)
def test_exit_codes_tell_how_it_ended(
    monkeypatch: pytest.MonkeyPatch, end: bool | BaseException, exit_code: int
) -> None:
    monkeypatch.setattr(example, "set_worker_environment", lambda transport: None)

    def run() -> bool:
        if isinstance(end, BaseException):
            raise end
        return end

    assert example.run_example(run, transport="shm") == exit_code


# --- engines


@asynccontextmanager
async def ready_engine(settings: WorkerSettings) -> AsyncIterator[EngineProcesses]:
    async with start_engine(settings) as engine:
        await engine.ready()
        yield engine


@pytest.mark.thorough
@pytest.mark.parametrize(("transport", "prefill_tp", "decode_tp"), [("shm", 1, 1), ("shm", 2, 4), ("tcp", 4, 2)])
async def test_any_ranks_go_on_from_any_ranks(
    settings: Settings, tiny: Model, transport: str, prefill_tp: int, decode_tp: int
) -> None:
    """Thorough: see `test_what_lies_before_windows_is_not_moved` of this file."""
    set_worker_environment(transport)
    async with (
        ready_engine(settings("prefill-0", shard=SHARDS[prefill_tp])) as prefill,
        ready_engine(settings("decode-0", shard=SHARDS[decode_tp])) as decode,
    ):
        # Twice: the second time both engines use other blocks, and all ranks the same.
        for request_id in ("chat-1", "chat-2"):
            shown: list[int] = []
            handed_over = await hand_over(
                prefill, decode, request_id=request_id, prompt=PROMPT, max_tokens=20, show=shown.append
            )
            assert handed_over.token_ids == shown == tiny.greedy(PROMPT, 20)
            sources = [len(loaded.report.sources) for loaded in handed_over.loaded]
            assert sources == [max(1, prefill_tp // decode_tp)] * decode_tp
            assert [loaded.report.blocks for loaded in handed_over.loaded] == [3] * decode_tp
            assert handed_over.outcomes == ["read"] * prefill_tp


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.thorough), 1])
async def test_ranks_answer_as_one_does_until_one_is_killed(settings: Settings, tiny: Model, victim: int) -> None:
    async with ready_engine(settings("decode-0", shard=SHARDS[2])) as decode:
        assert await answer_alone(decode, PROMPT, 20) == tiny.greedy(PROMPT, 20)
        answer = decode.call(Generate(prompt=PROMPT, max_tokens=50))
        await anext(answer)
        decode.ranks[victim].process.kill()
        with pytest.raises(WorkerError, match=rf"decode-0/{victim} died unexpectedly|RankLostError"):
            [tokens async for tokens in answer]


@pytest.mark.thorough
async def test_a_rank_that_waits_for_another_leaves_when_it_does(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends without a command, and does not wait until the other rank counts as silent.

    Thorough: see `test_ranks_answer_as_one_does_until_one_is_killed` of this file.
    """
    monkeypatch.setattr(engines, "EXIT_TIMEOUT_S", SILENCE_TIMEOUT_S * 0.8)
    async with ready_engine(settings("decode-0", shard=SHARDS[2])) as decode:
        waiting, _ = decode.ranks
        await waiting.send(Generate(prompt=PROMPT, max_tokens=50))
    assert [rank.process.exitcode for rank in decode.ranks] == [0, 0]


def test_ranks_that_disagree_are_an_error() -> None:
    engine = EngineProcesses("decode-0", [])
    assert engine.common([7, 7]) == 7
    with pytest.raises(WorkerError, match=r"decode-0: its ranks disagree: \[7, 8\]"):
        engine.common([7, 8])


@pytest.mark.thorough
async def test_wrong_answers_are_noticed(settings: Settings, tiny: Model, tmp_path: Path) -> None:
    """A prefill engine with other weights leaves other keys and values: the comparison must see it.

    Thorough: see `test_what_lies_before_windows_is_not_moved` of this file.
    """
    other = with_other_weights(tiny.checkpoint, tmp_path)
    async with (
        ready_engine(settings("prefill-0", checkpoint=other)) as prefill,
        ready_engine(settings("decode-0")) as decode,
    ):
        handed_over = await hand_over(prefill, decode, request_id="chat-1", prompt=PROMPT, max_tokens=20)
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
            await decode.ready()


async def test_a_failed_request_leaves_the_worker_in_service_and_a_kill_is_an_error(
    settings: Settings, tiny: Model
) -> None:
    async with ready_engine(settings("decode-0")) as decode:
        with pytest.raises(WorkerError, match=r"decode-0 failed: .* length is 64 tokens.* 67 tokens"):
            await anext(decode.call(PrefillRequest(request_id="long", prompt=[3] * 67, deadline_s=30)))
        assert await answer_alone(decode, PROMPT, 5) == tiny.greedy(PROMPT, 5)
        answer = decode.call(Generate(prompt=PROMPT, max_tokens=50))
        await anext(answer)
        (worker,) = decode.ranks
        worker.process.kill()
        with pytest.raises(WorkerError, match=r"decode-0 died unexpectedly \(killed by SIGKILL\)"):
            [tokens async for tokens in answer]
