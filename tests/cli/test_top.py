"""`kvflow top`: what it makes of scrapes, and of a real runtime's endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from rich.console import Console
from typer.testing import CliRunner

from kvflow.cli.app import app
from kvflow.cli.scrape import RankName, Scrape, check_urls, parse, scrape
from kvflow.cli.top import render, rows_of
from kvflow.errors import ConfigError
from kvflow.observe.prometheus import PrometheusMetrics
from tests.observe.observed import observed

A, B, OTHER = RankName("e", "0", "0", "0"), RankName("e", "0", "0", "1"), RankName("f", "0", "0", "0")


@contextlib.contextmanager
def endpoint() -> Iterator[tuple[PrometheusMetrics, str]]:
    """Metrics, and where they are scraped."""
    registry = CollectorRegistry()
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield PrometheusMetrics(registry), f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def shown(before: Scrape, now: Scrape, *, engines: bool | None = None) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render(before, now, engines=engines))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


async def test_a_runtime_is_shown_as_its_endpoint_tells() -> None:
    with endpoint() as (metrics, url):
        urls = check_urls([url])
        before = await asyncio.to_thread(scrape, urls)
        assert list(before.problems.values()) == ["no metrics of kvflow"]
        async with observed([metrics]) as pair:
            for engine in (pair.producer, pair.consumer):
                metrics.watch(engine.runtime)
            before = await asyncio.to_thread(scrape, urls)
            lease = pair.offer([1, 2, 3], "more")
            open_lease = pair.offer([4], "open")
            await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0, 1, 2]))
            await lease
            now = await asyncio.to_thread(scrape, urls)
            open_lease.revoke()
    consumer, producer = rows_of(before, now, engines=False)
    assert (consumer.name, producer.name) == ("consumer 0.0.0", "producer 0.0.0")
    assert (consumer.ready, consumer.peers, consumer.loads, consumer.errors) == (1, 1, 0, {})
    elapsed_s = now.at_s - before.at_s
    assert consumer.loads_per_s * elapsed_s == pytest.approx(1)
    assert consumer.bytes_per_s * elapsed_s >= 3 * pair.consumer.layout.block_size_bytes
    assert consumer.phases_s["wire"] > 0
    assert (producer.leases, producer.leased, producer.leases_per_s * elapsed_s) == (1, 1, pytest.approx(1))
    text = shown(before, now)
    assert "consumer 0.0.0" in text
    assert "1 of 1" in text


def test_ranks_of_an_engine_are_added_up_and_failures_named() -> None:
    loads, failed = ("kvflow_loads_total", "loaded"), ("kvflow_loads_total", "PeerUnreachable")
    before = Scrape(10.0, {A: {loads: 5, failed: 1}, B: {loads: 100}})
    now = Scrape(
        12.0,
        {
            A: {loads: 9, failed: 4, ("kvflow_blocks", "free"): 7},
            B: {loads: 1, ("kvflow_blocks", "free"): 8, ("kvflow_blocks", "quarantined"): 2},
            OTHER: {loads: 1000},
        },
        {"http://gone": "refused"},
    )
    first, other = rows_of(before, now, engines=True)
    assert (first.name, first.ranks, first.free, first.quarantined) == ("e", 2, 15, 2)
    assert (first.loads_per_s, first.failed_per_s, first.errors) == (3.5, 1.5, {"PeerUnreachable": 3})
    assert (other.name, other.loads_per_s) == ("f", 0.0), "nothing is known of before"
    text = shown(before, now)
    assert "e 0.0.1" in text
    assert "e 0.0.0: 3 loads ended as PeerUnreachable" in text
    assert "http://gone: refused" in text
    assert "no ranks" in shown(before, Scrape(12.0, {}))


def test_only_samples_of_kvflow_count() -> None:
    text = """# TYPE kvflow_peers gauge
kvflow_peers{engine="e",dp="0",pp="0",tp="0",state="ready"} 3
kvflow_peers{engine="e",dp="0",pp="0",tp="0",state="broken"} NaN
# TYPE other gauge
other{engine="e"} 3
# TYPE kvflow_load_seconds histogram
kvflow_load_seconds_bucket{engine="e",dp="0",pp="0",tp="0",le="+Inf"} 3
kvflow_load_seconds_sum{engine="e",dp="0",pp="0",tp="0"} 1.5
"""
    assert parse(text) == {A: {("kvflow_peers", "ready"): 3, ("kvflow_load_seconds_sum", ""): 1.5}}
    with pytest.raises(ValueError):
        parse("<html>")


@pytest.mark.parametrize(
    "url", ["tcp://127.0.0.1:5600", "127.0.0.1:9100", "http://", "file:///etc/passwd", "http://h:x"]
)
def test_what_is_no_url_of_metrics_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url: "):
        check_urls([url])
    assert CliRunner().invoke(app, ["top", url]).exit_code == 2


def test_once_it_prints_and_says_by_its_exit_code_whether_anybody_has_answered() -> None:
    done = CliRunner().invoke(app, ["top", "http://127.0.0.1:9", "--once", "--interval-s", "0.1"])
    assert done.exit_code == 1
    assert "http://127.0.0.1:9/metrics: " in done.output
    assert "no ranks" in done.output
