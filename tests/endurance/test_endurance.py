"""The endurance run, small and in one process: some hundred loads of every kind; and planted errors that it finds."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.endurance import plans
from tests.endurance.__main__ import judge, table
from tests.endurance.consumer import Consumer
from tests.endurance.engine import serve
from tests.endurance.fleet import FAULTS, Fleet
from tests.endurance.plans import WAYS, End, draw
from tests.endurance.samples import growth
from tests.support.tests_support import WAIT_S
from tests.support.verbs import Client

LOADS = 250


@contextlib.asynccontextmanager
async def engine(path: Path, role: str, **options: Any) -> AsyncIterator[Client]:
    """As the run's processes are, but in this one."""
    until = asyncio.Event()
    serving = asyncio.create_task(serve(path, role, options, until))
    try:
        async with asyncio.timeout(WAIT_S):
            while path.name not in os.listdir(path.parent):
                if serving.done():
                    await serving
                await asyncio.sleep(0)
        client = await Client().connect(path)
        yield client
        await client.close()
    finally:
        until.set()
        await serving


@pytest.mark.nixl
async def test_some_hundred_loads_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "LONG_TTL_S", 4.0)  # those that nobody reads are waited for
    where = tmp_path / "producer"
    async with (
        engine(where, "producer", seed=1) as producer,
        engine(
            tmp_path / "consumer",
            "consumer",
            seed=1,
            first=0,
            workers=12,
            engine_id="consumer",
            store_dir=str(tmp_path / "store"),
            producer=str(where),
        ) as consumer,
    ):
        fleet = Fleet(producer, consumer, None, seed=1, leases=60, quiet=False)
        found = await fleet.run(0.0, LOADS, every_s=1.0, fault_s=0.2)
    assert found.violations == []
    assert found.loads >= LOADS
    assert sum(found.faults.values()) >= 1
    assert found.leases[0]["open"] >= 60
    assert found.outcomes["outcomes"]["loaded"] > LOADS // 2
    assert "0 violations" in table(judge({"shm": found}))


def test_everything_is_drawn() -> None:
    drawn = Counter(name for number in range(3000) for name in draw(5, number).features)
    assert {f"{producer} -> {consumer}" for producer, consumer in WAYS} <= set(drawn)
    assert {str(end) for end in End if end is not End.NONE} <= set(drawn)
    assert len(drawn) == len(WAYS) + len(End) - 1 + 16, drawn
    assert min(drawn.values()) > 20


def test_what_grows_is_told() -> None:
    flat = {"heap_mib": 300.0, "objects": 9e5, "kvflow_objects": 2e3}
    flat |= {"fds": 90, "threads": 40, "sockets": 12, "tasks": 30}
    for name in flat:
        rising = [{**flat, name: flat[name] * (1.0 + step / 20)} for step in range(20)]
        assert [what for what, number in growth(rising).items() if not number["flat"]] == [name]
    assert all(number["flat"] for number in growth([flat] * 20).values())


@pytest.mark.nixl
async def test_wrong_bytes_are_found(tmp_path: Path) -> None:
    """A token that is another one, a block beside a load, an outcome that nothing explains."""
    consumer = Consumer(1, 0, 0, "consumer", str(tmp_path), tmp_path / "nobody")
    cache = consumer.homes["plain"].cache
    tables = cache.take(40)
    cache.fill(tables, 7, 40, range(40))
    assert cache.difference(tables, 7, 40) == ""
    assert "token 0 of 40" in cache.difference(tables, 8, 40)
    cache.groups[0].views[3][tables[0][2], 3, 0, 0] ^= 1
    assert "token 35 of 40" in cache.difference(tables, 7, 40)
    cache.groups[0].views[0][tables[0][-1] + 1] ^= 1
    cache.check_around(tables)
    assert "written to beside a load" in cache.errors[0]
    cache.check_all_free()
    assert "never given back" in cache.errors[-1]
    consumer._wire.close()
    assert set(FAULTS) >= {"cut", "revoke", "forget"}
