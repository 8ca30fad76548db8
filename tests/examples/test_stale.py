"""The experiment that the README sends strangers to, over real NIXL."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import EXAMPLES, RunPython

STALE = str(EXAMPLES / "stale.py")


def rows_of(output: str, way: str, moment: str) -> str:
    """What the last table says in the row of this way and moment, its lines put together."""
    lines = output.partition("what Bob is told")[2].splitlines()
    first = next(index for index, line in enumerate(lines) if way in line and moment in line)
    last = next(index for index, line in enumerate(lines) if index > first and line[:1] in "├╰")
    return " ".join(" ".join(line.strip("│").split("│")) for line in lines[first:last])


def test_only_the_stock_way_answers_late_with_the_other_prompt(run_python: RunPython, tiny_chat: Path) -> None:
    done = run_python(STALE, "--checkpoint", str(tiny_chat), "--bob", "bob asks this.", "--alice", "ALICE's secret")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NIXL: DONE" in rows_of(done.stdout, "stock", "in time")
    late = rows_of(done.stdout, "stock", "late")
    assert "NIXL: DONE" in late
    assert "✗" in late
    assert "loaded" in rows_of(done.stdout, "kvflow", "in time")
    refused = rows_of(done.stdout, "kvflow", "late")
    assert "LeaseExpired" in refused
    assert "✓" in refused


@pytest.mark.thorough
def test_as_a_stranger_runs_it(run_python: RunPython, smollm2_packages: None) -> None:
    """With the real model and its prompts.

    Thorough: see `test_only_the_stock_way_answers_late_with_the_other_prompt` of this file.
    """
    done = run_python(STALE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tulip42" in rows_of(done.stdout, "stock", "late")
    assert "Paris" in rows_of(done.stdout, "kvflow", "late")
