"""The settings of NIXL's agents and threads, on machines with CUDA, too: by settings and stubs, over real NIXL."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import numpy as np
import pytest

from kvflow.config import Config
from kvflow.core.cache.regions import Device, Span
from kvflow.core.plan.descriptors import Descriptors
from kvflow.transport.base import BY_SOME_BUILDS, DEVICES, Event, MemoryUse, ReadEnded, TransportError
from kvflow.transport.device import cuda
from kvflow.transport.nixl.defaults import POLLING, UNMAPPED_MEMORY, add_settings, backend_params
from kvflow.transport.nixl.loop import NixlTransport

GET_ZCOPY = "CUDA_IPC_ENABLE_GET_ZCOPY=on"
FRAMES = "TCP_TX_SEG_SIZE=64k"
CACHED = "RCACHE_MAX_UNRELEASED=1024"
LANES = "TLS=^rc_gda"
OURS = f"{GET_ZCOPY},{FRAMES},{CACHED},{LANES}"
CPU = Device("cpu", 0)


def test_ucx_is_told_what_is_faster_unless_somebody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("CUDA_IPC_ENABLE_GET_ZCOPY", "TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE", "RCACHE_MAX_UNRELEASED", "TLS")
    for name in (*settings, "RCACHE_ENABLE"):
        monkeypatch.delenv(f"UCX_{name}", raising=False)
    given = {"num_workers": "2"}
    assert backend_params("UCX", given) == {"num_workers": "2", "engine_config": OURS}
    assert given == {"num_workers": "2"}
    chosen = "CUDA_IPC_ENABLE_GET_ZCOPY=off"
    assert backend_params("UCX", {"engine_config": chosen}) == {"engine_config": f"{chosen},{FRAMES},{CACHED},{LANES}"}
    assert backend_params("UCX", {"engine_config": "MTLS=1"}) == {"engine_config": f"MTLS=1,{OURS}"}
    assert backend_params("UCX", {"engine_config": "A=1"}) == {"engine_config": f"A=1,{OURS}"}
    assert backend_params("POSIX", given) == given
    monkeypatch.setenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "try")
    assert backend_params("UCX", {}) == {"engine_config": f"{FRAMES},{CACHED},{LANES}"}
    monkeypatch.setenv("UCX_TCP_RX_SEG_SIZE", "16k")  # UCX does not start if it is to send more than it receives
    assert backend_params("UCX", given) == {"num_workers": "2", "engine_config": f"{CACHED},{LANES}"}
    monkeypatch.setenv("UCX_RCACHE_MAX_UNRELEASED", "inf")
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert backend_params("UCX", given) == given
    assert add_settings("UCX", "", UNMAPPED_MEMORY) == "RCACHE_ENABLE=n"
    monkeypatch.delenv("UCX_TLS")
    assert add_settings("UCX", "RCACHE_ENABLE=y", UNMAPPED_MEMORY) == "RCACHE_ENABLE=y,TLS=^cuda_ipc"


def test_every_kind_of_memory_that_nixl_may_read_into_is_polled() -> None:
    """A kind without an entry would end the agents' thread at the first read into it."""
    assert POLLING.keys() == {*DEVICES, *BY_SOME_BUILDS}


def test_how_long_reads_are_polled_for() -> None:
    assert POLLING["cpu"].until_s(1 << 30) == 150e-6
    assert math.isclose(POLLING["cuda"].until_s(10_000_000), 150e-6 + 2e-3)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """A process that uses CUDA: which device is made current, on which thread."""
    calls: list[tuple[int, str]] = []
    monkeypatch.setattr(cuda, "current_device", lambda: 3)
    monkeypatch.setattr(cuda, "make_current", lambda number: calls.append((number, threading.current_thread().name)))
    return calls


class Flushed:
    """A driver of a device that needs flushes."""

    def __init__(self) -> None:
        self.flushes = 0

    def needs_flush(self, number: int) -> bool:
        return True

    def flush(self) -> None:
        self.flushes += 1


@pytest.mark.nixl
async def test_the_agents_thread_has_the_callers_device(
    told: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "driver", Flushed)
    transport = NixlTransport(Config(engine_id="a"), "cuda-a")
    await transport.open()
    try:
        assert told == [(3, "kvflow-agent cuda-a")]
        with pytest.raises(TransportError):  # there is no such memory here
            await transport.register([Span(address=4096, size_bytes=64)], Device("cuda", 1), None, MemoryUse.SERVED)
        assert told[1:] == [(1, "kvflow-agent cuda-a")]
    finally:
        await transport.aclose(10.0)


@pytest.mark.nixl
async def test_no_read_ends_before_the_device_sees_its_bytes() -> None:
    """On devices where what a network card wrote has to be flushed."""
    driver = Flushed()
    reader, server = (NixlTransport(Config(engine_id=name), f"flush-{name}") for name in "ab")
    memory = np.arange(64, dtype=np.uint8)
    ours, theirs = (np.zeros(32, dtype=np.uint8), memory[:32])
    seen: asyncio.Queue[tuple[Event, int]] = asyncio.Queue()
    for transport, own, use in ((reader, ours, MemoryUse.READ_INTO), (server, theirs, MemoryUse.SERVED)):
        await transport.open()
        await transport.register([Span(address=own.ctypes.data, size_bytes=32)], CPU, own, use)
    agents: Any = reader._agents
    agents._flush = driver.flush
    running = asyncio.create_task(reader.run(lambda event: seen.put_nowait((event, driver.flushes))))
    try:
        peer = await reader.add_peer(await server.metadata())
        addresses = {"local": [ours.ctypes.data], "remote": [theirs.ctypes.data], "sizes": [32]}
        reader.post_read(peer, Descriptors.of(**addresses, local_device=CPU, remote_device=CPU))
        event, flushes = await seen.get()
        assert isinstance(event, ReadEnded)
        assert event.error is None
        assert flushes == 1
        assert np.array_equal(ours, theirs)
    finally:
        running.cancel()
        for transport in (reader, server):
            await transport.aclose(10.0)
