"""Publishes the KV events of your own engine, in the form of vLLM's."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio

from kvflow import forks
from kvflow.checks import counted, text, whole
from kvflow.errors import ConfigError, RequestError, UsageError
from kvflow.prefix.kv_events.batches import BATCH_BYTES_MAX, KVEvent, encode_batch
from kvflow.prefix.kv_events.sockets import END_OF_REPLAY, SEQUENCE_BYTES, prepare_socket, sequence_bytes

BATCHES_MAX = 10_000
_REPLAY_REQUEST_BYTES_MAX = 256
_BATCHES_PER_TURN = 16


class Publisher:
    """Async context manager that publishes KV events. One task answers subscribers that ask for missed batches.

    Args:
        endpoint: address to publish at, such as `tcp://*:5557`; port 0: the system chooses a port.
        replay_endpoint: address at which subscribers ask for missed batches; None: missed batches are not sent again.
        topic: ZeroMQ topic of the messages.
        batches_max: maximum number of batches to keep for replays.
        bytes_max: maximum total size of the batches that are kept for replays, in bytes.
        data_parallel_rank: data parallel rank that each batch names; None if the engine has one rank.

    Raises:
        ConfigError: a value is invalid, or an endpoint cannot be bound.
        UsageError: the Publisher was entered twice.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        batches_max: int = BATCHES_MAX,
        bytes_max: int = 256 << 20,
        data_parallel_rank: int | None = None,
    ) -> None:
        self._endpoint = text(endpoint, "endpoint", error=ConfigError)
        self._replay_endpoint = None if replay_endpoint is None else text(replay_endpoint, "replay", error=ConfigError)
        self._topic = text(topic, "topic", error=ConfigError).encode()
        self._batches_max = whole(batches_max, "batches_max", least=0, most=1 << 20, error=ConfigError)
        self._bytes_max = whole(bytes_max, "bytes_max", least=0, error=ConfigError)
        rank = data_parallel_rank
        self._data_parallel_rank = (
            None if rank is None else whole(rank, "data_parallel_rank", least=0, error=ConfigError)
        )
        self._next_sequence, self._kept_bytes = 0, 0
        self._kept_batches: deque[tuple[int, bytes]] = deque()
        self._socket: zmq.Socket[bytes] | None = None
        self._replay_socket: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def endpoint(self) -> str:
        """Address at which events are published. Inside `async with` the address has the port that was bound."""
        return self._endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Address at which subscribers ask for missed batches, or None. Inside `async with` it has the bound port."""
        return self._replay_endpoint

    async def __aenter__(self) -> Self:
        if self._socket is not None or self._closed:
            raise UsageError("a Publisher can be entered only once")
        try:
            self._socket = zmq.Context.instance().socket(zmq.PUB)
            self._endpoint = self._bind(self._socket, self._endpoint)
            if self._replay_endpoint is not None:
                self._replay_socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
                self._replay_endpoint = self._bind(self._replay_socket, self._replay_endpoint)
                self._task = asyncio.create_task(
                    self._answer_replays(self._replay_socket), name="kvflow-kv-events-replays"
                )
        except zmq.ZMQError as error:
            self._close()
            raise ConfigError(f"KV events: {self._endpoint!r}, {self._replay_endpoint!r}: {error}") from error
        forks.register(self)
        return self

    def forked(self) -> None:
        """In a forked child process: stop publishing. `kvflow.forks` calls this in the child."""
        if self._replay_socket is not None:
            forks.ignore_events(self._replay_socket)
        self._socket = self._replay_socket = self._task = None

    def _bind(self, socket: zmq.Socket[Any], endpoint: str) -> str:
        """Bind a socket to `endpoint`. Return the bound address, with the real port."""
        most = self._batches_max + 1000  # room for a whole replay: ZeroMQ drops messages silently if its queue is full
        socket.bind(prepare_socket(socket, endpoint, messages_max=most, bytes_max=_REPLAY_REQUEST_BYTES_MAX))
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
        finally:
            self._close()

    def _close(self) -> None:
        self._closed = True
        for socket in (self._socket, self._replay_socket):
            if socket is not None:
                socket.close(0)
        self._socket = self._replay_socket = None

    def publish(self, events: Iterable[KVEvent]) -> int:
        """Publish events as one batch, without waiting for subscribers.

        Args:
            events: events in the order in which they happened.

        Returns:
            The sequence number of the batch.

        Raises:
            UsageError: the Publisher is not open.
            RequestError: a value is no event, or the batch is larger than subscribers accept. Nothing is published.
        """
        if self._socket is None:
            raise UsageError("the Publisher is not open")
        payload = encode_batch(events, ts=time.time(), data_parallel_rank=self._data_parallel_rank)
        if len(payload) > BATCH_BYTES_MAX:
            raise RequestError(f"events: a batch of {counted(len(payload), 'byte')}, at most {BATCH_BYTES_MAX}")
        number = self._next_sequence
        self._next_sequence += 1
        self._socket.send_multipart([self._topic, sequence_bytes(number), payload], zmq.NOBLOCK)
        self._kept_batches.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept_batches) > self._batches_max or self._kept_bytes > self._bytes_max:
            self._kept_bytes -= len(self._kept_batches.popleft()[1])
        return number

    async def _answer_replays(self, socket: zmq.asyncio.Socket) -> None:
        """Send missed batches to subscribers that ask for them.

        Task `kvflow-kv-events-replays`: begun by a `Publisher`; runs until the `async with` block of the Publisher
        ends. If the task dies, no missed batches are sent.
        """
        while True:
            match await socket.recv_multipart():
                case [client, b"", start] if len(start) == SEQUENCE_BYTES:
                    await self._send_replay(socket, client, int.from_bytes(start, "big"))
                case _:
                    await asyncio.sleep(0)

    async def _send_replay(self, socket: zmq.asyncio.Socket, client: bytes, start: int) -> None:
        """Send a subscriber all kept batches from sequence number `start` on, then the message that ends a replay.

        `client`: the subscriber's ZeroMQ routing id.
        """
        for at, (number, payload) in enumerate([batch for batch in self._kept_batches if batch[0] >= start]):
            await socket.send_multipart([client, b"", self._topic, sequence_bytes(number), payload])
            if at % _BATCHES_PER_TURN == _BATCHES_PER_TURN - 1:
                await asyncio.sleep(0)
        await socket.send_multipart([client, b"", b"", sequence_bytes(END_OF_REPLAY), b""])
        await asyncio.sleep(0)
