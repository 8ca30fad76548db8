"""Metrics as a scrape shows them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tests_support import in_virtual_time

from kvflow.core.plan.topology import Rank
from kvflow.errors import NotStored
from kvflow.observe.instruments import COUNTERS, GAUGES, HISTOGRAMS, RECORD_COUNTERS
from kvflow.observe.prometheus import PrometheusMetrics
from kvflow.runtime.records import LeaseRecord
from tests.observe.observed import grown, observed
from tests.support.storing import storing

ROOT = Path(__file__).parents[2]


class Scraped:
    """Metrics, and the text of a scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = PrometheusMetrics(self.registry)

    def samples(self) -> dict[tuple[str, ...], float]:
        """Every sample by its name and label values, engine first."""
        left_out = {"dp", "pp", "tp", "le"}
        return {
            (sample.name, *(sample.labels[key] for key in sorted(sample.labels.keys() - left_out))): sample.value
            for sample in self.all_samples()
        }

    def all_samples(self) -> list[Sample]:
        families = text_string_to_metric_families(generate_latest(self.registry).decode())
        return [sample for family in families for sample in family.samples]


@pytest.fixture
def scraped() -> Scraped:
    return Scraped()


def test_names_of_metrics_are_words_in_small_letters() -> None:
    names = [name for name, *_ in (*GAUGES, *COUNTERS, *RECORD_COUNTERS, *HISTOGRAMS)]
    assert [name for name in names if not re.fullmatch("kvflow(_[a-z]+)+", name)] == []
    assert len(set(names)) == len(names) > 30


async def test_what_has_happened_is_counted_and_what_is_open_is_shown(scraped: Scraped) -> None:
    async with observed([scraped.metrics]) as pair:
        for engine in (pair.producer, pair.consumer):
            scraped.metrics.watch(engine.runtime)
        layout = pair.consumer.layout
        pair.offer([1, 2, 3], "open").revoke()  # its blocks are held for a moment
        seen, whose = scraped.samples(), [sample.labels for sample in scraped.all_samples()]
    assert all({"engine", "dp", "pp", "tp"} <= set(labels) and "rank" not in labels for labels in whose)
    assert {labels["tp"] for labels in whose} == {"0"}
    expected = {
        ("kvflow_loads_total", "consumer", "loaded"): 1,
        ("kvflow_loads_total", "consumer", "LeaseExpired"): 1,
        ("kvflow_loads_vouched_total", "consumer", "seal", "loaded"): 1,
        ("kvflow_loads_vouched_total", "consumer", "seal", "LeaseExpired"): 1,
        ("kvflow_load_seconds_count", "consumer"): 1,
        ("kvflow_load_bytes_sum", "consumer"): 2 * layout.block_size_bytes,
        ("kvflow_load_phase_seconds_count", "consumer", "wire"): 1,
        ("kvflow_leases_total", "producer", "read"): 1,
        ("kvflow_leases_total", "producer", "revoked"): 1,
        ("kvflow_blocks", "producer", "leased"): 3,
        ("kvflow_blocks", "producer", "free"): layout.num_blocks - 3,
        ("kvflow_open_leases", "producer"): 1,
        ("kvflow_open_loads", "consumer"): 0,
        ("kvflow_peers", "consumer", "ready"): 1,
        ("kvflow_side_channel_messages_total", "producer", "answered"): 1,
        ("kvflow_notifications_ignored_total", "producer", "late"): 0,
    }
    assert {name: seen[name] for name in expected} == expected


async def test_what_is_stored_is_shown(scraped: Scraped, tmp_path: Path) -> None:
    async with storing(tmp_path) as engine:
        scraped.metrics.watch(engine.runtime)
        await engine.save("a")
        await engine.restore("a")
        with pytest.raises(NotStored):
            await engine.restore("b")
        seen, entry_bytes = scraped.samples(), engine.files[0].stat().st_size
    name = engine.runtime.config.engine_id
    requests = {"saved": 1, "restored": 1, "missed": 1, "damaged": 0, "failed": 0}
    expected = {
        ("kvflow_store_entries", name): 1,
        ("kvflow_store_bytes", name, "used"): entry_bytes,
        ("kvflow_store_bytes", name, "max"): 16 << 30,
        **{("kvflow_store_requests_total", name, outcome): count for outcome, count in requests.items()},
        ("kvflow_store_evictions_total", name): 0,
    }
    assert {key: value for key, value in seen.items() if "store" in key[0]} == expected


@in_virtual_time
async def test_how_long_leases_and_their_loads_grew_is_shown() -> None:
    scraped = Scraped()
    await grown([scraped.metrics])
    seen = scraped.samples()
    assert seen["kvflow_lease_grow_seconds_sum", "producer"] == pytest.approx(4.0, abs=0.05)
    assert 0 <= seen["kvflow_load_grow_seconds_sum", "consumer"] <= 3.05
    assert seen["kvflow_load_grow_seconds_count", "consumer"] == 1


def test_a_rank_is_three_numbers_that_can_be_summed_over(scraped: Scraped) -> None:
    counts: dict[str, Any] = {"blocks": 1, "blocks_by_group": {"kv": 1}, "tokens": 4, "readers": 1, "seconds": {}}
    for tp in (6, 7):
        whose: dict[str, Any] = {"engine_id": "prefill", "rank": Rank(3, 1, tp), "request_id": "r", "traceparent": ""}
        scraped.metrics.lease_ended(LeaseRecord(outcome="read", **whose, **counts))
    text = generate_latest(scraped.registry).decode()
    for tp in (6, 7):
        assert f'kvflow_leases_total{{dp="3",engine="prefill",outcome="read",pp="1",tp="{tp}"}} 1.0' in text


async def test_a_scrape_from_another_thread_takes_a_snapshot_on_the_loop(scraped: Scraped) -> None:
    async with observed([scraped.metrics]) as pair:
        scraped.metrics.watch(pair.consumer.runtime)
        lease = pair.offer([1], "more")
        await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0]))
        await lease
        seen = await asyncio.to_thread(scraped.samples)
        assert seen["kvflow_read_bytes_total", "consumer"] == pair.consumer.transport.statistics.bytes_read > 0


def test_a_scrape_after_the_loop_has_ended_shows_the_last_snapshot(scraped: Scraped) -> None:

    async def run() -> None:
        async with observed([scraped.metrics]) as pair:
            scraped.metrics.watch(pair.consumer.runtime)

    asyncio.run(run())
    assert scraped.samples()["kvflow_reads_total", "consumer"] > 0


async def shown_by(scraped: Scraped) -> dict[str, set[str]]:
    """Every metric that runtimes show, with its labels."""
    async with observed([scraped.metrics]) as pair:
        for engine in (pair.producer, pair.consumer):
            scraped.metrics.watch(engine.runtime)
        text = generate_latest(scraped.registry).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for name in {f"{family.name}_total", *(sample.name for sample in family.samples)}:
            found.setdefault(name, set()).update(*(sample.labels for sample in family.samples))
    return found


async def test_the_dashboard_asks_for_metrics_that_exist(scraped: Scraped) -> None:
    names = await shown_by(scraped)
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text("utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"kvflow_\w+", query)}
    assert len(asked) >= 10
    assert asked <= names.keys()
    chosen = {variable["name"] for variable in dashboard["templating"]["list"]} - {"datasource"}
    assert chosen == {"engine", *Rank._fields}
    for query in queries:
        for matchers in re.findall(r"\{([^}]*)\}", query):
            assert matchers == ",".join(f'{name}=~"${name}"' for name in ("engine", *Rank._fields))


async def test_alert_rules_ask_for_metrics_and_labels_that_exist(scraped: Scraped) -> None:
    """As Prometheus would read them. Each rule has a summary and an action."""
    names = await shown_by(scraped)
    names["kvflow_loads_verified_total"] = names["kvflow_loads_total"] | {"result"}  # nothing was verified here
    groups = yaml.safe_load((ROOT / "docs" / "alerts.yml").read_text("utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    for rule in rules:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["expr"].count("(") == rule["expr"].count(")")
        asked = re.findall(r"(kvflow_\w+)(?:\{([^}]*)\})?", rule["expr"])
        assert asked, rule["alert"]
        for name, matchers in asked:
            assert name in names, f"{rule['alert']}: {name}"
            assert set(re.findall(r"(\w+)[=!]", matchers)) <= names[name], f"{rule['alert']}: {matchers}"
            grouped = {label for by in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in by.split(", ")}
            assert grouped <= {*names[name], "le"}, f"{rule['alert']}: {grouped}"
        shown = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
        assert set(shown) <= set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))))
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 10
    assert [group["name"] for group in groups] == ["kvflow", "kvflow-fleet"]


IN_FILES = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from tests.observe.test_prometheus import *
from kvflow import Config, Runtime, ServeRequest
from kvflow.testing import InprocCluster, run_virtual
from kvflow.observe.prometheus import WRITE_EVERY_S
from tests_support import small_cache

def scrape():
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(one.name, *sorted(one.labels.values())[3:]): one.value for family in families for one in family.samples}

async def main():
    metrics = PrometheusMetrics(CollectorRegistry())
    config = Config(engine_id="engine", listen="tcp://127.0.0.1:0", transport="inproc")
    async with Runtime(config, observers=[metrics], world=InprocCluster().world()) as runtime:
        await runtime.register_kv_caches(*small_cache())
        metrics.watch(runtime)
        first = scrape()
        lease = runtime.serve_blocks(ServeRequest("req", [1, 2], num_tokens=8))
        await asyncio.sleep(WRITE_EVERY_S + 1)
        second = scrape()
        lease.revoke()
        await lease
    await asyncio.sleep(WRITE_EVERY_S + 1)
    for found in (first, second, scrape()):
        print(json.dumps([[*key, value] for key, value in found.items() if "bucket" not in key[0]]))

run_virtual(main())
"""


def test_nothing_vanishes_in_multiprocess_mode(tmp_path: Path) -> None:
    """Which several API servers in one container use: a scrape reads the files of all processes."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", IN_FILES], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second, third = (
        {tuple(key): value for *key, value in json.loads(line)} for line in done.stdout.splitlines()
    )
    assert (first["kvflow_blocks", "engine", "free"], first["kvflow_open_leases", "engine"]) == (8, 0)
    assert (second["kvflow_blocks", "engine", "free"], second["kvflow_open_leases", "engine"]) == (6, 1)
    assert (third["kvflow_open_leases", "engine"], third["kvflow_leases_total", "engine", "revoked"]) == (0, 1)
    names = {key[0].removesuffix("_total") for key in first}
    always = {
        name for name, _, _, values_of in (*GAUGES, *COUNTERS) if not name.startswith(("kvflow_store", "kvflow_prefix"))
    }
    assert always - names <= {"kvflow_peers"}, "there are none"
