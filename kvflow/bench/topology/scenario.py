"""`kvflow bench topology`: one consumer rank loads the same tokens from producers that hold them in different cuts.

First each case has a load of which every byte is compared. In the rounds the order of the cases rotates, and one layer
of each load is compared. A load is offered right before it is made, so what a staged producer has not copied yet
counts; a small load before it wakes all processes that take part. Nothing but the load itself is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from kvflow.bench.cache import CacheShape
from kvflow.bench.child import RankProcess
from kvflow.bench.engine import EngineProducer, open_producer
from kvflow.bench.loads import MIB, PlannedLoad, SettingsError, Transport, scattered
from kvflow.bench.scenario import Children, Outcome, RankSet, Samples, Turn, interleaved
from kvflow.bench.topology import results
from kvflow.bench.topology.cuts import CASES, Case, Cut
from kvflow.bench.topology.ranks import Consumers, LoadResult, config_of_rank, open_consumers
from kvflow.limits import Limits

UNIT_TOKENS = max(cut.block_size for case in CASES for cut in (case.consumer, *case.producers))
CONSUMERS = tuple(dict.fromkeys(case.consumer for case in CASES))
PRODUCERS = tuple(dict.fromkeys(cut for case in CASES for cut in case.producers))
_PROCESS_BASE_BYTES = 176 << 20
_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Compare what loads cost between engines that cut the cache differently: TP, NHD and HND, block sizes, staging."""

    transport: Annotated[Transport, "Which way the bytes go: shm or tcp (UCX_TLS=tcp)."] = Transport.SHM
    size: Annotated[int, "MB (2**20 bytes) that a load brings a rank with 8 heads."] = 64
    rounds: Annotated[int, "Loads of each case; the cases take turns."] = 15
    layers: Annotated[int, "Layers of the imaginary model."] = 32
    quick: bool = False

    SCHEMA_VERSION: ClassVar = 3
    QUICK: ClassVar[Mapping[str, Any]] = {"size": 1, "rounds": 2, "layers": 2}

    @property
    def tokens(self) -> int:
        """Of one load."""
        token_bytes = CASES[0].consumer.shape(layers=self.layers, tokens=UNIT_TOKENS).size_bytes // UNIT_TOKENS
        tokens, rest = divmod(self.size * MIB, token_bytes)
        if rest or not tokens or tokens % UNIT_TOKENS:
            unit_bytes = UNIT_TOKENS * token_bytes
            raise SettingsError(
                f"--size: {self.size} MB is no multiple of {UNIT_TOKENS} tokens, which have {unit_bytes} bytes"
            )
        return tokens

    @property
    def pool_tokens(self) -> int:
        """An eighth more than a load takes, so that it is scattered, and a unit for the load before it."""
        units = self.tokens // UNIT_TOKENS
        return UNIT_TOKENS * (units + -(-units // 8) + 1)

    def shape(self, cut: Cut) -> CacheShape:
        return cut.shape(layers=self.layers, tokens=self.pool_tokens)

    def useful_bytes(self, cut: Cut) -> int:
        """What a load moves into this rank."""
        return cut.shape(layers=self.layers, tokens=self.tokens).size_bytes

    def sets(self) -> Sequence[RankSet]:
        Cut(tp_rank=0, tp_size=1).shape(layers=self.layers, tokens=self.pool_tokens).checked("--size")
        ranks = [*map(self._producer, PRODUCERS), self._consumer()]
        note, environment = f"{self.transport}: starting {len(ranks)} ranks", self.transport.environment
        return [RankSet(note=note, ranks=ranks, turns=self._turns, environment=environment)]

    def judge(self, samples: Samples) -> Outcome:
        title = f"{self.transport}: {self.tokens} tokens, {self.layers} layers, {self.rounds} rounds"
        return results.judge(samples, self.useful_bytes, title)

    def _producer(self, cut: Cut) -> RankProcess:
        shape = self.shape(cut)
        setup = partial(open_producer, config_of_rank("producer", cut, shape), shape)
        return RankProcess(cut.name, setup, _PROCESS_BASE_BYTES + (1 + cut.staged) * shape.size_bytes)

    def _consumer(self) -> RankProcess:
        """Its memory: that of the largest rank, host buffers of staged ones, and scratch memory of two runtimes."""
        shapes = {cut: self.shape(cut) for cut in CONSUMERS}
        ranks = [(config_of_rank("consumer", cut, shape), shape) for cut, shape in shapes.items()]
        scratch = 2 * _LIMITS.scratch_slots_max * _LIMITS.scratch_slot_bytes_max
        staged = sum(shape.size_bytes for cut, shape in shapes.items() if cut.staged)
        largest = max(shape.size_bytes for shape in shapes.values())
        memory_bytes = _PROCESS_BASE_BYTES + largest + staged + scratch
        return RankProcess("consumer", partial(open_consumers, ranks), memory_bytes)

    def loads_of_turn(self, case: Case, turn: str) -> tuple[PlannedLoad, PlannedLoad]:
        """A small load that wakes everybody up, untimed, and the one that is measured; they share no block.

        All cases of a round move the same tokens, from and to the same blocks as far as they have blocks of one size.
        """
        local, remote = case.consumer.block_size, case.producers[0].block_size
        local_ids, remote_ids = self._pick_ids(f"{turn} local", local), self._pick_ids(f"{turn} remote", remote)
        wake, wake_remote, name = UNIT_TOKENS // local, UNIT_TOKENS // remote, f"{turn} {case.label}"
        return (
            PlannedLoad(request_id=f"{name} wake", local_ids=local_ids[:wake], remote_ids=remote_ids[:wake_remote]),
            PlannedLoad(request_id=name, local_ids=local_ids[wake:], remote_ids=remote_ids[wake_remote:]),
        )

    def _pick_ids(self, seed: str, block_size: int) -> tuple[int, ...]:
        count = (self.tokens + UNIT_TOKENS) // block_size
        return scattered(f"{seed} {block_size}", self.pool_tokens // block_size, count)

    def _turns(self, children: Children) -> Iterator[Turn]:
        every_layer, note = tuple(range(self.layers)), f"{len(CASES)} cases, every byte of a load compared"
        for case in CASES:
            run = partial(self._run_turn, children, case, "check", every_layer)
            yield Turn(key=("check", case), run=run, note=note)
        note = f"{self.rounds} rounds"
        for index, case in interleaved(CASES, range(self.rounds)):
            run = partial(self._run_turn, children, case, f"round {index}", (index % self.layers,))
            yield Turn(key=("rounds", case), run=run, note=note)

    def _run_turn(self, children: Children, case: Case, turn: str, layers: Sequence[int]) -> LoadResult:
        wake, load = self.loads_of_turn(case, turn)
        consumer, rank = children["consumer"], CONSUMERS.index(case.consumer)
        consumer.run(Consumers.poison, rank, load, layers)
        _run_load(children, case, wake)
        result = _run_load(children, case, load)
        checked_bytes = consumer.run(Consumers.check, rank, load, case.producers[0].block_size, layers)
        for cut in case.producers:
            children[cut.name].run(EngineProducer.settle, read=case.is_all)
        return result._replace(checked_bytes=checked_bytes)


def _run_load(children: Children, case: Case, load: PlannedLoad) -> LoadResult:
    tickets = [ticket for cut in case.producers for ticket in children[cut.name].run(EngineProducer.offer, [load])]
    return children["consumer"].run(Consumers.load, CONSUMERS.index(case.consumer), load, tickets)
