"""Bugs planted into the toy engine: tests of a few lines find each, and name the place; without it they pass."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
from tests_support import lose_errors
from toy_engine import Engine

from kvflow import Lease, Load, LoadRequest
from kvflow.errors import DeadlineExceeded
from kvflow.testing import (
    BlockWatch,
    InprocCluster,
    NetworkConditions,
    PatternCache,
    assert_blocks_equal,
    cancel_everywhere,
    run_virtual,
    watch_blocks,
    watch_offers,
)

PROMPT = [11, 12, 13, 14, 15, 16]


class FreesEarly(Engine):
    async def _free_after_lease(self, lease: Lease, blocks: Sequence[int]) -> None:
        self.give_back(blocks)
        await lease


class ForgetsARelease(Engine):
    async def _free_when_settled(self, load: Load, blocks: Sequence[int]) -> None:
        await load  # raises, if that was cancelled, before the blocks are given back
        self.give_back(blocks)


class FreesUnsettled(Engine):
    async def _free_when_settled(self, load: Load, blocks: Sequence[int]) -> None:
        self.give_back(blocks)


class LoadsIntoWrongBlocks(Engine):
    async def __aenter__(self) -> Engine:
        start_load = self.runtime.start_load

        def start(request: LoadRequest) -> Load:
            return start_load(replace(request, block_ids=[block + 1 for block in request.block_ids]))

        vars(self.runtime)["start_load"] = start
        return await super().__aenter__()


def blocks_watched(engine: Engine) -> AbstractContextManager[BlockWatch]:
    return watch_blocks(engine.runtime, engine, take="take", free="give_back", free_blocks=lambda: engine.free)


def pattern(engine: Engine) -> PatternCache:
    return PatternCache(engine.runtime.config.engine_id, engine.kv_caches, engine.layout)


# --- the obvious tests


def hand_over(prefill: Engine, decode: Engine) -> Coroutine[Any, Any, object]:
    return decode.decode("request", prefill.prefill("request", PROMPT), len(PROMPT))


async def offers_stay(prefill: Engine, decode: Engine) -> None:
    with watch_offers(prefill.runtime, pattern(prefill)):
        async with prefill, decode:
            await hand_over(prefill, decode)


async def blocks_come_back(prefill: Engine, decode: Engine) -> None:
    with blocks_watched(prefill), blocks_watched(decode):
        async with prefill, decode:
            await hand_over(prefill, decode)


async def blocks_are_loaded(prefill: Engine, decode: Engine) -> None:
    async with prefill, decode:
        await hand_over(prefill, decode)
        assert_blocks_equal(pattern(decode), [0, 1], pattern(prefill), [0, 1], num_tokens=len(PROMPT))


CLUSTERS: dict[str, Callable[[], InprocCluster]] = {
    "as it comes": InprocCluster,
    "of a seed": partial(InprocCluster, seed=1),
    "reads longer than cancel_grace_s": partial(InprocCluster, seed=1, conditions=NetworkConditions(read_s=5.0)),
}


def cancelled_anywhere(kind: type[Engine], cluster_kind: str = "as it comes") -> int:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Coroutine[Any, Any, object]]:
        lose_errors()
        cluster = CLUSTERS[cluster_kind]()
        prefill, decode = Engine("prefill", world=cluster.world()), kind("decode", world=cluster.world())
        with blocks_watched(prefill), blocks_watched(decode):
            async with prefill, decode:
                yield hand_over(prefill, decode)

    return cancel_everywhere(scenario)


# --- what they find

Test = Callable[[Engine, Engine], Coroutine[Any, Any, None]]

SLOT = r"engine 'prefill', layer 'layers\.0', K, block 0, slot 0"
FOUND = [
    (
        offers_stay,
        FreesEarly,
        Engine,
        SLOT + r": token 0 of request 'request' was overwritten before its lease was over",
    ),
    (
        blocks_come_back,
        FreesEarly,
        Engine,
        r"engine 'prefill' .*: block 0 was freed at .*\(_free_after_lease\) while it is leased to readers; "
        r"it was taken at .*toy_engine\.py:\d+ \(prefill\)",
    ),
    (
        blocks_are_loaded,
        Engine,
        LoadsIntoWrongBlocks,
        r"engine 'decode', layer 'layers\.0', K, block 0, slot 0 head 0 is not token 0 of the prompt, as in " + SLOT,
    ),
]


@pytest.mark.parametrize(("test", "prefill", "decode", "message"), FOUND)
def test_a_planted_bug_is_found(test: Test, prefill: type[Engine], decode: type[Engine], message: str) -> None:
    async def run(prefill: type[Engine], decode: type[Engine]) -> None:
        lose_errors()
        cluster = InprocCluster()
        await test(prefill("prefill", world=cluster.world()), decode("decode", world=cluster.world()))

    run_virtual(run(Engine, Engine))
    with pytest.raises(AssertionError, match=message):
        run_virtual(run(prefill, decode))


def test_a_release_that_is_forgotten_is_found_wherever_the_engine_is_cancelled() -> None:
    assert cancelled_anywhere(Engine) > 5
    message = r"engine 'decode' .*: block 0 was taken at .*toy_engine\.py:\d+ \(decode\) and never freed, as 1 other"
    with pytest.raises(AssertionError, match=message) as caught:
        cancelled_anywhere(ForgetsARelease)
    (note,) = caught.value.__notes__
    assert re.search(r"cancelled at moment 1 of \d+: .*toy_engine\.py:\d+ \(decode\)", note)


QUARANTINED = r"engine 'decode' .*: block 0 was freed at .* while it is quarantined"


@pytest.mark.parametrize("cluster_kind", CLUSTERS)
def test_blocks_that_are_freed_in_quarantine_are_found_wherever_the_engine_is_cancelled(cluster_kind: str) -> None:
    """On a fast network, too, where every read ends before the cancelled load does."""
    assert cancelled_anywhere(Engine, cluster_kind) > 5
    with pytest.raises(AssertionError, match=QUARANTINED):
        cancelled_anywhere(FreesUnsettled, cluster_kind)


class IgnoresFailures(FreesUnsettled):
    """It gives its load less time than the network takes."""

    async def decode(self, request_id: str, ticket: Mapping[str, Any], num_tokens: int) -> list[int]:
        start_load = self.runtime.start_load
        with mock.patch.object(self.runtime, "start_load", lambda given: start_load(replace(given, deadline_s=1.0))):
            return await super().decode(request_id, ticket, num_tokens)


def test_blocks_that_are_freed_in_quarantine_are_found_when_a_load_fails() -> None:
    async def run() -> None:
        lose_errors()
        cluster = InprocCluster(seed=1, conditions=NetworkConditions(read_s=1.2))  # ends within cancel_grace_s
        await blocks_come_back(
            Engine("prefill", world=cluster.world()), IgnoresFailures("decode", world=cluster.world())
        )

    with pytest.raises(AssertionError, match=QUARANTINED) as caught:
        run_virtual(run())
    assert isinstance(caught.value.__cause__, DeadlineExceeded)


def test_a_coroutine_that_never_ends_is_given_up() -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Coroutine[Any, Any, object]]:
        yield forever()

    async def forever() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(AssertionError, match="not run through after 5 moments"):
        cancel_everywhere(scenario, runs_max=5)
