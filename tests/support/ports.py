"""Free ports for servers that other programs open some time later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path


def free_port() -> int:
    """Return a free port below the system's ephemeral range, so that the system assigns it to no other socket."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split()[0])
    for port in random.sample(range(first // 2, first), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"no port is free between {first // 2} and {first}")
