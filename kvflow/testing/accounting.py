"""Assertions about a runtime's counts of blocks, leases and loads, for a runtime at work, idle, or closed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kvflow.checks import counted
from kvflow.runtime.producer.lease import Lease
from kvflow.runtime.runtime import Runtime
from kvflow.runtime.statistics import RuntimeStatistics


def assert_conserved(runtime: Runtime, leases: Collection[Lease]) -> None:
    """Assert that a runtime's free, leased, in-flight and quarantined blocks add up to all blocks of the KV cache.

    Each leased block must belong to one of `leases`, and each quarantined block to one of `Runtime.quarantines`. This
    may be called at any time.

    Args:
        runtime: The runtime to check.
        leases: All leases of the runtime that may still be open; ended leases are ignored.

    Raises:
        AssertionError: A count is wrong.
    """
    statistics = runtime.statistics()
    blocks, serving, loading = statistics.blocks, statistics.serving, statistics.loading
    if blocks is None or serving is None or loading is None:
        assert not leases, f"{counted(len(leases), 'lease')} of a runtime that has no cache"
        return
    accounted = blocks.free + blocks.leased + blocks.in_flight + blocks.quarantined
    assert accounted == blocks.total, f"accounted for are {accounted} of {counted(blocks.total, 'block')}: {blocks}"
    leased = _entries(runtime, [lease for lease in leases if not lease.done])
    assert blocks.leased == len(leased), f"leased: {counted(blocks.leased, 'block')}, by open leases {sorted(leased)}"
    known = sum(not lease.done for lease in leases)
    assert serving.open_leases == known, f"open: {counted(serving.open_leases, 'lease')}, known: {known}"
    quarantined = _entries(runtime, runtime.quarantines)
    assert blocks.quarantined == len(quarantined), f"{blocks}, in quarantine are {sorted(quarantined)}"
    assert loading.open_loads or not blocks.in_flight, f"blocks in flight without a load: {blocks}"
    under_way = loading.open_loads + len(runtime.quarantines)
    assert under_way or not statistics.transport.open_reads, f"reads without a load: {statistics.transport}"


class _Holder(Protocol):
    """An object that holds blocks: a lease, load or restore."""

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]: ...


def _entries(runtime: Runtime, holders: Collection[_Holder]) -> set[int]:
    """Return the numbers of all blocks that `holders` hold. The blocks of all groups are numbered in one sequence."""
    registered = runtime._supervisor.registered
    assert registered is not None, "there are statistics of blocks"
    ledger = registered.host.resources.ledger
    return {entry for holder in holders for entry in ledger.entries(holder.block_tables).tolist()}


def assert_quiet(statistics: RuntimeStatistics) -> None:
    """Assert that a runtime is idle: all blocks are free, and there is no load, lease, quarantine or read.

    Args:
        statistics: The result of `Runtime.statistics()`.

    Raises:
        AssertionError: The runtime is not idle.
    """
    assert statistics.buffers_used == 0, f"buffers in use: {statistics.buffers_used}"
    blocks, serving, loading = statistics.blocks, statistics.serving, statistics.loading
    if blocks is not None:
        assert blocks.free == blocks.total, f"blocks in use: {blocks}"
    if serving is not None:
        assert serving.open_leases == 0, f"open leases: {serving}"
    if loading is not None:
        assert (loading.open_loads, loading.quarantines) == (0, 0), f"open loads: {loading}"
        assert (sum(loading.in_flight), loading.waiting_reads, loading.peers) == (0, 0, {}), f"in flight: {loading}"
    for name, part in statistics.parts.items():
        assert not part.open_requests, f"open requests of {name}: {part}"
    assert statistics.transport.open_reads == 0, f"open reads: {statistics.transport}"


def assert_closed(statistics: RuntimeStatistics) -> None:
    """Assert that a closed runtime left nothing behind: no task, thread, peer, registered memory or read.

    Args:
        statistics: The result of `Runtime.statistics()` after closing.

    Raises:
        AssertionError: Something was left behind, or `assert_quiet` fails.
    """
    assert_quiet(statistics)
    transport = statistics.transport
    left = (statistics.tasks, transport.open_peers, transport.open_spans, transport.open_threads, len(statistics.peers))
    assert left == (0, 0, 0, 0, 0), f"left behind (tasks, peers, spans, threads, peer objects): {left}"
    assert transport.mapped_peers == 0, f"memory is still mapped: {transport}"
