"""A cache with a tensor that has moved since it was registered: nothing is offered or read by the old addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from kvflow import Lease, ServeRequest
from kvflow.core.cache.tensors import TensorAddresses
from kvflow.core.protocol.proof import SEAL_SIZE_BYTES
from kvflow.errors import COMPUTE, LayoutError
from kvflow.testing import InprocPair
from tests.support.growing_pairs import BLOCKS, TAKEN, opened, pair_of
from tests.support.pairs import host_of
from tests.support.tests_support import each, in_virtual_time, until

Move = Callable[[torch.Tensor], object]


def assign_data(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


MOVES: dict[str, Move] = {
    "share_memory_": torch.Tensor.share_memory_,
    "as a queue of torch.multiprocessing does": lambda tensor: tensor.untyped_storage()._share_fd_cpu_(),
    "set_": lambda tensor: tensor.set_(tensor.clone()),
    ".data": assign_data,
    "resize_ to more": lambda tensor: tensor.resize_(1 << 20),
    "resize_ to nothing": lambda tensor: tensor.resize_(0),
    "a larger storage": lambda tensor: tensor.untyped_storage().resize_(1 << 20),
    "an empty storage": lambda tensor: tensor.untyped_storage().resize_(0),
}
MOVED = r"layer 'layers\.1': its tensor has moved since the cache was registered, from 0x\w+ to 0x\w+, .*register again"


def growing(pair: InprocPair, block_ids: Sequence[int] = BLOCKS, name: str = "req") -> Lease:
    """A lease for four blocks of tokens. The given blocks except the last are computed."""
    computed = 4 * (len(block_ids) - 1)
    request = ServeRequest(name, block_ids, num_tokens=16, computed_tokens=computed, extends=len(block_ids) < 4)
    return pair.producer.runtime.serve_blocks(request)


@each("how", list(MOVES))
@in_virtual_time
async def test_a_moved_tensor_is_named_and_nothing_is_read_or_offered(how: str) -> None:
    async with pair_of() as pair:
        lease = pair.offer(BLOCKS)
        MOVES[how](pair.consumer.kv_caches["layers.1"])
        with pytest.raises(LayoutError, match=f"request 'req' from 'producer': {MOVED}"):
            await pair.consumer.runtime.load_blocks(pair.wanted(lease, TAKEN))
        assert pair.consumer.runtime.statistics().transport.bytes_read == 0
        assert await lease.revoke() == "revoked"
        MOVES[how](pair.producer.kv_caches["layers.1"])
        with pytest.raises(LayoutError, match=MOVED):
            pair.offer(BLOCKS)


@each("side", ["producer", "consumer"])
@in_virtual_time
async def test_once_it_is_registered_again_all_is_well(side: str) -> None:
    async with pair_of() as pair:
        engine = getattr(pair, side)
        engine.kv_caches["layers.0"].share_memory_()
        await engine.runtime.unregister()
        await engine.runtime.register_kv_caches(engine.kv_caches, engine.layout)
        await pair.consumer.runtime.load_blocks(pair.wanted(pair.offer(BLOCKS), TAKEN))
        pair.assert_loaded(TAKEN, BLOCKS)


@in_virtual_time
async def test_a_lease_does_not_grow_in_a_cache_that_has_moved() -> None:
    async with pair_of() as pair:
        lease, longer = growing(pair), growing(pair, [6], "longer")
        MOVES["set_"](pair.producer.kv_caches["layers.1"])
        calls = (partial(lease.advance, 14), lease.complete, partial(longer.advance, 2), partial(longer.extend, [7]))
        for call in calls:
            with pytest.raises(LayoutError, match=MOVED):
                call()
        assert longer.block_ids == (6,)
        assert (await lease.revoke(), await longer.revoke()) == ("revoked", "revoked")


@each("computed", [0, 12])
@in_virtual_time
async def test_a_load_that_waits_for_tokens_reads_no_more_once_its_cache_has_moved(computed: int) -> None:
    async with pair_of() as pair:
        lease = opened(pair)
        lease.advance(computed)
        load = pair.consumer.runtime.start_load(pair.wanted(lease, TAKEN))
        if computed:
            assert await load.progressed(computed - 1)
        else:
            await until(lambda: load.phase == COMPUTE)
        tensor, landed = pair.consumer.kv_caches["layers.1"], pair.consumer.runtime.statistics().transport.bytes_read
        kept = tensor.view(-1)
        MOVES["set_"](tensor)
        lease.complete()
        with pytest.raises(LayoutError, match=MOVED):
            await load
        assert load.safe
        assert pair.consumer.runtime.statistics().transport.bytes_read - landed <= SEAL_SIZE_BYTES
        assert len(kept)
        lease.revoke()


@in_virtual_time
async def test_host_buffers_stay_where_they_are_too() -> None:
    """An engine's own function for copies gets them."""
    async with pair_of("always") as pair:
        (staging,) = host_of(pair.producer.runtime).memory.staging
        buffers, _ = staging.layers[0]
        MOVES["set_"](buffers["layers.1"])
        with pytest.raises(LayoutError, match=MOVED):
            pair.offer(BLOCKS)


def test_each_tensor_is_named_and_those_without_an_address_are_none() -> None:
    pair, slots = (torch.zeros(4), torch.zeros(4)), torch.zeros(4, device="meta")
    addresses = TensorAddresses([("kv", pair), ("state", slots), ("kv", pair)])
    addresses.check()
    assert len(addresses.tensors) == 2
    pair[1].set_(torch.zeros(4))
    with pytest.raises(LayoutError, match=r"layer 'kv'\[1\]: its tensor has moved"):
        addresses.check()
