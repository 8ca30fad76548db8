"""Both ends of the side channel without a runtime around them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from tests_support import PATIENT, until

from kvflow import Config
from kvflow.core.protocol import messages
from kvflow.runtime.channel.asking import ZmqSideChannel
from kvflow.runtime.channel.listening import ZmqListener
from kvflow.runtime.channel.protocol import ListenerStatistics

PLAIN = replace(PATIENT, engine_id="producer", listen="tcp://127.0.0.1:0", transport="inproc")
REQUEST = messages.MetadataRequest(reader="reader/0.0.0#1", target=messages.Target("producer", 0, 0, 0))


class Hands:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def now_s(self) -> float:
        return self.now


def answer(header: messages.Header, request: messages.Request) -> messages.Reply:
    return messages.NoLease(ended=True)


@contextlib.asynccontextmanager
async def listening(config: Config, hands: Hands | None = None) -> AsyncIterator[ZmqListener]:
    listener = await ZmqSideChannel(config, (hands or Hands()).now_s).listen(answer)
    task = asyncio.create_task(listener.serve())
    try:
        yield listener
        assert not task.done(), "the listener has stopped"
    finally:
        task.cancel()
        try:
            await asyncio.wait([task])
        finally:
            listener.close()
        if not task.cancelled():
            await task  # raises what killed it


async def ask(config: Config, listener: ZmqListener, request: messages.Request = REQUEST) -> messages.Reply:
    channel = ZmqSideChannel(config, Hands().now_s)
    try:
        return await channel.ask(f"tcp://127.0.0.1:{listener.port}", request, fingerprint=b"")
    finally:
        channel.close()


async def seen(listener: ZmqListener, **expected: int) -> ListenerStatistics:
    """Wait until the listener has counted that."""
    try:
        await until(lambda: all(getattr(listener.statistics, name) == value for name, value in expected.items()))
    except TimeoutError:
        raise AssertionError(f"expected {expected}, got {listener.statistics}") from None
    return listener.statistics
