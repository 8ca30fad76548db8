"""The topology bench's cache: the same word means the same in every cut, and every wrong byte is noticed."""

from __future__ import annotations

import numpy as np
import pytest

from kvflow.cli.bench.cache import WrongBytes
from kvflow.cli.bench.settings import Transport
from kvflow.cli.topology_bench.cuts import Cut, Order
from kvflow.cli.topology_bench.pattern import RankCache, allocate_layers
from kvflow.cli.topology_bench.settings import TopologySettings, make_settings

SETTINGS: TopologySettings = make_settings(transport=Transport.SHM, size_mb=1, rounds=1, layers=2, quick=False)
LAYERS = (0, 1)
RANK = Cut(tp_rank=1, tp_size=4)


def cache_of(cut: Cut, *, filled: bool = False) -> RankCache:
    cache = RankCache(SETTINGS, cut, allocate_layers(SETTINGS, [cut]))
    if filled:
        cache.fill()
    return cache


def copy(source: RankCache, target: RankCache, local_ids: list[int], remote_ids: list[int]) -> None:
    """As a load between these cuts must do it, token by token and head by head."""
    ours, theirs = target.cut, source.cut
    for index in range(len(remote_ids) * theirs.block_size):
        local, remote = local_ids[index // ours.block_size], remote_ids[index // theirs.block_size]
        for head in set(ours.heads) & set(theirs.heads):
            for layer in LAYERS:
                found = source.layers[layer][:, remote, head - theirs.heads.start, index % theirs.block_size]
                target.layers[layer][:, local, head - ours.heads.start, index % ours.block_size] = found


@pytest.mark.parametrize(
    ("ours", "theirs", "local_ids", "remote_ids"),
    [
        (RANK, RANK, [3, 0], [5, 1]),
        (RANK, Cut(tp_rank=0, tp_size=2), [3, 0], [5, 1]),
        (RANK, Cut(tp_rank=1, tp_size=4, order=Order.NHD), [3, 0], [5, 1]),
        (RANK, Cut(tp_rank=1, tp_size=4, block_size=64), [3, 0, 2, 6], [1]),
        (Cut(tp_rank=1, tp_size=4, block_size=64), RANK, [1], [3, 0, 2, 6]),
    ],
    ids=str,
)
def test_a_right_copy_between_cuts_passes(ours: Cut, theirs: Cut, local_ids: list[int], remote_ids: list[int]) -> None:
    source, target = cache_of(theirs, filled=True), cache_of(ours)
    copy(source, target, local_ids, remote_ids)
    size_bytes = len(local_ids) * ours.block_size * ours.token_region_bytes * 2 * len(LAYERS)
    assert target.check(local_ids, remote_ids, theirs.block_size, LAYERS) == size_bytes
    with pytest.raises(WrongBytes, match="is not what the producer has"):
        target.check(local_ids, [7, *remote_ids[1:]] if len(remote_ids) > 1 else [0], theirs.block_size, LAYERS)


def test_all_words_of_the_model_differ() -> None:
    words = np.concatenate([layer.ravel() for layer in cache_of(Cut(tp_rank=0, tp_size=1), filled=True).layers])
    assert len(np.unique(words)) == len(words)


def test_one_wrong_word_and_poison_fail() -> None:
    cache = cache_of(RANK, filled=True)
    cache.check([2, 4], [2, 4], 16, LAYERS)
    cache.layers[1][1, 4, 7, 15, 63] ^= 1 << 20
    cache.check([2, 4], [2, 4], 16, [0])
    with pytest.raises(WrongBytes, match="layer 1 V: block 4, head 15, token 15"):
        cache.check([2, 4], [2, 4], 16, LAYERS)
    cache.poison([2], [0])
    with pytest.raises(WrongBytes, match="layer 0 K: block 2"):
        cache.check([2], [2], 16, [0])


def test_tensors_show_the_memory_in_its_own_order() -> None:
    cache = cache_of(Cut(tp_rank=1, tp_size=4, order=Order.NHD), filled=True)
    tensor = cache.tensors()["layers.1"]
    assert tuple(tensor.shape) == (2, SETTINGS.pool_tokens // 16, 16, 8, 128)
    assert tensor.is_contiguous()
    found = tensor.numpy().view(np.uint32)[1, 3, 5, 2]
    assert (found == cache.layers[1][1, 3, 2, 5]).all()


def test_ranks_share_their_memory() -> None:
    thin = Cut(tp_rank=4, tp_size=16)
    memory = allocate_layers(SETTINGS, [RANK, thin])
    rank, narrow = RankCache(SETTINGS, RANK, memory), RankCache(SETTINGS, thin, memory)
    rank.fill()
    assert narrow.layers[0].shape[2] == 2
    assert narrow.layers[0][0, 0, 0, 0, 0] == rank.layers[0][0, 0, 0, 0, 0]
