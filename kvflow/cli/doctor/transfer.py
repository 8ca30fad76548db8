"""NIXL as it is here, and two processes that hand blocks over: what the bench measures, once and small.

Everything happens in processes of its own, so that a library that crashes is a finding and not our end.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path

from kvflow.cli.bench.children import BenchError, Child
from kvflow.cli.bench.messages import (
    Connect,
    Done,
    Offer,
    Offered,
    PeerAddress,
    PluginsFound,
    RunTurn,
    Settle,
    TurnResult,
)
from kvflow.cli.bench.settings import BenchSettings, LoadSize, Pattern, TransportChoice, loads_of_turn, make_settings
from kvflow.cli.doctor.findings import Finding, ok
from kvflow.cli.doctor.findings import fail as failed
from kvflow.cli.doctor.ucx import ReadPath, check_path, read_path
from kvflow.transport.nixl_agents import list_plugins

_QUIET = {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error"}
_BACKEND = "UCX"
_INSTALL = "pip install 'nixl>=1.5.1'"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTransfer:
    """What two processes on this machine measured; every byte was compared."""

    one_block_s: float
    size_bytes: int
    seconds: float
    path: ReadPath | None

    @property
    def gb_per_s(self) -> float:
        return self.size_bytes / self.seconds / 1e9


def check_nixl() -> Finding:
    """The version, and which plugins load."""
    try:
        installed = version("nixl")
    except PackageNotFoundError:
        return failed("NIXL", "not installed", _INSTALL)
    try:
        with contextlib.closing(Child("NIXL", _list_plugins, _QUIET)) as child:
            plugins = child.receive(PluginsFound).names
    except BenchError as error:
        return judge_plugins(installed, (), problem=last_line(error))
    return judge_plugins(installed, plugins)


def judge_plugins(installed: str, plugins: tuple[str, ...], problem: str = "") -> Finding:
    if problem:
        return failed("NIXL", f"{installed} does not start: {problem}", f"reinstall it: {_INSTALL} --force-reinstall")
    found = f"{installed}, plugins: {', '.join(plugins) or 'none'}"
    if _BACKEND not in plugins:
        return failed("NIXL", found, f"the plugin {_BACKEND} is needed; reinstall, or set NIXL_PLUGIN_DIR")
    return ok("NIXL", found)


def check_self_transfer(ucx_tls: str | None) -> Iterator[Finding]:
    try:
        result = run_self_transfer()
    except BenchError as error:
        fix = "the findings above may say why; with UCX_LOG_LEVEL=info UCX says what it tries"
        yield failed("self-transfer", last_line(error), fix)
        return
    yield ok(
        "self-transfer",
        f"{result.gb_per_s:.2f} GB/s ({result.size_bytes >> 20} MB a load), {result.one_block_s * 1e6:.0f} us for one "
        "block; every byte compared",
    )
    yield check_path(result.path, ucx_tls)


def run_self_transfer() -> SelfTransfer:
    """Raises BenchError if a process fails or the bytes are wrong. Other UCX settings are those of the environment."""
    # Imported late: they import torch.
    from kvflow.cli.bench.engine import EngineProducer, EngineReader

    settings = make_settings(
        transport=TransportChoice.SHM,
        sizes="block,64",
        pairs=1,
        rounds=1,
        pattern=Pattern.SCATTERED,
        layers=8,
        kv_heads=8,
        idle_s=1.0,
        quick=False,
    )
    with tempfile.TemporaryDirectory(prefix="kvflow-doctor-") as folder:
        environment = {**_QUIET, "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": f"{folder}/%p.log"}
        with (
            contextlib.closing(Child("producer", EngineProducer(shape=settings.shape), environment)) as producer,
            contextlib.closing(Child("reader", EngineReader(shape=settings.shape), environment)) as reader,
        ):
            address = producer.receive(PeerAddress)
            reader.ask(Connect(address=address, producer_pid=producer.pid), Done)
            block_s, large_s = (_median_s(settings, size, producer, reader) for size in settings.sizes)
        # UCX writes it as late as its process ends; there is none if UCX had nothing to say.
        log = "".join(path.read_text(errors="replace") for path in Path(folder).glob(f"{reader.pid}.log"))
    shape = settings.shape
    return SelfTransfer(
        one_block_s=block_s,
        size_bytes=settings.sizes[1].blocks * shape.block_size_bytes,
        seconds=large_s,
        path=read_path(log, shape.region_block_size_bytes),
    )


def last_line(error: BenchError) -> str:
    """What went wrong, of a child's whole traceback."""
    return str(error).strip().splitlines()[-1]


def _median_s(settings: BenchSettings, size: LoadSize, producer: Child, reader: Child) -> float:
    loads = loads_of_turn(settings, size, "doctor")
    offered = producer.ask(Offer(loads=loads), Offered)
    result = reader.ask(RunTurn(loads=loads, tickets=offered.tickets, check_all=True), TurnResult)
    producer.ask(Settle(), Done)
    return statistics.median(result.seconds)


def _list_plugins(pipe: Connection) -> None:
    """Body of a process."""
    pipe.send(PluginsFound(names=list_plugins()))
