"""What a pair of processes of one contender, alone, is asked: the parent's side of every row but speed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kvflow.bench.cache import CacheShape
from kvflow.bench.child import BenchError, Child
from kvflow.bench.loads import PlannedLoad
from tests.bench.clocks import process_cpu_s
from tests.bench.peers.ranks import WARM_LOADS, BreakableReader, CancelResult, ColdResult, EndResult
from tests.bench.transfer.ranks import Producer
from tests.bench.transfer.sizes import LoadSize, loads_of_turn
from tests.bench.transfer.turns import connect, run_turn

COLD_SHAPE = CacheShape(layers=1, blocks=1, kv_heads=1)
"""Blocks of 8 KiB, so that 10,000 are not many bytes; `blocks` is replaced."""
_SETTLE_S = 0.5
_LEAK_TURN_LOADS = 100
_ANSWER_S = 20.0
"""How much later than its bound a reader answers that is not blocked."""


class IdleResult(NamedTuple):
    """CPU in percent of a core, with a connection open and no load."""

    producer_percent: float
    reader_percent: float


class GrowthResult(NamedTuple):
    """What both processes have gained in `loads` loads: resident memory and open files."""

    loads: int
    producer_kb: float
    reader_kb: float
    producer_files: int
    reader_files: int


class FaultResult(NamedTuple):
    """A load whose producer was killed or stopped, `ended_s` later; None: it had not ended at the bound."""

    ended_s: float | None
    outcome: str
    cancelled_s: float | None = None


def one_load(producer: Child, reader: Child) -> bool:
    """Whether a contender can do what it is to do."""
    connect(producer, reader)
    run_turn(producer, reader, loads_of_turn(LoadSize("try", 1, 1), "try", 3), check_all=True)
    return True


def cold(load: PlannedLoad, producer: Child, reader: Child) -> ColdResult:
    address = producer.run(Producer.address)
    offered = [replace(load, request_id=f"{load.request_id}, {index}") for index in range(WARM_LOADS + 1)]
    tickets = producer.run(Producer.offer, offered)
    result = reader.run(BreakableReader.cold, address, load, tickets)
    producer.run(Producer.end_leases)
    return result


def idle(seconds: float, size: LoadSize, blocks: int, producer: Child, reader: Child) -> IdleResult:
    connect(producer, reader)
    run_turn(producer, reader, loads_of_turn(size, "idle", blocks), check_all=False)
    time.sleep(_SETTLE_S)
    before, begun_s = (process_cpu_s(producer.pid), process_cpu_s(reader.pid)), time.perf_counter()
    time.sleep(seconds)
    spent = (process_cpu_s(producer.pid) - before[0], process_cpu_s(reader.pid) - before[1])
    passed_s = time.perf_counter() - begun_s
    return IdleResult(*(100 * cpu_s / passed_s for cpu_s in spent))


def growth(loads: int, blocks: int, producer: Child, reader: Child) -> GrowthResult:
    """Of `loads` loads of one block, after a tenth as many that are not counted."""
    connect(producer, reader)
    turns = max(1, loads // _LEAK_TURN_LOADS)
    size = LoadSize("one block", 1, min(loads, _LEAK_TURN_LOADS))
    run_turn(producer, reader, loads_of_turn(size, "first", blocks), check_all=False)
    before = [_held(child.pid) for child in (producer, reader)]
    for turn in range(turns):
        run_turn(producer, reader, loads_of_turn(size, f"turn {turn}", blocks), check_all=False)
    after = [_held(child.pid) for child in (producer, reader)]
    (producer_kb, producer_files), (reader_kb, reader_files) = (
        (now[0] - then[0], now[1] - then[1]) for then, now in zip(before, after, strict=True)
    )
    return GrowthResult(turns * size.loads_per_turn, producer_kb, reader_kb, producer_files, reader_files)


def cancels(trials: int, size: LoadSize, blocks: int, producer: Child, reader: Child) -> list[CancelResult]:
    """Cancel loads after half of the time that such a load takes this contender."""
    warm_s = _warm_s(size, blocks, producer, reader)
    found = []
    for load in _loads("cancel", trials, size, blocks):
        tickets = producer.run(Producer.offer, [load])
        found.append(reader.run(BreakableReader.cancel, load, tickets, warm_s / 2))
    return found


def fault(
    number: signal.Signals, bound_s: float, size: LoadSize, blocks: int, producer: Child, reader: Child
) -> FaultResult:
    """Send the producer a signal after half of the time that such a load takes this contender."""
    warm_s = _warm_s(size, blocks, producer, reader)
    (load,) = _loads("fault", 1, size, blocks)
    tickets = producer.run(Producer.offer, [load])
    answer = reader.start(BreakableReader.watch, load, tickets, bound_s)
    time.sleep(warm_s / 2)
    os.kill(producer.pid, number)
    at_s = time.monotonic()
    try:
        return _answered(answer, reader, bound_s, at_s)
    except BenchError as error:
        return FaultResult(time.monotonic() - at_s, f"the reader ended: {error.reason}")
    finally:
        if number is signal.SIGSTOP:
            os.kill(producer.pid, signal.SIGCONT)


def _answered(answer: Callable[[], EndResult], reader: Child, bound_s: float, at_s: float) -> FaultResult:
    if not reader.answers_within(bound_s + _ANSWER_S):
        os.kill(reader.pid, signal.SIGKILL)
        return FaultResult(None, "blocks its loop")
    ended = answer()
    ended_s = None if ended.ended_at_s is None else ended.ended_at_s - at_s
    return FaultResult(ended_s, ended.outcome, ended.cancelled_s)


def _warm_s(size: LoadSize, blocks: int, producer: Child, reader: Child) -> float:
    connect(producer, reader)
    loads = loads_of_turn(size, "warm", blocks)
    run_turn(producer, reader, loads, check_all=False)
    return min(run_turn(producer, reader, loads, check_all=False).seconds)


def _loads(name: str, count: int, size: LoadSize, blocks: int) -> Iterator[PlannedLoad]:
    """Loads of one size, each of other blocks."""
    for index in range(count):
        yield loads_of_turn(size, f"{name} {index}", blocks)[1]


def _held(pid: int) -> tuple[float, int]:
    """Resident memory in kB, and open files, of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    (resident,) = (line.split()[1] for line in lines if line.startswith("VmRSS:"))
    return float(resident), len(list(Path(f"/proc/{pid}/fd").iterdir()))
