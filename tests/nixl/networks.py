"""Networks that a test can break: a proxy before a side channel, and a cable between two network namespaces."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

import pytest


class Way(Enum):
    OPEN = "open"
    CUT = "cut"
    SWALLOWS = "swallows"
    """Connections are taken, and everything that is sent is lost."""


class Proxy(socketserver.ThreadingTCPServer):
    """Stands before the side channel of tickets that `redirect` has rewritten."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Forwarder)
        self.target = ("", 0)
        self.way = Way.OPEN
        self.swallowed = threading.Event()
        self.connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.set_way(Way.CUT)
        self.shutdown()
        self.server_close()

    def set_way(self, way: Way) -> None:
        """From now on; connections that exist end."""
        self.way = way
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def redirect(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """The same ticket, its side channel reached through the proxy."""
        self.target = (ticket["remote_host"], ticket["remote_port"])
        return {**ticket, "remote_host": "127.0.0.1", "remote_port": self.server_address[1]}


class _Forwarder(socketserver.BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        proxy = self.server
        if proxy.way is Way.CUT:
            return
        with socket.create_connection(proxy.target) as upstream, contextlib.suppress(OSError):
            proxy.connections.add(self.request)
            try:
                self._forward({self.request: upstream, upstream: self.request})
            finally:
                proxy.connections.discard(self.request)

    def _forward(self, other_end: dict[socket.socket, socket.socket]) -> None:
        while True:
            for ready in select.select(list(other_end), [], [])[0]:
                data = ready.recv(1 << 16)
                if not data:
                    return
                if self.server.way is Way.OPEN:
                    other_end[ready].sendall(data)
                else:
                    self.server.swallowed.set()


@dataclass(frozen=True, slots=True)
class Cable:
    """Two network namespaces with a cable between them."""

    producer_side: str
    consumer_side: str
    producer_host: str = "10.231.7.1"
    consumer_host: str = "10.231.7.2"

    def unplug(self) -> None:
        _ip("-n", self.producer_side, "link", "set", "cable", "down")

    def plug_in(self) -> None:
        _ip("-n", self.producer_side, "link", "set", "cable", "up")


@contextlib.contextmanager
def cable() -> Iterator[Cable]:
    """Skips the test where the machine does not let us make network namespaces."""
    made = Cable(*(f"kvflow-{side}-{os.getpid()}" for side in ("p", "c")))
    try:
        try:
            _lay(made)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs network namespaces: {error} {getattr(error, 'stderr', '')}")
        yield made
    finally:
        for side in (made.producer_side, made.consumer_side):
            subprocess.run(["ip", "netns", "delete", side], capture_output=True, check=False)


def _lay(made: Cable) -> None:
    for side in (made.producer_side, made.consumer_side):
        _ip("netns", "add", side)
        _ip("-n", side, "link", "set", "lo", "up")
    peer = ("peer", "name", "cable", "netns", made.consumer_side)
    _ip("link", "add", "cable", "netns", made.producer_side, "type", "veth", *peer)
    for side, host in ((made.producer_side, made.producer_host), (made.consumer_side, made.consumer_host)):
        _ip("-n", side, "address", "add", f"{host}/24", "dev", "cable")
        _ip("-n", side, "link", "set", "cable", "up")
    for side in (made.producer_side, made.consumer_side):
        while "state UP" not in _ip("-n", side, "link", "show", "cable"):  # else UCX would not see the device
            pass


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
