"""The example of two engines in two terminals, as one starts them, on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import EXAMPLES

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]


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
