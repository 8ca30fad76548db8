"""The example server's workers without HTTP: which task keeps blocks when something fails; in-process transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import disaggregated.neighbours
import httpx2
import pytest
from disaggregated.background import background_tasks
from disaggregated.decode import DecodeWorker
from disaggregated.failures import RequestTooLongError
from disaggregated.groups import LayerGroups
from disaggregated.messages import DecodeRequest, Failure, FailureKind, FirstToken, Offered, PrefillRequest, Step
from disaggregated.prefill import PrefillWorker
from openai_server.metrics import WorkerMetrics
from openai_server.worker import worker_app
from paged_engine import GREEDY, Engine, LlamaModel, Sampling
from paged_engine.weights import load_model
from tests_support import until
from tiny_model import PROMPT, Model

import kvflow
from kvflow.prefix import Prefixes
from kvflow.runtime.world import World
from kvflow.testing import InprocCluster

SAMPLED = Sampling(temperature=0.5, top_p=0.25, seed=-(2**63))


class Side(NamedTuple):
    engine: Engine
    runtime: kvflow.Runtime
    metrics: WorkerMetrics

    @property
    def blocks_used(self) -> int:
        return self.engine.statistics().blocks_used

    def sample(self, name: str, **labels: str) -> float | None:
        """The value of a metric; kvflow's own say which runtime they are of."""
        if name.startswith("kvflow_"):
            labels |= {"engine": self.runtime.config.engine_id, "dp": "0", "pp": "0", "tp": "0"}
        value: float | None = self.metrics.registry.get_sample_value(name, labels)
        return value


@asynccontextmanager
async def open_side(
    model: LlamaModel, world: World, name: str, blocks: int, parts: Sequence[kvflow.Part] = ()
) -> AsyncIterator[Side]:
    config = kvflow.Config(engine_id=name, listen="tcp://127.0.0.1:0", drain_timeout_s=1, cancel_grace_s=0.05)
    async with Engine(model, block_count=blocks, block_size=4, batch_size=2, shuffle_seed=len(name)) as engine:
        metrics = WorkerMetrics(engine)
        async with kvflow.Runtime(config, world=world, observers=[metrics.kvflow], parts=parts) as runtime:
            await runtime.register_kv_caches(LayerGroups(engine).caches)
            metrics.kvflow.watch(runtime)
            yield Side(engine, runtime, metrics)


@dataclass
class Workers:
    """A prefill and a decode worker on engines of their own."""

    prefill: PrefillWorker
    decode: DecodeWorker
    prefill_side: Side
    decode_side: Side
    cluster: InprocCluster

    async def request(self, request_id: str = "r", max_tokens: int = 6, sampling: Sampling = GREEDY) -> DecodeRequest:
        """Have the prompt computed, and return what a decode worker is asked then."""
        lease = await self.prefill.prefill(request_of(request_id, sampling))
        return DecodeRequest(
            request_id=request_id,
            ticket=lease.ticket.to_params(),
            prompt_count=len(PROMPT),
            max_tokens=max_tokens,
            deadline_s=30,
            sampling=sampling,
        )

    async def answer(self, request_id: str = "r", sampling: Sampling = GREEDY) -> list[int]:
        """The tokens of a whole answer."""
        steps = await self.lines(await self.request(request_id, sampling=sampling))
        assert all(isinstance(step, Step) for step in steps)
        assert [step.finish_reason for step in steps if isinstance(step, Step)] == [None] * 5 + ["length"]
        return [step.token for step in steps if isinstance(step, Step)]

    async def lines(self, request: DecodeRequest) -> list[Step | Failure]:
        return [step async for step in (await self.decode.decode(request)).steps()]

    async def failure(self, request: DecodeRequest) -> FailureKind:
        """Why there is no answer."""
        (line,) = await self.lines(request)
        assert isinstance(line, Failure)
        return line.kind

    async def idle(self) -> None:
        """Wait until all blocks of both engines are free."""
        await until(lambda: not self.prefill_side.blocks_used + self.decode_side.blocks_used)


def request_of(request_id: str = "r", sampling: Sampling = GREEDY, prompt: Sequence[int] = PROMPT) -> PrefillRequest:
    return PrefillRequest(request_id=request_id, prompt=list(prompt), deadline_s=30, sampling=sampling)


@pytest.fixture
async def workers(tiny: Model) -> AsyncIterator[Workers]:
    """Two workers; afterwards all blocks are free, or become free."""
    model, cluster = load_model(tiny.checkpoint), InprocCluster()
    async with (
        open_side(model, cluster.world(), "prefill-0", 16) as ours,
        open_side(model, cluster.world(), "decode-0", 16) as theirs,
        background_tasks() as start_task,
    ):
        prefill = PrefillWorker(ours.engine, ours.runtime, start_task)
        decode = DecodeWorker(theirs.engine, theirs.runtime, start_task)
        workers = Workers(prefill, decode, ours, theirs, cluster)
        yield workers
        await workers.idle()


async def test_the_decode_worker_goes_on_where_the_prefill_worker_stopped(workers: Workers, tiny: Model) -> None:
    prefill, decode = workers.prefill_side, workers.decode_side
    assert await workers.answer() == tiny.greedy(PROMPT, 6)
    await workers.idle()
    assert prefill.sample("kvflow_leases_total", outcome="read") == 1
    assert prefill.sample("kvflow_open_leases") == 0
    assert decode.sample("kvflow_loads_total", outcome="loaded") == 1
    assert decode.sample("kvflow_blocks", use="free") == 16


async def test_both_draw_what_one_engine_would(workers: Workers) -> None:
    answers = []
    for seed in range(3):
        sampling = Sampling(temperature=1.5, top_p=0.95, seed=seed)
        answers.append(await workers.answer(f"seed-{seed}", sampling))
        alone = workers.decode_side.engine.generate(PROMPT, max_tokens=6, sampling=sampling)
        assert answers[-1] == [token async for token in alone]
    assert len({tuple(answer) for answer in answers}) == 3
    assert len({answer[0] for answer in answers}) > 1  # the first token is drawn as well


async def test_an_answer_of_one_token_is_the_payload(workers: Workers, tiny: Model) -> None:
    (step,) = await workers.lines(await workers.request(max_tokens=1))
    assert step == Step(token=tiny.greedy(PROMPT, 1)[0], finish_reason="length")


async def test_tickets_are_brought_once_there_is_room_and_again_by_a_load_that_fails(
    workers: Workers, tiny: Model
) -> None:
    asked = list[tuple[int, list[str]]]()

    async def next_ticket(attempts: Sequence[kvflow.Attempt]) -> dict[str, Any]:
        asked.append((workers.decode_side.blocks_used, [one.outcome for one in attempts]))
        request = await workers.request(f"attempt-{len(asked)}")
        if not attempts:
            workers.prefill.release("attempt-1")
        return request.ticket

    request = DecodeRequest(request_id="r", prompt_count=len(PROMPT), max_tokens=6, deadline_s=30)
    generation = await workers.decode.decode(request, next_ticket)
    steps = [step async for step in generation.steps()]
    assert [step.token for step in steps if isinstance(step, Step)] == tiny.greedy(PROMPT, 6)
    assert [blocks for blocks, _ in asked] == [4, 4]
    assert [len(outcomes) for _, outcomes in asked] == [0, 1]


async def test_a_ticket_that_is_not_brought_costs_no_blocks(workers: Workers) -> None:
    async def next_ticket(_: object) -> dict[str, Any]:
        raise LookupError("no prefill replica")

    request = DecodeRequest(request_id="r", prompt_count=len(PROMPT), max_tokens=6, deadline_s=30)
    with pytest.raises(LookupError, match="no prefill replica"):
        await workers.decode.decode(request, next_ticket)
    assert workers.decode_side.blocks_used == 0


def test_messages_carry_how_to_choose() -> None:
    request = request_of(sampling=SAMPLED)
    assert PrefillRequest.read(request.written()) == request


async def test_what_can_never_fit_is_refused(workers: Workers) -> None:
    with pytest.raises(RequestTooLongError, match=r"length is 64 tokens.* 65 tokens \(65 in the prompt"):
        await workers.prefill.prefill(request_of(prompt=[3] * 65))
    request = DecodeRequest(request_id="r", prompt_count=len(PROMPT), max_tokens=55, deadline_s=30)
    with pytest.raises(RequestTooLongError, match=r"65 tokens \(10 in the prompt, 55 in the completion"):
        await workers.decode.decode(request)


async def test_over_http_a_worker_answers_failures_in_its_own_words(workers: Workers) -> None:
    side = workers.prefill_side
    app = worker_app(side.engine, side.runtime, workers.prefill, workers.decode)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://worker") as client:
        offered = await client.post("/prefill", content=request_of().written())
        ticket = Offered.read(offered.content).ticket
        wrong = await client.post("/prefill", content=request_of("r" * 10_000).written())  # kvflow refuses such an id
        assert (wrong.status_code, Failure.read(wrong.content).kind) == (502, FailureKind.WORKER_FAILED)
        request = DecodeRequest(request_id="r", ticket=ticket, prompt_count=10, max_tokens=3, deadline_s=30)
        lines = (await client.post("/decode", content=request.written())).content.splitlines()
        assert [Step.read(line).finish_reason for line in lines] == [None, None, "length"]
        for body, message in ((b"{", "truncated"), (b"{}", "request_id")):
            answer = await client.post("/prefill", content=body)
            assert (answer.status_code, message in answer.text) == (422, True)
        assert (await client.delete("/prefill/unknown")).status_code == 204
        health = (await client.get("/health")).json()
        assert (health["runtime"], health["address"]) == ("open", side.runtime.address)
        await side.runtime.drain(deadline_s=0.1)
        busy = await client.post("/prefill", content=request_of("s").written())
        assert (busy.status_code, Failure.read(busy.content).kind) == (503, FailureKind.BUSY)


async def test_offered_blocks_stay_reserved_until_they_are_released(workers: Workers) -> None:
    request = await workers.request()
    assert workers.prefill_side.blocks_used == 3
    assert workers.prefill_side.sample("kvflow_open_leases") == 1
    for request_id in ("r", "r", "never heard of"):
        workers.prefill.release(request_id)
    # The hold: a reader that has just looked at the seal may still be reading.
    assert workers.prefill_side.blocks_used == 3
    assert await workers.failure(request) is FailureKind.PREFILL_AGAIN
    assert workers.decode_side.blocks_used == 0
    await workers.idle()
    assert workers.prefill_side.sample("kvflow_leases_total", outcome="revoked") == 1


async def test_an_answer_that_is_given_up_keeps_its_blocks_until_no_byte_can_land(workers: Workers) -> None:
    request = await workers.request()
    transport = workers.cluster.transport("decode-0")
    transport.faults.hold = True
    generation = await workers.decode.decode(request)
    await until(lambda: transport.held)
    await generation.aclose()
    await until(lambda: workers.decode_side.runtime.quarantines)
    (quarantine,) = workers.decode_side.runtime.quarantines
    assert workers.decode_side.blocks_used == 4
    transport.faults.hold = False
    while transport.held:
        transport.perform()
    await quarantine.settled()
    workers.prefill.release("r")
    await workers.idle()


async def test_an_answer_that_is_closed_gives_its_blocks_back(workers: Workers, tiny: Model) -> None:
    generation = await workers.decode.decode(await workers.request(max_tokens=50))
    await anext(generation.steps())
    await generation.aclose()
    await workers.idle()
    assert await workers.answer("s") == tiny.greedy(PROMPT, 6)  # and the engine goes on with others


async def test_a_prompt_that_is_released_while_it_is_computed_fails_its_reader(workers: Workers) -> None:
    request = await workers.request()
    generation = await workers.decode.decode(request)
    workers.prefill.release("r")
    (line,) = [step async for step in generation.steps()]
    assert isinstance(line, Failure)
    assert line.kind is FailureKind.PREFILL_AGAIN
    await workers.idle()


async def test_a_prompt_that_cannot_be_computed_fails_its_reader_and_leaves_a_traceback(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object, **__: object) -> int:
        raise ZeroDivisionError("scripted")

    monkeypatch.setattr(workers.prefill_side.engine, "prefill", broken)
    assert await workers.failure(await workers.request()) is FailureKind.PREFILL_AGAIN
    await workers.idle()
    (record,) = [record for record in caplog.records if record.name == "disaggregated.prefill"]
    assert "r was not computed" in record.getMessage()
    assert record.exc_info is not None


@pytest.mark.parametrize("payload", [b"", b'{"tokens": 5}', FirstToken(token=1 << 40).written()])
async def test_a_prefill_worker_of_another_version_costs_one_request(
    workers: Workers, tiny: Model, payload: bytes
) -> None:
    """The payload of its blocks is no first token."""
    offer = kvflow.ServeRequest("r", block_ids=[0, 1, 2], num_tokens=len(PROMPT), computed_tokens=0, payload=True)
    lease = workers.prefill_side.runtime.serve_blocks(offer)
    lease.complete(payload)
    request = DecodeRequest(
        request_id="r", ticket=lease.ticket.to_params(), prompt_count=len(PROMPT), max_tokens=6, deadline_s=30
    )
    assert await workers.failure(request) is FailureKind.PREFILL_AGAIN
    assert await lease is kvflow.LeaseOutcome.READ
    assert await workers.answer("s") == tiny.greedy(PROMPT, 6)  # and the worker goes on with others


# --- prefill workers beside each other: what one has computed the other loads


LONG = [*PROMPT, *PROMPT[::-1], *PROMPT][:23]


@dataclass
class Neighbour:
    side: Side
    worker: PrefillWorker

    @property
    def address(self) -> str:
        return self.side.runtime.address

    async def prefill(self, prompt: list[int], *neighbours: str, name: str = "r") -> int:
        """The first token of its answer, computed by this worker alone or not."""
        request = PrefillRequest(request_id=name, prompt=prompt, deadline_s=30, neighbours=list(neighbours))
        await self.worker.prefill(request)
        token = await self.worker.wait_computed(name)
        self.worker.release(name)
        await self.worker.wait_released(name)
        return token

    @property
    def computed(self) -> int:
        """Tokens of prompts that it has computed itself."""
        return self.side.engine.statistics().tokens_prefilled


@pytest.fixture
async def sides(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Neighbour]]:
    monkeypatch.setattr(disaggregated.neighbours, "TOKENS_MIN", 4)
    model, world = load_model(tiny.checkpoint), InprocCluster().world()
    prefixes = [Prefixes(), Prefixes()]
    async with (
        open_side(model, world, "one", 12, prefixes[:1]) as one,
        open_side(model, world, "other", 12, prefixes[1:]) as other,
        background_tasks() as start_task,
    ):
        yield [
            Neighbour(side, PrefillWorker(side.engine, side.runtime, start_task, prefixes=part))
            for side, part in zip((one, other), prefixes, strict=True)
        ]
        await until(lambda: not one.blocks_used + other.blocks_used)


async def test_what_a_neighbour_has_computed_is_loaded(sides: list[Neighbour], tiny: Model) -> None:
    one, other = sides
    assert await one.prefill(LONG) == tiny.greedy(LONG, 1)[0]
    assert await other.prefill(LONG, one.address) == tiny.greedy(LONG, 1)[0]
    assert (one.computed, other.computed) == (23, 3)
    assert await other.prefill(LONG[:20], one.address, name="whole") == tiny.greedy(LONG[:20], 1)[0]
    assert other.computed == 3 + 4, "of a prompt in whole blocks the last token is computed"
    turn = [*LONG[:20], 9, 8, 7, 6, 5]
    assert await one.prefill(turn, other.address) == tiny.greedy(turn, 1)[0]
    assert one.computed == 23 + 5, "from blocks that the other one has loaded itself"


async def test_what_was_computed_elsewhere_since_is_not_there_any_more(sides: list[Neighbour], tiny: Model) -> None:
    one, other = sides
    await one.prefill(LONG)
    for nth in range(4):  # through all of its blocks
        await one.prefill([nth + 1] * 40, name=f"r{nth}")
    assert await other.prefill(LONG, one.address) == tiny.greedy(LONG, 1)[0]
    assert await other.prefill(LONG) == tiny.greedy(LONG, 1)[0]
    assert other.computed == 2 * 23
