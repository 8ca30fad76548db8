"""The router that comes with an engine, run as a process in front of real servers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from tests.support.ports import free_port

_UP_WITHIN_S = 120.0
_PAUSE = threading.Event()


@contextlib.contextmanager
def running_router(
    module: str, options: Sequence[str], *, ready: str, environment: Mapping[str, str] | None = None
) -> Iterator[httpx.Client]:
    """Run `python -m module`, and yield an HTTP client once it answers at the path `ready`.

    A failure shows the end of the router's log, or the log's path.
    """
    port, log = free_port(), Path(tempfile.mkstemp(prefix=f"{module}-", suffix=".log")[1])
    places = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()))
    command = [sys.executable, "-m", module, "--policy", "round_robin", *places, *options]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120.0) as client:
            deadline_s = time.monotonic() + _UP_WITHIN_S
            while not _answers(client, ready):
                assert process.poll() is None, f"the router has ended:\n{log.read_text(errors='replace')[-3000:]}"
                assert time.monotonic() < deadline_s, f"the router does not listen ({log})"
                _PAUSE.wait(0.2)
            yield client
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.HTTPError:
        return False
