"""SGLang's pools on a device of another kind than CUDA: they are given as addresses, and staged."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvflow import LoadRequest, Runtime, ServeRequest
from kvflow.errors import ConfigError
from kvflow.runtime.world import World
from kvflow.sglang.pools import Buffers
from kvflow.transport.device.foreign_memory import bytes_at
from tests.accelerator.sides import HERE, OURS, THEIRS, THERE, Site
from tests.accelerator.standin import StandIn
from tests.support.tests_support import PATIENT, until

pytestmark = pytest.mark.usefixtures("no_blocking_calls")

PAGES, PAGE, HEADS, HEAD_BYTES, BUFFERS = 16, 4, 2, 16, 4
ITEM = PAGE * HEADS * HEAD_BYTES


def pool(tensors: list[torch.Tensor]) -> Buffers:
    """The KV pool of a model of two layers, as SGLang describes it: K of both, then V."""
    return Buffers(
        name="kv",
        pointers=[tensor.data_ptr() for tensor in tensors],
        sizes=[tensor.nbytes for tensor in tensors],
        item_sizes=[ITEM] * BUFFERS,
        layers=[0, 2, 1, 3],
        format="bfloat16.plain",
        tokens=PAGE,
        heads=HEADS,
        cut=True,
    )


async def test_a_hand_over_between_pools(standin: StandIn) -> None:
    generator = torch.Generator().manual_seed(1)
    pools = [
        [torch.randint(256, (PAGES * ITEM,), dtype=torch.uint8, generator=generator).to(device) for _ in range(BUFFERS)]
        for device in (HERE, THERE)
    ]
    before = [tensor.cpu().view(PAGES, ITEM) for tensor in pools[1]]
    async with Site("inproc") as site, contextlib.AsyncExitStack() as stack:
        runtimes: list[Any] = []
        for name, tensors in zip(("prefill", "decode"), pools, strict=True):
            config = replace(PATIENT, engine_id=name, listen="tcp://127.0.0.1:0", transport="inproc")
            world = World(transport=site.make_transport)
            runtimes.append(await stack.enter_async_context(Runtime(config, world=world)))
            await runtimes[-1].register_kv_caches([pool(tensors).group(str(tensors[0].device))])
        with standin.held():
            lease = runtimes[0].serve_blocks(ServeRequest("room", THEIRS, num_tokens=len(THEIRS) * PAGE))
            request = LoadRequest("room", lease.ticket.to_params(), OURS)
            load = asyncio.ensure_future(runtimes[1].load_blocks(request))
            await until(lambda: standin.waiting() or load.done())
            assert not load.done()
        await load
        for theirs, ours, was in zip(*pools, before, strict=True):
            expected = was.clone()
            expected[OURS] = theirs.cpu().view(PAGES, ITEM)[THEIRS]
            assert torch.equal(ours.cpu().view(PAGES, ITEM), expected)


def test_a_view_of_memory_is_that_memory(standin: StandIn) -> None:
    there = torch.arange(40, dtype=torch.uint8).to(THERE)
    view = bytes_at(there.data_ptr() + 8, 16, THERE)
    assert view.device == there.device
    assert view.cpu().tolist() == list(range(8, 24))
    view.fill_(3)
    assert there.cpu().tolist() == [*range(8), *[3] * 16, *range(24, 40)]
    torch.accelerator.set_device_index(1)
    assert bytes_at(there.data_ptr(), 4, "standin").device == there.device


def test_where_torch_makes_no_tensors_of_addresses_it_says_so(standin: StandIn) -> None:
    with pytest.raises(ConfigError, match=r"on 'hpu', only on \['cpu', 'cuda', 'standin', 'xpu'\]"):
        bytes_at(4096, 16, "hpu")
