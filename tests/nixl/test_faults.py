"""Processes that are killed, stopped and started again, at every moment of a read: survivors keep their promises.

Each test ends with `assert_healthy`: every block of a survivor is free again, and it serves and loads with the next
healthy peer. No test waits for time to pass: *during a read* means that the consumer's loop was stopped after some of a
load's reads were posted. Deadlines are long, and a test lets a deadline pass when the load has come to its point; so no
host is too slow.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

import pytest

from tests.nixl.hand_over import (
    BLOCKS,
    CONSUMER,
    PRODUCER,
    assert_healthy,
    hand_over,
    how_it_ended,
    pass_deadline,
    pass_handshake,
    start_load,
)
from tests.support.engine import LEASE_TTL_S
from tests.support.engine_process import Call, EngineProcess, Engines
from tests.support.verbs import EngineError

pytestmark = pytest.mark.nixl

SLICES_BEFORE_FAULT = 8


MET_BEFORE = pytest.mark.parametrize(
    "met_before", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["never met", "met before"]
)


class Victim(StrEnum):
    PRODUCER = "producer"
    CONSUMER = "consumer"


class Fault(StrEnum):
    KILLED = "killed"
    STOPPED = "stopped"


class Moment(StrEnum):
    BEFORE = "before"
    DURING = "during"
    AFTER = "after"


FAILED, EXPIRED, LATE = ("TransferFailed",), ("LeaseExpired",), ("DeadlineExceeded",)
# Over shared memory a reader copies by itself, but UCX may still wait for a word from a stopped producer.
LATE_OR_NOT = ("loaded", "DeadlineExceeded")


class Case(NamedTuple):
    """A fault, its moment, and its victim."""

    victim: Victim
    fault: Fault
    moment: Moment

    def __str__(self) -> str:
        return f"{self.victim}-{self.fault}-{self.moment}"

    def expected(self, transport: str) -> tuple[str, ...]:
        """How a load that is under way then may end: "loaded" or the type of its error."""
        if self.victim is Victim.CONSUMER:
            return EXPIRED
        return FAILED if self.fault is Fault.KILLED else LATE_OR_NOT if transport == "shm" else LATE


READING = Case(Victim.CONSUMER, Fault.KILLED, Moment.DURING)
CASES = [case for case in itertools.starmap(Case, itertools.product(Victim, Fault, Moment)) if case != READING]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.thorough if case.moment is Moment.AFTER else ()) for case in CASES],
    ids=str,
)
def test_a_process_dies_or_stops(engines: Engines, spare: EngineProcess, transport: str, case: Case) -> None:
    befall(engines, spare, transport, case)


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
def test_a_reader_dies_in_the_middle_of_a_read(engines: Engines, spare: EngineProcess, transport: str) -> None:
    """Over tcp no producer has to live through it (docs/decisions/0002-two-agents.md)."""
    befall(engines, spare, transport, READING)


def befall(engines: Engines, spare: EngineProcess, transport: str, case: Case) -> None:
    producer, consumer = engines.start(PRODUCER, CONSUMER)
    victim = {Victim.PRODUCER: producer, Victim.CONSUMER: consumer}[case.victim]
    hand_over(producer, consumer, "warm up")
    ticket = producer.call("offer", request_id="r", block_ids=BLOCKS)

    load = strike(case, consumer, victim, ticket)
    if victim is consumer:
        producer.call("pass_time", seconds=LEASE_TTL_S)
        outcome = producer.call("outcome", request_id="r")
        assert outcome == "expired" or (outcome == "read" and case.moment is Moment.AFTER)
        producer.call("fill", block_ids=BLOCKS, value=99.0)
        consumer.resume()
    if load is not None:
        assert how_it_ended(load) in case.expected(transport)
    producer.resume()
    if victim is producer and case.fault is Fault.STOPPED:
        producer.call("revoke", request_id="r")

    for survivor in (engine for engine in (producer, consumer) if engine.running):
        assert_healthy(survivor, spare)


def strike(case: Case, consumer: EngineProcess, victim: EngineProcess, ticket: Mapping[str, object]) -> Call | None:
    """Start the load, and do the fault at its moment. Return the load, or None if its process has died."""
    do_fault = {Fault.KILLED: victim.kill, Fault.STOPPED: victim.stop}[case.fault]
    if case.moment is Moment.BEFORE:
        do_fault()
        if not consumer.running:
            return None
    if case.moment is Moment.DURING:
        consumer.stall(after_reads=SLICES_BEFORE_FAULT)
    waits_in_vain = case.victim is Victim.PRODUCER and case.fault is Fault.STOPPED and case.moment is not Moment.AFTER
    load = start_load(consumer, "r", ticket)
    if case.moment is Moment.AFTER:
        assert how_it_ended(load) == "loaded"
        assert consumer.call("values", block_ids=BLOCKS) == [1.0] * len(BLOCKS)
        do_fault()
        return None
    if case.moment is Moment.DURING:
        consumer.wait_until_stalled()
        do_fault()
        if not consumer.running:
            return None
        consumer.go_on()
    if waits_in_vain:
        pass_deadline(consumer, "r")
    return load


@pytest.mark.parametrize("victim", list(Victim))
def test_a_process_closes_during_a_read(engines: Engines, spare: EngineProcess, victim: Victim) -> None:
    """In order, so its exit code is 0; the other one goes on."""
    producer, consumer = engines.start(PRODUCER, CONSUMER)
    hand_over(producer, consumer, "warm up")
    ticket = producer.call("offer", request_id="r", block_ids=BLOCKS)
    consumer.stall(after_reads=SLICES_BEFORE_FAULT)
    load = start_load(consumer, "r", ticket)
    consumer.wait_until_stalled()
    if victim is Victim.PRODUCER:
        producer.start_to_quit()
        assert producer.wait_for_exit() == 0
        consumer.go_on()
        assert how_it_ended(load) == "TransferFailed"
        assert_healthy(consumer, spare)
    else:
        consumer.start_to_quit()
        consumer.go_on()
        assert consumer.wait_for_exit() == 0
        producer.call("pass_time", seconds=LEASE_TTL_S)
        assert producer.call("outcome", request_id="r") in ("read", "expired")
        assert_healthy(producer, spare)


def test_a_stopped_producer_cannot_be_met(engines: Engines) -> None:
    """No connection yet: the handshake has its own bound, and the same ticket works once the producer is back."""
    producer, consumer = engines.start(PRODUCER, CONSUMER)
    ticket = producer.call("offer", request_id="r", block_ids=BLOCKS)
    producer.stop()
    load = start_load(consumer, "r", ticket)
    pass_handshake(consumer)
    assert how_it_ended(load) == "PeerUnreachable"
    producer.resume()
    assert how_it_ended(start_load(consumer, "r", ticket)) == "loaded"
    assert producer.call("outcome", request_id="r") == "read"


def test_a_killed_producer_cannot_be_met(engines: Engines, spare: EngineProcess) -> None:
    producer, consumer = engines.start(PRODUCER, CONSUMER)
    ticket = producer.call("offer", request_id="r", block_ids=BLOCKS)
    producer.kill()
    assert how_it_ended(start_load(consumer, "r", ticket)) == "PeerUnreachable"
    assert_healthy(consumer, spare)


@MET_BEFORE
def test_a_restarted_producer_satisfies_no_old_ticket(engines: Engines, met_before: bool) -> None:
    """Same name, same port, other incarnation."""
    producer, consumer = engines.start(PRODUCER, CONSUMER)
    old = producer.call("offer", request_id="r", block_ids=BLOCKS)
    if met_before:
        hand_over(producer, consumer, "before")
    producer.kill()
    (producer,) = engines.start(replace(PRODUCER, fill=2.0, port=old["remote_port"]))
    if met_before:  # the first to use the old connection finds out
        assert how_it_ended(start_load(consumer, "r", old)) == "TransferFailed"
    assert how_it_ended(start_load(consumer, "r", old)) == "LeaseExpired"
    hand_over(producer, consumer, "new", value=2.0)
    assert how_it_ended(start_load(consumer, "r", old)) == "LeaseExpired"
    hand_over(producer, consumer, "newer", value=2.0)


@MET_BEFORE
def test_a_restarted_consumer_is_served(engines: Engines, met_before: bool) -> None:
    producer, consumer = engines.start(PRODUCER, CONSUMER)
    ticket = producer.call("offer", request_id="r", block_ids=BLOCKS)
    if met_before:
        hand_over(producer, consumer, "before")
    consumer.kill()
    (consumer,) = engines.start(CONSUMER)
    assert how_it_ended(start_load(consumer, "r", ticket)) == "loaded"
    assert producer.call("outcome", request_id="r") == "read"
    assert_healthy(producer, consumer)


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_a_cancelled_load_quarantines_what_may_still_land(engines: Engines, spare: EngineProcess) -> None:
    """The producer is stopped, so the reads that were posted are as good as endless until it is back."""
    producer, consumer = engines.start(PRODUCER, CONSUMER)
    hand_over(producer, consumer, "warm up")
    ticket = producer.call("offer", request_id="r", block_ids=BLOCKS)
    producer.stop()
    load = start_load(consumer, "r", ticket)
    consumer.wait_until(lambda statistics: statistics["transport"]["open_reads"] > 0)
    consumer.call("cancel", request_id="r")
    assert how_it_ended(load) == "CancelledError"
    assert consumer.call("statistics")["blocks"]["quarantined"] == len(BLOCKS)
    with pytest.raises(EngineError, match="BlocksBusy"):
        start_load(consumer, "again", ticket).result()
    hand_over(spare, consumer, "elsewhere", blocks=[40, 41], value=7.0)
    producer.resume()
    consumer.call("safe")
    producer.call("revoke", request_id="r")
    assert_healthy(consumer, producer)
