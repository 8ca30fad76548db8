"""Where blocks lie in a file: every byte of every block has one place, without gaps, whatever the cache looks like."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.cache.layout import BlockShape
from kvflow.core.cache.regions import Device, Regions
from kvflow.storage.placing import FILE_DEVICE, BlockSpan, data_bytes, plan_file

START = 4096


@st.composite
def caches(draw: st.DrawFn) -> tuple[list[tuple[int, Regions]], list[np.ndarray]]:
    """Sets of layers, of two groups, and block ids of each group."""
    layer_sets, base = [], 1 << 20
    for group in draw(st.lists(st.integers(0, 1), min_size=1, max_size=3)):
        size = draw(st.sampled_from([8, 24, 64]))
        block = BlockShape(1, 1, size, size, size)
        strides = [size + draw(st.sampled_from([0, 0, 16])) for _ in range(draw(st.integers(1, 6)))]
        bases = [base + 10_000 * at for at in range(len(strides))]
        base += 10_000 * len(bases)
        arrays = (np.array(bases, dtype=np.uint64), np.array(strides, dtype=np.uint64))
        planes = ("latent",)
        regions = Regions(
            bases=arrays[0], strides=arrays[1], block=block, planes=planes, num_blocks=16, device=Device("cpu", 0)
        )
        layer_sets.append((group, regions))
    ids = st.lists(st.integers(0, 15), unique=True, max_size=9)
    return layer_sets, [np.array(draw(ids), dtype=np.int64) for _ in range(2)]


@given(caches(), st.integers(1, 300), st.integers(1, 20), st.booleans())
def test_every_byte_has_one_place(
    cache: tuple[list[tuple[int, Regions]], list[np.ndarray]], bytes_max: int, descriptors_max: int, whole: bool
) -> None:
    layer_sets, tables = cache
    counts = [len(ids) for ids in tables]
    total = data_bytes(layer_sets, counts)
    limits = {"bytes_max": bytes_max, "descriptors_max": descriptors_max}
    step = max(*counts, 1) if whole else 2
    spans = [
        BlockSpan(at, first, ids[first : first + step])
        for at, ids in enumerate(tables)
        for first in range(0, len(ids), step)
    ]
    slices = [one for span in spans for one in plan_file(layer_sets, counts, span, fd=7, start=START, **limits)]
    found: dict[int, int] = {}
    for one in slices:
        assert 0 < one.size_bytes <= bytes_max
        assert len(one) <= descriptors_max
        assert one.remote_device == Device(FILE_DEVICE, 7)
        assert (one.table[1, :, 2] == 7).all()
        for local, remote, size in zip(one.local.tolist(), one.remote.tolist(), one.sizes.tolist(), strict=True):
            found |= {local + at: remote + at for at in range(size)}
    assert sorted(found.values()) == list(range(START, START + total))
    expected = {
        int(regions.bases[region]) + int(block) * int(regions.strides[region]) + at
        for group, regions in layer_sets
        for region in range(len(regions))
        for block in tables[group]
        for at in range(regions.block_size_bytes)
    }
    assert set(found) == expected
