"""A load of two tickets over real NIXL whose first source dies or stands still: always right, or typed and safe.

*During a read* means that the consumer's loop was stopped after so many reads were posted. The two sources hold the
same prompt by different bytes, so it shows whose have landed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    def strike(
        self, reads: int, fate: Callable[[EngineProcess], None], beside: Mapping[str, Any] | None = None
    ) -> Call:
        tickets = [
            source.call("offer", request_id=f"r of {source.engine_id}", block_ids=BLOCKS)
            for source in (self.first, self.second)
        ]
        self.consumer.stall(after_reads=reads)
        if beside is not None:
            self.beside = self.consumer.start("load", request_id="beside", **beside)
        load = self.consumer.start("load", request_id="r", ticket=tickets, block_ids=BLOCKS)
        self.consumer.wait_until_stalled()
        fate(self.first)
        self.consumer.go_on()
        return load

    def assert_right(self, load: Call, *values: float) -> None:
        """It has loaded, every block from one of these, and has touched nothing else."""
        assert how_it_ended(load) == "loaded"
        self.assert_holds(*values)

    def assert_holds(self, *values: float) -> None:
        found = self.consumer.call("values", block_ids=BLOCKS)
        assert set(found) in [{value} for value in values]
        assert set(self.consumer.call("values", block_ids=GUARDS)) == {-1.0}

    def assert_first_works(self) -> None:
        """It has gone on, and is read from."""
        self.first.call("revoke", request_id="r of first")
        hand_over(self.first, self.consumer, "once more", blocks=GUARDS)
        self.consumer.call("fill", block_ids=GUARDS, value=-1.0)

    def until_late_or_over(self) -> None:
        """The first one was found to be late, unless the load has ended."""
        self.consumer.wait_until(
            lambda seen: (
                not seen["loading"]["open_loads"]
                or any(peer["engine_id"] == "first" and peer["failures"] for peer in seen["peers"])
            )
        )


@pytest.mark.parametrize("reads", MOMENTS)
def test_the_first_source_is_killed(engines: Engines, reads: int) -> None:
    made = Survival(engines)
    made.assert_right(made.strike(reads, EngineProcess.kill), 2.0)
    assert made.second.call("outcome", request_id="r of second") == "read"
    assert_healthy(made.consumer, made.second)


@pytest.mark.parametrize("reads", MOMENTS)
def test_the_first_source_is_stopped_and_comes_back(engines: Engines, transport: str, reads: int) -> None:
    """Over shared memory its bytes can be read meanwhile, or not: UCX may wait for a word from it. Over tcp they would
    come when it goes on, when others are there. It lives on.
    """
    made = Survival(engines)
    load = made.strike(reads, EngineProcess.stop)
    made.until_late_or_over()
    made.first.resume()
    made.assert_right(load, *((2.0,) if transport == "tcp" else (1.0, 2.0)))
    made.assert_first_works()
    made.assert_holds(*((2.0,) if transport == "tcp" else (1.0, 2.0)))
    assert_healthy(made.consumer, made.second)


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
@pytest.mark.parametrize("dies", [False, True])
def test_a_source_that_stays_stopped_holds_nothing(engines: Engines, dies: bool) -> None:
    """What is left of its reads is parked, until it has gone on, or for good."""
    made = Survival(engines)
    made.assert_right(made.strike(READS // 2, EngineProcess.stop), 2.0)
    if dies:
        made.first.kill()
    else:
        made.first.resume()
        made.assert_first_works()
    found = made.consumer.call("values", block_ids=[*BLOCKS, *GUARDS])
    assert found == [2.0] * len(BLOCKS) + [-1.0] * len(GUARDS)
    assert_healthy(made.consumer, made.second)


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_other_reads_go_on_when_those_of_a_load_are_given_up(engines: Engines) -> None:
    """Also those from the same source, which may go on in time for a load that has no other one."""
    made = Survival(engines)
    other = {"ticket": made.first.call("offer", request_id="other", block_ids=GUARDS), "block_ids": GUARDS}
    load = made.strike(2, EngineProcess.stop, beside=other)
    made.until_late_or_over()
    assert how_it_ended(load) == "loaded"
    assert set(made.consumer.call("values", block_ids=BLOCKS)) == {2.0}
    made.first.resume()
    assert how_it_ended(made.beside) == "loaded"
    found = made.consumer.call("values", block_ids=[*BLOCKS, *GUARDS])
    assert found == [2.0] * len(BLOCKS) + [1.0] * len(GUARDS)
    assert_healthy(made.consumer, made.second)


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_a_source_whose_reads_cannot_be_given_up_holds_the_blocks_until_it_goes_on(engines: Engines) -> None:
    """As where network cards move the bytes: there is no second writer, and the load ends at its deadline."""
    config = {"cancel_grace_s": 0.1, "load_deadline_s": 3.0}
    made = Survival(engines, EngineSetup(engine_id="consumer", fill=-1.0, config=config, parks=False, **SIZE))
    load = made.strike(READS // 2, EngineProcess.stop)
    assert how_it_ended(load) == "DeadlineExceeded"
    assert made.consumer.call("statistics")["blocks"]["quarantined"] == len(BLOCKS)
    made.first.resume()
    for source in (made.first, made.second):  # a failed load leaves its tickets to its caller
        source.call("revoke", request_id=f"r of {source.engine_id}")
    made.consumer.call("safe")
    assert set(made.consumer.call("values", block_ids=GUARDS)) == {-1.0}
    assert_healthy(made.consumer, made.second)
