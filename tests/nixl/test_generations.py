"""Engines that sleep, on real NIXL and between processes: other pages are mapped at the addresses of their caches.

Over shared memory a reader needs only addresses, so a reader that missed the change would read the new pages.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.engine import EngineSetup, small
from tests.support.engine_process import Call, EngineProcess, Engines
from tests.support.verbs import EngineError

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

OLD, GONE, NEW = 1.0, 5.0, 7.0
LIVES = 6
REFUSED = {"LeaseExpired", "TransferFailed", "PeerUnreachable", "PeerNotReady"}


def failed(engine: EngineProcess, request_id: str, ticket: dict[str, object], block_ids: list[int]) -> str:
    """How a load that must fail has failed."""
    with pytest.raises(EngineError) as caught:
        engine.call("load", request_id=request_id, ticket=ticket, block_ids=block_ids)
    assert caught.value.quarantined == []
    return caught.value.kind


def ending(load: Call) -> str:
    """How a load has ended that may succeed; it has left no block in danger."""
    try:
        load.result()
    except EngineError as error:
        return error.kind if not error.quarantined else "quarantined"
    return "loaded"


def loaded(engine: EngineProcess, request_id: str, ticket: dict[str, object], block_ids: list[int]) -> list[float]:
    engine.call("load", request_id=request_id, ticket=ticket, block_ids=block_ids)
    values: list[float] = engine.call("values", block_ids=block_ids)
    return values


@pytest.mark.parametrize("farewell", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_nothing_of_before_is_read_as_good_and_a_new_ticket_works(engines: Engines, farewell: bool) -> None:
    producer, consumer = engines.pair()
    kept: list[dict[str, int]] = []
    kinds: set[str] = set()
    for life in range(LIVES):
        warm, before = (producer.call("offer", request_id=f"{what} {life}", block_ids=[3, 4]) for what in ("a", "b"))
        assert loaded(consumer, f"a {life}", warm, [0, 1]) == [OLD if life == 0 else NEW] * 2
        assert producer.call("outcome", request_id=f"a {life}") == "read"
        producer.call("sleep", value=GONE, farewell=farewell)
        assert producer.call("outcome", request_id=f"b {life}") == "revoked"
        kinds.add(asleep := failed(consumer, f"asleep {life}", before, [2, 3]))
        producer.call("wake", value=NEW)
        kinds.add(awake := failed(consumer, f"awake {life}", before, [2, 3]))
        assert {asleep, awake} <= REFUSED
        after = producer.call("offer", request_id=f"c {life}", block_ids=[5, 6])
        assert loaded(consumer, f"c {life}", after, [4, 5]) == [NEW] * 2
        assert failed(consumer, f"again {life}", before, [2, 3]) == "LeaseExpired"
        assert producer.call("outcome", request_id=f"c {life}") == "read"
        kept.append(
            {**producer.call("resources"), **{f"of reader: {k}": v for k, v in consumer.call("resources").items()}}
        )
    print(f"loads by tickets of before: {sorted(kinds)}; resources: {kept[1]} then {kept[-1]}")
    grown = {name: kept[-1][name] - kept[1][name] for name in kept[1] if "rss" not in name}
    assert {name: count for name, count in grown.items() if count > 0} == {}
    assert producer.call("statistics")["serving"]["revoked"] == LIVES


def test_a_load_under_way_is_whole_or_fails(engines: Engines) -> None:
    """The producer goes to sleep under it, at another moment each time."""
    blocks = list(range(256))
    producer, consumer = engines.start(
        EngineSetup(engine_id="producer", fill=NEW, pool=small(blocks=256), limits={"slice_bytes_max": 1 << 18}),
        EngineSetup(engine_id="consumer", pool=small(blocks=256), limits={"slice_bytes_max": 1 << 18}),
    )
    endings, whole = Counter[str](), 0
    for life in range(LIVES):
        ticket = producer.call("offer", request_id=f"{life}", block_ids=blocks)
        load = consumer.start("load", request_id=f"{life}", ticket=ticket, block_ids=blocks)
        consumer.wait_until(lambda found, least=life: found["transport"]["reads"] >= least)  # type: ignore[misc]
        producer.call("sleep", value=GONE, farewell=life % 2 == 0)
        endings[ending(load)] += 1
        if endings["loaded"] > whole:
            whole += 1
            assert consumer.call("values", block_ids=blocks) == [NEW] * len(blocks)
        producer.call("wake", value=NEW)
        after = producer.call("offer", request_id=f"after {life}", block_ids=[7])
        assert loaded(consumer, f"after {life}", after, [9]) == [NEW]
    print(f"{small().layers} layers, {len(blocks)} blocks, {LIVES} lives: {endings}")
    assert set(endings) <= {"loaded", *REFUSED}


def test_no_byte_lands_in_a_reader_that_has_gone_to_sleep(engines: Engines) -> None:
    blocks = list(range(256))
    producer, consumer = engines.start(
        EngineSetup(engine_id="producer", fill=OLD, pool=small(blocks=256)),
        EngineSetup(engine_id="consumer", pool=small(blocks=256)),
    )
    for life in range(LIVES):
        ticket = producer.call("offer", request_id=f"{life}", block_ids=blocks)
        load = consumer.start("load", request_id=f"{life}", ticket=ticket, block_ids=blocks)
        consumer.call("sleep", value=GONE)
        assert ending(load) in ("loaded", "CacheUnregistered")
        assert consumer.call("values", block_ids=blocks) == [GONE] * len(blocks)
        consumer.call("wake", value=NEW)
        assert consumer.call("values", block_ids=blocks) == [NEW] * len(blocks)
        producer.call("revoke", request_id=f"{life}")
        after = producer.call("offer", request_id=f"after {life}", block_ids=[7])
        assert loaded(consumer, f"after {life}", after, [9]) == [OLD]
