"""Sizes of loads, as words of the command line, and the blocks of a turn's loads. Pure.

A word is `block`, a number of MB, or 64x1: 64 loads of 1 MB at once, which are timed as one. 256c are 256 MB of
neighbouring blocks, on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from kvflow.bench.cache import CacheShape
from kvflow.bench.loads import MIB, PlannedLoad, SettingsError, scattered_loads
from kvflow.checks import counted

ONE_BLOCK = "one block"
_TURN_BYTES = 128 * MIB
_TURN_TIMES_MAX = 20
_WORD = re.compile(r"(?:([1-9][0-9]*)x)?(block|[0-9]+)(c?)")


class LoadSize(NamedTuple):
    """Size of a load, number of loads in a turn, and number of loads that run at once.

    `contiguous`: the blocks of each load are neighbours.
    """

    label: str
    blocks: int
    loads_per_turn: int
    at_once: int = 1
    contiguous: bool = False

    @property
    def timed_blocks(self) -> int:
        """Blocks that are timed as one."""
        return self.blocks * self.at_once


def parse_sizes(text: str, layers: int) -> tuple[LoadSize, ...]:
    """Smallest first; small ones are loaded several times a turn. SettingsError if a word makes no sense."""
    block_bytes = CacheShape(layers=layers, blocks=1).block_size_bytes
    found = {_parse_size(word.strip(), block_bytes) for word in text.split(",")}
    return tuple(sorted(found, key=lambda size: (size.timed_blocks, size.at_once, size.contiguous)))


def _parse_size(word: str, block_bytes: int) -> LoadSize:
    match = _WORD.fullmatch(word)
    if match is None:
        raise SettingsError(f"--sizes: expected 'block' or a number of MB, such as 16 or 64x1, got {word!r}")
    several, rest, contiguous = match.groups()
    blocks, over = (1, 0) if rest == "block" else divmod(int(rest) * MIB, block_bytes)
    if over or not blocks:
        raise SettingsError(
            f"--sizes: {word} MB is not a multiple of a block, which has {counted(block_bytes, 'byte')}"
        )
    at_once, label = int(several or 1), ONE_BLOCK if rest == "block" else f"{rest} MB"
    label += " contiguous" if contiguous else ""
    times = min(_TURN_TIMES_MAX, max(1, _TURN_BYTES // (at_once * blocks * block_bytes)))
    return LoadSize(f"{several} x {label}" if several else label, blocks, at_once * times, at_once, bool(contiguous))


def shape_for(sizes: Sequence[LoadSize], layers: int) -> CacheShape:
    """One more block than any turn needs: the wake-up load has a block of its own."""
    blocks = 1 + max(size.blocks * size.loads_per_turn for size in sizes)
    return CacheShape(layers=layers, blocks=blocks).checked("--sizes")


def loads_of_turn(size: LoadSize, turn: str, blocks: int) -> tuple[PlannedLoad, ...]:
    """Return the loads of one turn, which share no block. The first is one block that wakes both processes, untimed.

    Equal arguments give equal loads, so the contenders of a round move the same blocks.
    """
    counts = [1] + [size.blocks] * size.loads_per_turn
    name = f"{size.label} {turn}"
    loads = scattered_loads(name, blocks, counts)
    return tuple(_neighbours(loads)) if size.contiguous else loads


def _neighbours(loads: Sequence[PlannedLoad]) -> Iterator[PlannedLoad]:
    """The same loads, each of blocks that follow each other."""
    ends = accumulate(len(load.local_ids) for load in loads)
    for load, end in zip(loads, ends, strict=True):
        ids = tuple(range(end - len(load.local_ids), end))
        yield replace(load, local_ids=ids, remote_ids=ids)
