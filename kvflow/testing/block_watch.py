"""Watch of an engine's own allocator: who has which block, and where it was taken and freed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any
from unittest import mock

from kvflow.checks import counted
from kvflow.core.plan.topology import Rank
from kvflow.runtime.runtime import Runtime
from kvflow.testing.watch import calling_line, checked_at_end, raise_first


class BlockWatch:
    """The watch that `watch_blocks` opens: who has taken which block."""

    def __init__(self, runtime: Runtime, free_blocks: Callable[[], Collection[int]]) -> None:
        self._runtime = runtime
        self._free_blocks = free_blocks
        self._all = frozenset(free_blocks())
        self._taken: dict[int, str] = {}
        self._found: list[str] = []

    def take(self, block_ids: Iterable[int]) -> None:
        """Note that the allocator gives blocks out.

        Args:
            block_ids: Those it gives out.

        Raises:
            AssertionError: One is taken already, in use by the runtime, or was not free when the watch began.
        """
        where = calling_line(__file__)
        for block in block_ids:
            if block in self._taken:
                self._fail(block, f"was given out twice: at {self._taken[block]} and at {where}")
            elif block not in self._all:
                self._fail(block, f"was given out at {where}; it was not free when the watch began")
            elif use := self._use_of(block):
                self._fail(block, f"was given out at {where} while it is {use}")
            self._taken[block] = where

    def give_back(self, block_ids: Iterable[int]) -> None:
        """Note that the allocator gets blocks back.

        Args:
            block_ids: Those it gets.

        Raises:
            AssertionError: One is free already, or in use by the runtime; or something was found before.
        """
        where = calling_line(__file__)
        for block in block_ids:
            taken = self._taken.pop(block, None)
            if taken is None:
                self._fail(block, f"was freed at {where}, but nobody had it: it was freed before")
            elif use := self._use_of(block):
                self._fail(block, f"was freed at {where} while it is {use}; it was taken at {taken}")
        raise_first(self._found)

    def assert_nothing_found(self) -> None:
        """Assert that nothing was wrong so far with what was taken and freed.

        Raises:
            AssertionError: Something was; it says what was found first.
        """
        raise_first(self._found)

    def assert_conserved(self) -> None:
        """Assert that free and taken blocks are all blocks, each once, and the runtime uses taken ones. Always legal.

        Raises:
            AssertionError: A block is neither, or both, or used while it is free; or something was found before.
        """
        raise_first(self._found)
        free = sorted(self._free_blocks())
        for block in sorted(self._all):
            count = free.count(block) + (block in self._taken)
            if count != 1:
                times = counted(free.count(block), "time")
                self._fail(block, f"is free {times}, taken at {self._taken.get(block, 'no place')}")
            if block not in self._taken and (use := self._use_of(block)):
                self._fail(block, f"is free, but {use}")

    def assert_all_free(self) -> None:
        """Assert that every block has come back.

        Raises:
            AssertionError: One has not, and where it was taken; or as `assert_conserved`.
        """
        self.assert_conserved()
        for block, where in sorted(self._taken.items()):
            self._fail(block, f"was taken at {where} and never freed, as {counted(len(self._taken) - 1, 'other')}")

    def _use_of(self, block: int) -> str:
        cache = self._runtime._supervisor.held
        return cache.ledger.use_of(block) if cache else ""

    def _fail(self, block: int, what: str) -> None:
        config = self._runtime.config
        self._found.append(f"engine {config.engine_id!r} ({Rank.of(config)}): block {block} {what}")
        raise_first(self._found)


@contextlib.contextmanager
def watch_blocks(
    runtime: Runtime, allocator: object, *, take: str, free: str, free_blocks: Callable[[], Collection[int]]
) -> Iterator[BlockWatch]:
    """Watch that each block of an engine's allocator is free or taken, once, and none is freed under a lease or a load.

    Args:
        runtime: Whose leases, loads and quarantines the blocks may be in.
        allocator: The object that gives blocks out.
        take: The name of its method that returns the ids of blocks it gives out.
        free: The name of its method that gets them back: its first argument.
        free_blocks: Returns those that are free now. All of the allocator's must be, or are not watched.

    Returns:
        A context manager; its block gets the watch, and is how long the allocator is watched.

    Raises:
        AssertionError: Where blocks are given out twice, freed twice, or freed while the runtime uses them; at the end
            for that, too, and for blocks that were not freed. It names the block and the lines that took and freed it.
    """
    watch = BlockWatch(runtime, free_blocks)
    give_out, get_back = getattr(allocator, take), getattr(allocator, free)

    def take_watched(*arguments: Any, **options: Any) -> Any:
        given = give_out(*arguments, **options)
        watch.take(given or ())
        return given

    def free_watched(block_ids: Iterable[int], *arguments: Any, **options: Any) -> Any:
        freed = list(block_ids)
        watch.give_back(freed)
        return get_back(freed, *arguments, **options)

    final = checked_at_end(watch.assert_all_free, watch.assert_nothing_found)
    with mock.patch.object(allocator, take, take_watched), mock.patch.object(allocator, free, free_watched), final:
        yield watch
