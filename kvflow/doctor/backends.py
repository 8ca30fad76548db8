"""NIXL's backends here: each is started, and moves some bytes.

Each is started in a process of its own kind, which is begun anew if a backend has ended it: a library that crashes is a
finding and not our end. Those that reach peers hand a buffer over between two agents of that process; the one for files
writes a file and reads it back. Every byte is compared.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvflow.bench.child import QUIET, BenchError, ChildCaller, RankProcess, open_caller, open_children
from kvflow.config import STORE_BACKEND, Config
from kvflow.core.cache.regions import Device, Span
from kvflow.core.plan.descriptors import Descriptors
from kvflow.core.protocol.proof import HOST
from kvflow.doctor.findings import Finding, ok, warn
from kvflow.errors import KVFlowError
from kvflow.transport.base import Event, MemoryUse, ReadEnded, TransportError
from kvflow.transport.nixl.loop import NixlTransport

Memory: TypeAlias = npt.NDArray[np.uint8]

_SIZE = 64 << 20
_PIECE = 1 << 20
_WAIT_S = 30.0


def check_backends(plugins: Sequence[str]) -> Finding:
    """Try each of NIXL's plugins."""
    found: dict[str, str] = {}
    left = list(plugins)
    while left:
        name = left[0]
        try:
            with open_children([RankProcess("backends", open_caller)], QUIET) as children:
                children["backends"].run(ChildCaller.call, _be_silent)
                while left:
                    name = left[0]
                    found[name] = children["backends"].run(ChildCaller.call, _move, name)
                    left.pop(0)
        except BenchError as error:
            found[name] = _FAILED + error.reason
            left = left[1:]
    return judge_backends(found)


_FAILED = "!"
"""Mark of a backend's result that does not work."""


def judge_backends(found: Mapping[str, str]) -> Finding:
    """Finding about all backends. `found` has what each moves or, behind a mark, why it does not."""
    moving = [f"{name} moves {what}" for name, what in found.items() if not what.startswith(_FAILED)]
    others = [name for name, what in found.items() if what.startswith(_FAILED)]
    text = "; ".join([*moving, f"not here: {', '.join(others)}"] if others else moving)
    if STORE_BACKEND in others or STORE_BACKEND not in found:
        why = found.get(STORE_BACKEND, _FAILED + "there is no such plugin").removeprefix(_FAILED)
        return warn("backends", text, f"only kvflow.storage needs {STORE_BACKEND}, which does not work: {why}")
    return ok("backends", text)


async def _move(name: str) -> str:
    """Try a backend. Returns what it moves, and how fast; or why it does not."""
    try:
        async with asyncio.timeout(_WAIT_S):
            return await (_to_a_file() if name == STORE_BACKEND else _to_a_peer(name))
    except (KVFlowError, OSError) as error:
        return f"{_FAILED}{type(error).__name__}: {error}"


def _be_silent() -> None:
    """Silence this process: some plugins greet the world, and --json is for programs."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _descriptors(local: Memory, remote: int, device: Device) -> Descriptors:
    offsets = np.arange(0, _SIZE, _PIECE, dtype=np.uint64)
    return Descriptors.of(
        local=offsets + np.uint64(local.ctypes.data),
        remote=offsets + np.uint64(remote),
        sizes=np.full(len(offsets), _PIECE, dtype=np.uint64),
        local_device=HOST,
        remote_device=device,
    )


async def _to_a_file() -> str:
    try:
        from kvflow.storage.files import Direction
        from kvflow.storage.placing import FILE
        from kvflow.storage.storage import make_files
    except ImportError as missing:
        raise TransportError("needs kvflow.storage") from missing
    files = make_files(Config(engine_id="doctor"), "doctor")
    ours = np.arange(_SIZE // 4, dtype=np.uint32).view(np.uint8)
    expected, seconds = ours.copy(), []
    try:
        await files.open([Span(address=int(ours.ctypes.data), size_bytes=_SIZE)], ours)
        with tempfile.TemporaryFile() as file:
            fd = file.fileno()
            await files.call(lambda: os.posix_fallocate(fd, 0, _SIZE))
            await files.call(lambda: files.mover.opened(fd, _SIZE))
            for direction in Direction:
                end: asyncio.Future[KVFlowError | None] = asyncio.get_running_loop().create_future()
                begun_s = time.perf_counter()
                files.post(_descriptors(ours, 0, Device(FILE, fd)), direction, end.set_result, lambda _: None)
                if error := await end:
                    raise error
                seconds.append(time.perf_counter() - begun_s)
                if direction is Direction.SAVE:
                    ours[:] = 0
            await files.call(lambda: files.mover.closing(fd))
    finally:
        await files.aclose(lambda: None)
    _compare(ours, expected)
    write, read = (_SIZE / each / 1e9 for each in seconds)
    return f"files ({write:.1f} GB/s to the page cache, {read:.1f} GB/s back)"


async def _to_a_peer(name: str) -> str:
    config = Config(engine_id="doctor", nixl_backend=name)
    reader, writer = NixlTransport(config, "doctor reader"), NixlTransport(config, "doctor writer")
    theirs = np.arange(_SIZE // 4, dtype=np.uint32).view(np.uint8)
    ours = np.zeros(_SIZE, dtype=np.uint8)
    await reader.open()
    try:
        await writer.open()
        for side, memory in ((reader, ours), (writer, theirs)):
            span = Span(address=int(memory.ctypes.data), size_bytes=_SIZE)
            await side.register([span], HOST, memory, MemoryUse.SERVED | MemoryUse.READ_INTO)
        peer = await reader.add_peer(await writer.metadata())
        seconds = []
        for _ in range(2):  # the first connects
            begun_s = time.perf_counter()
            reader.post_read(peer, _descriptors(ours, int(theirs.ctypes.data), HOST))
            await _read_ended(reader)
            seconds.append(time.perf_counter() - begun_s)
        await reader.remove_peer(peer)
    finally:
        await reader.aclose(_WAIT_S)
        await writer.aclose(_WAIT_S)
    _compare(ours, theirs)
    return f"memory between engines ({_SIZE / seconds[-1] / 1e9:.1f} GB/s within one process)"


async def _read_ended(transport: NixlTransport) -> None:
    end: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
    running = asyncio.ensure_future(transport.run(end.set_result))
    try:
        event = await end
    finally:
        running.cancel()
        await asyncio.wait([running])
    if isinstance(event, ReadEnded) and event.error is not None:
        raise event.error


def _compare(found: Memory, expected: Memory) -> None:
    if not np.array_equal(found, expected):
        raise OSError("other bytes came than were sent")
