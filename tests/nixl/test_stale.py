"""No load succeeds with bytes of another time: on real NIXL, leases that end around the moment they are read."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random
from typing import Any

import pytest
from budgets import budget

from tests.support.engine import EngineSetup, small
from tests.support.engine_process import Engines

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

BATCHES, BATCHES_MAX, BATCH_SIZE = budget(5, 10), 100, 100
BLOCKS_EACH = 2
FIRST_TTL_S = 0.08
TTL_STEP = 1.5
REUSED = -2.0


@pytest.mark.budget
def test_a_load_around_its_leases_end_gets_the_offered_bytes_or_nothing(engines: Engines) -> None:
    load_around_their_leases_ends(engines)


def load_around_their_leases_ends(engines: Engines, **given: Any) -> None:
    """Loads at random moments around the end of their leases; the producer reuses blocks as soon as it may.

    How long leases last is tried out: about as long as half of the loads take on this host to be quick enough.
    `given` is of the setup of both engines.
    """
    random = Random(4)
    setup = {"pool": small(blocks=BATCH_SIZE * BLOCKS_EACH), **given}
    producer, consumer = engines.start(
        EngineSetup(engine_id="producer", **setup), EngineSetup(engine_id="consumer", **setup)
    )
    every_block = list(range(BATCH_SIZE * BLOCKS_EACH))
    block_ids = [every_block[start : start + BLOCKS_EACH] for start in every_block[::BLOCKS_EACH]]
    endings: Counter[str] = Counter()
    ttl_s = FIRST_TTL_S
    for batch in itertools.count():
        offered, before = float(batch + 1), endings["fresh"]
        producer.call("fill", block_ids=every_block, value=offered)
        names = [f"{batch}-{index}" for index in range(BATCH_SIZE)]
        offers = [
            {"request_id": name, "block_ids": ids, "ttl_s": ttl_s} for name, ids in zip(names, block_ids, strict=True)
        ]
        tickets = producer.call("offer_many", offers=offers, then=REUSED)
        loads = [
            {"request_id": name, "ticket": ticket, "block_ids": ids, "delay_s": random.uniform(0.5, 1.5) * ttl_s}
            for name, ticket, ids in zip(names, tickets, block_ids, strict=True)
        ]
        for found in consumer.call("load_many", loads=loads):
            endings[str(found) if found != [offered] * BLOCKS_EACH else "fresh"] += 1
        producer.wait_until(lambda statistics: statistics["serving"]["open_leases"] == 0)
        assert set(endings) <= {"fresh", "LeaseExpired"}, endings
        ttl_s *= TTL_STEP if endings["fresh"] - before < BATCH_SIZE / 2 else 1 / TTL_STEP
        if batch + 1 >= BATCHES and min(endings["fresh"], endings["LeaseExpired"]) > BATCHES:
            break
        assert batch < BATCHES_MAX, (
            f"no ttl was found for which some loads are quick enough and some are not: {endings}"
        )
    assert consumer.call("statistics")["blocks"]["free"] == BATCH_SIZE * BLOCKS_EACH
