"""`kvflow demo`, over real NIXL between two processes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from rich.console import Console

from kvflow.bench.loads import Transport
from kvflow.cli import demo
from kvflow.cli.demo import TOKENS_MAX, Engine, hand_over


def run_demo(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvflow.cli.main", "demo", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


@pytest.mark.nixl
@pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")
def test_it_hands_over_and_compares() -> None:
    done = run_demo("--tokens", "40")
    assert done.returncode == 0, done.stderr
    assert "offers 40 tokens" in done.stdout
    assert "327,680 bytes" in done.stdout, "40 tokens of 8 KiB: not the half of the last block that is free"
    assert "the lease ended as 'read'" in done.stdout
    assert done.stdout.splitlines()[-1] == "every byte is equal"


def test_too_long_a_prompt_is_refused() -> None:
    done = run_demo("--tokens", str(TOKENS_MAX + 1))
    assert done.returncode == 2
    assert "--tokens" in done.stderr


class OtherBytes:
    """Stands for a process whose bytes are nobody else's."""

    pid = 1

    def run(self, step: object, *arguments: object) -> object:
        report = SimpleNamespace(bytes=1, descriptors=1, total_s=0.1, seconds={"wire": 0.1})
        return {Engine.load: report, Engine.digest: id(self)}.get(step, "read")


def test_bytes_that_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {"prefill-0": OtherBytes(), "decode-0": OtherBytes()}
    monkeypatch.setattr(demo, "open_children", lambda *_: nullcontext(engines))
    console = Console(quiet=True)
    assert not hand_over(20, Transport.SHM, console)
