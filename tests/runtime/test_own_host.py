"""The address in tickets if `advertise_host` is "auto": the address that routes to peers, or an error with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvflow import Config, Runtime
from kvflow.errors import ConfigError
from kvflow.runtime.channel.lookups import own_host
from kvflow.testing import InprocCluster

PLAIN = Config(engine_id="engine", listen="tcp://127.0.0.1:0", transport="inproc")


def listening(host: str, advertised: str | None) -> Config:
    return replace(PLAIN, listen=f"tcp://{host}:0", advertise_host=advertised)


@pytest.mark.parametrize(
    ("host", "advertised", "expected"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("0.0.0.0", "10.0.0.7", "10.0.0.7"),
        ("127.0.0.2", "auto", "127.0.0.2"),  # it listens at no other address
        ("127.0.0.2", "auto:127.0.0.1", "127.0.0.2"),
        ("0.0.0.0", "auto:127.0.0.1", "127.0.0.1"),
        ("*", "auto:localhost", "127.0.0.1"),
        ("[::]", "auto:127.0.0.1", "127.0.0.1"),
        ("::", "auto:[::1]", "::1"),
        ("*", "auto:::1", "::1"),
    ],
)
async def test_the_host_that_tickets_name(host: str, advertised: str | None, expected: str) -> None:
    assert await own_host(listening(host, advertised)) == expected


async def test_a_runtime_decides_where_it_opens() -> None:
    """And says so: in its address, in tickets and in its config."""
    runtime = Runtime(listening("0.0.0.0", "auto:127.0.0.1"))
    assert runtime.config.advertise_host == "auto:127.0.0.1"
    async with runtime:
        assert runtime.address.startswith("tcp://127.0.0.1:")
        assert runtime.config.advertise_host == "127.0.0.1"


async def test_in_one_process_it_is_the_loopback() -> None:
    cluster = InprocCluster()
    async with Runtime(listening("0.0.0.0", "auto"), world=cluster.world()) as runtime:
        assert runtime.address.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("advertised", "why"),
    [
        ("auto:255.255.255.255", "no route to '255.255.255.255' .*Permission denied.*: set the address"),
        ("auto:[::1]", "no route to '::1' .it has no IPv4 address"),
        ("auto:no-such-host.invalid", "'no-such-host.invalid' cannot be looked up: "),
    ],
)
async def test_without_a_route_it_does_not_open(advertised: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"advertise_host: '{advertised[:5]}.*{why}"):
        async with Runtime(listening("0.0.0.0", advertised)):
            raise AssertionError("opened")
