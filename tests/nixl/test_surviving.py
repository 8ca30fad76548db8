"""A load of two tickets over real NIXL. Its first source dies or stands still: the load is right, or typed and safe.

*During a read* means that the consumer's loop was stopped after some reads were posted. The two sources hold the same
prompt with different bytes, so the bytes show which source was read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.nixl.hand_over import assert_healthy, hand_over, how_it_ended
from tests.support.engine import BLOCK_BYTES, EngineSetup, small
from tests.support.engine_process import Call, EngineProcess, Engines

pytestmark = pytest.mark.nixl

BLOCKS = list(range(16, 144))
"""8 MiB in the middle of the cache: what lies before and behind has to stay as it is."""
GUARDS = [*range(16), *range(144, 160)]
SIZE: dict[str, Any] = {"pool": small(blocks=160), "limits": {"slice_bytes_max": 4 * BLOCK_BYTES}}
READS = len(BLOCKS) // 4
FIRST = EngineSetup(engine_id="first", fill=1.0, **SIZE)
SECOND = EngineSetup(engine_id="second", fill=2.0, **SIZE)
CONSUMER = EngineSetup(engine_id="consumer", fill=-1.0, config={"cancel_grace_s": 0.1}, **SIZE)
MOMENTS = [READS // 2, *(pytest.param(reads, marks=pytest.mark.thorough) for reads in (0, 1, READS - 2))]


class Survival:
    """Both sources offer, the consumer loads, and the first one meets its fate at a moment of that."""

    def __init__(self, engines: Engines, consumer: EngineSetup = CONSUMER) -> None:
        self.first, self.second, self.consumer = engines.start(FIRST, SECOND, consumer)
        for source, value in ((self.first, 1.0), (self.second, 2.0)):
            hand_over(source, self.consumer, f"warm up {source.engine_id}", blocks=BLOCKS, value=value)
        self.consumer.call("fill", block_ids=BLOCKS, value=-1.0)

    def strike(self, reads: int, fate: Callable[[EngineProcess], None]) -> Call:
        tickets = [
            source.call("offer", request_id=f"r of {source.engine_id}", block_ids=BLOCKS)
            for source in (self.first, self.second)
        ]
        self.consumer.stall(after_reads=reads)
        load = self.consumer.start("load", request_id="r", ticket=tickets, block_ids=BLOCKS)
        self.consumer.wait_until_stalled()
        fate(self.first)
        self.consumer.go_on()
        return load

    def assert_right(self, load: Call, value: float) -> None:
        """It has loaded, every block from this source, and has touched nothing else."""
        assert how_it_ended(load) == "loaded"
        assert set(self.consumer.call("values", block_ids=BLOCKS)) == {value}
        assert set(self.consumer.call("values", block_ids=GUARDS)) == {-1.0}


@pytest.mark.parametrize("reads", MOMENTS)
def test_the_first_source_is_killed(engines: Engines, reads: int) -> None:
    made = Survival(engines)
    made.assert_right(made.strike(reads, EngineProcess.kill), 2.0)
    assert made.second.call("outcome", request_id="r of second") == "read"
    assert_healthy(made.consumer, made.second)


@pytest.mark.parametrize("reads", MOMENTS)
def test_the_first_source_is_stopped_and_goes_on(engines: Engines, reads: int) -> None:
    """Posted reads cannot be taken back: the load waits for them, and no other load writes to the blocks."""
    made = Survival(engines)
    load = made.strike(reads, EngineProcess.stop)
    made.first.resume()
    made.assert_right(load, 1.0)
    assert made.second.call("outcome", request_id="r of second") == "read"
    assert_healthy(made.consumer, made.first)
    assert_healthy(made.consumer, made.second)


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
@pytest.mark.parametrize("dies", [False, True])
def test_a_source_that_stays_stopped_holds_the_blocks_until_it_goes_on_or_dies(engines: Engines, dies: bool) -> None:
    """There is no second writer: the load ends at its deadline, and its blocks are quarantined."""
    config = {"cancel_grace_s": 0.1, "load_deadline_s": 3.0}
    made = Survival(engines, EngineSetup(engine_id="consumer", fill=-1.0, config=config, **SIZE))
    load = made.strike(READS // 2, EngineProcess.stop)
    assert how_it_ended(load) == "DeadlineExceeded"
    assert made.consumer.call("statistics")["blocks"]["quarantined"] == len(BLOCKS)
    if dies:
        made.first.kill()
    else:
        made.first.resume()
    for source in (made.second,) if dies else (made.first, made.second):  # a failed load leaves its tickets
        source.call("revoke", request_id=f"r of {source.engine_id}")
    made.consumer.call("safe")
    assert set(made.consumer.call("values", block_ids=GUARDS)) == {-1.0}
    assert_healthy(made.consumer, made.second)
