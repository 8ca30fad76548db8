"""Engines of several ranks: the example as users run it, and what its router does when a rank misbehaves."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from disaggregated import example, router
from disaggregated.engines import EngineProcesses, start_engine
from disaggregated.hand_over import answer_alone, hand_over
from disaggregated.messages import Generate, Ready, Token
from disaggregated.router import WorkerError, set_worker_environment
from disaggregated.worker import WorkerSettings
from paged_engine.all_reduce import SILENCE_TIMEOUT_S
from paged_engine.sharding import Shard
from tiny_model import EXAMPLES, PROMPT, Model, RunPython

Settings = Callable[..., WorkerSettings]

# The tiny model has two KV heads, the engines share out four.
SHARDS = {tp_size: Shard(tp_size=tp_size, kv_head_count=4) for tp_size in (1, 2, 4)}


@pytest.mark.thorough
@pytest.mark.nixl
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("smollm2_packages")
def test_runs_as_it_stands(run_python: RunPython) -> None:
    """Thorough: see `test_ranks_answer_as_one_does_until_one_is_killed` of this file."""
    shown = run_python(str(EXAMPLES / "hetero_tp.py"), "--tokens", "24")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert shown.stderr == ""
    assert "✓ same text: 24 tokens equal to one process's own" in shown.stdout
    one, four = tables_of(shown.stdout)
    assert [row.sources for row in one] == [["prefill-tp2/0", "prefill-tp2/1"]]
    assert [row.sources for row in four] == [[f"prefill-tp2/{rank // 2}"] for rank in range(4)]
    # Four ranks together have read what the one rank has.
    assert sum(row.size for row in four) == one[0].size > 0
    assert all(row.text == "✓ equal" for row in (*one, *four))


@dataclass
class Row:
    """What the table says of one rank."""

    sources: list[str]
    size: int
    text: str


def tables_of(output: str) -> list[list[Row]]:
    """The tables of ranks; a line without a rank goes on with the sources of the rank above."""
    tables = []
    for table in re.findall(r"^├─[─┼]+┤\n(.*?)^╰", output, flags=re.DOTALL | re.MULTILINE):
        rows: list[Row] = []
        for line in table.splitlines():
            rank, source, _, size, _, _, text = (cell.strip() for cell in line.split("│")[1:-1])
            if rank:
                rows.append(Row([source], int(size.replace(",", "")), text))
            else:
                rows[-1].sources.append(source)
        tables.append(rows)
    return tables


@pytest.mark.usefixtures("smollm2_packages")
@pytest.mark.parametrize(
    ("end", "exit_code"), [(True, 0), (False, 1), (WorkerError("gone"), 2), (KeyboardInterrupt(), 130)], ids=repr
)
def test_exit_codes_tell_how_it_ended(
    monkeypatch: pytest.MonkeyPatch, end: bool | BaseException, exit_code: int
) -> None:
    monkeypatch.setattr(example, "set_worker_environment", lambda transport: None)

    def run(screen: object) -> bool:
        if isinstance(end, BaseException):
            raise end
        return end

    assert example.run_example(run, transport="shm") == exit_code


@asynccontextmanager
async def ready_engine(settings: WorkerSettings) -> AsyncIterator[EngineProcesses]:
    async with start_engine(settings) as engine:
        await engine.expect(Ready)
        yield engine


@pytest.mark.thorough
@pytest.mark.nixl
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("transport", "prefill_tp", "decode_tp"), [("shm", 2, 1), ("shm", 2, 4), ("tcp", 4, 2)])
async def test_any_ranks_go_on_from_any_ranks(
    settings: Settings, tiny: Model, transport: str, prefill_tp: int, decode_tp: int
) -> None:
    """Thorough: see `test_ranks_answer_as_one_does_until_one_is_killed` of this file."""
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
            sources = [len(loaded.sources) for loaded in handed_over.loaded]
            assert sources == [max(1, prefill_tp // decode_tp)] * decode_tp
            assert handed_over.outcomes == ["read"] * prefill_tp


@pytest.mark.nixl
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.thorough), 1])
async def test_ranks_answer_as_one_does_until_one_is_killed(settings: Settings, tiny: Model, victim: int) -> None:
    async with ready_engine(settings("decode-0", shard=SHARDS[2])) as decode:
        assert await answer_alone(decode, PROMPT, 20) == tiny.greedy(PROMPT, 20)
        await decode.send(Generate(prompt=PROMPT, max_tokens=50))
        await decode.expect(Token)
        pid = decode.ranks[victim].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=rf"decode-0/{victim} died unexpectedly|RankLostError"):
            [token async for token in decode.tokens()]


@pytest.mark.thorough
@pytest.mark.nixl
@pytest.mark.timeout(300)
async def test_a_rank_that_waits_for_another_leaves_when_it_does(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself: nobody has to end it, and it does not wait until the other one counts as silent.

    Thorough: see `test_ranks_answer_as_one_does_until_one_is_killed` of this file.
    """
    monkeypatch.setattr(router, "EXIT_TIMEOUT_S", SILENCE_TIMEOUT_S * 0.8)
    async with ready_engine(settings("decode-0", shard=SHARDS[2])) as decode:
        waiting, _ = decode.ranks
        await waiting.send(Generate(prompt=PROMPT, max_tokens=50))
    assert all("exitcode=0" in repr(rank) for rank in decode.ranks), decode.ranks


def test_ranks_that_disagree_are_an_error() -> None:
    engine = EngineProcesses("decode-0", [])
    assert engine.agreed([7, 7]) == 7
    with pytest.raises(WorkerError, match=r"decode-0: its ranks disagree: \[7, 8\]"):
        engine.agreed([7, 8])
