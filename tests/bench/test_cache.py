"""The bench's cache must notice every wrong byte, however two ranks cut it: no number for a copy that failed."""

from __future__ import annotations

import numpy as np
import pytest

from kvflow.bench.cache import BenchCache, CacheShape, WrongBytes, allocate_memory
from kvflow.bench.loads import PlannedLoad, SettingsError
from tests.bench.compared import blocks_to_compare

RANK = CacheShape(layers=2, blocks=16, kv_heads=4, first_head=4)
CUTS = {
    "alike": RANK,
    "twice the heads": CacheShape(layers=2, blocks=16, kv_heads=8),
    "NHD": CacheShape(layers=2, blocks=16, kv_heads=4, first_head=4, order="NHD"),
    "large blocks": CacheShape(layers=2, blocks=4, kv_heads=4, first_head=4, block_size=64),
}


def filled(shape: CacheShape) -> BenchCache:
    cache = BenchCache(shape)
    cache.fill()
    return cache


def copy(source: BenchCache, target: BenchCache, local_ids: list[int], remote_ids: list[int]) -> None:
    """As a load between these ranks must do it, token by token and head by head."""
    ours, theirs = target.shape, source.shape
    for index in range(len(remote_ids) * theirs.block_size):
        local, remote = local_ids[index // ours.block_size], remote_ids[index // theirs.block_size]
        for head in range(ours.kv_heads):
            their_head = head + ours.first_head - theirs.first_head
            for layer in range(ours.layers):
                found = source.layers[layer][:, remote, their_head, index % theirs.block_size]
                target.layers[layer][:, local, head, index % ours.block_size] = found


@pytest.mark.parametrize(
    ("ours", "theirs", "local_ids", "remote_ids"),
    [
        ("alike", "alike", [3, 0], [5, 1]),
        ("alike", "twice the heads", [3, 0], [5, 1]),
        ("alike", "NHD", [3, 0], [5, 1]),
        ("NHD", "NHD", [3, 0], [5, 1]),
        ("alike", "large blocks", [3, 0, 2, 6], [1]),
        ("large blocks", "alike", [1], [3, 0, 2, 6]),
    ],
)
def test_a_right_copy_passes_and_no_other(ours: str, theirs: str, local_ids: list[int], remote_ids: list[int]) -> None:
    source, target = filled(CUTS[theirs]), BenchCache(CUTS[ours])
    copy(source, target, local_ids, remote_ids)
    size_bytes = len(local_ids) * target.shape.block_size_bytes
    their_size = source.shape.block_size
    assert target.check(local_ids, remote_ids, remote_block_size=their_size) == size_bytes
    assert target.check(local_ids, remote_ids, remote_block_size=their_size, layers=[1]) == size_bytes // 2
    assert target.check(local_ids, remote_ids, remote_block_size=their_size, layers=[]) == 0
    with pytest.raises(WrongBytes, match=f"layer 0 K: block {local_ids[0]}, head .*, token 0 is not token 0 "):
        target.check(local_ids, [0, *remote_ids[1:]], remote_block_size=their_size)


def test_all_words_of_a_model_differ_and_only_its_layers_are_memory() -> None:
    cache = filled(CacheShape(layers=3, blocks=70, kv_heads=2))
    words = np.concatenate([layer.ravel() for layer in cache.layers])
    assert len(np.unique(words)) == len(words) == cache.shape.size_bytes // 4
    assert cache.bases[0] % (2 << 20) == 0
    assert [base - cache.bases[0] for base in cache.bases] == [
        index * cache.shape.layer_size_bytes for index in range(3)
    ]


@pytest.mark.parametrize(("layer", "part", "word"), [(0, 0, 0), (1, 1, 7), (1, 0, -1)])
def test_one_wrong_word_fails(layer: int, part: int, word: int) -> None:
    cache = filled(CacheShape(layers=2, blocks=70, kv_heads=2))
    cache.layers[layer][part, 69, 1, 15, word] ^= 1 << 24
    blocks = list(range(70))
    with pytest.raises(WrongBytes, match=f"layer {layer} {'KV'[part]}: block 69, head 1, token 15 .* differ: 1"):
        cache.check(blocks, blocks)
    assert cache.check(blocks, blocks, layers=[1 - layer]) == cache.shape.size_bytes // 2


def test_what_was_never_written_and_what_was_poisoned_fail() -> None:
    with pytest.raises(WrongBytes, match="block 2"):
        BenchCache(RANK).check([2], [0])
    cache = filled(RANK)
    cache.poison([2], [0])
    assert cache.check([1], [1]) == cache.shape.block_size_bytes
    with pytest.raises(WrongBytes, match="layer 0 K: block 2"):
        cache.check([2], [2])
    cache.write([2])
    assert cache.check([2], [2]) == cache.shape.block_size_bytes


@pytest.mark.parametrize("name", CUTS)
def test_tensors_show_the_memory_in_its_own_order(name: str) -> None:
    cache = filled(CUTS[name])
    tensor = cache.tensors()["layers.1"]
    assert tuple(tensor.shape) == cache.shape.axes
    assert tensor.is_contiguous()
    place = (1, 3, 2, 5) if cache.shape.order == "HND" else (1, 3, 5, 2)
    assert (tensor.numpy().view(np.uint32)[place] == cache.layers[1][1, 3, 2, 5]).all()


def test_ranks_can_share_their_memory() -> None:
    memory = allocate_memory(RANK.size_bytes)
    rank, thin = BenchCache(RANK, memory), BenchCache(CacheShape(layers=2, blocks=16, kv_heads=1), memory)
    rank.fill()
    assert thin.layers[0].shape[2] == 1
    assert thin.layers[0][0, 0, 0, 0, 0] == rank.layers[0][0, 0, 0, 0, 0]


def test_a_pattern_of_32_bits_has_its_limit() -> None:
    assert RANK.checked("--size") is RANK
    with pytest.raises(SettingsError, match="--size: 32768 MB is too large for the test pattern of 32 bits"):
        CacheShape(layers=8, blocks=1 << 16).checked("--size")


def test_of_each_load_all_blocks_are_compared_or_a_few_with_the_first_and_the_last() -> None:
    small = PlannedLoad(request_id="small", local_ids=(4, 2, 3), remote_ids=(1, 2, 3))
    large = PlannedLoad(request_id="large", local_ids=tuple(range(1000)), remote_ids=tuple(range(1000, 2000)))
    assert blocks_to_compare([small], check_all=False) == ([4, 2, 3], [1, 2, 3])
    local_ids, remote_ids = blocks_to_compare([small, large], check_all=False)
    assert (len(local_ids), local_ids[3], local_ids[-1]) == (3 + 8, 0, 999)
    assert [remote - local for local, remote in zip(local_ids[3:], remote_ids[3:], strict=True)] == [1000] * 8
    assert len(blocks_to_compare([small, large], check_all=True)[0]) == 1003
