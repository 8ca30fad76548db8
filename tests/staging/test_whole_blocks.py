"""When whole blocks are read into scratch memory: by what reading costs on the path."""

from __future__ import annotations

import numpy as np
import pytest

from kvflow.core.cache.layout import BlockShape
from kvflow.core.cache.regions import Device, Regions
from kvflow.core.plan.block_map import BlockMap
from kvflow.staging.whole_blocks import COSTS, WholeBlocks, prefer_scratch
from tests.core.plans import heads_at
from tests.support.tests_support import each

TOKENS, LAYERS = 16, 4


def regions(heads: int, run: int, kind: str) -> Regions:
    """K of some layers in NHD."""
    block = BlockShape(TOKENS, heads, run, heads * run, run)
    bases = (1 << 30) + np.arange(LAYERS, dtype=np.uint64) * np.uint64(1 << 28)
    return Regions(
        bases=bases,
        strides=np.full(LAYERS, block.size_bytes, dtype=np.uint64),
        block=block,
        planes=("K",),
        num_blocks=64,
        device=Device(kind, 0),
    )


def scratch_pays(kind: str, near: bool, run: int, batches: int = 1) -> bool:
    """For 1,024 blocks of half of the peer's heads."""
    heads = 4
    remote = regions(2 * heads, run, kind)
    ours, layers = regions(heads, run, kind), range(LAYERS)
    block_map = BlockMap(ours, remote, heads=heads_at(0, 0, heads), local_layers=layers, remote_layers=layers)
    whole = WholeBlocks(remote, block_map.heads, range(LAYERS))
    return prefer_scratch(block_map, whole, chunks=1024, blocks=1024, batches=batches, near=near)


def break_even(kind: str, near: bool) -> int:
    """Return the shortest run of a head of a token, in powers of two, from which whole blocks do not pay."""
    return next(1 << size for size in range(4, 30) if not scratch_pays(kind, near, 1 << size))


def test_where_scratch_stops_to_pay() -> None:
    """A piece is the run of four heads. In host memory as measured (0006); over NVLink pieces cost more than bytes."""
    assert {path: 4 * break_even(*path) for path in COSTS} == {
        ("cpu", True): 8 << 10,
        ("cpu", False): 8 << 10,
        ("cuda", True): 1 << 20,
        ("cuda", False): 16 << 10,
    }


@each("near", [True, False])
def test_other_memory_is_judged_as_the_hosts(near: bool) -> None:
    assert break_even("tpu", near) == break_even("cpu", near)


@pytest.mark.parametrize("path", COSTS)
def test_a_batch_has_to_be_worth_its_wait(path: tuple[str, bool]) -> None:
    assert scratch_pays(*path, run=64)
    assert not scratch_pays(*path, run=64, batches=4096)
