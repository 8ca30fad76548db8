"""The process of one producer rank: it offers what it is told to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from multiprocessing.connection import Connection

import kvflow
from kvflow.cli.bench.loops import receive, run_on_uvloop
from kvflow.cli.bench.messages import Done, Offer, Offered, PeerAddress, Quit, Settle, Withdraw
from kvflow.cli.topology_bench.cuts import Cut
from kvflow.cli.topology_bench.pattern import RankCache, allocate_layers
from kvflow.cli.topology_bench.ranks import open_rank
from kvflow.cli.topology_bench.settings import TopologySettings

_SETTLE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerRank:
    """Body of the process."""

    settings: TopologySettings
    cut: Cut

    def __call__(self, pipe: Connection) -> None:
        run_on_uvloop(_produce(pipe, self.settings, self.cut))


async def _produce(pipe: Connection, settings: TopologySettings, cut: Cut) -> None:
    cache = RankCache(settings, cut, allocate_layers(settings, [cut]))
    cache.fill()
    async with open_rank(settings, "producer", cache) as runtime:
        pipe.send(PeerAddress())
        leases: list[kvflow.Lease] = []
        while not isinstance(message := await receive(pipe), Quit):
            match message:
                case Offer():
                    offered = [_serve(runtime, load.request_id, load.remote_ids, cut) for load in message.loads]
                    pipe.send(Offered(tickets=tuple(dict(lease.ticket.to_params()) for lease in offered)))
                    leases += offered
                case Settle():
                    await _settle(leases, kvflow.LeaseOutcome.READ)
                    leases = []
                    pipe.send(Done())
                case Withdraw():
                    for lease in leases:
                        lease.revoke()
                    await _settle(leases, kvflow.LeaseOutcome.REVOKED)
                    leases = []
                    pipe.send(Done())
                case _:
                    raise TypeError(f"producer rank: unexpected {type(message).__name__}")


def _serve(runtime: kvflow.Runtime, request_id: str, block_ids: tuple[int, ...], cut: Cut) -> kvflow.Lease:
    num_tokens = len(block_ids) * cut.block_size
    return runtime.serve_blocks(kvflow.ServeRequest(request_id, block_ids=block_ids, num_tokens=num_tokens))


async def _settle(leases: list[kvflow.Lease], expected: kvflow.LeaseOutcome) -> None:
    """Every lease of the turn must end as expected: a bench whose notifications get lost measures something else."""
    async with asyncio.timeout(_SETTLE_TIMEOUT_S):
        outcomes = [await lease for lease in leases]
    if any(outcome is not expected for outcome in outcomes):
        raise RuntimeError(f"leases of a turn ended as {outcomes}, expected {expected}")
