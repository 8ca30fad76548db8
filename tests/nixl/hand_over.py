"""What tests do with engines in processes of their own: hand blocks over, and see that an engine is well."""

from __future__ import annotations

from collections.abc import Mapping

from engine_process import Call, EngineError, EngineProcess

BLOCKS = list(range(32))


def start_load(
    consumer: EngineProcess, request_id: str, ticket: Mapping[str, object], *, deadline_s: float | None = None
) -> Call:
    arguments = {} if deadline_s is None else {"deadline_s": deadline_s}
    return consumer.start("load", request_id=request_id, ticket=ticket, block_ids=BLOCKS, **arguments)


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
