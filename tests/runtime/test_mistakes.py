"""Mistakes that no call can refuse are logged once, in one line."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from typing import Any

import pytest
from pairs import EnginePair, engine_world, load_request, open_pair, virtual_pair
from tests_support import each, in_virtual_time, small_cache

from kvflow import Runtime, ServeRequest, Ticket
from kvflow.errors import RequestError
from kvflow.runtime.load.requests import Attempt


def lines(caplog: pytest.LogCaptureFixture, level: str = "WARNING") -> list[str]:
    """The lines of a level so far, which are forgotten."""
    found = [record.getMessage() for record in caplog.records if record.levelname == level]
    caplog.clear()
    return found


@each(("served", "loaded"), [(range(8), None), (None, range(8))])
@in_virtual_time
async def test_a_prompt_on_one_side_only(served: Any, loaded: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with virtual_pair() as pair:
        for number in range(3):
            lease = pair.writer.serve_blocks(ServeRequest(f"req {number}", [3, 4], 8, prompt=served))
            await pair.load(lease, [0, 1], prompt=loaded)
            said = lines(caplog)
            assert len(said) == (number == 0)
            assert all("'producer'" in line and "give prompt= on both sides" in line for line in said)


@in_virtual_time
async def test_prompts_on_both_sides_or_none_or_of_connectors_are_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    async with virtual_pair() as pair:
        for prompt, options in ((None, {}), (range(8), {"prompt": range(8)}), (range(8), {"num_tokens": 8})):
            lease = pair.writer.serve_blocks(ServeRequest("req", [3, 4], 8, prompt=prompt))
            await pair.load(lease, [0, 1], **options)
            await lease
        assert lines(caplog) == []


async def test_two_engines_with_one_engine_id(caplog: pytest.LogCaptureFixture) -> None:
    async with open_pair() as pair, Runtime(pair.writer.config, world=engine_world(pair)) as twin:
        await twin.register_kv_caches(*small_cache(num_blocks=16))
        for number, producer in enumerate((pair.writer, twin, pair.writer, twin)):
            lease = producer.serve_blocks(ServeRequest(f"req {number}", [3], 4))
            await pair.load(lease)
            said = lines(caplog)
            assert len(said) == (number == 1)
            assert all(place in line for line in said for place in (pair.writer.address, twin.address, "'producer'"))


async def test_a_reader_with_the_engine_id_of_its_producer(caplog: pytest.LogCaptureFixture) -> None:
    async with open_pair() as pair, Runtime(pair.writer.config, world=engine_world(pair)) as twin:
        await twin.register_kv_caches(*small_cache(num_blocks=16))
        await twin.load_blocks(load_request(pair.offer([3])))
        (line,) = lines(caplog)
        assert "(this engine)" not in line
        assert twin.address in line


@in_virtual_time
async def test_a_name_of_a_pending_ticket_that_can_be_guessed(caplog: pytest.LogCaptureFixture) -> None:
    async with virtual_pair() as pair:
        for name, said in (("long enough", False), ("7", True), ("8", False)):
            pair.writer.serve_blocks(ServeRequest(name, [3], 4))
            await pair.load(Ticket.rendezvous(pair.writer.introduce(), name), [0])
            assert ["kvflow.secret_id" in line for line in lines(caplog)] == [True] * said


async def test_keep_leases_without_with(pair: EnginePair, caplog: pytest.LogCaptureFixture) -> None:
    lease = pair.offer([3], "kept")
    with pair.reader.keep_leases(lease.ticket):
        pass
    assert lines(caplog) == []
    pair.reader.keep_leases(lease.ticket)
    gc.collect()
    (line,) = lines(caplog)
    assert "request 'kept': keep_leases() was called without `with`" in line
    lease.revoke()


async def test_a_started_load_that_fails_and_is_not_awaited(pair: EnginePair, caplog: pytest.LogCaptureFixture) -> None:
    lease = pair.offer([3], "lost").revoke()
    for request in (load_request(lease, [0]), load_request(lease, [99])):  # one is carried out, one is refused
        load = pair.reader.start_load(request)
        await load.settled()
        await asyncio.sleep(0)
        assert lines(caplog, "ERROR") == []
        del load
        gc.collect()
        (line,) = lines(caplog, "ERROR")
        assert "exception was never retrieved" in line
        assert "request 'lost'" in line


async def test_an_awaited_load_that_fails_leaves_no_line(pair: EnginePair, caplog: pytest.LogCaptureFixture) -> None:
    lease = pair.offer([3], "known").revoke()
    for request in (load_request(lease, [0]), load_request(lease, [99])):
        for early in (True, False):
            load = pair.reader.start_load(request)
            if not early:
                await load.settled()
            for _ in range(2):
                with pytest.raises(Exception, match="request 'known'"):
                    await load
            del load
            gc.collect()
    cancelled = pair.reader.start_load(load_request(lease, [0]))
    cancelled.cancel()
    await cancelled.settled()
    del cancelled
    gc.collect()
    assert lines(caplog, "ERROR") == []


class Again:
    async def __call__(self, attempts: Sequence[Attempt]) -> None:
        """Find no other ticket."""


async def test_a_plain_function_as_again_is_refused(pair: EnginePair) -> None:
    lease, again = pair.offer([3]), Again()
    for wrong in (lambda attempts: None, print, Again, 7):
        await pair.fails(
            RequestError, lease, match=r"again: expected an async function \(async def\), got", again=wrong
        )
    await pair.load(lease, again=again)
    await pair.load(pair.offer([3], "another"), again=again.__call__)
