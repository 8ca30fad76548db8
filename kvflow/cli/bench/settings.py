"""What one run of the bench measures: the imaginary model, the sizes, the rounds and the block ids. Pure.

The model has the descriptor size of the common 8B models: 8 KV heads of 128 fp16 elements and 16 tokens a block make
32 KiB for K or V of one layer. With 8 layers (one of four pipeline stages) a block is 512 KiB.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from kvflow.cli.bench.messages import Load

MIB = 1 << 20
_HEAD_SIZE = 128
_BLOCK_SIZE = 16
_ITEMSIZE = 2
_TURN_BYTES = 128 * MIB
_TURN_LOADS_MAX = 20


class SettingsError(ValueError):
    """Options that cannot be measured; the message names the option and both values."""


class Transport(enum.StrEnum):
    SHM = "shm"
    TCP = "tcp"


class TransportChoice(enum.StrEnum):
    SHM = "shm"
    TCP = "tcp"
    BOTH = "both"

    @property
    def transports(self) -> tuple[Transport, ...]:
        return tuple(Transport) if self is TransportChoice.BOTH else (Transport(self.value),)


class Pattern(enum.StrEnum):
    """Which blocks a load touches. SCATTERED is what a pool looks like after a day, and nothing can be merged."""

    SCATTERED = "scattered"
    CONTIGUOUS = "contiguous"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """A cache of `layers` tensors [2, blocks, kv_heads, block_size, head_size] in fp16."""

    layers: int
    kv_heads: int
    blocks: int
    block_size: int = _BLOCK_SIZE
    head_size: int = _HEAD_SIZE

    @property
    def region_block_size_bytes(self) -> int:
        """K or V of one block in one layer: one descriptor."""
        return self.kv_heads * self.block_size * self.head_size * _ITEMSIZE

    @property
    def block_size_bytes(self) -> int:
        return self.region_block_size_bytes * self.block_descriptors

    @property
    def block_descriptors(self) -> int:
        return 2 * self.layers

    @property
    def size_bytes(self) -> int:
        return self.block_size_bytes * self.blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSize:
    """What one load moves."""

    label: str
    blocks: int
    loads_per_turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    transports: tuple[Transport, ...]
    shape: CacheShape
    sizes: tuple[LoadSize, ...]
    pairs: int
    rounds: int
    pattern: Pattern
    idle_s: float
    quick: bool

    def rounds_of_pair(self, index: int) -> range:
        """Which of the rounds are for the pairs opened at turn `index`."""
        return range(index * self.rounds // self.pairs, (index + 1) * self.rounds // self.pairs)


def make_settings(
    *,
    transport: TransportChoice,
    sizes: str,
    pairs: int,
    rounds: int,
    pattern: Pattern,
    layers: int,
    kv_heads: int,
    idle_s: float,
    quick: bool,
) -> BenchSettings:
    """Turn options into settings; `quick` replaces all amounts by the least that is meaningful."""
    if quick:
        sizes, pairs, rounds, idle_s, layers = "block,1", 2, 2, 0.5, 2
    if rounds < pairs:
        raise SettingsError(f"--rounds: {rounds} rounds are too few for --pairs {pairs}")
    block_shape = CacheShape(layers=layers, kv_heads=kv_heads, blocks=1)
    load_sizes = parse_sizes(sizes, block_size_bytes=block_shape.block_size_bytes)
    # One more block than any turn needs: the wake-up load has a block of its own.
    blocks = 1 + max(size.blocks * size.loads_per_turn for size in load_sizes)
    return BenchSettings(
        transports=transport.transports,
        shape=CacheShape(layers=layers, kv_heads=kv_heads, blocks=blocks),
        sizes=load_sizes,
        pairs=pairs,
        rounds=rounds,
        pattern=pattern,
        idle_s=idle_s,
        quick=quick,
    )


def parse_sizes(text: str, *, block_size_bytes: int) -> tuple[LoadSize, ...]:
    """Read 'block,1,16' into sizes, smallest first."""
    counts = {_parse_size(word.strip(), block_size_bytes): word.strip() for word in text.split(",")}
    return tuple(
        LoadSize(
            label="one block" if word == "block" else f"{word} MB",
            blocks=blocks,
            loads_per_turn=min(_TURN_LOADS_MAX, max(1, _TURN_BYTES // (blocks * block_size_bytes))),
        )
        for blocks, word in sorted(counts.items())
    )


def _parse_size(word: str, block_size_bytes: int) -> int:
    """How many blocks a load of this size has."""
    if word == "block":
        return 1
    try:
        size_bytes = int(word) * MIB
    except ValueError as error:
        raise SettingsError(f"--sizes: expected 'block' or a number of MB, got {word!r}") from error
    if size_bytes < block_size_bytes or size_bytes % block_size_bytes:
        raise SettingsError(f"--sizes: {word} MB is no multiple of a block, which has {block_size_bytes} bytes")
    return size_bytes // block_size_bytes


def loads_of_turn(settings: BenchSettings, size: LoadSize, turn: str) -> tuple[Load, ...]:
    """The loads of one turn, which share no block; the first is one block that wakes everybody up, untimed.

    Equal arguments give equal loads, so the contenders of a round move the same blocks.
    """
    counts = [1] + [size.blocks] * size.loads_per_turn
    rng = np.random.default_rng(list(f"{size.label} {turn}".encode()))
    local_ids, remote_ids = (_pick_ids(rng, settings, sum(counts)) for _ in range(2))
    ends = np.cumsum(counts)
    return tuple(
        Load(
            request_id=f"{size.label} {turn} {index}",
            local_ids=tuple(local_ids[end - count : end]),
            remote_ids=tuple(remote_ids[end - count : end]),
        )
        for index, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


def _pick_ids(rng: np.random.Generator, settings: BenchSettings, count: int) -> list[int]:
    blocks = settings.shape.blocks
    if settings.pattern is Pattern.SCATTERED:
        ids: list[int] = rng.permutation(blocks)[:count].tolist()
        return ids
    start = int(rng.integers(blocks - count + 1))
    return list(range(start, start + count))
