"""From samples to medians and ratios, and what kvflow promises beside the others. Pure."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from kvflow.bench.loads import MIB, Fabric
from tests.bench.peers.contenders import MOONCAKE, Absent, Peer
from tests.bench.peers.ranks import CancelResult, ColdResult
from tests.bench.peers.trials import FaultResult, GrowthResult, IdleResult
from tests.bench.scenario import Outcome, Samples
from tests.bench.targets import TargetRow, at_least, at_most, percentile
from tests.bench.transfer.ranks import TurnResult
from tests.bench.transfer.sizes import LoadSize

BULK_BYTES = 16 * MIB
RATIO_TO_MOONCAKE_MIN = 1.0
_GB = 1e9
_LEGEND = (
    "raw_tuned (b): raw NIXL at its best, with no event loop; bare_hop: b behind one thread and nothing else. "
    "nixl_connect: Dynamo's; lmcache: LMCache's NIXL channel; ray_rdt: Ray's direct transport, without Ray's actors; "
    "torch_transport: torch.distributed._transport; mooncake: Mooncake's engine, which reads, or is asked to write; "
    "over tcp only. Each in several pairs of processes, whose medians' median is shown. '64 x 1 MB' are 64 loads at "
    "once, timed as one; (b) does them in turn. Ratios are of medians, above 1 is faster. CPU is that of reader and "
    "producer. All blocks were compared once, then samples. Lag: how late a 1 ms ticker was on the reader's loop "
    "during the largest loads. Cold: from the producer's address to the end of the first load. Cancelled after half "
    "of the time that a load takes; safe: when the library says so ('-': never), landed: after its last word."
)


class Row(enum.StrEnum):
    """What is measured of each contender."""

    SPEED = "speed"
    COLD = "cold"
    IDLE = "idle"
    CANCEL = "cancel"
    KILLED = "killed"
    STOPPED = "stopped"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSpeed:
    """One contender at one size. Ratios are of speed: above 1 is faster than (b), or than kvflow."""

    transport: Fabric
    size: str
    size_bytes: int = field(repr=False)
    at_once: int = field(repr=False)
    contender: Peer
    samples: int
    median_s: float
    pair_medians_s: tuple[float, ...]
    p90_s: float
    p99_s: float
    gb_per_s: float
    ratio_to_b: float
    ratio_to_kvflow: float
    cpu_s_per_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LagRow:
    """How late a 1 ms ticker was on the reader's loop."""

    transport: Fabric
    size: str
    contender: Peer
    lag_p99_s: float
    lag_max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdRow:
    """A first load, with its connection, and loads of the same blocks after it."""

    transport: Fabric
    blocks: int
    contender: Peer
    cold_s: float
    warm_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleRow:
    """CPU, in percent of a core, of two connected processes without a load."""

    transport: Fabric
    contender: Peer
    producer_percent: float
    reader_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRow:
    """Cancelled loads: times are medians, bytes the most of any trial."""

    transport: Fabric
    contender: Peer
    trials: int
    outcome: str
    ended_s: float
    ended_max_s: float
    safe_s: float | None
    landed_mb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRow:
    """Loads whose producer was killed or stopped. Without `ended_s` a load had not ended at the bound."""

    transport: Fabric
    fault: Row
    contender: Peer
    ended_s: float | None
    outcome: str
    cancelled_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthRow:
    """What both processes gained in so many loads of one block."""

    transport: Fabric
    contender: Peer
    loads: int
    producer_kb: float
    reader_kb: float
    producer_files: int
    reader_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A contender that did not run, or a row of it."""

    contender: Peer
    what: str
    why: str


def judge(samples: Samples, sizes: Mapping[LoadSize, int]) -> Outcome:
    """Judge the samples. `sizes` has the bytes that are timed as one, of each size."""
    pairs: dict[tuple[Fabric, LoadSize], dict[Peer, list[list[TurnResult]]]] = {}
    for key, turns in samples.of(TurnResult).items():
        if key not in ("check", "connect"):
            transport, size, peer, _ = key
            pairs.setdefault((transport, size), {}).setdefault(peer, []).append(turns)
    pairs = {key: found for key, found in pairs.items() if {Peer.TUNED, Peer.KVFLOW} <= found.keys()}
    speeds = [row for (transport, size), found in pairs.items() for row in compare(transport, size, sizes[size], found)]
    cancels = list(_cancels(samples))
    tables: dict[str, Sequence[object]] = {
        "speed": speeds,
        "loop_lag": list(_lags(pairs, sizes)),
        "cold": list(_colds(samples)),
        "idle": list(_idles(samples)),
        "cancel": cancels,
        "faults": list(_faults(samples)),
        "memory": list(_growths(samples)),
        "left out": list(_left_out(samples)),
    }
    results = {name: rows for name, rows in tables.items() if rows}
    return Outcome(results=results, legend=_LEGEND, targets=[*targets(speeds), _lands_nothing(cancels)])


def _lags(
    pairs: Mapping[tuple[Fabric, LoadSize], Mapping[Peer, Sequence[Sequence[TurnResult]]]],
    sizes: Mapping[LoadSize, int],
) -> Iterator[LagRow]:
    for (transport, size), found in pairs.items():
        if sizes[size] < max(sizes.values()):
            continue
        for peer, turns in found.items():
            lags_s = [lag_s for turn in chain(*turns) for lag_s in turn.lags_s]
            if lags_s:
                p99_s, max_s = percentile(lags_s, 99), max(lags_s)
                yield LagRow(transport=transport, size=size.label, contender=peer, lag_p99_s=p99_s, lag_max_s=max_s)


def _colds(samples: Samples) -> Iterator[ColdRow]:
    for (_, transport, peer, blocks), found in samples.of(ColdResult).items():
        cold_s = statistics.median(each.cold_s for each in found)
        warm_s = statistics.median(chain.from_iterable(each.warm_s for each in found))
        yield ColdRow(transport=transport, blocks=blocks, contender=peer, cold_s=cold_s, warm_s=warm_s)


def _idles(samples: Samples) -> Iterator[IdleRow]:
    for (_, transport, peer, _), (found, *_) in samples.of(IdleResult).items():
        yield IdleRow(
            transport=transport,
            contender=peer,
            producer_percent=found.producer_percent,
            reader_percent=found.reader_percent,
        )


def _cancels(samples: Samples) -> Iterator[CancelRow]:
    for (_, transport, peer, _), lists in samples.of(list).items():
        trials: list[CancelResult] = list(chain.from_iterable(lists))
        safe = [trial.safe_s for trial in trials if trial.safe_s is not None]
        yield CancelRow(
            transport=transport,
            contender=peer,
            trials=len(trials),
            outcome=", ".join(sorted({trial.outcome for trial in trials})),
            ended_s=statistics.median(trial.ended_s for trial in trials),
            ended_max_s=max(trial.ended_s for trial in trials),
            safe_s=statistics.median(safe) if len(safe) == len(trials) else None,
            landed_mb=max(trial.landed_bytes for trial in trials) / MIB,
        )


def _faults(samples: Samples) -> Iterator[FaultRow]:
    for (row, transport, peer, _), found in samples.of(FaultResult).items():
        for each in found:
            yield FaultRow(
                transport=transport,
                fault=row,
                contender=peer,
                ended_s=each.ended_s,
                outcome=each.outcome,
                cancelled_s=each.cancelled_s,
            )


def _growths(samples: Samples) -> Iterator[GrowthRow]:
    for (_, transport, peer, _), (found, *_) in samples.of(GrowthResult).items():
        yield GrowthRow(transport=transport, contender=peer, **found._asdict())


def _left_out(samples: Samples) -> Iterator[LeftOut]:
    """A key is the contender that is not here, or what could not be measured of it."""
    for key, found in samples.of(Absent).items():
        for absent in found:
            match key:
                case Peer():
                    yield LeftOut(contender=key, what="all", why=absent.why)
                case (Row(), transport, peer, number):
                    yield LeftOut(
                        contender=peer,
                        what=f"{key[0]}{f' of {number} blocks' if number else ''} over {transport}",
                        why=absent.why,
                    )
                case (transport, size, peer, _):
                    yield LeftOut(contender=peer, what=f"{size.label} over {transport}", why=absent.why)


def _lands_nothing(cancels: Sequence[CancelRow]) -> TargetRow:
    values = [(row.landed_mb, row.transport) for row in cancels if row.contender is Peer.KVFLOW]
    return at_most("MB that land after a cancelled load of kvflow is safe", 0.0, values)


def compare(
    transport: Fabric, size: LoadSize, size_bytes: int, turns: Mapping[Peer, Sequence[Sequence[TurnResult]]]
) -> Iterator[PeerSpeed]:
    """Put the turns of all pairs at one size together."""
    pair_medians_s = {
        peer: tuple(statistics.median(chain.from_iterable(turn.seconds for turn in pair)) for pair in pairs)
        for peer, pairs in turns.items()
    }
    medians_s = {peer: statistics.median(found) for peer, found in pair_medians_s.items()}
    for peer, pairs in turns.items():
        every, median_s = list(chain(*pairs)), medians_s[peer]
        seconds = list(chain.from_iterable(turn.seconds for turn in every))
        yield PeerSpeed(
            transport=transport,
            size=size.label,
            size_bytes=size_bytes,
            at_once=size.at_once,
            contender=peer,
            samples=len(seconds),
            median_s=median_s,
            pair_medians_s=pair_medians_s[peer],
            p90_s=percentile(seconds, 90),
            p99_s=percentile(seconds, 99),
            gb_per_s=size_bytes / median_s / _GB,
            ratio_to_b=medians_s[Peer.TUNED] / median_s,
            ratio_to_kvflow=medians_s[Peer.KVFLOW] / median_s,
            cpu_s_per_gb=sum(turn.cpu_s for turn in every) / (size_bytes * len(seconds) / _GB),
        )


def targets(speeds: Sequence[PeerSpeed]) -> Iterator[TargetRow]:
    """Of Mooncake's two directions the faster one counts. What small loads take is latency: nothing is promised."""
    bulk = [row for row in speeds if row.contender in MOONCAKE and row.size_bytes >= BULK_BYTES]
    for name, several in (("16 MB and more", False), ("loads at once", True)):
        values = [
            (1 / row.ratio_to_kvflow, f"{row.size}, {row.contender}") for row in bulk if (row.at_once > 1) is several
        ]
        yield at_least(f"tcp: {name}, speed / Mooncake's engine", RATIO_TO_MOONCAKE_MIN, values)
