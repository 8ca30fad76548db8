"""Messages over a socket, one JSON document per line.

A channel ends when the other side closes it or dies. In both cases the next `receive` raises ChannelClosedError.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Generic, Self, TypeVar

import msgspec

from disaggregated.messages import Message

# The longest prompt that the model accepts is about 50 KiB of token ids.
LINE_SIZE_MAX = 1 << 20

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing", bound=Message)


class ChannelClosedError(ConnectionError):
    """The other side has closed the channel, or has died."""


class Channel(Generic[Incoming, Outgoing]):
    """One end of a connection that carries messages. Close it by `async with`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.json.Decoder[Incoming],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder

    @classmethod
    async def open(cls, sock: socket.socket, decoder: msgspec.json.Decoder[Incoming]) -> Self:
        """Return a channel over a connected socket. The channel owns the socket."""
        reader, writer = await asyncio.open_connection(sock=sock, limit=LINE_SIZE_MAX)
        return cls(reader, writer, decoder)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Closing twice is fine."""
        self._writer.close()

    async def send(self, message: Outgoing) -> None:
        """Write a message to the socket. Raises ChannelClosedError if the other side has closed it."""
        self._writer.write(msgspec.json.encode(message) + b"\n")
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise ChannelClosedError("the other side has closed its end") from error

    async def receive(self) -> Incoming:
        """Wait for the next message and return it. Cancelling loses no message."""
        try:
            line = await self._reader.readuntil(b"\n")
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise ChannelClosedError("the other side has closed its end") from error
        return self._decoder.decode(line)
