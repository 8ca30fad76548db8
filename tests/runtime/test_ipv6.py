"""The side channel over IPv6: listening at addresses, wildcards, links and names, and asking there."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from event_publishers import KnownMap, stored, until
from side_channels import ANSWER, PLAIN, asking, listening, to

from kvflow import Config
from kvflow.doctor.findings import Status
from kvflow.doctor.peer_channel import examine_peer
from kvflow.hosts import address_at
from kvflow.prefix.kv_events import EventSource, Publisher, Subscriber
from kvflow.runtime.channel import lookups


def has_v6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def link_local() -> str:
    """An address of one link of this host, with its zone; "" if there is none."""
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        number, _, _, scope, _, link = line.split()
        if scope == "20":
            groups = ":".join(number[at : at + 4] for at in range(0, 32, 4))
            return f"{groups}%{link}"
    return ""


pytestmark = pytest.mark.skipif(not has_v6(), reason="this host has no IPv6")


def at(host: str) -> Config:
    return replace(PLAIN, listen=f"tcp://{host}:0", advertise_host="::1")


async def answers(port: int, host: str) -> bool:
    with asking(PLAIN) as channel:
        return await channel.ask(to(address_at(host, port)), fingerprint=b"") == ANSWER


@pytest.mark.parametrize("host", ["::1", "[::1]", "0:0:0:0:0:0:0:1"])
async def test_an_address_is_listened_at_however_it_is_spelt(host: str) -> None:
    async with listening(at(host)) as listener:
        assert await answers(listener.port, "::1")


@pytest.mark.parametrize("host", ["*", "::", "[::]"])
async def test_these_wildcards_listen_to_both_versions(host: str) -> None:
    async with listening(at(host)) as listener:
        assert await answers(listener.port, "::1")
        assert await answers(listener.port, "127.0.0.1")


@pytest.mark.parametrize("host", ["*", "::"])
async def test_a_listener_that_drops_all_connections_listens_to_both_versions_again(host: str) -> None:
    few = replace(at(host), limits=replace(PLAIN.limits, side_channel_connections_max=1))
    async with listening(few) as listener:
        with asking(PLAIN) as first, asking(PLAIN) as second:
            for channel in (first, second):
                assert await channel.ask(to(address_at("::1", listener.port)), fingerprint=b"") == ANSWER
        assert await answers(listener.port, "127.0.0.1")
        assert await answers(listener.port, "::1")


async def test_an_address_of_a_link_is_listened_at_and_asked_with_its_zone() -> None:
    host = link_local()
    if not host:
        pytest.skip("this host has no link with IPv6")
    async with listening(at(host)) as listener:
        assert await answers(listener.port, host)


async def test_a_name_that_has_ipv6_alone_is_listened_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups.socket, "getaddrinfo", only_v6(socket.getaddrinfo))
    async with listening(at("node-7")) as listener:
        assert await answers(listener.port, "::1")
        assert await answers(listener.port, "node-7")


def only_v6(resolve: Callable[..., Any]) -> Callable[..., Any]:
    def resolver(host: str, port: Any, *rest: Any, **named: Any) -> Any:
        return resolve("::1" if host == "node-7" else host, port, *rest, **named)

    return resolver


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_the_doctor_takes_both_spellings_and_writes_brackets(host: str) -> None:
    async with listening(at("::1")) as listener:
        found = await examine_peer(PLAIN, f"tcp://{host}:{listener.port}", "")
    assert {one.status for one in found} == {Status.OK}
    assert f"[::1]:{listener.port} in " in found[1].found


@pytest.mark.parametrize(
    ("published", "followed"),
    [("tcp://::1:0", "::1"), ("tcp://[::1]:0", "::1"), ("tcp://*:0", "127.0.0.1"), ("tcp://[::]:0", "127.0.0.1")],
)
async def test_kv_events_go_over_both_versions(published: str, followed: str) -> None:
    known = KnownMap()
    async with Publisher(published, replay_endpoint=published) as publisher:
        ports = [one.rpartition(":")[2] for one in (publisher.endpoint, publisher.replay_endpoint or "")]
        publisher.publish([stored(1)])
        source = EventSource(
            holder="engine", endpoint=f"tcp://{followed}:{ports[0]}", replay_endpoint=f"tcp://{followed}:{ports[1]}"
        )
        async with Subscriber(known, [source]):
            await until(lambda: known.has(1))


async def test_kv_events_of_a_name_that_has_ipv6_alone_are_followed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ looks names up itself, in one version: which one is found out before."""

    async def found(_: lookups.Lookups, host: str) -> str:
        return {"localhost": "::1"}[host]

    monkeypatch.setattr(lookups.Lookups, "find_address", found)
    async with Publisher("tcp://*:0") as publisher:
        port = publisher.endpoint.rpartition(":")[2]
        source = EventSource(holder="engine", endpoint=f"tcp://localhost:{port}")
        async with Subscriber(KnownMap(), [source]) as subscriber:
            (follower,) = subscriber._followers
            await until(lambda: follower._socket.getsockopt(zmq.IPV6) and follower.statistics.connected)
