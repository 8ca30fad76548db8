"""Real SGLang servers on the CPU: started, asked, stopped, killed; and a router of a few lines for two servers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(os.environ.get("KVFLOW_SGLANG_HOME", ROOT / ".venv-sglang"))
MODELS = HOME / "tiny"
PAGE = 16
UP_WITHIN_S = 900.0  # on a machine that does other things; half a minute is usual
_PAUSE = threading.Event()


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a server is started: `mode` is prefill, decode or null; `tokens` is the size of its KV cache.

    With `text` it has the model's tokenizer, and takes texts and chats.
    """

    mode: str
    tokens: int = 4096
    text: bool = False
    backend: str = "kvflow"
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def command(self, port: int, bootstrap_port: int) -> list[str]:
        roles = {
            "null": (),
            "prefill": (),
            # Its default takes pinned memory, which only CUDA has.
            "decode": ("--disaggregation-decode-retraction-backup", "cpu_tensor"),
        }
        transfer = ("--disaggregation-mode", self.mode, "--disaggregation-transfer-backend", self.backend)
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(MODELS / "llama")),
            *("--host", "127.0.0.1", "--port", str(port), "--disaggregation-bootstrap-port", str(bootstrap_port)),
            *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
            *("--sampling-backend", "pytorch", "--grammar-backend", "llguidance" if self.text else "none"),
            *(() if self.text else ("--skip-tokenizer-init",)),
            *("--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle"),
            *("--mem-fraction-static", "0.9", "--max-total-tokens", str(self.tokens), "--page-size", str(PAGE)),
            *("--chunked-prefill-size", "128"),
            *(transfer if self.mode != "null" else ()),
            *roles[self.mode],
            *self.options,
        ]


class Failed(Exception):
    """A server has answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:600]}")
        self.status = status


@dataclass(eq=False)
class Server:
    """One running server."""

    setup: Setup
    port: int
    bootstrap_port: int
    process: subprocess.Popen[bytes]
    log: Path
    restarted: bool = False
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=400.0, limits=httpx.Limits()))

    @classmethod
    def start(cls, setup: Setup, bootstrap_port: int = 0) -> Server:
        port, bootstrap_port = free_port(), bootstrap_port or free_port()
        log = Path(tempfile.mkstemp(prefix=f"sglang-{setup.mode}-", suffix=".log")[1])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, Path(__file__).parent / "standins"))),
            "HF_HUB_OFFLINE": "1",
            "SGLANG_HOST_IP": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "NIXL_LOG_LEVEL": "WARN",
            "UCX_LOG_LEVEL": "error",
            **dict(setup.environment),
        }
        command = setup.command(port, bootstrap_port)
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )
        return cls(setup, port, bootstrap_port, process, log)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_up(self) -> None:
        """SGLang gives its own server 10 s to answer at the start, and ends it then: a busy machine starts it again."""
        deadline_s = time.monotonic() + UP_WITHIN_S
        while not self.healthy():
            if self.process.poll() is not None and not self.restarted and "ReadTimeout" in self.said():
                self.kill()
                again = Server.start(self.setup, self.bootstrap_port)
                self.port, self.process, self.log, self.restarted = again.port, again.process, again.log, True
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise AssertionError(f"the server did not come up ({self.log}):\n{self.said()[-4000:]}")
            _PAUSE.wait(0.5)

    def healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.client.get(f"{self.url}/health", timeout=5.0).status_code == 200
        return False

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def generate(self, prompt: Sequence[int], tokens: int = 16, **more: Any) -> list[int]:
        """The tokens of its answer. Failed if it has answered with an error."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, **more}
        answer = self.client.post(f"{self.url}/generate", json=body)
        if answer.status_code != 200:
            raise Failed(answer.status_code, answer.text)
        said: dict[str, Any] = answer.json()
        reason = said["meta_info"]["finish_reason"]
        if reason["type"] == "abort":
            raise Failed(int(reason.get("status_code") or 500), str(reason.get("message")))
        found: list[int] = said["output_ids"]
        return found

    def abort(self, rid: str) -> None:
        self.client.post(f"{self.url}/abort_request", json={"rid": rid})

    def processes(self) -> list[psutil.Process]:
        """Its processes, the scheduler among them."""
        known = psutil.Process(self.process.pid)
        return [known, *known.children(recursive=True)]

    def scheduler(self) -> psutil.Process:
        return next(one for one in self.processes() if "scheduler" in one.name() or "schedul" in one.name())

    def cpu_s(self) -> float:
        """CPU time of the scheduler process so far, where a backend's threads are."""
        times = self.scheduler().cpu_times()
        return float(times.user + times.system)

    def kill(self) -> None:
        """Kill all processes at once, as a failing machine does, also if the first has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def stop(self) -> None:
        """Kill it, and let go of the client."""
        self.client.close()
        self.kill()


@dataclass(eq=False)
class Router:
    """Sends a request to both servers, as SGLang's own router does: with the room that they meet in."""

    prefill: Server
    decode: Server
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(96))

    def generate(self, prompt: Sequence[int], tokens: int = 16, room: int | None = None, **more: Any) -> list[int]:
        """The decode server's answer. Failed with the prefill server's error, if that comes first."""
        prefilled, decoded = self.both(prompt, tokens, room, **more)
        found = decoded.result(400)
        prefilled.exception(400)
        return found

    def both(
        self, prompt: Sequence[int], tokens: int = 16, room: int | None = None, **more: Any
    ) -> tuple[Future[list[int]], Future[list[int]]]:
        """Return the answers of both servers."""
        meeting = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.bootstrap_port,
            "bootstrap_room": random.getrandbits(62) if room is None else room,
        }
        return tuple(  # type: ignore[return-value]
            self.pool.submit(server.generate, prompt, tokens, **meeting, **more)
            for server in (self.prefill, self.decode)
        )

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


def prompt_of(length: int, seed: int | str = 0) -> list[int]:
    """Return random token ids of the model's vocabulary, without its special tokens."""
    chosen = random.Random(f"{length}-{seed}")
    return [chosen.randrange(5, 500) for _ in range(length)]
