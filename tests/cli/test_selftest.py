"""`kvflow selftest`, over real NIXL between two processes."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from kvflow.cli.selftest import BLOCKS_MAX


def run_selftest(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvflow.cli.main", "selftest", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.nixl
@pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")
def test_it_hands_over_and_compares() -> None:
    done = run_selftest("--blocks", "3")
    assert done.returncode == 0, done.stderr
    assert "offers 3 blocks" in done.stdout
    assert "393,216 bytes" in done.stdout, "3 blocks of 128 KiB"
    assert "the lease ended as 'read'" in done.stdout
    assert done.stdout.splitlines()[-1] == "every byte is equal"


def test_too_long_a_prompt_is_refused() -> None:
    done = run_selftest("--blocks", str(BLOCKS_MAX + 1))
    assert done.returncode == 2
    assert "--blocks" in done.stderr
