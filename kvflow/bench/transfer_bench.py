"""`kvflow bench transfer`: the same loads through kvflow and through raw NIXL.

Equal processes differ in speed as long as they run, so all processes are started several times. In each round kvflow
and raw NIXL run the same loads in turn. The blocks of a load are scattered on both sides, as in a pool after a day of
use, so descriptors cannot be merged. The first load of a turn wakes sleeping threads and is not counted. Every byte is
compared.

Descriptors have the size of common 8B models: with 8 KV heads of 128 fp16 elements and 16 tokens in a block, K or V of
one layer is 32 KiB. With 8 layers (one of four pipeline stages) a block is 512 KiB.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from kvflow.bench.cache import CacheShape
from kvflow.bench.child import Child, RankProcess, open_children
from kvflow.bench.engine import hand_over, pair_ranks
from kvflow.bench.loads import MIB, Fabric, PlannedLoad, SettingsError, scattered_loads
from kvflow.bench.raw import RawRank, open_raw
from kvflow.checks import counted
from kvflow.transport.nixl.defaults import backend_params

_TURN_BYTES = 128 * MIB
_TURN_LOADS_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Measured speed of loads of one size over shared memory or tcp.

    `kvflow_s` and `raw_s` are seconds of one load: first the median over the loads of each process pair is taken, then
    the median of these medians. `kvflow_p99_s` is the 99th percentile over all loads; with fewer than 100 loads it is
    the slowest load.
    """

    transport: Fabric
    size: str
    size_bytes: int
    loads: int
    kvflow_s: float
    kvflow_p99_s: float
    raw_s: float
    ratio: float
    """Speed of kvflow divided by the speed of raw NIXL."""
    gb_per_s: float
    """Speed of kvflow in GB (10**9 bytes) per second."""


def blocks_by_size(sizes: str, layers: int) -> dict[str, int]:
    """Parse `sizes`, such as "block,1,16".

    Return the number of blocks of each size, by label ("16 MB"), smallest first. Raise SettingsError for an entry that
    is neither "block" nor a number of MB that is a multiple of a block.
    """
    counts, block_bytes = dict[str, int](), CacheShape(layers=layers, blocks=1).block_size_bytes
    for word in map(str.strip, sizes.split(",")):
        if word == "block":
            counts["one block"] = 1
            continue
        if not (word.isascii() and word.isdecimal()):
            raise SettingsError(f"--sizes: expected 'block' or a number of MB, such as 16, got {word[:80]!r}")
        blocks, rest = divmod(int(word) * MIB, block_bytes)
        if rest or not blocks:
            raise SettingsError(
                f"--sizes: {word} MB is not a multiple of a block, which has {counted(block_bytes, 'byte')}"
            )
        counts[f"{word} MB"] = blocks
    return dict(sorted(counts.items(), key=lambda size: size[1]))


def measure(
    transport: Fabric, sizes: str, *, pairs: int, rounds: int, layers: int, backend: str, note: Callable[[str], None]
) -> Iterator[Speed]:
    """Measure loads of each size through kvflow and through raw NIXL, and yield one result per size.

    Raise SettingsError if options cannot be measured, BenchError if a process fails.

    Args:
        transport: Path that moves the bytes: shared memory or tcp.
        sizes: Sizes of a load, such as "block,1,16": one block, 1 MB and 16 MB.
        pairs: How often all processes are started, since equal processes differ in speed.
        rounds: Number of rounds for each process pair and size.
        layers: Number of layers of the cache.
        backend: NIXL's backend for kvflow and raw NIXL; several are separated by commas.
        note: Function that takes a line of progress, called before each process pair.
    """
    blocks, block_bytes = blocks_by_size(sizes, layers), CacheShape(layers=layers, blocks=1).block_size_bytes
    turns = {
        size: [1] + [count] * min(_TURN_LOADS_MAX, max(1, _TURN_BYTES // (count * block_bytes)))
        for size, count in blocks.items()
    }
    shape = CacheShape(layers=layers, blocks=max(map(sum, turns.values()))).checked("--sizes")
    ranks = [*pair_ranks(shape, backend=backend), *_raw_ranks(shape, backend)]
    contenders = (_load_by_kvflow, _load_by_raw)
    seconds = {(size, contender): list[list[float]]() for size in turns for contender in contenders}
    for pair in range(pairs):
        note(f"{transport}: processes {pair + 1} of {pairs}")
        with open_children(ranks, transport.environment) as children:
            children["raw reader"].run(RawRank.connect, children["raw producer"].run(RawRank.address))
            for size, counts in turns.items():
                for contender in contenders:
                    seconds[size, contender].append([])
                for index in range(rounds):
                    loads = scattered_loads(f"{size} {pair} {index}", shape.blocks, counts)
                    for contender in contenders[:: -1 if index % 2 else 1]:
                        seconds[size, contender][-1] += contender(children, loads)[1:]
    for size, count in blocks.items():
        kvflow_s, raw_s = (
            statistics.median(map(statistics.median, seconds[size, contender])) for contender in contenders
        )
        every = list(chain(*seconds[size, _load_by_kvflow]))
        yield Speed(
            transport=transport,
            size=size,
            size_bytes=count * block_bytes,
            loads=len(every),
            kvflow_s=kvflow_s,
            kvflow_p99_s=float(np.percentile(every, 99, method="inverted_cdf")),
            raw_s=raw_s,
            ratio=raw_s / kvflow_s,
            gb_per_s=count * block_bytes / kvflow_s / 1e9,
        )


def _raw_ranks(shape: CacheShape, backend: str) -> list[RankProcess]:
    backends = {name: backend_params(name, {}) for name in backend.split(",")}
    return [
        RankProcess(f"raw {side}", partial(open_raw, shape, backends, producer=side == "producer"))
        for side in ("producer", "reader")
    ]


def _load_by_kvflow(children: Mapping[str, Child], loads: Sequence[PlannedLoad]) -> list[float]:
    return [load.seconds for load in hand_over((children["producer"], children["consumer"]), loads)]


def _load_by_raw(children: Mapping[str, Child], loads: Sequence[PlannedLoad]) -> list[float]:
    seconds = children["raw reader"].run(RawRank.load, loads)
    children["raw producer"].run(RawRank.take_notifications)
    return seconds
