"""Experiments for tests of what runs them: real processes that end well, fail, hang or crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from kvflow.bench.gpu.setting import Setting


def finds(setting: Setting) -> None:
    setting.facts.add("device", setting.device)
    setting.facts.add("speed", 1.0)
    setting.facts.add("speed", 5.0)
    setting.facts.add("left", setting.left_s() < setting.limit_s)


def fails(setting: Setting) -> None:
    setting.facts.add("before", True)
    raise RuntimeError("as it was told to")


def crashes(setting: Setting) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(setting: Setting) -> None:
    """With a child of its own, which must not outlive it; says so through the pipe that the test reads."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    setting.facts.add("child", child.pid)
    Path(os.environ["HANGS"]).write_text("now")
    signal.pause()
