"""Copies between caches and buffers, against loops over single elements; every other byte stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvflow.core.cache.layout import CacheLayout, KVStyle
from kvflow.core.cache.regions import Device, map_regions
from kvflow.staging import copies
from kvflow.staging.copies import (
    allocate_host_caches,
    block_rows,
    canonical_parts,
    chunk_sources,
    chunk_targets,
    copy_blocks,
    scatter_tokens,
)
from kvflow.transport.device.cache_device import CacheDevice
from tests.core.caches import Cache, Recipe, recipes
from tests.support.budgets import examples

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)
ORDERS = ("NHD", "HND")
CPU = CacheDevice(Device("cpu", 0))
EXAMPLE = Recipe(style=KVStyle.KV_FIRST, order="NHD", layers=2, blocks=6, tokens=4, heads=3, dim=4)

many = examples(
    40,
    140,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)


def usable(recipe: Recipe) -> bool:
    return recipe.style is not KVStyle.FUSED or recipe.dim % 2 == 0


def cache_recipes() -> st.SearchStrategy[Recipe]:
    return recipes(dtypes=DTYPES).filter(usable)


def filled(recipe: Recipe, seed: int = 1) -> Cache:
    cache = Cache(recipe)
    cache.fill(seed)
    return cache


def parts_of(cache: Cache) -> list[torch.Tensor]:
    """Canonical parts of all layers, row by row as a slice holds them."""
    layout = cache.infer()
    return [part for layer in cache.tensors.values() for part in canonical_parts(layer, layout)]


def naive_parts(cache: Cache, block: int) -> Iterator[torch.Tensor]:
    """(token, head, dim) of one block of each layer and part, found by plain indexing, as integers."""
    for layer in range(cache.recipe.layers):
        for part in range(cache.part_count):
            view = cache.block(layer, part, block)
            if cache.recipe.style is KVStyle.MLA:
                view = view[:, None, :]
            elif cache.recipe.order == "HND":
                view = view.transpose(0, 1)
            if cache.recipe.style is KVStyle.FUSED:
                half = cache.recipe.dim // 2
                yield from (view[:, :, :half], view[:, :, half:])
            else:
                yield view


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


# --- parts


@many
@given(recipe=cache_recipes(), seed=st.integers(0, 2**32))
def test_parts_show_every_element_of_the_cache(recipe: Recipe, seed: int) -> None:
    cache = filled(recipe, seed)
    for block in range(recipe.blocks):
        for part, naive in zip(parts_of(cache), naive_parts(cache, block), strict=True):
            assert part.shape == (recipe.blocks, *naive.shape)
            assert part.dtype == recipe.dtype
            assert torch.equal(bits(part[block]), naive)
            assert part[block].data_ptr() == naive.data_ptr(), "a copy, not a view"


def test_a_fused_head_may_stay_whole() -> None:
    cache = Cache(replace(EXAMPLE, style=KVStyle.FUSED, order="HND"))
    (part,) = canonical_parts(cache.tensors["layers.0.attn"], cache.infer(), split_fused=False)
    assert part.shape == (6, 4, 3, 4)


# --- whole blocks


@many
@given(recipe=cache_recipes(), blocks=st.integers(1, 5))
def test_host_caches_are_like_the_cache(recipe: Recipe, blocks: int) -> None:
    cache = Cache(recipe)
    layout = cache.infer()
    host = allocate_host_caches(cache.tensors, layout, blocks, CPU)
    expected = replace(layout, num_blocks=blocks)
    inferred = CacheLayout.infer(host, order=recipe.order, block_size=recipe.tokens, style=recipe.style)
    assert inferred == expected
    regions = map_regions(expected, host)
    assert len(regions) == len(map_regions(layout, cache.tensors))
    for layer in host.values():
        for tensor in layer if isinstance(layer, tuple) else (layer,):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            assert not bits(tensor).any()


def test_memory_order_of_a_host_cache_is_the_one_of_the_cache() -> None:
    recipe = replace(EXAMPLE, hnd_in_memory=True, outer=("layer", "block", "kv"), blocks=1, block_padding=5)
    cache = Cache(recipe)
    (host, _) = allocate_host_caches(cache.tensors, cache.infer(), 7, CPU).values()
    assert isinstance(host, torch.Tensor)
    assert host.shape == (2, 7, 4, 3, 4)
    assert host.stride()[2:] == (4, 16, 1)


def test_the_stride_of_a_single_block_means_nothing() -> None:
    tensor = torch.zeros(4 * 3 * 4).as_strided((1, 4, 3, 4), (1, 12, 4, 1))
    layout = CacheLayout.infer({"layer": tensor}, order="NHD", block_size=4, style="fused")
    host = allocate_host_caches({"layer": tensor}, layout, 2, CPU)["layer"]
    assert isinstance(host, torch.Tensor)
    assert host.stride() == (48, 12, 4, 1)


def copied_naively(source: Cache, target: Cache, source_ids: list[int], target_ids: list[int]) -> list[bytes]:
    """Return the expected memory of the target. The target is written."""
    for here, there in zip(source_ids, target_ids, strict=True):
        for ours, theirs in zip(naive_parts(source, here), naive_parts(target, there), strict=True):
            for token, head, dim in np.ndindex(*ours.shape):
                theirs[token, head, dim] = ours[token, head, dim]
    return target.snapshot()


@st.composite
def block_copies(draw: st.DrawFn) -> tuple[Recipe, Recipe, list[int], list[int]]:
    source = draw(cache_recipes())
    target = replace(
        source,
        blocks=draw(st.sampled_from([1, 3, 6])),
        block_padding=draw(st.sampled_from([0, 3])),
        shared=draw(st.booleans()),
    )
    count = draw(st.integers(0, min(source.blocks, target.blocks)))
    source_ids = draw(st.permutations(range(source.blocks)))[:count]
    target_ids = draw(st.permutations(range(target.blocks)))[:count]
    if draw(st.booleans()):  # runs
        source_ids, target_ids = sorted(source_ids), sorted(target_ids)
    return source, target, source_ids, target_ids


class Bus(CacheDevice):
    """A device other than the CPU, with room for two rows in its own memory. All of it is on the CPU."""

    on_host = False

    def __init__(self) -> None:
        super().__init__(Device("cpu", 0))
        self._memory = torch.zeros(0, dtype=torch.uint8)

    def gather_buffer(self, count: int, size_bytes: int) -> torch.Tensor:
        if len(self._memory) < 2 * size_bytes:
            self._memory = torch.full((2 * size_bytes,), 0xAB, dtype=torch.uint8)
        rows = min(count, 2)
        return self._memory[: rows * size_bytes].view(rows, size_bytes)


@pytest.mark.parametrize(
    "way",
    [copies.copy_on_host, copies.to_host(Bus()), copies.to_device(Bus())],
    ids=["on host", "to host", "to device"],
)
@many
@given(case=block_copies())
def test_blocks_are_copied_and_nothing_else(
    case: tuple[Recipe, Recipe, list[int], list[int]], way: copies.CopyMaker
) -> None:
    """No way asks for the device; what needs one is only speed."""
    source_recipe, target_recipe, source_ids, target_ids = case
    source, target, expected = filled(source_recipe, 1), filled(target_recipe, 2), filled(target_recipe, 2)
    before = source.snapshot()
    rows = (block_rows(cache.tensors, source.infer()) for cache in (source, target))
    copy_blocks(*rows, np.array(source_ids, dtype=np.int64), np.array(target_ids, dtype=np.int64), way)
    assert target.snapshot() == copied_naively(source, expected, source_ids, target_ids)
    assert source.snapshot() == before


@pytest.mark.parametrize(
    ("source_ids", "target_ids"),
    [([5, 0, 3], [1, 2, 3]), ([1, 2, 3], [5, 0, 3]), ([1, 2, 3], [2, 3, 4]), ([3, 2, 1], [1, 3, 0]), ([4], [2])],
    ids=["to neighbours", "from neighbours", "both", "neither", "one"],
)
def test_blocks_that_follow_each_other_on_either_side(source_ids: list[int], target_ids: list[int]) -> None:
    source, target, expected = filled(EXAMPLE, 1), filled(EXAMPLE, 2), filled(EXAMPLE, 2)
    rows = (block_rows(cache.tensors, source.infer()) for cache in (source, target))
    copy_blocks(*rows, np.array(source_ids), np.array(target_ids), copies.copy_on_host)
    assert target.snapshot() == copied_naively(source, expected, source_ids, target_ids)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("piece_bytes_min", [None, 0], ids=["by kernels", "in pieces"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("style", list(KVStyle))
def test_blocks_go_to_a_device_and_back(
    style: KVStyle, dtype: torch.dtype, piece_bytes_min: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(EXAMPLE, style=style, dtype=dtype, heads=1 if style is KVStyle.MLA else 3)
    cache = filled(recipe)
    layout = cache.infer()
    device: Any = {
        name: tuple(part.cuda() for part in layer) if isinstance(layer, tuple) else layer.cuda()
        for name, layer in cache.tensors.items()
    }
    from kvflow.transport.device.cuda_device import CudaDevice

    monkeypatch.setattr(CudaDevice, "piece_bytes_min", piece_bytes_min)
    cuda = CudaDevice(Device("cuda", 0))
    host, back = allocate_host_caches(device, layout, 4, cuda), allocate_host_caches(device, layout, 6, CPU)
    ours, device_rows, host_rows = (block_rows(some, layout) for some in (cache.tensors, device, host))
    with cuda.copying():
        copy_blocks(device_rows, host_rows, np.array([5, 1, 2]), np.array([0, 2, 3]), copies.to_host(cuda))
        copy_blocks(host_rows, device_rows, np.array([3, 0]), np.array([0, 4]), copies.to_device(cuda))
        copy_blocks(device_rows, block_rows(back, layout), np.arange(6), np.arange(6), copies.to_host(cuda))
    copy_blocks(ours, ours, np.array([2, 5]), np.array([0, 4]), copies.copy_on_host)
    found = (part for layer in back.values() for part in canonical_parts(layer, layout))
    for ours, theirs in zip(parts_of(cache), found, strict=True):
        assert torch.equal(bits(ours), bits(theirs))


def test_block_ids_that_do_not_exist_are_a_bug() -> None:
    cache = filled(EXAMPLE)
    before = cache.snapshot()
    rows = block_rows(cache.tensors, cache.infer())
    for wrong in (-1, 6):
        for ids in (([0], [wrong]), ([wrong], [0])):
            with pytest.raises(AssertionError, match="of 6"):
                copy_blocks(rows, rows, *map(np.array, ids), copies.copy_on_host)
    assert cache.snapshot() == before


# --- tokens


@st.composite
def scatters(draw: st.DrawFn) -> tuple[Recipe, dict[str, int], str, list[tuple[int, int]]]:
    """A cache, the sizes of a copy, the peer's memory order, and the (block, chunk) to write."""
    recipe = draw(cache_recipes())
    chunk = draw(st.sampled_from([size for size in range(1, recipe.tokens + 1) if recipe.tokens % size == 0]))
    head_start = draw(st.integers(0, recipe.heads - 1))
    heads = draw(st.integers(1, recipe.heads - head_start))
    more_heads = draw(st.integers(0, 2))
    sizes = {
        "chunk": chunk,
        "tokens": draw(st.integers(1, chunk)),
        "head_start": head_start,
        "heads": heads,
        "their_heads": heads + more_heads,
        "their_start": draw(st.integers(0, more_heads)),
    }
    places = [(block, index) for block in range(recipe.blocks) for index in range(recipe.tokens // chunk)]
    count = draw(st.integers(0, len(places)))
    return recipe, sizes, draw(st.sampled_from(ORDERS)), draw(st.permutations(places))[:count]


def scattered_naively(
    cache: Cache, scratch: torch.Tensor, sizes: dict[str, int], order: str, places: list[tuple[int, int]]
) -> list[bytes]:
    """Return the expected memory of the cache. It is written, one head of one token at a time."""
    for number, (block, chunk) in enumerate(places):
        for row, part in enumerate(naive_parts(cache, block)):
            run = part.shape[2] * part.element_size()
            for token, head in np.ndindex(sizes["tokens"], sizes["heads"]):
                their_head = sizes["their_start"] + head
                if order == "NHD":
                    slot = token * sizes["their_heads"] + their_head
                else:
                    slot = their_head * sizes["tokens"] + token
                start = ((row * len(places) + number) * sizes["tokens"] * sizes["their_heads"] + slot) * run
                run_bits = scratch[start : start + run].clone().view(part.dtype)
                part[chunk * sizes["chunk"] + token, sizes["head_start"] + head] = run_bits
    return cache.snapshot()


@pytest.mark.parametrize("way", [copies.scatter_on_host, copies.scatter_on_device(CPU)], ids=["host", "device"])
@many
@given(case=scatters())
def test_tokens_are_scattered_and_nothing_else(
    case: tuple[Recipe, dict[str, int], str, list[tuple[int, int]]],
    way: copies.CopyMaker,
) -> None:
    """Both ways of writing are right on any device."""
    recipe, sizes, order, places = case
    cache, expected = filled(recipe), filled(recipe)
    parts = parts_of(cache)
    run = parts[0].shape[3] * recipe.dtype.itemsize
    shape = {"rows": len(parts), "chunks": len(places), "tokens": sizes["tokens"], "heads": sizes["their_heads"]}
    size = len(parts) * len(places) * sizes["tokens"] * sizes["their_heads"] * run
    scratch = torch.randint(0, 256, (size + 7,), dtype=torch.uint8)
    targets = chunk_targets(
        parts, chunk_tokens=sizes["chunk"], head_start=sizes["head_start"], head_count=sizes["heads"]
    )
    sources = chunk_sources(scratch, **shape, run_bytes=run, memory_order=order)
    chosen = sources[:, :, :, sizes["their_start"] : sizes["their_start"] + sizes["heads"]]
    ids = np.array(places, dtype=np.int64).reshape(-1, 2)
    before = scratch.clone()
    scatter_tokens(targets, chosen, ids[:, 0], ids[:, 1], way)
    assert cache.snapshot() == scattered_naively(expected, scratch, sizes, order, places)
    assert torch.equal(scratch, before)


def test_memory_whose_storage_is_not_aligned() -> None:
    """An address may allow larger elements than the distance from the storage's first byte does."""
    memory = np.zeros(256, dtype=np.uint8)
    start = -memory.ctypes.data % 16
    shifted = torch.from_numpy(memory[start + 8 :])[8:136]
    assert shifted.data_ptr() % 16 == 0
    target, source = shifted.view(8, 1, 1, 1, 16), torch.arange(16, dtype=torch.uint8).view(1, 1, 1, 16)
    copies.scatter_on_device(CPU)(np.array([3]), np.array([0]))(source, target)
    assert memory[start + 16 :][48:64].tolist() == list(range(16))
    assert memory.sum() == sum(range(16))


def test_sizes_that_do_not_fit_are_a_bug() -> None:
    parts = parts_of(Cache(EXAMPLE))
    with pytest.raises(AssertionError, match="of a chunk: 3"):
        chunk_targets(parts, chunk_tokens=3, head_start=0, head_count=1)
    with pytest.raises(AssertionError, match=r"heads 2\+2 of 3"):
        chunk_targets(parts, chunk_tokens=2, head_start=2, head_count=2)
    targets = chunk_targets(parts, chunk_tokens=2, head_start=0, head_count=2)
    one = np.array([0])
    scratch = torch.zeros(4096, dtype=torch.uint8)
    for tokens, heads in ((3, 2), (2, 1)):
        sources = chunk_sources(scratch, rows=4, chunks=1, tokens=tokens, heads=heads, run_bytes=4, memory_order="NHD")
        with pytest.raises(AssertionError):
            scatter_tokens(targets, sources, one, one, copies.scatter_on_host)
    sources = chunk_sources(scratch, rows=4, chunks=1, tokens=2, heads=2, run_bytes=4, memory_order="NHD")
    for block, chunk in ((6, 0), (-1, 0), (0, 2)):
        with pytest.raises(AssertionError):
            scatter_tokens(targets, sources, np.array([block]), np.array([chunk]), copies.scatter_on_host)
