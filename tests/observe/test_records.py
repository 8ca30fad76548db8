"""Records are complete and final, one for each load and lease; observers cannot hurt a runtime."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from pairs import virtual_pair
from tests_support import Records, each, in_virtual_time, until

from kvflow import Config, LoadRequest, Runtime, ServeRequest, Ticket
from kvflow.core.plan.topology import Rank
from kvflow.errors import RequestError, RuntimeDraining
from kvflow.runtime.records import LeaseRecord, LoadRecord, Observers
from kvflow.testing import CacheSize, InprocCluster, inproc_pair
from tests.observe.observed import TRACEPARENT, grown, observed


class Saboteur(Records):
    def load_ended(self, record: LoadRecord) -> None:
        raise ValueError("no loads, please")

    def lease_ended(self, record: LeaseRecord) -> None:
        raise ValueError("no leases, please")


async def test_each_load_and_lease_has_one_record() -> None:
    notebook = Records()
    async with observed([notebook]) as pair:
        layout = pair.consumer.layout
    good, bad = notebook.loads
    assert (good.outcome, good.error, good.phase) == ("loaded", "", "notify")
    assert (good.engine_id, good.rank, good.request_id) == ("consumer", Rank(0, 0, 0), "good")
    assert (good.peer_engine_id, good.remote_request_id, good.traceparent) == ("producer", "good", TRACEPARENT)
    assert (good.blocks, good.bytes) == (2, 2 * layout.block_size_bytes)
    assert good.seconds["wire"] > 0
    assert (bad.outcome, bad.phase, bad.traceparent) == ("LeaseExpired", "wire", "")
    assert "the lease has ended" in bad.error
    leases = {record.request_id: record for record in notebook.leases}
    assert {name: (record.outcome, record.readers) for name, record in leases.items()} == {
        "good": ("read", 1),
        "bad": ("revoked", 0),
    }
    assert leases["good"].seconds["held"] >= pair.producer.runtime.config.limits.seal_hold_s
    assert (leases["good"].blocks, leases["good"].tokens, leases["good"].traceparent) == (2, 8, TRACEPARENT)
    moments = [record.computed for record in notebook.leases] + [record.landed for record in notebook.loads]
    assert not any(moments), "all was there from the start"


async def test_refused_loads_have_records_too() -> None:
    """A count of failures includes refused loads: wrong requests, wrong prompts, draining."""
    notebook = Records()
    async with inproc_pair(observers=[notebook]) as pair:
        consumer = pair.consumer.runtime
        lease = pair.producer.runtime.serve_blocks(ServeRequest("req", [3], num_tokens=4, prompt=[1, 2, 3, 4]))
        for ticket, blocks, prompt in (({}, [0], None), (lease.ticket, [99], None), (lease.ticket, [0], [1, 2, 3, 5])):
            with pytest.raises(RequestError):
                await consumer.load_blocks(LoadRequest("req", ticket=ticket, block_ids=blocks, prompt=prompt))
        assert await consumer.drain(1.0)
        with pytest.raises(RuntimeDraining):
            await consumer.load_blocks(pair.wanted(lease, [0]))
        lease.revoke()
        loading = consumer.statistics().loading
        assert loading is not None
        assert (loading.refused, loading.failed) == (4, 0)
    outcomes = [record.outcome for record in notebook.loads]
    assert outcomes == ["RequestError", "RequestError", "PromptMismatch", "RuntimeDraining"]
    assert {record.request_id for record in notebook.loads} == {"req"}
    assert "99" in notebook.loads[1].error


async def test_a_cancelled_load_has_a_record() -> None:
    notebook = Records()
    async with inproc_pair(observers=[notebook]) as pair:
        pair.consumer.transport.faults.hold = True
        lease = pair.offer([1])
        load = asyncio.create_task(pair.consumer.runtime.load_blocks(pair.wanted(lease, [0])))
        await until(lambda: pair.consumer.transport.held)
        load.cancel()
        while pair.consumer.runtime.statistics().loading.open_loads and not load.done():
            pair.consumer.transport.perform()
            await asyncio.sleep(0)
        assert load.cancelled()
        lease.revoke()
        await lease
    (record,) = notebook.loads
    assert (record.outcome, record.error, record.phase) == ("cancelled", "", "wire")


async def test_an_observer_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    notebook = Records()
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match=r"no (loads|leases), please") as caught:
        async with observed([Saboteur(), notebook]):
            pass
    assert caught.value.__notes__[0].startswith("an observer failed on L")
    assert len(notebook.loads) == len(notebook.leases) == 2
    failed = [record.getMessage().removeprefix("an observer failed on ").split("(")[0] for record in caplog.records]
    assert sorted(failed) == ["LeaseRecord", "LeaseRecord", "LoadRecord", "LoadRecord"]


async def one_lease(runtime: Runtime) -> None:
    kv_caches, cache = CacheSize(layers=1).make("b")
    await runtime.register_kv_caches(kv_caches, cache.layout)
    await runtime.serve_blocks(ServeRequest("req", [1], num_tokens=4)).revoke()


async def test_in_a_test_an_observers_error_is_the_tests() -> None:
    """However the engine was opened, and whoever watches."""
    cluster = InprocCluster()
    with pytest.raises(ValueError, match="no leases, please"):
        async with cluster.engine("a") as engine:
            with engine.runtime._observers.adding(Saboteur()):
                await engine.runtime.serve_blocks(ServeRequest("req", [1], num_tokens=4)).revoke()
    config = Config(engine_id="b", listen="tcp://127.0.0.1:0")
    runtime = Runtime(config, observers=[Saboteur()], world=cluster.world())
    with pytest.raises(ValueError, match="no leases, please"):
        async with runtime:
            await one_lease(runtime)
    await runtime.aclose()  # it is told once


async def test_a_real_runtime_forgives(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(engine_id="b", listen="tcp://127.0.0.1:0", transport="inproc")
    with caplog.at_level(logging.ERROR):
        async with Runtime(config, observers=[Saboteur()]) as runtime:
            await one_lease(runtime)
    assert len(caplog.records) == 1


def test_an_observer_that_always_raises_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    facts: dict[str, Any] = dict.fromkeys(("engine_id", "request_id", "traceparent"), "") | {"rank": Rank(0, 0, 0)}
    counts: dict[str, Any] = dict.fromkeys(("blocks", "tokens", "readers"), 0)
    record = LeaseRecord(outcome="read", blocks_by_group={}, seconds={}, **facts, **counts)
    saboteur, now_and_then = Saboteur(), Saboteur()
    observers = Observers([saboteur])
    for _ in range(1000):
        observers.lease_ended(record)
    with observers.adding(now_and_then):
        observers.lease_ended(record)
    observers.close()
    logged = [line.getMessage() for line in caplog.records if line.exc_info]
    assert len(logged) == 10 + 1, "1, 2, 4 ... 512, and the other's first"
    assert "left out" not in logged[1]
    assert logged[3].endswith(" (not logged: 3 failures)")
    assert logged[9].endswith(" (not logged: 255 failures)")
    assert logged[10].startswith("an observer failed on LeaseRecord(")
    rest = [line.getMessage() for line in caplog.records if not line.exc_info]
    assert rest == ["an observer failed 1001 times; the last 489 were not logged"]
    observers.close()
    assert len(caplog.records) == 12


@each("staging", ["never", "always"])
@in_virtual_time
async def test_what_flows_says_when_it_was_computed_and_when_it_landed(staging: str) -> None:
    notebook = Records()
    await grown([notebook], staging=staging)
    (lease,), (load,) = notebook.leases, notebook.loads
    assert [tokens for _, tokens in lease.computed] == [4, 8, 14, 15]
    assert [seconds for seconds, _ in lease.computed] == pytest.approx([0.0, 2.0, 3.0, 4.0], abs=0.05)
    assert load.landed[-1].tokens == 15
    assert load.landed[-1].seconds == pytest.approx(3.0, abs=0.05)
    for seconds, tokens in load.landed:  # it began a second after the lease; how much is worth a read is its own matter
        assert tokens <= max(count for told_s, count in lease.computed if told_s <= seconds + 1.0 + 1e-9)
    assert load.landed[-1].seconds <= sum(load.seconds.values())


FIELDS = TRACEPARENT.removeprefix("00")
HEADERS: list[tuple[Any, str]] = [
    ("", ""),
    (None, ""),
    (TRACEPARENT, TRACEPARENT),
    (f"\t{TRACEPARENT} ", TRACEPARENT),
    ("00" + FIELDS[:-2] + "fe", "00" + FIELDS[:-2] + "fe"),
    ("cc" + FIELDS, TRACEPARENT),  # a later version, by its first fields
    ("cc" + FIELDS[:-2] + "ff-more.of-it", TRACEPARENT),
    ("cc" + FIELDS + "x", ""),
    ("ff" + FIELDS, ""),
    *((wrong, "") for wrong in ("x", TRACEPARENT[:-1], TRACEPARENT + "-", TRACEPARENT + "\n", TRACEPARENT.upper())),
    *((wrong, "") for wrong in (f"00-{'0' * 32}{FIELDS[33:]}", f"{TRACEPARENT[:36]}{'0' * 16}-01", "\ud800")),
]


@each(("header", "carried"), HEADERS)
@in_virtual_time
async def test_a_client_s_traceparent_is_no_error(header: Any, carried: str) -> None:
    """W3C: what does not parse is ignored, and unknown versions are read as far as they are known."""
    async with virtual_pair() as pair:
        lease = pair.writer.serve_blocks(ServeRequest("req", [1], num_tokens=4, traceparent=header))
        assert lease.ticket.traceparent == carried
        assert Ticket.rendezvous(pair.writer.introduce(), "later", traceparent=header).traceparent == carried
        params = lease.ticket.to_params()
        params["kvflow"]["traceparent"] = header or ""
        assert Ticket.from_params(params).traceparent == carried
        await pair.reader.load_blocks(LoadRequest("req", params, [0]))
