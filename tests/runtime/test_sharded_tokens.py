"""Decode context parallelism: the tokens of a block on several ranks. Its requirements, and its errors.

`test_topologies` and `growing/test_growing` compare the bytes, for any numbers of ranks on both sides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import host_of
from tests_support import PATIENT, in_virtual_time

from kvflow import (
    CacheGroup,
    CacheLayout,
    Config,
    Lease,
    LeaseOutcome,
    LoadRequest,
    Part,
    Runtime,
    ServeRequest,
    Ticket,
    merge_tickets,
)
from kvflow.core.protocol import codec
from kvflow.core.protocol.ticket import with_changes
from kvflow.errors import ConfigError, PeerIncompatible, TransferFailed
from kvflow.prefix import Prefixes
from kvflow.runtime.load.requests import Verification
from kvflow.runtime.world import World
from kvflow.stock import StockPeers
from kvflow.storage import Storage
from kvflow.testing import InprocCluster
from kvflow.verify.digest_request import DigestPart
from kvflow.verify.lease_digests import digest_spec_of

BLOCKS, SIZE = 6, 4
INPROC = replace(PATIENT, transport="inproc")


def latents(fill: float = 0.0, **options: Any) -> list[CacheGroup]:
    """One rank's cache: each of its blocks has `SIZE` of the tokens that a block id stands for."""
    layers = {"layers.0": torch.full((BLOCKS, SIZE, 2), fill)}
    layout = CacheLayout.infer(layers, order="NHD", block_size=SIZE)
    return [CacheGroup("kv", layers, layout, **{"kind": "sharded", **options})]


async def open_ranks(
    stack: AsyncExitStack, world: World, engine_id: str, tp_size: int, config: Config = INPROC, **options: Any
) -> list[tuple[Runtime, torch.Tensor]]:
    """All ranks of an engine, each with its number in all its tokens, from 1."""
    ranks = []
    for rank in range(tp_size):
        given = replace(config, engine_id=engine_id, listen="tcp://127.0.0.1:0", tp_rank=rank, tp_size=tp_size)
        runtime = await stack.enter_async_context(Runtime(given, world=world))
        groups = latents(rank + 1.0, **options)
        await runtime.register_kv_caches(groups)
        (tensor,) = groups[0].layers.values()
        assert isinstance(tensor, torch.Tensor)
        ranks.append((runtime, tensor))
    return ranks


def serve(ranks: Sequence[tuple[Runtime, torch.Tensor]], block_ids: Sequence[int], num_tokens: int) -> list[Lease]:
    return [runtime.serve_blocks(ServeRequest("req", block_ids, num_tokens)) for runtime, _ in ranks]


def merged(leases: Sequence[Lease]) -> Ticket:
    return merge_tickets([lease.ticket for lease in leases])


@in_virtual_time
async def test_a_rank_that_holds_no_token_of_a_short_prompt_reads_nothing_and_says_that_it_is_done() -> None:
    world = InprocCluster().world()
    async with AsyncExitStack() as stack:
        producers = await open_ranks(stack, world, "prefill", 2)
        consumers = await open_ranks(stack, world, "decode", 2)
        leases = serve(producers, [3], num_tokens=3)
        assert leases[0].ticket.offered_tokens == 3
        request = LoadRequest("req", merged(leases), [5])
        reports = [await runtime.load_blocks(request) for runtime, _ in consumers]
        assert [(one.tokens, one.bytes, one.blocks, len(one.sources)) for one in reports] == [
            (3, 24, 1, 1),
            (0, 0, 1, 0),
        ]
        assert [await lease for lease in leases] == [LeaseOutcome.READ] * 2
        (_, first), (_, second) = consumers
        assert first[5, :, 0].tolist() == [1, 1, 1, 1]
        assert second.unique().tolist() == [2], "as it was"


@in_virtual_time
async def test_a_block_id_stands_for_the_tokens_of_all_ranks() -> None:
    """In offers, cached prefixes and loads: 20 tokens are 3 blocks of 8, and the reader has the first block."""
    world = InprocCluster().world()
    async with AsyncExitStack() as stack:
        producers = await open_ranks(stack, world, "prefill", 2)
        ((reader, cache),) = await open_ranks(stack, world, "decode", 1, kind="full")
        cache[:] = 0
        leases = serve(producers, [4, 0, 2], num_tokens=20)
        request = LoadRequest("req", merged(leases), [3, 1, 2], cached_tokens=8)
        report = await reader.load_blocks(request)
        assert (report.tokens, len(report.sources)) == (12, 2)
        assert [cache[block, :, 0].tolist() for block in (3, 1, 2)] == [[1] * 4, [2] * 4, [1] * 4]
        assert [await lease for lease in leases] == [LeaseOutcome.READ] * 2


@pytest.mark.parametrize("part", ["prefix", "stock", "storage"])
async def test_parts_are_refused_when_the_cache_is_registered(part: str, tmp_path: Path) -> None:
    made: dict[str, Callable[[], Part]] = {
        "prefix": Prefixes,
        "stock": lambda: StockPeers(hashes=["0" * 64]),
        "storage": lambda: Storage(tmp_path / "store"),
    }
    config = replace(INPROC, engine_id="engine", listen="tcp://127.0.0.1:0")
    async with Runtime(config, parts=[made[part]()]) as runtime:
        with pytest.raises(ConfigError, match=f"sharded tokens .* works without parts, this runtime has {part}"):
            await runtime.register_kv_caches(latents())


@in_virtual_time
async def test_sharded_tokens_are_not_compared_by_checksums() -> None:
    """A load that has to be fails before it reads; a load that may be says that it is not."""
    world = InprocCluster().world()
    async with AsyncExitStack() as stack:
        producers = await open_ranks(stack, world, "prefill", 2)
        config = replace(INPROC, verify_share=1.0)
        ((reader, cache),) = await open_ranks(stack, world, "decode", 1, config, kind="full")
        cache[:] = 0
        leases = serve(producers, [3], num_tokens=8)
        request = LoadRequest("req", merged(leases), [1, 0])
        with pytest.raises(TransferFailed, match="it cannot be verified: tokens are sharded over ranks"):
            await reader.load_blocks(replace(request, verify=True))
        assert not cache.any()
        report = await reader.load_blocks(request)
        assert report.verification is Verification.UNVERIFIED
        assert cache[[1, 0], :, 0].tolist() == [[1] * 4, [2] * 4]
        assert [await lease for lease in leases] == [LeaseOutcome.READ] * 2

        asked = DigestPart(part="", layers=(0,), head=0, heads=1, model_heads=1, start=4, stop=8)
        with pytest.raises(codec.WireError, match="the tokens of this rank are sharded"):
            digest_spec_of(host_of(producers[0][0]).context.local, asked, np.array([3]))


@in_virtual_time
async def test_a_ticket_that_does_not_say_so_is_refused() -> None:
    """Without the group's kind a reader would take one rank's tokens for those of the prompt."""
    world = InprocCluster().world()
    async with AsyncExitStack() as stack:
        producers = await open_ranks(stack, world, "prefill", 2)
        ((reader, _),) = await open_ranks(stack, world, "decode", 1, kind="full")
        leases = serve(producers, [3], num_tokens=8)
        for changes in ({"groups": ()}, {"groups": (), "block_size": SIZE}):
            ticket = with_changes(merged(leases), **changes)
            with pytest.raises(PeerIncompatible, match=r"groups: the ticket says \[\], the rank \['kv \(sharded\)'\]"):
                await reader.load_blocks(LoadRequest("req", ticket, [1, 2] if len(changes) == 1 else [1]))
        for lease in leases:
            lease.revoke()
        await asyncio.gather(*leases)
