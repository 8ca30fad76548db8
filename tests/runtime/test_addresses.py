"""Addresses that lead nowhere, or back: the error says which it is, and what to set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pairs import EnginePair

from kvflow import Config, LoadRequest, PeerAddress, Runtime
from kvflow.errors import ConfigError, KVFlowError, LeaseExpired, PeerRefused, PeerUnreachable, RequestError
from kvflow.stock import ask_rank
from tests.runtime.test_growing import BLOCKS, TAKEN, pair_of
from tests.support.ports import free_port
from tests.support.tests_support import each, in_virtual_time

HINT = "127.0.0.1 is this host itself: an engine on another one has to advertise an address of its own (advertise_host)"


async def failed(runtime: Runtime, kind: type[KVFlowError], params: dict[str, Any]) -> str:
    with pytest.raises(kind) as caught:
        await runtime.load_blocks(LoadRequest("req", params, TAKEN))
    return str(caught.value)


def port_of(runtime: Runtime) -> int:
    return int(runtime.address.rpartition(":")[2])


@in_virtual_time
async def test_an_address_that_leads_back_to_the_reader_is_said_to() -> None:
    """As of a producer on another host that advertises a loopback address, and uses the same port."""
    async with pair_of() as pair:
        reader, lease = pair.consumer.runtime, pair.offer(BLOCKS)
        params = {**lease.ticket.to_params(), "remote_port": port_of(reader)}
        said = await failed(reader, PeerRefused, params)
        assert "refused: unknown engine: expected 'producer', this is 'consumer', the reader itself: " in said
        assert f"leads back to it; {HINT}" in said
        lease.revoke()


@in_virtual_time
async def test_two_engines_of_one_name_are_told_from_one_that_restarted() -> None:
    async with pair_of() as pair:
        reader, lease = pair.consumer.runtime, pair.offer(BLOCKS)
        params = {**lease.ticket.to_params(), "remote_port": port_of(reader), "remote_engine_id": "consumer"}
        said = await failed(reader, LeaseExpired, params)
        assert "request 'req': engine 'consumer': its address tcp://127.0.0.1:" in said
        assert f" leads back to this engine, which has the same name; {HINT}: the ticket is of incarnation " in said
        lease.revoke()


async def test_a_loopback_address_that_nobody_listens_at_is_explained(pair: EnginePair) -> None:
    lease = pair.offer(BLOCKS)
    said = await failed(pair.reader, PeerUnreachable, {**lease.ticket.to_params(), "remote_port": free_port()})
    assert "nobody listens there ([Errno 111] " in said
    assert said.endswith(f"or this is not its address; {HINT}")
    with pytest.raises(
        PeerUnreachable, match=r"no answer within 0\.1 s: it has ended, .*VLLM_NIXL_SIDE_CHANNEL_HOST there"
    ):
        await ask_rank(f"tcp://127.0.0.1:{free_port()}", timeout_s=0.1)


@in_virtual_time
async def test_another_engine_at_a_loopback_address_is_explained() -> None:
    async with pair_of() as pair:
        lease = pair.offer(BLOCKS)
        said = await failed(
            pair.consumer.runtime, PeerRefused, {**lease.ticket.to_params(), "remote_engine_id": "third"}
        )
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
    async with pair_of() as pair:
        (outcome,) = await pair.consumer.runtime.prewarm([PeerAddress(engine_id="far", address=given)])
        assert isinstance(outcome.error, RequestError)
        assert str(outcome.error) == f"address: {end}"
        lease = pair.offer(BLOCKS)
        params = {**lease.ticket.to_params(), "remote_host": given}
        said = await failed(pair.consumer.runtime, RequestError, params)
        assert said.endswith(f"remote_host {given!r} is no host to connect to: expected a name or number alone")
        lease.revoke()


@each("given", ["nowhere", "tcp://", ":", "10.0.0.1", "://10.0.0.1:x", ""])
def test_nonsense_is_not_guessed_at(given: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(Config(engine_id="e"), listen=given)
    assert str(refused.value) == f"listen: expected 'tcp://host:port', got {given!r}"
