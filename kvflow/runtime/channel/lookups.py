"""Addresses of hosts: looks up the host names of peers in threads, and finds the address of this host for tickets.

The system's resolver may need half a minute for a name in a forged ticket, and cannot be stopped. Therefore each lookup
has a thread, not the loop's executor, which the program needs, and the number of threads is bounded. Names that were
found before have their own bound, so they never wait for names in forged tickets.

If `Config.advertise_host` is "auto", tickets have the address of this host that the system's routing table gives:
connecting a UDP socket gives the socket a local address and sends nothing.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any, TypeAlias

from kvflow import threads
from kvflow.config import Config
from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.errors import ConfigError
from kvflow.hosts import ANY, ANY_V4, ANY_V6, WILDCARDS

_NEW_AT_ONCE_MAX = 32
_KNOWN_AT_ONCE_MAX = 8
_KNOWN_MAX = 1024


class Lookups:
    """Resolver of host names to addresses, with one thread per lookup. Each `Lookups` belongs to one event loop."""

    def __init__(self) -> None:
        self._new_slots = asyncio.Semaphore(_NEW_AT_ONCE_MAX)
        self._known_slots = asyncio.Semaphore(_KNOWN_AT_ONCE_MAX)
        self._known_hosts: BoundedMap[str, None] = BoundedMap(_KNOWN_MAX)

    async def find_address(self, host: str) -> str:
        """Return the numeric address of `host`, preferably an IPv4 address to which this machine has a route.

        OSError or ValueError if the lookup fails, ConfigError if its thread cannot start. If cancelled, stop waiting;
        the thread ends with the lookup.
        """
        try:
            ip_address(host)
        except ValueError:
            return await self._look_up_host(host)
        return host

    async def _look_up_host(self, host: str) -> str:
        slots = self._known_slots if host in self._known_hosts else self._new_slots
        await slots.acquire()
        result: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        thread = threading.Thread(
            target=_look_up, args=(host, slots, result), name=f"kvflow-lookup {host}", daemon=True
        )
        try:
            with threads.starting(thread.name):
                thread.start()
        except ConfigError:
            slots.release()
            raise
        numbers = await result
        self._known_hosts[host] = None
        return numbers


def _preferred_address(entries: Sequence[tuple[Any, ...]]) -> str:
    """Return the best address among `entries`, the results of `getaddrinfo`.

    That is an IPv4 address to which this host has a route, else any address with a route, else any address.
    """
    by_version = sorted(entries, key=lambda entry: entry[0] != socket.AF_INET)
    return str(next(filter(_has_route, by_version), by_version[0])[4][0])


def _has_route(entry: tuple[Any, ...]) -> bool:
    """Return True if this host has a route to the address of `entry`, a result of `getaddrinfo`."""
    family, address = entry[0], entry[4]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address[0], 9, *address[2:]))
    except OSError:
        return False
    return True


def _look_up(host: str, slots: asyncio.Semaphore, result: asyncio.Future[str]) -> None:
    """Look up `host`, then set the address or the error on `result` and release `slots`, both on the event loop.

    Thread `kvflow-lookup <host>`: `SideChannel.ask` and `listen` begin this thread for a host that is given by name.
    The thread ends when the resolver answers. If the lookup fails, `ask` raises PeerUnreachable.
    """
    outcome: str | Exception
    try:
        outcome = _preferred_address(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except Exception as error:  # noqa: BLE001 - the future raises it
        outcome = error

    def end() -> None:
        slots.release()
        if not result.done():
            if isinstance(outcome, Exception):
                result.set_exception(outcome)
            else:
                result.set_result(outcome)

    try:
        result.get_loop().call_soon_threadsafe(end)
    except RuntimeError:  # the loop is closed, so no caller waits
        if not result.get_loop().is_closed():
            raise


Target: TypeAlias = tuple[socket.AddressFamily, tuple[Any, ...]]

# Addresses reserved for documentation: only a default route leads to them. The port is never used.
_DISTANT_ADDRESSES: dict[socket.AddressFamily, tuple[Any, ...]] = {
    socket.AF_INET: ("198.51.100.1", 9),
    socket.AF_INET6: ("2001:db8::1", 9),
}
_UNSPECIFIED = (*WILDCARDS, "")

_FAMILIES: dict[str, list[socket.AddressFamily]] = {
    ANY: [socket.AF_INET, socket.AF_INET6],
    ANY_V4: [socket.AF_INET],
    ANY_V6: [socket.AF_INET6, socket.AF_INET],
}
"""IP versions on which a listener accepts connections, by wildcard address, in order of preference."""


async def own_host(config: Config) -> str:
    """Return the host to write into tickets: the configured host or, for "auto", this host's address as peers reach it.

    For "auto:HOST", that is the address from which this host reaches HOST. ConfigError if HOST cannot be looked up
    within Config.handshake_timeout_s, or if this host has no route to HOST; for "auto", if it has no default route.
    """
    toward = config.advertise_toward
    if toward is None or not config.listens_everywhere:
        return config.listen_host if toward is not None else config.advertise_host or config.listen_host
    families = _FAMILIES[config.listen_host]
    problems: list[OSError] = []
    for family, address in await _target_addresses(config, toward, families):
        try:
            return _local_address_toward(family, address)
        except OSError as error:
            problems.append(error)
    route = f"no route to {toward!r}" if toward else "no default route"
    raise ConfigError(
        f"advertise_host: {config.advertise_host!r}: this host has {route} "
        f"({'; '.join(map(str, problems)) or 'it has no IPv4 address'}): set the address by which peers reach this host"
    )


async def _target_addresses(config: Config, toward: str, families: Sequence[socket.AddressFamily]) -> list[Target]:
    """Return the (family, address) pairs of the host `toward`, sorted in the order of `families`.

    If `toward` is empty, return one address of each family that this host can reach only by its default route.
    """
    if not toward:
        return [(family, _DISTANT_ADDRESSES[family]) for family in families]
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(config.handshake_timeout_s):
            with threads.starting(f"advertise_host: {config.advertise_host!r}"):
                addresses = await loop.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM)
    except (OSError, TimeoutError) as error:
        why = error if isinstance(error, OSError) and str(error) else f"no answer in {config.handshake_timeout_s} s"
        raise ConfigError(
            f"advertise_host: {config.advertise_host!r}: {toward!r} cannot be looked up: {why}"
        ) from error
    return [(family, address) for wanted in families for family, *_, address in addresses if family is wanted]


def _local_address_toward(family: socket.AddressFamily, address: tuple[Any, ...]) -> str:
    """Return the address of this host that the system uses to send packets to `address`.

    OSError if this host has no route to `address`, or if peers could not connect to the result.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.setblocking(False)
        probe.connect(address)
        source = str(probe.getsockname()[0])
    if source in _UNSPECIFIED or "%" in source:  # a link-local address means nothing on another host
        raise OSError(f"peers cannot connect to {source or 'an empty address'}")
    return source
