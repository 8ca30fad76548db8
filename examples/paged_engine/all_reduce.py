"""All-reduce over the ranks of one engine, each in a process of this machine.

Rank 0 has a socket to every other rank. It receives their tensors, adds them up in the order of the ranks, and sends
the sum back. So all ranks have bitwise equal sums, and their steps keep pace. For the few kilobytes of a decode step on
a few cores this is much faster than a ring: a sum over four ranks takes 0.07 ms on two cores, and took 6 ms with gloo.

If a rank dies or stops answering, the other ranks raise RankLostError.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch

SILENCE_TIMEOUT_S = 60.0


class RankLostError(ConnectionError):
    """Another rank of this engine has ended, or did not take part in the sum in time."""


def connected_ranks(count: int) -> list[list[socket.socket]]:
    """Return the sockets of each rank: rank 0 has one to each other rank, and each other rank has one to rank 0."""
    pairs = [socket.socketpair() for _ in range(count - 1)]
    return [[first for first, _ in pairs], *([second] for _, second in pairs)]


class AllReduce:
    """The sum of one tensor of each rank; all tensors must have the same shape. Owns the sockets in `peers`."""

    def __init__(self, tp_rank: int, peers: Sequence[socket.socket]) -> None:
        self._tp_rank = tp_rank
        self._peers = peers
        for peer in peers:
            peer.settimeout(SILENCE_TIMEOUT_S)

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of `part` over all ranks; with one rank, `part`."""
        try:
            return self._sum_at_first_rank(part) if self._tp_rank == 0 else self._sum_from_first_rank(part)
        except OSError as error:
            raise RankLostError(f"tp_rank {self._tp_rank}: lost another rank: {error}") from error

    def close(self) -> None:
        """Close the sockets, so that the other ranks' sums fail. Closing twice is fine."""
        for peer in self._peers:
            peer.close()

    def _sum_at_first_rank(self, part: torch.Tensor) -> torch.Tensor:
        total = part
        for peer in self._peers:
            total = total + _received(peer, part)
        for peer in self._peers:
            peer.sendall(_bytes_of(total))
        return total

    def _sum_from_first_rank(self, part: torch.Tensor) -> torch.Tensor:
        (first,) = self._peers
        first.sendall(_bytes_of(part.contiguous()))
        return _received(first, part)


def _received(peer: socket.socket, like: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
    missing = _bytes_of(tensor)
    while missing:
        count = peer.recv_into(missing)
        if not count:
            raise ConnectionResetError("it has hung up")
        missing = missing[count:]
    return tensor


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().data.cast("B")
