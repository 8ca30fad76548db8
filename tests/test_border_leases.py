"""The verbs of leases at the border, as `test_border.py` has those of runtimes: what cannot be is refused in a line.

A lease to which something was said that cannot be is as it was: it goes on, and its load ends as ever.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from pairs import EnginePair, virtual_pair
from tests_support import each, in_virtual_time

from kvflow import Lease, LeaseOutcome, ServeRequest, blocking
from kvflow.errors import InvalidInput

BLOCKS, TOKENS = [1, 2, 3, 5], 16


def wrong_for_anything() -> list[Any]:
    """Right for no parameter of a verb of a lease that has two of its four blocks and promises a payload."""
    odd: list[Any] = [object(), int, 1j, -1, -1.5, float("nan"), float("inf")]
    lists: list[Any] = [[None], (object(),), [[[]]], ["\ud800"], [1.0], [True], [-1], [3, 3], [1], [99]]
    sizes: list[Any] = [1 << 63, 1 << 70, 10**400, 1e300, [1 << 62], [0] * 100_000, b"x" * 100_000, bytearray(b"x")]
    arrays: list[Any] = [torch.tensor([3.0]), np.array([[1]]), np.array([1 << 63], np.uint64), torch.tensor(True)]
    return [*odd, *lists, *sizes, *arrays, "\ud800", {"kv": [1 << 70]}, {"\ud800": [3]}, {"no": [3]}, [[3], [5]], True]


FIRST = {"advance": {"num_tokens": 4}}
"""Other required arguments of a verb."""
VERBS = [
    (method, parameter)
    for method in ("advance", "complete", "extend", "fail", "restart")
    for parameter in list(inspect.signature(getattr(Lease, method)).parameters)[1:]
]


def test_all_verbs_are_looked_at() -> None:
    """Those without a parameter have nothing that could be wrong."""
    for kind in (Lease, blocking.Lease):
        takes = {name for name, _ in VERBS} | ({"wait"} if kind is blocking.Lease else set())
        for name, method in inspect.getmembers(kind, inspect.isroutine):
            if not name.startswith("_") and name not in takes:
                assert len(inspect.signature(method).parameters) == 1, f"{kind.__name__}.{name}"


@asynccontextmanager
async def growing() -> AsyncIterator[tuple[EnginePair, Lease]]:
    """A lease that has some of its blocks, and its load; both end well."""
    async with virtual_pair() as pair:
        request = ServeRequest("req", BLOCKS[:2], TOKENS, computed_tokens=0, extends=True, payload=True)
        lease = pair.writer.serve_blocks(request)
        load = pair.start(lease, [0, 4, 6, 7])
        yield pair, lease
        lease.extend(BLOCKS[2:])
        lease.complete(b"token")
        report = await load
        assert (report.blocks, report.payload, await lease) == (4, b"token", LeaseOutcome.READ)


@each(("method", "parameter"), VERBS)
@in_virtual_time
async def test_what_cannot_be_said_of_a_lease_changes_nothing(method: str, parameter: str) -> None:
    async with growing() as (pair, lease):
        for value in wrong_for_anything():
            before = (lease.block_tables, lease.state, pair.producer_blocks)
            with pytest.raises(InvalidInput) as caught:
                getattr(lease, method)(**{**FIRST.get(method, {}), parameter: value})
            assert (lease.block_tables, lease.state, pair.producer_blocks) == before
            assert str(caught.value).isprintable()
            assert "'req'" in str(caught.value)
            assert len(str(caught.value)) < 500


LATE: dict[str, list[Any]] = {
    "advance": [4],
    "extend": [[2]],
    "complete": [],
    "fail": ["again"],
    "restart": [9.0],
    "revoke": [],
}


@in_virtual_time
async def test_a_lease_that_is_over_hears_nothing() -> None:
    """Valid calls have no effect."""
    async with virtual_pair() as pair:
        for end in ("revoke", "fail"):
            lease = pair.writer.serve_blocks(ServeRequest(end, BLOCKS[:1], TOKENS, computed_tokens=0))
            getattr(lease, end)()
            outcome = await lease
            for verb, said in LATE.items():
                getattr(lease, verb)(*said)
            await asyncio.sleep(0)
            assert await lease is outcome
            assert pair.producer_blocks.free == pair.producer_blocks.total
