"""Addresses that lead nowhere, or back: the error says which it is, and what to set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from pairs import EnginePair

from kvflow import Config, Lease, LoadRequest, PeerAddress, Runtime, Ticket
from kvflow.errors import (
    ConfigError,
    KVFlowError,
    LeaseExpired,
    PeerIncompatible,
    PeerRefused,
    PeerUnreachable,
    PrefillFailed,
    RequestError,
)
from kvflow.stock import ask_rank
from tests.support.growing_pairs import BLOCKS, TAKEN, pair_of
from tests.support.ports import free_port
from tests.support.tests_support import altered, each, in_virtual_time

HINT = (
    "127.0.0.1 is a loopback address: an engine on another host must advertise an address of its own (advertise_host)"
)


async def failed(runtime: Runtime, kind: type[KVFlowError], ticket: Ticket) -> str:
    with pytest.raises(kind) as caught:
        await runtime.load_blocks(LoadRequest("req", ticket, TAKEN))
    return str(caught.value)


def port_of(runtime: Runtime) -> int:
    return int(runtime.address.rpartition(":")[2])


@in_virtual_time
async def test_an_address_that_leads_back_to_the_reader_is_said_to() -> None:
    """As of a producer on another host that advertises a loopback address, and uses the same port."""
    async with pair_of() as pair:
        reader, lease = pair.consumer.runtime, pair.offer(BLOCKS)
        ticket = altered(lease.ticket, port=port_of(reader))
        said = await failed(reader, PeerRefused, ticket)
        assert "refused: unknown engine: expected 'producer', this is 'consumer', the reader itself: " in said
        assert f"the peer's address leads back to it; {HINT}" in said
        lease.revoke()


@in_virtual_time
async def test_two_engines_of_one_name_are_told_from_one_that_restarted() -> None:
    async with pair_of() as pair:
        reader, lease = pair.consumer.runtime, pair.offer(BLOCKS)
        ticket = altered(lease.ticket, port=port_of(reader), engine_id="consumer")
        said = await failed(reader, LeaseExpired, ticket)
        assert "request 'req': engine 'consumer': its address tcp://127.0.0.1:" in said
        assert f" leads back to this engine, which has the same name; {HINT}: the ticket is of incarnation " in said
        lease.revoke()


async def test_a_loopback_address_that_nobody_listens_at_is_explained(pair: EnginePair) -> None:
    lease = pair.offer(BLOCKS)
    said = await failed(pair.reader, PeerUnreachable, altered(lease.ticket, port=free_port()))
    assert "nobody listens there ([Errno 111] " in said
    assert said.endswith(f"or has another address; {HINT}")
    with pytest.raises(
        PeerUnreachable, match=r"no answer within 0\.1 s: it has ended or hangs, .*VLLM_NIXL_SIDE_CHANNEL_HOST there"
    ):
        await ask_rank(f"tcp://127.0.0.1:{free_port()}", timeout_s=0.1)


@in_virtual_time
async def test_another_engine_at_a_loopback_address_is_explained() -> None:
    async with pair_of() as pair:
        lease = pair.offer(BLOCKS)
        said = await failed(pair.consumer.runtime, PeerRefused, altered(lease.ticket, engine_id="third"))
        assert said.endswith(f"refused: unknown engine: expected 'third', this is 'producer'; {HINT}")
        lease.revoke()


ADDRESSES = {"10.0.0.1:5600": "tcp://10.0.0.1:5600", "http://node-7:5600": "tcp://node-7:5600"}


@each(("given", "meant"), ADDRESSES.items())
@in_virtual_time
async def test_an_address_without_its_scheme_is_told_what_was_meant(given: str, meant: str) -> None:
    end = f"expected 'tcp://host:port', got {given!r}; did you mean {meant!r}?"
    with pytest.raises(ConfigError) as refused:
        Config(engine_id="e", listen=given)
    assert str(refused.value) == f"listen: {end}"
    with pytest.raises(RequestError) as wrong:
        PeerAddress(engine_id="far", address=given)
    assert str(wrong.value) == f"address: {end}"
    async with pair_of() as pair:
        lease = pair.offer(BLOCKS)
        ticket = {**lease.ticket.to_params(), "remote_host": given}
        said = await failed(pair.consumer.runtime, RequestError, ticket)
        assert said.endswith(
            f"remote_host {given!r} is not a host that can be connected to: expected a name or address alone"
        )
        lease.revoke()


@each("given", ["nowhere", "tcp://", ":", "10.0.0.1", "://10.0.0.1:x", ""])
def test_nonsense_is_not_guessed_at(given: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(Config(engine_id="e"), listen=given)
    assert str(refused.value) == f"listen: expected 'tcp://host:port', got {given!r}"


# --- every failure of a ticket: whose request, which peer, both values


def over(lease: Lease) -> Ticket:
    lease.revoke()
    return lease.ticket


FAILURES: dict[str, tuple[type[KVFlowError], Callable[[Lease], Ticket], str]] = {
    "another engine": (
        PeerRefused,
        lambda lease: altered(lease.ticket, engine_id="third"),
        "'third', this is 'producer'",
    ),
    "another life": (
        LeaseExpired,
        lambda lease: altered(lease.ticket, incarnation="ffff"),
        "incarnation ffff, the engine is ",
    ),
    "a seal that is none": (
        RequestError,
        lambda lease: altered(lease.ticket, seal_index=99_999),
        "seal_index 99999 of its lease: producer (dp 0 pp 0 tp 0) at {address} has 16384 seals",
    ),
    "cut otherwise": (
        PeerIncompatible,
        lambda lease: altered(lease.ticket, model_kv_heads=64),
        "ours 2 on each of 1 rank, theirs 2 on each of 1 rank, where one side says that the model has 64",
    ),
    "a block that is none": (
        RequestError,
        lambda lease: altered(lease.ticket, block_ids=(99_999, 1, 2, 3)),
        "remote_block_ids of 'producer': block id 99999 is not in 0..",
    ),
    "an offer that is over": (LeaseExpired, over, "read by all its readers): compute the prompt again"),
    "an offer that broke": (
        PrefillFailed,
        lambda lease: lease.fail("out of memory").ticket,
        "its producer reports that it could not compute the prompt: have another engine compute it",
    ),
}


@each(("what", "case"), FAILURES.items())
@in_virtual_time
async def test_a_failure_names_request_peer_and_both_values(
    what: str, case: tuple[type[KVFlowError], Callable[[Lease], Ticket], str]
) -> None:
    kind, change, expected = case
    async with pair_of() as pair:
        lease = pair.offer(BLOCKS)
        address = pair.producer.runtime.address
        said = await failed(pair.consumer.runtime, kind, change(lease))
        assert said.startswith("request 'req'"), said
        assert expected.format(address=address) in said, said
        assert "'producer'" in said or address in said or "'third'" in said, said
        lease.revoke()
