"""Small things that several test modules need."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import torch

from kvflow import CacheLayout, Runtime, RuntimeState, Ticket
from kvflow.core.ticket import RankLease


def small_cache(
    *, num_blocks: int = 8, layers: int = 2, block_size: int = 4, device: str = "cpu", fill: float = 0.0
) -> tuple[dict[str, torch.Tensor], CacheLayout]:
    """A cache of a few kilobytes, K and V stacked first, HND."""
    shape = (2, num_blocks, 2, block_size, 8)
    kv_caches = {f"layers.{index}": torch.full(shape, fill, device=device) for index in range(layers)}
    return kv_caches, CacheLayout.infer(kv_caches, order="HND", block_size=block_size)


async def leases_ended(runtime: Runtime) -> None:
    """Wait until the blocks of ended leases are back; a lease that a test left open fails it."""
    if runtime._supervisor.cache is not None and runtime.state is not RuntimeState.CLOSED:
        async with asyncio.timeout(1.0):
            await runtime._supervisor.cache.serving.drained()


def altered(ticket: Ticket, **changes: Any) -> Ticket:
    """A ticket with other values, those of its first rank included."""
    of_rank = {name: changes.pop(name) for name in list(changes) if name in RankLease.__struct_fields__}
    first = msgspec.structs.replace(ticket.first, **of_rank)
    return msgspec.structs.replace(ticket, ranks=(first, *ticket.ranks[1:]), **changes)
