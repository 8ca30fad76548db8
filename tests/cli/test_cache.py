"""The bench's cache must notice every wrong byte: a number must not stand for a copy that failed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvflow.cli.bench.cache import BenchCache, WrongBytes, huge_page_share, sample_indices
from kvflow.cli.bench.settings import CacheShape

SHAPE = CacheShape(layers=3, kv_heads=1, blocks=70)


def _huge_pages() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text(encoding="ascii") if path.exists() else "[never]"


@pytest.fixture
def caches() -> tuple[BenchCache, BenchCache]:
    return BenchCache(SHAPE, filled=True), BenchCache(SHAPE, filled=False)


def copy(source: BenchCache, target: BenchCache, local_ids: list[int], remote_ids: list[int]) -> None:
    for index in range(SHAPE.layers):
        target.layers[index][:, local_ids] = source.layers[index][:, remote_ids]


def test_all_words_differ() -> None:
    cache = BenchCache(SHAPE, filled=True)
    words = np.concatenate([layer.ravel() for layer in cache.layers])
    assert len(np.unique(words)) == len(words) == SHAPE.size_bytes // 4
    assert [base % (2 << 20) for base in cache.bases] == [0, 0, 0]


@pytest.mark.skipif("[never]" in _huge_pages(), reason="this machine gives no huge pages")
def test_the_cache_lies_in_huge_pages() -> None:
    shape = replace(SHAPE, blocks=2000)
    assert huge_page_share(os.getpid(), shape) < 0.5
    cache = BenchCache(shape, filled=True)
    assert huge_page_share(os.getpid(), shape) > 0.5
    assert cache.layer_size_bytes * shape.layers == shape.size_bytes


def test_a_right_copy_passes(caches: tuple[BenchCache, BenchCache]) -> None:
    source, target = caches
    remote_ids = list(reversed(range(SHAPE.blocks)))
    copy(source, target, list(range(SHAPE.blocks)), remote_ids)
    assert target.check(range(SHAPE.blocks), remote_ids) == SHAPE.blocks


def test_what_was_never_written_fails(caches: tuple[BenchCache, BenchCache]) -> None:
    with pytest.raises(WrongBytes, match="block 2"):
        caches[1].check([2], [0])


@pytest.mark.parametrize(("layer", "part", "word"), [(0, 0, 0), (1, 1, 7), (2, 0, -1)])
def test_one_wrong_word_fails(caches: tuple[BenchCache, BenchCache], layer: int, part: int, word: int) -> None:
    source, target = caches
    copy(source, target, [1, 2, 69], [4, 5, 6])
    target.layers[layer][part, 69, word] ^= 1 << 24
    with pytest.raises(WrongBytes, match=f"layer {layer} {'KV'[part]}: block 69 is not the remote block 6"):
        target.check([1, 2, 69], [4, 5, 6])


def test_a_swapped_pair_fails(caches: tuple[BenchCache, BenchCache]) -> None:
    source, target = caches
    copy(source, target, [1, 2], [5, 4])
    with pytest.raises(WrongBytes):
        target.check([1, 2], [4, 5])


def test_poison_undoes_a_right_copy(caches: tuple[BenchCache, BenchCache]) -> None:
    source, target = caches
    copy(source, target, [1, 2], [4, 5])
    target.poison([2])
    assert target.check([1], [4]) == 1
    with pytest.raises(WrongBytes):
        target.check([2], [5])


def test_samples_have_the_first_and_the_last() -> None:
    assert sample_indices(3, check_all=False) == [0, 1, 2]
    assert sample_indices(1000, check_all=True) == list(range(1000))
    sample = sample_indices(1000, check_all=False)
    assert (len(sample), sample[0], sample[-1]) == (8, 0, 999)
