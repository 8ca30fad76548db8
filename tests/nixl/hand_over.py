"""Helpers for engines in processes of their own: hand blocks over, and check that an engine is well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.engine import BLOCK_BYTES, HANDSHAKE_S, LOAD_DEADLINE_S, EngineSetup
from tests.support.engine_process import Call, EngineProcess
from tests.support.verbs import EngineError

BLOCKS = list(range(32))
SETUP: dict[str, Any] = {"config": {"cancel_grace_s": 0.1}, "limits": {"slice_bytes_max": BLOCK_BYTES}}
"""Settings for faults: a slice is one block, and a cancelled load waits only shortly."""
PRODUCER = EngineSetup(engine_id="producer", fill=1.0, steered=True, **SETUP)
CONSUMER = EngineSetup(engine_id="consumer", fill=-1.0, steered=True, **SETUP)


def start_load(consumer: EngineProcess, request_id: str, ticket: Mapping[str, object]) -> Call:
    return consumer.start("load", request_id=request_id, ticket=ticket, block_ids=BLOCKS)


def pass_deadline(consumer: EngineProcess, request_id: str) -> None:
    """Let the deadline of a load pass when none of its reads can land. No effect on a load that has ended."""
    consumer.call("until_stuck", request_id=request_id)
    consumer.call("pass_time", seconds=LOAD_DEADLINE_S)


def pass_handshake(consumer: EngineProcess) -> None:
    """Let the bound of a handshake pass once it has begun."""
    consumer.wait_until(lambda statistics: any(peer["state"] == "connecting" for peer in statistics["peers"]))
    consumer.call("pass_time", seconds=HANDSHAKE_S)


def how_it_ended(load: Call) -> str:
    """ "loaded", or the type of its error."""
    try:
        load.result()
    except EngineError as error:
        return error.kind
    return "loaded"


def hand_over(
    producer: EngineProcess, consumer: EngineProcess, request_id: str, *, blocks: list[int] = BLOCKS, value: float = 1.0
) -> None:
    """One load from offer to outcome; its bytes arrive."""
    ticket = producer.call("offer", request_id=request_id, block_ids=blocks)
    consumer.call("load", request_id=request_id, ticket=ticket, block_ids=blocks)
    assert producer.call("outcome", request_id=request_id) == "read"
    assert consumer.call("values", block_ids=blocks) == [value] * len(blocks)


def assert_healthy(survivor: EngineProcess, peer: EngineProcess) -> None:
    """Its books balance, and it works with a healthy peer in both directions."""
    survivor.call("safe")
    statistics = survivor.wait_until(lambda statistics: statistics["serving"]["open_leases"] == 0)
    blocks, loading = statistics["blocks"], statistics["loading"]
    assert blocks["free"] == blocks["total"], blocks
    assert (loading["open_loads"], loading["quarantines"]) == (0, 0), loading
    for giver, taker, value in ((peer, survivor, 5.0), (survivor, peer, 6.0)):
        giver.call("fill", block_ids=BLOCKS, value=value)
        hand_over(giver, taker, f"{giver.engine_id} to {taker.engine_id}", value=value)
