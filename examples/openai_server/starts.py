"""Starts that fail: what a process says that cannot start, and how often the launcher tries. Pure but for the port.

A process that dies is started again. One that worked before it died: soon, and however often. One that never worked
has most likely something that no further start will mend: it is tried a few times, with growing pauses. One that knows
by itself that it cannot start exits with CANNOT_START, and is not tried again unless it has worked before: a port, for
one, may be lent to somebody else for a moment.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

CANNOT_START = 3
"""The exit code of a process that has said why it cannot start."""


class StartError(RuntimeError):
    """The service, or a part of it, does not start."""


class CannotListenError(StartError):
    """The port, or the address, is not to be had."""

    def __init__(self, host: str, port: int, error: OSError) -> None:
        super().__init__(f"cannot listen at {host}:{port}: {error.strerror or error}; {_what_to_do(error)}")


def _what_to_do(error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "end what listens there, or choose another port with --port"
        case errno.EACCES:
            return "choose a port above 1023 with --port"
        case _:
            return "choose an address of this machine with --host"


def bare(host: str) -> str:
    """Return a host without the brackets that an IPv6 address has in URLs."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def url_of(host: str, port: int) -> str:
    """Return the URL of an HTTP server, with brackets around an IPv6 address."""
    return f"http://[{bare(host)}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen_at(host: str, port: int) -> socket.socket:
    """A socket that listens there, on any free port for 0; at `::` for both versions. Raises CannotListenError.

    To be called before anything that takes long: who connects meanwhile waits until it is served.
    """
    try:
        found = socket.getaddrinfo(bare(host), port, type=socket.SOCK_STREAM)
        family, *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        listening = socket.socket(family)
    except OSError as error:
        raise CannotListenError(host, port, error) from error
    try:
        # A port whose connections are not quite gone is no taken port.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        raise CannotListenError(host, port, error) from error
    return listening


@dataclass(slots=True, kw_only=True, eq=False)
class Starts:
    """The starts of one process: whether there is to be another one, and when."""

    failures_max: int = 4
    first_pause_s: float = 1.0
    failures: int = 0
    """In a row."""
    has_worked: bool = False

    def worked(self) -> None:
        """It is ready."""
        self.failures, self.has_worked = 0, True

    def ended(self, status: int, *, was_ready: bool) -> float | None:
        """It has ended: how long to wait before the next start, or None to give up."""
        if was_ready:
            return self.first_pause_s
        self.failures += 1
        if self.failures >= self.failures_max or (status == CANNOT_START and not self.has_worked):
            return None
        return self.first_pause_s * 2.0 ** (self.failures - 1)
