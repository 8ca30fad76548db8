"""What callers get wrong: a typed error that names the request and both values, and nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
from tests_support import altered

from kvflow import Config, LeaseOutcome, Limits, LoadRequest, RuntimeState, ServeRequest
from kvflow.errors import InvalidInput, RequestError
from kvflow.testing import InprocPair, inproc_pair

SERVE = [
    (ServeRequest("r", block_ids=[16], num_tokens=4), "request 'r': block_ids: block id 16 is not in 0..15"),
    (ServeRequest("r", block_ids=[-1], num_tokens=4), "block id -1 is not in 0..15"),
    (ServeRequest("r", block_ids=[1, 2, 1], num_tokens=12), "block id 1 is given twice"),
    (ServeRequest("r", block_ids=[1.5], num_tokens=4), "expected a flat list of whole numbers"),  # type: ignore[list-item]
    (ServeRequest("r", block_ids=[[1]], num_tokens=4), "expected a flat list of whole numbers"),  # type: ignore[list-item]
    (ServeRequest("r", block_ids=[1, 2], num_tokens=4), "2 block ids, but 4 tokens fill 1 blocks of 4"),
    (ServeRequest("r", block_ids=[], num_tokens=-1), "num_tokens: expected a whole number from 0 on"),
    (ServeRequest("r", block_ids=[1], num_tokens=4, ttl_s=0), "ttl_s: expected seconds above 0"),
    (ServeRequest("r", block_ids=[1], num_tokens=4, reader_count=0), "reader_count: expected a whole number from 1"),
    (ServeRequest("", block_ids=[1], num_tokens=4), "request_id: expected 1 to 512 characters"),
    (ServeRequest("x" * 513, block_ids=[1], num_tokens=4), "request_id: expected 1 to 512 characters"),
]


@pytest.mark.parametrize(("request_", "message"), SERVE, ids=range(len(SERVE)))
async def test_serve_requests_that_cannot_be_right(pair: InprocPair, request_: ServeRequest, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        pair.producer.runtime.serve_blocks(request_)
    assert message in str(caught.value)


LOAD: list[tuple[dict[str, Any], list[Any], str]] = [
    ({}, [16], "request 'r': block_ids: block id 16 is not in 0..15"),
    ({}, [-3], "block id -3 is not in 0..15"),
    ({}, [1, 1], "block id 1 is given twice"),
    ({}, [0, 1, 2], "request 'r': 3 local blocks of 4 tokens, but only 8 tokens in 2 blocks of 4 are offered"),
    ({}, ["a"], "expected a flat list of whole numbers"),
    ({"remote_block_ids": [3, 99]}, [0], "remote_block_ids of 'producer': block id 99 is not in 0..15"),
    ({"remote_block_ids": [3, 3]}, [0], "block id 3 is given twice"),
    ({"remote_block_ids": "x"}, [0], "remote_block_ids"),
    ({"remote_port": 0}, [0], "remote_port 0 is not in 1..65535"),
    ({"remote_port": None}, [0], "remote_port"),
    ({"do_remote_prefill": False}, [0], "do_remote_prefill is false"),
    ({"kvflow": {}}, [0], "kvflow"),
]


@pytest.mark.parametrize(("changes", "block_ids", "message"), LOAD, ids=range(len(LOAD)))
async def test_load_requests_that_cannot_be_right(
    pair: InprocPair, changes: dict[str, Any], block_ids: list[Any], message: str
) -> None:
    lease = pair.offer([3, 7])
    ticket = lease.ticket.to_params() | changes
    with pytest.raises(RequestError) as caught:
        await pair.consumer.runtime.load_blocks(LoadRequest("r", ticket=ticket, block_ids=block_ids))
    assert message in str(caught.value)
    pair.assert_loaded([], [])
    await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0, 1]))
    assert await lease is LeaseOutcome.READ


@pytest.mark.parametrize("field", ["remote_engine_id", "remote_block_ids", "remote_host", "remote_port", "kvflow"])
async def test_a_ticket_without_a_field_names_it(pair: InprocPair, field: str) -> None:
    lease = pair.offer([3])
    ticket = lease.ticket.to_params()
    del ticket[field]
    with pytest.raises(RequestError, match=field):
        await pair.consumer.runtime.load_blocks(LoadRequest("r", ticket=ticket, block_ids=[0]))
    lease.revoke()


async def test_a_seal_that_the_peer_does_not_have(pair: InprocPair) -> None:
    lease = pair.offer([3])
    ticket = lease.ticket.to_params()
    ticket["kvflow"]["ranks"][0]["seal_index"] = 1 << 40
    with pytest.raises(RequestError, match="seal_index 1099511627776"):
        await pair.consumer.runtime.load_blocks(LoadRequest("r", ticket=ticket, block_ids=[0]))
    lease.revoke()


@pytest.mark.parametrize("as_dict", [True, False], ids=["dict", "Ticket"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", "a..b"),
        ("host", "\ud800"),
        ("host", "a\x00b"),
        ("engine_id", "\ud800"),
        ("engine_id", "two words"),
        ("lease_id", "0" * 32),
        ("seal_index", -1),
        ("port", 70_000),
    ],
)
async def test_a_bad_ticket_costs_its_load_and_nothing_else(
    pair: InprocPair, field: str, value: object, as_dict: bool
) -> None:
    lease = pair.offer([3])
    bad = altered(lease.ticket, **{field: value})
    with pytest.raises(RequestError, match=r"^ticket: "):
        await pair.consumer.runtime.load_blocks(
            LoadRequest("r", ticket=bad.to_params() if as_dict else bad, block_ids=[0])
        )
    assert pair.consumer.runtime.state is RuntimeState.OPEN
    await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0]))
    assert await lease is LeaseOutcome.READ


async def test_a_deadline_must_be_positive(pair: InprocPair) -> None:
    lease = pair.offer([3])
    with pytest.raises(InvalidInput, match="deadline_s: expected seconds above 0"):
        await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0], deadline_s=0))
    lease.revoke()


async def test_leases_are_bounded_and_the_limit_is_named() -> None:
    async with inproc_pair(config=Config(engine_id="any", limits=Limits(leases_max=2))) as pair:
        leases = [pair.offer([block], f"r{block}") for block in range(2)]
        with pytest.raises(RequestError, match=r"2 leases are open \(leases_max\)"):
            pair.offer([5], "one too many")
        leases.pop().revoke()
        leases.append(pair.offer([5], "fits again"))
        for lease in leases:
            lease.revoke()
