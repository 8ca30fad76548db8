"""The example server's processes: the message if one cannot start, and no process that is left behind."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from openai_server import serve as module
from openai_server.command import main
from openai_server.serve import serve
from tests_support import until

SCRIPT = """
import json, os, pathlib, signal, sys, time
def end(*_):
    time.sleep(0.2)  # it takes its time
    pathlib.Path(r"{folder}", f"ended-{{os.getpid()}}").touch()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
pathlib.Path(r"{folder}", f"began-{{os.getpid()}}").touch()
if "{hopeless}" in sys.argv[1:4]:
    while len(list(pathlib.Path(r"{folder}").glob("began-*"))) < 3:
        time.sleep(0.01)
    sys.exit(9)
while True:
    signal.pause()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Processes that only wait, except the process of this command: it ends when all have begun."""

    def fake(hopeless: str) -> None:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(folder=tmp_path, hopeless=hopeless))
        monkeypatch.setattr(module, "COMMAND", script)

    return fake


def options(checkpoint: Path) -> argparse.Namespace:
    return argparse.Namespace(
        prefill=1, decode=1, host="127.0.0.1", port=0, checkpoint=checkpoint, deadline_s=1.0, share_prefixes=False
    )


@pytest.mark.parametrize("hopeless", ["decode-0", "router"])
async def test_a_process_that_ends_before_the_service_is_ready_ends_it_and_the_others(
    tmp_path: Path, fake: Callable[[str], None], hopeless: str
) -> None:
    fake(hopeless)
    with pytest.raises(ExceptionGroup) as caught:
        await serve(options(tmp_path))
    (error,) = caught.value.exceptions
    assert str(error) == f"{hopeless} ended with status 9; what it says itself is above"
    began, ended = (sorted(path.name[6:] for path in tmp_path.glob(f"{what}-*")) for what in ("began", "ended"))
    assert len(began) == 3
    assert len(ended) == 2, "each was waited for"


async def test_a_process_that_dies_later_is_started_again(
    tmp_path: Path, fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until SIGTERM, which ends all."""
    fake("")

    async def began(count: int) -> None:
        await until(lambda: len(list(tmp_path.glob("began-*"))) >= count)

    up = asyncio.Event()

    async def all_up(_: str) -> None:
        await began(3)
        up.set()

    monkeypatch.setattr(module, "all_up", all_up)
    monkeypatch.setattr(module, "RESTART_PAUSE_S", 0.0)
    service = asyncio.create_task(serve(options(tmp_path)))
    await up.wait()
    os.kill(int(next(tmp_path.glob("began-*")).name[6:]), signal.SIGKILL)
    await began(4)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait([service])
    assert service.cancelled()
    assert len(list(tmp_path.glob("ended-*"))) == 3, "each was waited for"


def test_a_taken_port_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps({}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit, match=f"^error: cannot listen at 127.0.0.1:{port}: Address already in use"):
            main(["serve", "--port", port, "--checkpoint", str(tmp_path)])
