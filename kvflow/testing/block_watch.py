"""Test tool that watches an engine's block allocator, and records the line of code that took each block.

An engine must not free the blocks of a load that was cancelled or has failed before `Load.settled()` returns. In a test
such an error has no effect as long as reads end within `Config.cancel_grace_s`. So the loads of a watched engine do not
wait for their reads: their blocks are always quarantined for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any
from unittest import mock

from kvflow.checks import counted
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.states import TransferState
from kvflow.runtime.load.flight import Flight
from kvflow.runtime.runtime import Runtime
from kvflow.testing.watch import calling_line, checked_at_end, raise_first

_QUARANTINE_S = 0.05
"""Minimum seconds for which a watched load that was cancelled or has failed keeps its blocks quarantined."""


class BlockWatch:
    """Watches an engine's block allocator, and records the line of code that took each block. See `watch_blocks`."""

    def __init__(self, runtime: Runtime, free_blocks: Callable[[], Collection[int]]) -> None:
        self._runtime = runtime
        self._free_blocks = free_blocks
        self._all = frozenset(free_blocks())
        self._taken: dict[int, str] = {}
        self._found: list[str] = []

    def take(self, block_ids: Iterable[int]) -> None:
        """Record that the allocator has given out blocks. `watch_blocks` calls this after the allocator's method.

        Args:
            block_ids: Ids of the blocks that were given out.

        Raises:
            AssertionError: A block is already taken, in use by the runtime, or was not free when the watch began.
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
        """Record that blocks are given back. `watch_blocks` calls this before the allocator takes them back.

        Args:
            block_ids: Ids of these blocks.

        Raises:
            AssertionError: A block is already free, or in use by the runtime; or an earlier call has found a fault.
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
        """Assert that no call of `take` or `give_back` has found a fault so far.

        Raises:
            AssertionError: A call has found a fault.
        """
        raise_first(self._found)

    def assert_conserved(self) -> None:
        """Assert that each watched block is either free or taken, and that the runtime uses only taken blocks.

        This may be called at any time.

        Raises:
            AssertionError: A block is both free and taken, or neither, or is free while the runtime uses it; or a call
                of `take` or `give_back` has found a fault.
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
        """Call `assert_conserved`, then assert that every taken block has been given back.

        Raises:
            AssertionError: A block was not given back, and the message names the line that took it; or
                `assert_conserved` fails.
        """
        self.assert_conserved()
        for block, where in sorted(self._taken.items()):
            self._fail(block, f"was taken at {where} and never freed, as {counted(len(self._taken) - 1, 'other')}")

    def _use_of(self, block: int) -> str:
        registered = self._runtime._supervisor.registered
        if registered is None:
            return ""
        tables = [table for load in registered.loader._loads for table in load.tables]  # some may not read yet
        wanted = any(block in table for table in tables)
        return registered.host.resources.ledger.use_of(block) or ("being loaded" if wanted else "")

    def _fail(self, block: int, what: str) -> None:
        config = self._runtime.config
        self._found.append(f"engine {config.engine_id!r} ({Rank.of(config)}): block {block} {what}")
        raise_first(self._found)


@contextlib.contextmanager
def watch_blocks(
    runtime: Runtime, allocator: object, *, take: str, free: str, free_blocks: Callable[[], Collection[int]]
) -> Iterator[BlockWatch]:
    """Watch an engine's block allocator for blocks that are given out twice, freed twice, freed in use, or never freed.

        with watch_blocks(runtime, pool, take="allocate", free="release", free_blocks=lambda: pool.free):
            ...  # run the engine; at the end every block must be free again

    If a load of the runtime is cancelled or fails while it reads, its blocks are quarantined for at least 0.05 s, as on
    a network where reads take longer than Config.cancel_grace_s.

    Args:
        runtime: The engine's runtime. Blocks of its leases, loads and quarantines are in use.
        allocator: The object that gives out blocks.
        take: Name of the allocator's method that gives out blocks and returns their ids.
        free: Name of the allocator's method that takes blocks back; its first argument is their ids.
        free_blocks: Function that returns the ids of the free blocks. Only blocks that are free at the beginning are
            watched, so begin when all are free.

    Returns:
        A context manager that yields the watch. The allocator is watched until the `with` block ends.

    Raises:
        AssertionError: A block was given out twice, freed twice, or freed while the runtime used it: raised by the
            faulty call, and again at the end of the `with` block; or a block was not freed by then. The message names
            the block and the lines that took and freed it.
    """
    watch = BlockWatch(runtime, free_blocks)
    give_out, get_back = getattr(allocator, take), getattr(allocator, free)

    def take_watched(*arguments: Any, **options: Any) -> Any:
        taken = give_out(*arguments, **options)
        watch.take(taken or ())
        return taken

    def free_watched(block_ids: Iterable[int], *arguments: Any, **options: Any) -> Any:
        freed = list(block_ids)
        watch.give_back(freed)
        return get_back(freed, *arguments, **options)

    final = checked_at_end(watch.assert_all_free, watch.assert_nothing_found)
    with (
        mock.patch.object(allocator, take, take_watched),
        mock.patch.object(allocator, free, free_watched),
        final,
        _quarantine_stopped_loads(runtime),
    ):
        yield watch


@contextlib.contextmanager
def _quarantine_stopped_loads(runtime: Runtime) -> Iterator[None]:
    """Return a context manager: loads of `runtime` that stop while they read quarantine their blocks.

    One more read than such a load has posted counts as under way, for `_QUARANTINE_S`.
    """
    stop = Flight.stop

    async def stop_late(flight: Flight, grace_s: float) -> bool:
        registered = runtime._supervisor.registered
        watched = registered is not None and flight._resources is registered.host.resources
        if not watched or flight.state is not TransferState.READING:
            return await stop(flight, grace_s)
        flight._under_way += 1

        def end() -> None:
            flight._under_way -= 1
            flight.nudge()

        asyncio.get_running_loop().call_later(_QUARANTINE_S, end)
        return await stop(flight, 0.0)

    with mock.patch.object(Flight, "stop", stop_late):
        yield
