"""`dev.py bench transfer`: the same loads through raw NIXL twice, through kvflow, and through raw NIXL behind a thread.

Equal processes differ in speed for as long as they live, so every contender is opened `pairs` times, one set of
contenders after the other. In each set and for each size, one turn per contender with nothing timed (the first set
compares every block in it), then the set's share of the rounds, in which each contender has one turn with the same
loads. Blocks are scattered on both sides, as in a pool after a day, so that nothing can be merged.

The model has the descriptor size of the common 8B models: 8 KV heads of 128 fp16 elements and 16 tokens a block make
32 KiB for K or V of one layer. With 8 layers (one of four pipeline stages) a block is 512 KiB.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import kvflow
from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.child import Child, RankProcess
from kvflow.bench.engine import EngineProducer, config_of, open_runtime
from kvflow.bench.loads import Fabric, PlannedLoad, Ticket
from kvflow.bench.raw import AgentAddress
from kvflow.checks import counted
from kvflow.transport.nixl.defaults import backend_params
from tests.bench.busy import busy_ranks
from tests.bench.clocks import process_cpu_s
from tests.bench.scenario import Children, Outcome, RankSet, Samples, SpinningRank, Turn
from tests.bench.transfer import results
from tests.bench.transfer.ranks import (
    Contender,
    Job,
    Producer,
    ReaderRank,
    open_hop_reader,
    open_raw_producer,
    open_raw_reader,
    together,
)
from tests.bench.transfer.results import Idle
from tests.bench.transfer.sizes import LoadSize, loads_of_turn, parse_sizes, shape_for
from tests.bench.transfer.turns import pair_of, rounds_of_pair, turns_of_pairs

_SETTLE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Compare (a) raw NIXL as in its examples, (b) raw NIXL tuned, (c) kvflow, (d) b behind one thread, on equal loads.

    (d) is the floor for any program that keeps NIXL off its event loop.
    """

    transport: Annotated[Fabric | None, "Fabric that moves the bytes: shm, tcp (UCX_TLS=tcp); both if left out."] = None
    sizes: Annotated[
        str, "What one load moves: 'block' or MB (2**20 bytes), separated by commas; 64x1 are 64 of 1 MB at once."
    ] = "block,1,16,256,1024"
    pairs: Annotated[int, "How often every contender is started anew; equal processes differ in speed."] = 3
    rounds: Annotated[int, "Rounds per size, divided among the pairs; each gives every contender a turn."] = 12
    layers: Annotated[int, "Layers of the imaginary model."] = 8
    idle_s: Annotated[float, "How long idle CPU is measured."] = 5.0
    backend: Annotated[str, "NIXL's backend for every contender; several are separated by commas."] = "UCX"
    busy_cores: Annotated[int, "How many processes compute all the time meanwhile, as engines do.", 0] = 0

    @property
    def transports(self) -> tuple[Fabric, ...]:
        return tuple(Fabric) if self.transport is None else (self.transport,)

    @property
    def load_sizes(self) -> tuple[LoadSize, ...]:
        return parse_sizes(self.sizes, self.layers)

    @property
    def shape(self) -> CacheShape:
        return shape_for(self.load_sizes, self.layers)

    def sets(self) -> Sequence[RankSet]:
        shares = [rounds_of_pair(self.rounds, self.pairs, pair) for pair in range(self.pairs)]
        ranks = [rank for contender in Contender for rank in ranks_of(contender, self.shape, self.backend)]
        ranks += busy_ranks(self.busy_cores)
        processes = counted(len(ranks), "process", "processes")
        return [
            RankSet(
                note=f"{transport}: pairs {pair + 1} of {self.pairs}: starting {processes}",
                ranks=ranks,
                turns=partial(self._turns, transport, pair, rounds),
                environment=transport.environment,
            )
            for transport in self.transports
            for pair, rounds in enumerate(shares)
        ]

    def judge(self, samples: Samples) -> Outcome:
        sizes = {size: size.timed_blocks * self.shape.block_size_bytes for size in self.load_sizes}
        return results.judge(samples, sizes, self.pairs, busy=self.busy_cores > 0)

    def _turns(self, transport: Fabric, pair: int, rounds: range, children: Children) -> Iterator[Turn]:
        every = {contender: pair_of(contender, children) for contender in Contender}
        yield from turns_of_pairs(every, self.load_sizes, self.shape.blocks, rounds, (transport, pair))
        if pair == self.pairs - 1:
            run = partial(self._measure_idle, transport, every[Contender.KVFLOW][0])
            yield Turn(key="idle", run=run, note=f"idle for {self.idle_s:g} s")

    def _measure_idle(self, transport: Fabric, producer: Child) -> Idle:
        producer.run(Producer.offer, loads_of_turn(self.load_sizes[0], "idle", self.shape.blocks)[:1])
        time.sleep(_SETTLE_S)
        cpu_s, start = process_cpu_s(producer.pid), time.perf_counter()
        time.sleep(self.idle_s)
        cpu_s = process_cpu_s(producer.pid) - cpu_s
        return Idle(transport=transport, cpu_percent=100 * cpu_s / (time.perf_counter() - start))


# --- a contender's processes


def ranks_of(contender: Contender, shape: CacheShape, backend: str = "UCX") -> tuple[RankProcess, RankProcess]:
    """Producer and reader. The agents of (a) spin.

    The backends of (b) and (d) get the parameters that kvflow gives its own, so that none is compared with other ones.
    """
    raw, tuned = contender in (Contender.EXAMPLE, Contender.TUNED), contender is not Contender.EXAMPLE
    make = RankProcess if tuned else SpinningRank
    if contender is Contender.KVFLOW:
        return (
            make(f"{contender} producer", partial(open_producer, shape, backend)),
            make(f"{contender} reader", partial(open_reader, shape, backend)),
        )
    backends = {name: backend_params(name, {}) for name in backend.split(",")}
    setup = partial(open_raw_reader, shape, backends, tuned=tuned) if raw else partial(open_hop_reader, shape, backends)
    return (
        make(f"{contender} producer", partial(open_raw_producer, shape, backends, tuned=tuned)),
        make(f"{contender} reader", setup),
    )


class KVFlowProducer(EngineProducer):
    """Producer of (c): its tickets say where to go."""

    async def address(self) -> AgentAddress:
        return AgentAddress()


@contextlib.asynccontextmanager
async def open_producer(shape: CacheShape, backend: str) -> AsyncIterator[KVFlowProducer]:
    cache = BenchCache(shape)
    cache.fill()
    async with open_runtime(config_of("bench-producer", backend), cache) as runtime:
        producer = KVFlowProducer(runtime, shape.block_size)
        yield producer
        producer.revoke()


@contextlib.asynccontextmanager
async def open_reader(shape: CacheShape, backend: str) -> AsyncIterator[ReaderRank]:
    cache = BenchCache(shape)
    async with open_runtime(config_of("bench-reader", backend), cache) as runtime:
        yield ReaderRank(cache, KVFlow(runtime))


class KVFlow:
    """Contender (c), kvflow as an engine would use it.

    The reader's pipe is read in a worker thread, so the loop has nothing to do but kvflow's work and the ticker.
    """

    def __init__(self, runtime: kvflow.Runtime) -> None:
        self._runtime = runtime

    async def connect(self, address: AgentAddress) -> None:
        """Connect to no peer: the tickets have the addresses."""

    def prepare(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> Job:
        requests = [
            kvflow.LoadRequest(load.request_id, ticket=ticket, block_ids=load.local_ids)
            for load, ticket in zip(loads, tickets, strict=True)
        ]
        return together([partial(self._runtime.load_blocks, request) for request in requests])
