"""The workers as a router sees them, over HTTP: picks two for each attempt, notices who is lost, and who is back.

Theory: whatever goes wrong before the client has seen a token, the next attempt starts over with a fresh prefill,
avoiding the worker that failed; the request's deadline and `attempts_max` bound it. Once tokens have been streamed a
failure is the client's to handle. A worker is lost when a connection to it fails; the watch brings it back when it
answers again, and requests wait for that where no other worker is up. Blocks that were prefilled and will not be loaded
are released.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp
import msgspec
from disaggregated.messages import Again, DecodeRequest, Failure, FailureKind, PrefillReply, PrefillRequest, Step

import kvflow
from openai_server.attempts import AttemptError, Attempts, Prompt, Stream, hand_over
from openai_server.http_server import CLIENT_KEEP_ALIVE_S
from openai_server.metrics import RouterMetrics
from openai_server.rotation import Rotation, Worker

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# The deadline of each request bounds its reads.
REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=2.0)
RELEASE_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
PROBE_TICK_S = 0.1


def open_client() -> aiohttp.ClientSession:
    """Connections to workers, as many as there are requests; idle ones are kept for the next."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=CLIENT_KEEP_ALIVE_S),
        headers={"Content-Type": "application/json"},
        timeout=REQUEST_TIMEOUT,
    )


@dataclass(slots=True, eq=False)
class Router:
    """Knows all workers, and asks them through `client` (see `open_client`)."""

    prefill: Rotation
    decode: Rotation
    client: aiohttp.ClientSession
    tasks: asyncio.TaskGroup
    """Where releases and the watch run."""
    metrics: RouterMetrics
    attempts_max: int = 3
    share_prefixes: bool = False
    """Whether prefill workers are told of each other, to load what one has computed of a prompt."""
    worker_wait_s: float = 30.0
    """How long a request waits for a worker where none is up, within its deadline: one that died is started again."""
    _came_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a worker comes up; then there is another one."""

    async def whole(self, prompt: Prompt, read: Callable[[AsyncIterator[Step]], Awaitable[Result]]) -> Result:
        """See `Answers`."""
        return await self._attempts.whole(prompt, read)

    async def stream(self, prompt: Prompt) -> Stream:
        """See `Answers`."""
        return await self._attempts.stream(prompt)

    @property
    def _attempts(self) -> Attempts:
        return Attempts(attempt=self._attempt, retried=self.metrics.retried, attempts_max=self.attempts_max)

    async def _attempt(self, request_id: str, prompt: Prompt, avoid: set[Hashable]) -> AsyncGenerator[Step, None]:
        prefills = await self._prefills(avoid)
        decoding = partial(self._decoding, prefills[0].worker, avoid)
        async with aclosing(hand_over(request_id, prompt, prefills, decoding, self._start_task)) as steps:
            async for step in steps:
                yield step

    async def _prefills(self, avoid: set[Hashable]) -> list[_Prefill]:
        """The worker whose turn it is, and those that are to compute the prompt should it fail."""
        first = await self._pick(self.prefill, avoid)
        others = [one for one in self.prefill.up if one is not first and one not in avoid]
        return [_Prefill(self, one) for one in (first, *others[: self.attempts_max - 1])]

    def _start_task(self, body: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self.tasks.create_task(body, name=name)

    async def _pick(self, rotation: Rotation, avoid: set[Hashable]) -> Worker:
        """The worker whose turn it is; where none is up, the first one that comes back. Raises AttemptError."""
        try:
            async with asyncio.timeout(self.worker_wait_s):
                while (worker := rotation.pick(avoid)) is None:
                    await self._came_up.wait()
                return worker
        except TimeoutError:
            message = f"no {rotation.role} worker is up, nor came back within {self.worker_wait_s:g} s; try again"
            raise AttemptError(Failure(kind=FailureKind.NO_WORKER, message=message)) from None

    async def ask_prefill(self, worker: Worker, request: PrefillRequest) -> PrefillReply:
        if self.share_prefixes:
            others = [one.introduction for one in self.prefill.up if one is not worker]
            told = [other.address for other in others if other is not None]
            request = msgspec.structs.replace(request, neighbours=told)
        with self._losses(self.prefill, worker):
            async with self.client.post(f"{worker.url}/prefill", data=request.written()) as response:
                body = await response.read()
        if response.status != HTTPStatus.OK:
            raise AttemptError(_failure_in(response, body, worker), worker)
        return PrefillReply.read(body)

    @asynccontextmanager
    async def _decoding(
        self, prefill: Worker, avoid: set[Hashable], request: DecodeRequest
    ) -> AsyncIterator[AsyncGenerator[Step | Again, None]]:
        decode = await self._pick(self.decode, avoid)
        with self._losses(self.decode, decode):
            async with self.client.post(f"{decode.url}/decode", data=request.written()) as response:
                if response.status != HTTPStatus.OK:
                    raise _failed(_failure_in(response, await response.read(), decode), prefill, decode)
                yield _steps_in(response, prefill, decode, self.metrics.retried)

    @contextmanager
    def _losses(self, rotation: Rotation, worker: Worker) -> Iterator[None]:
        """A connection that fails means that the worker is lost."""
        try:
            yield
        except aiohttp.ClientError as error:
            if worker.up:
                logger.info("%s is down: a request has lost it", worker.name)
            rotation.lost(worker, asyncio.get_running_loop().time())
            message = f"{worker.name} was lost: {type(error).__name__} {error}".rstrip()
            raise AttemptError(Failure(kind=FailureKind.WORKER_LOST, message=message), worker) from error

    def release(self, worker: Worker, request_id: str) -> None:
        """Tell a prefill worker that nobody is going to load; if it cannot be told the lease runs out by itself."""

        async def release() -> None:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with self.client.delete(f"{worker.url}/prefill/{request_id}", timeout=RELEASE_TIMEOUT):
                    pass

        self.tasks.create_task(release(), name=f"release {request_id}")

    def watch(self) -> list[asyncio.Task[None]]:
        """Probe all workers, until these tasks are cancelled."""
        return [
            self.tasks.create_task(self._watch(rotation, worker), name=f"watch {worker.name}")
            for rotation in (self.prefill, self.decode)
            for worker in rotation.workers
        ]

    async def _watch(self, rotation: Rotation, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if worker.probe_at_s <= loop.time():
                was_up, health = worker.up, await self._probe(worker)
                healthy = health is not None
                rotation.probed(worker, loop.time(), healthy=healthy, introduction=_introduction_in(health or {}))
                if healthy and not was_up:
                    self._came_up.set()
                    self._came_up = asyncio.Event()
                if healthy is not was_up:
                    logger.info("%s is %s", worker.name, "up" if healthy else "down: it does not answer")
            await asyncio.sleep(PROBE_TICK_S)

    async def _probe(self, worker: Worker) -> dict[str, Any] | None:
        """What it says of itself; None if it is not to be used."""
        try:
            async with self.client.get(f"{worker.url}/health", timeout=PROBE_TIMEOUT) as response:
                said = json.loads(await response.read())
                return said if response.status == HTTPStatus.OK and isinstance(said, dict) else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class _Prefill:
    """See `attempts.PrefillWorker`."""

    router: Router
    worker: Worker

    @property
    def introduction(self) -> kvflow.Ticket:
        assert self.worker.introduction is not None, "it is up, so it has been probed"
        return self.worker.introduction

    async def ask(self, request: PrefillRequest) -> PrefillReply:
        return await self.router.ask_prefill(self.worker, request)

    def give_up(self, request_id: str) -> None:
        self.router.release(self.worker, request_id)


async def _steps_in(
    response: aiohttp.ClientResponse, prefill: Worker, decode: Worker, retried: Callable[[str], None]
) -> AsyncGenerator[Step | Again, None]:
    """The steps of a decode worker's answer, up to the last one."""
    async for line in response.content:
        try:
            step = _line_in(line)
        except msgspec.DecodeError:
            raise _failed(_failure_in(response, line, decode), prefill, decode) from None
        if isinstance(step, Again):
            retried(FailureKind.PREFILL_AGAIN)
        yield step
        if isinstance(step, Step) and step.finish_reason is not None:
            return
    message = f"{decode.name} ended its answer early"
    raise AttemptError(Failure(kind=FailureKind.WORKER_FAILED, message=message), decode)


def _line_in(line: bytes) -> Step | Again:
    try:
        return Step.read(line)
    except msgspec.DecodeError:
        return Again.read(line)


def _failed(failure: Failure, prefill: Worker, decode: Worker) -> AttemptError:
    """What a decode worker says: it may be the prefill worker that the next attempt should avoid."""
    return AttemptError(failure, prefill if failure.kind is FailureKind.PREFILL_AGAIN else decode)


def _introduction_in(health: dict[str, Any]) -> kvflow.Ticket | None:
    """Where the blocks of a worker are to be had, if it is one that prefills."""
    said = health.get("introduction")
    return None if said is None else kvflow.Ticket.from_params(said)


def _failure_in(response: aiohttp.ClientResponse, body: bytes, worker: Worker) -> Failure:
    """What a worker says of a failure; if it says nothing that we know, it failed."""
    try:
        failure = Failure.read(body)
    except msgspec.DecodeError:
        return Failure(kind=FailureKind.WORKER_FAILED, message=f"{worker.name} answered {response.status}")
    if failure.kind is FailureKind.INVALID:  # no worker's affair, and its message is for the client
        return failure
    return Failure(kind=failure.kind, message=f"{worker.name}: {failure.message}")
