"""Receives the KV events of engines, applies them to a `PrefixMap`, and recovers from lost events.

For each publisher one task owns the sockets. Sequence numbers show which batches were missed, and the publisher is
asked to replay these. If the publisher cannot, all blocks of the engine are forgotten, since a missed event may have
removed them. If the connection breaks, or sequence numbers begin again, the publisher may have restarted: all blocks of
the engine are forgotten, and the batches that the publisher still keeps are replayed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvflow import forks
from kvflow.checks import count, instance, normalize_fields
from kvflow.errors import ConfigError, ProtocolError, UsageError
from kvflow.hosts import address_suggestion, is_v6
from kvflow.logs import logger_of
from kvflow.prefix.kv_events.batches import BATCH_BYTES_MAX, decode_batch
from kvflow.prefix.kv_events.prefix_map import PrefixMap
from kvflow.prefix.kv_events.sockets import (
    END_OF_REPLAY,
    LIVE_FRAME_COUNTS,
    REPLAYED_FRAME_COUNTS,
    SEQUENCE_BYTES,
    prepare_socket,
    read_message,
    sequence_bytes,
    tcp_host_of,
)
from kvflow.runtime.channel.lookups import Lookups

logger = logger_of(__name__)

LIVE_BATCHES_MAX = 256
"""Maximum number of received batches in a socket's queue. ZeroMQ drops further batches, which are then replayed."""
REPLAYED_BATCHES_MAX = 1000
SILENT_S = 10.0
"""Seconds after which a publisher that was never connected is named in a warning."""
REPLAY_TIMEOUT_S = 5.0
"""Seconds to wait for the next message of a replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSource:
    """A publisher of KV events: an engine with one data parallel rank, or one of an engine's data parallel ranks.

    Each data parallel rank publishes at a port of its own: rank r at the port of rank 0 plus r.

    Args:
        holder: name of the publisher in results of `PrefixMap.holders`, such as the address of the publisher's side
            channel.
        endpoint: address at which the publisher sends events, `tcp://host:port`.
        replay_endpoint: address at which the publisher replays events. If None, a missed event makes the map forget all
            blocks of the publisher, and blocks stored before the Subscriber connected stay unknown.
        topic: topic of the publisher's events; "" for any.

    Raises:
        ConfigError: a field is no text.
    """

    holder: str
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""

    def __post_init__(self) -> None:
        normalize_fields(self, ConfigError)


@dataclass(slots=True, kw_only=True)
class SourceStatistics:
    """Connection state and counts of one publisher. `connected`: the connection for live events is open now.

    `sequence`: number of the last applied batch, -1 before the first. `batches`: applied batches. `replays`: replays
    asked for. `forgotten`: how often all blocks of the publisher were forgotten. `refused`: messages that were no batch
    of events. `unreadable`: events of known types that could not be read. The first of each logs a warning.
    """

    connected: bool = False
    sequence: int = -1
    batches: int = 0
    replays: int = 0
    forgotten: int = 0
    refused: int = 0
    unreadable: int = 0


class _Follower:
    """Receives the KV events of one publisher, and applies them to the map."""

    def __init__(self, source: EventSource, prefix_map: PrefixMap) -> None:
        self.source, self.statistics = source, SourceStatistics()
        self._map, self._context = prefix_map, zmq.asyncio.Context.instance()
        self._use_ipv6 = False
        self._last_live = -1  # the last sequence number of a live message
        self._socket = self._context.socket(zmq.SUB)
        self._replays: list[zmq.asyncio.Socket] = []
        """List of one socket, that of the latest replay, open or closed. Before the first replay the list is empty."""
        self._monitor = self._socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
        try:
            self._connect()
        except (zmq.ZMQError, ValueError, TypeError) as error:
            self.close()
            endpoints = [place for place in (source.endpoint, source.replay_endpoint) if place is not None]
            meant = "".join(address_suggestion(place) for place in endpoints if "://" not in place)
            raise ConfigError(f"KV events of {source.holder!r} at {', '.join(endpoints)}: {error}{meant}") from error

    def _connect(self) -> None:
        self._endpoint = prepare_socket(
            self._socket, self.source.endpoint, messages_max=LIVE_BATCHES_MAX, bytes_max=BATCH_BYTES_MAX
        )
        self._socket.setsockopt(zmq.SUBSCRIBE, self.source.topic.encode())
        self._socket.connect(self._endpoint)
        if self.source.replay_endpoint is not None:
            with self._context.socket(zmq.DEALER) as socket:  # only to check the endpoint
                place = prepare_socket(socket, self.source.replay_endpoint, messages_max=1, bytes_max=BATCH_BYTES_MAX)
                socket.connect(place)

    def ignore_events(self) -> None:
        """In a forked child process: take all sockets off the event loop, so that the child receives nothing."""
        for socket in (self._monitor, self._socket, *self._replays):
            forks.ignore_events(socket)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    async def follow(self) -> None:
        """Receive and apply the publisher's events until cancelled.

        Task `kvflow-kv-events <holder>`: one for each source of a `Subscriber`, until the `async with` block of the
        Subscriber ends. That block raises the task's error.
        """
        await self._choose_ip_version()
        poller = zmq.asyncio.Poller()
        for socket in (self._monitor, self._socket):
            poller.register(socket, zmq.POLLIN)
        timer = asyncio.get_running_loop().call_later(SILENT_S, self._warn_if_silent)
        try:
            while True:
                ready = dict(await poller.poll())
                if self._monitor in ready:  # first: a message of a new connection may be of a restarted publisher
                    await self._on_connection(parse_monitor_message(await self._monitor.recv_multipart())["event"])
                else:
                    await self._on_message(await self._socket.recv_multipart())
        finally:
            timer.cancel()

    async def _choose_ip_version(self) -> None:
        """If the publisher's host has no IPv4 address, connect again by IPv6. ZeroMQ tries one IP version only."""
        host = tcp_host_of(self._endpoint)
        try:
            if not host or is_v6(host) or not is_v6(await Lookups().find_address(host)):
                return
        except (OSError, ValueError):  # the host has no address yet
            return
        self._use_ipv6 = True
        self._socket.disconnect(self._endpoint)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.connect(self._endpoint)

    async def _on_connection(self, event: int) -> None:
        """Handle `event`, a zmq.Event from the socket's monitor.

        When a connection opens, ask for a replay of missed batches. When the connection breaks, forget the publisher's
        blocks.
        """
        self.statistics.connected = event == zmq.Event.HANDSHAKE_SUCCEEDED
        if self.statistics.connected:
            await self._catch_up()
        else:
            await self._reset("its connection broke")

    async def _on_message(self, frames: Sequence[bytes]) -> None:
        """Apply the batch of a live message to the map. If earlier batches were missed, first ask for their replay."""
        message = read_message(frames, LIVE_FRAME_COUNTS)
        if message is None or message[0] == END_OF_REPLAY:
            self._count_refused(f"a message without a sequence number, bytes of its frames: {_frame_sizes(frames)}")
            await asyncio.sleep(0)
            return
        number, payload = message
        if number <= self._last_live:
            await self._reset(f"its sequence numbers began again at {number}")
        self._last_live = number
        if number > self._next_sequence:
            await self._catch_up()
        if number > self._next_sequence:
            await self._forget_blocks(f"events {self._next_sequence} to {number - 1} are missing")
        if number >= self._next_sequence:
            await self._apply_batch(number, payload)

    @property
    def _next_sequence(self) -> int:
        return self.statistics.sequence + 1

    async def _apply_batch(self, number: int, payload: bytes) -> None:
        """Apply the batch with sequence number `number` to the map, and count it.

        If `payload` is no batch, forget all blocks of the publisher instead. Other tasks of the loop may run between
        parts of the batch.
        """
        try:
            for event in decode_batch(payload, peer=self.source.endpoint, on_unreadable=self._count_unreadable):
                for _ in self._map.steps(self.source.holder, event):
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
        except ProtocolError as error:
            self._count_refused(str(error))
            await self._forget_blocks(str(error))
        self.statistics.batches += 1
        self.statistics.sequence = number
        await asyncio.sleep(0)

    def _count_unreadable(self, why: str) -> None:
        """Count an event that could not be read because of `why`. Log a warning, but only for the first one."""
        self.statistics.unreadable += 1
        if self.statistics.unreadable == 1:
            logger.warning(
                "KV events of %s at %s: an event is not read: %s. Further ones are only counted, in "
                "statistics().unreadable",
                *(self.source.holder, self.source.endpoint, why),
            )

    def _warn_if_silent(self) -> None:
        """Log a warning if the publisher was never connected."""
        if not self.statistics.connected and self.statistics.sequence < 0:
            logger.warning(
                "KV events of %s: nobody has answered at %s for %.0f s. Its engine may not listen there: vLLM and "
                "SGLang listen at tcp://*:PORT, and connect to an address without a wildcard",
                *(self.source.holder, self.source.endpoint, SILENT_S),
            )

    def _count_refused(self, why: str) -> None:
        """Count a message that is no batch of events.

        Log a warning with the reason `why`, but only for the first one.
        """
        self.statistics.refused += 1
        if self.statistics.refused == 1:
            logger.warning(
                "KV events of %s at %s cannot be followed: %s; expected a topic, a number of %d bytes and a batch. "
                "Further such messages are only counted, in statistics().refused",
                *(self.source.holder, self.source.endpoint, why, SEQUENCE_BYTES),
            )

    async def _reset(self, why: str) -> None:
        """Forget all blocks of the publisher, and expect sequence number 0 next. `why`: reason, for the log."""
        await self._forget_blocks(why)
        self.statistics.sequence = self._last_live = -1

    async def _forget_blocks(self, why: str) -> None:
        """If any batch of the publisher was applied, forget all blocks of the publisher and log the reason `why`."""
        if self.statistics.sequence >= 0:
            logger.info("KV events of %s: %s; all its blocks are forgotten", self.source.holder, why)
            self.statistics.forgotten += 1
            for _ in self._map.forgetting(self.source.holder):
                await asyncio.sleep(0)

    async def _catch_up(self) -> None:
        """Ask the publisher to replay the missed batches that it still keeps, and apply them.

        If batches of a replay get lost, ask again, as long as each replay brings further batches.
        """
        before = -2
        while self.source.replay_endpoint is not None and before < self.statistics.sequence:
            before = self.statistics.sequence
            self.statistics.replays += 1
            try:
                if await self._replay(self.source.replay_endpoint):
                    return
            except (TimeoutError, zmq.ZMQError) as error:
                logger.info("KV events of %s: no replay: %r", self.source.holder, error)

    async def _replay(self, endpoint: str) -> bool:
        """Ask for a replay at `endpoint`, and apply its batches. Return True if the replay was complete."""
        with self._context.socket(zmq.DEALER) as socket:
            self._replays = [socket]
            limits = {"messages_max": REPLAYED_BATCHES_MAX, "bytes_max": BATCH_BYTES_MAX}
            socket.connect(prepare_socket(socket, endpoint, **limits, v6=self._use_ipv6))
            await socket.send_multipart([b"", sequence_bytes(self._next_sequence)])
            is_first = True
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    message = read_message(frames := await socket.recv_multipart(), REPLAYED_FRAME_COUNTS)
                if message is None:
                    self._count_refused(
                        f"an answer without a sequence number, bytes of its frames: {_frame_sizes(frames)}"
                    )
                    return False
                number, payload = message
                if number == END_OF_REPLAY:
                    return True
                if number > self._next_sequence:
                    if not is_first:
                        return False
                    await self._forget_blocks(f"events {self._next_sequence} to {number - 1} are no longer kept")
                if number >= self._next_sequence:
                    await self._apply_batch(number, payload)
                is_first = False


def _frame_sizes(frames: Sequence[bytes]) -> str:
    return ", ".join([str(len(frame)) for frame in frames[:5]] + ["..."] * (len(frames) > 5))


class Subscriber:
    """Async context manager that applies the KV events of engines to a `PrefixMap`.

    Use the map only in the event loop of the `async with` block. The Subscriber's tasks end with that block, also if
    the block is cancelled.

    Args:
        prefix_map: map that all events are applied to.
        sources: publishers to receive events from.

    Raises:
        ConfigError: a source is invalid, or two sources have the same `holder`.
        UsageError: the Subscriber was entered twice.
    """

    def __init__(self, prefix_map: PrefixMap, sources: Sequence[EventSource]) -> None:
        self._map = instance(prefix_map, PrefixMap, "prefix_map", error=ConfigError)
        count(sources, "sources", error=ConfigError)
        self._sources = [instance(source, EventSource, "sources", error=ConfigError) for source in sources]
        if len({source.holder for source in self._sources}) < len(self._sources):
            raise ConfigError("sources: two have the same holder; each rank of an engine needs a name of its own")
        self._followers: list[_Follower] = []
        self._task_group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []
        self._in_forked_child = False
        """True in a forked child process, which must not touch the parent's tasks."""

    async def __aenter__(self) -> Self:
        if self._tasks or self._followers:
            raise UsageError("a Subscriber can be entered only once")
        try:
            self._followers.extend(_Follower(source, self._map) for source in self._sources)
        except ConfigError:
            self._close()
            raise
        forks.register(self)
        await self._task_group.__aenter__()
        for follower in self._followers:
            name = f"kvflow-kv-events {follower.source.holder}"
            self._tasks.append(self._task_group.create_task(follower.follow(), name=name))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._in_forked_child:
            return
        for task in self._tasks:
            task.cancel()
        cancelled = kind is not None and issubclass(
            kind, asyncio.CancelledError
        )  # because a task has failed, or from outside
        try:
            await self._task_group.__aexit__(*((kind, error, trace) if cancelled else (None, None, None)))
        finally:
            self._close()

    def forked(self) -> None:
        """In a forked child process: stop receiving events. `kvflow.forks` calls this in the child."""
        self._in_forked_child = True
        for follower in self._followers:
            follower.ignore_events()

    def _close(self) -> None:
        for follower in self._followers:
            follower.close()

    def statistics(self) -> dict[str, SourceStatistics]:
        """Return the state and the counts of each publisher so far.

        Returns:
            One `SourceStatistics` for each publisher, by `EventSource.holder`.
        """
        return {follower.source.holder: replace(follower.statistics) for follower in self._followers}
