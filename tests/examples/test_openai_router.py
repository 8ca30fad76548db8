"""The example server's router: whose turn it is, and what it does when a worker fails; workers are scripted here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import cycle, islice
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from disaggregated.failures import RequestTooLongError, failure_of
from disaggregated.messages import Again, DecodeRequest, Failure, FailureKind, PrefillReply, PrefillRequest, Step
from hypothesis import given
from hypothesis import strategies as st
from openai_server.failures import STATUS
from openai_server.metrics import RouterMetrics
from openai_server.rotation import Pauses, Rotation, Worker
from openai_server.router import AttemptError, Prompt, Router, open_client
from paged_engine import OutOfBlocksError
from tests_support import any_ticket, until

from kvflow import Ticket, errors

ANSWER = [11, 12, 13]

Script = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TestRotation:
    def test_one_that_is_down_is_probed_with_growing_pauses_until_it_is_back(self) -> None:
        a = Worker(name="a", url="", up=True)
        rotation = Rotation("prefill", [a])
        for now_s in (9.0, 9.1, 9.9):  # many requests that lose it at once count as one
            rotation.lost(a, now_s)
        pauses = [a.probe_at_s - 9.0]
        for _ in range(6):
            now_s = a.probe_at_s
            rotation.probed(a, now_s, healthy=False)
            pauses.append(a.probe_at_s - now_s)
        assert (a.up, pauses) == (False, [0.25, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0])
        rotation.probed(a, 100.0, healthy=True)
        assert (a.up, a.failed_probes, a.probe_at_s) == (True, 0, 100.0 + Pauses().steady_s)

    @given(
        ups=st.lists(st.booleans(), min_size=1, max_size=5),
        avoided=st.sets(st.integers(min_value=0, max_value=4)),
        turns=st.integers(min_value=1, max_value=12),
    )
    def test_takes_turns_among_those_that_are_up_and_need_not_be_avoided(
        self, ups: list[bool], avoided: set[int], turns: int
    ) -> None:
        workers = [Worker(name=str(index), url="", up=up) for index, up in enumerate(ups)]
        rotation = Rotation("decode", workers)
        avoid = [workers[index] for index in avoided if index < len(workers)]
        wanted = [worker for worker in workers if worker.up and worker not in avoid] or rotation.up or [None]
        assert [rotation.pick(avoid) for _ in range(turns)] == list(islice(cycle(wanted), turns))


def tree_of(kind: type[errors.KVFlowError]) -> Iterator[type[errors.KVFlowError]]:
    """Every class of errors below that one."""
    yield kind
    for child in kind.__subclasses__():
        yield from tree_of(child)


WORKER_FAILED, BUSY, PREFILL_AGAIN, DEADLINE = (
    (FailureKind.WORKER_FAILED, 502),
    (FailureKind.BUSY, 503),
    (FailureKind.PREFILL_AGAIN, 502),
    (FailureKind.DEADLINE, 504),
)
OUTCOMES = {
    (errors.Blame.CALLER, False): WORKER_FAILED,
    (errors.Blame.CALLER, True): WORKER_FAILED,
    (errors.Blame.ENGINE, True): BUSY,
    (errors.Blame.ENGINE, False): WORKER_FAILED,
    (errors.Blame.PEER, True): PREFILL_AGAIN,
    (errors.Blame.PEER, False): PREFILL_AGAIN,
    (errors.Blame.NOBODY, False): PREFILL_AGAIN,
    (errors.Blame.NOBODY, True): DEADLINE,
    (errors.Blame.KVFLOW, False): WORKER_FAILED,
    (errors.Blame.KVFLOW, True): WORKER_FAILED,
}


class TestFailures:
    def test_whose_fault_it_was_says_what_to_do(self) -> None:
        """Also for errors that do not exist yet; every pair of answers has its place."""
        unheard = [
            type("Unheard", (errors.KVFlowError,), {"blame": blame, "retryable": again, "memory_safe": safe})
            for blame, again in OUTCOMES
            for safe in (True, False)
        ]
        for kind in (*tree_of(errors.KVFlowError), *unheard):
            error = kind.__new__(kind, "news")
            failure = failure_of(error)
            assert (failure.kind, STATUS[failure.kind].http) == OUTCOMES[kind.blame, kind.retryable], kind
            assert failure.message == f"{kind.__name__}: news"

    def test_each_error_of_ours_says_what_to_do(self) -> None:
        failures = [failure_of(error) for error in (RequestTooLongError("5000 tokens"), OutOfBlocksError("no room"))]
        assert [(failure.kind, STATUS[failure.kind].http, failure.message) for failure in failures] == [
            (FailureKind.INVALID, 400, "5000 tokens"),
            (FailureKind.BUSY, 503, "OutOfBlocksError: no room"),
        ]

    def test_only_what_another_worker_may_do_better_is_tried_again(self) -> None:
        assert {kind for kind in FailureKind if not STATUS[kind].retry} == {
            FailureKind.INVALID,
            FailureKind.NO_WORKER,
            FailureKind.DEADLINE,
        }


@dataclass
class Scripted:
    """A worker of either kind. What it does for the next requests is scripted; without a script it answers."""

    name: str
    computed: set[str]
    """The attempts whose prompts a prefill worker has computed: before that a decode worker has no step to give."""
    gone: Callable[[str], bool] = lambda engine_id: False
    """Whether a prefill worker has failed, as a load from it would find out."""
    script: list[Script] = field(default_factory=list)
    prefilled: list[str] = field(default_factory=list)
    decoded: list[DecodeRequest] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    broken: bool = False

    @property
    def attempts(self) -> list[str]:
        """The attempts whose blocks were released, without what makes their ids secrets."""
        return [request_id.rpartition("-")[0] for request_id in self.released]

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/prefill", self._prefill)
        app.router.add_delete("/prefill/{request_id}", self._release)
        app.router.add_post("/decode", self._decode)
        app.router.add_get("/health", self._health)
        return app

    async def _prefill(self, request: web.Request) -> web.StreamResponse:
        body = PrefillRequest.read(await request.read())
        self.prefilled.append(body.request_id)
        if self.script:
            response = await self.script.pop(0)(request)
            self.broken = self.broken or response.status >= HTTPStatus.INTERNAL_SERVER_ERROR
            return response
        self.computed.add(body.request_id)
        reply = PrefillReply(step=Step.of(ANSWER[0], eos_token_id=2, last=body.max_tokens == 1))
        return web.Response(body=reply.written(), content_type="application/json")

    async def _decode(self, request: web.Request) -> web.StreamResponse:
        body = DecodeRequest.read(await request.read())
        self.decoded.append(body)
        if self.script:
            return await self.script.pop(0)(request)
        response = await room(request)
        for ticket in body.tickets[:-1]:
            await until(lambda: body.request_id in self.computed or self.gone(ticket["remote_engine_id"]))  # noqa: B023
            if body.request_id not in self.computed:
                await write(response, Again(again="scripted"))
        await until(lambda: body.request_id in self.computed)
        for token in ANSWER[:-1]:
            await write(response, Step(token=token))
        await write(response, Step(token=ANSWER[-1], finish_reason="length"))
        return response

    async def _release(self, request: web.Request) -> web.StreamResponse:
        self.released.append(request.match_info["request_id"])
        return web.Response(status=204)

    async def _health(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text=json.dumps({"introduction": any_ticket(self.name).to_params()}))


async def room(request: web.Request) -> web.StreamResponse:
    """A decode worker has room: the router may have the prompt computed."""
    response = web.StreamResponse()
    await response.prepare(request)
    return response


async def write(response: web.StreamResponse, line: Step | Again | Failure) -> None:
    await response.write(line.written() + b"\n")


def failing(kind: FailureKind, *, later: bool = False) -> Script:
    """It says so in place of an answer, or later, once it has had room for one."""

    async def fail(request: web.Request) -> web.StreamResponse:
        failure = Failure(kind=kind, message="scripted")
        if not later:
            return web.Response(body=failure.written(), status=STATUS[kind].http)
        response = await room(request)
        await write(response, failure)
        return response

    return fail


async def dies_after_one_step(request: web.Request) -> web.StreamResponse:
    response = await room(request)
    await write(response, Step(token=ANSWER[0]))
    assert request.transport is not None
    request.transport.abort()
    return response


async def crashes(_: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="Internal Server Error")


async def falls_silent(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


@dataclass
class Scene:
    """A router with two workers of each kind."""

    router: Router
    prefill: list[Scripted]
    decode: list[Scripted]

    def prompt(self, *, max_tokens: int = len(ANSWER), deadline_s: float = 30.0) -> Prompt:
        deadline = asyncio.get_running_loop().time() + deadline_s
        return Prompt(id="r", token_ids=[1, 2, 3], max_tokens=max_tokens, deadline=deadline)

    @property
    def decoded(self) -> list[DecodeRequest]:
        return [request for worker in self.decode for request in worker.decoded]

    @property
    def retries(self) -> float | None:
        """Those because of a prefill worker."""
        metrics = self.router.metrics.registry
        return metrics.get_sample_value("openai_server_retries_total", {"kind": FailureKind.PREFILL_AGAIN})


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    """Leaving it waits until all releases have been sent."""
    computed = set[str]()
    prefill, decode = ([Scripted(f"{role}-{index}", computed) for index in range(2)] for role in ("prefill", "decode"))
    async with AsyncExitStack() as stack:

        async def up(worker: Scripted) -> Worker:
            server = await stack.enter_async_context(TestServer(worker.app()))
            url, introduction = f"http://127.0.0.1:{server.port}", any_ticket(worker.name)
            return Worker(name=worker.name, url=url, up=True, introduction=introduction)

        of_prefill = Rotation("prefill", [await up(worker) for worker in prefill])
        of_decode = Rotation("decode", [await up(worker) for worker in decode])
        async with open_client() as client, asyncio.TaskGroup() as tasks:
            router = Router(prefill=of_prefill, decode=of_decode, client=client, tasks=tasks, metrics=RouterMetrics())
            workers = {worker.name: worker for worker in of_prefill.workers}
            broken = {worker.name: worker for worker in prefill}
            for worker in decode:
                worker.gone = lambda engine_id: broken[engine_id].broken or not workers[engine_id].up
            yield Scene(router, prefill, decode)


async def tokens_of(scene: Scene, **prompt: Any) -> list[int]:
    return await scene.router.whole(scene.prompt(**prompt), all_of)


async def streamed(scene: Scene) -> list[int]:
    return await all_of((await scene.router.stream(scene.prompt())).steps())


async def all_of(steps: AsyncIterator[Step]) -> list[int]:
    return [step.token async for step in steps]


class TestRouter:
    async def test_prefill_here_and_decode_there(self) -> None:
        async with scene() as s:
            assert await tokens_of(s, deadline_s=1000.0) == ANSWER
            (request,) = s.decoded
            ticket = Ticket.from_params(request.tickets[0])
            assert (ticket.engine_id, ticket.request_id) == ("prefill-0", s.prefill[0].prefilled[0])
            assert (request.prompt_count, request.max_tokens) == (3, 3)
            assert 900 < request.deadline_s <= 1000
            assert await tokens_of(s, max_tokens=1) == ANSWER[:1]
            assert s.decoded == [request], "one token needs no decode worker"
        assert s.prefill[0].released == []

    async def test_nothing_is_computed_before_there_is_room_for_the_answer(self) -> None:
        async with scene() as s:
            asked, roomy = asyncio.Event(), asyncio.Event()

            async def waits(request: web.Request) -> web.StreamResponse:
                asked.set()
                await roomy.wait()
                assert s.prefill[0].prefilled == []
                response = await room(request)
                await until(lambda: s.prefill[0].prefilled)  # and then before any step is there
                await write(response, Step(token=ANSWER[0], finish_reason="stop"))
                return response

            s.decode[0].script = [waits]
            request = asyncio.create_task(tokens_of(s), name="request")
            await asked.wait()
            roomy.set()
            assert await request == ANSWER[:1]

    async def test_a_request_that_can_never_be_answered_ends_the_decode_workers_wait_and_is_not_tried_again(
        self,
    ) -> None:
        async with scene() as s:
            left = asyncio.Event()

            async def waits(request: web.Request) -> web.StreamResponse:
                await room(request)
                try:
                    return await falls_silent(request)
                finally:
                    left.set()

            s.prefill[0].script = [failing(FailureKind.INVALID)]
            s.decode[0].script = [waits]
            with pytest.raises(AttemptError, match=r"^scripted$"):
                await tokens_of(s)
            await left.wait()
        assert s.prefill[1].prefilled == []

    async def test_a_worker_that_refuses_connections_is_left_out(self) -> None:
        async with scene() as s:
            dead = s.router.prefill.workers[0]
            dead.url = "http://127.0.0.1:1"
            assert await tokens_of(s) == ANSWER
            assert not dead.up
            assert await tokens_of(s) == ANSWER
        assert len(s.prefill[1].prefilled) == 2

    @pytest.mark.parametrize(
        ("answer_of", "script", "tickets", "released", "down"),
        [
            (streamed, failing(FailureKind.BUSY), ["prefill-0", "prefill-1"], [], []),
            (tokens_of, failing(FailureKind.PREFILL_AGAIN, later=True), ["prefill-0", "prefill-1"], ["r-1"], []),
            (tokens_of, dies_after_one_step, ["prefill-0", "prefill-1"], [], ["decode-0"]),
            (tokens_of, crashes, ["prefill-0"], ["r-1"], []),
        ],
        ids=["has no room for a stream", "cannot be loaded", "dies in the middle", "says nothing"],
    )
    async def test_what_fails_before_the_client_has_seen_anything_is_done_anew_elsewhere(
        self,
        answer_of: Callable[[Scene], Awaitable[list[int]]],
        script: Script,
        tickets: list[str],
        released: list[str],
        down: list[str],
    ) -> None:
        async with scene() as s:
            first = s.prefill[0] if script is crashes else s.decode[0]
            first.script = [script]
            assert await answer_of(s) == ANSWER
            assert sorted(request.tickets[0]["remote_engine_id"] for request in s.decoded) == tickets
            workers = [*s.router.prefill.workers, *s.router.decode.workers]
            assert [worker.name for worker in workers if not worker.up] == down
        assert (s.prefill[0].attempts, s.prefill[1].released) == (released, [])

    async def test_a_decode_worker_keeps_its_blocks_while_the_next_prefill_worker_is_asked(self) -> None:
        """One attempt: the load goes on with the next ticket, which the decode worker had from the beginning."""
        async with scene() as s:
            s.prefill[0].script = [failing(FailureKind.BUSY)]
            assert await tokens_of(s) == ANSWER
            (request,) = s.decoded
            assert [one["remote_engine_id"] for one in request.tickets] == ["prefill-0", "prefill-1"]
            assert s.prefill[0].prefilled == s.prefill[1].prefilled == [request.request_id]
            assert s.retries == 1
        assert s.prefill[0].attempts == ["r-1"]

    async def test_a_decode_worker_that_is_busy_is_avoided_even_if_it_is_its_turn_again(self) -> None:
        async with scene() as s:

            async def busy(request: web.Request) -> web.StreamResponse:
                s.router.decode.pick()  # another request takes the other worker's turn meanwhile
                return await failing(FailureKind.BUSY)(request)

            s.decode[0].script = [busy, busy]
            assert await tokens_of(s) == ANSWER
        assert [len(worker.decoded) for worker in s.decode] == [1, 1]

    async def test_gives_up_after_three_attempts_with_the_last_reason(self) -> None:
        async with scene() as s:
            for worker in s.decode:
                worker.script = [failing(FailureKind.PREFILL_AGAIN, later=True)] * 5
            with pytest.raises(AttemptError, match="decode-0: scripted") as caught:
                await tokens_of(s)
            assert caught.value.failure.kind is FailureKind.PREFILL_AGAIN
            assert (len({request.request_id for request in s.decoded}), s.retries) == (3, 2)
        assert sorted([*s.prefill[0].attempts, *s.prefill[1].attempts]) == ["r-1", "r-2", "r-3"]

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    @pytest.mark.parametrize("answer_of", [tokens_of, streamed])
    async def test_a_request_waits_for_the_successor_of_the_last_worker(
        self, role: str, answer_of: Callable[[Scene], Awaitable[list[int]]]
    ) -> None:
        """It was killed, perhaps under this request, and is started again."""
        async with scene() as s:
            rotation: Rotation = getattr(s.router, role)
            for worker in rotation.workers:
                rotation.lost(worker, asyncio.get_running_loop().time())
            asked = asyncio.create_task(answer_of(s), name="request")
            watching = s.router.watch()
            assert await asked == ANSWER
            for task in watching:
                task.cancel()

    async def test_it_waits_no_longer_than_its_deadline(self) -> None:
        async with scene() as s:
            for worker in s.router.decode.workers:
                s.router.decode.lost(worker, 0.0)
            with pytest.raises(AttemptError, match="deadline has passed"):
                await tokens_of(s, deadline_s=0.05)

    async def test_says_when_no_worker_is_up(self) -> None:
        async with scene() as s:
            s.router.worker_wait_s = 0.01
            for worker in s.router.decode.workers:
                s.router.decode.lost(worker, 0.0)
            with pytest.raises(AttemptError, match=r"no decode worker is up, nor came back within 0\.01 s") as caught:
                await tokens_of(s)
            assert caught.value.failure.kind is FailureKind.NO_WORKER

    async def test_a_stream_that_has_begun_is_not_started_over(self) -> None:
        async with scene() as s:
            s.decode[0].script = [dies_after_one_step]
            stream = await s.router.stream(s.prompt())
            seen = []
            with pytest.raises(AttemptError, match="decode-0 was lost") as caught:
                async for step in stream.steps():
                    seen.append(step.token)
            assert caught.value.failure.kind is FailureKind.WORKER_LOST
            assert seen == ANSWER[:1]
            assert len(s.decoded) == 1

    @pytest.mark.parametrize("silent", ["prefill", "decode"])
    async def test_the_deadline_ends_every_wait(self, silent: str) -> None:
        async with scene() as s:
            s.prefill[0].script = [falls_silent] if silent == "prefill" else []
            s.decode[0].script = [falls_silent] if silent == "decode" else []
            with pytest.raises(AttemptError, match="deadline has passed") as caught:
                await tokens_of(s, deadline_s=0.3)
            assert caught.value.failure.kind is FailureKind.DEADLINE
        assert s.prefill[0].attempts == ([] if silent == "decode" else ["r-1"]), "without room nothing is computed"
        assert s.prefill[1].prefilled == []

    async def test_a_client_that_leaves_releases_the_blocks(self) -> None:
        async with scene() as s:
            asked = asyncio.Event()

            async def wait(request: web.Request) -> web.StreamResponse:
                await room(request)
                await until(lambda: s.prefill[0].prefilled)
                asked.set()
                return await falls_silent(request)

            s.decode[0].script = [wait]
            request = asyncio.create_task(tokens_of(s), name="request")
            await asked.wait()
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
        assert s.prefill[0].attempts == ["r-1"]

    async def test_a_worker_that_answers_again_is_taken_back(self) -> None:
        async with scene() as s:
            workers = [*s.router.prefill.workers, *s.router.decode.workers]
            for worker in workers:
                worker.up = False
            watching = s.router.watch()
            await until(lambda: all(worker.up for worker in workers))
            for task in watching:
                task.cancel()
            assert await tokens_of(s) == ANSWER
