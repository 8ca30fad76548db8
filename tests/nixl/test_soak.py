"""Loads without end between two real processes, with random cancels, revokes and expiries: nothing grows."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from tests.support.engine import EngineSetup, small
from tests.support.engine_process import EngineProcess, Engines

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

BATCH_SIZE, BLOCKS_EACH = 100, 2
SAMPLE_EVERY, BATCHES = 3, 9
RSS_GROWTH_BYTES_MAX = 8 << 20
REUSED = -2.0
VALUES = 1000
SOON_S = 0.005
ORPHAN_TTL_S = 0.1
SETUP = {"pool": small(blocks=BATCH_SIZE * BLOCKS_EACH), "config": {"cancel_grace_s": 0.5}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The state of both engines after a number of loads, when nothing is under way, and how the loads have ended."""

    loads: int
    endings: Counter[str]
    producer: dict[str, int]
    consumer: dict[str, int]


def soak(engines: Engines) -> Iterator[Sample]:
    """Load batch after batch; a sample after each few."""
    random = Random(1)
    producer, consumer = engines.start(
        EngineSetup(engine_id="producer", **SETUP), EngineSetup(engine_id="consumer", **SETUP)
    )
    endings: Counter[str] = Counter()
    for batch in itertools.count():
        if batch and batch % SAMPLE_EVERY == 0:
            held = (producer.call("resources"), consumer.call("resources"))
            yield Sample(loads=batch * BATCH_SIZE, endings=endings.copy(), producer=held[0], consumer=held[1])
        endings += run_batch(producer, consumer, batch, random)


def run_batch(producer: EngineProcess, consumer: EngineProcess, batch: int, random: Random) -> Counter[str]:
    """One batch at once, each request with blocks of its own; how its loads ended. All blocks are free again then."""
    value = float(1 + batch % VALUES)
    every_block = list(range(BATCH_SIZE * BLOCKS_EACH))
    producer.call("fill", block_ids=every_block, value=value)
    offers, plans = [], []
    for first in every_block[::BLOCKS_EACH]:
        name, ids = f"{batch}-{first}", every_block[first : first + BLOCKS_EACH]
        offer, plan = draw(random)
        offers.append({"request_id": name, "block_ids": ids, **offer})
        plans.append({"request_id": name, "block_ids": ids, **plan})
    tickets = producer.call("offer_many", offers=offers, then=REUSED)
    loads = [{"ticket": ticket, **plan} for ticket, plan in zip(tickets, plans, strict=True)]
    found = consumer.call("load_many", loads=loads)
    consumer.call("safe")
    producer.wait_until(lambda statistics: statistics["serving"]["open_leases"] == 0)
    for engine in (producer, consumer):
        blocks = engine.call("statistics")["blocks"]
        assert blocks["free"] == blocks["total"], (engine.engine_id, blocks)
    return Counter("loaded" if ending == [value] * BLOCKS_EACH else str(ending) for ending in found)


def draw(random: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw the faults of an offer and its load: mostly none."""
    soon_s, delay_s = random.uniform(0, SOON_S), random.uniform(0, SOON_S)
    match random.choices(("nothing", "cancel", "revoke", "expire"), (80, 8, 6, 6))[0]:
        case "cancel":
            return {"ttl_s": ORPHAN_TTL_S}, {"cancel_after_s": soon_s}
        case "revoke":
            return {"revoke_after_s": soon_s}, {"delay_s": delay_s}
        case "expire":
            return {"ttl_s": max(soon_s, 1e-4)}, {"delay_s": delay_s}
    return {}, {"delay_s": delay_s}


@pytest.mark.thorough
def test_nothing_grows(engines: Engines) -> None:
    """Thorough: see `test_mutants_and_noise_change_nothing_for_honest_engines` of `runtime/test_fuzz.py`."""
    samples = soak(engines)
    before = next(samples)
    after = next(sample for sample in samples if sample.loads >= BATCHES * BATCH_SIZE)
    assert set(after.endings) <= {"loaded", "cancelled", "LeaseExpired"}, after.endings
    assert after.endings["loaded"] > after.loads // 2
    for name in ("producer", "consumer"):
        old, new = getattr(before, name), getattr(after, name)
        grown_bytes = new.pop("rss_bytes") - old.pop("rss_bytes")
        assert {what: count for what, count in new.items() if count > old[what]} == {}, (name, old)
        assert grown_bytes < RSS_GROWTH_BYTES_MAX, name
