"""The doctor's round, in an order in which later findings can build on earlier ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from kvflow.config import Config
from kvflow.doctor.findings import Finding, Status, ok, warn
from kvflow.doctor.host import check_host, read_host
from kvflow.doctor.peer import examine_peer
from kvflow.doctor.transfer import check_nixl, check_self_transfer
from kvflow.doctor.version import versions


def examine(
    config: Config, *, peer: str | None, peer_engine: str, transfer: bool, note: Callable[[str], None]
) -> Iterator[Finding]:
    """Everything; `config` is how we talk to the peer."""
    host = read_host()
    yield ok("kvflow", ", ".join(f"{name} {number}" for name, number in versions().items()))
    yield from check_host(host, config)
    note("starting NIXL")
    nixl = check_nixl()
    yield nixl
    if transfer and nixl.status is not Status.FAIL:
        note("handing blocks over between two processes, some seconds")
        yield from check_self_transfer(host.environment.get("UCX_TLS"))
    elif transfer:
        yield warn("self-transfer", "not tried", "NIXL first")
    if peer is not None:
        note(f"asking {peer}")
        yield from asyncio.run(examine_peer(config, peer, peer_engine))
