"""NIXL as it is here, and two processes that hand blocks over: what the bench measures, once and small.

Everything happens in processes of its own, so that a library that crashes is a finding and not our end.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvflow.bench.child import BenchError, RankProcess, open_children
from kvflow.bench.loads import QUIET
from kvflow.bench.transfer.ranks import Contender
from kvflow.bench.transfer.scenario import Transfer, ranks_of
from kvflow.bench.transfer.sizes import loads_of_turn
from kvflow.bench.transfer.turns import connect, pair_of, run_turn
from kvflow.bench.ucx import read_path
from kvflow.doctor.findings import Finding, fail, ok
from kvflow.doctor.ucx import check_path
from kvflow.transport.nixl.agents import list_plugins

_BACKEND = "UCX"
_INSTALL = "pip install 'nixl>=1.5.1'"


def check_nixl() -> tuple[Finding, Sequence[str]]:
    """The version, and which plugins there are."""
    try:
        installed = version("nixl")
    except PackageNotFoundError:
        return fail("NIXL", "not installed", _INSTALL), ()
    try:
        with open_children([RankProcess("NIXL", _open_nixl)], QUIET) as children:
            plugins = children["NIXL"].run(_Nixl.plugins)
    except BenchError as error:
        return judge_plugins(installed, (), problem=last_line(error)), ()
    return judge_plugins(installed, plugins), plugins


def judge_plugins(installed: str, plugins: Sequence[str], problem: str = "") -> Finding:
    if problem:
        return fail("NIXL", f"{installed} does not start: {problem}", f"reinstall it: {_INSTALL} --force-reinstall")
    found = f"{installed}, plugins: {', '.join(plugins) or 'none'}"
    if _BACKEND not in plugins:
        return fail("NIXL", found, f"the plugin {_BACKEND} is needed; reinstall, or set NIXL_PLUGIN_DIR")
    return ok("NIXL", found)


def check_self_transfer(ucx_tls: str | None) -> Iterator[Finding]:
    """How fast two processes of this machine are, and which way the bytes took.

    Every byte is compared. UCX settings but for its log are those of the environment.
    """
    scenario = Transfer(sizes="block,64", pairs=1, rounds=1)
    ranks = ranks_of(Contender.KVFLOW, scenario.shape)
    try:
        with tempfile.TemporaryDirectory(prefix="kvflow-doctor-") as folder:
            environment = {**QUIET, "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": f"{folder}/%p.log"}
            with open_children(ranks, environment) as children:
                producer, reader = pair_of(Contender.KVFLOW, children)
                connect(producer, reader)
                turns = [loads_of_turn(size, "doctor", scenario.shape.blocks) for size in scenario.load_sizes]
                block_s, large_s = (
                    statistics.median(run_turn(producer, reader, loads, check_all=True).seconds) for loads in turns
                )
            # UCX writes it as late as its process ends; there is none if UCX had nothing to say.
            log = "".join(path.read_text(errors="replace") for path in Path(folder).glob(f"{reader.pid}.log"))
    except BenchError as error:
        fix = "the findings above may say why; with UCX_LOG_LEVEL=info UCX says what it tries"
        yield fail("self-transfer", last_line(error), fix)
        return
    size_bytes = scenario.load_sizes[1].blocks * scenario.shape.block_size_bytes
    yield ok(
        "self-transfer",
        f"{size_bytes / large_s / 1e9:.2f} GB/s ({size_bytes >> 20} MB a load), {block_s * 1e6:.0f} us for one "
        "block; every byte compared",
    )
    yield check_path(read_path(log, scenario.shape.region_block_size_bytes), ucx_tls)


def last_line(error: BenchError) -> str:
    """What went wrong, of a child's whole traceback."""
    return str(error).strip().splitlines()[-1]


class _Nixl:
    """What the process that only starts NIXL can be asked."""

    async def plugins(self) -> Sequence[str]:
        return list_plugins()


@contextlib.asynccontextmanager
async def _open_nixl() -> AsyncIterator[_Nixl]:
    yield _Nixl()
