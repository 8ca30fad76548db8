"""Looks hosts up by name, in threads of its own.

A name in a forged ticket may take its resolver half a minute, and a thread in the resolver cannot be stopped. So the
loop's executor, which the rest of the program uses, never sees one; there are only so many threads, for one lookup
each; and names that were found before have threads of their own, so they do not wait for names of somebody's making.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

from kvflow.core.policy.latest import Latest

_NEW_AT_ONCE_MAX = 32
_KNOWN_AT_ONCE_MAX = 8
_KNOWN_MAX = 1024


class Lookups:
    """Finds addresses of hosts. Belongs to one event loop."""

    def __init__(self) -> None:
        self._new = asyncio.Semaphore(_NEW_AT_ONCE_MAX)
        self._known = asyncio.Semaphore(_KNOWN_AT_ONCE_MAX)
        self._found: Latest[str, None] = Latest(_KNOWN_MAX)

    async def find(self, host: str) -> str:
        """Return a host as numbers, IPv4 ones if it has both and there is a way to them. Raises OSError, or ValueError.

        Cancelling stops the waiting, and the thread ends when the resolver does.
        """
        try:
            ip_address(host)
        except ValueError:
            return await self._look_up(host)
        return host

    async def _look_up(self, host: str) -> str:
        room = self._known if host in self._found else self._new
        await room.acquire()
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        try:
            threading.Thread(target=_run, args=(host, room, found), name=f"kvflow-lookup {host}", daemon=True).start()
        except RuntimeError as error:  # no more threads
            room.release()
            raise OSError(f"cannot look {host} up: {error}") from error
        numbers = await found
        self._found[host] = None
        return numbers


def _chosen(entries: Sequence[tuple[Any, ...]]) -> str:
    """Choose one of a name's addresses: of version 4 if the host has a route to one, else the first with a route."""
    by_version = sorted(entries, key=lambda entry: entry[0] != socket.AF_INET)
    return str(next(filter(_has_route, by_version), by_version[0])[4][0])


def _has_route(entry: tuple[Any, ...]) -> bool:
    """Ask the routing table, which a UDP socket does that is connected. Nothing is sent."""
    family, address = entry[0], entry[4]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((address[0], 9, *address[2:]))
    except OSError:
        return False
    return True


def _run(host: str, room: asyncio.Semaphore, found: asyncio.Future[str]) -> None:
    """The thread.

    Thread `kvflow-lookup <host>`: begun by a question to a host that is given by name. Ends when the resolver
    answers. Whoever asked gets its error.
    """
    outcome: str | Exception
    try:
        outcome = _chosen(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except Exception as error:  # noqa: BLE001 - handed to who asked
        outcome = error

    def end() -> None:
        room.release()
        if not found.done():
            if isinstance(outcome, Exception):
                found.set_exception(outcome)
            else:
                found.set_result(outcome)

    try:
        found.get_loop().call_soon_threadsafe(end)
    except RuntimeError:  # the loop is closed: nobody waits
        if not found.get_loop().is_closed():
            raise
