"""Names of hosts: a resolver that hangs delays only its own questions, and not the program's own threads."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests_support import turns, until

from kvflow.errors import ConfigError
from kvflow.runtime.channel import lookups
from kvflow.runtime.channel.lookups import Lookups

ENTRIES = [
    (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::7", 0, 0, 0)),
    (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.7", 0)),
]


class Resolver:
    """The system's resolver in the hands of a test."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.hanging: set[str] = set()
        self.go_on = threading.Event()

    def __call__(self, host: str, port: Any, **_: Any) -> list[Any]:
        self.asked.append(host)
        if host.startswith("slow") or host in self.hanging:
            self.go_on.wait(60)
        if host.startswith("unknown"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ENTRIES[:1] if host.startswith("six") else ENTRIES


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("kvflow-lookup"):
            thread.join(10)


async def until_asked(resolver: Resolver, count: int) -> None:
    await until(lambda: len(resolver.asked) >= count)


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("node-7", "10.0.0.7"),
        ("six", "fd00::7"),
        ("10.0.0.9", "10.0.0.9"),
        ("fd00::9", "fd00::9"),
        ("fe80::9%eth0", "fe80::9%eth0"),
    ],
)
async def test_a_host_is_found_by_name_or_is_numbers_already(resolver: Resolver, host: str, found: str) -> None:
    assert await Lookups().find_address(host) == found
    assert resolver.asked == ([] if found == host else [host])


async def test_of_a_name_with_both_versions_one_is_taken_that_the_host_has_a_route_to(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host with IPv6 alone looks up names of others that have both."""
    monkeypatch.setattr(lookups, "_has_route", lambda entry: entry[0] == socket.AF_INET6)
    assert await Lookups().find_address("node-7") == "fd00::7"
    monkeypatch.setattr(lookups, "_has_route", lambda entry: False)
    assert await Lookups().find_address("node-7") == "10.0.0.7"  # connecting will say why it fails


async def test_a_host_that_nobody_knows_is_an_error_each_time(resolver: Resolver) -> None:
    looking = Lookups()
    for _ in range(2):
        with pytest.raises(OSError, match="not known"):
            await looking.find_address("unknown")
    assert resolver.asked == ["unknown"] * 2


async def test_names_that_hang_take_a_bounded_number_of_threads_and_none_of_the_programs(resolver: Resolver) -> None:
    looking, most = Lookups(), lookups._NEW_AT_ONCE_MAX
    hanging = [asyncio.create_task(looking.find_address(f"slow-{at}")) for at in range(most + 20)]
    await until_asked(resolver, most)
    assert await asyncio.to_thread(lambda: 7) == 7
    assert len(resolver.asked) == most
    for task in hanging:
        task.cancel()
    await asyncio.wait(hanging)
    assert all(task.cancelled() for task in hanging), "nobody has to wait for the resolver"


async def test_a_name_that_was_found_before_does_not_wait_for_names_that_hang(resolver: Resolver) -> None:
    looking, most = Lookups(), lookups._NEW_AT_ONCE_MAX
    assert await looking.find_address("node-7") == "10.0.0.7"
    hanging = [asyncio.create_task(looking.find_address(f"slow-{at}")) for at in range(most)]
    await until_asked(resolver, most + 1)
    assert await looking.find_address("node-7") == "10.0.0.7"
    new = asyncio.create_task(looking.find_address("node-8"))
    await turns(10)
    assert not new.done()
    resolver.go_on.set()
    assert await new == "10.0.0.7"
    await asyncio.wait(hanging)


async def test_a_thread_is_free_again_only_when_the_resolver_has_answered(resolver: Resolver) -> None:
    """Giving up does not make room for more threads."""
    looking, most = Lookups(), lookups._NEW_AT_ONCE_MAX
    for _ in range(3):
        hanging = [asyncio.create_task(looking.find_address(f"slow-{at}")) for at in range(most)]
        await until_asked(resolver, most)
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)
    assert len(resolver.asked) == most


async def test_only_so_many_names_are_remembered(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "_KNOWN_MAX", 2)
    looking = Lookups()
    for name in ("one", "two", "one", "three"):
        await looking.find_address(name)
    assert list(looking._known_hosts) == ["one", "three"]


async def test_no_more_threads_is_an_error_of_that_name(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    looking = Lookups()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        with pytest.raises(ConfigError, match=r"kvflow-lookup node-7: .*\(can't start new thread\)"):
            await looking.find_address("node-7")
    assert await looking.find_address("node-7") == "10.0.0.7"
