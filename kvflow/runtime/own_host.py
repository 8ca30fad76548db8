"""The address of this host that peers reach it by: what `Config.advertise_host` "auto" comes to.

The system's routing table knows: a UDP socket that is connected has an address of its own, and nothing is sent.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any, TypeAlias

from kvflow.config import Config
from kvflow.errors import ConfigError
from kvflow.hosts import ANY, ANY_V4, ANY_V6, WILDCARDS

Target: TypeAlias = tuple[socket.AddressFamily, tuple[Any, ...]]

# Addresses that documents alone use: only a default route leads to them. The port is never used.
_ANYWHERE: dict[socket.AddressFamily, tuple[Any, ...]] = {
    socket.AF_INET: ("198.51.100.1", 9),
    socket.AF_INET6: ("2001:db8::1", 9),
}
_UNSPECIFIED = (*WILDCARDS, "")

_FAMILIES: dict[str, list[socket.AddressFamily]] = {
    ANY: [socket.AF_INET, socket.AF_INET6],
    ANY_V4: [socket.AF_INET],
    ANY_V6: [socket.AF_INET6, socket.AF_INET],
}
"""Versions that each wildcard listens to, the preferred one first."""


async def own_host(config: Config) -> str:
    """The host that tickets name: as it is given, or the address that routes to where `advertise_host` says.

    Bounded by Config.handshake_timeout_s.

    Raises:
        ConfigError: there is no such route, or the host's name is not known.
    """
    toward = config.advertise_toward
    if toward is None or not config.listens_everywhere:
        return config.listen_host if toward is not None else config.advertise_host or config.listen_host
    families = _FAMILIES[config.listen_host]
    problems: list[OSError] = []
    for family, address in await _targets(config, toward, families):
        try:
            return _source_of(family, address)
        except OSError as error:
            problems.append(error)
    whereto = f"to {toward!r}" if toward else "that is a default one"
    raise ConfigError(
        f"advertise_host: {config.advertise_host!r}: this host has no route {whereto} "
        f"({'; '.join(map(str, problems)) or 'it is no address of version 4'}): name the address that peers reach"
    )


async def _targets(config: Config, toward: str, families: Sequence[socket.AddressFamily]) -> list[Target]:
    """Targets to ask the routing table for, in the order of `families`."""
    if not toward:
        return [(family, _ANYWHERE[family]) for family in families]
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(config.handshake_timeout_s):
            found = await loop.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM)
    except (OSError, TimeoutError) as error:
        why = error if isinstance(error, OSError) and str(error) else f"no answer in {config.handshake_timeout_s} s"
        raise ConfigError(f"advertise_host: {config.advertise_host!r}: {toward!r} is not known: {why}") from error
    return [(family, address) for wanted in families for family, *_, address in found if family is wanted]


def _source_of(family: socket.AddressFamily, address: tuple[Any, ...]) -> str:
    """The address that packets to another one would come from, as tickets name hosts. OSError if there is none."""
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.setblocking(False)
        asking.connect(address)
        source = str(asking.getsockname()[0])
    if source in _UNSPECIFIED or "%" in source:  # an address of one link means nothing on another host
        raise OSError(f"{source or 'no address'} is none that peers can connect to")
    return source
