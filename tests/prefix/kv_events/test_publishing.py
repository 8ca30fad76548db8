"""`Publisher`: its messages, its replays, and a `Subscriber` that follows it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio
from event_publishers import END_OF_REPLAY, WAIT_S, KnownMap, stored, until

from kvflow.errors import ConfigError, RequestError, UsageError
from kvflow.prefix.kv_events import EventSource, Publisher, Subscriber
from kvflow.prefix.kv_events.batches import AllBlocksCleared, BlockStored, decode_batch

ANYWHERE = "tcp://127.0.0.1:0"


async def replay(endpoint: str | None, *question: bytes) -> list[list[bytes]]:
    """Return a publisher's answer, up to its end."""
    with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
        assert endpoint is not None
        socket.connect(endpoint)
        await socket.send_multipart([b"", b"no question"])
        await socket.send_multipart(question)
        found = []
        async with asyncio.timeout(WAIT_S):
            while not found or found[-1][-2] != END_OF_REPLAY:
                found.append(await socket.recv_multipart())
        return found


async def test_a_subscriber_follows_it_from_before_its_beginning() -> None:
    known = KnownMap()
    async with Publisher(ANYWHERE, replay_endpoint=ANYWHERE, topic="kv") as publisher:
        assert [publisher.publish([stored(1)]), publisher.publish([stored(2, 1), stored(3, 2)])] == [0, 1]
        source = EventSource(
            holder="engine", endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint, topic="kv"
        )
        async with Subscriber(known, [source]) as subscriber, asyncio.timeout(WAIT_S):
            await until(lambda: known.has(1, 2, 3))
            publisher.publish([AllBlocksCleared(), stored(4)])
            while not known.has(4):  # it may have subscribed a moment later, and sees a gap
                publisher.publish([])
                await asyncio.sleep(0)
            assert (known.blocks, subscriber.statistics()["engine"].forgotten) == (1, 0)


async def test_replays_are_as_vllms_and_keep_so_many_batches_and_bytes() -> None:
    for bounds in ({"batches_max": 2}, {"bytes_max": 2 * 230}):
        async with Publisher(
            ANYWHERE, replay_endpoint=ANYWHERE, topic="kv", data_parallel_rank=3, **bounds
        ) as publisher:
            for number in range(5):
                publisher.publish([stored(number)])
            answers = await replay(publisher.replay_endpoint, b"", bytes(8))
            assert [(empty, topic, int.from_bytes(at, "big", signed=True)) for empty, topic, at, _ in answers] == [
                (b"", b"kv", 3),
                (b"", b"kv", 4),
                (b"", b"", -1),
            ]
            assert list(decode_batch(answers[0][3])) == [stored(3)]
            assert msgspec.msgpack.decode(answers[0][3])[2] == 3
            assert len(await replay(publisher.replay_endpoint, b"", (4).to_bytes(8, "big"))) == 2


async def test_a_replay_of_many_batches_is_whole() -> None:
    async with Publisher(ANYWHERE, replay_endpoint=ANYWHERE) as publisher:
        for number in range(10_000):
            publisher.publish([stored(number)])
        answers = await replay(publisher.replay_endpoint, b"", bytes(8))
        assert [int.from_bytes(frames[2], "big", signed=True) for frames in answers] == [*range(10_000), -1]


async def test_a_batch_that_subscribers_would_refuse_is_refused_and_takes_no_number() -> None:
    async with Publisher(ANYWHERE) as publisher:
        with pytest.raises(RequestError, match="at most"):
            publisher.publish([BlockStored(block_hashes=[1], token_ids=[1 << 40] * 600_000, block_size=600_000)])
        for wrong in (None, {}, BlockStored(block_hashes=[1 << 64], token_ids=[], block_size=1)):
            with pytest.raises(RequestError, match=r"^events: "):
                publisher.publish([wrong])  # type: ignore[list-item]
        assert publisher.publish([]) == 0
        assert publisher.replay_endpoint is None


async def test_it_ends_with_its_block_and_is_entered_once() -> None:
    before = asyncio.all_tasks()
    publisher = Publisher(ANYWHERE, replay_endpoint=ANYWHERE)
    with pytest.raises(UsageError):
        publisher.publish([])
    async with publisher:
        assert not publisher.endpoint.endswith(":0")
        with pytest.raises(UsageError):
            await publisher.__aenter__()
    assert asyncio.all_tasks() == before
    with pytest.raises(UsageError):
        publisher.publish([])
    with pytest.raises(UsageError):
        await publisher.__aenter__()


async def test_nonsense_is_refused_by_name() -> None:
    for wrong in (
        {"endpoint": 7},
        {"topic": None},
        {"batches_max": -1},
        {"bytes_max": 0.5},
        {"data_parallel_rank": "0"},
        {"replay_endpoint": 7},
    ):
        with pytest.raises(ConfigError):
            Publisher(**{"endpoint": ANYWHERE, **wrong})  # type: ignore[arg-type]
    async with Publisher(ANYWHERE) as publisher:
        for given in ({"endpoint": publisher.endpoint}, {"endpoint": ANYWHERE, "replay_endpoint": "nowhere"}):
            with pytest.raises(ConfigError, match="KV events"):
                async with Publisher(**given):
                    pass
