"""Frames and sockets of KV events. A message has three frames: topic, sequence number (8 bytes, big endian), batch.

A subscriber asks for a replay by the first sequence number that it needs. Each answer has an empty frame, then the
three frames of a message; older SGLang leaves out the topic. The last answer has sequence number -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from kvflow.hosts import ANY, bracket_ipv6_host, plain_host

SEQUENCE_BYTES = 8
END_OF_REPLAY = -1
LIVE_FRAME_COUNTS, REPLAYED_FRAME_COUNTS = (3,), (3, 4)
"""Allowed numbers of frames in a live message, and in a replayed one, which begins with an empty frame and may lack the
topic.
"""


def read_message(frames: Sequence[bytes], frame_counts: Sequence[int]) -> tuple[int, bytes] | None:
    """Return the sequence number and the batch of a ZeroMQ message of KV events; None if the message is malformed.

    `frame_counts`: allowed numbers of frames, `LIVE_FRAME_COUNTS` or `REPLAYED_FRAME_COUNTS`.
    """
    if len(frames) not in frame_counts or len(frames[-2]) != SEQUENCE_BYTES:
        return None
    sequence = int.from_bytes(frames[-2], "big", signed=True)
    return None if sequence < END_OF_REPLAY else (sequence, frames[-1])


def sequence_bytes(sequence: int) -> bytes:
    """Encode the sequence number of a batch as a message frame: 8 bytes, big-endian, signed."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big", signed=True)


def prepare_socket(
    socket: zmq.Socket[Any], endpoint: str, *, messages_max: int, bytes_max: int, v6: bool = False
) -> str:
    """Set the options of a socket before it is bound or connected. Return `endpoint` in the form that ZeroMQ takes.

    `messages_max`: maximum number of queued messages in each direction. Messages of more than `bytes_max` bytes are
    refused. `v6`: look up host names as IPv6 addresses. A wildcard address is bound for both IP versions.
    """
    endpoint = bracket_ipv6_host(endpoint)
    if endpoint.startswith("tcp://[::]:"):
        endpoint = endpoint.replace("[::]", ANY, 1)  # ANY is bound for IPv4 alone where there is no IPv6
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, messages_max)
    socket.setsockopt(zmq.SNDHWM, messages_max)
    socket.setsockopt(zmq.MAXMSGSIZE, bytes_max)
    socket.setsockopt(zmq.IPV6, int(v6 or endpoint.startswith(("tcp://[", f"tcp://{ANY}:"))))
    return endpoint


def tcp_host_of(endpoint: str) -> str:
    """Return the host name or IP address of a TCP endpoint, normalized; "" if the endpoint is not TCP."""
    scheme, _, rest = bracket_ipv6_host(endpoint).partition("://")
    return (plain_host(rest.rpartition(":")[0]) or "") if scheme == "tcp" else ""
