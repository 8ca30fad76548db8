"""Real `vllm serve` processes: started, asked, stopped, killed; and a router of a few lines between two servers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from kvflow import Ticket, secret_id
from kvflow.connector.parameters import producer_params
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(os.environ.get("KVFLOW_VLLM_HOME", ROOT / ".venv-vllm"))
MODEL = HOME / "smollm2"
MODELS = HOME / "tiny"
ROUTER = str(ROOT / "tests" / "vllm" / "router.py")
NAME = "smollm2"
UP_WITHIN_S = 600.0  # on a machine that does other things; half a minute is usual
DOWN_WITHIN_S = 60.0
ROUTER_DOWN_WITHIN_S = 10.0

INSTALLED, OLDER, NEWER = "0.32.0", "0.28.0", "0.33.0"  # of vLLM; dev.py brings them, all but the first in folders
VERSION = os.environ.get("KVFLOW_VLLM_VERSION") or INSTALLED  # the one that is tested
KVFLOW = {"kv_connector": "KVFlowConnector", "kv_connector_module_path": "kvflow.vllm"}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a server is started. `blocks` limits its KV cache; `core` is the CPU that its model runs on, one per rank."""

    role: str
    core: int | str
    model: Path = MODEL
    options: tuple[str, ...] = ()
    connector: tuple[tuple[str, Any], ...] = tuple(KVFLOW.items())
    extra: tuple[tuple[str, Any], ...] = (("model", NAME),)
    policy: str = "fail"
    blocks: int | None = None
    environment: tuple[tuple[str, str], ...] = ()
    version: str = VERSION
    """Of vLLM."""

    def command(self, port: int) -> list[str]:
        transfer = {
            **dict(self.connector),
            "kv_role": self.role,
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": dict(self.extra),
        }
        limit = [] if self.blocks is None else ["--num-gpu-blocks-override", str(self.blocks)]
        return [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(self.model)),
            *("--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
            *("--max-num-seqs", "8", "--max-num-batched-tokens", "2048"),
            *("--kv-transfer-config", json.dumps(transfer), *limit, *self.options),
        ]


class HTTPFailed(Exception):
    """A server has answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status = status


@dataclass(eq=False)
class Server:
    """One running server."""

    setup: Setup
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=120.0))

    @classmethod
    def start(cls, setup: Setup, *, port: int | None = None) -> Server:
        port = port or free_port()
        log = Path(tempfile.mkstemp(prefix=f"vllm-{setup.role}-", suffix=".log")[1])
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(setup.core),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "NIXL_LOG_LEVEL": "WARN",
            "UCX_LOG_LEVEL": "error",
            "PYTHONPATH": python_path(setup.version),
            **dict(setup.environment),
        }
        with log.open("wb") as sink:
            process = subprocess.Popen(setup.command(port), env=environment, stdout=sink, stderr=subprocess.STDOUT)
        return cls(setup, port, process, log)

    def wait_up(self) -> None:
        deadline_s = time.monotonic() + UP_WITHIN_S
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                tail = self.log.read_text(errors="replace")[-4000:]
                raise AssertionError(f"the server did not come up ({self.log}):\n{tail}")
            time.sleep(0.5)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def healthy(self) -> bool:
        return _answers(self.client, self._url("/health"))

    def post(self, path: str, body: dict[str, Any] | None = None, **query: Any) -> dict[str, Any]:
        response = self.client.post(self._url(path), json=body, params=query)
        if response.status_code != 200:
            raise HTTPFailed(response.status_code, response.text)
        return response.json() if response.content else {}

    def complete(self, prompt: Sequence[int], max_tokens: int = 16, **more: Any) -> dict[str, Any]:
        body = {"model": NAME, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, **more}
        return self.post("/v1/completions", body)

    def text(self, prompt: Sequence[int], max_tokens: int = 16, **more: Any) -> str:
        text: str = self.complete(prompt, max_tokens, **more)["choices"][0]["text"]
        return text

    def ids(self, prompt: Sequence[int], max_tokens: int = 16, **more: Any) -> list[int]:
        """The tokens of its answer, from a model that may have no tokenizer."""
        answer = self.complete(prompt, max_tokens, return_token_ids=True, ignore_eos=True, **more)
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self.post("/tokenize", {"model": NAME, "prompt": text, "add_special_tokens": False})[
            "tokens"
        ]
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        total = 0.0
        for line in self.client.get(self._url("/metrics")).text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name and all(pair in sample for pair in wanted):
                total += float(value)
        return total

    def wait_metric(self, name: str, value: float, **labels: str) -> None:
        """Wait until a metric has reached a value. vLLM publishes them step by step."""
        deadline_s = time.monotonic() + 60.0
        while (found := self.metric(name, **labels)) < value:
            assert time.monotonic() < deadline_s, f"{name} {labels} is {found}, not {value}"
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        try:
            me = psutil.Process(self.process.pid)
            return [me, *me.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def worker(self) -> psutil.Process:
        """The process that computes and transfers."""
        return next(entry for entry in self.processes() if entry.name().startswith("VLLM::Worker"))

    def kill(self) -> None:
        """As a machine that fails: all its processes at once."""
        for entry in self.processes():
            entry.send_signal(signal.SIGKILL)
        self.process.wait()
        self.client.close()

    def signal(self, what: signal.Signals) -> None:
        """All its processes: frozen by SIGSTOP, they go on after SIGCONT."""
        for entry in self.processes():
            entry.send_signal(what)

    def stop(self) -> int:
        """As an operator does; its exit code. Whatever is left after a while is killed."""
        left = self.processes()
        self.process.terminate()
        try:
            return self.process.wait(DOWN_WITHIN_S)
        finally:
            for entry in psutil.wait_procs(left, timeout=5.0)[1]:
                entry.kill()
            self.client.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _url(self, path: str) -> str:
        return self.url + path


@contextlib.contextmanager
def proxied(
    producers: Sequence[Server], consumer: Server, *, router: str | None = None, options: Sequence[str] = ()
) -> Iterator[httpx.Client]:
    """A client of a router in front of all; of vLLM's own (KVFLOW_VLLM_PROXY) unless the test names one."""
    program = router or os.environ.get("KVFLOW_VLLM_PROXY", ROUTER)
    port = free_port()
    options = ["--port", str(port), *options]
    for side, servers in (("prefiller", producers), ("decoder", [consumer])):
        ports = [str(server.port) for server in servers]
        options += [f"--{side}-hosts", *["127.0.0.1"] * len(ports), f"--{side}-ports", *ports]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, program, *options], env=environment, stdout=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300.0) as client:
            deadline_s = time.monotonic() + UP_WITHIN_S
            while not _answers(client, "/healthcheck"):
                assert process.poll() is None, f"{program} has ended"
                assert time.monotonic() < deadline_s, f"{program} does not listen"
                time.sleep(0.1)
            yield client
    finally:
        process.terminate()
        try:
            process.wait(ROUTER_DOWN_WITHIN_S)
        except subprocess.TimeoutExpired:  # it waits for answers of servers that were killed
            process.kill()
            process.wait()


def _answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.HTTPError:
        return False


def prefill(server: Server, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    """The first half of what any router does: one token, and the parameters for the decode side."""
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    params: dict[str, Any] = server.complete(prompt, 1, kv_transfer_params=wanted, **more)["kv_transfer_params"]
    return params


def hand_over(producer: Server, consumer: Server, prompt: Sequence[int], max_tokens: int = 16) -> str:
    """A router: forwards what the prefill side has said, without looking at it."""
    return consumer.text(prompt, max_tokens, kv_transfer_params=prefill(producer, prompt))


def introduction_of(server: Server, prompt: Sequence[int]) -> Ticket:
    """Return the introduction of the prefill side's ranks, from the ticket of an earlier answer."""
    return Ticket.from_params(prefill(server, prompt[:1]))


def rendezvous(introduction: Ticket, ttl_s: float = 30.0) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of both requests of a new name."""
    ticket = Ticket.rendezvous(introduction, secret_id("flow"), ttl_s=ttl_s)
    return producer_params(ticket), ticket.to_params()


@contextlib.contextmanager
def _computing(
    producer: Server, introduction: Ticket, prompt: Sequence[int], max_tokens: int, **more: Any
) -> Iterator[dict[str, Any]]:
    """Have the prefill side compute a prompt meanwhile. Yield the parameters for the decode side."""
    to_compute, to_receive = rendezvous(introduction)
    with ThreadPoolExecutor(1) as other:
        computing = other.submit(producer.complete, prompt, max_tokens, kv_transfer_params=to_compute, **more)
        yield to_receive
        computing.result()


def flow(
    producer: Server,
    consumer: Server,
    introduction: Ticket,
    prompt: Sequence[int],
    max_tokens: int = 16,
    *,
    prefill_tokens: int = 1,
    **more: Any,
) -> str:
    """A router that asks both sides at once."""
    with _computing(producer, introduction, prompt, prefill_tokens, **more) as params:
        return consumer.text(prompt, max_tokens, kv_transfer_params=params, **more)


def flow_ids(
    producer: Server, consumer: Server, introduction: Ticket, prompt: Sequence[int], max_tokens: int = 16, **more: Any
) -> list[int]:
    """The same, with the answer's tokens."""
    with _computing(producer, introduction, prompt, 1, **more) as params:
        return consumer.ids(prompt, max_tokens, kv_transfer_params=params, **more)


def hand_over_ids(
    producer: Server, consumer: Server, prompt: Sequence[int], max_tokens: int = 16, **more: Any
) -> list[int]:
    """The router that forwards; the answer's tokens."""
    return consumer.ids(prompt, max_tokens, kv_transfer_params=prefill(producer, prompt, **more), **more)


def python_path(version: str = VERSION) -> str:
    """Return a PYTHONPATH with this checkout and a version of vLLM before the environment's packages."""
    packages = [] if version == INSTALLED else [HOME / f"vllm-{version}"]
    return os.pathsep.join(map(str, (ROOT, *packages, _shim(version))))


def _shim(version: str) -> Path:
    """vLLM asks for the version of a distribution called vllm; the CPU build is called vllm-cpu."""
    folder = HOME / ("shim" if version == INSTALLED else f"shim-{version}")
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    plugin = folder / "kvflow_of_this_checkout-0.dist-info"  # as an installed kvflow has it
    plugin.mkdir(parents=True, exist_ok=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: kvflow-of-this-checkout\nVersion: 0\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["vllm.general_plugins"].items()]
    lines += [f"kvflow_tests_{name} = tests.vllm.{name}:apply" for name in ("split", "sleeping", "stamps")]
    (plugin / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    return folder
