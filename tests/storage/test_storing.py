"""Blocks into files and back: saved blocks come back, or an error says why not, and the books are right."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvflow import CacheGroup, CacheLayout, Runtime, ServeRequest
from kvflow.core.cache.state import Segment, StateLayout, StateTensor
from kvflow.errors import (
    BlocksBusy,
    CacheUnregistered,
    ConfigError,
    DeadlineExceeded,
    EntryDamaged,
    LayoutError,
    NotStored,
    RequestError,
    RuntimeBroken,
    RuntimeClosed,
    RuntimeDraining,
    StorageFailed,
    StoreFull,
    UsageError,
)
from kvflow.storage import RestoreRequest, SaveRequest, Storage
from kvflow.storage.disk import EntryFile
from kvflow.storage.store_thread import LostMoves, MoveFailed, MoveLost
from kvflow.testing.pair import CacheSize
from kvflow.transport.base import TransportError
from tests.support.storing import StoringEngine, storing
from tests.support.tests_support import PATIENT, WAIT_S, limited, small_cache, until

ENTRY_BYTES = 4096 + 3 * 2 * 2 * 256  # a header, three blocks of two layers' K and V
SLICED = limited(PATIENT, slice_bytes_max=700, slice_descriptors_max=2).limits
BOTH = pytest.mark.parametrize("transport", ["inproc", pytest.param("nixl", marks=pytest.mark.nixl)])


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[StoringEngine]:
    async with storing(tmp_path) as engine:
        yield engine


def failing(number: int) -> Callable[..., Any]:
    """A call of the system that fails."""

    def fail(*_: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


# --- what was saved comes back


@BOTH
@pytest.mark.parametrize(
    "changes",
    [{}, {"size": CacheSize(layers=3, num_blocks=12, order="NHD")}, {"limits": SLICED}, {"staging": "always"}],
    ids=["HND", "NHD", "in slices", "staged, whose own memory is saved"],
)
async def test_what_was_saved_comes_back(tmp_path: Path, transport: str, changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"size": CacheSize(layers=3, num_blocks=12)} | changes
    async with storing(tmp_path, transport=transport, **given) as engine:
        saved, others = engine.bytes_of([7, 1, 2]), engine.bytes_of([0, 3, 4, 6, 8, 9])
        report = await engine.save("a", [7, 1, 2])
        assert (report.blocks, report.tokens, report.evicted) == (3, 12, 0)
        assert [path.stat().st_size for path in engine.files] == [report.bytes]
        assert [engine.storage.has(key) for key in ("a", b"a", "b")] == [True, True, False]
        engine.fill([7, 1, 2], 0)
        back = await engine.restore("a", [11, 5, 10])
        assert (back.bytes, back.blocks, back.tokens) == (3 * 3 * 2 * 256, 3, 12)
        assert set(back.seconds) == set(report.seconds) == {"check", "queued", "move", "sync"}
        engine.assert_equal([11, 5, 10], saved)
        engine.assert_equal([0, 3, 4, 6, 8, 9], others)
        await engine.quiet()


def groups() -> list[CacheGroup]:
    """Full attention, a window, and state per request, each with its bytes."""
    torch.manual_seed(7)
    full, layout = small_cache(layers=2)
    window = {"layers.2": torch.zeros_like(full["layers.0"])}
    state = {"layers.3": (torch.zeros(5, 6, 2),)}
    tensors = (StateTensor(name="conv", segments=(Segment(name="x", size=6, units=2, model_units=2),)),)
    for tensor in (*full.values(), *window.values(), *state["layers.3"]):
        tensor.copy_(torch.rand_like(tensor))
    return [
        CacheGroup("full", full, layout),
        CacheGroup("window", window, CacheLayout.infer(window, order="HND", block_size=4), window=8),
        CacheGroup("state", state, StateLayout.infer(state, tensors)),
    ]


async def test_groups_windows_and_state_come_back(tmp_path: Path) -> None:
    config = replace(PATIENT, transport="inproc", listen="tcp://127.0.0.1:0")
    caches, storage = groups(), Storage(tmp_path)
    full, window, state = (next(iter(group.layers.values())) for group in caches)
    async with Runtime(config, parts=[storage]) as runtime:
        await runtime.register_kv_caches(caches)
        await storage.save(SaveRequest("s", b"k", {"full": [1, 2, 3], "window": [4, 5], "state": [3]}, 11))
        await storage.restore(RestoreRequest("r", b"k", [[5, 6, 7], [0, 1], [1]], 11))
        assert torch.equal(full[:, [5, 6, 7]], full[:, [1, 2, 3]])
        assert torch.equal(window[:, [0, 1]], window[:, [4, 5]])
        assert torch.equal(state[0][1], state[0][3])
        with pytest.raises(RequestError, match=r"group 'full': 2 blocks of 4 tokens, num_tokens 11 needs 3"):
            await storage.restore(RestoreRequest("r", b"k", {"full": [5, 6]}, 11))
        with pytest.raises(RequestError, match=r"asked for 11 and \[3, 1, 1\], saved 11 and \[3, 2, 1\]"):
            await storage.restore(RestoreRequest("r", b"k", [[5, 6, 7], [0], [1]], 11))


async def test_the_next_runtime_finds_it_and_one_with_another_cache_does_not(tmp_path: Path) -> None:
    """Also what could not be read: it is tried again."""
    async with storing(tmp_path) as engine:
        expected = engine.bytes_of([1, 2, 3])
        await engine.save("a")
        engine.mover.errors = [MoveFailed("no answer from the server")]
        with pytest.raises(StorageFailed):
            await engine.restore("a")
    async with storing(tmp_path, size=CacheSize(order="NHD")) as other:
        with pytest.raises(NotStored):
            await other.restore("a")
        assert other.store.entries == 1, "it makes room some time"
    async with storing(tmp_path, size=CacheSize(num_blocks=32)) as engine:
        await engine.restore("a", [30, 31, 29])
        engine.assert_equal([30, 31, 29], expected)


async def test_entries_of_other_weights_are_not_found(engine: StoringEngine) -> None:
    """They are there again for an engine with their weights, such as the next one after a roll-back."""
    first = engine.bytes_of([1, 2, 3])
    await engine.save("a")
    for version in ("step-7", "step-8"):
        engine.runtime.set_weights(version)
        assert not engine.storage.has("a")
        with pytest.raises(NotStored):
            await engine.restore("a")
        engine.fill([1, 2, 3], float(version[-1]))
        await engine.save("a")
        assert await engine.storage.drop(["b"]) == 0
    engine.runtime.set_weights("step-7")
    await engine.restore("a")
    assert all(float(tensor.min()) == float(tensor.max()) == 7.0 for tensor in engine.bytes_of([4, 5, 6]))
    assert engine.store.entries == 3
    async with storing(engine.folder / "other") as other:
        await other.save("a")
        other.assert_equal([1, 2, 3], first)


async def test_a_save_under_way_is_of_the_weights_that_it_began_with(engine: StoringEngine) -> None:
    engine.mover.gate.clear()
    saving = asyncio.create_task(engine.save("a"))
    await until(lambda: engine.moves)
    engine.runtime.set_weights("step-7")
    engine.mover.gate.set()
    await saving
    assert not engine.storage.has("a")


async def test_a_restore_under_way_finds_nothing_once_weights_are_replaced(engine: StoringEngine) -> None:
    """The entry stays, and is not taken for a damaged one."""
    await engine.save("a")
    restoring = await engine.held("a")
    engine.runtime.set_weights("step-7")
    engine.mover.gate.set()
    with pytest.raises(NotStored, match="weights were replaced during the restore"):
        await restoring
    assert (engine.store.entries, engine.store.missed, engine.store.damaged) == (1, 1, 0)
    await engine.quiet()


async def test_saves_of_one_key_leave_one_entry(engine: StoringEngine) -> None:
    """At once, and one after the other: then it has the new blocks."""
    await asyncio.gather(*(engine.save("a", [at, at + 1]) for at in range(6)))
    await engine.restore("a", [14, 15])
    found = engine.bytes_of([14, 15])
    assert any(all(map(torch.equal, found, engine.bytes_of([at, at + 1]))) for at in range(6))
    for ids in [1, 2, 3], [7, 8]:
        await engine.save("a", ids)
    await engine.restore("a", [10, 11])
    engine.assert_equal([10, 11], engine.bytes_of([7, 8]))
    await until(lambda: len(engine.files) == 1)
    assert (engine.store.entries, engine.store.saved) == (1, 8)
    assert engine.store.bytes == engine.files[0].stat().st_size


# --- what is damaged


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


def flip(at: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 0x10
        path.write_bytes(content)

    return change


SIZES = [0, 1, 23, 24, 100, 4095, 4096, 4097, ENTRY_BYTES // 2, ENTRY_BYTES - 1, ENTRY_BYTES + 1]
PLACES = [0, 8, 12, 16, 30, 90, 4096, 4096 + 255, 4096 + 256, 4096 + 1500, ENTRY_BYTES - 1]
DAMAGES = {f"cut to {size}": cut(size) for size in SIZES} | {f"flipped at {at}": flip(at) for at in PLACES}
DAMAGES["all zeros, as after a crash of the machine"] = lambda path: path.write_bytes(bytes(ENTRY_BYTES))


async def test_what_is_damaged_is_never_good_and_goes(tmp_path: Path) -> None:
    """Damaged under a runtime that knows the entry, and before a runtime that finds it."""
    for number, (name, damage) in enumerate(DAMAGES.items()):
        folder = tmp_path / str(number)
        async with storing(folder) as engine:
            assert (await engine.save("a")).bytes == ENTRY_BYTES
            damage(engine.files[0])
            await damaged(engine, name)
            await engine.save("a")
        damage(engine.files[0])
        async with storing(folder) as engine:
            await damaged(engine, name)
            await engine.save("a")
            await engine.restore("a")
            engine.assert_equal([4, 5, 6], engine.bytes_of([1, 2, 3]))


async def damaged(engine: StoringEngine, how: str) -> None:
    with pytest.raises(EntryDamaged) as caught:
        await engine.restore("a")
    assert caught.value.memory_safe, how
    assert engine.files == [], how
    assert (engine.store.damaged, engine.store.entries, engine.store.bytes) == (1, 0, 0), how
    assert engine.store.failed == 0, "it is counted once"
    with pytest.raises(NotStored):
        await engine.restore("a")
    await engine.quiet()


def link(path: Path) -> None:
    path.symlink_to(shutil.move(path, path.with_name("elsewhere")))


def listen(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(path.parent):
        bound.bind(path.name)


def replace_by(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def another_key(path: Path) -> None:
    (other,) = (one for one in path.parent.iterdir() if one.name not in (path.name, "lock"))
    shutil.copyfile(other, path)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (replace_by(os.mkfifo), "not a regular file: prw-"),
        (replace_by(Path.mkdir), "not a regular file: drwx"),
        (listen, "not a regular file: No such device or address"),
        (link, "not a regular file: Too many levels of symbolic links"),
        (another_key, "from another cache or under another key"),
    ],
    ids=["FIFO", "folder", "socket", "link", "under another key"],
)
async def test_only_regular_files_are_read_and_none_of_another_key(
    engine: StoringEngine, change: Callable[[Path], None], found: str
) -> None:
    await engine.save("a")
    (path,) = engine.files
    await engine.save("b", [7, 8, 9])
    change(path)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(EntryDamaged, match=found):
            await engine.restore("a")
    with pytest.raises(NotStored):
        await engine.restore("a")
    await engine.restore("b")
    await engine.save("a")
    await engine.restore("a")
    await engine.quiet()
    there = {item.name: item for item in path.parent.iterdir()}
    assert path.name not in there or path.is_dir(), "it was removed"
    assert change is not link or there["elsewhere"].stat().st_size == ENTRY_BYTES, "not what it points to"


async def test_a_folder_has_one_owner_and_is_one(tmp_path: Path) -> None:
    """It may be named by a link; its lock may not be one."""
    real, other, file = tmp_path / "real", tmp_path / "other", tmp_path / "file"
    real.mkdir()
    file.write_text("")
    (tmp_path / "named").symlink_to(real)

    async def refused(folder: Path, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            async with storing(folder):
                pass

    async with storing(tmp_path / "named") as engine:
        await engine.save("a")
        await refused(real, r"storage: .* is in use by another runtime")
        async with storing(real, tp_rank=1, tp_size=2):
            pass
        await engine.runtime.unregister()
        async with storing(real) as engine:
            await engine.restore("a")
    await refused(file, r"storage: .* cannot be used")
    for lock in real.rglob("lock"):
        lock.unlink()
        lock.symlink_to(other)
    await refused(real, "Too many levels of symbolic links")
    assert not other.exists()


async def test_a_folder_that_a_cleaner_empties_or_removes_works_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And still has one owner: of the lock that was removed, and of the folder that was created again."""

    async def refused() -> None:
        with pytest.raises(ConfigError, match=r"storage: .* is in use by another runtime"):
            async with storing(tmp_path / "blocks"):
                pass

    async with storing(tmp_path / "blocks") as engine:
        await engine.save("a")
        next(tmp_path.rglob("lock")).unlink()
        await refused()
        shutil.rmtree(tmp_path / "blocks")
        with pytest.raises(NotStored):
            await engine.restore("a")
        assert await engine.storage.drop() == 0
        await engine.save("b")
        shutil.rmtree(tmp_path / "blocks")
        await engine.save("c")
        assert [engine.storage.has(key) for key in "abc"] == [False, False, True]
        await refused()
        await engine.restore("c")
        assert (engine.store.entries, engine.store.bytes) == (1, ENTRY_BYTES)
        shutil.rmtree(tmp_path / "blocks")
        async with storing(tmp_path / "blocks"):
            with pytest.raises(StorageFailed, match="unavailable"):
                await engine.save("d")
        await engine.save("d")
    assert "its folder was removed, with 1 entry: it is created again" in caplog.text


async def test_a_file_that_somebody_has_removed_is_not_stored(engine: StoringEngine) -> None:
    await engine.save("a")
    engine.files[0].unlink()
    with pytest.raises(NotStored, match="its file was removed"):
        await engine.restore("a")
    assert (engine.store.missed, engine.store.bytes, engine.storage.has("a")) == (1, 0, False)
    assert engine.store.failed == 0, "it is counted once"


async def test_what_a_crash_has_left_is_removed_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    async with storing(tmp_path) as engine:
        await engine.save("a")
        await engine.save("b")
    older, newer = sorted(engine.files, key=lambda path: path.stat().st_mtime_ns)
    folder, name = older.parent, newer.name[:40]
    os.utime(older, (0, 0))  # a file system may give both the same time
    shutil.copy(newer, folder / f"{name}-{'0' * 16}.part")
    shutil.copy2(older, folder / f"{name}-{'1' * 16}")  # replaced, but not removed
    (folder / "notes.txt").write_text("mine")
    (folder / "sub").mkdir()
    async with storing(tmp_path) as engine:
        assert engine.files == sorted([older, newer, folder / "notes.txt"])
        assert engine.store.entries == 2
        await engine.restore("b")


# --- room


async def test_the_bound_holds_and_who_was_not_used_for_longest_goes(tmp_path: Path) -> None:
    async with storing(tmp_path, bytes_max=2 * ENTRY_BYTES + 100) as engine:
        await engine.save("a")
        await engine.save("b")
        await engine.restore("a")
        assert (await engine.save("c")).evicted == 1
        assert [engine.storage.has(key) for key in "abc"] == [True, False, True]
        assert sum(path.stat().st_size for path in engine.files) == engine.store.bytes == 2 * ENTRY_BYTES
        with pytest.raises(RequestError, match=r"its file would have \d+ bytes, bytes_max is \d+"):
            await engine.save("d", list(range(16)))
        assert engine.store.entries == 2, "nobody had to go for it"
        await engine.restore("a")
    async with storing(tmp_path, bytes_max=ENTRY_BYTES) as engine:
        assert engine.store.entries == len(engine.files) == 1
        assert engine.storage.has("a"), "it was used last"


async def test_what_is_read_or_written_does_not_go(tmp_path: Path) -> None:
    async with storing(tmp_path, bytes_max=2 * ENTRY_BYTES) as engine:
        await engine.save("a")
        restoring = await engine.held("a")
        saving = asyncio.create_task(engine.save("b"))
        await until(lambda: engine.moves == 2)
        with pytest.raises(StoreFull, match="every other entry is being read or written"):
            await engine.save("c")
        assert not engine.storage.has("b"), "it counts, but is not there yet"
        engine.mover.gate.set()
        await asyncio.gather(restoring, saving)
        engine.assert_equal([4, 5, 6], engine.bytes_of([1, 2, 3]))
        restoring, also = await engine.held("a"), asyncio.create_task(engine.restore("b", [7, 8, 9]))
        await until(lambda: engine.moves == 2)
        with pytest.raises(StoreFull):
            await engine.save("c")
        engine.mover.gate.set()
        await asyncio.gather(restoring, also)
        await engine.save("c")
        restoring = await engine.held("b")
        saving = asyncio.create_task(engine.save("d"))
        await until(lambda: engine.moves > 1 or saving.done())
        engine.mover.gate.set()
        await asyncio.gather(restoring, saving)
        assert [engine.storage.has(key) for key in "abcd"] == [False, True, False, True]


# --- what is dropped


@BOTH
async def test_what_is_dropped_is_gone_and_counted(tmp_path: Path, transport: str) -> None:
    async with storing(tmp_path, transport=transport) as engine:
        for key in "abc":
            await engine.save(key)
        assert await engine.storage.drop(["b", b"b", "never"]) == 1
        assert [engine.storage.has(key) for key in "abc"] == [True, False, True]
        assert (len(engine.files), engine.store.entries, engine.store.bytes) == (2, 2, 2 * ENTRY_BYTES)
        with pytest.raises(NotStored):
            await engine.restore("b")
        await engine.save("b")
        assert await engine.storage.drop() == 3
        assert await engine.storage.drop() == await engine.storage.drop([]) == 0
        assert (engine.files, engine.store.entries, engine.store.bytes, engine.store.dropped) == ([], 0, 0, 4)
    async with storing(tmp_path) as engine:
        assert not engine.storage.has("a")


async def test_entries_of_former_caches_are_dropped_with_all(tmp_path: Path) -> None:
    """Of another model or layout: no key of this cache's finds them."""
    async with storing(tmp_path, model="before") as engine:
        await engine.save("a")
    async with storing(tmp_path, model="after") as engine:
        assert await engine.storage.drop(["a"]) == 0
        assert await engine.storage.drop() == 1
        assert engine.files == []


async def test_a_restore_under_way_ends_well_though_its_entry_is_dropped(tmp_path: Path) -> None:
    async with storing(tmp_path) as engine:
        saved = engine.bytes_of([1, 2, 3])
        await engine.save("a")
        restoring = await engine.held("a")
        handle = asyncio.create_task(engine.restore("a", [7, 8, 9]))  # before its file was opened
        await asyncio.sleep(0)
        assert await engine.storage.drop(["a"]) == 1
        assert engine.files == []
        assert engine.store.bytes == ENTRY_BYTES, "of who reads it still"
        with pytest.raises(NotStored):
            await engine.restore("a", [10, 11, 12])
        saving = asyncio.create_task(engine.save("a", [13, 14, 15]))
        engine.mover.gate.set()
        await asyncio.gather(restoring, handle, saving)
        engine.assert_equal([4, 5, 6], saved)
        engine.assert_equal([7, 8, 9], saved)
        assert engine.storage.has("a"), "it was saved since"
        assert (engine.store.entries, engine.store.bytes, len(engine.files)) == (1, ENTRY_BYTES, 1)


async def test_an_entry_that_makes_room_in_vain_is_not_put_back_once_it_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with storing(tmp_path, bytes_max=ENTRY_BYTES) as engine:
        await engine.save("a")
        with monkeypatch.context() as broken:
            broken.setattr(EntryFile, "create", failing(errno.EIO))
            saving = asyncio.create_task(engine.save("b"))
            await until(lambda: not engine.storage.has("a"))
            assert await engine.storage.drop() == 0
            with pytest.raises(StorageFailed):
                await saving
        await engine.save("c")
        assert not engine.storage.has("a")
        assert (len(engine.files), engine.store.entries) == (1, 1)


async def test_files_that_cannot_be_removed_are_told_of(engine: StoringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in "ab":
        await engine.save(key)
    with monkeypatch.context() as broken:
        broken.setattr("kvflow.storage.disk.os.unlink", failing(errno.EACCES))
        with pytest.raises(
            StorageFailed, match=r"2 entries dropped, but their files may be found again .*Permission denied"
        ):
            await engine.storage.drop()
    assert not engine.storage.has("a"), "nobody finds it in this run"


async def test_a_disk_that_hangs_ends_the_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    async with storing(tmp_path, load_deadline_s=0.1) as engine:
        await engine.save("a", deadline_s=WAIT_S)
        monkeypatch.setattr("kvflow.storage.disk.StoreDirectory.sync", lambda _: gate.wait(WAIT_S))
        with pytest.raises(StorageFailed, match=r"may be found again at the next start: not done within 0\.1 s"):
            await engine.storage.drop()
        gate.set()


@pytest.mark.parametrize("keys", ["a", [7], [""], ["a", "x" * 300], 7, {"a": 1}])
async def test_what_are_no_keys_drops_nothing(engine: StoringEngine, keys: Any) -> None:
    await engine.save("a")
    with pytest.raises(RequestError, match=r"^keys: expected"):
        await engine.storage.drop(keys)
    assert engine.storage.has("a")


# --- the books


async def test_no_time_is_left_for_a_save_or_a_restore(engine: StoringEngine) -> None:
    await engine.save("a")
    for seconds_left in (0, -0.25, float("-inf")):
        for call in (engine.save("b", deadline_s=seconds_left), engine.restore("a", deadline_s=seconds_left)):
            with pytest.raises(
                DeadlineExceeded, match=r"^request '(save b|restore a)': .* its deadline_s was"
            ) as caught:
                await call
            assert caught.value.phase == "queued"
    assert len(engine.files) == 1
    await engine.quiet()


async def test_a_cache_that_has_moved_is_neither_saved_nor_filled(engine: StoringEngine) -> None:
    await engine.save("a")
    engine.kv_caches["layers.1"].share_memory_()
    for call in (engine.save("b"), engine.restore("a")):
        with pytest.raises(LayoutError, match=r"layer 'layers\.1': its tensor has moved .* register again"):
            await call
    assert len(engine.files) == 1
    await engine.quiet()


async def test_blocks_in_use_are_busy(engine: StoringEngine) -> None:
    await engine.save("a")
    restoring = await engine.held("a")
    assert (engine.blocks.in_flight, engine.blocks.free) == (3, 13)
    for ids in ([6], [5, 6]):
        with pytest.raises(BlocksBusy, match="being loaded by another request"):
            await engine.save("b", ids)
        with pytest.raises(BlocksBusy):
            await engine.restore("a", [4, 8, 9])
    with pytest.raises(BlocksBusy):
        engine.runtime.serve_blocks(ServeRequest("x", [4], 4))
    engine.mover.gate.set()
    await restoring
    engine.mover.gate.clear()
    saving = asyncio.create_task(engine.save("b"))
    await until(lambda: engine.moves)
    lease = engine.runtime.serve_blocks(ServeRequest("x", [1], 4))
    assert engine.blocks.leased == 3
    with pytest.raises(BlocksBusy, match="leased to readers"):
        await engine.restore("a", [3, 8, 9])
    engine.mover.gate.set()
    await saving
    await lease.revoke()
    await engine.quiet()


async def test_moves_take_permits_of_the_queue_that_reads_wait_in(tmp_path: Path) -> None:
    async with storing(tmp_path, in_flight_bytes_max=1) as engine:
        await engine.save("a")
        first = await engine.held("a")
        second = asyncio.create_task(engine.restore("a", [7, 8, 9]))
        loading = engine.runtime.statistics
        await until(lambda: loading().loading.waiting_reads)  # type: ignore[union-attr]
        assert loading().loading.peers["store"].in_flight.reads == 1  # type: ignore[union-attr]
        engine.mover.gate.set()
        await asyncio.gather(first, second)
        assert loading().loading.peers == {}  # type: ignore[union-attr]


# --- early ends


@pytest.mark.parametrize("moment", ["digests", "moves", "commit"])
async def test_a_cancelled_save_leaves_nothing_or_an_entry(engine: StoringEngine, moment: str) -> None:
    if moment != "commit":
        engine.mover.gate.clear()
    saving = asyncio.create_task(engine.save("a"))
    reached: dict[str, Callable[[], Any]] = {
        "digests": lambda: engine.blocks.leased,
        "moves": lambda: engine.moves,
        "commit": lambda: not engine.moves and engine.files,
    }
    await until(reached[moment])
    saving.cancel()
    await asyncio.sleep(0)
    engine.mover.gate.set()
    await asyncio.wait([saving])
    await engine.quiet()
    assert len(engine.files) == engine.store.entries
    assert engine.store.bytes == sum(path.stat().st_size for path in engine.files)
    if moment == "moves":
        assert saving.cancelled()
        assert engine.files == []


async def test_a_cancelled_restore_waits_for_its_bytes(engine: StoringEngine) -> None:
    await engine.save("a")
    restoring = await engine.held("a")
    restoring.cancel()
    await asyncio.sleep(0)
    assert not restoring.done()
    assert engine.blocks.in_flight == 3
    engine.mover.gate.set()
    await asyncio.wait([restoring])
    assert restoring.cancelled()
    await engine.quiet()
    await engine.restore("a")


@pytest.mark.parametrize("end", ["cancelled", "late", "failed"])
async def test_bytes_that_do_not_stop_are_quarantined(tmp_path: Path, end: str) -> None:
    async with storing(tmp_path, cancel_grace_s=0.02) as engine:
        await engine.save("a")
        restoring = await engine.held("a", deadline_s=0.05 if end == "late" else None)
        if end != "late":
            restoring.cancel()
        await asyncio.wait([restoring])
        (held,) = engine.storage.quarantines
        assert (held.request_id, held.block_ids, held.safe) == ("restore a", (4, 5, 6), False)
        assert (engine.blocks.quarantined, engine.store.quarantines) == (3, 1)
        if end == "late":
            error = restoring.exception()
            assert isinstance(error, DeadlineExceeded)
            assert (error.phase, error.quarantine) == ("move", held)
        with pytest.raises(BlocksBusy, match="quarantined"):
            await engine.save("b", [4])
        engine.mover.errors = [MoveLost("who knows")] if end == "failed" else []
        engine.mover.gate.set()
        await held.settled()
        assert held.safe
        await engine.quiet()
        assert engine.storage.has("a") == (end != "failed"), "a file that cannot be read is not found"


async def test_a_move_that_fails_fails_its_request(engine: StoringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.mover.errors = [TransportError("no space")]
    with pytest.raises(StorageFailed, match=r"'save a': save in .*: no space") as caught:
        await engine.save("a")
    assert caught.value.request_id == "save a"
    await engine.quiet()
    assert engine.files == []
    await engine.save("a")
    engine.mover.errors = [TransportError("no memory")]
    with pytest.raises(StorageFailed, match="no memory"):
        await engine.restore("a")
    for problem in "a bad sector", "Input/output error":  # in its blocks, or in its header
        with monkeypatch.context() as patched, pytest.raises(StorageFailed, match=problem) as caught:
            if problem == "a bad sector":
                engine.mover.errors = [MoveFailed(problem)]
            else:
                patched.setattr(os, "pread", failing(errno.EIO))
            await engine.restore("a")
        assert caught.value.quarantine is None
        await engine.quiet()
        assert not engine.storage.has("a"), "a file that cannot be read is not found"
        with pytest.raises(NotStored):
            await engine.restore("a")
        assert (len(engine.files), engine.store.bytes) == (1, ENTRY_BYTES), "it may be the disk's fault"
        await engine.save("a")
        await engine.restore("a")
        await until(lambda: len(engine.files) == 1)
    store = engine.store
    assert (store.saved, store.restored, store.missed, store.failed, store.bytes) == (3, 2, 2, 4, ENTRY_BYTES)


@BOTH
async def test_a_file_that_is_cut_while_it_is_read_takes_no_block_away(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = EntryFile.open

    def cut_after_its_header(self: EntryFile) -> Any:
        header = opened(self)
        os.truncate(f"{self._directory.path}/{self.entry.file}", 4096)
        return header

    async with storing(tmp_path, transport=transport) as engine:
        for round in range(3):  # as many blocks are lost in each as there are
            await engine.save("a", list(range(16)))
            with monkeypatch.context() as patched, pytest.raises(StorageFailed) as caught:
                patched.setattr(EntryFile, "open", cut_after_its_header)
                await engine.restore("a", list(range(16)))
            assert caught.value.quarantine is None
            await engine.quiet()
            with pytest.raises(NotStored):
                await engine.restore("a", list(range(16)))
            assert engine.store.failed == round + 1
        await engine.save("a", [1, 2, 3])
        await engine.restore("a")
        engine.assert_equal([4, 5, 6], engine.bytes_of([1, 2, 3]))
        await until(lambda: len(engine.files) == 1)
        await engine.quiet()


async def test_what_is_lost_is_stopped_when_nothing_else_is_under_way_and_what_comes_waits(tmp_path: Path) -> None:
    async with storing(tmp_path, limits=limited(PATIENT, slices_in_flight_max=1).limits) as engine:
        await engine.save("a")
        await engine.save("b")
        first = await engine.held("a")
        second = asyncio.create_task(engine.restore("b", [7, 8, 9]))
        await until(lambda: engine.moves == 2)
        engine.mover.errors = [MoveLost("who knows")]
        engine.mover.gate.set()
        with pytest.raises(StorageFailed, match="who knows") as caught:
            await first
        assert caught.value.quarantine is None
        await second
        assert engine.mover.stop_calls == 1
        await engine.quiet()


async def test_a_move_that_cannot_be_stopped_keeps_its_blocks_until_the_cache_is_given_back(tmp_path: Path) -> None:
    """As with io_uring."""
    async with storing(tmp_path, cancel_grace_s=0.02) as engine:
        await engine.save("a")
        await engine.save("b")
        engine.mover.stop_result = LostMoves.NEVER
        engine.mover.errors = [MoveLost("who knows")]
        with pytest.raises(StorageFailed, match="who knows") as caught:
            await engine.restore("a")
        held = caught.value.quarantine
        assert held is not None
        assert engine.blocks.quarantined == 3
        with pytest.raises(NotStored):
            await engine.restore("a", [7, 8, 9])
        await engine.restore("b", [7, 8, 9])
        await engine.runtime.unregister()
        await held.settled()
        assert held.safe


async def test_no_file_stays_open_where_its_time_cannot_be_set(
    engine: StoringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that the system makes read-only after an error."""
    await engine.save("a")
    monkeypatch.setattr(os, "utime", failing(errno.EROFS))
    for _ in range(2):
        await engine.restore("a")
    await engine.quiet()
    (path,) = engine.files
    assert str(path) not in [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]


async def test_a_file_that_has_its_name_counts_though_the_folder_cannot_be_synced(
    engine: StoringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("kvflow.storage.disk.StoreDirectory.sync", failing(errno.EIO))
        with pytest.raises(StorageFailed, match="Input/output error"):
            await engine.save("a")
    await engine.quiet()
    assert engine.store.bytes == sum(path.stat().st_size for path in engine.files) == ENTRY_BYTES
    await engine.restore("a")


def disk_of(folder: Path, size_bytes: int, number: int = errno.ENOSPC) -> Callable[[int, int, int], None]:
    """`os.posix_fallocate` on a disk of `size_bytes`, on which only `folder` takes room."""

    def allocate(fd: int, offset: int, count: int) -> None:
        taken = sum(path.stat().st_size for path in folder.rglob("*-*") if path.is_file())
        if taken + count > size_bytes:
            raise OSError(number, os.strerror(number))
        os.ftruncate(fd, offset + count)

    return allocate


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_a_disk_smaller_than_bytes_max_evicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", disk_of(tmp_path, 2 * ENTRY_BYTES, number))
    async with storing(tmp_path) as engine:
        assert [(await engine.save(key)).evicted for key in "abcd"] == [0, 0, 1, 1]
        assert engine.store.evicted == 2
        assert [key for key in "abcd" if engine.storage.has(key)] == ["c", "d"]
        await engine.restore("d")
        await engine.quiet()
        assert engine.store.bytes == sum(path.stat().st_size for path in engine.files) == 2 * ENTRY_BYTES
    assert f"{os.strerror(number)} at {2 * ENTRY_BYTES} bytes of bytes_max" in caplog.text


async def test_a_disk_that_others_fill_costs_few_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with storing(tmp_path) as engine:
        for key in "abcde":
            await engine.save(key)
        with monkeypatch.context() as full:
            full.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
            with pytest.raises(StorageFailed, match="No space left on device"):
                await engine.save("f")
        await engine.quiet()
        assert [key for key in "abcdef" if engine.storage.has(key)] == ["c", "d", "e"]
        assert engine.store.bytes == sum(path.stat().st_size for path in engine.files) == 3 * ENTRY_BYTES
        await engine.save("f")


async def test_a_save_that_fails_leaves_a_newer_entry_of_whom_it_has_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committing, go_on = threading.Event(), threading.Event()
    sync, allocate = os.fsync, os.posix_fallocate

    def wait(fd: int) -> None:
        committing.set()
        go_on.wait()
        sync(fd)

    async with storing(tmp_path, bytes_max=3 * ENTRY_BYTES) as engine:
        await engine.save("a")
        await engine.save("b")
        engine.mover.gate.clear()
        newer = asyncio.create_task(engine.save("a", [7, 8, 9]))
        await until(lambda: engine.moves)
        monkeypatch.setattr(os, "fsync", wait)
        engine.mover.gate.set()
        await until(committing.is_set)
        monkeypatch.setattr(os, "posix_fallocate", failing(errno.EIO))
        late = asyncio.create_task(engine.save("c"))  # which "a" has to go for, as it was
        await until(lambda: engine.store.evicted)
        go_on.set()
        await newer
        with pytest.raises(StorageFailed, match="Input/output error"):
            await late
        monkeypatch.setattr(os, "posix_fallocate", allocate)
        await engine.quiet()
        await engine.restore("a")
        engine.assert_equal([4, 5, 6], engine.bytes_of([7, 8, 9]))
        assert engine.store.entries == len(engine.files) == 2
        assert engine.store.bytes == sum(path.stat().st_size for path in engine.files)


@pytest.mark.parametrize("end", ["cancelled", "failed"])
async def test_who_could_not_be_removed_to_make_room_is_an_entry_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    removing, go_on = threading.Event(), threading.Event()

    def fail(path: str) -> None:
        removing.set()
        go_on.wait()
        raise OSError(5, "Input/output error")

    async with storing(tmp_path, bytes_max=2 * ENTRY_BYTES) as engine:
        await engine.save("a")
        await engine.save("b")
        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", fail)
            saving = asyncio.create_task(engine.save("c"))
            await until(removing.is_set)
            assert not engine.storage.has("a")
            if end == "cancelled":
                saving.cancel()
                await asyncio.sleep(0)
            go_on.set()
            await asyncio.wait([saving])
            await engine.quiet()
        assert saving.cancelled() or isinstance(saving.exception(), StorageFailed)
        assert engine.store.bytes == sum(path.stat().st_size for path in engine.files) == 2 * ENTRY_BYTES
        assert (await engine.save("c")).evicted == 1
        assert [engine.storage.has(key) for key in "abc"] == [False, True, True]


@pytest.mark.parametrize("verb", ["unregister", "aclose"])
async def test_whoever_is_under_way_when_the_cache_goes_ends(tmp_path: Path, verb: str) -> None:
    async with storing(tmp_path) as engine:
        await engine.save("a")
        restoring = await engine.held("a")
        saving = asyncio.create_task(engine.save("b"))
        await until(lambda: engine.moves == 2)
        going = asyncio.create_task(getattr(engine.runtime, verb)())
        await asyncio.sleep(0)
        engine.mover.gate.set()
        await going
        for task in (restoring, saving):
            if verb == "aclose":  # it lets them end in peace
                await task
            else:
                with pytest.raises(CacheUnregistered):
                    await task
        if verb == "unregister":
            with pytest.raises(CacheUnregistered):
                await engine.save("c")
            assert engine.storage.statistics == engine.store
            assert engine.store.entries == 1
    async with storing(tmp_path) as engine:
        assert not [path for path in engine.files if path.suffix]
        await engine.restore("a")


async def test_who_is_late_when_the_runtime_closes_is_told(tmp_path: Path) -> None:
    async with storing(tmp_path, drain_timeout_s=0.02) as engine:
        await engine.save("a")
        restoring = await engine.held("a")
        closing = asyncio.create_task(engine.runtime.aclose())
        store = engine.storage._store
        assert store is not None
        await until(lambda: store._close_error)
        engine.mover.gate.set()
        await closing
        with pytest.raises(RuntimeClosed):
            await restoring


async def test_a_move_that_never_stops_breaks_the_runtime_that_is_to_give_its_memory_back(tmp_path: Path) -> None:
    """As with a read that never stops, the blocks stay unusable."""
    limits = limited(PATIENT, transport_close_timeout_s=0.05).limits
    with pytest.raises(AssertionError, match=r"blocks in use: .*quarantined=3"):
        async with storing(tmp_path, cancel_grace_s=0.02, drain_timeout_s=0.02, limits=limits) as engine:
            await engine.save("a")
            restoring = await engine.held("a")
            with pytest.raises(RuntimeBroken, match=r"not stopped within .* of the store"):
                await engine.runtime.unregister()
            with pytest.raises(CacheUnregistered) as caught:
                await restoring
            assert caught.value.quarantine is not None
            with pytest.raises(RuntimeBroken):
                await caught.value.quarantine.settled()
            assert not caught.value.quarantine.safe


async def test_a_bug_that_kills_the_thread_leaves_nobody_waiting(tmp_path: Path) -> None:
    limits = limited(PATIENT, transport_close_timeout_s=1.0).limits
    with pytest.raises(RuntimeBroken, match="the store's thread has died: a bug"):
        async with storing(tmp_path, cancel_grace_s=0.02, drain_timeout_s=0.02, limits=limits) as engine:
            await engine.save("a")
            engine.mover.errors = [ValueError("a bug")]
            with pytest.raises(RuntimeBroken, match="died: a bug") as caught:
                await engine.restore("a")
            held = caught.value.quarantine
            assert held is not None
            assert not held.safe
            with pytest.raises(RuntimeBroken):
                await engine.save("b")
            with pytest.raises(RuntimeBroken):
                await engine.runtime.unregister()
            with pytest.raises(RuntimeBroken):
                await held.settled()
    async with storing(tmp_path) as engine:
        await engine.restore("a")


async def test_while_it_drains_nothing_is_begun_and_what_was_goes_on(engine: StoringEngine) -> None:
    await engine.save("a")
    restoring = await engine.held("a")
    draining = asyncio.create_task(engine.runtime.drain(60.0))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeDraining):
        await engine.save("b")
    engine.mover.gate.set()
    assert await draining
    await restoring


# --- who may


async def test_a_storage_works_for_the_runtime_that_it_was_given_to(tmp_path: Path) -> None:
    kv_caches, layout = small_cache()
    config = replace(PATIENT, transport="inproc", listen="tcp://127.0.0.1:0")
    storage = Storage(tmp_path)
    async with Runtime(config, parts=[storage]) as runtime:
        with pytest.raises(UsageError, match=r"save: .*: no runtime has registered a KV cache"):
            await storage.save(SaveRequest("s", "a", [1], 4))
        with pytest.raises(UsageError, match=r"has: .*: no runtime has registered"):
            storage.has("a")
        assert (storage.statistics, storage.quarantines, runtime.statistics().parts) == (None, (), {})
        await runtime.register_kv_caches(kv_caches, layout)
        assert not storage.has("a")
        async with Runtime(replace(config, engine_id="other"), parts=[storage]) as other:
            with pytest.raises(ConfigError, match="part of another runtime"):
                await other.register_kv_caches(*small_cache())
            assert other.statistics().parts == {}
        async with Runtime(replace(config, engine_id="idle"), parts=[storage]):
            pass
        await storage.save(SaveRequest("s", "a", [1], 4))
        assert storage.has("a"), "the others have ended nothing of it"


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (1, r"parts: expected a list, got 1"),
        (["storage"], r"parts\[0\]: expected a Part"),
        ([Storage("a"), Storage("b")], "parts: storage is listed more than once"),
    ],
)
def test_what_is_no_list_of_parts_is_refused(parts: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Runtime(PATIENT, parts=parts)


@pytest.mark.parametrize("wrong", [{"folder": 1}, {"folder": "a\0b"}, {"bytes_max": 0}, {"bytes_max": True}], ids=str)
def test_what_cannot_be_a_storage_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Storage(**{"folder": "blocks", **wrong})


async def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    """Values of another type are in `tests/test_border.py`."""
    right: dict[str, Any] = {"request_id": "req", "key": "a", "block_ids": [1, 2], "num_tokens": 8}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"key": ""}, "key: expected 1 to 256 bytes, got 0"),
        ({"block_ids": [1, 1]}, "block id 1 is given twice"),
        ({"block_ids": [1, 99]}, "block id 99"),
        ({"block_ids": [1]}, "group 'kv': 1 block of 4 tokens, num_tokens 8 needs 2"),
        ({"block_ids": [1, 2, 3]}, "3 blocks of 4 tokens"),
        ({"num_tokens": 0}, "num_tokens: expected `int` >= 1"),
        ({"deadline_s": float("nan")}, "deadline_s"),
    ]
    async with storing(tmp_path) as engine:
        for kind, verb in ((SaveRequest, "save"), (RestoreRequest, "restore")):
            for changes, message in wrong:
                with pytest.raises(RequestError, match=f"request 'req': .*{message}"):
                    await getattr(engine.storage, verb)(kind(**right | changes))
            with pytest.raises(RequestError, match=verb):
                await getattr(engine.storage, verb)("nonsense")
        assert engine.store.failed == 0
        await engine.quiet()
