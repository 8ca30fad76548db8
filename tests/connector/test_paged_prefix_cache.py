"""The prompts in a rank's blocks: found prefixes, and blocks that are removed before they change."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from kvflow.connector.cached_prompts import CachedPrompts
from kvflow.connector.paged_groups import PagedGroup, as_registered
from kvflow.connector.paged_prefix_cache import PagedPrefixCache
from kvflow.connector.step import NO_BLOCK, CachedBlocks, Step
from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.prefix.keys import prefix_keys
from kvflow.prefix.prefix_cache import PinnedPrefix
from tests.support.tests_support import each

SIZE = 4
FULL = GroupFacts(name="full", block_size=SIZE)
WINDOW = GroupFacts(name="window", block_size=SIZE, kind=GroupKind.SLIDING, window=5)
PROMPT = list(range(100, 140))


def cache_of(*groups: GroupFacts) -> PagedPrefixCache:
    return PagedPrefixCache([PagedGroup(group) for group in groups or (FULL,)], SIZE)


def cached_blocks(tokens: Sequence[int], *tables: Sequence[int], first: int = 0) -> CachedBlocks:
    """These blocks hold the tokens from block `first` on."""
    keys = prefix_keys(tokens, SIZE)[first:]
    parent = prefix_keys(tokens, SIZE)[first - 1] if first else b""
    return CachedBlocks(parent=parent, keys=tuple(keys), block_tables=tuple(map(tuple, tables)))


def match(prefix_cache: PagedPrefixCache, tokens: Sequence[int], key_tokens: int = SIZE) -> PinnedPrefix | None:
    return prefix_cache.match(prefix_keys(tokens, key_tokens), key_tokens)


def found(prefix_cache: PagedPrefixCache, tokens: Sequence[int], key_tokens: int = SIZE) -> object:
    run = match(prefix_cache, tokens, key_tokens)
    return None if run is None else (run.num_tokens, run.block_ids)


class Event:
    happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        raise AssertionError("a prefix cache waits for nothing")


@pytest.fixture(name="prefix_cache")
def of_sixteen_tokens() -> PagedPrefixCache:
    prefix_cache = cache_of()
    prefix_cache.add([cached_blocks(PROMPT[:16], [7, 5, 9, 3])], None)
    return prefix_cache


@each(
    ("tokens", "key_tokens", "expected"),
    [
        (PROMPT, 4, 16),
        (PROMPT[:11], 4, 8),
        ([*PROMPT[:9], 1, 2, 3, 4], 4, 8),
        (PROMPT[1:], 4, 0),
        (PROMPT[:3], 4, 0),
        (PROMPT, 2, 16),  # a reader's keys need not be of our block size
        (PROMPT, 8, 16),
        (PROMPT, 12, 12),
        (PROMPT, 16, 16),
        (PROMPT, 32, 0),
    ],
)
def test_the_longest_run_that_is_there(
    prefix_cache: PagedPrefixCache, tokens: Sequence[int], key_tokens: int, expected: int
) -> None:
    run = found(prefix_cache, tokens, key_tokens)
    assert run == ((expected, (7, 5, 9, 3)[: expected // SIZE]) if expected else None)


def test_blocks_that_are_reused_are_out_and_their_readers_are_named(
    prefix_cache: PagedPrefixCache,
) -> None:
    short, long = match(prefix_cache, PROMPT[:4]), match(prefix_cache, PROMPT)
    assert short is not None
    assert long is not None
    assert prefix_cache.remove_reused([9]) == [long]
    assert found(prefix_cache, PROMPT) == (8, (7, 5))
    prefix_cache.unpin(long)
    assert prefix_cache.remove_reused([9, 8]) == []
    prefix_cache.add([cached_blocks([1, 2, 3, 4], [9])], None)
    assert found(prefix_cache, PROMPT) == (8, (7, 5))
    assert found(prefix_cache, [1, 2, 3, 4]) == (4, (9,))
    assert found(prefix_cache, PROMPT[:4]) == (4, (7,))
    assert short in prefix_cache.remove_reused([7])


def test_a_prefix_that_is_there_twice_is_there_until_both_are_gone() -> None:
    prefix_cache = cache_of()
    prefix_cache.add([cached_blocks(PROMPT[:8], [1, 2])], None)
    prefix_cache.add([cached_blocks(PROMPT[:8], [3, 4])], None)
    prefix_cache.remove_reused([1])
    assert found(prefix_cache, PROMPT) == (8, (3, 2))
    prefix_cache.remove_reused([3])
    assert found(prefix_cache, PROMPT) is None
    prefix_cache.remove_reused([2, 4])
    assert repr(prefix_cache) == "<PagedPrefixCache 0 keys, 1 being read>"


def test_a_block_that_comes_to_hold_something_else_without_being_reused_is_that() -> None:
    """As when a request's tokens are changed under it."""
    prefix_cache = cache_of()
    prefix_cache.add([cached_blocks(PROMPT[:8], [1, 2])], None)
    prefix_cache.add([cached_blocks([*PROMPT[:4], 1, 1, 1, 1], [2], first=1)], None)
    assert found(prefix_cache, PROMPT) == (4, (1,))
    assert found(prefix_cache, [*PROMPT[:4], 1, 1, 1, 1]) == (8, (1, 2))


def test_what_a_device_still_computes_is_not_there_yet() -> None:
    prefix_cache, first, second = cache_of(), Event(), Event()
    prefix_cache.add([cached_blocks(PROMPT[:8], [1, 2])], first)
    prefix_cache.add([cached_blocks(PROMPT[:12], [3], first=2)], second)
    second.happened = True
    assert found(prefix_cache, PROMPT) is None, "in order"
    prefix_cache.remove_reused([2])
    first.happened = True
    assert found(prefix_cache, PROMPT) == (4, (1,))
    prefix_cache.add([cached_blocks(PROMPT[:8], [2], first=1)], None)
    assert found(prefix_cache, PROMPT) == (12, (1, 2, 3))


def test_windows_need_their_last_blocks_only() -> None:
    prefix_cache = cache_of(FULL, WINDOW)
    prefix_cache.add([cached_blocks(PROMPT[:20], [1, 2, 3, 4, 5], [NO_BLOCK, NO_BLOCK, 13, 14, 15])], None)
    assert found(prefix_cache, PROMPT) == (20, ((1, 2, 3, 4, 5), (14, 15)))
    assert found(prefix_cache, PROMPT[:16]) == (16, ((1, 2, 3, 4), (13, 14)))
    assert found(prefix_cache, PROMPT[:12]) is None, "the window of 12 tokens is not there"
    prefix_cache.remove_reused([15])
    assert found(prefix_cache, PROMPT) == (16, ((1, 2, 3, 4), (13, 14)))
    prefix_cache.remove_reused([1])
    assert found(prefix_cache, PROMPT) is None
    windows = cache_of(WINDOW)
    windows.add([cached_blocks(PROMPT[:20], [NO_BLOCK, NO_BLOCK, 13, 14, 15])], None)
    assert found(windows, PROMPT) == (20, (14, 15)), "nothing of the beginning"


def test_blocks_of_kernels_that_are_smaller_than_the_engine_s() -> None:
    prefix_cache = PagedPrefixCache([as_registered(FULL, 2)], SIZE)
    prefix_cache.add([cached_blocks(PROMPT[:8], [7, 5])], None)
    assert found(prefix_cache, PROMPT) == (8, (14, 15, 10, 11))
    assert len(prefix_cache.remove_reused([5])) == 1, "blocks are named as the engine names them"


def test_keys_in_a_wrong_order_and_forged_ones_find_nothing(prefix_cache: PagedPrefixCache) -> None:
    keys = prefix_keys(PROMPT[:16], SIZE)
    assert prefix_cache.match([keys[3], keys[0]], SIZE) is None
    assert prefix_cache.match(keys[1:], SIZE) is None
    rng = random.Random(1)
    assert prefix_cache.match([rng.randbytes(32) for _ in range(1000)], SIZE) is None
    assert "0 being read" in repr(prefix_cache)


async def test_who_ends_a_run_may_wait_until_it_is_left() -> None:
    prefix_cache = cache_of()
    prefix_cache.add([cached_blocks(PROMPT[:4], [7])], None)
    run = match(prefix_cache, PROMPT)
    assert run is not None
    waiting = asyncio.ensure_future(prefix_cache.wait_unread(run))
    await asyncio.sleep(0)
    assert not waiting.done()
    prefix_cache.unpin(run)
    await waiting
    await prefix_cache.wait_unread(run)


# --- what the scheduler's half tells


class Reported:
    """A `CachedPrompts`, its prefix cache, and its watch."""

    def __init__(self, groups: int = 1) -> None:
        self.watched: list[int] = []
        self.cached_prompts = CachedPrompts(SIZE, self.watched.extend)
        self.prefix_cache = cache_of(*(FULL,) * groups)

    def step(self, *scheduled: tuple[str, int], blocks: Sequence[Sequence[int]] = ((),), **more: Sequence[str]) -> Step:
        step = Step()
        entries = dict(scheduled)
        preempted = more.get("preempted", ())
        self.cached_prompts.build_step(step, entries, preempted=preempted, block_ids=lambda _: blocks)
        self.prefix_cache.remove_reused(step.reused)
        self.prefix_cache.add(step.cached_blocks, None)
        return step


def test_each_block_is_told_once_and_watched() -> None:
    reports = Reported()
    reports.cached_prompts.add("r", prefix_keys(PROMPT[:14], SIZE))
    reports.step(("r", 6), blocks=[[5, 6]])
    assert found(reports.prefix_cache, PROMPT) == (4, (5,))
    assert reports.watched == [5]
    reports.step(("r", 14), blocks=[[5, 6, 7, 8]])
    assert found(reports.prefix_cache, PROMPT) == (12, (5, 6, 7))
    assert reports.watched == [5, 6, 7]
    assert reports.step(("r", 15), blocks=[[5, 6, 7, 8]]).cached_blocks == []
    reports.cached_prompts.add("same", prefix_keys(PROMPT[:16], SIZE))
    step = reports.step(("same", 16), blocks=[[5, 6, 7, 9]])
    assert [one.block_tables for one in step.cached_blocks] == [((9,),)], "what is known is not told again"
    assert found(reports.prefix_cache, PROMPT) == (16, (5, 6, 7, 9))


def test_tables_have_null_blocks_in_front_of_a_window() -> None:
    """Block 0 is an ordinary block unless a null block is configured."""
    reports, watched = Reported(groups=2), list[int]()
    reports.cached_prompts = CachedPrompts(SIZE, watched.extend, null_block=0)
    reports.cached_prompts.add("r", prefix_keys(PROMPT[:8], SIZE))
    (first,) = reports.step(("r", 8), blocks=[[1, 2], [0, 3]]).cached_blocks
    assert first.block_tables == ((1, 2), (NO_BLOCK, 3))
    assert watched == [1, 2, 3]
    reports = Reported()
    reports.cached_prompts.add("r", prefix_keys(PROMPT[:8], SIZE))
    reports.step(("r", 8), blocks=[[1, 0]])
    assert found(reports.prefix_cache, PROMPT) == (8, (1, 0))


def test_what_is_reused_leaves_with_the_next_step() -> None:
    """A preempted prompt is reported again."""
    reports = Reported()
    reports.cached_prompts.add("r", prefix_keys(PROMPT[:8], SIZE))
    reports.step(("r", 8), blocks=[[5, 6]])
    reports.cached_prompts.note_reused(6)
    reports.cached_prompts.note_reused(99)
    assert reports.cached_prompts.must_report
    assert reports.step().reused == (6,)
    assert not reports.cached_prompts.must_report
    assert found(reports.prefix_cache, PROMPT) == (4, (5,))
    reports.cached_prompts.note_reused(5)
    reports.step(preempted=["r"])
    assert found(reports.prefix_cache, PROMPT) is None
    reports.step(("r", 8), blocks=[[6, 5]])
    assert found(reports.prefix_cache, PROMPT) == (8, (6, 5))


@pytest.mark.parametrize("complete", [True, False])
def test_an_answer_is_told_when_its_request_has_ended(complete: bool) -> None:
    """Unless the prompt itself was never computed."""
    reports, tokens = Reported(), PROMPT[:18]
    reports.cached_prompts.add("r", prefix_keys(PROMPT[:9], SIZE))
    reports.step(("r", 9 if complete else 4), blocks=[[1, 2, 3]])
    reports.cached_prompts.finish("r", keys=lambda: prefix_keys(tokens, SIZE), computed=17, block_ids=[[1, 2, 3, 4, 5]])
    reports.step()
    assert found(reports.prefix_cache, PROMPT) == ((16, (1, 2, 3, 4)) if complete else (4, (1,)))
    reports.cached_prompts.finish("r", keys=lambda: prefix_keys(tokens, SIZE), computed=17, block_ids=[[1, 2, 3, 4, 5]])
    assert reports.step().cached_blocks == []


# --- blocks that are given to something else before the workers have heard of them


def end_with_answer(reports: Reported, name: str = "r", tokens: Sequence[int] = PROMPT[:18]) -> None:
    """End a request: its prompt of nine tokens is in blocks 1 and 2, and its answer has filled blocks 3 and 4."""
    reports.cached_prompts.add(name, prefix_keys(tokens[:9], SIZE))
    reports.step((name, 9), blocks=[[1, 2, 3]])
    reports.cached_prompts.finish(
        name, keys=lambda: prefix_keys(tokens, SIZE), computed=17, block_ids=[[1, 2, 3, 4, 5]]
    )


@pytest.mark.parametrize("gone", [3, 4])
def test_what_an_answer_has_filled_is_not_told_of_blocks_that_are_gone_by_then(gone: int) -> None:
    """The pool gives a block to another request, which writes to it in the next step."""
    reports = Reported()
    end_with_answer(reports)
    reports.cached_prompts.note_reused(gone)
    reports.cached_prompts.add("other", prefix_keys([7] * 6, SIZE))
    step = reports.step(("other", 6), blocks=[[9, gone]])
    assert step.reused == (gone,)
    assert found(reports.prefix_cache, PROMPT) == ((8, (1, 2)) if gone == 3 else (12, (1, 2, 3)))
    assert found(reports.prefix_cache, [7] * 6) == (4, (9,))


def test_all_is_withdrawn_at_once_also_what_present_requests_go_on_to_compute() -> None:
    """As for new weights. A later request makes its blocks known again."""
    reports = Reported()
    end_with_answer(reports)
    reports.cached_prompts.add("running", prefix_keys(PROMPT[:16], SIZE))
    reports.step(("running", 4), blocks=[[5]])
    reports.cached_prompts.withdraw_all()
    assert reports.cached_prompts.must_report, "an idle engine makes a step for it"
    step = reports.step(("running", 16), blocks=[[5, 6, 7, 8]])
    assert (sorted(step.reused), step.cached_blocks) == ([1, 2, 3, 4, 5], [])
    assert found(reports.prefix_cache, PROMPT) is None
    reports.cached_prompts.note_reused(1)
    assert reports.step().reused == ()
    end_with_answer(reports, "later")
    reports.step()
    assert found(reports.prefix_cache, PROMPT) == (16, (1, 2, 3, 4))


def test_nothing_of_before_a_reset_is_told_after_it() -> None:
    """A reset gives all blocks away at once, also those of an answer that no step has told yet."""
    reports = Reported()
    end_with_answer(reports)
    for block in tuple(reports.watched):
        reports.cached_prompts.note_reused(block)
    assert reports.cached_prompts.must_report, "an idle engine makes a step for it"
    step = reports.step()
    assert step.cached_blocks == []
    assert sorted(step.reused) == [1, 2, 3, 4]
    assert found(reports.prefix_cache, PROMPT) is None
    assert repr(reports.cached_prompts) == "<CachedPrompts 0 blocks of 0 requests and former ones>"


def test_a_block_that_is_gone_in_one_group_is_there_in_the_others() -> None:
    reports = Reported(groups=2)
    reports.cached_prompts.add("r", prefix_keys(PROMPT[:4], SIZE))
    reports.step(("r", 4), blocks=[[1], [11]])
    reports.cached_prompts.finish("r", keys=lambda: prefix_keys(PROMPT, SIZE), computed=8, block_ids=[[1, 2], [11, 12]])
    reports.cached_prompts.note_reused(12)
    (left,) = reports.step().cached_blocks
    assert left.block_tables == ((2,), (NO_BLOCK,))
    assert found(reports.prefix_cache, PROMPT) == (4, ((1,), (11,)))


def test_a_block_may_be_filled_by_two_answers_before_a_step_tells_of_it() -> None:
    reports = Reported()
    reports.cached_prompts.add("other", prefix_keys([7] * 4, SIZE))
    reports.step(("other", 4), blocks=[[8]])
    end_with_answer(reports)
    reports.cached_prompts.note_reused(3)
    reports.cached_prompts.finish("other", keys=lambda: prefix_keys([7] * 8, SIZE), computed=8, block_ids=[[8, 3]])
    reports.step()
    assert found(reports.prefix_cache, PROMPT) == (8, (1, 2))
    assert found(reports.prefix_cache, [7] * 8) == (8, (8, 3))


WINDOWED = FULL, WINDOW


def windowed() -> Reported:
    """A full group and a window group, and a request `r` of four prompt tokens."""
    reports = Reported()
    reports.cached_prompts = CachedPrompts(SIZE, reports.watched.extend, null_block=0, freeing_groups=[1])
    reports.prefix_cache = cache_of(*WINDOWED)
    reports.cached_prompts.add("r", prefix_keys(PROMPT[:4], SIZE))
    return reports


def answer_beyond_its_window(*, reused: Sequence[int] = ()) -> Reported:
    """A request of four prompt tokens and an answer of 16. The window group has lost blocks 12 and 13 meanwhile."""
    reports = windowed()
    reports.step(("r", 4), blocks=[[1], [11]])
    reports.step(("r", 8), blocks=[[1, 2], [11, 12]])
    reports.step(("r", 12), blocks=[[1, 2, 3], [0, 12, 13]])
    reports.step(("r", 16), blocks=[[1, 2, 3, 4], [0, 0, 13, 14]])
    for block in reused:
        reports.cached_prompts.note_reused(block)
    reports.step(("r", 20), blocks=[[1, 2, 3, 4, 5], [0, 0, 0, 14, 15]])
    keys = prefix_keys(PROMPT[:19], SIZE)
    tables = [[1, 2, 3, 4, 5], [0, 0, 0, 14, 15]]
    reports.cached_prompts.finish("r", keys=lambda: keys, computed=19, block_ids=tables)
    reports.step()
    return reports


def test_blocks_that_an_answer_has_lost_to_its_window_are_found() -> None:
    """The whole answer needs block 13, and prefixes of it, as after a change, need earlier ones."""
    reports = answer_beyond_its_window()
    assert found(reports.prefix_cache, PROMPT) == (16, ((1, 2, 3, 4), (13, 14)))
    assert found(reports.prefix_cache, PROMPT[:15]) == (12, ((1, 2, 3), (12, 13)))
    assert found(reports.prefix_cache, PROMPT[:11]) == (8, ((1, 2), (11, 12)))


@pytest.mark.parametrize(("reused", "longest"), [([13], 8), ([12], 16), ([12, 13], 4), ([11, 12, 13], None)])
def test_blocks_that_an_answer_has_lost_and_the_pool_has_reused_are_not(reused: list[int], longest: int | None) -> None:
    reports = answer_beyond_its_window(reused=reused)
    run = match(reports.prefix_cache, PROMPT)
    assert (None if run is None else run.num_tokens) == longest
    assert repr(reports.cached_prompts).endswith("of 0 requests and former ones>")
    assert not reports.cached_prompts._place_of


def test_a_block_that_an_answer_has_twice_holds_what_came_last() -> None:
    """The window has lost a block, and the same request gets that block again."""
    reports = windowed()
    reports.step(("r", 8), blocks=[[1, 2], [11, 12]])
    reports.cached_prompts.note_reused(12)
    reports.step(("r", 16), blocks=[[1, 2, 3, 4], [0, 0, 13, 12]])
    tables = [[1, 2, 3, 4, 5], [0, 0, 0, 12, 14]]
    reports.cached_prompts.finish("r", keys=lambda: prefix_keys(PROMPT[:17], SIZE), computed=17, block_ids=tables)
    reports.step()
    assert found(reports.prefix_cache, PROMPT) == (16, ((1, 2, 3, 4), (13, 12)))
    assert found(reports.prefix_cache, PROMPT[:11]) == (4, ((1,), (11,)))


def test_an_answer_that_is_computed_again_after_a_preemption_is_found_where_it_is_then() -> None:
    reports = windowed()
    reports.step(("r", 8), blocks=[[1, 2], [11, 12]])
    reports.step(preempted=["r"])
    reports.step(("r", 12), blocks=[[1, 5, 6], [11, 15, 16]])
    tables = [[1, 5, 6, 7], [0, 0, 16, 17]]
    reports.cached_prompts.finish("r", keys=lambda: prefix_keys(PROMPT[:13], SIZE), computed=13, block_ids=tables)
    reports.step()
    assert found(reports.prefix_cache, PROMPT) == (12, ((1, 5, 6), (15, 16)))


class Pool:
    """A pool of an engine that is short of blocks, its requests, and what lies in each block."""

    def __init__(self, rng: random.Random, blocks: int) -> None:
        self.rng = rng
        self.reports = Reported()
        self.cached_prompts = self.reports.cached_prompts = CachedPrompts(SIZE, self._watch)
        self.free = list(range(blocks))
        self.watched: set[int] = set()
        self.requests: dict[str, tuple[list[int], list[int]]] = {}
        """Tokens and blocks of each request. All tokens are computed by the next step."""
        self.texts: list[list[int]] = []
        self.content: dict[int, tuple[int, ...]] = {}
        """All tokens up to the end of what lies in a block."""

    def _watch(self, blocks: Sequence[int]) -> None:
        self.watched.update(blocks)

    def _on_reuse(self, block: int) -> None:
        if block in self.watched:
            self.watched.remove(block)
            self.cached_prompts.note_reused(block)

    def _continued(self, tokens: Sequence[int], count: int) -> list[int]:
        return [*tokens, *(self.rng.randrange(3) for _ in range(count))]

    def arrive(self, name: str) -> None:
        """Let a request arrive. Its prompt may continue the answer of another request. It gets its blocks at once."""
        tokens = self._continued(self.rng.choice([[], *self.texts]), self.rng.randrange(1, 9))
        count = -(-len(tokens) // SIZE) + 2
        if count > len(self.free):
            return
        blocks = [self.free.pop(self.rng.randrange(len(self.free))) for _ in range(count)]
        for block in blocks:
            self._on_reuse(block)
        self.cached_prompts.add(name, prefix_keys(tokens, SIZE))
        self.requests[name] = tokens, blocks

    def step(self) -> None:
        """All prompts are computed that are not."""
        step = Step()
        scheduled = {name: len(tokens) for name, (tokens, _) in self.requests.items()}
        tables = {name: [blocks] for name, (_, blocks) in self.requests.items()}
        self.cached_prompts.build_step(step, scheduled, preempted=(), block_ids=lambda name: tables[name])
        self.reports.prefix_cache.remove_reused(step.reused)
        for tokens, blocks in self.requests.values():
            self._write(tokens, blocks)
        self.reports.prefix_cache.add(step.cached_blocks, None)

    def _write(self, tokens: list[int], blocks: list[int]) -> None:
        for at, block in enumerate(blocks):
            self.content[block] = tuple(tokens[: (at + 1) * SIZE])

    def end(self) -> None:
        """A request has ended, with an answer or without, and its blocks are free."""
        name = self.rng.choice(list(self.requests))
        tokens, blocks = self.requests.pop(name)
        text = self._continued(tokens, self.rng.choice((0, 2 * SIZE)))
        self._write(text, blocks)
        computed = len(text) - 1
        self.cached_prompts.finish(
            name, keys=lambda: prefix_keys(text[:computed], SIZE), computed=computed, block_ids=[blocks]
        )
        self.free += blocks
        self.texts.append(text[: 6 * SIZE])

    def reset(self) -> None:
        """Reset the cache: after the next step no earlier block may be found."""
        for block in tuple(self.watched):
            self._on_reuse(block)
        self.content.clear()

    def check(self) -> int:
        """Check that every found block holds its tokens. Return the number of found tokens."""
        tokens = 0
        for text in self.texts:
            run = match(self.reports.prefix_cache, text)
            for at, block in enumerate(() if run is None else run.block_ids):
                assert self.content.get(block) == tuple(text[: (at + 1) * SIZE]), f"block {block} of {text}"
            tokens += 0 if run is None else run.num_tokens
        return tokens


@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_pool_does_no_block_is_named_that_holds_something_else(
    seed: int,
) -> None:
    rng = random.Random(seed)
    pool, there = Pool(rng, 30), 0
    for nth in range(100):
        for twin in range(rng.randrange(4)):
            if pool.requests and rng.random() < 0.5:
                pool.end()
            elif not pool.requests and rng.random() < 0.1:
                pool.reset()
            else:
                pool.arrive(f"r{nth}.{twin}")
        pool.step()
        there += pool.check()
    assert there > 500, "hardly anything was found: this test has shown nothing"
