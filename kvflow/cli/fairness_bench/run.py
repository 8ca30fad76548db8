"""The parent of the fairness bench: two processes, and rounds that each measure everything once.

A ratio is always within a round, so what else the machine does counts on both sides of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import kvflow
from kvflow.cli.bench.children import BenchError, Child
from kvflow.cli.bench.contenders import environment_of
from kvflow.cli.bench.messages import Done, Offer, Offered, PeerAddress, RoundResult, Settle
from kvflow.cli.bench.run import available_bytes, describe_machine
from kvflow.cli.bench.targets import TargetRow
from kvflow.cli.fairness_bench.results import FairnessResult, judge, summarize
from kvflow.cli.fairness_bench.settings import FairnessSettings, loads_of_round

_PROCESS_BASE_BYTES = 512 << 20
_LOAD_DEADLINE_S = 120.0

READER = kvflow.Config(engine_id="fairness-reader", listen="tcp://127.0.0.1:0", load_deadline_s=_LOAD_DEADLINE_S)

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessReport:
    """Everything one run found out."""

    settings: FairnessSettings
    machine: Mapping[str, str | int | float]
    result: FairnessResult
    targets: tuple[TargetRow, ...]


def run_fairness(settings: FairnessSettings, note: Note, reader: kvflow.Config = READER) -> FairnessReport:
    """Measure everything; raises BenchError when a child fails or a block does not hold the right bytes."""
    _check_memory(settings)
    machine = describe_machine()
    note(f"load average {machine['load_average_1m']:.1f} before the start; others' work is in every number")
    # Imported late: they import torch, which the parent needs for nothing else.
    from kvflow.cli.bench.engine import EngineProducer
    from kvflow.cli.fairness_bench.reader import FairnessReader

    environment = environment_of(settings.transport)
    with (
        contextlib.closing(Child("producer", EngineProducer(shape=settings.shape), environment)) as producer,
        contextlib.closing(
            Child("reader", FairnessReader(shape=settings.shape, config=reader), environment)
        ) as consumer,
    ):
        for child in (producer, consumer):
            child.receive(PeerAddress)
        rounds = []
        for index in range(settings.rounds):
            note(f"{settings.transport}: round {index + 1} of {settings.rounds}")
            rounds.append(_run_round(settings, index, producer, consumer))
    result = summarize(rounds)
    return FairnessReport(settings=settings, machine=machine, result=result, targets=judge(result))


def _run_round(settings: FairnessSettings, index: int, producer: Child, reader: Child) -> RoundResult:
    loads = loads_of_round(settings, index)
    offered = producer.ask(Offer(loads=loads.loads), Offered)
    result = reader.ask(replace(loads, tickets=offered.tickets), RoundResult)
    producer.ask(Settle(), Done)
    if not result.behind_s:
        raise BenchError("no small load met a huge one: ask for a larger --size")
    return result


def _check_memory(settings: FairnessSettings) -> None:
    """Refuse to start what the machine cannot hold: swapping would be measured otherwise."""
    need, available = 2 * (settings.shape.size_bytes + _PROCESS_BASE_BYTES), available_bytes()
    if need > available:
        raise BenchError(f"{need >> 20} MB are needed, available are {available >> 20} MB; ask for a smaller --size")
