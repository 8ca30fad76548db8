"""Both ends of the side channel, without a runtime."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import msgspec
from tests_support import PATIENT, until

from kvflow import Config
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import Address
from kvflow.runtime.channel.asking import ZmqSideChannel
from kvflow.runtime.channel.listening import ZmqListener
from kvflow.runtime.channel.protocol import Answer, ListenerStatistics
from kvflow.testing import ManualClock

PLAIN = replace(PATIENT, engine_id="producer", listen="tcp://127.0.0.1:0", transport="inproc")
READER = replace(PLAIN, engine_id="reader")
ANSWER = messages.LeaseAnswer(state=messages.LeaseAnswerState.ENDED)
REQUEST = messages.MetadataRequest(
    reader="reader/0.0.0#1", target=Address("producer", Rank(0, 0, 0), "tcp://127.0.0.1:1")
)


def answer(header: codec.Header, request: messages.Request) -> messages.Reply:
    return ANSWER


@contextlib.asynccontextmanager
async def listening(
    config: Config, clock: ManualClock | None = None, answer: Answer = answer
) -> AsyncIterator[ZmqListener]:
    listener = await ZmqSideChannel(config, (clock or ManualClock()).now_s).listen(answer)
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


@contextlib.contextmanager
def asking(config: Config = PLAIN) -> Iterator[ZmqSideChannel]:
    channel = ZmqSideChannel(config, ManualClock().now_s)
    try:
        yield channel
    finally:
        channel.close()


def to(address: str, request: messages.MetadataRequest = REQUEST) -> messages.MetadataRequest:
    """The request, for the rank at that address."""
    return msgspec.structs.replace(request, target=request.target._replace(address=address))


def address_of(listener: ZmqListener) -> str:
    return f"tcp://127.0.0.1:{listener.port}"


async def ask(listener: ZmqListener, config: Config = READER, request: messages.Request = REQUEST) -> messages.Reply:
    with asking(config) as channel:
        return await channel.ask(to(address_of(listener), request), fingerprint=b"")


async def assert_answers(listener: ZmqListener) -> None:
    """Assert that the listener still answers a valid question."""
    assert await ask(listener) == ANSWER


async def seen(listener: ZmqListener, **expected: int) -> ListenerStatistics:
    """Wait until the listener's statistics have the `expected` counts, and return them."""
    try:
        await until(lambda: all(getattr(listener.statistics, name) == value for name, value in expected.items()))
    except TimeoutError:
        raise AssertionError(f"expected {expected}, got {listener.statistics}") from None
    return listener.statistics
