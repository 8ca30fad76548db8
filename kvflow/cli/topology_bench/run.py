"""The parent of the topology bench: starts the ranks, then rounds in which every case has one load.

First each case has a load of which every byte is compared. In the rounds the order of the cases rotates, and one layer
of each load is compared. A load is offered right before it is made, so what a staged producer has not copied yet
counts; a small load before it wakes all processes that take part. Nothing but the load itself is timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kvflow.cli.bench.children import BenchError, Child
from kvflow.cli.bench.contenders import environment_of
from kvflow.cli.bench.messages import (
    Done,
    Load,
    LoadResult,
    Offer,
    Offered,
    PeerAddress,
    PrepareLoad,
    RunLoad,
    Settle,
    Withdraw,
)
from kvflow.cli.bench.run import available_bytes, describe_machine
from kvflow.cli.bench.targets import TargetRow
from kvflow.cli.topology_bench.cuts import Case, Cut
from kvflow.cli.topology_bench.prompts import PeerMemory, PromptPlanning, measure_peer_memory, measure_planning
from kvflow.cli.topology_bench.results import CaseResult, judge, summarize
from kvflow.cli.topology_bench.settings import TopologySettings, loads_of_turn
from kvflow.config import Config

_PROCESS_BASE_BYTES = 176 << 20
_LIMITS = Config(engine_id="limits")

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyReport:
    """Everything one run found out."""

    settings: TopologySettings
    machine: Mapping[str, str | int | float]
    cases: tuple[CaseResult, ...]
    planning: tuple[PromptPlanning, ...]
    memory: tuple[PeerMemory, ...]
    targets: tuple[TargetRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """All processes of a run."""

    consumer: Child
    producers: Mapping[Cut, Child]


def run_topology(settings: TopologySettings, note: Note) -> TopologyReport:
    """Measure everything; raises BenchError when a child fails or a load does not bring the right bytes."""
    _check_memory(settings)
    machine = describe_machine()
    note(f"load average {machine['load_average_1m']:.1f} before the start; others' work is in every number")
    planning, memory = measure_planning(), measure_peer_memory()
    count, size = len(settings.producers), needed_bytes(settings)
    note(f"{settings.transport}: starting {count} producer ranks and a consumer, which take some {size / 1e9:.1f} GB")
    with open_ranks(settings) as ranks:
        cases = _run_cases(settings, ranks, note)
    return TopologyReport(
        settings=settings,
        machine=machine,
        cases=cases,
        planning=planning,
        memory=memory,
        targets=judge(cases, planning, memory),
    )


@contextlib.contextmanager
def open_ranks(settings: TopologySettings) -> Iterator[Ranks]:
    """Start all processes; at the end of the block they are gone, the consumer first."""
    # Imported late: they import torch, which the parent needs for nothing else.
    from kvflow.cli.topology_bench.consumer import ConsumerRanks
    from kvflow.cli.topology_bench.producer import ProducerRank

    environment = environment_of(settings.transport)
    with contextlib.ExitStack() as stack:
        producers = {
            cut: stack.enter_context(
                contextlib.closing(
                    Child(f"{cut.engine_id} rank {cut.tp_rank}", ProducerRank(settings=settings, cut=cut), environment)
                )
            )
            for cut in settings.producers
        }
        body = ConsumerRanks(settings=settings)
        consumer = stack.enter_context(contextlib.closing(Child("consumer", body, environment)))
        for child in (*producers.values(), consumer):
            child.receive(PeerAddress)
        yield Ranks(consumer=consumer, producers=producers)


def _run_cases(settings: TopologySettings, ranks: Ranks, note: Note) -> tuple[CaseResult, ...]:
    note(f"{settings.transport}: {len(settings.cases)} cases, every byte of a load compared")
    every_layer = tuple(range(settings.layers))
    checked_bytes = {
        case.label: _run_turn(settings, ranks, case, "check", every_layer).checked_bytes for case in settings.cases
    }
    _check_all(settings, checked_bytes)
    note(f"{settings.transport}: {settings.rounds} rounds")
    loads: dict[str, list[LoadResult]] = {case.label: [] for case in settings.cases}
    for index in range(settings.rounds):
        start = index % len(settings.cases)
        for case in settings.cases[start:] + settings.cases[:start]:
            layers = (index % settings.layers,)
            loads[case.label].append(_run_turn(settings, ranks, case, f"round {index}", layers))
    return summarize(settings, loads, checked_bytes)


def _run_turn(settings: TopologySettings, ranks: Ranks, case: Case, turn: str, layers: tuple[int, ...]) -> LoadResult:
    wake, load = loads_of_turn(settings, case, turn)
    rank = settings.consumers.index(case.consumer)
    ranks.consumer.ask(PrepareLoad(rank=rank, load=load, layers=layers), Done)
    _run_load(ranks, case, rank, wake, ())
    result = _run_load(ranks, case, rank, load, layers)
    for cut in case.producers:
        ranks.producers[cut].ask(Settle() if case.is_all else Withdraw(), Done)
    return result


def _run_load(ranks: Ranks, case: Case, rank: int, load: Load, layers: tuple[int, ...]) -> LoadResult:
    offers = [ranks.producers[cut].ask(Offer(loads=(load,)), Offered) for cut in case.producers]
    message = RunLoad(
        rank=rank,
        load=load,
        tickets=tuple(ticket for offered in offers for ticket in offered.tickets),
        remote_block_size=case.producers[0].block_size,
        layers=layers,
    )
    return ranks.consumer.ask(message, LoadResult)


def _check_all(settings: TopologySettings, checked_bytes: Mapping[str, int]) -> None:
    for case in settings.cases:
        wanted = settings.useful_bytes(case.consumer)
        if checked_bytes[case.label] != wanted:
            raise BenchError(f"{case.label}: {checked_bytes[case.label]} bytes compared of {wanted}")


def needed_bytes(settings: TopologySettings) -> int:
    """Memory that all processes take together, host buffers of staged ranks included."""
    caches = [max(map(settings.cache_bytes, settings.consumers)), *map(settings.cache_bytes, settings.producers)]
    staged = [cut for cut in (*settings.consumers, *settings.producers) if cut.staged]
    processes = 1 + len(settings.producers)
    scratch = 2 * _LIMITS.scratch_slots_max * _LIMITS.scratch_slot_bytes_max  # of two runtimes: their loads take turns
    return sum(caches) + sum(map(settings.cache_bytes, staged)) + scratch + processes * _PROCESS_BASE_BYTES


def _check_memory(settings: TopologySettings) -> None:
    """Refuse to start what the machine cannot hold: swapping would be measured otherwise."""
    need, available = needed_bytes(settings), available_bytes()
    if need > available:
        raise BenchError(f"{need >> 20} MB are needed, available are {available >> 20} MB; ask for a smaller --size")
