"""The example server's workers without HTTP: whose blocks they are when something fails; in-process transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import disaggregated.neighbours
import httpx2
import msgspec
import pytest
from disaggregated.decode import DecodeWorker
from disaggregated.failures import RequestTooLongError
from disaggregated.groups import LayerGroups
from disaggregated.keeper import background_tasks
from disaggregated.messages import (
    DecodeRequest,
    Failure,
    FailureKind,
    FirstToken,
    Instant,
    PrefillReply,
    PrefillRequest,
    Step,
)
from disaggregated.prefill import PrefillWorker
from openai_server.metrics import DecodeMetrics, PrefillMetrics
from openai_server.worker import WorkerSettings, prefill_app, worker_app
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
    metrics: Any
    """Of a prefill or of a decode worker."""

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
    model: LlamaModel, world: World, name: str, kind: type[Any], blocks: int, parts: Sequence[kvflow.Part] = ()
) -> AsyncIterator[Side]:
    metrics = kind(blocks_used=int, blocks_free=int)
    config = kvflow.Config(engine_id=name, listen="tcp://127.0.0.1:0", drain_timeout_s=1, cancel_grace_s=0.05)
    async with (
        Engine(model, block_count=blocks, block_size=4, batch_size=2, shuffle_seed=len(name)) as engine,
        kvflow.Runtime(config, world=world, observers=[metrics.kvflow], parts=parts) as runtime,
    ):
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

    async def prefilled(self, request_id: str = "r", max_tokens: int = 6, sampling: Sampling = GREEDY) -> PrefillReply:
        return await self.prefill.prefill(request_of(request_id, max_tokens, sampling))

    async def answer(self, request_id: str = "r", sampling: Sampling = GREEDY) -> list[int]:
        """The tokens of a whole answer."""
        generation = await self.decode.decode(self.decode_request(request_id, sampling=sampling))
        reply = await self.prefilled(request_id, sampling=sampling)
        steps = [Step.read(line) async for line in generation.lines()]
        assert steps[0] == reply.step
        assert [step.finish_reason for step in steps] == [None] * 5 + ["length"]
        return [step.token for step in steps]

    async def failure(self, request: DecodeRequest) -> FailureKind:
        """Why there is no answer."""
        (line,) = [line async for line in (await self.decode.decode(request)).lines()]
        return Failure.read(line).kind

    def ticket(self, request_id: str) -> dict[str, Any]:
        return kvflow.Ticket.rendezvous(self.prefill_side.runtime.introduce(), request_id).to_params()

    def decode_request(self, request_id: str = "r", max_tokens: int = 6, sampling: Sampling = GREEDY) -> DecodeRequest:
        return DecodeRequest(
            request_id=request_id,
            tickets=[self.ticket(request_id)],
            prompt_count=len(PROMPT),
            max_tokens=max_tokens,
            deadline_s=30,
            sampling=sampling,
        )

    async def idle(self) -> None:
        """Wait until all blocks of both engines are free."""
        await until(lambda: not self.prefill_side.blocks_used + self.decode_side.blocks_used)


def request_of(request_id: str = "r", max_tokens: int = 6, sampling: Sampling = GREEDY) -> PrefillRequest:
    return PrefillRequest(request_id=request_id, prompt=PROMPT, max_tokens=max_tokens, deadline_s=30, sampling=sampling)


@pytest.fixture
async def workers(tiny: Model) -> AsyncIterator[Workers]:
    """Two workers; afterwards all blocks are free, or become free."""
    model, cluster = load_model(tiny.checkpoint), InprocCluster()
    async with (
        open_side(model, cluster.world(), "prefill-0", PrefillMetrics, 16) as ours,
        open_side(model, cluster.world(), "decode-0", DecodeMetrics, 16) as theirs,
        background_tasks() as start_task,
    ):
        prefill = PrefillWorker(ours.engine, ours.runtime, start_task, ours.metrics)
        decode = DecodeWorker(theirs.engine, theirs.runtime, start_task, theirs.metrics)
        workers = Workers(prefill, decode, ours, theirs, cluster)
        yield workers
        await workers.idle()
    # What was counted is still shown when the runtimes have closed.
    loads = theirs.sample("openai_server_load_seconds_count", phase="wire")
    assert theirs.sample("kvflow_loads_total", outcome="loaded") == loads


async def test_the_decode_worker_goes_on_where_the_prefill_worker_stopped(workers: Workers, tiny: Model) -> None:
    prefill, decode = workers.prefill_side, workers.decode_side
    assert await workers.answer() == tiny.greedy(PROMPT, 6)
    await workers.idle()
    assert prefill.sample("openai_server_leases_total", outcome="read") == 1
    assert decode.sample("openai_server_load_seconds_count", phase="wire") == 1
    assert decode.sample("openai_server_hand_over_overhead_seconds_count") == 1
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


async def test_who_brings_tickets_is_asked_once_there_is_room_and_again_by_a_load_that_fails(
    workers: Workers, tiny: Model
) -> None:
    asked, prefilling = list[tuple[int, list[str]]](), list[asyncio.Task[PrefillReply]]()

    async def bring(attempts: Sequence[kvflow.Attempt]) -> dict[str, Any]:
        asked.append((workers.decode_side.blocks_used, [one.outcome for one in attempts]))
        if attempts:
            prefilling.append(asyncio.create_task(workers.prefilled("second"), name="prefill"))
            return workers.ticket("second")
        workers.prefill_side.runtime.decline("first", "no room")
        return workers.ticket("first")

    generation = await workers.decode.decode(workers.decode_request(), bring)
    steps = [Step.read(line) async for line in generation.lines()]
    assert [step.token for step in steps] == tiny.greedy(PROMPT, 6)
    assert asked == [(4, []), (4, ["PrefillFailed"])]
    assert (await prefilling[0]).step == steps[0]


async def test_who_has_no_ticket_to_bring_costs_no_blocks(workers: Workers) -> None:
    async def bring(_: object) -> dict[str, Any]:
        raise LookupError("no prefill replica")

    with pytest.raises(LookupError, match="no prefill replica"):
        await workers.decode.decode(workers.decode_request(), bring)
    assert workers.decode_side.blocks_used == 0


def test_messages_carry_how_to_choose() -> None:
    request = request_of(sampling=SAMPLED)
    assert PrefillRequest.read(request.written()) == request


async def test_one_token_is_answered_without_a_lease(workers: Workers, tiny: Model) -> None:
    reply = await workers.prefilled(max_tokens=1)
    assert reply.step == Step(token=tiny.greedy(PROMPT, 1)[0], finish_reason="length")
    assert workers.prefill_side.blocks_used == 0


async def test_a_prompt_that_can_never_fit_is_refused(workers: Workers) -> None:
    for asked in (workers.prefilled(max_tokens=55), workers.decode.decode(workers.decode_request(max_tokens=55))):
        with pytest.raises(
            RequestTooLongError, match=r"length is 64 tokens.* 65 tokens \(10 in the prompt, 55 in the completion"
        ):
            await asked


# --- what the router is answered


async def posted(workers: Workers, tiny: Model) -> tuple[int, Failure | None]:
    """Status of the prefill worker's answer as the router gets it, and the failure in it."""
    settings = WorkerSettings(name="prefill-0", role="prefill", host="", port=0, checkpoint=tiny.checkpoint)
    side = workers.prefill_side
    app = prefill_app(worker_app(settings, side.engine, side.runtime, side.metrics), workers.prefill)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://worker") as client:
        answer = await client.post("/prefill", content=request_of().written())
    return answer.status_code, None if answer.status_code == 200 else Failure.read(answer.content)


async def test_what_is_our_own_fault_leaves_a_traceback(
    workers: Workers, tiny: Model, caplog: pytest.LogCaptureFixture
) -> None:
    assert await posted(workers, tiny) == (200, None)
    status, failure = await posted(workers, tiny)  # the same id again, while its lease is open
    workers.prefill.release("r")
    assert failure is not None
    assert (status, failure.kind) == (502, FailureKind.WORKER_FAILED)
    (record,) = [record for record in caplog.records if record.name == "disaggregated.told"]
    assert failure.message in record.getMessage()
    assert record.exc_info is not None


async def test_a_worker_on_its_way_out_is_busy_and_leaves_none(
    workers: Workers, tiny: Model, caplog: pytest.LogCaptureFixture
) -> None:
    await workers.prefill_side.runtime.drain(deadline_s=0.1)
    status, failure = await posted(workers, tiny)
    assert failure is not None
    assert (status, failure.kind) == (503, FailureKind.BUSY)
    assert [record for record in caplog.records if record.name == "disaggregated.told"] == []


# --- whose blocks they are


async def test_offered_blocks_stay_reserved_until_they_are_released(workers: Workers) -> None:
    await workers.prefilled()
    assert workers.prefill_side.blocks_used == 3
    assert workers.prefill_side.sample("kvflow_open_leases") == 1
    for request_id in ("r", "r", "never heard of"):
        workers.prefill.release(request_id)
    # The hold: a reader that has just looked at the seal may still be reading.
    assert workers.prefill_side.blocks_used == 3
    assert await workers.failure(workers.decode_request()) is FailureKind.PREFILL_AGAIN
    assert workers.decode_side.blocks_used == 0
    await workers.idle()
    assert workers.prefill_side.sample("openai_server_leases_total", outcome="revoked") == 1


async def test_an_answer_that_is_given_up_keeps_its_blocks_until_no_byte_can_land(workers: Workers) -> None:
    await workers.prefilled()
    transport = workers.cluster.transport("decode-0")
    transport.faults.hold = True
    generation = await workers.decode.decode(workers.decode_request())
    await until(lambda: transport.held)
    await generation.aclose()
    await until(lambda: workers.decode_side.runtime.quarantines)
    (quarantine,) = workers.decode_side.runtime.quarantines
    assert workers.decode_side.blocks_used == 4
    transport.faults.hold = False
    while transport.held:
        transport.perform()
    await quarantine.settled()
    await workers.idle()
    assert workers.prefill_side.sample("openai_server_leases_total", outcome="read") == 1  # given back


async def test_an_answer_that_nobody_wants_any_more_gives_its_blocks_back(workers: Workers, tiny: Model) -> None:
    await workers.prefilled(max_tokens=50)
    generation = await workers.decode.decode(workers.decode_request(max_tokens=50))
    await anext(generation.lines())
    await generation.aclose()
    await workers.idle()
    assert await workers.answer("s") == tiny.greedy(PROMPT, 6)  # and the engine goes on with others


async def test_a_cancelled_prefill_fails_its_reader_and_gives_its_blocks_back(workers: Workers) -> None:
    generation = await workers.decode.decode(workers.decode_request())
    prefilling = asyncio.create_task(workers.prefilled(), name="prefill")
    await until(lambda: workers.prefill_side.blocks_used)
    prefilling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await prefilling
    (line,) = [line async for line in generation.lines()]
    assert Failure.read(line).kind is FailureKind.PREFILL_AGAIN
    await workers.idle()


FAR = FirstToken(token=1 << 40, computed_at=Instant.now()).written()


@pytest.mark.parametrize("payload", [b"", b'{"token": 5}', FAR])
async def test_a_prefill_worker_that_speaks_otherwise_costs_one_request(
    workers: Workers, tiny: Model, payload: bytes
) -> None:
    """As one of another version: what comes with its blocks is no first token."""
    offer = kvflow.ServeRequest("r", block_ids=[0, 1, 2], num_tokens=len(PROMPT), computed_tokens=0, payload=True)
    lease = workers.prefill_side.runtime.serve_blocks(offer)
    lease.complete(payload)
    assert await workers.failure(workers.decode_request()) is FailureKind.PREFILL_AGAIN
    await workers.idle()
    assert await lease is kvflow.LeaseOutcome.READ
    assert workers.decode_side.sample("openai_server_failures_total", kind="prefill_again") == 1
    assert await workers.answer("s") == tiny.greedy(PROMPT, 6)  # and the worker goes on with others


def test_clocks_of_two_machines_are_not_compared() -> None:
    now = Instant.now()
    assert (now.elapsed_s() or -1) >= 0
    assert msgspec.structs.replace(now, boot_id="another machine's").elapsed_s() is None


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
        request = PrefillRequest(
            request_id=name, prompt=prompt, max_tokens=1, deadline_s=30, neighbours=list(neighbours)
        )
        return (await self.worker.prefill(request)).step.token

    @property
    def computed(self) -> float | None:
        """Tokens of prompts that it has computed itself."""
        return self.side.sample("openai_server_tokens_total")


@pytest.fixture
async def sides(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Neighbour]]:
    monkeypatch.setattr(disaggregated.neighbours, "TOKENS_MIN", 4)
    model, world = load_model(tiny.checkpoint), InprocCluster().world()
    prefixes = [Prefixes(), Prefixes()]
    async with (
        open_side(model, world, "one", PrefillMetrics, 12, prefixes[:1]) as one,
        open_side(model, world, "other", PrefillMetrics, 12, prefixes[1:]) as other,
        background_tasks() as start_task,
    ):
        yield [
            Neighbour(side, PrefillWorker(side.engine, side.runtime, start_task, side.metrics, prefixes=part))
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
