"""The contenders: their names, why some are left out, and their processes, each with its own environment."""

from __future__ import annotations

import enum
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

from kvflow.bench.cache import CacheShape
from kvflow.bench.child import BenchError, Child, Environment, RankProcess
from kvflow.bench.loads import Fabric
from kvflow.transport.nixl.defaults import backend_params
from tests.bench.peers import lmcache, mooncake, nixl_connect, rdt, torch_transport
from tests.bench.peers.kvflow_reader import open_kvflow_reader
from tests.bench.peers.ranks import open_hop_reader, open_raw_reader
from tests.bench.peers.trials import one_load
from tests.bench.scenario import SpinningRank, open_ranks, resumed
from tests.bench.transfer.ranks import open_raw_producer
from tests.bench.transfer.scenario import open_producer as open_kvflow_producer
from tests.bench.transfer.turns import pair_of

_IMPORT_TIMEOUT_S = 120.0
_BACKEND = "UCX"
_TRY_SHAPE = CacheShape(layers=1, blocks=3)
_TRIED_AT_ONCE = 3
MeasuredT = TypeVar("MeasuredT")
OpenRank: TypeAlias = Callable[[], AbstractAsyncContextManager[object]]


class Peer(enum.StrEnum):
    """Raw NIXL at its best and kvflow always run; the others are chosen."""

    TUNED = "raw_tuned"
    HOP = "bare_hop"
    KVFLOW = "kvflow"
    NIXL_CONNECT = "nixl_connect"
    LMCACHE = "lmcache"
    RDT = "ray_rdt"
    TORCH = "torch_transport"
    MOONCAKE_READ = "mooncake_read"
    MOONCAKE_WRITE = "mooncake_write"


ALWAYS = (Peer.TUNED, Peer.KVFLOW)
MOONCAKE = (Peer.MOONCAKE_READ, Peer.MOONCAKE_WRITE)
_LIBRARIES = {
    Peer.NIXL_CONNECT: "tests.bench.peers.nixl_connect",
    Peer.LMCACHE: "tests.bench.peers.lmcache",
    Peer.RDT: "tests.bench.peers.rdt",
    Peer.TORCH: "tests.bench.peers.torch_transport",
    **dict.fromkeys(MOONCAKE, "tests.bench.peers.mooncake"),
}
"""Modules with a function `library`, which imports the contender's library."""
_IMPORT = """
import importlib, sys
module = importlib.import_module(sys.argv[1])
try:
    module.library()
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed")
except Exception as error:
    sys.exit(f"import: {type(error).__name__}: {error}")
"""
_FRAMES: Environment = {"UCX_TCP_TX_SEG_SIZE": "64k"}


class Absent(NamedTuple):
    """Why a contender is left out."""

    why: str


class Conditions(NamedTuple):
    """What all contenders of a run have in common. `same_ucx`: all get the frame size that kvflow sets over tcp."""

    transport: Fabric
    same_ucx: bool = False

    @property
    def environment(self) -> Environment:
        return {**self.transport.environment, **(_FRAMES if self.same_ucx else {})}


def runs_over(peer: Peer, transport: Fabric) -> bool:
    """Between processes of a machine without RDMA, Mooncake's engine has tcp only."""
    return transport is Fabric.TCP or peer not in MOONCAKE


def absent(peers: Iterable[Peer]) -> dict[Peer, Absent]:
    """Return the contenders that cannot be imported. A child process tries, since an import cannot be undone here."""
    modules = {peer: _LIBRARIES[peer] for peer in peers if peer in _LIBRARIES}
    found = {module: _why_absent(module) for module in sorted(set(modules.values()))}
    return {peer: Absent(found[module]) for peer, module in modules.items() if found[module]}


def _why_absent(module: str) -> str:
    command = [sys.executable, "-c", _IMPORT, module]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_IMPORT_TIMEOUT_S)
    return "" if done.returncode == 0 else (done.stderr.splitlines() or ["import: died"])[-1]


def failing(peers: Iterable[Peer], conditions: Conditions) -> dict[Peer, Absent]:
    """Return the contenders that cannot load one block, and why. Some are tried at a time."""
    chosen = [peer for peer in peers if peer not in ALWAYS]
    attempt = partial(measured_alone, conditions=conditions, shape=_TRY_SHAPE, measure=one_load)
    with ThreadPoolExecutor(_TRIED_AT_ONCE) as pool:
        found = dict(zip(chosen, pool.map(attempt, chosen), strict=True))
    return {peer: result for peer, result in found.items() if isinstance(result, Absent)}


def measured_alone(
    peer: Peer, conditions: Conditions, shape: CacheShape, measure: Callable[[Child, Child], MeasuredT]
) -> MeasuredT | Absent:
    """Open a pair of processes of a contender, alone, and measure it. Return why it failed, if it did.

    kvflow and raw NIXL may not fail: BenchError.
    """
    try:
        with open_ranks(ranks_of(peer, shape), conditions.environment) as children, resumed(children.values()):
            return measure(*pair_of(peer, children))
    except BenchError as error:
        if peer in ALWAYS:
            raise
        return Absent(error.reason)


def ranks_of(peer: Peer, shape: CacheShape) -> tuple[RankProcess, RankProcess]:
    """Producer and reader. An agent of NIXL with its default settings spins."""
    backends = {_BACKEND: backend_params(_BACKEND, {})}
    raw_producer = partial(open_raw_producer, shape, backends, tuned=True)
    match peer:
        case Peer.TUNED:
            return _pair(RankProcess, peer, raw_producer, partial(open_raw_reader, shape, backends))
        case Peer.HOP:
            return _pair(RankProcess, peer, raw_producer, partial(open_hop_reader, shape, backends))
        case Peer.KVFLOW:
            producer = partial(open_kvflow_producer, shape, _BACKEND)
            return _pair(RankProcess, peer, producer, partial(open_kvflow_reader, shape))
        case Peer.MOONCAKE_READ | Peer.MOONCAKE_WRITE:
            reader = partial(mooncake.open_reader, shape, writes=peer is Peer.MOONCAKE_WRITE)
            return _pair(RankProcess, peer, partial(mooncake.open_producer, shape), reader)
    library = {
        Peer.NIXL_CONNECT: nixl_connect,
        Peer.LMCACHE: lmcache,
        Peer.RDT: rdt,
        Peer.TORCH: torch_transport,
    }[peer]
    return _pair(SpinningRank, peer, partial(library.open_producer, shape), partial(library.open_reader, shape))


def _pair(kind: type[RankProcess], peer: Peer, producer: OpenRank, reader: OpenRank) -> tuple[RankProcess, RankProcess]:
    return kind(f"{peer} producer", producer), kind(f"{peer} reader", reader)
