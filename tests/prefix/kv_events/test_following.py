"""`Subscriber` against a scripted publisher: messages that are missed, replayed or forged, and a restart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
import zmq
from event_publishers import WAIT_S, KnownMap, ScriptedPublisher, stored, until

from kvflow.errors import ConfigError, UsageError
from kvflow.prefix.kv_events import EventSource, PrefixMap, SourceStatistics, Subscriber
from kvflow.prefix.kv_events.batches import AllBlocksCleared, BlockStored, KVEvent


@contextlib.asynccontextmanager
async def following(
    *told: KVEvent, replays: bool = True, answers: bool = True, topic: str = ""
) -> AsyncIterator[tuple[ScriptedPublisher, KnownMap, Callable[[], SourceStatistics]]]:
    """Yield a publisher that has replayed these events from number 0, its subscriber's map, and the statistics."""
    known = KnownMap()
    async with (
        ScriptedPublisher() as publisher,
        Subscriber(known, [publisher.source(replays=replays, topic=topic)]) as subscriber,
    ):
        await publisher.subscribed()
        if replays and answers:
            assert await publisher.replayed(*enumerate(told)) == 0
        await until(lambda: known.blocks == len(told))
        yield publisher, known, lambda: subscriber.statistics()["engine"]


async def test_what_was_published_before_is_replayed_and_what_comes_then_is_heard() -> None:
    async with following(stored(1), stored(2, 1)) as (publisher, known, seen):
        assert known.has(1, 2)
        await publisher.send(2, stored(3, 2))
        await until(lambda: known.has(1, 2, 3) and seen().sequence == 2)
        assert seen() == SourceStatistics(connected=True, sequence=2, batches=3, replays=1)


@pytest.mark.parametrize("topics", [True, False])
async def test_a_gap_is_replayed_with_a_topic_frame_and_without(topics: bool) -> None:
    async with following(stored(1)) as (publisher, known, seen):
        await publisher.send(3, stored(4, 3))
        assert await publisher.replayed((1, stored(2, 1)), (2, stored(3, 2)), topics=topics) == 1
        await until(lambda: known.has(1, 2, 3, 4))
        assert seen().forgotten == 0


async def test_what_comes_live_and_by_a_replay_is_taken_once() -> None:
    async with following(answers=False) as (publisher, known, seen):
        client, _ = await publisher.asked()
        for number in range(2):
            await publisher.send(number, stored(number))
        await publisher.answer(client, [(0, stored(0)), (1, stored(1)), (2, AllBlocksCleared())])
        await publisher.send(2, AllBlocksCleared())
        await publisher.send(3, stored(3))
        await until(lambda: seen().sequence == 3)
        assert (known.has(3), known.blocks, seen().batches, seen().forgotten) == (True, 1, 4, 0)


@pytest.mark.parametrize("kept", [True, False])
async def test_a_gap_that_no_replay_closes_forgets_what_was_told(kept: bool) -> None:
    async with following(stored(1)) as (publisher, known, seen):
        await publisher.send(5, stored(6))
        assert await publisher.replayed(*([(4, stored(5))] if kept else [])) == 1
        await until(lambda: known.has(6))
        assert [known.has(1), known.has(5), seen().forgotten] == [False, kept, 1]


async def test_without_replays_a_gap_forgets() -> None:
    async with following(replays=False) as (publisher, known, seen):
        await publisher.send(7, stored(1))
        await until(lambda: known.has(1))
        assert seen().forgotten == 0, "nothing had been told before"
        await publisher.send(9, stored(2))
        await until(lambda: known.has(2))
        assert (known.has(1), seen().forgotten, seen().replays) == (False, 1, 0)


async def test_what_a_replay_loses_is_asked_for_again() -> None:
    async with following(answers=False) as (publisher, known, seen):
        await publisher.replayed((0, stored(1)), (2, stored(3, 2)))
        assert await publisher.replayed((1, stored(2, 1)), (2, stored(3, 2))) == 1
        await until(lambda: known.has(1, 2, 3))
        assert (seen().forgotten, seen().replays) == (0, 2)


async def test_a_replay_that_is_never_answered_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvflow.prefix.kv_events.following.REPLAY_TIMEOUT_S", 0.0)
    async with following(answers=False) as (publisher, known, seen):
        await publisher.send(0, stored(1))
        await until(lambda: known.has(1))
        await publisher.send(2, stored(3))
        await until(lambda: known.has(3))
        assert (known.has(1), seen().forgotten) == (False, 1)


@pytest.mark.parametrize(
    "answer", [[b"", b"1", b"2"], [b""], [b"", b"", b"", b"", b"", b""], [b"", b"\x80" + bytes(7), b""]]
)
async def test_an_answer_that_is_none_ends_a_replay(answer: list[bytes]) -> None:
    async with following(answers=False) as (publisher, known, seen):
        client, _ = await publisher.asked()
        await publisher.replays.send_multipart([client, *answer])
        await publisher.send(0, stored(1))
        await until(lambda: known.has(1))
        assert seen().refused == 1


async def test_a_publisher_that_was_restarted_under_its_address_begins_anew() -> None:
    """Its next number is the number that the earlier publisher would have used."""
    async with following(stored(1)) as (first, known, seen):
        await first.__aexit__(None, None, None)
        await until(lambda: not known.blocks)
        assert not seen().connected
        async with ScriptedPublisher(first.endpoint, first.replay_endpoint) as second:
            await second.subscribed()
            assert await second.replayed((0, stored(7))) == 0
            await second.send(1, stored(8, 7))
            await until(lambda: known.has(7, 8))
            assert (known.blocks, seen().connected, seen().forgotten) == (2, True, 1)


async def test_numbers_that_begin_again_over_one_connection_begin_anew() -> None:
    """As through a proxy, which a publisher's restart does not disconnect."""
    async with following(replays=False) as (publisher, known, seen):
        for number in range(3):
            await publisher.send(number, stored(number))
        await until(lambda: known.has(2))
        await publisher.send(0, stored(7))
        await until(lambda: known.has(7) and seen().batches == 4)
        assert (known.blocks, seen().sequence, seen().forgotten) == (1, 0, 1)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [bytes(8), b""],
        [b"", b"7", b""],
        [b"", bytes(8), b"", b"", b""],
        [b"", b"\xff" * 8, b""],
        [b"", b"\x80" + bytes(7), b""],
    ],
)
async def test_messages_of_other_forms_are_counted_and_nothing_else(frames: list[bytes]) -> None:
    async with following(stored(1)) as (publisher, known, seen):
        await publisher.events.send_multipart(frames)
        await publisher.send(1, stored(2, 1))
        await until(lambda: known.has(1, 2))
        assert (seen().refused, seen().forgotten) == (1, 0)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([b"kv", b"batch"], "a message without a sequence number, bytes of its frames: 2, 5"),
        ([b"kvevents", b"batch"], "a message without a sequence number, bytes of its frames: 8, 5"),
        ([b"kv", (1).to_bytes(8, "big"), b"\xc1"], "not a batch"),
    ],
)
async def test_what_cannot_be_followed_is_warned_of_once(
    frames: list[bytes], why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic of eight bytes is no number either."""
    monkeypatch.setattr("kvflow.prefix.kv_events.following.REPLAY_TIMEOUT_S", 0.05)  # nobody answers for what is lost
    async with following(stored(1)) as (publisher, _, seen):
        for _ in range(3):
            await publisher.events.send_multipart(frames)
        await publisher.send(2, stored(2, 1))
        await until(lambda: seen().sequence == 2)
        assert seen().refused in (1, 3), "a number that was told before is none to be read again"
        publisher_address = publisher.endpoint
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"KV events of engine at {publisher_address} cannot be followed: " in warning
    assert why in warning


async def test_events_that_cannot_be_read_are_counted_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async with following(stored(1)) as (publisher, known, seen):
        batch = msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": [1.5]}] * 2, None])
        for number in (1, 2):
            await publisher.events.send_multipart([b"", number.to_bytes(8, "big"), batch])
        await until(lambda: seen().sequence == 2)
        assert (seen().unreadable, seen().refused, known.has(1)) == (4, 0, True)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "an event is not read: BlockRemoved: Expected `int | bytes`, got `float`" in warning


async def test_a_publisher_that_is_never_connected_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example vLLM's, which connects to a configured address: no process listens there."""
    monkeypatch.setattr("kvflow.prefix.kv_events.following.SILENT_S", 0.05)
    with zmq.Context.instance().socket(zmq.PUB) as elsewhere:
        port = elsewhere.bind_to_random_port("tcp://127.0.0.1")
    endpoint = f"tcp://127.0.0.1:{port}"
    async with following(stored(1)), Subscriber(PrefixMap(), [EventSource(holder="e", endpoint=endpoint)]):
        await until(lambda: "nobody has answered" in caplog.text)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"KV events of e: nobody has answered at {endpoint} for 0 s. Its engine may not")


async def test_a_batch_that_is_none_may_have_told_anything_so_all_is_forgotten() -> None:
    async with following(stored(1)) as (publisher, known, seen):
        await publisher.events.send_multipart([b"", (1).to_bytes(8, "big"), b"\xc1"])
        await publisher.send(2, stored(3))
        await until(lambda: known.has(3))
        assert (known.has(1), seen().refused, seen().forgotten) == (False, 1, 1)


async def test_other_topics_are_not_heard() -> None:
    async with following(replays=False, topic="kv") as (publisher, known, _):
        await publisher.send(0, stored(1), topic=b"load")
        await publisher.send(0, stored(2), topic=b"kv")
        await until(lambda: known.has(2))
        assert known.blocks == 1


async def test_a_huge_batch_lets_the_loop_go_on() -> None:
    """Of 100 events, and of 8,000 blocks in one: between two turns few are taken in."""
    most = 0
    many = BlockStored(block_hashes=list(range(100, 8100)), token_ids=[7] * 128_000, block_size=16)

    async def watch() -> None:
        nonlocal most
        before = 0
        while True:
            before, most = known.blocks, max(most, known.blocks - before)
            await asyncio.sleep(0)

    async with following(replays=False) as (publisher, known, _):
        await publisher.send(0)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch())
            await publisher.send(1, *[stored(number) for number in range(100)], many)
            await until(lambda: known.blocks == 8100)
            watching.cancel()
    assert 0 < most <= 64


async def test_several_engines_are_told_apart_and_leave_no_task_behind() -> None:
    known, before = KnownMap(), asyncio.all_tasks()
    async with ScriptedPublisher() as one, ScriptedPublisher() as other:
        sources = [one.source(), EventSource(holder="other", endpoint=other.endpoint)]
        async with Subscriber(known, sources) as subscriber:
            await other.subscribed()
            await other.send(0, stored(1))
            await until(lambda: known.blocks)
            assert not known.has(1)
            assert set(subscriber.statistics()) == {"engine", "other"}
            assert len(asyncio.all_tasks()) == len(before) + 2
        assert asyncio.all_tasks() == before


async def test_cancelling_the_block_ends_its_tasks_wherever_they_are() -> None:
    before, waits = asyncio.all_tasks(), asyncio.Event()

    async def follow() -> None:
        async with following(answers=False) as (publisher, _, _):
            await publisher.asked()  # it waits for a replay
            waits.set()
            await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(follow())
    await waits.wait()
    task.cancel()
    await asyncio.wait([task], timeout=WAIT_S)
    assert task.cancelled()
    assert asyncio.all_tasks() == before


async def test_an_error_in_the_block_is_raised_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with following():
            raise KeyError


async def test_a_map_that_fails_ends_the_block_and_says_why() -> None:
    class Failing(PrefixMap):
        def steps(self, holder: str, event: object) -> None:  # type: ignore[override]
            raise RuntimeError("of the map")

    with pytest.raises(ExceptionGroup) as raised:
        async with ScriptedPublisher() as publisher, Subscriber(Failing(), [publisher.source()]):
            await publisher.subscribed()
            await publisher.replayed((0, stored(1)))
            await asyncio.get_running_loop().create_future()
    assert raised.group_contains(RuntimeError, match="of the map")


async def test_nonsense_is_refused_by_name_and_a_subscriber_is_entered_once() -> None:
    source = EventSource(holder="engine", endpoint="tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"^holder: expected `str`, got 7"):
        EventSource(holder=7, endpoint="")  # type: ignore[arg-type]
    for wrong in (None, [None], [source, source]):
        with pytest.raises(ConfigError):
            Subscriber(PrefixMap(), wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="prefix_map"):
        Subscriber(None, [source])  # type: ignore[arg-type]
    for wrong_address in ({"endpoint": "127.0.0.1:1"}, {"endpoint": source.endpoint, "replay_endpoint": "127.0.0.1:1"}):
        with pytest.raises(
            ConfigError, match=r"'engine' at .*127\.0\.0\.1:1: .*did you mean 'tcp://127\.0\.0\.1:1'\?$"
        ):
            async with Subscriber(PrefixMap(), [EventSource(holder="engine", **wrong_address)]):
                pass
    with pytest.raises(ConfigError, match=r"^replay_endpoint: expected `str \| null`, got 7"):
        EventSource(holder="a", endpoint="", replay_endpoint=7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nowhere"):
        async with Subscriber(PrefixMap(), [source, EventSource(holder="b", endpoint="nowhere")]):
            pass
    subscriber = Subscriber(PrefixMap(), [source])
    async with subscriber:
        with pytest.raises(UsageError):
            await subscriber.__aenter__()
