"""The example server's prefill workers, one beside the other: what one has computed the other loads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import disaggregated.neighbours
import pytest
from disaggregated.groups import LayerGroups
from disaggregated.keeper import background_tasks
from disaggregated.messages import PrefillRequest
from disaggregated.prefill import PrefillWorker
from openai_server.metrics import PrefillMetrics
from paged_engine import Engine
from paged_engine.weights import load_model
from tests_support import until
from tiny_model import PROMPT, Model

import kvflow
from kvflow.testing import InprocCluster

BLOCK_SIZE = 4
LONG = [*PROMPT, *PROMPT[::-1], *PROMPT][:23]


@dataclass
class Side:
    engine: Engine
    runtime: kvflow.Runtime
    worker: PrefillWorker
    metrics: PrefillMetrics

    @property
    def address(self) -> str:
        return self.runtime.address

    async def prefill(self, prompt: list[int], *neighbours: str, name: str = "r") -> int:
        """The first token of its answer, computed by this worker alone or not."""
        request = PrefillRequest(
            request_id=name, prompt=prompt, max_tokens=1, deadline_s=30, neighbours=list(neighbours)
        )
        return (await self.worker.prefill(request)).step.token

    @property
    def computed(self) -> float | None:
        """Tokens of prompts that it has computed itself."""
        return self.metrics.registry.get_sample_value("openai_server_tokens_total")


@pytest.fixture
async def sides(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Side]]:
    monkeypatch.setattr(disaggregated.neighbours, "TOKENS_MIN", BLOCK_SIZE)
    model, cluster, made = load_model(tiny.checkpoint), InprocCluster(), list[Side]()

    def runtime(name: str, metrics: PrefillMetrics) -> kvflow.Runtime:
        config = kvflow.Config(engine_id=name, listen="tcp://127.0.0.1:0", drain_timeout_s=1, cancel_grace_s=0.05)
        return kvflow.Runtime(config, world=cluster.world(), observers=[metrics.kvflow])

    first, second = (PrefillMetrics(blocks_used=int, blocks_free=int) for _ in range(2))
    async with (
        Engine(model, block_count=12, block_size=BLOCK_SIZE, batch_size=2, shuffle_seed=1) as one,
        Engine(model, block_count=12, block_size=BLOCK_SIZE, batch_size=2, shuffle_seed=2) as other,
        runtime("one", first) as one_runtime,
        runtime("other", second) as other_runtime,
        background_tasks() as start_task,
    ):
        for engine, opened, metrics in ((one, one_runtime, first), (other, other_runtime, second)):
            await opened.register_kv_caches(LayerGroups(engine).caches)
            worker = PrefillWorker(engine, opened, start_task, metrics, share_prefixes=True)
            made.append(Side(engine, opened, worker, metrics))
        yield made
        for side in made:
            await until(lambda engine=side.engine: not engine.statistics().blocks_used)


async def test_what_a_neighbour_has_computed_is_loaded(sides: list[Side], tiny: Model) -> None:
    one, other = sides
    assert await one.prefill(LONG) == tiny.greedy(LONG, 1)[0]
    assert await other.prefill(LONG, one.address) == tiny.greedy(LONG, 1)[0]
    assert (one.computed, other.computed) == (23, 3)
    turn = [*LONG[:20], 9, 8, 7, 6, 5]
    assert await one.prefill(turn, other.address) == tiny.greedy(turn, 1)[0]
    assert one.computed == 23 + 5, "from blocks that the other one has loaded itself"


async def test_what_was_computed_elsewhere_since_is_not_there_any_more(sides: list[Side], tiny: Model) -> None:
    one, other = sides
    await one.prefill(LONG)
    for nth in range(4):  # through all of its blocks
        await one.prefill([nth + 1] * 40, name=f"r{nth}")
    assert await other.prefill(LONG, one.address) == tiny.greedy(LONG, 1)[0]
    assert other.computed == 23


async def test_who_shares_nothing_is_asked_in_vain(sides: list[Side], tiny: Model) -> None:
    one, other = sides
    await one.prefill(LONG)
    assert await other.prefill(LONG) == tiny.greedy(LONG, 1)[0]
    assert other.computed == 23
