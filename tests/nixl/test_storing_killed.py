"""A process that is killed while it saves: every reported save is on disk, and no other entry counts as good."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvflow.errors import NotStored
from tests.support.storing import storing
from tests.support.storing_process import BLOCKS
from tests.support.tests_support import WAIT_S

ROOT = Path(__file__).parents[2]


def killed(folder: Path, mode: str, when: Callable[[int], bool]) -> int:
    """Run it until `when` holds, told how many it has saved, then kill it; how many it says to have saved."""
    command = [sys.executable, "-m", "tests.support.storing_process", str(folder), mode]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        count = 0
        for line in process.stdout:
            count = int(line) + 1
            if when(count):
                break
        process.kill()
        rest = process.stdout.read().splitlines()
    return int(rest[-1]) + 1 if rest else count


async def judge(folder: Path, saved: int) -> None:
    """Check that every reported save is there and right. At most one more may be."""
    async with storing(folder) as engine:
        assert saved <= engine.store.entries <= saved + 1
        assert not [path for path in engine.files if path.suffix]
        for number in range(saved + 3):
            engine.fill(BLOCKS, -1)
            try:
                await engine.restore(str(number), BLOCKS)
            except NotStored:
                assert number >= saved
            else:
                assert all((found == number).all() for found in engine.bytes_of(BLOCKS))
        assert engine.store.damaged == 0


def a_part(folder: Path) -> bool:
    """Wait until a file is being written."""
    deadline_s = time.monotonic() + WAIT_S
    while not list(folder.rglob("*.part")):
        assert time.monotonic() < deadline_s
    return True


async def test_a_process_that_is_killed_in_the_middle_of_a_save_leaves_no_entry_of_it(tmp_path: Path) -> None:
    assert killed(tmp_path, "hold", lambda _: a_part(tmp_path)) == 1
    assert a_part(tmp_path)
    await judge(tmp_path, 1)


@pytest.mark.thorough
async def test_processes_that_are_killed_at_any_moment_leave_what_they_have_saved(tmp_path: Path) -> None:
    """Thorough: see `test_a_process_that_is_killed_in_the_middle_of_a_save_leaves_no_entry_of_it` of this file."""
    draw = random.Random(7)
    for attempt in range(8):
        last, pause = draw.randint(1, 30), draw.random() * 0.005

        def when(count: int, last: int = last, pause: float = pause) -> bool:
            if count < last:
                return False
            end_s = time.monotonic() + pause
            while time.monotonic() < end_s:
                pass
            return True

        folder = tmp_path / str(attempt)
        await judge(folder, killed(folder, "run", when))
