"""Libraries that replace classes of asyncio, or change how a loop runs its tasks, break no runtime."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.patched_process import PATCHES

ROOT = Path(__file__).parents[2]


def test_what_libraries_do_to_asyncio_breaks_no_runtime() -> None:
    """Before the runtimes are opened, and while they are open and a load is under way: see `patched_process`."""
    paths = [str(ROOT), str(ROOT / "tests" / "support"), *sys.path]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.patched_process"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    expected = [f"{name} {when}: ended well" for name in PATCHES for when in ("before", "open")]
    assert done.stdout.splitlines() == expected, done.stderr
