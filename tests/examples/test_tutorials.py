"""The tutorials, each run in the way that it tells its reader to, over real NIXL.

That of the server is run by test_openai_server.py, that of vLLM by tests/vllm, that of GPUs by test_two_engines.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT, blocks_of
from tiny_model import RunPython

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]


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
