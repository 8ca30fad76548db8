"""What kvflow promises about speed, as rows that say whether this run kept it. Pure; nothing is raised for a miss."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvflow.cli.bench.samples import Contender, PlanningResult, SizeResult, TransportResult
from kvflow.cli.bench.settings import MIB, Transport

BULK_BYTES = 16 * MIB
LAG_BYTES = 1024 * MIB
RATIO_TO_B_MIN = 0.95
RATIO_TO_A_MIN = {Transport.SHM: 1.3, Transport.TCP: 1.6}
ONE_BLOCK_OVER_B_US_MAX = 150.0
LAG_P99_MS_MAX = 2.0
LAG_MAX_MS_MAX = 10.0
IDLE_CPU_PERCENT_MAX = 1.0
PLANNING_MS_MAX = 20.0


class Verdict(enum.StrEnum):
    PASS = "pass"
    FAIL = "fail"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """One promise. `measured` is the worst value among the sizes that it covers; `where` is its size."""

    target: str
    need: str
    measured: float | None
    where: str
    verdict: Verdict


def judge(transports: Sequence[TransportResult], planning: PlanningResult) -> tuple[TargetRow, ...]:
    """Hold every result against the targets."""
    rows = [row for result in transports for row in _judge_transport(result)]
    planning_ms = planning.median_s * 1e3
    where = f"{planning.descriptors:,} descriptors"
    return (*rows, at_most("planning, ms", PLANNING_MS_MAX, [(planning_ms, where)]))


def _judge_transport(result: TransportResult) -> Iterator[TargetRow]:
    name = result.transport
    bulk = [size for size in result.sizes if size.size_bytes >= BULK_BYTES]
    yield at_least(f"{name}: bulk speed / (b)", RATIO_TO_B_MIN, _ratios(bulk, lambda size: _ours(size)[1]))
    yield at_least(f"{name}: bulk speed / (a)", RATIO_TO_A_MIN[name], _ratios(bulk, lambda size: _ours(size)[0]))
    one_block = [(_over_b_us(size), size.label) for size in result.sizes if size.blocks == 1]
    yield at_most(f"{name}: one block, us over (b)", ONE_BLOCK_OVER_B_US_MAX, one_block)
    if name is Transport.SHM:
        loads = [size for size in result.sizes if size.size_bytes >= LAG_BYTES]
        p99 = [(size.lag.p99_ms, size.label) for size in loads]
        worst = [(size.lag.max_ms, size.label) for size in loads]
        yield at_most(f"{name}: loop lag p99, 1 GB, ms", LAG_P99_MS_MAX, p99)
        yield at_most(f"{name}: loop lag max, 1 GB, ms", LAG_MAX_MS_MAX, worst)
    idle = [(result.idle_cpu_percent, "one open lease")]
    yield at_most(f"{name}: idle CPU, % of a core", IDLE_CPU_PERCENT_MAX, idle)


def _ours(size: SizeResult) -> tuple[float, float]:
    ours = size.contenders[Contender.KVFLOW]
    return ours.ratio_to_a, ours.ratio_to_b


def _over_b_us(size: SizeResult) -> float:
    contenders = size.contenders
    return (contenders[Contender.KVFLOW].median_s - contenders[Contender.TUNED].median_s) * 1e6


def _ratios(sizes: Sequence[SizeResult], value: Callable[[SizeResult], float]) -> list[tuple[float, str]]:
    return [(value(size), size.label) for size in sizes]


def at_least(target: str, bound: float, values: Sequence[tuple[float, str]]) -> TargetRow:
    return _row(target, f">= {bound:g}", min(values, default=None), lambda value: value >= bound)


def at_most(target: str, bound: float, values: Sequence[tuple[float, str]]) -> TargetRow:
    return _row(target, f"<= {bound:g}", max(values, default=None), lambda value: value <= bound)


def _row(target: str, need: str, worst: tuple[float, str] | None, holds: Callable[[float], bool]) -> TargetRow:
    if worst is None:
        return TargetRow(target=target, need=need, measured=None, where="", verdict=Verdict.NOT_MEASURED)
    value, where = worst
    verdict = Verdict.PASS if holds(value) else Verdict.FAIL
    return TargetRow(target=target, need=need, measured=value, where=where, verdict=verdict)
