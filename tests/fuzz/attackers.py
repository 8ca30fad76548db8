"""The attackers of the fuzz. They run in processes of their own, so that their objects are not counted as kvflow's."""

from __future__ import annotations

import contextlib
import itertools
import socket
from random import Random

import zmq

from kvflow.core.plan.topology import CacheShare
from tests.fuzz.mutants import listener_messages, messages_of_both_wires, tcp_streams

MESSAGES_PER_SOCKET = 200
OPEN_CONNECTIONS_MAX = 100


def source(rng: Random) -> str:
    """Not the address that honest engines come from: limits are per address."""
    return f"127.0.0.{rng.randrange(2, 250)}"


def send_messages(
    seed: str,
    port: int,
    fingerprint: bytes,
    cache_shares: tuple[CacheShare, ...],
    bytes_max: int,
    count: int,
    server_key: bytes,
    stock: bool = False,
) -> int:
    """Send messages of all kinds over ZeroMQ; with `stock`, half are messages of the stock wire.

    With a `server_key` the attackers also try unknown keys.
    """
    rng = Random(seed)
    make = messages_of_both_wires if stock else listener_messages
    messages = make(rng, fingerprint, cache_shares, bytes_max)
    curve, address = server_key != b"", source(rng)
    sent = 0
    with zmq.Context() as context:
        while sent < count:
            with context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.LINGER, 3 if curve else 60_000)
                dealer.setsockopt(zmq.RECONNECT_IVL, 1)
                dealer.setsockopt(zmq.SNDTIMEO, 2000)
                if curve and rng.random() < 0.8:
                    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
                    dealer.setsockopt(zmq.CURVE_SERVERKEY, rng.choice((server_key, rng.randbytes(32))))
                dealer.connect(f"tcp://{address}:0;127.0.0.1:{port}")
                for frames in itertools.islice(messages, min(10 if curve else MESSAGES_PER_SOCKET, count - sent)):
                    sent += 1
                    with contextlib.suppress(zmq.Again):
                        dealer.send_multipart(frames, flags=zmq.NOBLOCK if curve else 0)
                if curve:
                    dealer.poll(rng.choice((0, 0, 1, 5)))  # break off anywhere in the handshake
                while dealer.poll(0 if curve else 500):  # closing with answers unread would take back what was sent
                    dealer.recv_multipart()
    return sent


def send_streams(seed: str, port: int, count: int) -> int:
    """Open TCP connections and send bytes that are no message. Some connections stay open for a while."""
    rng = Random(seed)
    held: list[socket.socket] = []
    for stream in itertools.islice(tcp_streams(rng), count):
        with contextlib.suppress(OSError):
            opened = socket.create_connection(("127.0.0.1", port), timeout=5, source_address=(source(rng), 0))
            held.append(opened)
            opened.sendall(stream)
        while len(held) > rng.randrange(1, OPEN_CONNECTIONS_MAX):
            held.pop(rng.randrange(len(held))).close()
    for opened in held:
        opened.close()
    return count
