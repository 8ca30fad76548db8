"""An in-process pair for tests, with short methods for frequent steps, and checks of its accounting at the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from tests_support import PATIENT, leases_ended, until

from kvflow import Config, Lease, LoadReport, LoadRequest, Ticket
from kvflow.core.policy.ledger import BlockCounts
from kvflow.runtime.channel.protocol import ListenerStatistics
from kvflow.runtime.clock import Clock
from kvflow.runtime.incarnation import Incarnation
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.requests import LoadingStatistics
from kvflow.runtime.part import Part
from kvflow.runtime.producer.lease import ServingStatistics
from kvflow.runtime.runtime import Runtime
from kvflow.runtime.world import World
from kvflow.testing import InprocCluster, InprocTransport, LoopClock, Pair, assert_quiet, inproc_pair

Offered = Lease | Ticket | Mapping[str, Any]
Statistics = TypeVar("Statistics")
Failure = TypeVar("Failure", bound=Exception)
PartT = TypeVar("PartT", bound=Part)


def part_of(runtime: Runtime, kind: type[PartT]) -> PartT:
    """Return the runtime's part of type `kind`."""
    (found,) = (part for part in runtime._supervisor.parts if isinstance(part, kind))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePair(Pair[InprocTransport]):
    """A producer, and a consumer that loads from it."""

    @property
    def reader(self) -> Runtime:
        return self.consumer.runtime

    @property
    def writer(self) -> Runtime:
        return self.producer.runtime

    @property
    def transport(self) -> InprocTransport:
        """The consumer's transport, which posts the reads."""
        return self.consumer.transport

    @property
    def serving(self) -> ServingStatistics:
        return known(self.writer.statistics().serving)

    @property
    def loading(self) -> LoadingStatistics:
        return known(self.reader.statistics().loading)

    @property
    def listener(self) -> ListenerStatistics:
        """Statistics of the producer's listener."""
        return known(self.writer.statistics().listener)

    @property
    def producer_blocks(self) -> BlockCounts:
        """Counts of the producer's blocks."""
        return known(self.writer.statistics().blocks)

    @property
    def consumer_blocks(self) -> BlockCounts:
        """Counts of the consumer's blocks."""
        return known(self.reader.statistics().blocks)

    async def load(self, offered: Offered, block_ids: Sequence[int] = (0,), **options: Any) -> LoadReport:
        """Run a load by a lease, or by a ticket that the test has changed. Return its report."""
        return await self.reader.load_blocks(load_request(offered, block_ids, **options))

    async def fails(
        self,
        error: type[Failure],
        offered: Offered,
        block_ids: Sequence[int] = (0,),
        match: str | None = None,
        **options: Any,
    ) -> Failure:
        """Run a load that must fail with `error`, and return the error."""
        with pytest.raises(error, match=match) as caught:
            await self.load(offered, block_ids, **options)
        return caught.value

    def start(self, offered: Offered, block_ids: Sequence[int] = (0,), **options: Any) -> asyncio.Task[LoadReport]:
        """Start a load in a task, and return the task."""
        return asyncio.create_task(self.load(offered, block_ids, **options))

    async def hold(self, offered: Offered, block_ids: Sequence[int] = (0,), **options: Any) -> asyncio.Task[LoadReport]:
        """Start a load, and return its task once the transport holds a read of it. Hold all later reads, too."""
        self.transport.faults.hold = True
        before = len(self.transport.held)
        task = self.start(offered, block_ids, **options)
        await until(lambda: len(self.transport.held) > before)
        return task

    async def let_go(self, task: asyncio.Task[LoadReport]) -> LoadReport:
        """Perform held reads until the load of `task` has ended. Stop holding reads, and return the load's report."""
        while not task.done():
            self.transport.perform()
            await asyncio.sleep(0)
        self.transport.faults.hold = False
        return await task

    def release_reads(self) -> None:
        """Perform the held reads, and stop holding reads."""
        self.transport.faults.hold = False
        self.transport.perform()

    async def quarantined(self, task: asyncio.Task[LoadReport]) -> Load:
        """Cancel a load with held reads, and return its quarantine: its bytes do not stop in time."""
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        (quarantine,) = self.reader.quarantines
        return quarantine

    def revoke_all(self) -> None:
        """Revoke every lease of the producer."""
        host_of(self.writer).serving.close()

    def overwrite(self) -> None:
        """Overwrite all blocks of the producer, as for another request."""
        for tensor in self.producer.kv_caches.values():
            tensor.fill_(12345.0)

    async def assert_all_ended(self) -> None:
        """Revoke the open leases of both engines, and assert that all blocks are free again (invariant I5)."""
        for engine in (self.producer, self.consumer):
            incarnation = engine.runtime._supervisor.incarnation
            if incarnation is not None:
                incarnation.serving.close()
            await leases_ended(engine.runtime)
            assert_quiet(engine.runtime.statistics())


def load_request(offered: Offered, block_ids: Sequence[int] = (0,), **options: Any) -> LoadRequest:
    """Return the request that loads into `block_ids` by a lease or a ticket."""
    if isinstance(offered, Lease):
        return LoadRequest(offered.request_id, offered.ticket.to_params(), block_ids, **options)
    return LoadRequest("req", offered, block_ids, **options)


def known(statistics: Statistics | None) -> Statistics:
    """Return `statistics` of a runtime with a registered cache, which are not None."""
    assert statistics is not None
    return statistics


def incarnation_of(runtime: Runtime) -> Incarnation:
    """Return the registered cache of a runtime."""
    return known(runtime._supervisor.incarnation)


def host_of(runtime: Runtime) -> Any:
    """Return the objects of a runtime's registered cache."""
    return incarnation_of(runtime).host


@contextlib.asynccontextmanager
async def open_pair(
    config: Config = PATIENT,
    *,
    producer: World = World(),  # noqa: B008 - frozen
    consumer: World = World(),  # noqa: B008 - frozen
    **size: int,
) -> AsyncIterator[EnginePair]:
    """Open a registered pair. At the end of the block check that all blocks are free again."""
    async with inproc_pair(config=config, producer_world=producer, consumer_world=consumer, **size) as made:
        pair = EnginePair(producer=made.producer, consumer=made.consumer)
        yield pair
        await pair.assert_all_ended()


@contextlib.asynccontextmanager
async def virtual_pair(
    config: Config = PATIENT, *, consumer_clock: Callable[[], Clock] = LoopClock
) -> AsyncIterator[EnginePair]:
    """Open a pair for virtual time, with an in-process side channel."""
    cluster = InprocCluster()
    async with open_pair(config, producer=cluster.world(), consumer=cluster.world(clock=consumer_clock)) as pair:
        yield pair


def engine_world(pair: Pair[InprocTransport], **others: Any) -> World:
    """Return the world of another engine on the network of a pair."""
    network = pair.consumer.transport._network
    return replace(World(**others), transport=lambda _, name: InprocTransport(name, network))
