"""The promises of every `kvflow.storage.store_thread.Mover`, checked on system calls and on NIXL's POSIX backend."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from kvflow import Config
from kvflow.core.cache.regions import Device, Span
from kvflow.core.plan.descriptors import Descriptors
from kvflow.errors import ConfigError, RuntimeBroken, TransportBroken
from kvflow.storage.placing import FILE_DEVICE
from kvflow.storage.posix import PosixMover
from kvflow.storage.storage import make_store_thread
from kvflow.storage.store_thread import Direction, LostMoves, MoveFailed, MoveLost, PlainMover, StoreThread
from kvflow.transport.base import TransportError
from tests.support.another_install import lines_of_another_install
from tests.support.tests_support import WAIT_S

SIZE = 1 << 20
TRANSPORTS = ["inproc", pytest.param("nixl", marks=pytest.mark.nixl)]


class Bench:
    """Files, a buffer that moves may touch, and one open file as large."""

    def __init__(self, files: StoreThread, buffer: np.ndarray, fd: int) -> None:
        self.files, self.buffer, self.fd = files, buffer, fd
        self.stopped: asyncio.Queue[None] = asyncio.Queue()
        """An item for each move that was lost and has stopped."""

    async def move(self, direction: Direction, *rows: tuple[int, int, int]) -> TransportError | None:
        """(offset in the buffer, offset in the file, size) triples; how it ended."""
        local, remote, sizes = zip(*rows, strict=True)
        end: asyncio.Future[TransportError | None] = asyncio.get_running_loop().create_future()
        descriptors = Descriptors.of(
            local=np.array(local, dtype=np.uint64) + np.uint64(self.buffer.ctypes.data),
            remote=np.array(remote, dtype=np.uint64),
            sizes=np.array(sizes, dtype=np.uint64),
            local_device=Device("cpu", 0),
            remote_device=Device(FILE_DEVICE, self.fd),
        )

        def on_end(error: TransportError | RuntimeBroken | None) -> None:
            assert not isinstance(error, RuntimeBroken)
            if end.done():
                self.stopped.put_nowait(None)
            else:
                end.set_result(error)

        self.files.post(descriptors, direction, on_end, end.set_result)
        async with asyncio.timeout(WAIT_S):
            return await end


@pytest.fixture(params=TRANSPORTS)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(str(request.param), tmp_path) as bench:
        yield bench


@contextlib.asynccontextmanager
async def open_bench(transport: str, tmp_path: Path, params: Mapping[str, str] | None = None) -> AsyncIterator[Bench]:
    config = Config(engine_id="files", transport=transport, nixl_backend_params=params or {})
    files = make_store_thread(config, "files")
    buffer = (np.arange(SIZE) % 251).astype(np.uint8)
    await files.open([Span(address=int(buffer.ctypes.data), size_bytes=SIZE)], buffer)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.truncate(fd, SIZE)
    await files.call(lambda: files.mover.register_file(fd, SIZE))
    yield Bench(files, buffer, fd)
    await files.aclose(lambda: None)
    await files.aclose(lambda: None)
    assert "kvflow-store" not in " ".join(thread.name for thread in threading.enumerate())
    os.close(fd)


async def test_moves_write_and_read_exactly_their_bytes(bench: Bench) -> None:
    rows = [(0, 5000, 50), (1000, 0, 1), (4096, 8192, 4096), (SIZE - 8, SIZE - 8, 8)]
    in_file, in_buffer = np.zeros(SIZE, dtype=np.uint8), np.full(SIZE, 255, dtype=np.uint8)
    for local, remote, size in rows:
        moved = bench.buffer[local : local + size]
        in_file[remote : remote + size], in_buffer[local : local + size] = moved, moved
    assert await bench.move(Direction.SAVE, *rows) is None
    np.testing.assert_array_equal(np.frombuffer(os.pread(bench.fd, SIZE, 0), dtype=np.uint8), in_file)
    bench.buffer[:] = 255
    assert await bench.move(Direction.RESTORE, *rows) is None
    np.testing.assert_array_equal(bench.buffer, in_buffer)


async def test_many_moves_at_once_end_once_each(bench: Bench) -> None:
    rows = [(at * 64, at * 128, 64) for at in range(300)]
    ends = await asyncio.gather(*(bench.move(Direction.SAVE, row) for row in rows))
    assert ends == [None] * len(rows)
    assert bench.files.moves_under_way == 0
    for local, remote, size in rows:
        assert os.pread(bench.fd, size, remote) == bench.buffer[local : local + size].tobytes()


async def test_a_file_that_ends_early_is_an_error(bench: Bench) -> None:
    os.truncate(bench.fd, 100)
    assert isinstance(await bench.move(Direction.RESTORE, (0, 50, 100)), MoveFailed)


async def test_jobs_run_in_order_and_behind_moves_that_were_posted(bench: Bench) -> None:
    ran: list[int] = []
    done = asyncio.Event()
    for at in range(10):
        bench.files.submit(lambda at=at: ran.append(at), done.set)  # type: ignore[misc]
    assert await bench.files.call(lambda: len(ran)) == 10
    assert ran == list(range(10))
    with pytest.raises(ZeroDivisionError):
        await bench.files.call(lambda: 1 // 0)
    await done.wait()


async def test_what_is_closed_takes_nothing(bench: Bench) -> None:
    last: list[bool] = []
    await bench.files.aclose(lambda: last.append(True))
    assert last == [True]
    for verb in (lambda: bench.files.submit(lambda: None, lambda: None), lambda: bench.files._require_thread()):
        with pytest.raises(TransportBroken):
            verb()


@pytest.mark.nixl
@pytest.mark.parametrize("params", [{}, {"POSIX.use_posix_aio": "true"}, {"POSIX.use_uring": "true"}])
async def test_what_nixl_has_lost_is_stopped_where_that_can_be_and_the_next_moves_work(
    tmp_path: Path, params: dict[str, str]
) -> None:
    async with open_bench("nixl", tmp_path, params) as bench:
        expected = bench.buffer.copy()
        assert await bench.move(Direction.SAVE, (0, 0, SIZE // 2)) is None
        os.truncate(bench.fd, SIZE // 2)
        bench.buffer[:] = 0
        for _ in range(3):
            beyond = (SIZE // 2, SIZE // 2, 4096)
            inside = [(at, at, 4096) for at in range(0, SIZE // 2, 4096)]
            assert isinstance(await bench.move(Direction.RESTORE, *inside, beyond), MoveLost)
            assert await bench.move(Direction.RESTORE, (0, 0, SIZE // 2)) is None
        np.testing.assert_array_equal(bench.buffer[: SIZE // 2], expected[: SIZE // 2])
        assert bench.stopped.qsize() == (0 if "POSIX.use_uring" in params else 3)


@pytest.mark.nixl
async def test_an_agent_that_cannot_be_made_again_fails_moves_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench("nixl", tmp_path) as bench:
        mover = bench.files.mover
        assert isinstance(mover, PosixMover)
        with monkeypatch.context() as patched:
            patched.setitem(mover._params, "ios_pool_size", "many")
            assert await bench.files.call(mover.stop_lost_moves) is LostMoves.STOPPED
            for _ in range(2):
                error = await bench.move(Direction.SAVE, (0, 0, 8))
                assert isinstance(error, TransportError)
                assert not isinstance(error, MoveFailed)
        assert await bench.move(Direction.SAVE, (0, 0, 8)) is None


class Scripted(PlainMover):
    """Moves end as the test says, by the size of their first piece."""

    def __init__(self) -> None:
        self.ends: dict[int, bool | MoveLost] = {}
        self.told: list[object] = []
        self.results = [LostMoves.NOT_YET, LostMoves.NOT_YET, LostMoves.STOPPED]

    def begin(self, descriptors: Descriptors, direction: Direction) -> object:
        self.told.append(descriptors.size_bytes)
        return descriptors.size_bytes

    def has_ended(self, handle: object) -> bool:
        assert isinstance(handle, int)
        end = self.ends.get(handle, False)
        if isinstance(end, MoveLost):
            raise end
        return end

    def stop_lost_moves(self) -> LostMoves:
        self.told.append(self.results[0])
        return self.results.pop(0)


async def test_a_loss_is_settled_when_the_last_move_has_ended_and_the_next_one_waits_for_that() -> None:
    mover = Scripted()
    files = StoreThread("kvflow-store scripted", lambda _: mover)
    await files.open([], None)
    bench = Bench(files, np.zeros(8, dtype=np.uint8), 0)
    first, second = (asyncio.create_task(bench.move(Direction.SAVE, (0, 0, size))) for size in (1, 2))
    await asyncio.sleep(0)
    mover.ends[1] = MoveLost("who knows")
    assert isinstance(await first, MoveLost)
    third = asyncio.create_task(bench.move(Direction.SAVE, (0, 0, 3)))
    await asyncio.sleep(0)
    mover.ends[3] = True
    assert await files.call(lambda: list(mover.told)) == [1, 2], "it waits"
    assert bench.stopped.empty()
    mover.ends[2] = True
    assert await second is None
    assert await third is None
    assert mover.told == [1, 2, LostMoves.NOT_YET, LostMoves.NOT_YET, LostMoves.STOPPED, 3]
    assert bench.stopped.qsize() == 1
    await files.aclose(lambda: None)


@pytest.mark.nixl
async def test_memory_that_is_not_registered_is_refused_by_nixl(tmp_path: Path) -> None:
    async with open_bench("nixl", tmp_path) as bench:
        error = await bench.move(Direction.SAVE, (SIZE - 4, 0, 8))
        assert isinstance(error, TransportError)
        assert not isinstance(error, MoveLost)
        assert await bench.move(Direction.SAVE, (0, 0, 8)) is None


@pytest.mark.nixl
@pytest.mark.parametrize("params", [{}, {"POSIX.use_posix_aio": "true"}, {"POSIX.ios_pool_size": "1024"}])
async def test_the_backend_gets_its_parameters(tmp_path: Path, params: dict[str, str]) -> None:
    config = Config(engine_id="files", nixl_backend_params=params)
    files = make_store_thread(config, "files")
    buffer = np.zeros(SIZE, dtype=np.uint8)
    spans = [Span(address=int(buffer.ctypes.data), size_bytes=SIZE)]
    await files.open(spans, buffer)
    await files.aclose(lambda: None)
    wrong = make_store_thread(Config(engine_id="f", nixl_backend_params={"POSIX.ios_pool_size": "many"}), "files")
    with pytest.raises((ConfigError, ValueError)):
        await wrong.open(spans, buffer)
    await wrong.aclose(lambda: None)


STORE_ELSEWHERE = """
from kvflow.errors import ConfigError
from kvflow.storage.posix import PosixMover

if __name__ == "__main__":
    try:
        PosixMover("store", {}, [])
    except ConfigError as error:
        print(error)
"""


@pytest.mark.nixl
def test_plugins_of_another_install_are_named(tmp_path: Path) -> None:
    """See `lines_of_another_install`."""
    assert len(lines_of_another_install(tmp_path, STORE_ELSEWHERE)) == 1
