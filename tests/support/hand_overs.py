"""One prompt handed over from one engine to another, rank by rank, and everything that must hold afterwards.

A `HandOver` is pure data: both engines, the prompt, the ticket and the paths that bytes may take. `run` opens a runtime
for each rank, serves, loads, and judges by the reference model: every byte of every consumer, the producers' memory,
reports, leases and books.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import json
import os
import socket
from collections.abc import Iterable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from typing import Any

from kvflow import Config, Lease, LeaseOutcome, LoadReport, LoadRequest, Runtime, ServeRequest, merge_tickets
from kvflow.errors import ConfigError
from kvflow.runtime.world import World
from kvflow.testing import assert_closed, assert_quiet
from tests.support.reference_model import CONSUMER_FILL, PRODUCER_FILL, Engine, Place, RankCache
from tests.support.tests_support import PATIENT, WAIT_S, limited

_FIRST_PORT, _LAST_PORT = 12000, 32000  # below the ports that systems give to outgoing connections
_port_bases = itertools.count(os.getpid() * 101)


class Arrival(enum.Enum):
    """When the consumer's ranks load: all at once, or each when the one before it is done."""

    TOGETHER = "together"
    IN_TURN = "in turn"
    REVERSED = "reversed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """How bytes may travel: which drawn options a hand-over's Config gets."""

    staged: tuple[bool, bool] = (False, False)
    """Host staging on the producer and on the consumer."""
    scratch: str = "never"
    scratch_slot_bytes_max: int = 1 << 16
    slice_bytes_max: int = 1 << 24
    slice_descriptors_max: int = 8192

    @property
    def exact(self) -> bool:
        """Whether no byte is read that is not wanted."""
        return self.scratch == "never"


STRAIGHT = Paths()


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """A prompt of `num_tokens`: `offered` blocks of the producer go to `wanted` blocks of the consumer."""

    producer: Engine
    consumer: Engine
    num_tokens: int
    offered: tuple[int, ...]
    wanted: tuple[int, ...]
    """The last of the prompt's blocks; those before them are cached."""
    named: tuple[int, ...] = ()
    """The producer's ranks whose tickets are merged, in this order; none means all."""
    fixed_ports: bool = False
    arrival: Arrival = Arrival.TOGETHER
    paths: Paths = STRAIGHT

    @property
    def verified(self) -> bool:
        """Whether its loads are to be verified: every other one."""
        return self.num_tokens % 2 == 1

    @property
    def tokens(self) -> range:
        """What has to be read."""
        stop = min(self.num_tokens, len(self.offered) * self.producer.block_size)
        blocks = -(-stop // self.consumer.block_size)
        return range((blocks - len(self.wanted)) * self.consumer.block_size, stop) if self.wanted else range(0)


@dataclass(frozen=True, slots=True)
class _Rank:
    place: Place
    cache: RankCache
    runtime: Runtime

    def __str__(self) -> str:
        """As reports name it."""
        config = self.runtime.config
        return f"{config.engine_id} (dp {config.dp_rank} pp {self.place.pp} tp {self.place.tp}) at "


async def run(case: HandOver, world: World | None = None) -> None:
    """Do it in this world (None takes the real one, with NIXL); AssertionError says what is not as it should be."""
    async with AsyncExitStack() as stack:
        replicas = await open_producer(stack, case, world)
        producers = replicas[case.producer.dp_rank]
        for rank in producers:
            rank.cache.pattern.fill(case.offered)
        before = [rank.cache.snapshot() for rank in itertools.chain(*replicas)]
        consumers = await open_consumer(stack, case, world)
        leases = serve(case, producers)
        reports = await _load(case, consumers, ticket_of(case, leases))
        await _all_read(leases)
        _check_books(case, producers, consumers, reports)
        names = [f"{rank}{rank.runtime.address}" for rank in producers]
    for rank in itertools.chain(*replicas, consumers):
        assert_closed(rank.runtime.statistics())
    _check_bytes(case, producers, consumers)
    for rank, snapshot in zip(itertools.chain(*replicas), before, strict=True):
        assert rank.cache.snapshot() == snapshot, f"producer {rank.place}: its cache was written to"
    for rank, report in zip(consumers, reports, strict=True):
        _check_report(case, rank, report, names)


def serve(case: HandOver, producers: Iterable[_Rank]) -> list[Lease]:
    """The offer of every rank."""
    request = ServeRequest("request", block_ids=case.offered, num_tokens=case.num_tokens)
    return [rank.runtime.serve_blocks(request) for rank in producers]


def ticket_of(case: HandOver, leases: list[Lease]) -> dict[str, Any]:
    """The ticket as a router hands it over."""
    tickets = [leases[index].ticket for index in case.named or range(len(leases))]
    ticket: dict[str, Any] = json.loads(json.dumps(merge_tickets(tickets).to_params()))
    return ticket


async def open_producer(stack: AsyncExitStack, case: HandOver, world: World | None) -> list[list[_Rank]]:
    """All replicas up to the one that has the request; the others hold nothing but the sentinel."""
    engine = case.producer
    count = (engine.dp_rank + 1) * len(engine.places)
    while True:
        base = free_ports(count) if case.fixed_ports else 0
        async with AsyncExitStack() as attempt:
            try:
                replicas = [
                    await _open_engine(attempt, case, 0, dp_rank, base, world) for dp_rank in range(engine.dp_rank + 1)
                ]
            except ConfigError as error:
                if "cannot bind" in str(error):
                    continue  # somebody else on this machine was faster
                raise
            await stack.enter_async_context(attempt.pop_all())
            return replicas


async def open_consumer(stack: AsyncExitStack, case: HandOver, world: World | None) -> list[_Rank]:
    return await _open_engine(stack, case, 1, case.consumer.dp_rank, 0, world)


async def _open_engine(
    stack: AsyncExitStack, case: HandOver, side: int, dp_rank: int, port: int, world: World | None
) -> list[_Rank]:
    """A registered runtime for each rank of one replica."""
    engine, fill = (case.consumer, CONSUMER_FILL) if side else (case.producer, PRODUCER_FILL)
    ranks = []
    for place in engine.places:
        config = replace(
            rank_config(engine, place, side, case.paths, world),
            listen=f"tcp://127.0.0.1:{port}",
            dp_rank=dp_rank,
            num_kv_heads=engine.model.kv_heads if engine.tells_heads else None,
        )
        cache = RankCache(engine, place, fill)
        runtime = await stack.enter_async_context(Runtime(config, world=world or World()))
        await runtime.register_kv_caches(cache.tensors, cache.layout)
        ranks.append(_Rank(place, cache, runtime))
    return ranks


def rank_config(engine: Engine, place: Place, side: int, paths: Paths, world: World | None) -> Config:
    """A rank of the producer (side 0) or of the consumer, whose bytes take these paths."""
    config = replace(
        PATIENT,
        engine_id="decode" if side else "prefill",
        listen="tcp://127.0.0.1:0",
        tp_rank=place.tp,
        tp_size=engine.tp_size,
        pp_rank=place.pp,
        pp_size=len(engine.stages),
        drain_timeout_s=0.03,  # these two only count when something has failed
        cancel_grace_s=1.0,
        staging="always" if paths.staged[side] else "auto",
        scratch=paths.scratch,
    )
    return limited(
        config,
        seal_hold_s=0.05 if world is None else 0.004,
        leases_max=4,
        loads_max=64,
        scratch_slot_bytes_max=paths.scratch_slot_bytes_max,
        slice_bytes_max=paths.slice_bytes_max,
        slice_descriptors_max=paths.slice_descriptors_max,
    )


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on. Each call looks further up."""
    for _ in range(200):
        base = _FIRST_PORT + next(_port_bases) * 31 % (_LAST_PORT - _FIRST_PORT)
        with ExitStack() as stack:
            try:
                for port in range(base, base + count):
                    probe = stack.enter_context(socket.socket())
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return base
    raise OSError(f"no {count} free ports in a row")


async def _load(case: HandOver, consumers: list[_Rank], ticket: dict[str, Any]) -> list[LoadReport]:
    """Every rank's report, in the order of the ranks."""
    request = LoadRequest("request", ticket=ticket, block_ids=case.wanted, verify=case.verified or None)
    if case.arrival is Arrival.TOGETHER:
        loads = (rank.runtime.load_blocks(request) for rank in consumers)
        ends = await asyncio.gather(*loads, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return ends
    step = -1 if case.arrival is Arrival.REVERSED else 1
    reports = [await rank.runtime.load_blocks(request) for rank in consumers[::step]]
    return reports[::step]


async def _all_read(leases: list[Lease]) -> None:
    """Every lease ends, also those of ranks that nobody read from, and because all readers said so."""
    try:
        async with asyncio.timeout(WAIT_S):
            outcomes = await asyncio.gather(*leases)
    except TimeoutError:
        raise AssertionError(f"still open after {WAIT_S} s: {[x for x in leases if not x.done]}") from None
    assert set(outcomes) == {LeaseOutcome.READ}, outcomes


def _check_bytes(case: HandOver, producers: Iterable[_Rank], consumers: Iterable[_Rank]) -> None:
    """Every token that must be there is, and no other byte has changed."""
    for rank in consumers:
        source = [other.cache for other in producers]
        difference = rank.cache.difference(source, case.offered, case.wanted, case.tokens.stop)
        assert not difference, f"consumer {difference}"


def _check_books(
    case: HandOver, producers: Iterable[_Rank], consumers: Iterable[_Rank], reports: Iterable[LoadReport]
) -> None:
    """Everything is quiet, each lease ended by what its readers said and nobody said anything twice."""
    for rank in producers:
        serving = rank.runtime.statistics().serving
        assert serving is not None
        told = (serving.read, serving.late_notifications)
        assert (*told, serving.duplicate_notifications, serving.malformed_notifications) == (1, 0, 0, 0), serving
    for rank, report in zip(consumers, reports, strict=True):
        loading = rank.runtime.statistics().loading
        assert loading is not None
        assert (loading.succeeded, loading.bytes) == (1, report.bytes), loading
    for rank in itertools.chain(producers, consumers):
        assert_quiet(rank.runtime.statistics())


def _check_report(case: HandOver, rank: _Rank, report: LoadReport, names: list[str]) -> None:
    wanted_bytes = len(case.tokens) * case.consumer.token_bytes(rank.place)
    told = (report.tokens, report.blocks, report.notified, bool(report.sources))
    assert told == (len(case.tokens), len(case.wanted), bool(case.offered), bool(case.wanted)), report
    assert report.bytes == wanted_bytes or (report.bytes > wanted_bytes and not case.paths.exact), report
    assert min(report.seconds.values()) >= 0.0, report
    assert report.verified == (case.verified and bool(case.wanted)), report
    holders = [
        name
        for name, place in zip(names, case.producer.places, strict=True)
        if set(case.producer.layers(place)) & set(case.consumer.layers(rank.place))
        and set(case.producer.heads(place)) & set(case.consumer.heads(rank.place))
    ]
    assert len(set(report.sources)) == len(report.sources), report
    assert set(report.sources) <= set(holders), f"{report.sources} are not among {holders}"
    assert report.descriptors >= len(report.sources), report
