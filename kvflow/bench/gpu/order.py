"""E3 and E6: whether a load ever succeeds with bytes of another time, on a device that computes later."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from kvflow.bench.gpu.engine import PRODUCER_VALUE, Engine, Pair, engines, specs
from kvflow.bench.gpu.pool import VALUES, PoolShape, scattered_ids
from kvflow.bench.gpu.setting import Setting

_BLOCKS = 32
_IDS = list(range(0, _BLOCKS, 2))


def events(setting: Setting) -> None:
    """E3: blocks are computed behind a kernel that sleeps, and offered or loaded into at once.

    With events no load may be wrong. The same without them is the control: it shows that the experiment can see it.
    """
    cases: list[tuple[str, dict[str, Any], bool]] = [
        ("straight, own stream", {}, True),
        ("straight, default stream", {}, False),
        ("staged, own stream", {"staging": "always"}, True),
        ("staged, default stream", {"staging": "always"}, False),
    ]
    for label, config, own_stream in cases:
        pool = PoolShape(layers=4, blocks=_BLOCKS)
        producer, reader = (replace(spec, own_stream=own_stream) for spec in specs(setting.device, pool, **config))
        with engines(producer, reader) as pair:
            _computed_late(setting, pair, label, events=True)
            _written_late(setting, pair, label, events=True)
            if not config:  # a staged lease without an event may be refused
                _computed_late(setting, pair, label, events=False)
                _written_late(setting, pair, label, events=False)


def _turns(setting: Setting, events: bool) -> tuple[int, float]:
    """How many loads, and how long the kernel before the writes sleeps."""
    return setting.size((50 if events else 20, 0.02), (5, 0.05))


def _computed_late(setting: Setting, pair: Pair, label: str, *, events: bool) -> None:
    count, delay_s = _turns(setting, events)
    wrong, failed = 0, ""
    for turn in range(count):
        name, value = f"serve {label} {events} {turn}", float(turn % VALUES + 2)
        step = pair.producer
        ticket = step.run(Engine.compute_and_offer, name, _IDS, value, delay_s=delay_s, events=events)
        end = pair.reader.run(Engine.load, name, ticket, _IDS)
        failed = failed or end.error
        if not end.error:
            wrong += pair.reader.run(Engine.count_other, _IDS, value) > 0
            step.run(Engine.outcome, name)
    _tell(setting, f"served early, {label}, {_word(events)}", wrong, failed)


def _written_late(setting: Setting, pair: Pair, label: str, *, events: bool) -> None:
    count, delay_s = _turns(setting, events)
    wrong, failed = 0, ""
    pair.producer.run(Engine.fill, _IDS, PRODUCER_VALUE)
    for turn in range(count):
        name = f"load {label} {events} {turn}"
        ticket = pair.producer.run(Engine.offer_computed, name, _IDS)
        end = pair.reader.run(Engine.load_behind, name, ticket, _IDS, delay_s=delay_s, events=events)
        failed = failed or end.error
        if not end.error:
            wrong += pair.reader.run(Engine.count_other, _IDS, PRODUCER_VALUE) > 0
            pair.producer.run(Engine.outcome, name)
    _tell(setting, f"loaded early, {label}, {_word(events)}", wrong, failed)


def _word(events: bool) -> str:
    return "with event" if events else "without"


def _tell(setting: Setting, what: str, wrong: int, failed: str) -> None:
    setting.facts.add(f"{what}: wrong loads", wrong)
    if failed:
        setting.facts.add(f"{what}: failed with", failed)


def stale(setting: Setting) -> None:
    """E6: leases end while they are read, and the device overwrites their blocks at once; a load that succeeds must
    have the bytes of before."""
    pool = PoolShape(layers=8, blocks=setting.size(1024, 64))
    half = pool.blocks // 2
    remote, local = scattered_ids(1, pool.blocks, half), scattered_ids(2, pool.blocks, half)
    fresh = gone = wrong = 0
    with engines(*specs(setting.device, pool)) as pair:
        usual_s = pair.must_hand_over("first", remote, local).seconds
        usual_s = pair.must_hand_over("second", remote, local).seconds
        for turn in itertools.takewhile(lambda _: setting.left_s() > 1, range(setting.size(300, 12))):
            value, name = float(turn % (VALUES - 10) + 2), f"stale {turn}"
            pair.producer.run(Engine.fill, remote, value)
            ticket = pair.producer.run(Engine.offer_computed, name, remote)
            # From well before the load's usual end to well after it.
            pause_s = usual_s * (turn % 12) / 8
            loading = pair.reader.start(Engine.load, name, ticket, local)
            pair.producer.run(Engine.revoke_after, name, remote, READER_MARK, pause_s)
            end = loading()
            if end.error:
                gone += 1
            else:
                fresh += 1
                wrong += pair.reader.run(Engine.count_other, local, value) > 0
            setting.facts.add("loads", turn + 1)
            setting.facts.add("succeeded", fresh)
            setting.facts.add("failed", gone)
            setting.facts.add("succeeded with other bytes", wrong)


READER_MARK = 1999.0
"""What blocks hold after their lease: no value of a turn."""
