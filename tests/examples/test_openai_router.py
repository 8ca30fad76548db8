"""The example server's router, when workers fail. The workers are scripted here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from disaggregated.failures import RequestTooLongError, failure_of
from disaggregated.messages import AnswerRequest, DecodeRequest, Failure, FailureKind, Offered, PrefillRequest, Step
from openai_server import router as router_module
from openai_server.attempts import AttemptError, answer
from openai_server.failures import STATUS
from openai_server.router import Router, Worker
from paged_engine import OutOfBlocksError
from tests_support import turns, until

from kvflow import errors

ANSWER = [11, 12, 13]
Script = Callable[[web.Request], Awaitable[web.StreamResponse]]


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
    """A worker of either kind. A script decides its next answers; without a script it answers normally."""

    name: str
    script: list[Script] = field(default_factory=list)
    prefilled: list[PrefillRequest] = field(default_factory=list)
    decoded: list[DecodeRequest] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/prefill", self._prefill)
        app.router.add_delete("/prefill/{request_id}", self._release)
        app.router.add_post("/decode", self._decode)
        app.router.add_get("/health", self._health)
        return app

    async def _prefill(self, request: web.Request) -> web.StreamResponse:
        body = PrefillRequest.read(await request.read())
        self.prefilled.append(body)
        if self.script:
            return await self.script.pop(0)(request)
        offered = Offered(ticket={"worker": self.name, "request_id": body.request_id})
        return web.Response(body=offered.written(), content_type="application/json")

    async def _decode(self, request: web.Request) -> web.StreamResponse:
        self.decoded.append(DecodeRequest.read(await request.read()))
        if self.script:
            return await self.script.pop(0)(request)
        return await written(request, *(Step(token=token) for token in ANSWER[:-1]), LAST)

    async def _release(self, request: web.Request) -> web.StreamResponse:
        self.released.append(request.match_info["request_id"])
        return web.Response(status=204)

    async def _health(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text=json.dumps({"address": f"tcp://{self.name}:1"}))


LAST = Step(token=ANSWER[-1], finish_reason="length")


async def written(request: web.Request, *lines: Step | Failure) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for line in lines:
        await response.write(line.written() + b"\n")
    return response


def failing(kind: FailureKind, *, after: int = 0) -> Script:
    """Return a script that fails at once, or after `after` steps."""

    async def fail(request: web.Request) -> web.StreamResponse:
        failure = Failure(kind=kind, message="scripted")
        if after:
            return await written(request, *(Step(token=token) for token in ANSWER[:after]), failure)
        return web.Response(body=failure.written(), status=STATUS[kind].http)

    return fail


async def dies(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def babbles(_: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>\n")


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
    retried: list[str] = field(default_factory=list)

    async def tokens(self, deadline_s: float = 30.0) -> list[int]:
        """The tokens of an answer."""
        request = AnswerRequest(request_id="r", prompt=[1, 2, 3], max_tokens=3, deadline_s=deadline_s)
        return [step.token async for step in answer(request, self.router.attempt, self.retried.append)]


@asynccontextmanager
async def scene(*, share: bool = False) -> AsyncIterator[Scene]:
    """Leaving it waits until all releases have been sent."""
    scripted = {role: [Scripted(f"{role}-{index}") for index in range(2)] for role in ("prefill", "decode")}
    async with AsyncExitStack() as stack:
        workers = []
        for role, of_role in scripted.items():
            for one in of_role:
                server = await stack.enter_async_context(TestServer(one.app()))
                workers.append(Worker(one.name, role, f"http://127.0.0.1:{server.port}"))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        router = Router(workers, client, tasks, share=share)
        for worker in workers:
            router.note_health(worker, {"address": f"tcp://{worker.name}:1"})
        yield Scene(router, **scripted)


async def test_the_prompt_is_computed_here_and_the_answer_there() -> None:
    async with scene(share=True) as s:
        assert await s.tokens(deadline_s=1000.0) == ANSWER
        ((asked,), (request,)) = (s.prefill[0].prefilled, s.decode[0].decoded)
        assert request.ticket == {"worker": "prefill-0", "request_id": asked.request_id}
        assert (request.request_id, request.prompt_count, request.max_tokens) == (asked.request_id, 3, 3)
        assert 900 < request.deadline_s <= asked.deadline_s <= 1000
        assert (asked.prompt, asked.neighbours) == ([1, 2, 3], ["tcp://prefill-1:1"])
        assert await s.tokens() == ANSWER
        assert len(s.prefill[1].prefilled) == len(s.decode[1].decoded) == 1, "they take turns"
    assert [worker.released for worker in s.prefill] == [[], []], "a prompt that was read is not released"


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    "script", [dies, crashes, babbles, failing(FailureKind.BUSY), failing(FailureKind.PREFILL_AGAIN)]
)
async def test_what_fails_before_the_first_token_is_tried_again_elsewhere(role: str, script: Script) -> None:
    async with scene() as s:
        first, other = getattr(s, role)
        first.script = [script]
        assert await s.tokens() == ANSWER
        assert len(s.retried) == 1
        if role == "prefill" or s.retried != [FailureKind.PREFILL_AGAIN]:
            assert len(other.prefilled) + len(other.decoded) == 1
    (attempt,) = (asked.request_id for asked in s.prefill[0].prefilled)
    assert s.prefill[0].released == [attempt], "nobody will load it"


async def test_a_worker_whose_connection_fails_is_left_out_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "PROBE_S", 0.0)
    async with scene() as s:
        s.decode[0].script = [dies]
        assert await s.tokens() == ANSWER
        assert s.router.health()["status"] == "degraded"
        (lost,) = [worker for worker in s.router.workers if not worker.up]
        prefill, other = s.router.up("prefill")
        s.router.note_health(prefill, {})
        s.router.note_health(other, {})
        assert s.router.health()["status"] == "down"
        watching = asyncio.create_task(s.router.watch(lost))
        waiting = asyncio.create_task(s.tokens())
        await turns(3)
        s.router.note_health(prefill, {"address": "tcp://prefill-0:1"})
        assert await waiting == ANSWER, "a request waits for a worker that comes back"
        await until(lambda: lost.up)
        watching.cancel()
        await asyncio.wait([watching])


async def test_after_three_attempts_the_last_failure_is_the_answer() -> None:
    async with scene() as s:
        for worker in s.decode:
            worker.script = [failing(FailureKind.BUSY)] * 3
        with pytest.raises(AttemptError, match=r"decode-\d: scripted") as caught:
            await s.tokens()
        assert caught.value.failure.kind is FailureKind.BUSY
        assert s.retried == [FailureKind.BUSY] * 2
    assert sum(len(worker.released) for worker in s.prefill) == 3


async def test_what_can_never_be_answered_is_not_tried_again() -> None:
    async with scene() as s:
        s.prefill[0].script = [failing(FailureKind.INVALID)]
        with pytest.raises(AttemptError, match=r"^scripted$"):
            await s.tokens()
        assert s.retried == []


async def test_a_stream_that_has_begun_is_not_started_over() -> None:
    async with scene() as s:
        s.decode[0].script = [failing(FailureKind.WORKER_FAILED, after=1)]
        with pytest.raises(AttemptError, match="scripted"):
            await s.tokens()
        assert s.retried == []
    assert s.prefill[0].released == [], "its blocks were read"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_deadline_ends_every_wait_and_releases_the_blocks(role: str) -> None:
    async with scene() as s:
        getattr(s, role)[0].script = [falls_silent]
        with pytest.raises(AttemptError) as caught:
            await s.tokens(deadline_s=0.3)
        assert caught.value.failure.kind is FailureKind.DEADLINE
    assert len(s.prefill[0].released) == 1


async def test_where_no_worker_comes_back_the_client_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "WORKER_WAIT_S", 0.05)
    async with scene() as s:
        for worker in s.router.up("decode"):
            s.router.note_health(worker, {})
        with pytest.raises(AttemptError, match="no decode worker is up"):
            await s.tokens()


async def test_a_client_that_leaves_releases_the_blocks() -> None:
    async with scene() as s:
        s.decode[0].script = [falls_silent]
        asking = asyncio.create_task(s.tokens())
        await until(lambda: s.decode[0].decoded)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert len(s.prefill[0].released) == 1
