"""The main job: reads, reports and releases of loads. `test_topologies` compares the bytes in all topologies."""

from __future__ import annotations

import asyncio
import json

import pytest
from pairs import EnginePair

from kvflow import LeaseOutcome, ServeRequest
from kvflow.core.protocol import codec
from kvflow.core.protocol.notifications import ReadDone
from kvflow.errors import BlocksBusy, PromptMismatch, RequestError


async def test_a_full_load_fills_the_blocks_and_releases_the_lease(pair: EnginePair) -> None:
    """By a ticket that came through a router."""
    lease = pair.offer([3, 7, 9])
    report = await pair.load(json.loads(json.dumps(lease.ticket.to_params() | {"added_by_router": 1})), [0, 1, 2])
    pair.assert_loaded([0, 1, 2], [3, 7, 9])
    assert await lease is LeaseOutcome.READ
    assert report.bytes == 3 * pair.producer.layout.block_size_bytes
    assert (report.blocks, report.notified, report.request_id) == (3, True, "req")
    assert report.sources == (f"producer (dp 0 pp 0 tp 0) at {pair.writer.address}",)
    assert set(report.seconds) == {"queued", "handshake", "plan", "post", "wire", "notify"}
    assert report.total_s == pytest.approx(sum(report.seconds.values()))


async def test_a_ticket_of_another_prompt_is_refused(pair: EnginePair) -> None:
    """Before anything is asked or read; the lease is there for who it is for."""
    prompt = list(range(10))
    lease = pair.writer.serve_blocks(ServeRequest("req", block_ids=[3, 7, 9], num_tokens=9, prompt=prompt))
    for other in ([*prompt[:8], 99, 100], prompt[:8]):
        await pair.fails(PromptMismatch, lease, [0, 1, 2], match="request 'req'", prompt=other)
    assert pair.reader.statistics().peers == ()
    await pair.load(lease, [0, 1, 2], prompt=[*prompt[:9], 77, 78])
    assert await lease is LeaseOutcome.READ
    with pytest.raises(RequestError, match="'short': the prompt has 10 tokens, fewer than num_tokens 11"):
        pair.writer.serve_blocks(ServeRequest("short", block_ids=[3], num_tokens=11, prompt=prompt))


async def test_several_loads_of_one_offer_and_who_tells_its_producer(pair: EnginePair) -> None:
    """Such as samples of one prompt: a load keeps the offer, whether it reads some of it, all or nothing."""
    lease = pair.offer([3, 7, 9])
    for block_ids in ([0, 1, 2], [4, 5], []):
        cached = 4 * (3 - len(block_ids))
        report = await pair.load(lease, block_ids, keep_offer=True, cached_tokens=cached)
        assert (report.blocks, report.notified) == (len(block_ids), False)
    pair.assert_loaded([0, 1, 2, 4, 5], [3, 7, 9, 7, 9])
    assert not lease.done
    assert await pair.reader.release_blocks(lease.ticket)
    assert await lease is LeaseOutcome.READ


async def test_a_full_hit_whose_producer_is_gone_goes_on(pair: EnginePair) -> None:
    ticket = pair.offer([3]).ticket.to_params() | {"remote_port": 1}
    assert not (await pair.load(ticket, [])).notified


async def test_a_prompt_shorter_than_a_block_schedules_no_read(pair: EnginePair) -> None:
    """The reference's sharp example: remote prefill is wanted, no block is offered, the request goes on."""
    lease = pair.writer.serve_blocks(ServeRequest("short", block_ids=[], num_tokens=2))
    assert await lease is LeaseOutcome.READ
    report = await pair.load(lease, [])
    assert (report.bytes, report.descriptors, report.notified) == (0, 0, False)
    pair.assert_loaded([], [])
    assert pair.reader.statistics().peers == ()


async def test_many_loads_at_once_share_one_handshake(pair: EnginePair) -> None:
    leases = [pair.offer([block], f"req-{block}") for block in range(8)]
    await asyncio.gather(*(pair.load(lease, [block + 8]) for block, lease in enumerate(leases)))
    pair.assert_loaded(range(8, 16), range(8))
    assert [await lease for lease in leases] == [LeaseOutcome.READ] * 8
    assert pair.listener.answered == 1


async def test_a_lease_waits_for_all_its_readers(pair: EnginePair) -> None:
    lease = pair.offer([1, 2], reader_count=2)
    for _ in range(2):  # the same reader again: a duplicate
        await pair.load(lease, [1, 2])
    assert not lease.done
    done = ReadDone(lease_ids=(lease.ticket.lease_id,), reader="another reader", numerator=2, denominator=2)
    pair.producer.transport.deliver(codec.encode(done))
    assert await lease is LeaseOutcome.READ
    assert pair.serving.duplicate_notifications == 1
    pair.assert_loaded([1, 2], [1, 2])


async def test_blocks_may_be_in_several_leases_but_in_one_load_only(pair: EnginePair) -> None:
    first, second = pair.offer([1, 2], "a"), pair.offer([2, 3], "b")
    with pytest.raises(BlocksBusy, match="block 2 cannot be loaded: it is leased"):
        await pair.writer.load_blocks(pair.wanted(first, [2, 5]))
    loading = await pair.hold(first, [0, 1])
    await pair.fails(BlocksBusy, second, [7, 0], match="block 0 cannot be loaded: it is being loaded")
    with pytest.raises(BlocksBusy, match="block 0 cannot be served: it is being loaded"):
        pair.reader.serve_blocks(ServeRequest("c", block_ids=[0], num_tokens=4))
    assert (await pair.let_go(loading)).blocks == 2
    pair.assert_loaded([0, 1], [1, 2])


async def test_an_engine_may_load_from_itself(pair: EnginePair) -> None:
    await pair.writer.load_blocks(pair.wanted(pair.offer([4]), [6]))
    for tensor in pair.producer.kv_caches.values():
        assert (tensor[:, 6] == tensor[:, 4]).all()


async def test_one_request_is_served_once_at_a_time(pair: EnginePair) -> None:
    lease = pair.offer([4])
    with pytest.raises(RequestError, match="'req': it is being served already"):
        pair.offer([5])
    lease.revoke()
    pair.offer([5])
