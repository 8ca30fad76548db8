"""From samples to medians and ratios, and what kvflow promises beside Mooncake's engine. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from kvflow.bench.loads import MIB, Fabric
from tests.bench.peers.contenders import MOONCAKE, Absent, Peer
from tests.bench.scenario import Outcome, Samples
from tests.bench.targets import TargetRow, at_least, percentile
from tests.bench.transfer.ranks import TurnResult
from tests.bench.transfer.sizes import LoadSize

BULK_BYTES = 16 * MIB
RATIO_TO_MOONCAKE_MIN = 1.0
_GB = 1e9
_LEGEND = (
    "raw_tuned (b): raw NIXL at its best, with no event loop. nixl_connect: Dynamo's, as its pages use it. mooncake: "
    "Mooncake's engine, which reads, or is asked to write; over tcp only. Each in several pairs of processes, whose "
    "medians' median is shown. '64 x 1 MB' are 64 loads at once, timed as one; (b) does them in turn. Ratios are of "
    "medians, above 1 is faster. CPU is that of reader and producer. All blocks were compared once, then samples."
)


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
    p99_s: float
    gb_per_s: float
    ratio_to_b: float
    ratio_to_kvflow: float
    cpu_s_per_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A contender that did not run."""

    contender: Peer
    why: str


def judge(samples: Samples, sizes: Mapping[LoadSize, int]) -> Outcome:
    """`sizes` says how many bytes are timed as one at each size."""
    pairs: dict[tuple[Fabric, LoadSize], dict[Peer, list[list[TurnResult]]]] = {}
    for key, turns in samples.of(TurnResult).items():
        if key != "check":
            transport, size, peer, _ = key
            pairs.setdefault((transport, size), {}).setdefault(peer, []).append(turns)
    speeds = [row for (transport, size), found in pairs.items() for row in compare(transport, size, sizes[size], found)]
    left_out = [LeftOut(contender=peer, why=absent.why) for peer, (absent,) in samples.of(Absent).items()]
    results: dict[str, Sequence[object]] = {"speed": speeds}
    if left_out:
        results["left out"] = left_out
    return Outcome(results=results, legend=_LEGEND, targets=list(targets(speeds)))


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
