"""Blocks of a cache on the stand-in, into files and back, through host buffers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvflow.errors import ConfigError, EntryDamaged, KVFlowError, StorageFailed
from kvflow.storage import RestoreRequest, SaveRequest, Storage
from kvflow.testing import assert_quiet
from tests.accelerator.sides import (
    BLOCK_SIZE,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    THERE,
    Engine,
    EngineCopier,
    Side,
    Site,
    finish,
)
from tests.accelerator.standin import StandIn
from tests.support.tests_support import turns, until

pytestmark = pytest.mark.usefixtures("no_blocking_calls")

BLOCK_BYTES = LAYERS * 2 * BLOCK_SIZE * HEADS * HEAD_SIZE * 4
SAVED, RESTORED = [1, 7, 2, 5, 4], [3, 0, 9, 8, 6]
TOKENS = len(SAVED) * BLOCK_SIZE - 1
LATER = 1 << 20  # copies: all
WAYS = {
    "own copies": {},
    "the engine's": {"engine_copies": True},
    "few buffers": {"settings": {"host_buffer_bytes_max": 2 * BLOCK_BYTES}},
    "NHD, fused": {"order": "NHD", "style": "fused"},
    "MLA": {"style": "mla"},
}


@pytest.fixture(params=["inproc", pytest.param("nixl", marks=pytest.mark.nixl)])
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    async with Site(request.param) as site:
        yield site


async def opened(site: Site, folder: Path, device: str = THERE, **side: Any) -> Engine:
    settings = {"transport": site.transport, **side.pop("settings", {})}
    return await site.engine("engine", Side(device=device, settings=settings, **side), parts=[Storage(folder)])


def storage(engine: Engine) -> Any:
    (part,) = engine.parts
    return part


def save(engine: Engine, **options: Any) -> Any:
    return storage(engine).save(SaveRequest("save", key="prompt", block_ids=SAVED, num_tokens=TOKENS, **options))


def restore(engine: Engine, **options: Any) -> Any:
    request = RestoreRequest("restore", key="prompt", block_ids=RESTORED, num_tokens=TOKENS, **options)
    return storage(engine).restore(request)


def rows(engine: Engine, ids: list[int]) -> list[torch.Tensor]:
    """Return blocks as a kernel sees them that is launched now."""
    found = engine.seen()
    finish()
    return [found.slots(layer, part)[ids] for layer in range(LAYERS) for part in range(len(found.parts))]


async def until_files_closed(engine: Engine) -> None:
    """Until the files of saves and restores that have ended early are closed."""
    await until(lambda: not storage(engine).statistics.open_requests)


def overwrite(engine: Engine) -> None:
    for layer in engine.kv_caches.values():
        for tensor in layer if isinstance(layer, tuple) else (layer,):
            tensor.zero_()
    finish()


async def until_host_waits(standin: StandIn, task: asyncio.Future[Any]) -> None:
    await until(lambda: standin.waiting() or task.done())
    assert not task.done(), f"reported while {standin.queued()} operations are queued"


@pytest.mark.parametrize("way", WAYS)
async def test_what_was_saved_comes_back(standin: StandIn, site: Site, tmp_path: Path, way: str) -> None:
    engine = await opened(site, tmp_path, **WAYS[way])
    saved = rows(engine, SAVED)
    with standin.held():
        task = asyncio.ensure_future(save(engine))
        await until_host_waits(standin, task)
    report = await task
    assert (report.blocks, report.tokens) == (len(SAVED), TOKENS)
    overwrite(engine)
    with standin.held():
        task = asyncio.ensure_future(restore(engine))
        await until_host_waits(standin, task)
    assert (await task).blocks == len(SAVED)
    assert all(map(torch.equal, rows(engine, RESTORED), saved))
    untouched = [block for block in range(engine.layout.num_blocks) if block not in RESTORED]
    assert not any(found.any() for found in rows(engine, untouched))
    assert_quiet(engine.runtime.statistics())


async def test_a_save_writes_nothing_to_the_device(
    standin: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, directions = EngineCopier.__call__, list[str]()

    def watched(self: EngineCopier, host_caches: Any, pairs: Any, direction: str) -> None:
        directions.append(direction)
        copy(self, host_caches, pairs, direction)

    monkeypatch.setattr(EngineCopier, "__call__", watched)
    async with Site("inproc") as site:
        engine = await opened(site, tmp_path, engine_copies=True)
        await save(engine)
        assert set(directions) == {"to_host"}
        await restore(engine)
        assert set(directions) == {"to_host", "to_device"}


async def test_an_entry_of_a_device_is_an_entry_of_the_host(standin: StandIn, tmp_path: Path) -> None:
    """A layout is what counts, not where it lies."""
    async with Site("inproc") as site:
        engine = await opened(site, tmp_path)
        saved = rows(engine, SAVED)
        await save(engine)
    async with Site("inproc") as site:
        engine = await opened(site, tmp_path, device="cpu")
        await restore(engine)
        assert all(map(torch.equal, rows(engine, RESTORED), saved))


@pytest.mark.parametrize("verb", [save, restore])
async def test_a_copy_that_fails_is_an_error(standin: StandIn, tmp_path: Path, verb: Any) -> None:
    async with Site("inproc") as site:
        engine = await opened(site, tmp_path)
        await save(engine)
        standin.fail_copies(LATER)
        with pytest.raises(StorageFailed, match="a copy is to fail"):
            await verb(engine)
        standin.fail_copies(0)
        await restore(engine)
        assert_quiet(engine.runtime.statistics())


async def test_a_damaged_file_is_found(standin: StandIn, tmp_path: Path) -> None:
    async with Site("inproc") as site:
        engine = await opened(site, tmp_path)
        await save(engine)
        (file,) = (path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > BLOCK_BYTES)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(EntryDamaged):
            await restore(engine)


@pytest.mark.parametrize("steps", range(1, 60, 6))
@pytest.mark.parametrize("verb", [save, restore])
async def test_one_that_is_cancelled_anywhere_leaves_nothing(
    standin: StandIn, tmp_path: Path, verb: Any, steps: int
) -> None:
    async with Site("inproc") as site:
        engine = await opened(site, tmp_path, settings={"host_buffer_bytes_max": 2 * BLOCK_BYTES})
        saved = rows(engine, SAVED)
        await save(engine)
        task = asyncio.ensure_future(verb(engine))
        await turns(steps)
        task.cancel()
        await asyncio.wait([task])
        await until_files_closed(engine)
        await until(lambda: not storage(engine).quarantines and not engine.runtime.statistics().buffers_used)
        overwrite(engine)
        await restore(engine)
        assert all(map(torch.equal, rows(engine, RESTORED), saved))
        assert_quiet(engine.runtime.statistics())


async def test_a_restore_that_is_cancelled_while_the_device_is_held(standin: StandIn, tmp_path: Path) -> None:
    """Its blocks are quarantined until its copies have run."""
    async with Site("inproc") as site:
        engine = await opened(site, tmp_path, settings={"cancel_grace_s": 0.01})
        saved = rows(engine, SAVED)
        await save(engine)
        with standin.held():
            task = asyncio.ensure_future(restore(engine))
            await until_host_waits(standin, task)
            task.cancel()
            await asyncio.wait([task])
            (quarantined,) = storage(engine).quarantines
            with pytest.raises(KVFlowError, match="quarantined"):
                engine.serve(RESTORED)
        await quarantined.settled()
        assert all(map(torch.equal, rows(engine, RESTORED), saved)), "every byte has landed"
        await until_files_closed(engine)
        assert_quiet(engine.runtime.statistics())


async def test_a_device_that_is_read_directly_says_what_to_set(standin: StandIn, tmp_path: Path) -> None:
    async with Site("direct") as site:
        with pytest.raises(ConfigError, match=r"storage: .* the cache is on 'standin': set staging='always'"):
            await opened(site, tmp_path, settings={"transport": "inproc"})
        engine = await opened(site, tmp_path, settings={"transport": "inproc", "staging": "always"})
        await save(engine)
