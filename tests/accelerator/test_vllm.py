"""vLLM on a device of another kind than CUDA: its platform's copies, and events behind its steps."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvflow import CacheGroup, LeaseOutcome, LoadRequest, Runtime, ServeRequest
from kvflow.core.cache.regions import Device
from kvflow.runtime.memory import CopyDirection
from kvflow.runtime.world import World
from kvflow.transport.device.cache_device import record_event
from kvflow.vllm.copies import PlatformCopies, platform_copies
from tests.accelerator.sides import (
    HERE,
    OURS,
    THEIRS,
    THERE,
    TOKENS,
    Engine,
    Side,
    Site,
    assert_right,
    moved,
)
from tests.accelerator.standin import KIND, StandIn
from tests.support.tests_support import PATIENT, until

pytestmark = pytest.mark.usefixtures("no_blocking_calls")


def copy_kv_blocks(source: Any, target: Any, source_ids: list[int], target_ids: list[int], direction: str) -> None:
    """As vLLM's platforms do: the copy to the device is queued, and nobody waits for it."""
    assert direction in ("d2h", "h2d")
    for name, tensor in source.items():
        there = target[name].device
        found = tensor[torch.tensor(source_ids, device=tensor.device)]
        target[name][torch.tensor(target_ids, device=there)] = found.to(there)


def grouped(side: Side, engine_id: str) -> tuple[CacheGroup, dict[str, Any]]:
    host, layout = side.make(engine_id)
    kv_caches = moved(host, side.device)
    return CacheGroup("kv", kv_caches, layout), kv_caches


async def test_vllms_copies_are_over_before_a_load_is_reported(standin: StandIn) -> None:
    sides = Side(device=HERE, style="blocks_first"), Side(device=THERE, style="blocks_first")
    async with Site("inproc") as site, contextlib.AsyncExitStack() as stack:
        engines = []
        for name, side in zip(("producer", "consumer"), sides, strict=True):
            group, kv_caches = grouped(side, name)
            config = replace(PATIENT, engine_id=name, listen="tcp://127.0.0.1:0", transport="inproc")
            runtime = await stack.enter_async_context(Runtime(config, world=World(transport=site.make_transport)))
            copies = platform_copies([group], KIND)
            assert copies is not None
            await runtime.register_kv_caches([group], copy_blocks=copies)
            copies.operation = copy_kv_blocks
            (layout,) = group.layouts
            engines.append(
                Engine(engine_id=name, runtime=runtime, kv_caches=kv_caches, layout=layout, device=side.device)
            )
        producer, consumer = engines
        with standin.held():
            lease = producer.runtime.serve_blocks(ServeRequest("req", THEIRS, num_tokens=TOKENS))
            load = asyncio.ensure_future(
                consumer.runtime.load_blocks(LoadRequest("req", lease.ticket.to_params(), OURS))
            )
            await until(lambda: standin.waiting() or load.done())
            assert not load.done()
        await load
        assert await lease is LeaseOutcome.READ
        assert_right(producer, consumer)


def test_kvflows_own_copies_are_used_where_vllms_do_not_fit(standin: StandIn) -> None:
    fits, does_not = grouped(Side(style="fused"), "any")[0], grouped(Side(style="kv_first"), "any")[0]
    assert isinstance(platform_copies([fits], "hpu"), PlatformCopies)
    assert platform_copies([does_not], "hpu") is None, "its first axis is K and V"
    assert platform_copies([fits], "cuda") is None
    assert platform_copies([fits], "cpu") is None


def test_without_an_operation_a_copy_says_so(standin: StandIn) -> None:
    copies = platform_copies([grouped(Side(style="fused"), "any")[0]], "hpu")
    assert copies is not None
    with pytest.raises(RuntimeError, match="set_host_xfer_buffer_ops"):
        copies({}, [(0, 0)], CopyDirection.TO_HOST)


def test_an_event_happens_behind_what_was_launched(standin: StandIn) -> None:
    there = torch.zeros(4, device=THERE)
    with standin.held():
        there.fill_(1.0)
        event = record_event(Device(KIND, 1))
        assert event is not None
        assert not event.query()
    event.synchronize()
    assert event.query()


def test_where_there_are_no_events_there_is_none(standin: StandIn) -> None:
    assert record_event(Device("cpu", 0)) is None
    assert record_event(Device("xla", 0)) is None
