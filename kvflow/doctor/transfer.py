"""NIXL as it is here, and two processes that hand blocks over: what the bench measures, once and small.

Everything happens in processes of its own, so that a library that crashes is a finding and not our end.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvflow.bench.child import BenchError, Child, RankProcess, open_children
from kvflow.bench.loads import QUIET
from kvflow.bench.transfer.ranks import Contender
from kvflow.bench.transfer.scenario import Transfer, connect, pair_of, ranks_of, run_turn
from kvflow.doctor.findings import Finding, ok
from kvflow.doctor.findings import fail as failed
from kvflow.doctor.ucx import ReadPath, check_path, read_path
from kvflow.transport.nixl.agents import list_plugins

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
        with open_children([RankProcess("NIXL", _open_nixl)], QUIET) as children:
            plugins = tuple(children["NIXL"].run(_Nixl.plugins))
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
    scenario = Transfer(sizes="block,64", pairs=1, rounds=1)
    ranks = ranks_of(Contender.KVFLOW, scenario.shape)
    with tempfile.TemporaryDirectory(prefix="kvflow-doctor-") as folder:
        environment = {**QUIET, "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": f"{folder}/%p.log"}
        with open_children(ranks, environment) as children:
            producer, reader = pair_of(Contender.KVFLOW, children)
            connect(producer, reader)
            block_s, large_s = _medians_s(scenario, producer, reader)
        # UCX writes it as late as its process ends; there is none if UCX had nothing to say.
        log = "".join(path.read_text(errors="replace") for path in Path(folder).glob(f"{reader.pid}.log"))
    shape = scenario.shape
    return SelfTransfer(
        one_block_s=block_s,
        size_bytes=scenario.load_sizes[1].blocks * shape.block_size_bytes,
        seconds=large_s,
        path=read_path(log, shape.region_block_size_bytes),
    )


def last_line(error: BenchError) -> str:
    """What went wrong, of a child's whole traceback."""
    return str(error).strip().splitlines()[-1]


def _medians_s(scenario: Transfer, producer: Child, reader: Child) -> Iterator[float]:
    """Of loads of each size."""
    for size in scenario.load_sizes:
        result = run_turn(producer, reader, scenario.loads_of_turn(size, "doctor"), check_all=True)
        yield statistics.median(result.seconds)


class _Nixl:
    """What the process that only starts NIXL can be asked."""

    async def plugins(self) -> Sequence[str]:
        return list_plugins()


@contextlib.asynccontextmanager
async def _open_nixl() -> AsyncIterator[_Nixl]:
    yield _Nixl()
