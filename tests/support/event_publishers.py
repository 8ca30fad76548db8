"""A publisher of KV events that a test drives frame by frame, and a prefix map with questions by tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio
from tests_support import WAIT_S, until

from kvflow.prefix import prefix_keys
from kvflow.prefix.kv_events import EventSource, PrefixMap
from kvflow.prefix.kv_events.batches import BlockStored, KVEvent, encode_batch

__all__ = ["END_OF_REPLAY", "WAIT_S", "KnownMap", "ScriptedPublisher", "stored", "until"]

END_OF_REPLAY = b"\xff" * 8


def stored(number: int, parent: int | None = None) -> BlockStored:
    """Return the event of one stored block, with `number` as its hash and its only token."""
    return BlockStored(block_hashes=[number], parent_block_hash=parent, token_ids=[number], block_size=1, medium="GPU")


class KnownMap(PrefixMap):
    """A prefix map that can be asked by the tokens of `stored` blocks."""

    def has(self, *numbers: int) -> bool:
        """Return True if the whole prompt of these tokens is known."""
        found = dict(self.holders(prefix_keys(numbers, 1), 1))
        return found.get("engine") == len(numbers)


class ScriptedPublisher:
    """A publisher's two sockets, for events and for replays. The socket for events reports subscriptions."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:0", replay_endpoint: str = "tcp://127.0.0.1:0") -> None:
        context = zmq.asyncio.Context.instance()
        self.events, self.replays = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self.endpoint, self.replay_endpoint = endpoint, replay_endpoint

    async def __aenter__(self) -> Self:
        self.endpoint = await self._bind(self.events, self.endpoint)
        self.replay_endpoint = await self._bind(self.replays, self.replay_endpoint)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.events.close(0)
        self.replays.close(0)

    @staticmethod
    async def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> str:
        """Bind a socket and return its endpoint. Retry while the port is in use: a closed port may need a moment."""
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    socket.bind(endpoint)
                    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
                except zmq.ZMQError as error:
                    if error.errno != zmq.EADDRINUSE:
                        raise
                    await asyncio.sleep(0)

    def source(self, *, replays: bool = True, topic: str = "") -> EventSource:
        replay_endpoint = self.replay_endpoint if replays else None
        return EventSource(holder="engine", endpoint=self.endpoint, replay_endpoint=replay_endpoint, topic=topic)

    async def subscribed(self) -> None:
        async with asyncio.timeout(WAIT_S):
            assert (await self.events.recv()).startswith(b"\x01")

    async def send(self, number: int, *events: KVEvent, topic: bytes = b"") -> None:
        await self.events.send_multipart([topic, number.to_bytes(8, "big"), encode_batch(events, ts=1.5)])

    async def asked(self) -> tuple[bytes, int]:
        """Wait for a question for a replay. Return its client and the number to start from."""
        async with asyncio.timeout(WAIT_S):
            client, empty, start = await self.replays.recv_multipart()
        assert empty == b""
        return client, int.from_bytes(start, "big")

    async def answer(
        self, client: bytes, batches: Iterable[tuple[int, KVEvent]] = (), *, topics: bool = True, end: bool = True
    ) -> None:
        """Answer a question for a replay. Without `topics`, leave out the frame for the topic, as older SGLang does."""
        topic = [b""] if topics else []
        for number, event in batches:
            payload = encode_batch([event], ts=1.5)
            await self.replays.send_multipart([client, b"", *topic, number.to_bytes(8, "big"), payload])
        if end:
            await self.replays.send_multipart([client, b"", *topic, END_OF_REPLAY, b""])

    async def replayed(self, *batches: tuple[int, KVEvent], topics: bool = True) -> int:
        """Answer the next question for a replay. Return the number that it starts from."""
        client, start = await self.asked()
        await self.answer(client, batches, topics=topics)
        return start
