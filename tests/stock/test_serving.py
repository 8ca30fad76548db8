"""Being read by stock engines, over real NIXL: their answers, and the effect of their texts on our leases."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest
import torch
import zmq
import zmq.asyncio
from log_lines import FORGED, Written
from prometheus_client import CollectorRegistry
from stock_engines import HASH, MODEL_HEADS, NAMES, TOKENS, StockConsumer, fill, layout_of, stock_cache, value_of

from kvflow import Config, LoadRequest, Runtime, ServeRequest, merge_tickets
from kvflow.errors import ConfigError, PeerUnreachable, RequestError, UsageError
from kvflow.observe.prometheus import PrometheusMetrics
from kvflow.runtime.producer.lease import LeaseOutcome
from kvflow.stock import EngineRanks, StockPeers, ask_rank
from kvflow.stock.params import make_stock_params
from kvflow.stock.texts import read_text
from kvflow.stock.wire import encode_question
from kvflow.testing import assert_quiet
from tests.fuzz.mutants import torn
from tests.support.tests_support import each

CONFIG = Config(engine_id="ours", listen="tcp://127.0.0.1:0", model="/m", drain_timeout_s=1.0)
PEERS = StockPeers(hashes=(HASH,), serve_version="0.32.0", attn_backend_name="CPU_ATTN", region_names=NAMES)


class Producer:
    def __init__(self, runtime: Runtime, cache: dict[str, torch.Tensor]) -> None:
        self.runtime = runtime
        self.cache = cache

    def offer(self, request_id: str, block_ids: list[int], num_tokens: int, **more: Any) -> tuple[Any, dict[str, Any]]:
        lease = self.runtime.serve_blocks(ServeRequest(request_id, block_ids, num_tokens, **more))
        return lease, self.written(lease)

    def written(self, lease: Any, **more: Any) -> dict[str, Any]:
        return make_stock_params(lease.ticket, "0.32.0", **more)


@asynccontextmanager
async def producer(
    peers: StockPeers = PEERS, *, tp_rank: int = 0, tp_size: int = 1, **values: Any
) -> AsyncIterator[Producer]:
    config = replace(CONFIG, tp_rank=tp_rank, tp_size=tp_size, num_kv_heads=MODEL_HEADS, **values)
    async with Runtime(config, parts=[peers]) as runtime:
        cache = stock_cache(16, MODEL_HEADS // tp_size)
        fill(cache, tp_rank * MODEL_HEADS // tp_size)
        await runtime.register_kv_caches(cache, layout_of(cache))
        yield Producer(runtime, cache)
        assert_quiet(runtime.statistics())


class Engine:
    """Several ranks of ours, each with a runtime, and what an engine does for them."""

    def __init__(self, ranks: list[Producer], shown: list[EngineRanks]) -> None:
        self.ranks = ranks
        self.shown = shown

    def introduce(self) -> None:
        """Bring the ranks' cards to the first one, which tickets name first."""
        self.shown[0].show([one.card for one in self.shown])

    def offer(self, request_id: str, block_ids: list[int], num_tokens: int) -> tuple[list[Any], dict[str, Any]]:
        request = ServeRequest(request_id, block_ids, num_tokens)
        leases = [rank.runtime.serve_blocks(request) for rank in self.ranks]
        return leases, make_stock_params(merge_tickets([lease.ticket for lease in leases]), "0.32.0")


@asynccontextmanager
async def engine(tp_size: int, **values: Any) -> AsyncIterator[Engine]:
    shown = [EngineRanks() for _ in range(tp_size)]
    async with AsyncExitStack() as stack:
        ranks = [
            await stack.enter_async_context(
                producer(replace(PEERS, ranks=one), tp_rank=rank, tp_size=tp_size, **values)
            )
            for rank, one in enumerate(shown)
        ]
        yield Engine(ranks, shown)


@contextmanager
def consumers(tp_size: int) -> Iterator[list[StockConsumer]]:
    made = [StockConsumer(tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)]
    try:
        yield made
    finally:
        for one in made:
            one.close()


@pytest.fixture
def consumer() -> Iterator[StockConsumer]:
    made = StockConsumer()
    yield made
    made.close()


@pytest.fixture(name="ours")
async def one_rank() -> AsyncIterator[Producer]:
    async with producer() as made:
        yield made


async def test_a_stock_engine_reads_and_its_text_ends_the_lease(consumer: StockConsumer, ours: Producer) -> None:
    lease, params = ours.offer("cmpl-1-0-aabbccdd#secret", [3, 9, 4], 3 * TOKENS - 1)
    await consumer.handshake(params)
    await consumer.read(params, [5, 6])
    assert await lease is LeaseOutcome.READ
    service: Any = ours.runtime._supervisor.incarnation.reader_services[0]  # type: ignore[union-attr]
    assert not service._reports, "nobody is left to tell of it"
    for layer, tensor in enumerate(consumer.cache.values()):
        for mine, theirs in ((5, 9), (6, 4)):
            assert tensor[mine, 2, 1, 0].item() == pytest.approx(value_of(layer, theirs, 2) + 0.01)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(2, 1), (2, 2), (1, 2), *(pytest.param(*more, marks=pytest.mark.thorough) for more in ((4, 2), (2, 4)))],
)
async def test_one_listener_answers_for_all_ranks(ours: int, theirs: int) -> None:
    """Each rank's lease is open until all of its readers have notified the rank. Any reader's heartbeats renew it."""
    async with engine(ours) as ranks:
        ranks.introduce()
        leases, params = ranks.offer("cmpl-1#secret", [3, 9], 2 * TOKENS)
        assert params["tp_size"] == ours
        with consumers(theirs) as readers:
            for number, reader in enumerate(readers):
                assert not all(lease.done for lease in leases), number
                await reader.handshake(params)
                reader.notify(b"HB:" + params["remote_request_id"].encode())
                for rank in ranks.ranks if theirs == 1 else ():
                    await wait_for(lambda rank=rank: rank.runtime.statistics().serving.renewals == 1)  # type: ignore[misc]
                await reader.read(params, [5, 6])
                first = number * MODEL_HEADS // theirs
                for layer, tensor in enumerate(reader.cache.values()):
                    for block, remote in ((5, 3), (6, 9)):
                        for head in range(tensor.shape[1]):
                            expected = value_of(layer, remote, first + head) + 0.01
                            assert tensor[block, head, 1, 0].item() == pytest.approx(expected)
            for lease in leases:
                assert await lease is LeaseOutcome.READ


@pytest.mark.parametrize(("ours", "theirs", "reports"), [(1, 1, 1), (2, 2, 1), (1, 2, 2), (2, 4, 2), (4, 2, 1)])
async def test_readers_of_older_lines_report_their_tp_size(ours: int, theirs: int, reports: int) -> None:
    """A lease that waited for as many reports at each rank would keep its blocks until its lifetime ends."""
    older = replace(PEERS, serve_version="0.28.0", ranks=EngineRanks())
    async with producer(older, tp_size=ours) as made:
        lease = made.runtime.serve_blocks(ServeRequest("cmpl-1#secret", [3, 9], 2 * TOKENS))
        service: Any = made.runtime._supervisor.incarnation.reader_services[0]  # type: ignore[union-attr]
        for _ in range(reports):
            assert not lease.done
            assert service.apply_notification(read_text("cmpl-1#secret", theirs))
        await wait_for(lambda: lease.done)
        assert await lease is LeaseOutcome.READ


async def test_nobody_is_answered_before_all_ranks_are_known() -> None:
    """A reader would take an incomplete list for the whole engine, or wait for a rank that does not exist."""
    async with engine(2) as ranks:
        first = ranks.ranks[0].runtime
        with pytest.raises(PeerUnreachable):
            await ask_rank(first.address, timeout_s=0.3)
        ranks.introduce()
        for rank, one in enumerate(ranks.shown):
            shown = await ask_rank(first.address, tp_rank=rank, timeout_s=60)
            assert shown.metadata.agent_metadata in one.card
            assert (shown.compatibility_hash, shown.metadata.engine_id) == (HASH, "ours")
        with pytest.raises(PeerUnreachable):
            await ask_rank(first.address, tp_rank=2, timeout_s=0.3)
        await first.unregister()
        cache = stock_cache(16, MODEL_HEADS // 2)
        await first.register_kv_caches(cache, layout_of(cache))
        with pytest.raises(PeerUnreachable):
            await ask_rank(first.address, tp_rank=1, timeout_s=0.3)


async def test_cards_that_are_not_of_this_engine_are_refused() -> None:
    lonely = EngineRanks()
    with pytest.raises(UsageError, match="no cache is registered"):
        _ = lonely.card
    async with engine(2) as ranks, producer(replace(PEERS, ranks=lonely)):
        one, two = (shown.card for shown in ranks.shown)
        other = one.replace(b"ours", b"them")
        thin = two.replace(b"\xaanum_blocks\x10", b"\xaanum_blocks\x08")
        assert other != one
        assert thin != two
        for cards in ([one], [one, one], [one, two, two], [lonely.card, two], [other, two], [one, thin]):
            with pytest.raises(RequestError, match="stock ranks"):
                ranks.shown[0].show(cards)
        for wrong in (b"", b"\x80", b"x" * 100, "text", two[:-9]):
            with pytest.raises(RequestError, match="stock ranks"):
                ranks.shown[0].show([one, wrong])  # type: ignore[list-item]
        with pytest.raises(PeerUnreachable):
            await ask_rank(ranks.ranks[0].runtime.address, timeout_s=0.3)
        ranks.introduce()


async def test_of_two_readers_both_are_waited_for(consumer: StockConsumer, ours: Producer) -> None:
    lease, params = ours.offer("two", [3], TOKENS)
    await consumer.handshake(params)
    await consumer.read(params, [1], readers=2)
    consumer.notify(b"two:3")
    await wait_for(lambda: ours.runtime._supervisor.incarnation.reader_services[0].refused == 1)  # type: ignore[union-attr]
    assert not lease.done
    await consumer.read(params, [2], readers=2)
    assert await lease is LeaseOutcome.READ


async def test_a_read_after_its_lease_is_told(consumer: StockConsumer, caplog: pytest.LogCaptureFixture) -> None:
    """By a log line and a number; a late reader cannot notice it."""
    heard: list[str] = []
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    async with producer(replace(PEERS, on_late_read=heard.append)) as ours:
        metrics.watch(ours.runtime)
        lease, params = ours.offer("in-time#secret", [3], TOKENS)
        await consumer.handshake(params)
        await consumer.read(params, [1])
        assert await lease is LeaseOutcome.READ
        lease, params = ours.offer("late#secret", [3], TOKENS, ttl_s=0.01)
        assert await lease is LeaseOutcome.EXPIRED
        consumer.notify(b"HB:late#secret")
        await consumer.read(params, [1])
        await wait_for(lambda: ours.runtime.statistics().serving.late_reads == 1)
        assert heard == ["late#secret"]
        labels = {"engine": "ours", "dp": "0", "pp": "0", "tp": "0"}
        assert registry.get_sample_value("kvflow_late_reads_total", labels) == 1
        (line,) = (one for one in caplog.records if one.levelname == "WARNING")
        assert "late#secret" in line.getMessage()
        assert "after its lease" in line.getMessage()


async def test_very_many_late_reads_have_few_lines(
    consumer: StockConsumer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report goes on if an application's function fails at each late read."""

    def fail(request_id: str) -> None:
        raise ValueError(request_id)

    monkeypatch.setattr("kvflow.stock.service._WARN_AGAIN_S", 1e9)
    async with producer(replace(PEERS, on_late_read=fail)) as ours:
        lease, params = ours.offer("over#secret", [3], TOKENS)
        await consumer.handshake(params)
        for number in range(100):
            consumer.notify(b"unknown-%d:1" % number)
        await wait_for(lambda: ours.runtime.statistics().serving.late_reads == 100)
        levels = [one.levelname for one in caplog.records if one.levelno >= logging.WARNING]
        assert levels == ["WARNING", "ERROR"]
        await consumer.read(params, [1])
        assert await lease is LeaseOutcome.READ


async def test_a_late_word_about_one_lease_forgets_no_reader_of_another(
    consumer: StockConsumer, ours: Producer
) -> None:
    lease, params = ours.offer("over", [3], TOKENS)
    await consumer.handshake(params)
    await consumer.read(params, [1])
    assert await lease is LeaseOutcome.READ
    lease, params = ours.offer("two", [4], TOKENS)
    consumer.notify(b"two:2")
    consumer.notify(b"over:1")
    await wait_for(lambda: ours.runtime.statistics().serving.late_notifications == 1)
    consumer.notify(b"two:2")
    assert await lease is LeaseOutcome.READ


async def test_of_a_name_that_is_served_again_nothing_old_counts(consumer: StockConsumer, ours: Producer) -> None:
    for readers in (1, 2, 3):
        lease, params = ours.offer("again", [3], TOKENS)
        await consumer.handshake(params)
        for _ in range(readers):
            assert not lease.done
            consumer.notify(b"again:%d" % readers)
        assert await lease is LeaseOutcome.READ


async def test_heartbeats_renew(consumer: StockConsumer, ours: Producer) -> None:
    """By the id in the parameters, with the spare behind it, also in a message with other ids."""
    lease, params = ours.offer("cmpl-1#secret", [3], TOKENS, ttl_s=1.0)
    name = params["remote_request_id"].encode()
    await consumer.handshake(params)
    among = b",".join([name.replace(b"1#", b"%d#" % number) for number in range(4000)])
    for count, named in enumerate((b"unknown," + name, among, name), start=1):
        consumer.notify(b"HB:" + named)
        await wait_for(lambda count=count: ours.runtime.statistics().serving.renewals == count)  # type: ignore[misc]
    await consumer.read(params, [1])
    assert await lease is LeaseOutcome.READ


TEXTS = [
    b"",
    b"\xff\xfe",
    b"no colon",
    b"odd:x",
    b"odd:0",
    b"unknown:1",
    b"HB:",
    b"HB:\xff",
    b"PUSH_REG:\x80",
    b"x" * 60_000,
    FORGED.encode("utf-8") + b":1",
    b"a\n2026-01-01 ERROR kvflow.forged:1",
]


async def test_texts_that_say_nothing_change_nothing(consumer: StockConsumer, written: Written) -> None:
    async with producer() as ours:
        lease, params = ours.offer("odd", [3], TOKENS)
        await consumer.handshake(params)
        for text in TEXTS:
            consumer.notify(text)
        await consumer.read(params, [1])
        assert await lease is LeaseOutcome.READ
    written.assert_plain("dropped a stock reader's notification")


async def test_both_kinds_of_readers_read_one_offer(consumer: StockConsumer) -> None:
    """One dict for routers: any reader can use it."""
    async with producer() as ours, Runtime(replace(CONFIG, engine_id="second")) as second:
        cache = stock_cache(16)
        await second.register_kv_caches(cache, layout_of(cache))
        lease, params = ours.offer("ours", [3], TOKENS)
        report = await second.load_blocks(LoadRequest("r", ticket=params, block_ids=[0]))
        assert report.freshness == "seal"
        assert await lease is LeaseOutcome.READ
        lease, params = ours.offer("theirs", [3], TOKENS)
        await consumer.handshake(params)
        await consumer.read(params, [1])
        assert await lease is LeaseOutcome.READ


async def test_what_a_stock_reader_cannot_read_is_not_offered(ours: Producer) -> None:
    lease, params = ours.offer("whole", [3, 4], 2 * TOKENS)
    assert params["remote_block_ids"] == [[3, 4]], "nested, and all of it"
    assert params["remote_num_tokens"] == 2 * TOKENS
    ticket = lease.ticket
    for wrong in (
        {"block_ids": (3,)},
        {"block_ids": (3, 4, 5)},
        {"request_id": "a,b"},
        {"request_id": "HB:a"},
        {"more_block_ids": ((1,),)},
        {"pp_size": 2},
    ):
        with pytest.raises(RequestError):
            make_stock_params(msgspec.structs.replace(ticket, **wrong), "0.32.0")
    lease.revoke()
    await lease


@pytest.mark.parametrize(
    ("peers", "values"),
    [(PEERS, {"tp_size": 2, "num_kv_heads": 8}), (replace(PEERS, region_names=("one",)), {})],
)
async def test_a_rank_that_no_stock_reader_takes_is_refused_at_the_start(
    peers: StockPeers, values: dict[str, Any]
) -> None:
    async with Runtime(replace(CONFIG, **values), parts=[peers]) as runtime:
        cache = stock_cache(16)
        with pytest.raises(ConfigError, match="stock"):
            await runtime.register_kv_caches(cache, layout_of(cache))


@each(
    "values",
    [
        {"hashes": ()},
        {"hashes": ("AB",)},
        {"hashes": HASH},
        {"serve_version": "0.25.0"},
        {"serve_version": 3},
        {"terms": 30},
        {"tp_sizes": (0,)},
        {"ranks": "all"},
        {"region_names": (3,)},
        {"on_late_read": 3},
    ],
)
def test_settings_that_cannot_be_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="stock"):
        replace(PEERS, **values)


async def test_a_flood_of_hostile_messages_harms_nobody(consumer: StockConsumer) -> None:
    """Stock questions gone wrong, at the port that answers both kinds; honest readers of both are served meanwhile."""
    limits = replace(CONFIG.limits, side_channel_requests_per_s_max=1_000_000)
    async with producer(limits=limits) as ours, Runtime(replace(CONFIG, engine_id="second")) as second:
        cache = stock_cache(16)
        await second.register_kv_caches(cache, layout_of(cache))
        rng, question = Random(11), encode_question(0, 0)
        context = zmq.asyncio.Context.instance()
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(ours.runtime.address)
            for turn in range(20):
                for _ in range(100):
                    wrong = [b"", torn(rng, question)] if rng.random() < 0.8 else [b"", rng.randbytes(20), b"more"]
                    await socket.send_multipart(rng.choice((wrong, [b""], [b"", b""], [b"", encode_question(0, 5)])))
                lease, params = ours.offer(f"honest {turn}", [3], TOKENS)
                if turn % 2:
                    await consumer.handshake(params)
                    await consumer.read(params, [1])
                else:
                    await second.load_blocks(LoadRequest("r", ticket=params, block_ids=[0]))
                assert await lease is LeaseOutcome.READ
        assert ours.runtime.statistics().listener.dropped > 1000  # type: ignore[union-attr]


async def wait_for(done: Any) -> None:
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0)
