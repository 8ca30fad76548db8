"""Frames and sockets of KV events: topic, sequence number of 8 bytes (big endian), batch.

A replay is asked for with a first sequence number and answered with batches in the same frames, behind an empty one;
older SGLang leaves the topic out. It ends with sequence -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from kvflow.hosts import ANY, bracketed, plain_host

SEQUENCE_BYTES = 8
END = -1
LIVE, REPLAYED = (3,), (3, 4)
"""Frames of a message, and of a replay's answer, which begins with an empty one and may lack the topic."""


def read_message(frames: Sequence[bytes], forms: Sequence[int]) -> tuple[int, bytes] | None:
    """Return sequence number and batch of a message in as many frames as one of `forms`; None if it is no such."""
    if len(frames) not in forms or len(frames[-2]) != SEQUENCE_BYTES:
        return None
    sequence = int.from_bytes(frames[-2], "big", signed=True)
    return None if sequence < END else (sequence, frames[-1])


def sequence_bytes(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big", signed=True)


def prepare(socket: zmq.Socket[Any], endpoint: str, *, messages_max: int, bytes_max: int, v6: bool = False) -> str:
    """Limit a socket: nothing lingers, and nobody sends it more than that. Return the endpoint as ZeroMQ takes it.

    With `v6` names of hosts are looked up as IPv6 addresses. A wildcard is bound for both versions.
    """
    endpoint = bracketed(endpoint)
    if endpoint.startswith("tcp://[::]:"):
        endpoint = endpoint.replace("[::]", ANY, 1)  # which is bound for version 4 alone where there is no other
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, messages_max)
    socket.setsockopt(zmq.SNDHWM, messages_max)
    socket.setsockopt(zmq.MAXMSGSIZE, bytes_max)
    socket.setsockopt(zmq.IPV6, int(v6 or endpoint.startswith(("tcp://[", f"tcp://{ANY}:"))))
    return endpoint


def host_in(endpoint: str) -> str:
    """Return the host of a TCP endpoint in its one form; "" of others."""
    scheme, _, rest = bracketed(endpoint).partition("://")
    return (plain_host(rest.rpartition(":")[0]) or "") if scheme == "tcp" else ""
