"""The requests of buffers to a device: scratch memory and staged copies."""

from __future__ import annotations

import logging

import pytest
import torch
from recording_devices import HND, NHD, RecordingEngines, handed_over

from kvflow import LoadRequest, ServeRequest
from kvflow.errors import ConfigError, TransferFailed
from kvflow.transport.device.cache_device import CacheDevice


async def test_copies_through_scratch_run_on_the_devices_stream() -> None:
    opened = RecordingEngines()
    async with opened.engine("p", NHD) as producer, opened.engine("c", HND, scratch="always") as consumer:
        device = opened.devices[1]
        assert device.calls == ["check"] + ["allocate"] * consumer.runtime.config.limits.scratch_slots_max
        assert device.threads == {f"kvflow-copy {consumer.transport.name}"}
        device.calls.clear()
        await handed_over(producer, consumer)
        assert device.calls == ["begin", "upload", "upload", "end"], "ids go up once, and it is waited for once"


async def test_staged_copies_run_on_the_devices_stream() -> None:
    opened = RecordingEngines()
    async with (
        opened.engine("p", HND, staging="always") as producer,
        opened.engine("c", HND, staging="always") as consumer,
    ):
        told = [device.calls for device in opened.devices]
        assert told == [[], []], "peers read host memory: it is not checked, and scratch memory is the host's"
        await handed_over(producer, consumer)
        assert told == [["begin", "upload", "end"]] * 2
        assert all(len(device.threads) == 1 for device in opened.devices)


async def test_a_device_without_room_for_scratch_reads_straight(caplog: pytest.LogCaptureFixture) -> None:
    opened = RecordingEngines()
    opened.room = 1 << 20
    with caplog.at_level(logging.WARNING):
        async with opened.engine("p", NHD) as producer, opened.engine("c", HND) as consumer:
            await handed_over(producer, consumer)
            assert "begin" not in opened.devices[1].calls
    assert "reads small pieces one by one: no 33554432 bytes of scratch memory on cpu: no memory" in caplog.text


async def test_scratch_that_has_to_be_and_cannot() -> None:
    opened = RecordingEngines()
    opened.room = 1 << 20
    with pytest.raises(ConfigError, match="no 33554432 bytes of scratch memory"):
        async with opened.engine("c", HND, scratch="always"):
            pass


class Broke(CacheDevice):
    """The CPU, without memory when it is asked for some."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")


async def test_memory_that_runs_out_under_a_load_is_that_loads_failure() -> None:
    opened = RecordingEngines()
    opened.device = Broke  # type: ignore[method-assign,assignment]
    async with opened.engine("p", NHD) as producer, opened.engine("c", HND, scratch="always") as consumer:
        lease = producer.runtime.serve_blocks(ServeRequest("req", [1], num_tokens=4))
        with pytest.raises(TransferFailed, match="no memory"):
            await consumer.runtime.load_blocks(LoadRequest("req", lease.ticket, [3]))
        lease.revoke()
