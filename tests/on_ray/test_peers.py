"""Replicas are connected as they come, forgotten as they go, and tried again where that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pairs import virtual_pair
from tests_support import in_virtual_time

from kvflow import Runtime
from kvflow.ray import keep_prewarmed
from kvflow.testing import InprocPair

PERIOD_S = 10.0


class Listing:
    """The answers of a deployment's replicas, in turn; the last one is repeated."""

    def __init__(self, *answers: Sequence[Mapping[str, Any]] | Exception) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def __call__(self) -> Sequence[Mapping[str, Any]]:
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def entry(runtime: Runtime) -> dict[str, Any]:
    return {"engine_id": runtime.config.engine_id, "address": runtime.address, "node_ip": "not a field of it"}


def states(pair: InprocPair) -> list[str]:
    return [str(peer.state) for peer in pair.consumer.runtime.statistics().peers]


async def kept_for(pair: InprocPair, listing: Listing, periods: float) -> None:
    """So many looks at the peers."""
    keeping = asyncio.create_task(keep_prewarmed(pair.consumer.runtime, listing, period_s=PERIOD_S))
    await asyncio.wait([keeping], timeout=PERIOD_S * (periods - 0.5))
    keeping.cancel()
    await asyncio.wait([keeping])
    assert keeping.cancelled()


@in_virtual_time
async def test_replicas_that_come_are_connected_and_those_that_go_are_forgotten() -> None:
    async with virtual_pair() as pair:
        there = entry(pair.producer.runtime)
        listing = Listing([], [there], [there], [])
        await kept_for(pair, listing, 1)
        assert (states(pair), listing.asked) == ([], 1)
        await kept_for(pair, listing, 2)
        assert (states(pair), listing.asked) == (["ready"], 3)
        await kept_for(pair, Listing([there], []), 2)
        assert states(pair) == []


@in_virtual_time
async def test_what_cannot_be_right_and_who_does_not_answer_are_asked_again() -> None:
    async with virtual_pair() as pair:
        there = entry(pair.producer.runtime)
        listing = Listing([there | {"address": "nowhere"}], TimeoutError(), LookupError("none"), [there])
        await kept_for(pair, listing, 4)
        assert (states(pair), listing.asked) == (["ready"], 4)


@in_virtual_time
async def test_it_ends_when_its_runtime_drains() -> None:
    async with virtual_pair() as pair:
        await pair.consumer.runtime.drain(1.0)
        await keep_prewarmed(pair.consumer.runtime, Listing([]), period_s=PERIOD_S)
