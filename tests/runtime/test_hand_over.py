"""The main job: what loads read, report and release."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from tests_support import until

from kvflow import LeaseOutcome, LoadRequest, ServeRequest
from kvflow.errors import BlocksBusy, PromptMismatch, RequestError
from kvflow.testing import InprocPair, assert_loaded


async def test_a_full_load_fills_the_blocks_and_releases_the_lease(pair: InprocPair) -> None:
    lease = pair.offer([3, 7, 9])
    report = await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0, 1, 2]))
    pair.assert_loaded([0, 1, 2], [3, 7, 9])
    assert await lease is LeaseOutcome.READ
    assert report.bytes == 3 * pair.producer.layout.block_size_bytes
    assert (report.blocks, report.notified, report.request_id) == (3, True, "req")
    assert report.sources == (f"producer (dp 0 pp 0 tp 0) at {pair.producer.runtime.address}",)
    assert set(report.seconds) == {"queued", "handshake", "plan", "post", "wire", "notify"}
    assert report.total_s == pytest.approx(sum(report.seconds.values()))


async def test_a_ticket_survives_a_router(pair: InprocPair) -> None:
    lease = pair.offer([5])
    params = json.loads(json.dumps(lease.ticket.to_params() | {"added_by_router": 1}))
    await pair.consumer.runtime.load_blocks(LoadRequest("req", ticket=params, block_ids=[4]))
    pair.assert_loaded([4], [5])


async def test_a_ticket_of_another_prompt_is_refused(pair: InprocPair) -> None:
    """Before anything is asked or read; the lease is there for who it is for."""
    prompt = list(range(10))
    lease = pair.producer.runtime.serve_blocks(ServeRequest("req", block_ids=[3, 7, 9], num_tokens=9, prompt=prompt))
    wanted = LoadRequest("req", ticket=lease.ticket.to_params(), block_ids=[0, 1, 2])
    for other in ([*prompt[:8], 99, 100], prompt[:8]):
        with pytest.raises(PromptMismatch, match="request 'req'"):
            await pair.consumer.runtime.load_blocks(replace(wanted, prompt=other))
    assert pair.consumer.runtime.statistics().peers == ()
    await pair.consumer.runtime.load_blocks(replace(wanted, prompt=[*prompt[:9], 77, 78]))
    assert await lease is LeaseOutcome.READ
    with pytest.raises(RequestError, match="'short': the prompt has 10 tokens, fewer than num_tokens 11"):
        pair.producer.runtime.serve_blocks(ServeRequest("short", block_ids=[3], num_tokens=11, prompt=prompt))


async def test_a_cached_prefix_reads_only_the_tail(pair: InprocPair) -> None:
    lease = pair.offer([3, 7, 9, 11])
    report = await pair.consumer.runtime.load_blocks(pair.wanted(lease, [6, 5]))
    pair.assert_loaded([6, 5], [9, 11])
    assert report.blocks == 2
    assert await lease is LeaseOutcome.READ


async def test_a_full_hit_reads_nothing_and_tells_the_producer(pair: InprocPair) -> None:
    lease = pair.offer([3, 7])
    report = await pair.consumer.runtime.load_blocks(pair.wanted(lease, []))
    assert (report.bytes, report.blocks, report.descriptors, report.notified) == (0, 0, 0, True)
    assert await lease is LeaseOutcome.READ
    pair.assert_loaded([], [])


async def test_a_full_hit_whose_producer_is_gone_goes_on(pair: InprocPair) -> None:
    lease = pair.offer([3], ttl_s=0.05)
    ticket = lease.ticket.to_params() | {"remote_port": 1}
    report = await pair.consumer.runtime.load_blocks(LoadRequest("req", ticket=ticket, block_ids=[]))
    assert not report.notified
    assert await lease is LeaseOutcome.EXPIRED


async def test_a_prompt_shorter_than_a_block_schedules_no_read(pair: InprocPair) -> None:
    """The reference's sharp example: remote prefill is wanted, no block is offered, the request goes on."""
    lease = pair.producer.runtime.serve_blocks(ServeRequest("short", block_ids=[], num_tokens=2))
    assert await lease is LeaseOutcome.READ
    report = await pair.consumer.runtime.load_blocks(pair.wanted(lease, [1]))
    assert (report.bytes, report.descriptors, report.notified) == (0, 0, False)
    pair.assert_loaded([], [])
    assert pair.consumer.runtime.statistics().peers == ()


async def test_a_partly_filled_last_block_is_offered_too(pair: InprocPair) -> None:
    request = ServeRequest("partial", block_ids=[2, 8], num_tokens=5)
    lease = pair.producer.runtime.serve_blocks(request)
    assert lease.ticket.num_tokens == 5
    report = await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0, 1]))
    assert (report.blocks, report.tokens) == (2, 5)
    assert_loaded(pair.consumer.cache, [0, 1], pair.producer.cache, [2, 8], num_tokens=5)


async def test_a_lease_can_be_awaited_as_written_in_the_contract(pair: InprocPair) -> None:
    request = ServeRequest("req", block_ids=[1], num_tokens=4, ttl_s=0.01)
    assert await pair.producer.runtime.serve_blocks(request) is LeaseOutcome.EXPIRED


async def test_many_loads_at_once_share_one_handshake(pair: InprocPair) -> None:
    leases = [pair.offer([block], f"req-{block}") for block in range(8)]
    loads = [pair.consumer.runtime.load_blocks(pair.wanted(lease, [block + 8])) for block, lease in enumerate(leases)]
    await asyncio.gather(*loads)
    pair.assert_loaded(range(8, 16), range(8))
    assert [await lease for lease in leases] == [LeaseOutcome.READ] * 8
    listener = pair.producer.runtime.statistics().listener
    assert listener is not None
    assert listener.answered == 1


async def test_a_lease_waits_for_all_its_readers(pair: InprocPair) -> None:
    lease = pair.offer([1, 2], reader_count=2)
    runtime = pair.consumer.runtime
    await runtime.load_blocks(pair.wanted(lease, [1, 2]))
    await runtime.load_blocks(pair.wanted(lease, [1, 2]))  # the same reader again: a duplicate
    assert not lease.done
    pair.producer.transport.deliver(_read_done(lease.ticket.lease_id, "another reader"))
    assert await lease is LeaseOutcome.READ
    serving = pair.producer.runtime.statistics().serving
    assert serving is not None
    assert serving.duplicate_notifications == 1
    pair.assert_loaded([1, 2], [1, 2])


async def test_leases_may_share_blocks_but_not_with_a_write(pair: InprocPair) -> None:
    first, second = pair.offer([1, 2], "a"), pair.offer([2, 3], "b")
    with pytest.raises(BlocksBusy, match="block 2 cannot be loaded: it is leased"):
        await pair.producer.runtime.load_blocks(pair.wanted(first, [2, 5]))
    first.revoke()
    second.revoke()
    assert [await first, await second] == [LeaseOutcome.REVOKED] * 2


async def test_two_loads_into_one_block_exclude_each_other(pair: InprocPair) -> None:
    first, second = pair.offer([1], "a"), pair.offer([2], "b")
    transport = pair.consumer.transport
    transport.faults.hold = True
    runtime = pair.consumer.runtime
    async with asyncio.TaskGroup() as group:
        loading = group.create_task(runtime.load_blocks(pair.wanted(first, [0])))
        await until(lambda: transport.held)
        with pytest.raises(BlocksBusy, match="block 0 cannot be loaded: it is being loaded"):
            await runtime.load_blocks(pair.wanted(second, [0]))
        with pytest.raises(BlocksBusy, match="block 0 cannot be served: it is being loaded"):
            runtime.serve_blocks(ServeRequest("c", block_ids=[0], num_tokens=4))
        transport.faults.hold = False  # a slow load reads its seal once more
        transport.perform()
    assert loading.result().blocks == 1
    pair.assert_loaded([0], [1])
    second.revoke()


async def test_an_engine_may_load_from_itself(pair: InprocPair) -> None:
    lease = pair.offer([4])
    await pair.producer.runtime.load_blocks(pair.wanted(lease, [6]))
    for tensor in pair.producer.kv_caches.values():
        assert (tensor[:, 6] == tensor[:, 4]).all()


async def test_one_request_is_served_once_at_a_time(pair: InprocPair) -> None:
    lease = pair.offer([4])
    with pytest.raises(RequestError, match="'req': it is being served already"):
        pair.offer([5])
    lease.revoke()
    pair.offer([5]).revoke()


def _read_done(lease_id: str, reader: str) -> bytes:
    from kvflow.core.protocol import messages

    return messages.encode(messages.ReadDone(lease_id=lease_id, reader=reader, numerator=2, denominator=2))
