"""The contenders: their names, whether they are installed here, and their processes."""

from __future__ import annotations

import enum
import importlib.util
import subprocess
import sys
from functools import partial
from typing import NamedTuple

from kvflow.bench.cache import CacheShape
from kvflow.bench.child import RankProcess
from kvflow.bench.loads import Fabric
from tests.bench.peers import mooncake, nixl_connect
from tests.bench.scenario import SpinningRank
from tests.bench.transfer.ranks import Contender
from tests.bench.transfer.scenario import ranks_of as ranks_of_transfer

_IMPORT_TIMEOUT_S = 60.0


class Peer(enum.StrEnum):
    """Raw NIXL at its best and kvflow always run; the others are chosen."""

    TUNED = "raw_tuned"
    KVFLOW = "kvflow"
    NIXL_CONNECT = "nixl_connect"
    MOONCAKE_READ = "mooncake_read"
    MOONCAKE_WRITE = "mooncake_write"


ALWAYS = (Peer.TUNED, Peer.KVFLOW)
MOONCAKE = (Peer.MOONCAKE_READ, Peer.MOONCAKE_WRITE)
_MODULES = {Peer.NIXL_CONNECT: "dynamo.nixl_connect", **dict.fromkeys(MOONCAKE, "mooncake.engine")}
_OF_TRANSFER = {Peer.TUNED: Contender.TUNED, Peer.KVFLOW: Contender.KVFLOW}


class Absent(NamedTuple):
    """Why a contender is left out."""

    why: str


def runs_over(peer: Peer, transport: Fabric) -> bool:
    """Between processes of a machine without RDMA, Mooncake's engine has tcp only."""
    return transport is Fabric.TCP or peer not in MOONCAKE


def absent(peers: tuple[Peer, ...]) -> dict[Peer, Absent]:
    """Return the contenders that cannot be imported. A child process tries, since an import cannot be undone here."""
    modules = {peer: module for peer, module in _MODULES.items() if peer in peers}
    found = {module: _why_absent(module) for module in set(modules.values())}
    return {peer: Absent(found[module]) for peer, module in modules.items() if found[module]}


def _why_absent(module: str) -> str:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return f"{module} is not installed"
    command = [sys.executable, "-c", f"import {module}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_IMPORT_TIMEOUT_S)
    return "" if done.returncode == 0 else f"import {module}: {(done.stderr.splitlines() or ['died'])[-1]}"


def ranks_of(peer: Peer, shape: CacheShape) -> tuple[RankProcess, RankProcess]:
    """Producer and reader. An agent of nixl_connect spins."""
    if peer in _OF_TRANSFER:
        return ranks_of_transfer(_OF_TRANSFER[peer], shape)
    if peer is Peer.NIXL_CONNECT:
        return (
            SpinningRank(f"{peer} producer", partial(nixl_connect.open_producer, shape)),
            SpinningRank(f"{peer} reader", partial(nixl_connect.open_reader, shape)),
        )
    writes = peer is Peer.MOONCAKE_WRITE
    return (
        RankProcess(f"{peer} producer", partial(mooncake.open_producer, shape)),
        RankProcess(f"{peer} reader", partial(mooncake.open_reader, shape, writes=writes)),
    )
