"""The example server's processes: what is said if one cannot start, and that none is left behind."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from openai_server import processes
from openai_server.command import CANNOT_START, StartError, main
from openai_server.processes import start_service

SCRIPT = """
import json, os, pathlib, signal, sys, time
def end(*_):
    time.sleep(0.2)  # it takes its time
    pathlib.Path(r"{folder}", f"ended-{{os.getpid()}}").touch()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
pathlib.Path(r"{folder}", f"began-{{os.getpid()}}").touch()
if sys.argv[1] == "{hopeless}":
    while len(list(pathlib.Path(r"{folder}").glob("began-*"))) < 3:
        time.sleep(0.01)
    sys.exit({status})
while True:
    signal.pause()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Processes that only wait, but for the one of this command: once all have begun it says that it cannot start."""

    def fake(hopeless: str) -> None:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(folder=tmp_path, hopeless=hopeless, status=CANNOT_START))
        monkeypatch.setattr(processes, "COMMAND", script)

    return fake


def options(checkpoint: Path) -> argparse.Namespace:
    return argparse.Namespace(
        prefill=1, decode=1, host="127.0.0.1", port=0, checkpoint=checkpoint, deadline_s=1.0, share_prefixes=False
    )


@pytest.mark.parametrize("hopeless", ["decode", "router"])
async def test_a_process_that_cannot_start_ends_the_service_with_one_error_and_the_others(
    tmp_path: Path, fake: Callable[[str], None], hopeless: str
) -> None:
    fake(hopeless)
    with pytest.raises(StartError, match=rf"^{hopeless}\S* cannot start; what it says itself is above$"):
        async with start_service(options(tmp_path)):
            raise AssertionError("it never is ready")
    began, ended = (sorted(path.name[6:] for path in tmp_path.glob(f"{what}-*")) for what in ("began", "ended"))
    assert len(began) == 3
    assert len(ended) == 2, "each was waited for"


def test_a_taken_port_is_said_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps({}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port, "--checkpoint", str(tmp_path)]) == CANNOT_START
    assert f"error: cannot listen at 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
