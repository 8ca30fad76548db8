"""The turns of contenders that live at the same time, each as a producer and a reader: the same loads for all."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from kvflow.bench.child import BenchError, Child
from kvflow.bench.loads import Fabric, PlannedLoad, SettingsError
from kvflow.checks import counted
from tests.bench.scenario import Children, Turn, interleaved
from tests.bench.transfer.ranks import Producer, ReaderRank, TurnResult
from tests.bench.transfer.sizes import LoadSize, loads_of_turn

Pair = tuple[Child, Child]
"""A contender's producer and its reader."""
ContenderT = TypeVar("ContenderT", bound=Hashable)


def rounds_of_pair(rounds: int, pairs: int, pair: int) -> range:
    """Rounds for the pairs that are opened at turn `pair`. SettingsError if a pair would have no round."""
    if rounds < pairs:
        raise SettingsError(f"--rounds: {rounds} is too little for --pairs {pairs}")
    return range(pair * rounds // pairs, (pair + 1) * rounds // pairs)


def pair_of(contender: object, children: Children) -> Pair:
    return children[f"{contender} producer"], children[f"{contender} reader"]


def turns_of_pairs(
    every: Mapping[ContenderT, Pair], sizes: Sequence[LoadSize], blocks: int, rounds: range, key: tuple[Fabric, int]
) -> Iterator[Turn]:
    """Connect all, then for each size a turn of each with nothing timed, and the rounds.

    The samples of a size are kept under (transport, size, contender, pair); `key` says transport and pair.
    """
    for both in every.values():
        yield Turn(key="connect", run=partial(connect, *both), children=both)
    transport, pair = key
    check_all = 0 in rounds  # the first set: the others run the same code, and 1 GB takes seconds to compare
    for size in sizes:
        first = "all blocks compared" if check_all else "a turn untimed"
        note = f"{size.label}: {first}, then {len(rounds)} x {counted(size.loads_per_turn, 'load')}"
        loads = loads_of_turn(size, "check", blocks)
        for both in every.values():
            run = partial(run_turn, *both, loads, check_all=check_all, at_once=size.at_once)
            yield Turn(key="check", run=run, children=both, note=note)
        for index, contender in interleaved(tuple(every), rounds):
            both, loads = every[contender], loads_of_turn(size, f"round {index}", blocks)
            run = partial(run_turn, *both, loads, check_all=False, at_once=size.at_once)
            yield Turn(key=(transport, size, contender, pair), run=run, children=both, note=note)


def connect(producer: Child, reader: Child) -> None:
    reader.run(ReaderRank.connect, producer.run(Producer.address), producer.pid)


def run_turn(
    producer: Child, reader: Child, loads: Sequence[PlannedLoad], *, check_all: bool, at_once: int = 1
) -> TurnResult:
    tickets = producer.run(Producer.offer, loads)
    result = reader.run(ReaderRank.turn, loads, tickets, check_all=check_all, at_once=at_once)
    producer.run(Producer.end_leases)
    if not result.checked_bytes:
        raise BenchError("a turn ended without any byte compared")
    return result
