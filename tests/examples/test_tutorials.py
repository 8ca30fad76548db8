"""The tutorials and the small examples, each run by its documented command, most of them over real NIXL.

The tutorial of the server is run by test_openai_server.py, that of vLLM by tests/vllm, that of GPUs here, on a CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT, blocks_of
from tiny_model import EXAMPLES, RunPython

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]
STALE = str(EXAMPLES / "stale.py")


def python_of(page: str) -> list[str]:
    return [block.text for block in blocks_of(page, PAGES[page].read_text()) if block.kind == "python"]


def test_pasted_into_the_asyncio_prompt_line_by_line() -> None:
    """Each block, and Enter. That prompt goes on after an error, which it prints as any other line."""
    blocks = python_of("docs/tutorials/asyncio.md")
    pasted = (
        "".join(f"{block}\n" for block in blocks) + "print('state:', decode.state, outcome, outcome_of_cancelled)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "asyncio"],
        input=pasted,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert "Error" not in done.stderr.replace("LeaseExpired", ""), done.stderr
    assert "41 tokens" in done.stdout
    assert "retry: False" in done.stdout
    assert "state: closed read read" in done.stdout


def test_pasted_into_one_script(run_python: RunPython, tmp_path: Path) -> None:
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(python_of("docs/tutorials/synchronous.md")) + "\nprint(outcome, aborted)\n")
    done = run_python(str(script))
    assert (done.returncode, done.stdout.split()) == (0, ["read", "read"]), done.stderr


@pytest.mark.thorough
def test_one_offers_and_the_other_reads_every_byte(tmp_path: Path) -> None:
    """Thorough: see `test_blocks_arrive_and_leases_end` of `nixl/test_processes.py`."""
    ticket = tmp_path / "ticket.json"

    def start(role: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(EXAMPLES / "two_engines.py"), role, "--ticket", str(ticket), "--device", "cpu"]
        return subprocess.Popen([*command, "--blocks", "8"], stdout=subprocess.PIPE, text=True)

    with start("prefill") as prefill:
        assert prefill.stdout is not None
        assert prefill.stdout.readline().startswith("offered 8 blocks on cpu")
        with start("decode") as decode:
            said, _ = decode.communicate()
            assert decode.returncode == 0, said
        assert "read 8 MiB" in said
        assert "every byte is right" in said
        assert prefill.stdout.read() == "the lease ended as read\n"
    assert prefill.returncode == 0


def test_the_example_of_a_users_engine_and_its_tests_passes() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "examples/engine_under_test"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout


def rows_of(output: str, way: str, moment: str) -> str:
    """Return the printed rows for this way and moment: how the read ended, and the answer in the line below."""
    lines = output.partition("What Bob is told")[2].splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith(f"{way}, {moment}:"))
    return " ".join(lines[first : first + 2])


def test_only_the_stock_way_answers_late_with_the_other_prompt(run_python: RunPython, tiny_chat: Path) -> None:
    done = run_python(STALE, "--checkpoint", str(tiny_chat), "--bob", "bob asks this.", "--alice", "ALICE's secret")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NIXL: DONE" in rows_of(done.stdout, "stock", "in time")
    late = rows_of(done.stdout, "stock", "late")
    assert "NIXL: DONE" in late
    assert "WRONG" in late
    assert "loaded" in rows_of(done.stdout, "kvflow", "in time")
    refused = rows_of(done.stdout, "kvflow", "late")
    assert "LeaseExpired" in refused
    assert "right" in refused


@pytest.mark.thorough
def test_as_a_stranger_runs_it(run_python: RunPython, smollm2_packages: None) -> None:
    """With the real model and its prompts.

    Thorough: see `test_only_the_stock_way_answers_late_with_the_other_prompt` of this file.
    """
    done = run_python(STALE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tulip42" in rows_of(done.stdout, "stock", "late")
    assert "Paris" in rows_of(done.stdout, "kvflow", "late")
