"""Digests of caches against the definition, computed slot by slot in plain integers; and what changes them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.cache.groups import groups_of, layer_sets
from kvflow.core.cache.layout import KVStyle
from kvflow.runtime.copy_thread import CopyThread
from kvflow.verify import cache_digests as digesting
from kvflow.verify import digests
from kvflow.verify.cache_digests import DigestedCache, DigestSpec, Undigestible
from tests.core.caches import Cache, Recipe, recipes
from tests.support.budgets import examples

T = TypeVar("T")
MASK = (1 << 64) - 1
EXAMPLE = Recipe(style=KVStyle.KV_FIRST, order="NHD", layers=2, blocks=6, tokens=4, heads=3, dim=24)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)

many = examples(20, 200)


def cache_of(recipe: Recipe, seed: int = 1) -> Cache:
    cache = Cache(recipe)
    cache.fill(seed)
    return cache


def digested(cache: Cache) -> DigestedCache:
    return DigestedCache(layer_sets(groups_of(cache.tensors, cache.infer()), 1), AtOnce("digests"))


class AtOnce(CopyThread):
    """Runs each job where it is asked for: no loop, no thread."""

    async def run(self, job: Callable[[], T]) -> T:
        return job()


def result_of(digesting: Coroutine[Any, Any, list[int]]) -> list[int]:
    """Return the result of a coroutine that does not wait, without a loop."""
    with pytest.raises(StopIteration) as ended:
        digesting.send(None)
    found: list[int] = ended.value.value
    return found


def compute(
    cache: Cache,
    ids: Sequence[int],
    start: int,
    stop: int,
    heads: tuple[int, int, int],
) -> list[int]:
    """The digests of all layers."""
    layers, (first, count, of_model) = range(cache.recipe.layers), heads
    blocks = np.array(ids, dtype=np.int64), cache.recipe.tokens, range(start, stop)
    asked = DigestSpec(0, layers, range(first, first + count), of_model, *blocks)
    return result_of(digested(cache).digests([asked]))


def scrambled(number: int, kind: int) -> int:
    """splitmix64's finalizer, in Python's integers."""
    x = (number + (kind << 56) + 1) * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return (x ^ (x >> 31)) | 1


def defined(cache: Cache, layer: int, ids: Sequence[int], start: int, stop: int, heads: tuple[int, int, int]) -> int:
    """The digest of a layer as the definition says: all factors are odd, so each byte inside counts, and no other."""
    recipe, total = cache.recipe, 0
    first_block = -(-stop // recipe.tokens) - len(ids)
    first_head, count, of_model = heads
    for part in range(cache.kv_count):
        for token in range(start, stop):
            block, at = divmod(token, recipe.tokens)
            for head in range(count):
                slot = cache.slot(layer, part, ids[block - first_block], at, first_head + head)
                run = slot.contiguous().view(torch.uint8).numpy().tobytes()
                words = [int.from_bytes(run[begin : begin + 8], "little") for begin in range(0, len(run), 8)]
                found = sum(word * scrambled(index, 1) for index, word in enumerate(words)) & MASK
                found ^= found >> 32
                total += found * scrambled(part, 2) * scrambled(token, 3) * scrambled(of_model + head, 4)
    return total & MASK


@st.composite
def cases(draw: st.DrawFn) -> tuple[Cache, list[int], int, int, tuple[int, int, int]]:
    recipe = draw(recipes(dtypes=DTYPES).filter(lambda one: one.style is not KVStyle.FUSED or one.dim % 2 == 0))
    cache = cache_of(recipe, draw(st.integers(0, 99)))
    count = draw(st.integers(1, recipe.blocks))
    ids = draw(st.permutations(range(recipe.blocks)))[:count]
    before = draw(st.integers(0, 3)) * recipe.tokens
    stop = before + count * recipe.tokens - draw(st.integers(0, recipe.tokens - 1))
    start = draw(st.integers(before, stop - 1))
    heads = 1 if recipe.style is KVStyle.MLA else recipe.heads
    first = draw(st.integers(0, heads - 1))
    span = first, draw(st.integers(1, heads - first)), draw(st.integers(0, 9))
    return cache, list(ids), start, stop, span


@many
@given(cases())
def test_digests_are_as_defined_on_the_host_and_by_torch(case: Any) -> None:
    cache, *where = case
    expected = [defined(cache, layer, *where) for layer in range(cache.recipe.layers)]
    assert compute(*case) == expected
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(digesting, "_JOB_BYTES", 1)  # block by block, layer by layer
        assert compute(*case) == expected
        patched.setattr(digesting, "_PIECE_BYTES", 1)
        patched.setattr(digesting, "_DIRECT_BYTES_MIN", 1)
        assert compute(*case) == expected
        patched.setattr(digesting, "_is_host", lambda _: False)
        assert compute(*case) == expected
        patched.setattr(digesting, "_JOB_BYTES_ON_DEVICE", 1)
        assert compute(*case) == expected


STORED: list[tuple[Recipe, tuple[list[int], int, int, tuple[int, int, int]], list[int]]] = [
    (
        Recipe(style=KVStyle.KV_FIRST, order="NHD", layers=2, blocks=6, tokens=4, heads=3, dim=24),
        ([1, 5, 2], 1, 11, (1, 2, 4)),
        [0x0138806DD865DEB2, 0xBF33482511F94363],
    ),
    (
        Recipe(
            style=KVStyle.BLOCKS_FIRST,
            order="HND",
            layers=2,
            blocks=5,
            tokens=8,
            heads=2,
            dim=10,
            dtype=torch.float16,
            block_padding=3,
        ),
        ([4, 0], 9, 22, (0, 2, 6)),
        [0x6A2EBB5A43923139, 0xD04CC02C1A3D1623],
    ),
    (
        Recipe(style=KVStyle.MLA, order="NHD", layers=1, blocks=4, tokens=16, heads=1, dim=72, dtype=torch.bfloat16),
        ([3], 0, 16, (0, 1, 0)),
        [0x625CA229732DBFD0],
    ),
    (
        Recipe(style=KVStyle.FUSED, order="HND", layers=1, blocks=4, tokens=4, heads=4, dim=32),
        ([0, 1, 2, 3], 0, 13, (0, 4, 8)),
        [0xC73D3331F20E3FA8],
    ),
]


@pytest.mark.parametrize(("recipe", "where", "expected"), STORED)
def test_digests_are_those_of_earlier_versions(recipe: Recipe, where: Any, expected: list[int]) -> None:
    """Engines of several versions compare them: another value needs another number of the definition."""
    cache = Cache(recipe)
    for at, storage in enumerate(cache.storages):
        content = storage.view(torch.uint8)
        numbers = np.arange(content.numel(), dtype=np.uint64) + np.uint64(7919 * at)
        content.copy_(torch.from_numpy((numbers * np.uint64(2654435761) >> np.uint64(13)).astype(np.uint8)))
    assert compute(cache, *where) == expected
    assert digests.DIGEST_VERSION == 1


@pytest.mark.parametrize(
    ("axis", "one", "other"),
    [(0, 0, 1), (1, 0, 1), (2, 1, 2), (3, 0, 3), (4, 0, 2)],
    ids=["layers", "K and V", "blocks", "tokens", "heads"],
)
def test_right_bytes_in_a_wrong_place_are_found(axis: int, one: int, other: int) -> None:
    cache = cache_of(EXAMPLE)
    where = [1, 2, 4], 0, 12, (0, 3, 0)
    before = compute(cache, *where)
    for here in np.ndindex(1, 2, EXAMPLE.blocks, EXAMPLE.tokens, EXAMPLE.heads):
        if here[axis] == one:
            mine, theirs = cache.slot(*here), cache.slot(*here[:axis], other, *here[axis + 1 :])
            kept = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(kept)
    after = compute(cache, *where)
    assert before[0] != after[0]
    assert (before[1] != after[1]) is (axis == 0)


def test_where_bytes_are_in_the_prompt_and_the_model_counts() -> None:
    cache = cache_of(EXAMPLE)
    found = [
        compute(cache, [1, 2], 0, 8, (0, 3, 0)),
        compute(cache, [1, 2], 4, 12, (0, 3, 0)),
        compute(cache, [1, 2], 0, 8, (0, 3, 3)),
        compute(cache, [2, 1], 0, 8, (0, 3, 0)),
    ]
    assert len({tuple(one) for one in found}) == len(found)


def test_digests_of_heads_and_tokens_add_up() -> None:
    """So a rank that reads from several ranks compares its bytes with each source."""
    cache = cache_of(EXAMPLE)
    whole = compute(cache, [1, 2], 0, 8, (0, 3, 5))
    heads = zip(compute(cache, [1, 2], 0, 8, (0, 1, 5)), compute(cache, [1, 2], 0, 8, (1, 2, 6)), strict=True)
    tokens = zip(compute(cache, [1], 0, 3, (0, 3, 5)), compute(cache, [1, 2], 3, 8, (0, 3, 5)), strict=True)
    assert [digests.add_digests(*both) for both in heads] == whole
    assert [digests.add_digests(*both) for both in tokens] == whole


def test_memory_that_is_none_of_torch_has_no_digests() -> None:
    class Strange:
        """A tensor of another library, as far as kvflow looks at it."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self._tensor = tensor

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tensor, name)

    cache = cache_of(EXAMPLE)
    sets = layer_sets(groups_of(cache.tensors, cache.infer()), 1)
    strange = {name: Strange(layer) for name, layer in sets[0].caches.items() if isinstance(layer, torch.Tensor)}
    found = DigestedCache([sets[0]._replace(caches=strange)], AtOnce("digests"))
    assert found.problem == "Strange is no torch tensor"
    with pytest.raises(Undigestible):
        result_of(found.digests([DigestSpec(0, [0], range(1), 0, np.array([0], dtype=np.int64), 4, range(4))]))
    assert DigestedCache(sets, AtOnce("digests")).problem == ""
