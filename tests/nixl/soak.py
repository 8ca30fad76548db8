"""Loads without end between two real processes, with random cancels, revokes and expiries: does anything grow?

    python tests/nixl/soak.py --loads 100000 --transport tcp

prints what both engines hold now and then. With `--restart-every` the consumer is killed and started anew now and then,
so that only the producer's numbers say something about leaks.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from engine_main import EngineSetup
from engine_process import TRANSPORTS, EngineProcess, Engines

BATCH_SIZE, BLOCKS_EACH = 100, 2
REUSED = -2.0
VALUES = 1000
SOON_S = 0.005
ORPHAN_TTL_S = 0.1
SETUP = {"num_blocks": BATCH_SIZE * BLOCKS_EACH, "config": {"cancel_grace_s": 0.5}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What both engines hold after so many loads, when nothing is under way, and how the loads have ended."""

    loads: int
    seconds: float
    endings: Counter[str]
    producer: dict[str, int]
    consumer: dict[str, int]


def soak(engines: Engines, seed: int, *, sample_every: int, restart_every: int | None = None) -> Iterator[Sample]:
    """Load batch after batch; a sample after each `sample_every` batches."""
    random, started_s = Random(seed), time.monotonic()
    producer, consumer = engines.start(
        EngineSetup(engine_id="producer", **SETUP), EngineSetup(engine_id="consumer", **SETUP)
    )
    endings: Counter[str] = Counter()
    batches = 0
    while True:
        endings += run_batch(producer, consumer, batches, random)
        batches += 1
        if restart_every is not None and batches % restart_every == 0:
            consumer.close()
            (consumer,) = engines.start(EngineSetup(engine_id="consumer", **SETUP))
        if batches % sample_every == 0:
            yield Sample(
                loads=batches * BATCH_SIZE,
                seconds=time.monotonic() - started_s,
                endings=endings.copy(),
                producer=producer.call("resources"),
                consumer=consumer.call("resources"),
            )


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
    """What an offer and its load are to suffer: mostly nothing."""
    soon_s, delay_s = random.uniform(0, SOON_S), random.uniform(0, SOON_S)
    match random.choices(("nothing", "cancel", "revoke", "expire"), (80, 8, 6, 6))[0]:
        case "cancel":
            return {"ttl_s": ORPHAN_TTL_S}, {"cancel_after_s": soon_s}
        case "revoke":
            return {"revoke_after_s": soon_s}, {"delay_s": delay_s}
        case "expire":
            return {"ttl_s": max(soon_s, 1e-4)}, {"delay_s": delay_s}
    return {}, {"delay_s": delay_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end earlier than after all loads")
    parser.add_argument("--transport", choices=list(TRANSPORTS), default="shm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--restart-every", type=int, metavar="BATCHES")
    options = parser.parse_args()
    sample_every = max(options.loads // BATCH_SIZE // options.samples, 1)
    print(
        f"{'loads':>8} {'seconds':>8}  "
        + "  ".join(f"{'':>8} {'RSS MB':>8} {'fds':>4} {'threads':>7} {'tasks':>5}" for _ in range(2))
    )
    with Engines(TRANSPORTS[options.transport]) as engines:
        for sample in soak(engines, options.seed, sample_every=sample_every, restart_every=options.restart_every):
            columns = (describe(name, getattr(sample, name)) for name in ("producer", "consumer"))
            print(f"{sample.loads:8} {sample.seconds:8.1f}  " + "  ".join(columns), flush=True)
            if sample.loads >= options.loads or sample.seconds >= 60 * options.minutes:
                break
    print(dict(sample.endings))


def describe(name: str, held: dict[str, int]) -> str:
    return f"{name:>8} {held['rss_bytes'] / 1e6:8.1f} {held['fds']:4} {held['threads']:7} {held['tasks']:5}"


if __name__ == "__main__":
    main()
