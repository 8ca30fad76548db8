"""The example server's workers without HTTP: whose blocks they are when something fails; in-process transport."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai_server.decode import DecodeWorker
from openai_server.failures import RequestTooLongError
from openai_server.messages import (
    DecodeRequest,
    Failure,
    FailureKind,
    Instant,
    PrefillReply,
    PrefillRequest,
    Step,
)
from openai_server.metrics import DecodeMetrics, PrefillMetrics
from openai_server.prefill import PrefillWorker, prefill_app
from openai_server.worker import WorkerSettings, background_tasks, worker_app
from paged_engine import Engine, Sampling
from paged_engine.weights import load_model
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests_support import until

import kvflow
from kvflow.runtime.world import World
from kvflow.testing import InprocNetwork, InprocTransport

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Greedy = Callable[[Sequence[int], int], list[int]]

PROMPT = [5, 17, 3, 88, 41, 9, 60, 2, 33, 71]

REQUEST = PrefillRequest(request_id="r", prompt=PROMPT, max_tokens=6, deadline_s=30)


def no_blocks() -> int:
    return 0


@dataclass
class Pair:
    """A prefill and a decode worker on engines of their own."""

    prefill: PrefillWorker
    decode: DecodeWorker
    prefill_engine: Engine
    decode_engine: Engine
    prefill_runtime: kvflow.Runtime
    decode_runtime: kvflow.Runtime
    decode_transport: InprocTransport
    prefill_metrics: PrefillMetrics
    decode_metrics: DecodeMetrics

    async def prefilled(self, request_id: str = "r", *, max_tokens: int = 6, deadline_s: float = 30) -> PrefillReply:
        return await self.prefill.prefill(
            PrefillRequest(request_id=request_id, prompt=PROMPT, max_tokens=max_tokens, deadline_s=deadline_s)
        )

    async def idle(self) -> None:
        """Wait until all blocks of both engines are free."""
        await until(
            lambda: not (self.prefill_engine.statistics().blocks_used or self.decode_engine.statistics().blocks_used)
        )


def decode_request(reply: PrefillReply, request_id: str = "r", *, max_tokens: int = 5) -> DecodeRequest:
    assert reply.ticket is not None
    return DecodeRequest(
        request_id=request_id,
        ticket=reply.ticket,
        prompt_count=len(PROMPT),
        token=reply.step.token,
        max_tokens=max_tokens,
        deadline_s=30,
        prefilled_at=reply.replied_at,
    )


@asynccontextmanager
async def pair(checkpoint: Path) -> AsyncIterator[Pair]:
    """Two workers; leaving it expects all blocks to be free, or to become free."""
    model, network = load_model(checkpoint), InprocNetwork()
    transports: list[InprocTransport] = []

    def transport(_: kvflow.Config, name: str) -> InprocTransport:
        transports.append(InprocTransport(name, network))
        return transports[-1]

    world = World(transport=transport)

    def config(engine_id: str) -> kvflow.Config:
        return kvflow.Config(
            engine_id=engine_id, listen="tcp://127.0.0.1:0", transport="inproc", drain_timeout_s=1, cancel_grace_s=0.05
        )

    prefill_metrics = PrefillMetrics(blocks_used=no_blocks, blocks_free=no_blocks)
    decode_metrics = DecodeMetrics(blocks_used=no_blocks, blocks_free=no_blocks)
    async with (
        Engine(model, block_count=16, block_size=4, batch_size=2, shuffle_seed=1) as prefill_engine,
        Engine(model, block_count=16, block_size=4, batch_size=2, shuffle_seed=2) as decode_engine,
        kvflow.Runtime(config("prefill-0"), world=world, observers=[prefill_metrics.kvflow]) as prefill_runtime,
        kvflow.Runtime(config("decode-0"), world=world, observers=[decode_metrics.kvflow]) as decode_runtime,
        background_tasks() as start_task,
    ):
        for engine, runtime in ((prefill_engine, prefill_runtime), (decode_engine, decode_runtime)):
            layout = kvflow.CacheLayout.infer(engine.kv_caches, order="HND", block_size=4)
            await runtime.register_kv_caches(engine.kv_caches, layout)
        prefill_metrics.kvflow.watch(prefill_runtime)
        decode_metrics.kvflow.watch(decode_runtime)
        workers = Pair(
            prefill=PrefillWorker(prefill_engine, prefill_runtime, start_task, prefill_metrics),
            decode=DecodeWorker(decode_engine, decode_runtime, start_task, decode_metrics),
            prefill_engine=prefill_engine,
            decode_engine=decode_engine,
            prefill_runtime=prefill_runtime,
            decode_runtime=decode_runtime,
            decode_transport=transports[-1],
            prefill_metrics=prefill_metrics,
            decode_metrics=decode_metrics,
        )
        yield workers
        await workers.idle()


def sample(metrics: PrefillMetrics | DecodeMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def kvflow_samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """kvflow's samples by name and what tells them apart in one worker."""
    return {
        (sample.name, next((sample.labels[key] for key in ("outcome", "use", "state") if key in sample.labels), "")): (
            sample.value
        )
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if sample.name.startswith("kvflow_")
    }


async def steps_of(lines: AsyncIterator[str]) -> list[Step]:
    return [Step(**json.loads(line)) async for line in lines]


class TestHandOver:
    def test_the_decode_worker_goes_on_where_the_prefill_worker_stopped(
        self, tiny: tuple[Path, Greedy], run: Run
    ) -> None:
        async def scenario() -> None:
            async with pair(tiny[0]) as workers:
                reply = await workers.prefilled()
                generation = await workers.decode.decode(decode_request(reply))
                steps = await steps_of(generation.lines())
                assert [reply.step.token, *(step.token for step in steps)] == tiny[1](PROMPT, 6)
                assert [step.finish_reason for step in steps] == [None] * 4 + ["length"]
                await workers.idle()
                assert sample(workers.prefill_metrics, "openai_server_leases_total", outcome="read") == 1
                assert sample(workers.decode_metrics, "openai_server_load_seconds_count", phase="wire") == 1
                assert sample(workers.decode_metrics, "openai_server_hand_over_overhead_seconds_count") == 1

        run(scenario())

    def test_both_draw_what_one_engine_would(self, tiny: tuple[Path, Greedy], run: Run) -> None:
        async def scenario() -> None:
            async with pair(tiny[0]) as workers:
                answers = []
                for seed in range(3):
                    sampling = Sampling(temperature=1.5, top_p=0.95, seed=seed)
                    name = f"seed-{seed}"
                    reply = await workers.prefill.prefill(
                        REQUEST.model_copy(update={"request_id": name, "sampling": sampling})
                    )
                    asked = decode_request(reply, name).model_copy(update={"sampling": sampling})
                    steps = await steps_of((await workers.decode.decode(asked)).lines())
                    answers.append([reply.step.token, *(step.token for step in steps)])
                    alone = workers.decode_engine.generate(PROMPT, max_tokens=6, sampling=sampling)
                    assert answers[-1] == [token async for token in alone]
                assert len({tuple(answer) for answer in answers}) == 3
                assert len({answer[0] for answer in answers}) > 1  # the first token is drawn as well

        run(scenario())

    def test_messages_carry_how_to_choose(self) -> None:
        request = REQUEST.model_copy(update={"sampling": Sampling(temperature=0.5, top_p=0.25, seed=-(2**63))})
        assert PrefillRequest.model_validate_json(request.model_dump_json()) == request

    def test_one_token_is_answered_without_a_lease(self, tiny: tuple[Path, Greedy], run: Run) -> None:
        async def scenario() -> None:
            async with pair(tiny[0]) as workers:
                reply = await workers.prefilled(max_tokens=1)
                assert (reply.ticket, reply.step.finish_reason) == (None, "length")
                assert [reply.step.token] == tiny[1](PROMPT, 1)
                assert workers.prefill_engine.statistics().blocks_used == 0

        run(scenario())

    def test_a_prompt_that_can_never_fit_is_refused(self, tiny: tuple[Path, Greedy], run: Run) -> None:
        async def scenario() -> None:
            async with pair(tiny[0]) as workers:
                with pytest.raises(
                    RequestTooLongError, match="10 tokens of prompt and max_tokens 55 are 65, at most 64"
                ):
                    await workers.prefilled(max_tokens=55)

        run(scenario())


async def posted(workers: Pair, checkpoint: Path, request: PrefillRequest) -> tuple[int, bytes]:
    """Status and body of the prefill worker's answer, as the router gets it."""
    settings = WorkerSettings(name="prefill-0", role="prefill", host="", port=0, checkpoint=checkpoint)
    app = worker_app(settings, workers.prefill_engine, workers.prefill_runtime, workers.prefill_metrics)
    sent: list[MutableMapping[str, Any]] = []
    coming = [{"type": "http.request", "body": request.model_dump_json().encode()}]

    async def receive() -> dict[str, Any]:
        if not coming:
            await asyncio.Event().wait()  # the client stays
        return coming.pop()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/prefill", "query_string": b"", "headers": []}
    await prefill_app(app, workers.prefill)(scope, receive, send)
    return sent[0]["status"], b"".join(message["body"] for message in sent[1:])


class TestAnswers:
    async def test_what_is_our_own_fault_leaves_a_traceback(
        self, tiny: tuple[Path, Greedy], caplog: pytest.LogCaptureFixture
    ) -> None:
        async with pair(tiny[0]) as workers:
            assert (await posted(workers, tiny[0], REQUEST))[0] == 200
            status, body = await posted(workers, tiny[0], REQUEST)  # the same id again, while its lease is open
            workers.prefill.release("r")
        failure = Failure.model_validate_json(body)
        assert (status, failure.kind) == (502, FailureKind.WORKER_FAILED)
        (record,) = [record for record in caplog.records if record.name == "openai_server.worker"]
        assert failure.message in record.getMessage()
        assert record.exc_info is not None

    async def test_a_worker_on_its_way_out_is_busy_and_leaves_none(
        self, tiny: tuple[Path, Greedy], caplog: pytest.LogCaptureFixture
    ) -> None:
        async with pair(tiny[0]) as workers:
            await workers.prefill_runtime.drain(deadline_s=0.1)
            status, body = await posted(workers, tiny[0], REQUEST)
        failure = Failure.model_validate_json(body)
        assert (status, failure.kind) == (503, FailureKind.BUSY)
        assert [record for record in caplog.records if record.name == "openai_server.worker"] == []


class TestMetrics:
    def test_kvflows_own_are_shown_while_the_runtime_is_open_and_break_nothing_after_that(
        self, tiny: tuple[Path, Greedy], run: Run
    ) -> None:
        async def scenario() -> CollectorRegistry:
            async with pair(tiny[0]) as workers:
                reply = await workers.prefilled()
                assert kvflow_samples(workers.prefill_metrics.registry)["kvflow_open_leases", ""] == 1
                await steps_of((await workers.decode.decode(decode_request(reply))).lines())
                await workers.idle()
                produced = kvflow_samples(workers.prefill_metrics.registry)
                consumed = kvflow_samples(workers.decode_metrics.registry)
                assert (produced["kvflow_leases_total", "read"], produced["kvflow_open_leases", ""]) == (1, 0)
                assert (consumed["kvflow_loads_total", "loaded"], consumed["kvflow_blocks", "free"]) == (1, 16)
                return workers.decode_metrics.registry

        assert kvflow_samples(run(scenario()))["kvflow_loads_total", "loaded"] == 1


class TestBlocks:
    def test_offered_blocks_stay_reserved_until_they_are_released(self, tiny: tuple[Path, Greedy], run: Run) -> None:
        async def scenario() -> None:
            async with pair(tiny[0]) as workers:
                await workers.prefilled()
                assert workers.prefill_engine.statistics().blocks_used == 3
                workers.prefill.release("r")
                workers.prefill.release("r")
                workers.prefill.release("never heard of")
                # The hold: a reader that has just looked at the seal may still be reading.
                assert workers.prefill_engine.statistics().blocks_used == 3
                await workers.idle()
                assert sample(workers.prefill_metrics, "openai_server_leases_total", outcome="revoked") == 1

        run(scenario())

    def test_a_released_offer_cannot_be_loaded_and_costs_no_blocks(self, tiny: tuple[Path, Greedy], run: Run) -> None:
        async def scenario() -> None:
            async with pair(tiny[0]) as workers:
                reply = await workers.prefilled()
                workers.prefill.release("r")
                with pytest.raises(kvflow.errors.LeaseExpired):
                    await workers.decode.decode(decode_request(reply))
                assert workers.decode_engine.statistics().blocks_used == 0

        run(scenario())

    def test_a_cancelled_load_keeps_its_blocks_until_no_byte_can_land(
        self, tiny: tuple[Path, Greedy], run: Run
    ) -> None:
        async def scenario() -> None:
            async with pair(tiny[0]) as workers:
                reply = await workers.prefilled()
                transport = workers.decode_transport
                transport.faults.hold = True
                loading = asyncio.create_task(workers.decode.decode(decode_request(reply)), name="load")
                await until(lambda: transport.held)
                loading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await loading
                (quarantine,) = workers.decode_runtime.quarantines
                assert workers.decode_engine.statistics().blocks_used == 4
                transport.faults.hold = False
                while transport.held:
                    transport.perform()
                await quarantine.settled()
                await until(lambda: not workers.decode_engine.statistics().blocks_used)
                workers.prefill.release("r")

        run(scenario())

    def test_an_answer_that_nobody_wants_any_more_gives_its_blocks_back(
        self, tiny: tuple[Path, Greedy], run: Run
    ) -> None:
        async def scenario() -> None:
            async with pair(tiny[0]) as workers:
                reply = await workers.prefilled(max_tokens=50)
                generation = await workers.decode.decode(decode_request(reply, max_tokens=49))
                lines = generation.lines()
                await anext(lines)
                await generation.aclose()
                await workers.idle()
                # And the engine goes on with others.
                reply = await workers.prefilled("s")
                steps = await steps_of((await workers.decode.decode(decode_request(reply, "s"))).lines())
                assert [reply.step.token, *(step.token for step in steps)] == tiny[1](PROMPT, 6)

        run(scenario())

    def test_a_cancelled_prefill_gives_its_blocks_back(self, tiny: tuple[Path, Greedy], run: Run) -> None:
        async def scenario() -> None:
            async with pair(tiny[0]) as workers:
                prefilling = asyncio.create_task(workers.prefilled(), name="prefill")
                await until(lambda: workers.prefill_engine.statistics().blocks_used)
                prefilling.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await prefilling
                assert workers.prefill_engine.statistics().blocks_used == 0

        run(scenario())


def test_clocks_of_two_machines_are_not_compared() -> None:
    now = Instant.now()
    assert (now.elapsed_s() or -1) >= 0
    assert now.model_copy(update={"boot_id": "another machine's"}).elapsed_s() is None
